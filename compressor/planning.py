"""Which blocks to replace by what: rank them by predicted damage, spend the budget, measure, adjust."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from compressor.blocks import find_blocks
from compressor.budget import Budget
from compressor.errors import BudgetError, InputError
from compressor.evaluating import Evaluation, Losses, compare, window_losses
from compressor.fitting import Calibration, Ranks, fit, fit_ladder, replacement_parameters
from compressor.measuring import BlockProfile, Profile
from compressor.modeling_compressor import Replacement
from compressor.models import source_of
from compressor.patching import patch, patched
from compressor.progress import Progress
from compressor.sensitivity import Damage, predict_damage, sample_gradients
from compressor.text import Text

LADDER = (0.45, 0.375, 0.3125, 0.25, 0.1875, 0.125, 0.09375, 0.0625, 0.03125, 0.015625)  # ranks per width
SAFE_NATS = 0.02  # without a budget, a block is safe when its linear map is predicted to cost less than this
OUTLIER_GAP = 0.2  # R²_lin above the stream-weighted one by this much rests on a few rows
MOST_TRIALS = 7
MOST_FILLS = 4
KEPT = -1  # the rank of a block that is not replaced
CLOSE_ENOUGH = 0.9  # of the budget


@dataclass(frozen=True)
class Verdict:
    """Whether a block may be touched (safe, costly, unsafe), and why, in one line."""

    word: str
    reason: str


@dataclass(frozen=True)
class Option:
    """One candidate for one block."""

    index: int
    rank: int | None
    saved: int
    damage: float  # predicted nats per token


@dataclass(frozen=True)
class Trial:
    """One plan that was fitted and measured on the selection text."""

    ranks: dict[int, int | None]
    predicted: float
    evaluation: Evaluation
    fits: bool


def judge(profile: BlockProfile, damage: Damage, limit: float = SAFE_NATS) -> Verdict:
    """Never on R²_lin alone: outlier rows, and an error far outside the quadratic regime, forbid a block."""
    if profile.r2_stream < profile.r2_lin - OUTLIER_GAP:
        return Verdict(
            "unsafe",
            f"outlier rows: R²_lin {profile.r2_lin:.2f} falls to {profile.r2_stream:.2f} when rows count as the next "
            f"norm sees them (0.1 % of the rows carry {profile.top_row_share:.0%} of the variance, effective rank "
            f"{profile.effective_rank:.1f})",
        )
    if damage.factorised > 1 and damage.factorised > 10 * damage.linear:
        return Verdict(
            "unsafe",
            f"outlier errors: the two damage estimates disagree ({damage.linear:.3f} and {damage.factorised:.1f} nats)",
        )
    cost = f"its linear map is predicted to cost {damage.linear:.4f} nats per token"
    return Verdict("safe" if damage.linear <= limit else "costly", cost)


def predict(
    model: Any, profile: Profile, text: Text, progress: Progress
) -> tuple[dict[int, Tensor], dict[int, Damage]]:
    """The output metric and the predicted damage of every block, from one backward pass over held-out windows."""
    gradients = sample_gradients(model, [p.block for p in profile.blocks], text.held_out, progress)
    metrics: dict[int, Tensor] = {}
    damages: dict[int, Damage] = {}
    for p in progress.track("predict", profile.blocks, len(profile.blocks)):
        rows = gradients.pop(p.block.index)
        metrics[p.block.index] = rows.metric
        damages[p.block.index] = predict_damage(p, fit_ladder(p.fit, p.held, rows.metric), rows)
    return metrics, damages


def ladder_of(width: int) -> list[int | None]:
    """Full linear map, then fewer and fewer ranks, then the bias alone."""
    ranks = sorted({round(width * share) for share in LADDER} - {0}, reverse=True)
    return [None, *(r for r in ranks if 2 * r < width), 0]


def options_of(profile: BlockProfile, damage: Damage) -> list[Option]:
    block = profile.block
    return [
        Option(
            block.index,
            rank,
            block.parameters - replacement_parameters(block.width, rank),
            damage.linear if rank is None else damage.by_rank[rank].item(),
        )
        for rank in ladder_of(block.width)
    ]


def efficient(options: list[Option]) -> list[Option]:
    """The lower convex hull of damage over parameters saved: what a price per nat could make one choose."""
    hull: list[Option] = []
    for option in sorted(options, key=lambda o: (o.saved, -o.damage)):
        if option.saved <= 0:
            continue
        while hull and (hull[-1].damage >= option.damage or not convex(hull, option)):
            hull.pop()
        hull.append(option)
    return hull


def convex(hull: list[Option], option: Option) -> bool:
    saved, damage = (hull[-2].saved, hull[-2].damage) if len(hull) > 1 else (0, 0.0)
    last = hull[-1]
    return (last.damage - damage) * (option.saved - last.saved) < (option.damage - last.damage) * (last.saved - saved)


def sequence(hulls: list[list[Option]]) -> list[tuple[dict[int, int | None], float]]:
    """Plans that contain each other, each one step of the best damage per parameter further, with predicted damage."""
    steps: list[tuple[float, Option, float]] = []
    for hull in hulls:
        saved, damage = 0, 0.0
        for option in hull:
            steps.append(((option.damage - damage) / (option.saved - saved), option, option.damage - damage))
            saved, damage = option.saved, option.damage
    plans: list[tuple[dict[int, int | None], float]] = []
    ranks: dict[int, int | None] = {}
    total = 0.0
    for _, option, more in sorted(steps, key=lambda step: (step[0], step[1].index, step[1].saved)):
        ranks = ranks | {option.index: option.rank}
        total += more
        plans.append((ranks, total))
    return plans


@dataclass(frozen=True)
class Plan:
    """What to put where, why, and what it measured on the selection text. `fits` are the modules themselves."""

    ranks: dict[int, int | None]
    verdicts: dict[int, Verdict]
    damages: dict[int, Damage]
    selection: Evaluation
    trials: list[Trial]
    fits: dict[int, Replacement]


class Planner:
    """Search for the plan that saves most within a budget; a second search with less to spend reuses the trials."""

    def __init__(
        self,
        model: Any,
        profile: Profile,
        text: Text,
        budget: Budget,
        *,
        batch_size: int = 8,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> None:
        self.model, self.text = model, text
        self.budget, self.batch_size, self.seed = budget, batch_size, seed
        self.progress = progress or Progress()
        self.dtype = source_of(model).dtype
        self.blocks = [p.block for p in profile.blocks]
        self.metrics, self.damages = predict(model, profile, text, self.progress)
        self.verified = window_losses(model, text.verification.windows, batch_size, self.progress, "verify")
        # Perplexities of two texts differ; what a budget means on one is carried to the other in nats per token.
        self.allowed = budget.dppl(self.verified.perplexity)
        self.limit = math.log1p(self.allowed / self.verified.perplexity)
        self.verdicts = {p.block.index: judge(p, self.damages[p.block.index], self.limit) for p in profile.blocks}
        usable = [p for p in profile.blocks if self.verdicts[p.block.index].word != "unsafe"]
        options = [options_of(p, self.damages[p.block.index]) for p in usable]
        rows = [[o for o in row if o.damage <= 2 * self.limit and o.saved > 0] for row in options]
        self.options = [row for row in rows if row]
        self.plans = sequence([efficient(row) for row in self.options])
        self.singles = sorted((min(row, key=lambda o: o.damage) for row in options), key=lambda o: o.damage)
        self.before: Losses | None = None
        self.calibration: Calibration | None = None
        self.trials: list[Trial] = []
        self.tried: dict[tuple[tuple[int, int | None], ...], tuple[Trial, dict[int, Replacement]]] = {}

    def spend(self, evaluation: Evaluation, target: float) -> float:
        """The share of the target used: the point estimate plus the half-width to be expected on verification text."""
        nats = math.log1p(evaluation.delta / evaluation.baseline)
        if self.budget.confidence > 0:
            widths = self.text.selection.tokens / self.text.verification.tokens
            nats += math.log1p(max(0.0, evaluation.upper - evaluation.delta) / evaluation.compressed) * widths**0.5
        return nats / target

    def attempt(self, ranks: Ranks, predicted: float, target: float) -> Trial:
        """Fit one plan in order and measure it on the selection text."""
        key = tuple(sorted(ranks.items()))
        if key not in self.tried:
            windows, step = self.text.selection.windows, "search"
            if self.calibration is None:
                self.calibration = Calibration(self.model, self.blocks, self.text, self.batch_size)
                self.before = window_losses(self.model, windows, self.batch_size, self.progress, step)
            assert self.before is not None
            fits = fit(self.calibration, ranks, self.metrics, self.dtype, self.progress)
            with patched(self.model, self.blocks, fits):
                after = window_losses(self.model, windows, self.batch_size, self.progress, step)
            evaluation = compare(self.before, after, self.budget.confidence, self.seed)
            trial = Trial(dict(ranks), predicted, evaluation, self.spend(evaluation, target) <= 1)
            self.trials.append(trial)
            self.tried[key] = (trial, fits)
            names = ", ".join(f"{i}:{name_of(r)}" for i, r in sorted(ranks.items()))
            self.progress.say(f"  tried {names}: selection ΔPPL {evaluation.delta:+.3f}")
        return self.tried[key][0]

    def search(self, tighten: float = 1.0) -> Plan:
        """The largest plan whose measured cost fits `tighten` times the budget, or a BudgetError that says how near."""
        target = self.limit * tighten
        best = bracket(
            self.plans,
            target,
            lambda k: self.spend(self.attempt(*self.plans[k], target).evaluation, target),
        )
        if best is not None:
            return self.plan_of(self.fill(*self.plans[best], target))
        for option in self.singles[:3]:
            trial = self.attempt({option.index: option.rank}, option.damage, target)
            if self.spend(trial.evaluation, target) <= 1:
                return self.plan_of(trial.ranks)
        raise BudgetError(self.explain_failure())

    def fill(self, ranks: Ranks, predicted: float, target: float) -> Ranks:
        """Spend what a plan leaves over: go further in the block that saves most and is predicted to fit."""
        refused: dict[int, int] = {}  # block → parameters saved by an option that did not fit
        for _ in range(MOST_FILLS):
            used = self.spend(self.attempt(ranks, predicted, target).evaluation, target)
            if used >= CLOSE_ENOUGH:
                break
            left = (1 - used) * target / max(1.0, used * target / predicted)
            moves = []
            for row in self.options:
                now = next((o for o in row if ranks.get(o.index, KEPT) == o.rank), Option(row[0].index, None, 0, 0.0))
                most = refused.get(now.index, math.inf)
                further = [o for o in row if now.saved < o.saved < most and o.damage - now.damage <= left]
                moves += [(o.saved - now.saved, o, o.damage - now.damage) for o in further]
            if not moves:
                break
            _, option, more = max(moves, key=lambda move: (move[0], -move[1].index))
            larger = {**ranks, option.index: option.rank}
            if self.spend(self.attempt(larger, predicted + more, target).evaluation, target) <= 1:
                ranks, predicted = larger, predicted + max(more, 0.0)
            else:
                refused[option.index] = option.saved
        return ranks

    def verify(self, plan: Plan) -> Evaluation:
        """The plan's cost on the verification text, which no search has seen."""
        windows = self.text.verification.windows
        with patched(self.model, self.blocks, plan.fits):
            after = window_losses(self.model, windows, self.batch_size, self.progress, "verify")
        return compare(self.verified, after, self.budget.confidence, self.seed)

    def plan_of(self, ranks: Ranks) -> Plan:
        trial, fits = self.tried[tuple(sorted(ranks.items()))]
        return Plan(trial.ranks, self.verdicts, self.damages, trial.evaluation, self.trials, fits)

    def explain_failure(self) -> str:
        if not self.trials:
            return "no replacement fits the budget: every block is unsafe to touch"
        nearest = min(self.trials, key=lambda t: t.evaluation.delta)
        names = ", ".join(f"{i} ({name_of(r)})" for i, r in sorted(nearest.ranks.items()))
        found = nearest.evaluation
        return (
            f"no replacement fits the budget {self.budget}: closest was block {names} with ΔPPL {found.delta:+.3f} "
            f"(upper end {found.upper:+.3f}) on the selection text, windows of {found.seq_len} tokens; nothing written"
        )


def name_of(rank: int | None) -> str:
    return "linear" if rank is None else f"rank {rank}" if rank else "bias"


def bracket(
    plans: list[tuple[dict[int, int | None], float]], target: float, spend: Callable[[int], float]
) -> int | None:
    """The last plan of a growing sequence that spends at most 1, found by corrected prediction and bisection."""
    low, high, scale = -1, len(plans), 1.0
    for trial in range(MOST_TRIALS):
        if high - low <= 1:
            break
        fitting = [k for k in range(low + 1, high) if scale * plans[k][1] <= target]
        guess = max(fitting, default=low + 1) if trial % 3 != 2 else (low + high) // 2
        used = spend(guess)
        scale = min(max(used * target / plans[guess][1], 0.2), 20.0)
        if used > 1:
            high = guess
        else:
            low = guess
            if used >= CLOSE_ENOUGH:
                break
    return low if low >= 0 else None


def plan(
    model: Any,
    profile: Profile,
    text: Text,
    *,
    max_dppl: str | float,
    confidence: float = 0.95,
    batch_size: int = 8,
    seed: int = 0,
    progress: Progress | None = None,
) -> Plan:
    """Search for the largest plan inside the budget. The model is left as it was; BudgetError when nothing fits."""
    budget = Budget.parse(max_dppl, confidence)
    planner = Planner(model, profile, text, budget, batch_size=batch_size, seed=seed, progress=progress)
    return planner.search()


def fit_ranks(
    model: Any, ranks: Ranks, text: Text, *, batch_size: int = 8, progress: Progress | None = None
) -> dict[int, Replacement]:
    """The replacements that a search would fit for these ranks; the model is left as it was."""
    progress = progress or Progress()
    blocks = find_blocks(model)
    known = {block.index: block.width for block in blocks}
    for index, rank in ranks.items():
        if index not in known:
            raise InputError(f"the plan replaces block {index}, but the model has blocks 0 to {len(blocks) - 1}")
        if rank is not None and rank > known[index]:
            raise InputError(f"the plan wants rank {rank} in block {index}, whose width is {known[index]}")
    metrics: dict[int, Tensor] = {}
    if any(ranks.values()):  # only low-rank maps weigh their output directions
        gradients = sample_gradients(model, blocks, text.held_out, progress)
        metrics = {index: g.metric for index, g in gradients.items()}
    calibration = Calibration(model, blocks, text, batch_size)
    return fit(calibration, ranks, metrics, source_of(model).dtype, progress)


def apply(model: Any, plan: Plan | Ranks, text: Text, *, batch_size: int = 8, progress: Progress | None = None) -> Any:
    """Put the replacements of a plan into the model, for good. Given ranks alone, they are fitted first."""
    fits = (
        plan.fits if isinstance(plan, Plan) else fit_ranks(model, plan, text, batch_size=batch_size, progress=progress)
    )
    patch(model, find_blocks(model), fits)
    return model
