"""Plans that grow by the best predicted damage per parameter, and where on that line the budget ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from compressor.plan.shapes import Shape

LADDER = (0.45, 0.375, 0.3125, 0.25, 0.1875, 0.125, 0.09375, 0.0625, 0.03125, 0.015625)  # ranks per width
MOST_TRIALS = 7
CLOSE_ENOUGH = 0.92  # of the budget


@dataclass(frozen=True)
class Candidate:
    """One candidate for one block."""

    index: int
    shape: Shape
    saved: int
    damage: float  # predicted nats per token


def ladder_of(width: int) -> list[int | None]:
    """Full linear map, then fewer and fewer ranks, then the bias alone."""
    ranks = sorted({round(width * share) for share in LADDER} - {0}, reverse=True)
    return [None, *(r for r in ranks if 2 * r < width), 0]


def efficient(candidates: list[Candidate]) -> list[Candidate]:
    """The lower convex hull of damage over parameters saved: what a price per nat could make one choose."""
    hull: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda o: (o.saved, -o.damage)):
        if candidate.saved <= 0:
            continue
        while hull and (hull[-1].damage >= candidate.damage or not convex(hull, candidate)):
            hull.pop()
        hull.append(candidate)
    return hull


def convex(hull: list[Candidate], candidate: Candidate) -> bool:
    saved, damage = (hull[-2].saved, hull[-2].damage) if len(hull) > 1 else (0, 0.0)
    last = hull[-1]
    return (last.damage - damage) * (candidate.saved - last.saved) < (candidate.damage - last.damage) * (
        last.saved - saved
    )


def sequence(hulls: list[list[Candidate]]) -> list[tuple[dict[int, Shape], float]]:
    """Plans that contain each other, each one step of the best damage per parameter further, with predicted damage."""
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


def bracket(
    plans: list[tuple[dict[int, Shape], float]], target: float, spend: Callable[[int], float], scale: float = 1.0
) -> int | None:
    """The last plan of a growing sequence that spends at most 1, found by corrected prediction and bisection.

    `scale`: what predictions have to be multiplied with, as far as is known.
    """
    low, high = -1, len(plans)
    for trial in range(MOST_TRIALS):
        if high - low <= 1:
            break
        fitting = [k for k in range(low + 1, high) if scale * plans[k][1] <= target]
        guess = max(fitting, default=low + 1) if trial % 4 != 3 else (low + high) // 2
        used = spend(guess)
        scale = min(max(used * target / plans[guess][1], 0.2), 20.0)
        if used > 1:
            high = guess
        else:
            low = guess
            if used >= CLOSE_ENOUGH:
                break
    return low if low >= 0 else None
