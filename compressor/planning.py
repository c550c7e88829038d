"""Which blocks to replace by what: rank them by predicted damage, spend the budget, measure, adjust."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from compressor.blocks import find_blocks
from compressor.budget import Budget, budgets_of
from compressor.errors import BudgetError, InputError
from compressor.evaluating import Evaluation, Losses, compare_parts, evaluate
from compressor.fitting import Calibration, Ranks, fit, fit_ladder
from compressor.frontier import CLOSE_ENOUGH, Option, bracket, efficient, options_of, sequence
from compressor.measuring import Profile
from compressor.modeling_compressor import Replacement
from compressor.models import source_of
from compressor.patching import patch, patched
from compressor.progress import Progress
from compressor.sensitivity import Damage, predict_damage, sample_gradients
from compressor.text import UNNAMED, Text
from compressor.verdicts import Verdict, judge

MOST_FILLS = 4
KEPT = -1  # the rank of a block that is not replaced


@dataclass(frozen=True)
class Trial:
    """One plan that was fitted and measured on the selection text, by the text's name."""

    ranks: dict[int, int | None]
    predicted: float
    evaluations: dict[str, Evaluation]


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
    selection: dict[str, Evaluation]
    trials: list[Trial]
    fits: dict[int, Replacement]


class Planner:
    """Search for the plan that saves most within a budget; a second search with less to spend reuses the trials."""

    def __init__(
        self,
        model: Any,
        profile: Profile,
        text: Text,
        budgets: Mapping[str, Budget],
        *,
        batch_size: int = 8,
        seed: int = 0,
        progress: Progress | None = None,
        verified: Losses | None = None,
    ) -> None:
        self.model, self.text = model, text
        self.budgets, self.batch_size, self.seed = budgets, batch_size, seed
        self.confidence = next(iter(budgets.values())).confidence
        self.progress = progress or Progress()
        self.dtype = source_of(model).dtype
        self.blocks = [p.block for p in profile.blocks]
        self.metrics, self.damages = predict(model, profile, text, self.progress)
        self.verified = verified or self.losses(text.verification.windows, "verify")
        baselines = {name: self.verified.part(part).perplexity for name, part in text.parts("verification").items()}
        self.allowed = {name: budgets[name].dppl(baseline) for name, baseline in baselines.items()}
        # Perplexities of two texts differ; what a budget means on one is carried to the other in nats per token.
        self.limits = {name: math.log1p(self.allowed[name] / baseline) for name, baseline in baselines.items()}
        self.limit = min(self.limits.values())
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

    def losses(self, windows: Tensor, step: str) -> Losses:
        return evaluate(self.model, windows, batch_size=self.batch_size, progress=self.progress, step=step)

    def spend(self, evaluations: Mapping[str, Evaluation], tighten: float) -> float:
        """The share of the budget used, of the text that uses most.

        That is the point estimate plus the half-width to be expected on the verification text.
        """
        widths = self.text.selection.tokens / self.text.verification.tokens
        shares = []
        for name, found in evaluations.items():
            nats = math.log1p(found.delta / found.baseline)
            if self.confidence > 0:
                nats += math.log1p(max(0.0, found.upper - found.delta) / found.compressed) * widths**0.5
            shares.append(nats / (self.limits[name] * tighten))
        return max(shares)

    def attempt(self, ranks: Ranks, predicted: float) -> dict[str, Evaluation]:
        """Fit one plan in order and measure it on the selection text."""
        key = tuple(sorted(ranks.items()))
        if key not in self.tried:
            windows = self.text.selection.windows
            if self.calibration is None:
                self.calibration = Calibration(self.model, self.blocks, self.text, self.batch_size)
                self.before = self.losses(windows, "search")
            assert self.before is not None
            fits = fit(self.calibration, ranks, self.metrics, self.dtype, self.progress)
            with patched(self.model, self.blocks, fits):
                after = self.losses(windows, "search")
            found = compare_parts(self.before, after, self.text.parts("selection"), self.confidence, self.seed)
            self.tried[key] = (Trial(dict(ranks), predicted, found), fits)
            rises = ", ".join(f"{label(name)}ΔPPL {e.delta:+.3f}" for name, e in found.items())
            self.progress.say(f"  tried {name_all(ranks)}: selection {rises}")
        return self.tried[key][0].evaluations

    def search(self, tighten: float = 1.0, ceiling: float = math.inf) -> Plan:
        """The largest plan whose measured cost fits `tighten` times the budget, or a BudgetError that says how near.

        `ceiling` bounds the predicted damage: a plan that verification text refused must not come back.
        """
        target = self.limit * tighten
        plans = [plan for plan in self.plans if plan[1] < ceiling]
        best = bracket(plans, target, lambda k: self.spend(self.attempt(*plans[k]), tighten))
        if best is not None:
            return self.plan_of(self.fill(*plans[best], tighten, ceiling))
        for option in [o for o in self.singles if o.damage < ceiling][:3]:
            ranks = {option.index: option.rank}
            if self.spend(self.attempt(ranks, option.damage), tighten) <= 1:
                return self.plan_of(ranks)
        raise BudgetError(self.explain_failure())

    def fill(self, ranks: Ranks, predicted: float, tighten: float, ceiling: float) -> Ranks:
        """Spend what a plan leaves over: go further in the block that saves most and is predicted to fit."""
        target = self.limit * tighten
        refused: dict[int, int] = {}  # block → parameters saved by an option that did not fit
        for _ in range(MOST_FILLS):
            used = self.spend(self.attempt(ranks, predicted), tighten)
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
            if self.spend(self.attempt(larger, predicted + more), tighten) <= 1:
                ranks, predicted = larger, predicted + more
            else:
                refused[option.index] = option.saved
        return ranks

    def verify(self, plan: Plan) -> Losses:
        """The plan's losses on the verification text, which no search has seen."""
        with patched(self.model, self.blocks, plan.fits):
            return self.losses(self.text.verification.windows, "verify")

    def without(self, plan: Plan, index: int) -> Plan | None:
        """The plan with one block restored and the rest fitted again; a block that stands alone gets a milder map."""
        damages = {o.index: o.damage for row in self.options for o in row if plan.ranks.get(o.index, KEPT) == o.rank}
        ranks = {i: rank for i, rank in plan.ranks.items() if i != index}
        predicted = max(0.0, plan.predicted - damages.get(index, 0.0))
        if not ranks:
            milder = [o for row in self.options for o in row if o.index == index and o.damage < 0.8 * plan.predicted]
            if not milder:
                return None
            option = max(milder, key=lambda o: o.saved)
            ranks, predicted = {index: option.rank}, option.damage
        self.attempt(ranks, predicted)
        return self.plan_of(ranks)

    def plan_of(self, ranks: Ranks) -> Plan:
        trial, fits = self.tried[tuple(sorted(ranks.items()))]
        return Plan(trial.ranks, trial.predicted, self.verdicts, self.damages, trial.evaluations, self.trials(), fits)

    def trials(self) -> list[Trial]:
        return [trial for trial, _ in self.tried.values()]

    def explain_failure(self) -> str:
        asked = ask_all(self.budgets)
        if not self.tried:
            return f"no replacement fits the budget {asked}: every block is unsafe to touch; nothing written"
        nearest = min(self.trials(), key=lambda trial: self.spend(trial.evaluations, 1.0))
        name, found = max(nearest.evaluations.items(), key=lambda item: self.spend(dict([item]), 1.0))
        return (
            f"no replacement fits the budget {asked}: closest was block {name_all(nearest.ranks)} with "
            f"{label(name)}ΔPPL {found.delta:+.3f} (upper end {found.upper:+.3f}) on the selection text, windows of "
            f"{found.seq_len} tokens; nothing written"
        )


def label(name: str) -> str:
    """How a text stands before its figure; the only text needs no name."""
    return "" if name == UNNAMED else f"{name} "


def ask_all(budgets: Mapping[str, Budget]) -> str:
    return ", ".join(f"{label(name)}{budget}" for name, budget in budgets.items())


def name_all(ranks: Ranks) -> str:
    names = {i: "linear" if rank is None else f"rank {rank}" if rank else "bias" for i, rank in ranks.items()}
    return ", ".join(f"{index} ({name})" for index, name in sorted(names.items()))


def plan(
    model: Any,
    profile: Profile,
    text: Text,
    *,
    max_dppl: str | float | Mapping[str, str | float],
    confidence: float = 0.95,
    batch_size: int = 8,
    seed: int = 0,
    progress: Progress | None = None,
) -> Plan:
    """Search for the largest plan inside the budget. The model is left as it was; BudgetError when nothing fits."""
    words = [f"{k}={v}" for k, v in max_dppl.items()] if isinstance(max_dppl, Mapping) else [str(max_dppl)]
    budgets = budgets_of(words, text.counts, confidence)
    planner = Planner(model, profile, text, budgets, batch_size=batch_size, seed=seed, progress=progress)
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
