"""The lower hull of sizes and losses, against what it is by definition."""

from __future__ import annotations

import random
from itertools import pairwise

from compressor.evaluate.hull import find_between, lower_hull


def test_the_hull_has_everything_above_it() -> None:
    for seed in range(300):
        chance = random.Random(seed)
        points = [(float(chance.randint(0, 8)), float(chance.randint(0, 8))) for _ in range(chance.randint(1, 9))]
        hull = lower_hull(points)
        corners = [points[number] for number in hull]
        assert corners == sorted(corners)
        assert all(left[0] < right[0] and left[1] > right[1] for left, right in pairwise(corners))
        assert corners[0][0] == min(size for size, _ in points)
        assert corners[-1][1] == min(loss for _, loss in points)
        for size, loss in points:
            between = find_between(points, size)
            assert between is not None
            line = (1 - between.share) * points[between.smaller][1] + between.share * points[between.larger][1]
            assert loss >= line - 1e-9
    assert find_between([(2.0, 1.0)], 1.0) is None
