"""The search for a size: the plan that removes at least so many parameters, at the smallest rise in perplexity."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from compressor.evaluate.budget import Removal, text_prefix
from compressor.models.blocks import Block
from compressor.models.branches import BranchIndex
from compressor.plan.frontier import (
    Candidate,
    Growth,
    correct_scale,
    find_dear_step,
    grow_plans,
    list_ranks,
    lower_hull,
)
from compressor.plan.search import WORTH_CORRECTING, Plan, Planner
from compressor.plan.shapes import KINDS, Shape, describe_shape, list_shapes
from compressor.plan.trials import Trial
from compressor.runtime.errors import BudgetError, InputError
from compressor.runtime.figures import signed

GRID = 20_000  # steps into which the parameters to be removed are divided, to find the cheapest combination
MOST_DEAR_BLOCKS = 2  # that one search finds and believes, by a few trials each
SPREAD = 1.5  # power of the predicted damages by which a plan's neighbour is chosen: it spreads them over more blocks


@dataclass(frozen=True)
class SizeTarget:
    """How much must go, as it was asked for, from a model of so many parameters."""

    asked: Removal
    model: int

    @property
    def parameters(self) -> int:
        """The fewest that may go."""
        return self.asked.parameters(self.model)

    def share(self, parameters: int) -> str:
        """So many parameters in words, with their share of the model."""
        return f"{parameters:,} parameters ({parameters / self.model:.2%})"


def smallest_size(block: Block, kinds: Collection[str] = KINDS) -> int:
    """The fewest parameters that a replacement of one of these kinds has in this block, or the block's own."""
    least_rank = min((rank for rank in list_ranks(block.width) if rank), default=1)
    neuron = 2 * block.width  # a neuron's parameters, at least
    smallest = {
        "linear": Shape(None),
        "lowrank": Shape(least_rank),
        "pruned": Shape(0, 1),
        "hybrid": Shape(1, 1),
        "bias": Shape(0),
    }
    # A linear map in place of attention may have no bias.
    unbiased = {"linear", "lowrank"} if block.is_attention else set()
    bias = {kind: 0 if kind in unbiased else block.width for kind in kinds}
    sizes = [bias[kind] + smallest[kind].weights(block.width, neuron) for kind in kinds]
    return min([block.parameters, *sizes])


def largest_removal(blocks: Iterable[Block], kinds: Collection[str] = KINDS) -> int:
    """The parameters that go when each of these blocks takes the smallest of the allowed kinds, whatever that costs."""
    return sum(block.parameters - smallest_size(block, kinds) for block in blocks)


def refuse_too_large(target: SizeTarget, blocks: Sequence[Block], kinds: Collection[str] = KINDS) -> None:
    """Refuse a size that no plan could reach, before any work."""
    most = largest_removal(blocks, kinds)
    if target.parameters > most:
        raise InputError(
            f"--remove {target.asked} is {target.share(target.parameters)} of the model, but its {len(blocks)} "
            f"replaceable blocks could free at most {target.share(most)}, each as small as it may become; ask for less"
        )


def cheapest_combination(rows: Sequence[Sequence[Candidate]], least: int, power: float = 1.0) -> Growth | None:
    """One candidate or none of every row, so that at least `least` parameters go at the smallest sum of predicted
    damages, each raised to `power`. None where the rows do not reach it.

    Parameters are counted in steps, rounded down, so the sum is the smallest but for the last step of every block.
    Where that misses the size by rounding, the plan is the first of the growing plans that reaches it.
    """
    unit = max(1, least // GRID)
    steps = -(-least // unit)
    best = torch.full((steps + 1,), math.inf, dtype=torch.float64)
    best[0] = 0.0
    places = torch.arange(steps + 1)
    choices = []
    for row in rows:
        options, choice = best.clone(), torch.full_like(places, -1)
        for number, candidate in enumerate(row):
            sums = best[(places - candidate.saved // unit).clamp(min=0)] + candidate.damage**power
            better = sums < options
            options[better], choice[better] = sums[better], number
        best = options
        choices.append(choice)
    chosen: list[Candidate] = []
    place = steps
    for row, choice in zip(reversed(rows), reversed(choices), strict=True):
        if best[steps].isfinite() and choice[place] >= 0:
            chosen.append(row[int(choice[place])])
            place = max(0, place - chosen[-1].saved // unit)
    if chosen:
        return {c.index: c.shape for c in sorted(chosen, key=lambda c: c.index)}, sum(c.damage for c in chosen)
    saved = {(c.index, c.shape): c.saved for row in rows for c in row}
    plans = grow_plans([lower_hull(list(row)) for row in rows])
    return next((plan for plan in plans if sum(saved[item] for item in plan[0].items()) >= least), None)


def search_size(planner: Planner, target: SizeTarget) -> Plan:
    """The cheapest plan of this size that was found; BudgetError when the size cannot be had."""
    return planner.make_plan(SizeSearch(planner, target).find_trial())


def refuse_over_selection(planner: Planner, plan: Plan, target: SizeTarget) -> Plan:
    """The plan, unless it is over the budget on the selection text, with the room that is left for verification."""
    limits, trial = planner.limits, find_trial_of(planner, plan)
    if limits.limited and planner.budget_share(trial, 1.0) > 1:
        name = max(trial.changes, key=lambda name: trial.changes[name].upper / limits.allowed[name])
        change = trial.changes[name]
        raise BudgetError(
            f"{explain_conflict(planner, plan, target)}: perplexity gave way, {text_prefix(name)}ΔPPL "
            f"{signed(change.delta)} (upper end {signed(change.upper)}) on the selection text, where "
            f"{signed(limits.allowed[name])} is allowed, with room for the noise of the verification text; "
            f"{say_affordable(planner, plan, target)}; nothing written"
        )
    return plan


def explain_conflict(planner: Planner, plan: Plan, target: SizeTarget) -> str:
    """That the cheapest plan of a size breaks a budget: the first half of the error."""
    size = target.share(planner.count_saved(plan))
    return f"--remove {target.asked} is more than the budgets allow; the cheapest plan found removes {size}"


def say_affordable(planner: Planner, plan: Plan, target: SizeTarget) -> str:
    """The size that the perplexity budget allows, as far as the search knows."""
    size = affordable_size(planner, plan)
    known = f"about {target.share(size)}" if size else "nothing"
    return f"as far as this search knows, --max-dppl {planner.limits} allows {known}"


def affordable_size(planner: Planner, plan: Plan) -> int:
    """The largest size that is expected to fit the perplexity budget: of a plan that was tried, or of a predicted one.

    Predictions are corrected by what this plan cost on the selection text, compared with its own.
    """
    usable = {(c.index, c.shape): c.saved for row in planner.usable_candidates for c in row}
    tried = [trial.saved for trial in planner.runner.trials() if planner.budget_share(trial, 1.0) <= 1]
    scale = correct_scale(1.0, planner.measured_cost(find_trial_of(planner, plan)).measured, plan.predicted)
    predicted = [
        sum(usable[item] for item in shapes.items())
        for shapes, damage in planner.growing_plans()
        if scale * damage <= planner.limits.smallest
    ]
    return max([*tried, *predicted], default=0)


def find_trial_of(planner: Planner, plan: Plan) -> Trial:
    """The trial that a plan was made of."""
    return planner.runner.attempt(plan.shapes, plan.predicted, compensated=plan.compensated)


class SizeSearch:
    """Searches for the plan that reaches a size at the smallest cost on the selection text, with few trials.

    Plans come from predictions: the cheapest combination that reaches the size, and a neighbour that spreads the damage
    over more blocks. Each is tried, the cheaper one also with compensation, and the smallest measured cost wins.
    """

    def __init__(self, planner: Planner, target: SizeTarget) -> None:
        self.planner, self.target, self.runner = planner, target, planner.runner

    def find_trial(self) -> Trial:
        """The cheapest trial that reaches the size. BudgetError when the size cannot be had.

        Where attention may go as well, FFNs alone have their turn first.
        """
        for only_ffns in self.planner.turns:
            self.planner.take_turn(only_ffns)
            try:
                self.planner.try_attention()
                self.try_plans()
            except BudgetError:
                if not only_ffns:
                    raise
        while self.planner.ban_slow_shapes(self.best_trial().shapes):
            self.try_plans()
        return self.best_trial()

    def try_plans(self) -> None:
        """Try the plan that is predicted to cost least, its neighbour, and the better of both with compensation."""
        corrections = 0
        while True:
            trial = self.try_plan(1.0)
            if corrections == MOST_DEAR_BLOCKS or not self.believe_dear_block(trial):
                break
            corrections += 1
        self.try_plan(SPREAD)
        best = self.best_trial()
        self.runner.attempt(best.shapes, best.predicted, compensated=self.planner.compensate)

    def try_plan(self, power: float) -> Trial:
        """Try the cheapest plan that neither overflows nor has shapes that are too slow."""
        while True:
            shapes, predicted = self.cheapest_plan(power)
            if self.planner.ban_slow_shapes(shapes):
                continue
            left_out = len(self.runner.overflowing)
            trial = self.runner.attempt(shapes, predicted)
            if not trial.overflows:
                return trial
            if len(self.runner.overflowing) == left_out:  # only together: the dearest of its shapes is given up
                chosen = [c for row in self.planner.usable_candidates for c in row if shapes.get(c.index) == c.shape]
                dearest = max(chosen, key=lambda c: c.damage)
                self.runner.leave_out([(dearest.index, dearest.shape)])

    def cheapest_plan(self, power: float) -> Growth:
        """The cheapest predicted plan. Attention that was not tried, and then an unsafe block, are touched only where
        the size cannot be had without them."""
        plan = self.cheapest_usable(power)
        if plan is None and not self.planner.only_ffns:
            self.planner.admit_untried_attention()
            plan = self.cheapest_usable(power)
        if plan is None and not self.planner.only_ffns:
            self.planner.admit_mild_forms()
            plan = self.cheapest_usable(power)
        if plan is None:
            raise BudgetError(self.explain_limit())
        return plan

    def cheapest_usable(self, power: float) -> Growth | None:
        return cheapest_combination(self.planner.usable_candidates, self.target.parameters, power)

    def believe_dear_block(self, trial: Trial) -> bool:
        """Whether a block of a tried plan costs far more than predicted; then its predictions are corrected."""
        candidates = [c for row in self.planner.usable_candidates for c in row if trial.shapes.get(c.index) == c.shape]
        plans = grow_plans([[candidate] for candidate in candidates])
        costs = {len(plans) - 1: self.planner.measured_cost(trial)}

        def measure(number: int) -> None:
            costs[number] = self.planner.measured_cost(self.runner.attempt(*plans[number]))

        step = find_dear_step(plans, costs, WORTH_CORRECTING * self.planner.limits.smallest, measure)
        if step is None:
            return False
        before = plans[step - 1][0] if step else {}
        dear = next(c for c in candidates if c.index in plans[step][0] and c.index not in before)
        measured = costs[step].measured - (costs[step - 1].measured if step else 0.0)
        self.correct_block(dear, measured - dear.damage)
        return True

    def correct_block(self, dear: Candidate, surplus: float) -> None:
        """Add what a candidate cost beyond its prediction to those of its block, to smaller ones in proportion."""
        corrected = [
            replace(c, damage=c.damage + surplus * min(1.0, c.saved / dear.saved))
            for c in self.planner.candidates[dear.index]
        ]
        self.planner.candidates[dear.index] = [c for c in corrected if math.isfinite(c.damage)]
        self.planner.progress.note(
            f"  block {dear.index} ({describe_shape(dear.index, dear.shape)}) costs far more than predicted, and is "
            "believed to"
        )

    def best_trial(self) -> Trial:
        """Of all tried plans that reach the size with usable shapes, the one with the smallest measured cost."""
        usable = {(c.index, c.shape) for row in self.planner.usable_candidates for c in row}
        reaching = [
            trial
            for trial in self.runner.trials()
            if trial.saved >= self.target.parameters and not trial.overflows and usable.issuperset(trial.shapes.items())
        ]
        if not reaching:
            self.try_plan(1.0)
            return self.best_trial()
        return min(reaching, key=lambda trial: (self.planner.measured_cost(trial).measured, -trial.saved))

    def explain_limit(self) -> str:
        """Why the size cannot be had: how much can go at most, and what is left out."""
        planner, target = self.planner, self.target
        most = sum(max(c.saved for c in row) for row in planner.usable_candidates)
        reasons = []
        if planner.unsafe:
            several = len(planner.unsafe) > 1
            numbers = ", ".join(map(str, planner.unsafe))
            reasons.append(f"block{'s' * several} {numbers} {'are' if several else 'is'} unsafe to touch")
        if self.runner.overflowing:
            overflowing: dict[BranchIndex, Shape] = dict(sorted(self.runner.overflowing, key=str))
            reasons.append(f"{list_shapes(overflowing)} overflows")
        if planner.banned:
            reasons.append(f"{len(planner.banned)} shapes run slower than their block (--objective size allows them)")
        why = "; ".join(reasons) or "no smaller form of the blocks is known"
        return (
            f"--remove {target.asked} cannot be had: {target.share(target.parameters)} must go, at most "
            f"{target.share(most)} can: {why}; nothing written"
        )
