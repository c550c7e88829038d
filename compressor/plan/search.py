"""The search for a plan: the cheapest predicted damage per parameter first, as far as the budget goes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from compressor.evaluate.budget import Budget, Limits, compute_limits, parse_budgets, text_prefix
from compressor.evaluate.perplexity import PerplexityChange, evaluate
from compressor.measure.gradients import Damage
from compressor.measure.profile import Profile
from compressor.measure.verdicts import Verdict, judge_all
from compressor.modeling_compressor import Replacement
from compressor.models.blocks import find_blocks
from compressor.patch.tree import patch
from compressor.plan.calibration import Calibration, calibrate, correct_predictions
from compressor.plan.fit import Fitter
from compressor.plan.frontier import CLOSE_ENOUGH, Candidate, find_largest_plan, grow_plans, lower_hull
from compressor.plan.moments_store import open_store
from compressor.plan.shapes import Shape, Shapes, list_shapes
from compressor.plan.trials import Trial, TrialRunner
from compressor.runtime.context import RunContext
from compressor.runtime.errors import BudgetError, InputError
from compressor.text import Text

MOST_ENLARGEMENTS = 4
MOST_COMPENSATIONS = 3
USUAL_COMPENSATION = 0.85  # cost of a compensated plan over that of the plain one, until it is measured


@dataclass(frozen=True)
class Plan:
    """The shapes of the blocks to be replaced, their modules (`fits`), and what they cost on the selection text."""

    shapes: dict[int, Shape]
    compensated: bool
    predicted: float  # nats per token
    calibration: Calibration
    selection: dict[str, PerplexityChange]
    trials: list[Trial]
    fits: dict[int, Replacement]


@dataclass(frozen=True)
class SearchSpace:
    """What searches on a model and a text have in common, whatever their budget: candidates with corrected predictions,
    how well predictions hold, and the runner that tries plans."""

    candidates: dict[int, list[Candidate]]
    damages: dict[int, Damage]  # of every block's linear map
    calibration: Calibration
    runner: TrialRunner


def prepare_search(model: Any, text: Text, context: RunContext) -> SearchSpace:
    """Survey the candidates of every block, then check and correct their predictions by trials of single blocks."""
    store = open_store(model, text, context)
    candidates = store.candidates()
    fitter = Fitter(store, candidates)
    calibration = calibrate(store, candidates, fitter)
    damages = {index: of_block.damage for index, of_block in candidates.items()}
    runner = TrialRunner(store, candidates, fitter)
    return SearchSpace(correct_predictions(candidates, calibration), damages, calibration, runner)


class Planner:
    """Searches for the plan that saves most within the limits. Another search on the same space reuses its trials."""

    def __init__(
        self,
        space: SearchSpace,
        limits: Limits,
        verdicts: Mapping[int, Verdict],
        *,
        objective: str = "speed",
        compensate: bool = True,
    ) -> None:
        self.space, self.limits, self.verdicts = space, limits, verdicts
        self.objective, self.compensate = objective, compensate
        self.runner = space.runner
        self.model, self.blocks = self.runner.model, self.runner.blocks
        self.text, self.progress = self.runner.text, self.runner.context.progress
        self.compensation = USUAL_COMPENSATION if compensate else 1.0
        self.scale = 1.0  # measured over predicted cost, of the last plan that was tried
        self.banned: set[Shape] = set()  # shapes that run slower than the block they would replace

    @property
    def usable_candidates(self) -> list[list[Candidate]]:
        """The candidates that save parameters, of every block that is not unsafe, block by block."""
        safe = [row for index, row in self.space.candidates.items() if self.verdicts[index].word != "unsafe"]
        usable = [[c for c in row if c.saved > 0 and c.shape not in self.banned] for row in safe]
        return [row for row in usable if row]

    @property
    def affordable_candidates(self) -> list[list[Candidate]]:
        """The usable candidates whose predicted damage is not far beyond the budget."""
        most = 4 * self.limits.smallest
        rows = [[c for c in row if c.damage <= most] for row in self.usable_candidates]
        return [row for row in rows if row]

    def growing_plans(self) -> list[tuple[dict[int, Shape], float]]:
        """Plans from the smallest to the largest, each with its predicted damage."""
        return grow_plans([lower_hull(row) for row in self.affordable_candidates])

    def budget_share(self, trial: Trial, budget_factor: float) -> float:
        """The share of `budget_factor` times the budget that a trial uses, on the text where it uses most.

        A trial uses its point estimate and the half-width of the interval that is expected on the verification text.
        """
        token_ratio = self.text.selection.tokens / self.text.verification.tokens
        shares = []
        for name, change in trial.changes.items():
            nats = math.log1p(change.delta / change.baseline)
            if self.limits.confidence > 0:
                nats += math.log1p(max(0.0, change.upper - change.delta) / change.compressed) * token_ratio**0.5
            shares.append(nats / (self.limits.nats[name] * budget_factor))
        return max(shares)

    def search(self, budget_factor: float = 1.0, ceiling: float = math.inf) -> Plan:
        """The largest plan whose measured cost fits `budget_factor` times the budget. BudgetError when none does.

        `ceiling` bounds the predicted damage: a plan that the verification text refused must not come back.
        """
        return self.make_plan(self.find_trial(budget_factor, ceiling))

    def find_trial(self, budget_factor: float, ceiling: float) -> Trial:
        """The trial that saves most within the budget.

        Plans are tried without compensation, which takes no pass over the calibration text. The largest that is
        expected to fit is then compensated, and a larger one is tried when that leaves room.
        """
        fitting: list[Trial] = []
        for _ in range(MOST_COMPENSATIONS):
            expected = self.largest_expected(budget_factor, ceiling)
            if expected is None:
                break
            shapes, predicted = expected
            plain = self.runner.attempt(shapes, predicted)
            if not self.compensate:
                fitting += [plain] if self.budget_share(plain, budget_factor) <= 1 else []
                break
            trial = self.runner.attempt(shapes, predicted, compensated=True)
            used, plain_used = self.budget_share(trial, budget_factor), self.budget_share(plain, budget_factor)
            fitting += [t for t in (trial, plain) if self.budget_share(t, budget_factor) <= 1]
            compensation = min(max(used / plain_used, 0.5), 1.0) if plain_used > 0 else self.compensation
            done = CLOSE_ENOUGH <= used <= 1 or abs(compensation - self.compensation) < 0.01
            self.compensation = compensation
            if done:
                break
        if not fitting:
            cheapest = sorted(
                (min(row, key=lambda c: c.damage) for row in self.usable_candidates), key=lambda c: c.damage
            )
            for single in [c for c in cheapest if c.damage < ceiling][:3]:
                trial = self.runner.attempt({single.index: single.shape}, single.damage)
                if self.budget_share(trial, budget_factor) <= 1:
                    fitting.append(trial)
                    break
        if not fitting:
            raise BudgetError(self.explain_failure())
        return max(fitting, key=lambda t: (t.saved, -self.budget_share(t, budget_factor)))

    def largest_expected(self, budget_factor: float, ceiling: float) -> tuple[Shapes, float] | None:
        """The largest plan that is expected to fit once it is compensated, without shapes that are too slow."""
        while True:
            plans = [plan for plan in self.growing_plans() if plan[1] < ceiling]
            share = partial(self.expected_share_at, plans, budget_factor)
            best = find_largest_plan(plans, self.limits.smallest * budget_factor / self.compensation, share, self.scale)
            if best is None:
                return None
            shapes, predicted = self.enlarge(*plans[best], budget_factor, ceiling)
            slow = self.find_slow_shapes(shapes) if self.objective == "speed" else set()
            if not slow:
                return shapes, predicted
            self.progress.say(f"  smaller but slower, so not chosen: {', '.join(sorted(map(str, slow)))}")
            self.banned |= slow

    def expected_share_at(
        self, plans: list[tuple[dict[int, Shape], float]], budget_factor: float, number: int
    ) -> float:
        return self.expected_share(*plans[number], budget_factor)

    def expected_share(self, shapes: Shapes, predicted: float, budget_factor: float) -> float:
        """The share of the budget that a plan is expected to use once it is compensated."""
        used = self.budget_share(self.runner.attempt(shapes, predicted), budget_factor)
        self.scale = min(max(used * self.limits.smallest * budget_factor / predicted, 0.2), 20.0) if predicted else 1.0
        return self.compensation * used

    def enlarge(self, shapes: Shapes, predicted: float, budget_factor: float, ceiling: float) -> tuple[Shapes, float]:
        """Use what a plan leaves of the budget: go further in the block that saves most and is predicted to fit."""
        target = self.limits.smallest * budget_factor
        refused: dict[int, int] = {}  # block → parameters saved by a candidate that did not fit
        for _ in range(MOST_ENLARGEMENTS):
            used = self.expected_share(shapes, predicted, budget_factor)
            if used >= CLOSE_ENOUGH:
                break
            left = min((1 - used) * target / max(1.0, used * target / predicted), ceiling - predicted)
            moves = []
            for row in self.affordable_candidates:
                nothing = Candidate(row[0].index, Shape(), 0, 0.0)
                now = next((c for c in row if shapes.get(c.index) == c.shape), nothing)
                most = refused.get(now.index, math.inf)
                further = [c for c in row if now.saved < c.saved < most and c.damage - now.damage <= left]
                moves += [(c.saved - now.saved, c, c.damage - now.damage) for c in further]
            if not moves:
                break
            _, candidate, more = max(moves, key=lambda move: (move[0], -move[1].index))
            larger = {**shapes, candidate.index: candidate.shape}
            if self.expected_share(larger, predicted + more, budget_factor) <= 1:
                shapes, predicted = larger, predicted + more
            else:
                refused[candidate.index] = candidate.saved
        return shapes, predicted

    def find_slow_shapes(self, shapes: Shapes) -> set[Shape]:
        """Shapes that run slower than the block they would replace. Pruned blocks, without a linear part, never do."""
        timed = {index: shape for index, shape in shapes.items() if shape.rank != 0}
        return {shape for index, shape in timed.items() if self.runner.is_slower(shape, index, shapes)}

    def without_block(self, plan: Plan, index: int) -> Plan | None:
        """The plan with one block restored and the rest fitted again; a plan's only block gets a milder shape."""
        candidates = [c for row in self.affordable_candidates for c in row]
        damages = {c.index: c.damage for c in candidates if plan.shapes.get(c.index) == c.shape}
        shapes = {i: shape for i, shape in plan.shapes.items() if i != index}
        predicted = max(0.0, plan.predicted - damages.get(index, 0.0))
        if not shapes:
            milder = [c for c in candidates if c.index == index and c.damage < 0.8 * plan.predicted]
            if not milder:
                return None
            candidate = max(milder, key=lambda c: c.saved)
            shapes, predicted = {index: candidate.shape}, candidate.damage
        return self.make_plan(self.runner.attempt(shapes, predicted, compensated=plan.compensated))

    def count_saved(self, plan: Plan) -> int:
        """The parameters that a plan removes."""
        return sum(self.runner.candidates[index].saved(shape) for index, shape in plan.shapes.items())

    def make_plan(self, trial: Trial) -> Plan:
        return Plan(
            shapes=trial.shapes,
            compensated=trial.compensated,
            predicted=trial.predicted,
            calibration=self.space.calibration,
            selection=trial.changes,
            trials=self.runner.trials(),
            fits=self.runner.fit_modules(trial.shapes, trial.compensated),
        )

    def explain_failure(self) -> str:
        if not self.runner.tried:
            return f"no replacement fits the budget {self.limits}: every block is unsafe to touch; nothing written"
        closest = min(self.runner.trials(), key=lambda trial: self.budget_share(trial, 1.0))
        shares = {name: change.upper / self.limits.allowed[name] for name, change in closest.changes.items()}
        name = max(shares, key=lambda name: shares[name])
        change = closest.changes[name]
        return (
            f"no replacement fits the budget {self.limits}: closest was block {list_shapes(closest.shapes)} with "
            f"{text_prefix(name)}ΔPPL {change.delta:+.3f} (upper end {change.upper:+.3f}) on the selection text, "
            f"windows of {change.seq_len} tokens; nothing written"
        )


def make_planner(
    space: SearchSpace,
    profile: Profile,
    budgets: Mapping[str, Budget],
    *,
    objective: str = "speed",
    compensate: bool = True,
) -> Planner:
    """A planner for these budgets.

    Its limits follow from the source's perplexity on the verification text; blocks are judged by predictions alone.
    """
    runner = space.runner
    text = runner.text
    losses = evaluate(runner.model, text.verification.windows, runner.context, step="verify")
    baselines = {name: losses.part(part).perplexity for name, part in text.parts("verification").items()}
    limits = compute_limits(budgets, baselines)
    verdicts = judge_all(profile, space.damages, limits.smallest, {})
    return Planner(space, limits, verdicts, objective=objective, compensate=compensate)


def plan(
    model: Any,
    profile: Profile,
    text: Text,
    *,
    max_dppl: str | float | Mapping[str, str | float],
    objective: str = "speed",
    context: RunContext | None = None,
) -> Plan:
    """Search for the largest plan inside the budget. The model is left as it was; BudgetError when nothing fits."""
    context = context or RunContext()
    words = [f"{k}={v}" for k, v in max_dppl.items()] if isinstance(max_dppl, Mapping) else [str(max_dppl)]
    budgets = parse_budgets(words, text.counts, context.confidence)
    return make_planner(prepare_search(model, text, context), profile, budgets, objective=objective).search()


def fit_shapes(
    model: Any, shapes: Shapes, text: Text, context: RunContext, *, compensated: bool = True
) -> dict[int, Replacement]:
    """The replacements that a search would fit for these shapes; the model is left as it was."""
    blocks = find_blocks(model)
    for index in shapes:
        if not 0 <= index < len(blocks):
            raise InputError(f"the plan replaces block {index}, but the model has blocks 0 to {len(blocks) - 1}")
    store = open_store(model, text, context)
    for index, shape in shapes.items():
        width, neurons = blocks[index].width, store.neurons[index]
        if shape.rank is not None and shape.rank > width:
            raise InputError(f"the plan wants rank {shape.rank} in block {index}, whose width is {width}")
        if shape.neurons > (neurons.count if neurons else 0):
            known = f"{neurons.count} neurons" if neurons else "no neurons that are known"
            raise InputError(f"the plan keeps {shape.neurons} neurons in block {index}, which has {known}")
    fitter = Fitter(store, store.candidates())
    return fitter.fit_in_order(shapes) if compensated else fitter.fit_at_once(shapes)


def apply(model: Any, plan: Plan | Shapes, text: Text, context: RunContext | None = None) -> Any:
    """Put the replacements of a plan into the model, for good. Given shapes alone, they are fitted first."""
    fits = plan.fits if isinstance(plan, Plan) else fit_shapes(model, plan, text, context or RunContext())
    patch(model, find_blocks(model), fits)
    return model
