"""Plans of growing size, in order of predicted damage per parameter, and the largest of them inside the budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from compressor.plan.shapes import Shape

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


@dataclass(frozen=True)
class Candidate:
    """A shape that one block could take, what it saves, and what it is predicted to cost."""

    index: int  # of the block
    shape: Shape
    saved: int  # parameters
    damage: float  # predicted nats per token


def list_ranks(width: int) -> list[int | None]:
    """The ranks of linear candidates: the full map (None), then fewer and fewer ranks, then the bias alone (0)."""
    ranks = sorted({round(width * share) for share in RANK_SHARES} - {0}, reverse=True)
    return [None, *(r for r in ranks if 2 * r < width), 0]


def lower_hull(candidates: list[Candidate]) -> list[Candidate]:
    """The lower convex hull of damage over parameters saved: those that are best at some price per parameter."""
    hull: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (c.saved, -c.damage)):
        if candidate.saved <= 0:
            continue
        while hull and (hull[-1].damage >= candidate.damage or not is_convex(hull, candidate)):
            hull.pop()
        hull.append(candidate)
    return hull


def is_convex(hull: list[Candidate], candidate: Candidate) -> bool:
    """Whether the hull's last corner stays a corner when this candidate follows it."""
    saved, damage = (hull[-2].saved, hull[-2].damage) if len(hull) > 1 else (0, 0.0)
    last = hull[-1]
    return (last.damage - damage) * (candidate.saved - last.saved) < (candidate.damage - last.damage) * (
        last.saved - saved
    )


def grow_plans(hulls: list[list[Candidate]]) -> list[tuple[dict[int, Shape], float]]:
    """Plans from the smallest to the largest, each with its predicted damage.

    Each plan is the one before it and the next step along some block's hull, the cheapest damage per parameter first.
    """
    steps: list[tuple[float, Candidate, float]] = []
    for hull in hulls:
        saved, damage = 0, 0.0
        for candidate in hull:
            steps.append(
                ((candidate.damage - damage) / (candidate.saved - saved), candidate, candidate.damage - damage)
            )
            saved, damage = candidate.saved, candidate.damage
    plans: list[tuple[dict[int, Shape], float]] = []
    shapes: dict[int, Shape] = {}
    total = 0.0
    for _, candidate, more in sorted(steps, key=lambda step: (step[0], step[1].index, step[1].saved)):
        shapes = shapes | {candidate.index: candidate.shape}
        total += more
        plans.append((shapes, total))
    return plans


def find_largest_plan(
    plans: list[tuple[dict[int, Shape], float]],
    target: float,
    measure_share: Callable[[int], float],
    scale: float = 1.0,
) -> int | None:
    """The index of the largest plan that uses at most 1 of the budget, found by corrected prediction and bisection.

    `measure_share` tries a plan and returns the share of the budget that it uses; `target` is the budget in nats.
    `scale` corrects predictions: it is the ratio of measured and predicted damage, as far as it is known.
    """
    low, high = -1, len(plans)
    for trial in range(MOST_TRIALS):
        if high - low <= 1:
            break
        fitting = [k for k in range(low + 1, high) if scale * plans[k][1] <= target]
        guess = max(fitting, default=low + 1) if trial % 4 != 3 else (low + high) // 2
        used = measure_share(guess)
        scale = min(max(used * target / plans[guess][1], 0.2), 20.0)
        if used > 1:
            high = guess
        else:
            low = guess
            if used >= CLOSE_ENOUGH:
                break
    return low if low >= 0 else None
