"""The lower hull of sizes and losses: which files no mixture of others beats, and what a mixture gives at a size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

Point = tuple[float, float]  # a size, and a loss


@dataclass(frozen=True)
class Between:
    """A size as a mixture of two files: `share` of the larger one, the rest of the smaller one."""

    smaller: int
    larger: int
    share: float


def lower_hull(points: Sequence[Point]) -> list[int]:
    """The numbers of the points on the lower hull, from the smallest to the one of the least loss.

    No point lies below a straight line between two neighbours on it. Beyond the least loss more size buys nothing.
    """
    order = sorted(range(len(points)), key=lambda number: (points[number], number))
    hull: list[int] = []
    for number in order:
        if hull and points[number][1] >= points[hull[-1]][1]:
            continue  # as large or larger, and no better
        while len(hull) > 1 and not turns_up(points[hull[-2]], points[hull[-1]], points[number]):
            hull.pop()
        if hull and points[hull[-1]][0] == points[number][0]:
            hull.pop()
        hull.append(number)
    return hull


def turns_up(first: Point, middle: Point, last: Point) -> bool:
    """Whether the middle point lies below the straight line between the other two."""
    return (middle[0] - first[0]) * (last[1] - first[1]) > (middle[1] - first[1]) * (last[0] - first[0])


def find_between(points: Sequence[Point], size: float) -> Between | None:
    """The two neighbours on the lower hull between which a size lies; None if it is below the smallest.

    At or beyond the point of the least loss both are that point.
    """
    hull = lower_hull(points)
    if not hull or size < points[hull[0]][0]:
        return None
    for smaller, larger in pairwise(hull):
        low, high = points[smaller][0], points[larger][0]
        if size < high:
            return Between(smaller, larger, (size - low) / (high - low))
    return Between(hull[-1], hull[-1], 1.0)
