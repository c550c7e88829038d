"""Which blocks to replace by what: rank them by predicted damage, spend the budget, measure, adjust."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from compressor.blocks import find_blocks
from compressor.budget import Budget
from compressor.errors import BudgetError, InputError
from compressor.evaluating import Evaluation, Losses, compare, window_losses
from compressor.fitting import Calibration, Ranks, fit, fit_ladder
from compressor.frontier import CLOSE_ENOUGH, Option, bracket, efficient, options_of, sequence
from compressor.measuring import Profile
from compressor.modeling_compressor import Replacement
from compressor.models import source_of
from compressor.patching import patch, patched
from compressor.progress import Progress
from compressor.sensitivity import Damage, predict_damage, sample_gradients
from compressor.text import Text
from compressor.verdicts import Verdict, judge

MOST_FILLS = 4
KEPT = -1  # the rank of a block that is not replaced


@dataclass(frozen=True)
class Trial:
    """One plan that was fitted and measured on the selection text."""

    ranks: dict[int, int | None]
    predicted: float
    evaluation: Evaluation


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


@dataclass(frozen=True)
class Plan:
    """What to put where, why, and what it measured on the selection text. `fits` are the modules themselves."""

    ranks: dict[int, int | None]
    predicted: float  # nats per token
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
        self.tried: dict[tuple[tuple[int, int | None], ...], tuple[Trial, dict[int, Replacement]]] = {}

    def spend(self, evaluation: Evaluation, target: float) -> float:
        """The share of the target used: the point estimate plus the half-width to be expected on verification text."""
        nats = math.log1p(evaluation.delta / evaluation.baseline)
        if self.budget.confidence > 0:
            widths = self.text.selection.tokens / self.text.verification.tokens
            nats += math.log1p(max(0.0, evaluation.upper - evaluation.delta) / evaluation.compressed) * widths**0.5
        return nats / target

    def attempt(self, ranks: Ranks, predicted: float) -> Evaluation:
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
            self.tried[key] = (Trial(dict(ranks), predicted, evaluation), fits)
            self.progress.say(f"  tried {name_all(ranks)}: selection ΔPPL {evaluation.delta:+.3f}")
        return self.tried[key][0].evaluation

    def search(self, tighten: float = 1.0, ceiling: float = math.inf) -> Plan:
        """The largest plan whose measured cost fits `tighten` times the budget, or a BudgetError that says how near.

        `ceiling` bounds the predicted damage: a plan that verification text refused must not come back.
        """
        target = self.limit * tighten
        plans = [plan for plan in self.plans if plan[1] < ceiling]
        best = bracket(plans, target, lambda k: self.spend(self.attempt(*plans[k]), target))
        if best is not None:
            return self.plan_of(self.fill(*plans[best], target, ceiling))
        for option in [o for o in self.singles if o.damage < ceiling][:3]:
            ranks = {option.index: option.rank}
            if self.spend(self.attempt(ranks, option.damage), target) <= 1:
                return self.plan_of(ranks)
        raise BudgetError(self.explain_failure())

    def fill(self, ranks: Ranks, predicted: float, target: float, ceiling: float) -> Ranks:
        """Spend what a plan leaves over: go further in the block that saves most and is predicted to fit."""
        refused: dict[int, int] = {}  # block → parameters saved by an option that did not fit
        for _ in range(MOST_FILLS):
            used = self.spend(self.attempt(ranks, predicted), target)
            if used >= CLOSE_ENOUGH:
                break
            left = min((1 - used) * target / max(1.0, used * target / predicted), ceiling - predicted)
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
            if self.spend(self.attempt(larger, predicted + more), target) <= 1:
                ranks, predicted = larger, predicted + more
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
        return Plan(trial.ranks, trial.predicted, self.verdicts, self.damages, trial.evaluation, self.trials(), fits)

    def trials(self) -> list[Trial]:
        return [trial for trial, _ in self.tried.values()]

    def explain_failure(self) -> str:
        if not self.tried:
            return f"no replacement fits the budget {self.budget}: every block is unsafe to touch; nothing written"
        nearest = min(self.trials(), key=lambda t: t.evaluation.delta)
        found = nearest.evaluation
        return (
            f"no replacement fits the budget {self.budget}: closest was block {name_all(nearest.ranks)} with ΔPPL "
            f"{found.delta:+.3f} (upper end {found.upper:+.3f}) on the selection text, windows of {found.seq_len} "
            "tokens; nothing written"
        )


def name_all(ranks: Ranks) -> str:
    names = {i: "linear" if rank is None else f"rank {rank}" if rank else "bias" for i, rank in ranks.items()}
    return ", ".join(f"{index} ({name})" for index, name in sorted(names.items()))


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
