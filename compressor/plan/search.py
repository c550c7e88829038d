"""The search for a plan: the cheapest predicted damage per parameter first, as far as the budget goes."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from compressor.evaluate.budget import Limits
from compressor.evaluate.fidelity import FidelityChange
from compressor.evaluate.intervals import end_score
from compressor.evaluate.perplexity import PerplexityChange
from compressor.measure.profile import Profile
from compressor.measure.verdicts import Verdict
from compressor.models.branches import BRANCHES, AttentionOf, BranchIndex, branch_of, layer_of
from compressor.plan.attention_trials import Scatter, believe_trial, choose_attention, choose_promising, pool
from compressor.plan.calibration import Calibration, binding_calibration, correct_predictions
from compressor.plan.fit import Module
from compressor.plan.frontier import (
    CLOSE_ENOUGH,
    DEAR,
    Candidate,
    Cost,
    Growth,
    correct_scale,
    find_dear_step,
    find_largest_plan,
    grow_plans,
    lower_hull,
    predicted_rise,
    weigh_blocks,
)
from compressor.plan.mild import find_mild_candidates
from compressor.plan.shapes import Shape, Shapes, describe_shape, list_shapes
from compressor.plan.shares import largest_share, list_shares, relative_error, rise_error
from compressor.plan.space import SearchSpace
from compressor.plan.trials import Trial
from compressor.runtime.errors import BudgetError

MOST_ENLARGEMENTS = 3
WORTH_ENLARGING = 0.02  # of the parameters that a plan saves: what an enlargement must add to be tried
MOST_COMPENSATIONS = 3
WELL_COMPENSATED = 0.85  # of the budget: after a compensated plan that uses this much, no larger one is compensated
MOST_CORRECTIONS = 6  # steps of one search that turn out dearer than predicted, and are believed to be
WORTH_CORRECTING = 0.1  # of the budget, that such a step must cost beyond its prediction
USUAL_COMPENSATION = 0.88  # cost of a compensated plan over that of the plain one, until it is measured
DOCUMENTS_DIFFER = 1.4  # factor by which intervals by documents are wider than those of independent tokens
SMALLER = 1.02  # factor on what compensation is believed to cost, after a compensated plan that did not fit
USUAL_UNITS = 32  # windows or documents of a verification text
ROOM = 1.96  # standard errors left for the verification's noise; the choice of the largest plan that fits spends some


@dataclass(frozen=True)
class Plan:
    """The shapes of the blocks to be replaced, their modules (`fits`), and what they cost on the selection text."""

    shapes: dict[BranchIndex, Shape]
    compensated: bool
    predicted: float  # nats per token
    calibration: Calibration
    selection: dict[str, PerplexityChange]
    fidelity: dict[str, FidelityChange]  # on the selection text, where a budget asks for it
    trials: list[Trial]
    fits: dict[BranchIndex, Module]


class Planner:
    """Searches for the plan that saves most within the limits. Another search on the same space reuses its trials.

    `room` is left for the noise of a verification that looks once: as many standard errors of the difference between
    the selection and the verification text. A search that is followed by several looks needs none. The `profile` is
    needed only where the blocks are ordered by R². Without `compensate`, blocks are fitted on the inputs that they have
    in the source: that is enough for a plan that is healed afterwards.
    """

    def __init__(
        self,
        space: SearchSpace,
        limits: Limits,
        verdicts: Mapping[BranchIndex, Verdict],
        *,
        objective: str = "speed",
        room: float = 0.0,
        profile: Profile | None = None,
        compensate: bool = True,
    ) -> None:
        self.space, self.limits, self.verdicts = space, limits, verdicts
        self.objective, self.room, self.compensate = objective, room, compensate
        self.choices = space.choices
        self.unexplained = space.choices.unexplained(profile)  # by every block's linear map, where that orders blocks
        self.runner = space.runner
        assert limits.kl is None or self.runner.fidelity, "trials for a limit of KL must measure it"
        self.model, self.blocks = self.runner.model, self.runner.blocks
        self.text, self.progress = self.runner.text, self.runner.context.progress
        self.compensation = USUAL_COMPENSATION if compensate else 1.0
        self.scale = self.usual_scale()  # measured over predicted cost, of the last plan that was tried
        self.banned: set[Shape] = set()  # shapes that run slower than the block they would replace
        self.most_saved: dict[BranchIndex, int] = {}  # parameters that a block may save, since a task refused more
        self.unsafe = [index for index in space.candidates if index in verdicts and verdicts[index].word == "unsafe"]
        self.mild_tried = False
        self.untried: dict[BranchIndex, list[Candidate]] | None = None  # attention; None before any was tried
        self.only_ffns = False  # attention is left alone for the time being
        self.ffns_had_turn = False
        price = DOCUMENTS_DIFFER * (self.usual_scale() - 1) / 2  # what a nat of divergence adds to an interval
        corrected = correct_predictions(space.candidates, space.calibrations, limits.least, price)
        self.candidates: dict[BranchIndex, list[Candidate]] = {  # with predictions for the smallest limit
            index: [] if index in self.unsafe else self.with_worth(index, row) for index, row in corrected.items()
        }

    def with_compensation(self) -> Planner:
        """A planner that knows what this one learned, and compensates."""
        other = copy.copy(self)
        other.compensate, other.compensation = True, USUAL_COMPENSATION
        return other

    def usual_scale(self) -> float:
        """The upper end of a plan's cost over its prediction, before any plan is tried.

        A change that costs D nats per token makes the losses of tokens differ by about √(2·D), for those that win and
        those that lose: with as many tokens as there are to verify, the interval is this much wider than its middle.
        """
        tokens, confidence = self.text.verification.tokens, self.limits.confidence
        reach = end_score(USUAL_UNITS, confidence) if confidence > 0 else 0.0
        return 1.0 + reach * math.sqrt(2 / (tokens * max(self.limits.smallest, 1e-6)))

    def with_worth(self, index: BranchIndex, row: list[Candidate]) -> list[Candidate]:
        """The candidates of a block; for speed, attention is worth its operations and its cache too."""
        if self.objective != "speed":
            return row
        of_block, seq_len = self.space.candidates[index], self.text.seq_len
        return [replace(c, lightened=of_block.lightened(c.shape, seq_len)) for c in row]

    def admit_mild_forms(self) -> None:
        """Allow the mild forms of unsafe blocks that cost what was predicted, once. Only damage says which of them cost
        little: where blocks are ordered by another signal, unsafe ones stay as they are."""
        if not self.mild_tried and self.unexplained is None and "pruned" in self.choices.kinds:
            for index in filter(self.choices.allows_block, self.unsafe):
                mild = find_mild_candidates(self.space.candidates[index], self.runner, self.limits)
                self.candidates[index] = self.with_worth(index, mild)
        self.mild_tried = True

    def is_usable(self, c: Candidate) -> bool:
        """Whether a candidate may be chosen, and saves parameters."""
        left_out = c.shape in self.banned or (c.index, c.shape) in self.runner.overflowing
        most = self.most_saved.get(c.index, c.saved)
        return 0 < c.saved <= most and not left_out and self.choices.allows(c.index, c.shape)

    @property
    def usable_candidates(self) -> list[list[Candidate]]:
        """The candidates that may be chosen and save parameters, block by block."""
        rows = {i: row for i, row in self.candidates.items() if not (self.only_ffns and isinstance(i, AttentionOf))}
        usable = [[c for c in row if self.is_usable(c)] for row in rows.values()]
        return [row for row in usable if row]

    @property
    def turns(self) -> tuple[bool, ...]:
        """For `take_turn`, one after the other, so that a search over both branches ends with no less than one over
        FFNs."""
        both = {branch_of(index) for index, row in self.candidates.items() if row} == set(BRANCHES)
        return (True, False) if both else (False,)

    def take_turn(self, only_ffns: bool) -> None:
        """From here on, search over FFNs alone or over all branches that may change."""
        self.only_ffns = only_ffns
        self.ffns_had_turn = self.ffns_had_turn or only_ffns

    @property
    def affordable_candidates(self) -> list[list[Candidate]]:
        """The usable candidates whose predicted damage is not far beyond the budget."""
        most = 4 * self.limits.smallest
        rows = [[c for c in row if c.damage <= most] for row in self.usable_candidates]
        return [row for row in rows if row]

    @property
    def block_weights(self) -> dict[BranchIndex, float] | None:
        """How many times a block's damage counts where blocks are put in order; None: once."""
        return None if self.unexplained is None else weigh_blocks(self.unexplained, self.candidates)

    def growing_plans(self) -> list[Growth]:
        """Plans from the smallest to the largest, each with its predicted damage."""
        return grow_plans([lower_hull(row) for row in self.affordable_candidates], self.block_weights)

    def budget_share(self, trial: Trial, budget_factor: float) -> float:
        """The share of `budget_factor` times the budget that a trial uses, on the text where it uses most.

        A trial uses its point estimate, the half-width of the interval that is expected on the verification text, and
        the room that is left for the noise of both texts. Where perplexity and KL have limits, the larger share counts.
        """
        if trial.overflows:
            return math.inf
        shares = []
        for name, change in trial.changes.items():
            if self.limits.budgets[name].limited or self.limits.kl is None:
                nats = math.log1p(change.delta / change.baseline)
                nats += self.expected_width(change.units) * rise_error(change)
                shares.append(nats / (self.limits.nats[name] * budget_factor))
        for divergence in trial.fidelity.values():
            kl = divergence.kl * math.exp(min(self.expected_width(divergence.units) * relative_error(divergence), 50.0))
            shares.append(kl / (self.limits.largest_kl * budget_factor))
        return max(shares)

    def expected_width(self, units: int) -> float:
        """Standard errors, of the selection text, between an estimate of so many units and what must be inside."""
        token_ratio = self.text.selection.tokens / self.text.verification.tokens
        width, confidence = self.room * math.sqrt(1 + token_ratio), self.limits.confidence
        if confidence > 0:
            width += end_score(max(2, round(units / token_ratio)), confidence) * math.sqrt(token_ratio)
        return width

    def search(self, budget_factor: float = 1.0, ceiling: float = math.inf) -> Plan:
        """The largest plan whose measured cost fits `budget_factor` times the budget. BudgetError when none does.

        `ceiling` bounds the predicted damage: a plan that the verification text refused must not come back.
        """
        return self.make_plan(self.find_trial(budget_factor, ceiling))

    def find_trial(self, budget_factor: float, ceiling: float) -> Trial:
        """The trial that saves most within the budget.

        Plans are tried without compensation, which takes no pass over the calibration text. The largest that is
        expected to fit is then compensated, and a larger one is tried when that leaves room. Where compensation wins
        less than expected and nothing fits, smaller plans are tried, and single blocks only after those.
        """
        self.admit_mild_forms()
        self.try_attention()
        for _ in range(MOST_COMPENSATIONS):
            pair = self.try_largest(budget_factor, ceiling)
            if pair is None:
                break
            plain_used, used = (self.budget_share(trial, budget_factor) for trial in pair)
            compensation = min(max(used / plain_used, 0.5), 1.0) if plain_used > 0 else self.compensation
            done = used <= 1 and (used >= WELL_COMPENSATED or abs(compensation - self.compensation) < 0.01)
            if used > 1:  # the next plan must be smaller, even where compensation won what was expected
                compensation = min(1.0, max(compensation, self.compensation) * SMALLER)
            self.compensation = compensation
            if done:
                break
        self.try_without_attention(budget_factor, ceiling)
        best = self.best_trial(budget_factor, ceiling)
        if best is None:
            compensation, self.compensation = self.compensation, 1.0  # what fits now fits without compensation too
            self.try_largest(budget_factor, ceiling)
            self.compensation = compensation
            best = self.best_trial(budget_factor, ceiling)
        if best is None:
            weights = self.block_weights or {}
            mildest = [min(row, key=lambda c: c.damage) for row in self.usable_candidates]
            mildest.sort(key=lambda c: weights.get(c.index, 1.0) * c.damage)
            for single in [c for c in mildest if c.damage < ceiling][:3]:
                self.runner.attempt({single.index: single.shape}, single.damage)
            best = self.best_trial(budget_factor, ceiling)
        if best is None:
            raise BudgetError(self.explain_failure())
        return best

    def try_attention(self) -> None:
        """Try promising attention on all of the selection text, once; attention that was not tried stays as it is."""
        if self.untried is not None or self.only_ffns or self.unexplained is not None:
            return
        rows = {i: row for i, row in self.candidates.items() if branch_of(i) == "attention"}
        usable = {i: [c for c in row if self.is_usable(c)] for i, row in rows.items()}
        self.candidates |= {index: [] for index in rows}
        self.untried = dict(rows)
        tried = {c.index: c for c in choose_attention(usable, self.limits.smallest)}
        costs, believed = {}, []
        for index, c in tried.items():
            trial = self.runner.attempt({index: c.shape}, c.damage)
            units = min((change.units for change in trial.changes.values()), default=2)
            reach = max(self.expected_width(units), 1.0)
            scatter = Scatter(reach, DOCUMENTS_DIFFER * (self.usual_scale() - 1) * self.limits.smallest / reach)
            cost = self.measured_cost(trial)
            self.candidates[index] = believe_trial(self.untried.pop(index), c, cost, scatter.widening(cost.noise))
            believed += [other for other in self.candidates[index] if other.shape == c.shape]
            costs[index] = cost, scatter
        for index in choose_promising(believed):
            changes, (cost, scatter) = self.runner.attempt_on_spare({index: tried[index].shape}), costs[index]
            spare = max(self.rises(changes), key=lambda other: other.measured, default=None)
            if spare is not None:  # as noisy as it would be on so many tokens as selection has
                noise = max(cost.noise, spare.noise * math.sqrt(self.text.spare_ratio))
                both, widening = pool(cost, spare), scatter.widening(noise)
                self.candidates[index] = believe_trial(rows[index], tried[index], both, widening)

    def admit_untried_attention(self) -> None:
        """Allow the attention that was not tried, as it is predicted."""
        self.candidates |= self.untried or {}
        self.untried = {}

    def try_without_attention(self, budget_factor: float, ceiling: float) -> None:
        """Try the largest plan of FFNs alone, where it is expected to save more than what was found."""
        if self.ffns_had_turn or len(self.turns) == 1:
            return
        best = self.best_trial(budget_factor, ceiling)
        self.only_ffns = True
        expected = self.largest_expected(budget_factor, ceiling)
        self.only_ffns = False
        if expected is not None and self.saved_by(expected[0]) > (best.saved if best else 0):
            self.runner.attempt(*expected, compensated=self.compensate and len(expected[0]) > 1)

    def saved_by(self, shapes: Shapes) -> int:
        """The parameters that these shapes remove."""
        return sum(self.runner.candidates[index].saved(shape) for index, shape in shapes.items())

    def try_largest(self, budget_factor: float, ceiling: float) -> tuple[Trial, Trial] | None:
        """The largest plan that is expected to fit, tried without and with compensation."""
        expected = self.largest_expected(budget_factor, ceiling)
        if expected is None:
            return None
        several = self.compensate and len(expected[0]) > 1  # a single block has none before it to compensate
        return self.runner.attempt(*expected), self.runner.attempt(*expected, compensated=several)

    def best_trial(self, budget_factor: float, ceiling: float) -> Trial | None:
        """Of all plans that were tried, the one that saves most within the budget, without shapes that are too slow."""
        while True:
            usable = {(c.index, c.shape) for row in self.usable_candidates for c in row}
            fitting = [
                trial
                for trial in self.runner.trials()
                if trial.predicted < ceiling
                and self.budget_share(trial, budget_factor) <= 1
                and usable.issuperset(trial.shapes.items())
            ]
            if not fitting:
                return None
            best = max(fitting, key=lambda trial: (trial.saved, -self.budget_share(trial, budget_factor)))
            if not self.ban_slow_shapes(best.shapes):
                return best

    def largest_expected(self, budget_factor: float, ceiling: float) -> tuple[Shapes, float] | None:
        """The largest plan that is expected to fit once it is compensated, without shapes that are too slow."""
        target, corrections = self.limits.smallest * budget_factor, 0
        while True:
            plans = [plan for plan in self.growing_plans() if plan[1] < ceiling]
            left_out = len(self.runner.overflowing)
            costs: dict[int, Cost] = {}  # of the plans that were tried
            measure_share = partial(self.note_cost, plans, budget_factor, costs)
            best = find_largest_plan(plans, target / self.compensation, measure_share, self.scale)
            if len(self.runner.overflowing) > left_out:
                continue
            starved = plans and (plans[best][1] if best is not None else 0.0) < target / DEAR
            if starved and corrections < MOST_CORRECTIONS:
                step = find_dear_step(plans, costs, WORTH_CORRECTING * target, measure_share)
                if step is not None:
                    self.believe_step(plans, step, costs)
                    corrections += 1
                    continue
            if best is None:
                return None
            expected: tuple[Shapes, float] = plans[best]
            if self.unexplained is None:  # what goes further is picked by damage
                expected = self.enlarge(*expected, budget_factor, ceiling)
            if not self.ban_slow_shapes(expected[0]):
                return expected

    def believe_step(self, plans: list[Growth], step: int, costs: Mapping[int, Cost]) -> None:
        """Add what a step of the growing plans cost beyond its prediction to its block's candidates from that one on.

        Every larger plan has this step in it, so that one wrong prediction would spend the budget of them all.
        """
        before, shapes = plans[step - 1][0] if step else {}, plans[step][0]
        index = next(i for i, shape in shapes.items() if before.get(i) != shape)
        measured = costs[step].measured - (costs[step - 1].measured if step else 0.0)
        surplus = measured - predicted_rise(plans, step - 1, step)
        saved = self.space.candidates[index].saved(shapes[index])
        corrected = [replace(c, damage=c.damage + surplus) if c.saved >= saved else c for c in self.candidates[index]]
        self.candidates[index] = [c for c in corrected if math.isfinite(c.damage)]
        words = describe_shape(index, shapes[index])
        self.progress.note(f"  block {index} ({words}) costs far more than predicted, and is believed to")

    def note_cost(self, plans: list[Growth], budget_factor: float, costs: dict[int, Cost], number: int) -> float:
        """The share that one of the plans is expected to use; what it cost is put into `costs`."""
        trial = self.runner.attempt(*plans[number])
        costs[number] = self.measured_cost(trial)
        return self.expected_share(*plans[number], budget_factor)

    def measured_cost(self, trial: Trial) -> Cost:
        """The nats per token that a trial cost, on the text where it uses most, for the smallest limit."""
        costs = [Cost(math.inf, math.inf)] if trial.overflows else self.rises(trial.changes)
        for divergence in trial.fidelity.values():
            scale = self.limits.smallest / self.limits.largest_kl
            costs.append(Cost(scale * divergence.kl, scale * (divergence.kl - divergence.kl_error)))
        return max(costs, key=lambda cost: cost.measured)

    def rises(self, changes: Mapping[str, PerplexityChange]) -> list[Cost]:
        """What the rise of perplexity costs on every text where it counts."""
        costs = []
        for name, change in changes.items():
            if self.limits.budgets[name].limited or self.limits.kl is None:
                nats, scale = math.log1p(change.delta / change.baseline), self.limits.smallest / self.limits.nats[name]
                costs.append(Cost(scale * nats, scale * (nats - rise_error(change))))
        return costs

    def expected_share(self, shapes: Shapes, predicted: float, budget_factor: float) -> float:
        """The share of the budget that a plan is expected to use once it is compensated."""
        used = self.budget_share(self.runner.attempt(shapes, predicted), budget_factor)
        self.scale = correct_scale(self.scale, used * self.limits.smallest * budget_factor, predicted)
        return self.compensation * used

    def enlarge(self, shapes: Shapes, predicted: float, budget_factor: float, ceiling: float) -> tuple[Shapes, float]:
        """Use what a plan leaves of the budget: go further in the block that saves most and is predicted to fit."""
        target = self.limits.smallest * budget_factor
        refused: dict[BranchIndex, int] = {}  # block → parameters saved by a candidate that did not fit
        for _ in range(MOST_ENLARGEMENTS):
            used = self.expected_share(shapes, predicted, budget_factor)
            if used >= CLOSE_ENOUGH:
                break
            surcharge = max(1.0, used * target / predicted) if predicted > 0 else 1.0
            left = min((1 - used) * target / surcharge, ceiling - predicted)
            moves = []
            saved = sum(self.runner.candidates[index].saved(shape) for index, shape in shapes.items())
            for row in self.affordable_candidates:
                nothing = Candidate(row[0].index, Shape(), 0, 0.0)
                now = next((c for c in row if shapes.get(c.index) == c.shape), nothing)
                most = refused.get(now.index, math.inf)
                least = now.saved + WORTH_ENLARGING * saved
                further = [c for c in row if least <= c.saved < most and c.damage - now.damage <= left]
                moves += [(c.saved - now.saved, c, c.damage - now.damage) for c in further]
            if not moves:
                break
            _, candidate, more = max(moves, key=lambda move: (move[0], -layer_of(move[1].index)))
            larger = {**shapes, candidate.index: candidate.shape}
            if self.expected_share(larger, predicted + more, budget_factor) <= 1:
                shapes, predicted = larger, predicted + more
            else:
                refused[candidate.index] = candidate.saved
        return shapes, predicted

    def ban_slow_shapes(self, shapes: Shapes) -> bool:
        """Whether shapes of a plan are too slow; from here on no plan has them."""
        slow = self.find_slow_shapes(shapes) if self.objective == "speed" else set()
        if slow:
            self.progress.note(f"  smaller but slower, so not chosen: {', '.join(sorted(map(str, slow)))}")
        self.banned |= slow
        return bool(slow)

    def find_slow_shapes(self, shapes: Shapes) -> set[Shape]:
        """Shapes that run slower than the block they would replace. Pruned blocks, without a linear part, never do, and
        attention, whatever is left of it, is not timed."""
        timed = {i: shape for i, shape in shapes.items() if shape.rank != 0 and not isinstance(i, AttentionOf)}
        return {shape for index, shape in timed.items() if self.runner.is_slower(shape, index, shapes)}

    def without_block(self, plan: Plan, index: BranchIndex) -> Plan | None:
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

    def hold(self, index: BranchIndex, shape: Shape | None) -> None:
        """From here on a block saves at most what this shape saves; without a shape it is left alone."""
        self.most_saved[index] = self.space.candidates[index].saved(shape) if shape else 0

    def count_saved(self, plan: Plan) -> int:
        """The parameters that a plan removes."""
        return self.saved_by(plan.shapes)

    def make_plan(self, trial: Trial) -> Plan:
        return Plan(
            shapes=trial.shapes,
            compensated=trial.compensated,
            predicted=trial.predicted,
            calibration=binding_calibration(self.space.calibrations, self.limits.least),
            selection=trial.changes,
            fidelity=trial.fidelity,
            trials=self.runner.trials(),
            fits=self.runner.fit_modules(trial.shapes, trial.compensated),
        )

    def explain_failure(self) -> str:
        measured = [trial for trial in self.runner.trials() if not trial.overflows]
        if not measured:
            tried = "all that were tried overflow" if self.runner.tried else "none saves parameters"
            untouchable = all(index in self.unsafe for index in self.candidates if self.choices.allows_block(index))
            reason = "every block is unsafe to touch" if untouchable else tried
            return f"no replacement fits the budget {self.limits}: {reason}; nothing written"
        closest = min(measured, key=lambda trial: self.budget_share(trial, 1.0))
        dearest = largest_share(list_shares(self.limits, closest.changes, closest.fidelity))
        return (
            f"no replacement fits the budget {self.limits}: closest was block {list_shapes(closest.shapes)} with "
            f"{dearest.figure} on the selection text; nothing written"
        )
