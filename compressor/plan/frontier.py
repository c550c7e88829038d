"""Plans of growing size, in order of predicted damage per parameter, and the largest of them inside the budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from compressor.models.branches import AttentionOf, BranchIndex
from compressor.plan.shapes import Shape

Growth = tuple[dict[BranchIndex, Shape], float]  # a plan and its predicted damage

RANK_SHARES = (
    0.45,
    0.375,
    0.3125,
    0.25,
    0.1875,
    0.125,
    0.09375,
    0.0625,
    0.03125,
    0.015625,
)  # ranks of linear maps, as shares of the width
MOST_TRIALS = 7
CLOSE_ENOUGH = 0.92  # of the budget: a plan that uses this much is not made larger
DEAR = 4.0  # times its predicted cost, from which on a step is believed to cost what was measured
LEAST_DAMAGE = 1e-12  # nats per token, to divide by: a loss-free linear map has none
WELL_USED = 0.8  # of the budget: with a plan that uses this much, no more than `MOST_TRIALS` are tried


class Cost(NamedTuple):
    """What a plan costs, in nats per token."""

    measured: float
    least: float  # less its standard error

    @property
    def noise(self) -> float:
        return self.measured - self.least


@dataclass(frozen=True)
class Candidate:
    """A shape that one block could take, what it saves, and what it is predicted to cost."""

    index: BranchIndex
    shape: Shape
    saved: int  # parameters
    damage: float  # predicted nats per token
    slope: float = 0.0  # nats per token to first order, E[g·e], which the damage leaves out
    lightened: int = 0  # operations and cached values of attention that go too, in parameters that would cost as much

    @property
    def worth(self) -> int:
        """What it saves, in parameters: by this and its damage, candidates are put in order."""
        return self.saved + self.lightened


FORMS = ("ffn", "heads", "map")  # all shapes of an FFN, attention with heads, attention as a linear map


def form_of(candidate: Candidate) -> str:
    """The form of a candidate, one of FORMS: predictions of one form are wrong in the same way."""
    if not isinstance(candidate.index, AttentionOf):
        return "ffn"
    return "heads" if candidate.shape.neurons else "map"


def list_ranks(width: int) -> list[int | None]:
    """The ranks of linear candidates: the full map (None), then fewer and fewer ranks, then the bias alone (0)."""
    ranks = sorted({round(width * share) for share in RANK_SHARES} - {0}, reverse=True)
    return [None, *(r for r in ranks if 2 * r < width), 0]


def lower_hull(candidates: list[Candidate]) -> list[Candidate]:
    """The lower convex hull of damage over worth: those that are best at some price per parameter."""
    hull: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (c.worth, -c.damage)):
        if candidate.saved <= 0:
            continue
        while hull and (hull[-1].damage >= candidate.damage or not is_convex(hull, candidate)):
            hull.pop()
        hull.append(candidate)
    return hull


def is_convex(hull: list[Candidate], candidate: Candidate) -> bool:
    """Whether the hull's last corner stays a corner when this candidate follows it."""
    worth, damage = (hull[-2].worth, hull[-2].damage) if len(hull) > 1 else (0, 0.0)
    last = hull[-1]
    return (last.damage - damage) * (candidate.worth - last.worth) < (candidate.damage - last.damage) * (
        last.worth - worth
    )


def grow_plans(hulls: list[list[Candidate]], weights: Mapping[BranchIndex, float] | None = None) -> list[Growth]:
    """Plans from the smallest to the largest, each with its predicted damage.

    Each plan is the one before it and the next step along some block's hull, the cheapest damage per parameter first.
    With `weights`, the damage of a block counts as many times as its weight says where steps are put in order, and
    there alone.
    """
    steps: list[tuple[float, Candidate, float]] = []
    for hull in hulls:
        worth, damage = 0, 0.0
        for candidate in hull:
            weight = weights[candidate.index] if weights else 1.0
            more = candidate.damage - damage
            steps.append((weight * more / (candidate.worth - worth), candidate, more))
            worth, damage = candidate.worth, candidate.damage
    plans: list[Growth] = []
    shapes: dict[BranchIndex, Shape] = {}
    total = 0.0
    for _, candidate, more in sorted(steps, key=lambda step: (step[0], step[1].index, step[1].saved)):
        shapes = shapes | {candidate.index: candidate.shape}
        total += more
        plans.append((shapes, total))
    return plans


def weigh_blocks(
    unexplained: Mapping[BranchIndex, float], candidates: Mapping[BranchIndex, list[Candidate]]
) -> dict[BranchIndex, float]:
    """The weights with which a block's linear map costs what it leaves unexplained of the block's output, 1 − R².

    The block's other shapes follow in proportion to their predicted damage. Where the damage of the linear map is not
    known, the dearest shape stands for it.
    """
    weights = dict.fromkeys(unexplained, 1.0)
    for index, row in candidates.items():
        if row:
            whole = max(row, key=lambda c: (c.shape == Shape(None), c.damage))
            weights[index] = unexplained[index] / max(whole.damage, LEAST_DAMAGE)
    return weights


def find_largest_plan(
    plans: list[Growth],
    target: float,
    measure_share: Callable[[int], float],
    scale: float = 1.0,
) -> int | None:
    """The index of the largest plan that uses at most 1 of the budget, found by corrected prediction and bisection.

    `measure_share` tries a plan and returns the share of the budget that it uses; `target` is the budget in nats.
    `scale` corrects predictions: it is the ratio of measured and predicted damage, as far as it is known. While nothing
    fits, or what fits leaves much of the budget, the bisection goes on to its end.
    """
    low, high = -1, len(plans)
    shares: dict[int, float] = {}
    while high - low > 1 and shares.get(low, 0.0) < (CLOSE_ENOUGH if len(shares) < MOST_TRIALS else WELL_USED):
        fitting = [k for k in range(low + 1, high) if scale * plans[k][1] <= target]
        by_prediction = len(shares) % 4 != 3 and len(shares) < MOST_TRIALS
        guess = max(fitting, default=low + 1) if by_prediction else (low + high) // 2
        used = shares[guess] = measure_share(guess)
        scale = correct_scale(scale, used * target, plans[guess][1])
        low, high = (low, guess) if used > 1 else (guess, high)
    return low if low >= 0 else None


def correct_scale(scale: float, measured: float, predicted: float) -> float:
    """The ratio of measured and predicted damage, within reason. A plan that is predicted to cost nothing, or that
    costs more than can be measured, has none: then it is what it was."""
    if predicted <= 0 or not math.isfinite(measured):
        return scale
    return min(max(measured / predicted, 0.2), 20.0)


def find_dear_step(
    plans: list[Growth], costs: Mapping[int, Cost], negligible: float, measure: Callable[[int], object]
) -> int | None:
    """The first plan that costs far more than predicted, and by more than its noise, beyond the plan before it.

    `costs` are those of the plans that were tried; `measure` tries one more. Between two of them where the cost rises
    too far, the step is found by bisection.
    """

    def is_dear(low: int, high: int) -> bool:
        rise = costs[high].least - (costs[low].measured if low >= 0 else 0.0)
        return rise > DEAR * predicted_rise(plans, low, high) + negligible

    low, high = next(((a, b) for a, b in pairwise([-1, *sorted(costs)]) if is_dear(a, b)), (0, 0))
    while high - low > 1:
        middle = (low + high) // 2
        measure(middle)
        if is_dear(low, middle):
            high = middle
        elif is_dear(middle, high):
            low = middle
        else:
            return None
    return high if high > low else None


def predicted_rise(plans: list[Growth], low: int, high: int) -> float:
    """Nats that the steps from one plan to another are predicted to cost; −1 is the plan without steps."""
    return plans[high][1] - (plans[low][1] if low >= 0 else 0.0)
