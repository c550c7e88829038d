"""Which blocks to replace by what: the cheapest predicted damage per parameter first, as far as the budget goes."""

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
from compressor.plan.calibration import Calibration, calibrate, corrected
from compressor.plan.fit import Fitter
from compressor.plan.frontier import CLOSE_ENOUGH, Candidate, find_largest_plan, grow_plans, lower_hull
from compressor.plan.moments_store import open_store
from compressor.plan.shapes import Shape, Shapes, list_shapes
from compressor.plan.trials import Trial, TrialRunner
from compressor.runtime.context import RunContext
from compressor.runtime.errors import BudgetError, InputError
from compressor.text import Text

MOST_FILLS = 4
MOST_COMPENSATIONS = 3
USUAL_GAIN = 0.85  # what compensation leaves of a plan's cost, until it was measured


@dataclass(frozen=True)
class Plan:
    """What to put where, why, and what it measured on the selection text. `fits` are the modules themselves."""

    shapes: dict[int, Shape]
    compensated: bool
    predicted: float  # nats per token
    calibration: Calibration
    selection: dict[str, PerplexityChange]
    trials: list[Trial]
    fits: dict[int, Replacement]


@dataclass(frozen=True)
class Ground:
    """What every search on a model and a text stands on, whatever its budget: candidates with corrected predictions,
    how well predictions hold, and the runner that tries plans."""

    candidates: dict[int, list[Candidate]]
    damages: dict[int, Damage]  # of every block's linear map
    calibration: Calibration
    runner: TrialRunner


def prepare_search(model: Any, text: Text, context: RunContext) -> Ground:
    """Survey the candidates of every block, then check and correct their predictions by trials of single blocks."""
    store = open_store(model, text, context)
    candidates = store.candidates()
    fitter = Fitter(store, candidates)
    calibration = calibrate(store, candidates, fitter)
    damages = {index: of_block.damage for index, of_block in candidates.items()}
    runner = TrialRunner(store, candidates, fitter)
    return Ground(corrected(candidates, calibration), damages, calibration, runner)


class Planner:
    """Search for the plan that saves most within the limits; another search on the same ground reuses its trials."""

    def __init__(
        self,
        ground: Ground,
        limits: Limits,
        verdicts: Mapping[int, Verdict],
        *,
        objective: str = "speed",
        compensate: bool = True,
    ) -> None:
        self.ground, self.limits, self.verdicts = ground, limits, verdicts
        self.objective, self.compensate = objective, compensate
        self.runner = ground.runner
        self.model, self.blocks = self.runner.model, self.runner.blocks
        self.text, self.progress = self.runner.text, self.runner.context.progress
        self.gain = USUAL_GAIN if compensate else 1.0
        self.scale = 1.0  # measured over predicted, of the last plan tried
        self.banned: set[Shape] = set()

    @property
    def rows(self) -> list[list[Candidate]]:
        """The candidates of every block that may be touched, block by block."""
        usable = [row for index, row in self.ground.candidates.items() if self.verdicts[index].word != "unsafe"]
        rows = [[c for c in row if c.saved > 0 and c.shape not in self.banned] for row in usable]
        return [row for row in rows if row]

    @property
    def affordable(self) -> list[list[Candidate]]:
        """Those whose predicted damage is not far beyond the budget."""
        most = 4 * self.limits.smallest
        rows = [[c for c in row if c.damage <= most] for row in self.rows]
        return [row for row in rows if row]

    def plans(self) -> list[tuple[dict[int, Shape], float]]:
        """Plans from the smallest to the largest, each with its predicted damage."""
        return grow_plans([lower_hull(row) for row in self.affordable])

    def spend(self, trial: Trial, tighten: float) -> float:
        """The share of the budget used, of the text that uses most.

        That is the point estimate plus the half-width to be expected on the verification text.
        """
        widths = self.text.selection.tokens / self.text.verification.tokens
        shares = []
        for name, change in trial.changes.items():
            nats = math.log1p(change.delta / change.baseline)
            if self.limits.confidence > 0:
                nats += math.log1p(max(0.0, change.upper - change.delta) / change.compressed) * widths**0.5
            shares.append(nats / (self.limits.nats[name] * tighten))
        return max(shares)

    def search(self, tighten: float = 1.0, ceiling: float = math.inf) -> Plan:
        """The largest plan whose measured cost fits `tighten` times the budget, or a BudgetError that says how near.

        `ceiling` bounds the predicted damage: a plan that verification text refused must not come back.
        """
        return self.plan_of(self.find(tighten, ceiling))

    def find(self, tighten: float, ceiling: float) -> Trial:
        """Plans are tried with the fits that cost nothing, then the one that fits is compensated, and made larger when
        that leaves room."""
        fitting: list[Trial] = []
        for _ in range(MOST_COMPENSATIONS):
            found = self.nearest(tighten, ceiling)
            if found is None:
                break
            shapes, predicted = found
            plain = self.runner.attempt(shapes, predicted)
            if not self.compensate:
                fitting += [plain] if self.spend(plain, tighten) <= 1 else []
                break
            trial = self.runner.attempt(shapes, predicted, compensated=True)
            used, without = self.spend(trial, tighten), self.spend(plain, tighten)
            fitting += [t for t in (trial, plain) if self.spend(t, tighten) <= 1]
            gain = min(max(used / without, 0.5), 1.0) if without > 0 else self.gain
            settled = CLOSE_ENOUGH <= used <= 1 or abs(gain - self.gain) < 0.01
            self.gain = gain
            if settled:
                break
        if not fitting:
            cheapest = sorted((min(row, key=lambda c: c.damage) for row in self.rows), key=lambda c: c.damage)
            for single in [c for c in cheapest if c.damage < ceiling][:3]:
                trial = self.runner.attempt({single.index: single.shape}, single.damage)
                if self.spend(trial, tighten) <= 1:
                    fitting.append(trial)
                    break
        if not fitting:
            raise BudgetError(self.explain_failure())
        return max(fitting, key=lambda t: (t.saved, -self.spend(t, tighten)))

    def nearest(self, tighten: float, ceiling: float) -> tuple[Shapes, float] | None:
        """The largest plan that is expected to fit, without shapes that are slower than what they replace."""
        while True:
            plans = [plan for plan in self.plans() if plan[1] < ceiling]
            costs = partial(self.cost_of, plans, tighten)
            best = find_largest_plan(plans, self.limits.smallest * tighten / self.gain, costs, self.scale)
            if best is None:
                return None
            shapes, predicted = self.fill(*plans[best], tighten, ceiling)
            slow = self.slow_shapes(shapes) if self.objective == "speed" else set()
            if not slow:
                return shapes, predicted
            self.progress.say(f"  smaller but slower, so not chosen: {', '.join(sorted(map(str, slow)))}")
            self.banned |= slow

    def cost_of(self, plans: list[tuple[dict[int, Shape], float]], tighten: float, which: int) -> float:
        return self.cost(*plans[which], tighten)

    def cost(self, shapes: Shapes, predicted: float, tighten: float) -> float:
        """What a plan is expected to spend once it is compensated."""
        spent = self.spend(self.runner.attempt(shapes, predicted), tighten)
        self.scale = min(max(spent * self.limits.smallest * tighten / predicted, 0.2), 20.0) if predicted else 1.0
        return self.gain * spent

    def fill(self, shapes: Shapes, predicted: float, tighten: float, ceiling: float) -> tuple[Shapes, float]:
        """Spend what a plan leaves over: go further in the block that saves most and is predicted to fit."""
        target = self.limits.smallest * tighten
        refused: dict[int, int] = {}  # block → parameters saved by an candidate that did not fit
        for _ in range(MOST_FILLS):
            used = self.cost(shapes, predicted, tighten)
            if used >= CLOSE_ENOUGH:
                break
            left = min((1 - used) * target / max(1.0, used * target / predicted), ceiling - predicted)
            moves = []
            for row in self.affordable:
                nothing = Candidate(row[0].index, Shape(), 0, 0.0)
                now = next((o for o in row if shapes.get(o.index) == o.shape), nothing)
                most = refused.get(now.index, math.inf)
                further = [o for o in row if now.saved < o.saved < most and o.damage - now.damage <= left]
                moves += [(o.saved - now.saved, o, o.damage - now.damage) for o in further]
            if not moves:
                break
            _, candidate, more = max(moves, key=lambda move: (move[0], -move[1].index))
            larger = {**shapes, candidate.index: candidate.shape}
            if self.cost(larger, predicted + more, tighten) <= 1:
                shapes, predicted = larger, predicted + more
            else:
                refused[candidate.index] = candidate.saved
        return shapes, predicted

    def slow_shapes(self, shapes: Shapes) -> set[Shape]:
        """Shapes that run slower than the block they would replace. Fewer neurons alone never do."""
        timed = {index: shape for index, shape in shapes.items() if shape.rank != 0}
        return {shape for index, shape in timed.items() if self.runner.is_slower(shape, index, shapes)}

    def without(self, plan: Plan, index: int) -> Plan | None:
        """The plan with one block restored and the rest fitted again; a block that stands alone gets a milder shape."""
        damages = {o.index: o.damage for row in self.affordable for o in row if plan.shapes.get(o.index) == o.shape}
        shapes = {i: shape for i, shape in plan.shapes.items() if i != index}
        predicted = max(0.0, plan.predicted - damages.get(index, 0.0))
        if not shapes:
            milder = [o for row in self.affordable for o in row if o.index == index and o.damage < 0.8 * plan.predicted]
            if not milder:
                return None
            candidate = max(milder, key=lambda o: o.saved)
            shapes, predicted = {index: candidate.shape}, candidate.damage
        return self.plan_of(self.runner.attempt(shapes, predicted, compensated=plan.compensated))

    def plan_of(self, trial: Trial) -> Plan:
        return Plan(
            shapes=trial.shapes,
            compensated=trial.compensated,
            predicted=trial.predicted,
            calibration=self.ground.calibration,
            selection=trial.changes,
            trials=self.runner.trials(),
            fits=self.runner.fits(trial.shapes, trial.compensated),
        )

    def explain_failure(self) -> str:
        if not self.runner.tried:
            return f"no replacement fits the budget {self.limits}: every block is unsafe to touch; nothing written"
        nearest = min(self.runner.trials(), key=lambda trial: self.spend(trial, 1.0))
        shares = {name: change.upper / self.limits.allowed[name] for name, change in nearest.changes.items()}
        name = max(shares, key=lambda name: shares[name])
        change = nearest.changes[name]
        return (
            f"no replacement fits the budget {self.limits}: closest was block {list_shapes(nearest.shapes)} with "
            f"{text_prefix(name)}ΔPPL {change.delta:+.3f} (upper end {change.upper:+.3f}) on the selection text, windows "
            f"of {change.seq_len} tokens; nothing written"
        )


def make_planner(
    ground: Ground,
    profile: Profile,
    budgets: Mapping[str, Budget],
    *,
    objective: str = "speed",
    compensate: bool = True,
) -> Planner:
    """A planner for these budgets, which mean what the source's own perplexity makes of them; blocks are judged by what
    gradients predict."""
    runner = ground.runner
    text = runner.text
    losses = evaluate(runner.model, text.verification.windows, runner.context, step="verify")
    baselines = {name: losses.part(part).perplexity for name, part in text.parts("verification").items()}
    limits = compute_limits(budgets, baselines)
    verdicts = judge_all(profile, ground.damages, limits.smallest, {})
    return Planner(ground, limits, verdicts, objective=objective, compensate=compensate)


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
