"""Plans that are healed: what healing is expected to win on this model, and plans with trained replacements."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from compressor.evaluate.fidelity import compare_fidelity_parts, evaluate_against
from compressor.evaluate.perplexity import compare_parts, evaluate
from compressor.heal.distil import Healing, heal
from compressor.heal.settings import HealSettings
from compressor.models.blocks import find_branches
from compressor.patch.tree import Replacements, patched
from compressor.plan.search import Plan, Planner
from compressor.runtime.context import RunContext
from compressor.runtime.errors import BudgetError
from compressor.text import Text

TRIAL_SHARE, LEAST_TRIAL = 0.1, 24_576  # tokens of the trial: of all tokens, and at least
TRIED_PAST = 2.0  # times the budget: the plan that the trial heals
GROWTH = 0.35  # what is left after t times the trial's tokens is the trial's rest to the power of t to this
MOST_ROOM = 3.5  # times the budget, that a plan before healing may cost at most


@dataclass(frozen=True)
class Healer:
    """Heals plans of one model as the user asked for."""

    settings: HealSettings
    text: Text
    context: RunContext

    def expected_room(self, planner: Planner) -> float:
        """How many times the budget a plan may cost before it is healed, from a short trial on this model.

        The plan that the trial heals costs about twice the budget. What more tokens leave of a plan's cost is
        extrapolated: it shrinks ever more slowly.
        """
        try:
            plan = planner.search(TRIED_PAST)
        except BudgetError:
            return 1.0
        tokens = min(self.settings.tokens, max(LEAST_TRIAL, round(TRIAL_SHARE * self.settings.tokens)))
        short = replace(self, settings=replace(self.settings, tokens=tokens, looks=1))
        healed, _ = short.heal_plan(planner, plan, step="heal trial")
        left = share_left(planner, plan, healed)
        expected = extrapolate(left, self.settings.tokens / tokens)
        self.context.progress.note(
            f"  a trial of {tokens:,} tokens leaves {left:.2f} of a plan's cost; {self.settings.tokens:,} are expected "
            f"to leave {expected:.2f}"
        )
        return min(1 / expected, MOST_ROOM)

    def heal(self, model: Any, fits: Replacements, step: str = "heal") -> Healing:
        """Train replacements towards the source."""
        return heal(model, find_branches(model), fits, self.text, self.settings, self.context, step=step)

    def heal_plan(self, planner: Planner, plan: Plan, step: str = "heal") -> tuple[Plan, Healing]:
        """The plan with healed replacements, and what it costs on the selection text."""
        healing = self.heal(planner.model, plan.fits, step)
        return measure_healed(planner, replace(plan, fits=healing.fits)), healing


def measure_healed(planner: Planner, plan: Plan) -> Plan:
    """The plan with what its replacements, which are not as they were fitted, cost on the selection text."""
    runner, context = planner.runner, planner.runner.context
    before = runner.before or runner.measure_source()
    split, parts = runner.text.selection, runner.text.parts("selection")
    with patched(planner.model, planner.blocks, plan.fits):
        if runner.reference is None:
            after, fidelity = evaluate(planner.model, split.windows, context, step="search"), None
        else:
            after, fidelity = evaluate_against(planner.model, runner.reference, split.windows, context, step="search")
    changes = compare_parts(before, after, split, parts, context.confidence, context.seed)
    divergences = (
        compare_fidelity_parts(fidelity, split, parts, context.confidence, context.seed) if fidelity is not None else {}
    )
    return replace(plan, selection=changes, fidelity=divergences)


def share_left(planner: Planner, plan: Plan, healed: Plan) -> float:
    """What is left of a plan's cost after healing, on the text or limit where most is left."""
    left = [
        math.log1p(healed.selection[name].delta / change.baseline) / math.log1p(change.delta / change.baseline)
        for name, change in plan.selection.items()
        if planner.limits.budgets[name].limited and change.delta > 0
    ]
    left += [healed.fidelity[name].kl / change.kl for name, change in plan.fidelity.items() if change.kl > 0]
    return min(1.0, max(left, default=1.0))


def extrapolate(left: float, times: float) -> float:
    """What is expected to be left of a plan's cost after so many times the tokens that left this share."""
    return math.pow(max(left, 1e-3), max(times, 1.0) ** GROWTH)
