"""The mathematics against known answers: planted maps, and lstsq in float64 on the raw rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compressor.measure.moments import GRAM_TILE, Moments, gram
from compressor.measure.regression import (
    choose_ridge,
    decompose,
    effective_rank,
    feature_errors,
    r_squared,
    reduce_rank,
    solve,
)


def rows(n: int, d: int, seed: int = 0) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def reference(x: Tensor, y: Tensor, held_x: Tensor, held_y: Tensor) -> float:
    """R² of lstsq (minimum norm, on centred raw rows) on other raw rows."""
    weight = torch.linalg.lstsq(x - x.mean(0), y - y.mean(0), driver="gelsd").solution
    error = held_y - (y.mean(0) + (held_x - x.mean(0)) @ weight)
    return 1 - (error.square().sum() / (held_y - held_y.mean(0)).square().sum()).item()


def from_moments(x: Tensor, y: Tensor, held_x: Tensor, held_y: Tensor) -> float:
    moments, held = Moments.of(x, y), Moments.of(held_x, held_y)
    fit = solve(moments, decompose(moments.xx))
    return r_squared(feature_errors(fit, held), held)


def nonlinear(x: Tensor, seed: int = 9) -> Tensor:
    w = rows(x.shape[1], 40, seed)
    return torch.tanh(x @ w / x.shape[1] ** 0.5) @ rows(40, 12, seed + 1)


@pytest.mark.parametrize("width", [3, GRAM_TILE, GRAM_TILE + 1, 2 * GRAM_TILE + 7])
def test_gram_is_the_full_product(width: int) -> None:
    x = rows(50, width)
    torch.testing.assert_close(gram(x), x.T @ x)


@pytest.mark.parametrize("mean", [0.0, 1e3, 1e6])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("whole_yy", [False, True])
def test_moments_of_parts_add_up_to_the_whole(mean: float, weighted: bool, whole_yy: bool) -> None:
    x = rows(300, 8) + mean
    y = nonlinear(x - mean) - mean
    w = rows(300, 1, 5)[:, 0].exp() if weighted else None
    total = Moments.zeros(8, 12, whole_yy=whole_yy)
    for part in torch.arange(300).split([1, 99, 150, 50]):
        total.add(Moments.of(x[part], y[part], None if w is None else w[part], whole_yy=whole_yy))
    whole = Moments.of(x, y, w, whole_yy=whole_yy)
    torch.testing.assert_close(whole.variances, Moments.of(x, y, w).yy.diagonal())
    assert total.rows == 300
    for name in ("weight", "mean_x", "mean_y", "xx", "xy", "yy"):
        torch.testing.assert_close(getattr(total, name), getattr(whole, name), rtol=1e-8, atol=1e-6)


def test_a_planted_affine_map_is_found_exactly() -> None:
    x, true = rows(500, 10), rows(10, 6, 1)
    y = x @ true + 3.0
    moments = Moments.of(x, y)
    fit = solve(moments, decompose(moments.xx))
    torch.testing.assert_close(fit.weight, true)
    torch.testing.assert_close(fit.bias, torch.full((6,), 3.0, dtype=torch.float64))
    assert from_moments(x[:400], y[:400], x[400:], y[400:]) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize(
    "case", ["plain", "huge mean", "rank deficient", "near collinear", "outlier row", "few rows", "constant feature"]
)
def test_r2_agrees_with_lstsq_on_the_raw_rows(case: str) -> None:
    x = rows(700, 16)
    y = nonlinear(x)
    if case == "huge mean":
        x, y = x + 1e5, y - 1e5
    elif case == "rank deficient":
        x = torch.cat([x[:, :10], x[:, :6]], dim=1)
    elif case == "near collinear":
        x = torch.cat([x[:, :15], x[:, :1] + 1e-5 * x[:, 15:]], dim=1)
    elif case == "outlier row":
        x[13], y[13] = 1e4 * x[13], 1e4 * y[13]
    elif case == "few rows":
        x, y = torch.cat([x[:12], x[500:]]), torch.cat([y[:12], y[500:]])
    elif case == "constant feature":
        x[:, 3] = 7.0
    cut = 12 if case == "few rows" else 500
    split = (x[:cut], y[:cut], x[cut:], y[cut:])
    assert from_moments(*split) == pytest.approx(reference(*split), abs=1e-6)


def test_rank_deficient_inputs_give_the_minimum_norm_answer() -> None:
    x = rows(200, 4)
    x = torch.cat([x, x], dim=1)
    y = x[:, :4] @ rows(4, 3, 2)
    moments = Moments.of(x, y)
    fit = solve(moments, decompose(moments.xx))
    expected = torch.linalg.lstsq(x - x.mean(0), y - y.mean(0), driver="gelsd").solution
    torch.testing.assert_close(fit.weight, expected)


def test_every_ridge_equals_lstsq_on_augmented_rows_and_the_best_is_chosen() -> None:
    x, noise = rows(60, 30), rows(60, 12, 3)
    y = x @ rows(30, 12, 2) * 0.1 + noise
    held_x = rows(400, 30, 7)
    held_y = held_x @ rows(30, 12, 2) * 0.1 + rows(400, 12, 8)
    moments, held = Moments.of(x, y), Moments.of(held_x, held_y)
    spectrum = decompose(moments.xx)
    ridge, fit = choose_ridge(moments, spectrum, held)
    assert ridge > 0  # 60 noisy rows for 30 inputs: plain least squares overfits
    plain = solve(moments, spectrum)
    assert feature_errors(fit, held).sum() < feature_errors(plain, held).sum()
    lam = ridge * spectrum.values.mean()
    augmented_x = torch.cat([x - x.mean(0), lam.sqrt() * torch.eye(30, dtype=torch.float64)])
    augmented_y = torch.cat([y - y.mean(0), torch.zeros(30, 12, dtype=torch.float64)])
    torch.testing.assert_close(fit.weight, torch.linalg.lstsq(augmented_x, augmented_y).solution)


def test_a_planted_low_rank_map_is_found_at_its_rank() -> None:
    x = rows(400, 20) * torch.logspace(0, -3, 20, dtype=torch.float64)
    true = rows(20, 5, 1) @ rows(5, 20, 2)
    moments = Moments.of(x, x @ true)
    spectrum = decompose(moments.xx)
    ladder = reduce_rank(solve(moments, spectrum), spectrum)
    errors = [feature_errors(ladder.at(r), moments).sum().item() for r in range(7)]
    assert errors[5] == pytest.approx(0, abs=1e-9 * errors[0])
    assert errors[4] > 1e-6 * errors[0]


@pytest.mark.parametrize("with_metric", [False, True])
def test_reduced_rank_regression_beats_every_other_rank_r_map(with_metric: bool) -> None:
    """Anisotropic inputs: the SVD of the full map is clearly worse, and random restarts never win."""
    x = rows(600, 12) * torch.logspace(1, -2, 12, dtype=torch.float64)
    y = nonlinear(x) + x @ rows(12, 12, 3)
    m = rows(12, 12, 6) * torch.logspace(1, -1, 12, dtype=torch.float64)
    metric = m.T @ m if with_metric else torch.eye(12, dtype=torch.float64)
    moments = Moments.of(x, y)
    spectrum = decompose(moments.xx)
    full = solve(moments, spectrum)
    ladder = reduce_rank(full, spectrum, metric if with_metric else None)

    def cost(weight: Tensor) -> float:
        error = (y - y.mean(0)) - (x - x.mean(0)) @ weight
        return (error @ metric * error).sum().item()

    rank = 3
    best = cost(ladder.at(rank).weight)
    u, s, v = torch.linalg.svd(full.weight)
    assert best < 0.999 * cost(u[:, :rank] * s[:rank] @ v[:rank])
    for seed in range(20):
        a = ladder.inputs[:, :rank] + 0.05 * ladder.inputs.std() * rows(12, rank, seed)
        b = torch.linalg.lstsq((x - x.mean(0)) @ a, y - y.mean(0)).solution
        assert best <= cost(a @ b) * (1 + 2e-3 if with_metric else 1)
    assert cost(ladder.at(12).weight) == pytest.approx(cost(full.weight))


def test_effective_rank_counts_equal_directions() -> None:
    assert effective_rank(torch.eye(7, dtype=torch.float64)) == pytest.approx(7)
    assert effective_rank(torch.diag(torch.tensor([1.0, 1.0, 0.0, 0.0]).double())) == pytest.approx(2)
    assert effective_rank(torch.zeros(3, 3).double()) == 0
