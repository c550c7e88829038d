"""Whether what a budget buys is worth having, and which budget would buy enough."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction

from compressor.evaluate.budget import Budget, text_prefix
from compressor.plan.frontier import correct_scale, grow_plans, lower_hull
from compressor.plan.removal import find_trial_of
from compressor.plan.search import Plan, Planner
from compressor.runtime.errors import BudgetError

NOTHING = "; nothing written"
ROOM_FOR_NOISE = 1.3  # of what a plan is predicted to cost: its interval must be inside the budget, not its estimate


def refuse_worthless(planner: Planner, plan: Plan, min_saving: float, parameters: int) -> None:
    """BudgetError for a plan that removes less than `min_saving` per cent of so many parameters."""
    saved, least = planner.count_saved(plan), least_saving(min_saving, parameters)
    if saved >= least:
        return
    enough = budget_for(planner, least, plan)
    instead = f"{enough} may buy that, and " if enough else ""
    raise BudgetError(
        f"not worth it: the budget {planner.limits} buys {saved:,} parameters ({saved / parameters:.2%} of the model), "
        f"less than --min-saving {min_saving:g}%; {instead}--min-saving 0 takes what there is{NOTHING}"
    )


@contextmanager
def advising_budget(planner: Planner, min_saving: float, parameters: int) -> Iterator[None]:
    """A BudgetError from inside also says which budget may buy `min_saving` per cent of so many parameters."""
    try:
        yield
    except BudgetError as error:
        enough = budget_for(planner, max(1, least_saving(min_saving, parameters)))
        advice = f"; {enough} may buy {max(min_saving, 100 / parameters):.2g} % of the parameters" if enough else ""
        raise BudgetError(f"{str(error).removesuffix(NOTHING)}{advice}{NOTHING}") from error


def least_saving(min_saving: float, parameters: int) -> int:
    """The fewest parameters that are at least so many per cent of all."""
    return math.ceil(Fraction(str(min_saving)) * parameters / 100)


def budget_for(planner: Planner, parameters: int, plan: Plan | None = None) -> str | None:
    """The option that would allow a plan to remove so many parameters, as far as is predicted; None where none does.

    Predictions are corrected by what a plan cost on the selection text, compared with its own.
    """
    sizes = {(c.index, c.shape): c.saved for row in planner.usable_candidates for c in row}
    plans = grow_plans([lower_hull(row) for row in planner.usable_candidates], planner.block_weights)
    costs = [damage for shapes, damage in plans if sum(sizes[item] for item in shapes.items()) >= parameters]
    if not costs:
        return None
    scale = 1.0
    if plan is not None:
        scale = correct_scale(1.0, planner.measured_cost(find_trial_of(planner, plan)).measured, plan.predicted)
    nats, limits = ROOM_FOR_NOISE * max(scale, 1.0) * min(costs), planner.limits
    if not limits.limited:
        return f"--max-kl {round_up(max(nats, limits.largest_kl))}"
    words = []
    for name, budget in limits.budgets.items():
        baseline = limits.allowed[name] / math.expm1(limits.nats[name])
        rise = max(baseline * math.expm1(nats), limits.allowed[name])
        amount = Budget(float(round_up(100 * rise / baseline if budget.percent else rise)), budget.percent)
        words.append(f"{text_prefix(name).rstrip()}{'=' if text_prefix(name) else ''}{amount}")
    return f"--max-dppl {' '.join(dict.fromkeys(words))}"


def round_up(value: float) -> str:
    """The next number with two digits: 0.0613 → 0.062."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return f"{math.ceil(value / unit - 1e-9) * unit:.2g}"
