"""The interval of R²_lin: how often it holds, what it is made of, and what it does when there is little to go by."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from torch import Tensor

from compressor.measure.moments import Moments
from compressor.measure.r2_interval import (
    FIT_GROUPS,
    WindowSums,
    fit_variance,
    group_count,
    group_of,
    interval,
    merge,
)
from compressor.measure.regression import AffineMap, decompose, feature_errors, r_squared, solve, solve_part

ROWS, WIDTH = 12, 6  # rows per window, inputs
WEIGHT = torch.randn(WIDTH, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
SCALE = 0.2  # of the logarithm of a window's scale
Window = tuple[Tensor, Tensor]


def draw_windows(count: int, generator: torch.Generator) -> list[Window]:
    """Windows whose rows are alike, in scale and in shift, so that a few of them carry the sums."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    windows = []
    for _ in range(count):
        x = normal(ROWS, WIDTH) * (SCALE * normal(1, 1)).exp() + 0.5 * normal(1, WIDTH)
        windows.append((x, x @ WEIGHT + torch.sin(3 * x @ WEIGHT) + 0.5 * normal(1, 4)))
    return windows


def in_groups(windows: list[Window]) -> list[Moments]:
    count = len(windows)
    parts = [Moments.of(x, y) for x, y in windows]
    return [merge([p for k, p in enumerate(parts) if group_of(k, count) == g]) for g in range(group_count(count))]


def window_sums(fit: AffineMap, windows: list[Window]) -> WindowSums:
    sums = WindowSums()
    for x, y in windows:
        centred = y - fit.mean_y
        sums.errors.append((y - fit(x)).square().sum()[None])
        sums.energies.append(centred.square().sum(-1))
        sums.sums.append(centred.sum(0)[None])
    return sums


def calibrate(fitted: list[Window], held_out: list[Window]) -> tuple[AffineMap, float, tuple[float, float]]:
    """The map, its R², and the interval."""
    groups, held = in_groups(fitted), merge([Moments.of(x, y) for x, y in held_out])
    total = merge(groups)
    spectrum = decompose(total.xx)
    fit = solve(total, spectrum)
    sums = window_sums(fit, held_out)
    r2 = r_squared(feature_errors(fit, held), held)
    noise = fit_variance(groups, spectrum, held)
    errors = torch.cat(sums.errors)
    return fit, r2, interval(r2, errors, sums.spreads(ROWS), sums.lack(ROWS), noise, len(groups))


def test_what_the_held_out_mean_hides_is_made_up_for() -> None:
    """SST about the held-out mean is too small by what that mean varies, here by a fifth with five windows."""
    generator = torch.Generator().manual_seed(8)
    zero = AffineMap(torch.zeros(1, 1, dtype=torch.float64), *torch.zeros(2, 1, dtype=torch.float64))
    found, lacks = [], []
    for _ in range(400):
        shifts = torch.randn(5, 1, 1, generator=generator, dtype=torch.float64)
        sums = window_sums(zero, [(shift.expand(ROWS, 1), shift.expand(ROWS, 1)) for shift in shifts])
        found.append(sums.spreads(ROWS).sum().item() / (5 * ROWS))
        lacks.append(sums.lack(ROWS) / (5 * ROWS))
    assert statistics.fmean(found) == pytest.approx(0.8, abs=0.06)
    assert statistics.fmean(found) + statistics.fmean(lacks) == pytest.approx(1.0, abs=0.07)


@pytest.mark.parametrize("held_out", [4, 9])
def test_the_interval_holds_in_19_of_20_calibrations(held_out: int) -> None:
    """A percentile bootstrap over nine such windows misses in 15 % of calibrations."""
    generator = torch.Generator().manual_seed(0)
    population = merge([Moments.of(x, y) for x, y in draw_windows(1500, generator)])
    truths, intervals = [], []
    for _ in range(200):
        fit, _, ends = calibrate(draw_windows(4 * held_out, generator), draw_windows(held_out, generator))
        truths.append(r_squared(feature_errors(fit, population), population))
        intervals.append(ends)
    truth = statistics.fmean(truths)
    assert sum(not low <= truth <= high for low, high in intervals) <= 0.07 * len(intervals)
    # … and it is no wider than it must be: the standard deviation of R² over calibrations is a quarter of a width.
    assert statistics.median(high - low for low, high in intervals) < 0.5


def test_the_spread_of_windows_adds_up_to_the_variance() -> None:
    windows = draw_windows(7, torch.Generator().manual_seed(3))
    fit = AffineMap(WEIGHT, torch.zeros(WIDTH, dtype=torch.float64), torch.full((4,), 5.0, dtype=torch.float64))
    y = torch.cat([y for _, y in windows])
    spreads = window_sums(fit, windows).spreads(ROWS)
    assert spreads.sum().item() == pytest.approx((y - y.mean(0)).square().sum().item())
    assert spreads[2].item() == pytest.approx((windows[2][1] - y.mean(0)).square().sum().item())


def test_the_noise_of_the_fit_is_that_of_fits_without_a_group() -> None:
    generator = torch.Generator().manual_seed(4)
    fitted, held_out = draw_windows(13, generator), draw_windows(5, generator)
    groups, held = in_groups(fitted), merge([Moments.of(x, y) for x, y in held_out])
    logs = []
    for left_out in range(FIT_GROUPS):
        kept = [window for k, window in enumerate(fitted) if group_of(k, 13) != left_out]
        x, y = (torch.cat(column) for column in zip(*kept, strict=True))
        weight = torch.linalg.lstsq(x - x.mean(0), y - y.mean(0)).solution
        error = sum(((b - y.mean(0)) - (a - x.mean(0)) @ weight).square().sum().item() for a, b in held_out)
        logs.append(math.log(error))
    expected = (FIT_GROUPS - 1) / FIT_GROUPS * sum((log - statistics.fmean(logs)) ** 2 for log in logs)
    assert fit_variance(groups, decompose(merge(groups).xx), held) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("rows", [40, 5])
def test_a_part_is_solved_as_if_alone(rows: int) -> None:
    """Five rows carry no map of six inputs: then it is that of minimum norm."""
    x, y = draw_windows(1, torch.Generator().manual_seed(5))[0]
    whole = torch.randn(60, WIDTH, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    part = Moments.of(whole[:rows], whole[:rows] @ WEIGHT)
    fit = solve_part(part, decompose(Moments.of(whole, whole @ WEIGHT).xx))
    expected = solve(part, decompose(part.xx))
    torch.testing.assert_close(fit(x), expected(x), rtol=1e-7, atol=1e-7)
    assert len(y)


def test_groups_are_neighbours_whatever_the_batches() -> None:
    for windows in (1, 2, 5, 13, 39):
        groups = [group_of(k, windows) for k in range(windows)]
        assert groups == sorted(groups)
        assert set(groups) == set(range(group_count(windows)))
        assert max(map(groups.count, groups)) - min(map(groups.count, groups)) <= 1


def test_one_window_gives_no_interval_and_two_a_wide_one() -> None:
    generator = torch.Generator().manual_seed(7)
    widths: dict[int, list[float]] = {2: [], 9: []}
    for _ in range(9):
        fitted, held_out = draw_windows(36, generator), draw_windows(9, generator)
        _, _, none = calibrate(fitted, held_out[:1])
        assert all(map(math.isnan, none))
        for count, found in widths.items():
            _, r2, (low, high) = calibrate(fitted, held_out[:count])
            assert low < r2 < high < 1
            found.append(high - low)
    assert statistics.median(widths[2]) > 4 * statistics.median(widths[9])


def test_ends_are_never_above_1_and_exact_maps_have_no_width() -> None:
    errors, spreads = torch.tensor([1.0, 30.0, 2.0]), torch.tensor([100.0, 110.0, 90.0])
    low, high = interval(0.89, errors, spreads, 0.0, 0.01, 5)
    assert low < 0.89 < high < 1
    assert interval(1.0, torch.zeros(3), spreads, 0.0, 0.0, 5) == (1.0, 1.0)
    wider = interval(0.89, errors, spreads, 0.0, 0.5, 5)
    assert wider[0] < low
    assert wider[1] > high
