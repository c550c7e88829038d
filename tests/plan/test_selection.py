"""Neurons are chosen and refitted as a direct computation on the raw rows would: known answers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from compressor.measure.moments import Moments
from compressor.plan import selection
from compressor.plan.selection import (
    Elimination,
    choose_shrinkage,
    eliminate,
    factor_metric,
    refit,
    scale_moments,
    solve_weights,
    weighted_error,
)

WIDTH, NEURONS, ROWS = 24, 60, 4000
EYE = torch.eye(WIDTH, dtype=torch.float64)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def moments_of(x: Tensor, a: Tensor, missing: Tensor | None = None, weights: Tensor | None = None) -> Moments:
    return Moments.of(torch.cat([x, a], 1), x[:, :0] if missing is None else missing, weights, whole_yy=False)


class Planted:
    """A rank-5 linear map made of pairs silu(z) − silu(−z) = z, 7 live neurons, 3 duplicates of them, the rest dead."""

    def __init__(self, mean: float = 0.3) -> None:
        self.x = random(ROWS, WIDTH, seed=1) + mean
        linear, into = random(5, WIDTH, seed=2), random(5, WIDTH, seed=3)
        self.inner = torch.zeros(NEURONS, WIDTH, dtype=torch.float64)
        self.outer = torch.zeros(NEURONS, WIDTH, dtype=torch.float64)
        self.inner[:5], self.inner[5:10], self.outer[:5], self.outer[5:10] = linear, -linear, into, -into
        self.inner[10:17], self.outer[10:17] = random(7, WIDTH, seed=4), random(7, WIDTH, seed=5)
        self.inner[17:20], self.outer[17:20] = self.inner[10:13], random(3, WIDTH, seed=6)
        self.outer[20:40] = random(20, WIDTH, seed=7)  # inner rows of zero: they never fire
        self.inner[40:] = random(20, WIDTH, seed=8)  # they fire, and nobody listens
        self.a = silu(self.x @ self.inner.T)
        self.y = self.a @ self.outer
        self.moments = moments_of(self.x, self.a)
        self.scaled = scale_moments(self.moments, self.outer)

    def eliminate(self, *, with_inputs: bool, counts: tuple[int, ...] = ()) -> Elimination:
        return eliminate(self.scaled, EYE, list(counts), with_inputs=with_inputs)


def test_a_rank_5_map_with_7_live_neurons_is_found_as_exactly_that() -> None:
    planted = Planted()
    run = planted.eliminate(with_inputs=True)
    free = run.subsets[0]
    assert len(free.kept) == 7
    live = {n - 7 if 17 <= n < 20 else n for n in free.kept.tolist()}  # one of each pair of duplicates
    assert live == set(range(10, 17))
    assert free.errors[5] < 1e-8 * run.total < 1e-3 * run.total < free.errors[4]
    made = refit(planted.moments, planted.scaled, torch.zeros(WIDTH), planted.outer, free.kept, 5, (EYE, EYE), 1e-9)
    assert made.inputs is not None
    assert made.outputs is not None
    output = made.bias + planted.x @ made.inputs @ made.outputs.T + planted.a[:, made.kept] @ made.outer
    assert (output - planted.y).abs().max() < 1e-4 * planted.y.abs().max()


def test_without_the_inputs_the_linear_map_needs_its_neurons() -> None:
    run = Planted().eliminate(with_inputs=False)
    assert len(run.subsets[0].kept) == 17
    assert set(run.subsets[0].kept.tolist()) >= set(range(10))


@pytest.mark.parametrize("with_inputs", [True, False])
def test_dead_neurons_go_first_then_duplicates(with_inputs: bool) -> None:
    order = Planted().eliminate(with_inputs=with_inputs).order.tolist()
    assert sorted(order) == list(range(NEURONS))
    assert set(order[:40]) == set(range(20, 60))
    if not with_inputs:
        assert all(n in range(10, 20) for n in order[40:43])


@pytest.mark.parametrize("with_inputs", [True, False])
def test_the_error_of_a_subset_is_that_of_least_squares_on_the_rows(with_inputs: bool) -> None:
    x = random(800, 6, seed=1) + 5
    a = silu(x @ random(6, 20, seed=2))
    outer, root = random(20, 6, seed=3), random(6, 6, seed=4)
    run = eliminate(scale_moments(moments_of(x, a), outer), root, [15, 9, 4], with_inputs=with_inputs)
    for subset in run.subsets:
        for rank in (0, 6):
            features = torch.cat([torch.ones(800, 1), a[:, subset.kept], *([x] if rank else [])], 1)
            y = a @ outer
            errors = (features @ torch.linalg.lstsq(features, y).solution - y) @ root
            expected = errors.square().sum().item() / 800
            assert subset.errors[rank].item() == pytest.approx(expected, rel=1e-4, abs=1e-7 * run.total)


def test_a_greedy_step_is_the_best_single_removal() -> None:
    x = random(500, 4, seed=1)
    a = silu(x @ random(4, 8, seed=2))
    outer = random(8, 4, seed=3)
    run = eliminate(scale_moments(moments_of(x, a), outer), torch.eye(4, dtype=torch.float64), [7], with_inputs=False)

    def error(gone: int) -> float:
        kept = [n for n in range(8) if n != gone]
        features = torch.cat([torch.ones(500, 1), a[:, kept]], 1)
        y = a @ outer
        return (features @ torch.linalg.lstsq(features, y).solution - y).square().sum().item()

    assert int(run.order[0]) == min(range(8), key=error)


@pytest.mark.parametrize("mean", [0.0, 1e4])
def test_a_refit_is_weighted_least_squares_on_the_rows(mean: float) -> None:
    x = random(600, 5, seed=1)
    a = silu(x @ random(5, 12, seed=2)) + mean
    x = x + mean
    outer, weights = random(12, 5, seed=3), random(600, seed=4).exp()
    kept, bias = torch.tensor([0, 3, 4, 9]), random(5, seed=5)
    y = a @ outer + bias
    moments = moments_of(x, a, None, weights)
    eye = torch.eye(5).double()
    made = refit(moments, scale_moments(moments, outer), bias, outer, kept, None, (eye, eye), 0.0)
    assert made.outputs is not None
    output = made.bias + x @ made.outputs.T + a[:, kept] @ made.outer
    features = torch.cat([torch.ones(600, 1), a[:, kept] - mean, x - mean], 1)
    root = weights.sqrt()[:, None]
    expected = features @ torch.linalg.lstsq(root * features, root * y).solution
    torch.testing.assert_close(output - y, expected - y, rtol=1e-4, atol=1e-5 * (1 + mean / 100))


def test_the_low_rank_beside_neurons_is_the_best_in_the_metric() -> None:
    """No other projection of the linear part errs less; the whole of it, less still."""
    planted = Planted()
    kept = torch.arange(10, 14)
    root = factor_metric(random(WIDTH, WIDTH, seed=9) @ random(WIDTH, WIDTH, seed=9).T)
    errors = []
    for rank in (0, 1, 3, None):
        change, linear = solve_weights(planted.scaled, kept, rank, root, 0.0, 0.0)
        errors.append(weighted_error(planted.scaled, kept, change, linear, root[0], 0.0))
    assert errors == sorted(errors, reverse=True)
    change, linear = solve_weights(planted.scaled, kept, 3, root, 0.0, 0.0)
    assert linear is not None
    for seed in range(5):
        other = linear[0] + 1e-2 * linear[0].norm() * random(*linear[0].shape, seed=seed) / 30
        through = torch.linalg.solve(
            planted.scaled.gram[WIDTH + kept][:, WIDTH + kept], planted.scaled.gram[WIDTH + kept, :WIDTH]
        )
        moved = change - through @ ((other - linear[0]) @ linear[1].T)
        assert weighted_error(planted.scaled, kept, moved, (other, linear[1]), root[0], 0.0) >= errors[2]


def test_what_the_stream_lacks_is_made_up_for() -> None:
    """With the whole target, a refit is least squares on the output and what is missing together."""
    x = random(900, 5, seed=1)
    a = silu(x @ random(5, 10, seed=2))
    outer = random(10, 5, seed=3)
    missing = 0.3 * torch.sin(a @ random(10, 5, seed=4)) + 0.2
    kept = torch.arange(6)
    eye = torch.eye(5, dtype=torch.float64)
    moments = moments_of(x, a, missing)
    made = refit(moments, scale_moments(moments, outer), torch.zeros(5), outer, kept, 0, (eye, eye), 0.0, target=1.0)
    features = torch.cat([torch.ones(900, 1), a[:, kept]], 1)
    wanted = a @ outer + missing
    expected = features @ torch.linalg.lstsq(features, wanted).solution
    torch.testing.assert_close(made.bias + a[:, kept] @ made.outer, expected, rtol=1e-6, atol=1e-6)
    assert made.inputs is made.outputs is None


def test_strength_and_target_are_those_that_held_out_rows_want() -> None:
    """What is missing follows the neurons: all of it is wanted. It is noise: none of it, or with a strong hand."""

    def half(seed: int, noise: bool) -> Moments:
        x = random(150, 5, seed=seed)
        a = silu(x @ random(5, 30, seed=2))
        follows = 0.3 * a @ random(30, 5, seed=4)
        return moments_of(x, a, random(150, 5, seed=seed + 50) if noise else follows)

    outer, kept = random(30, 5, seed=3), torch.arange(30)
    eye = torch.eye(5, dtype=torch.float64)
    ridge, target = choose_shrinkage(scale_moments(half(1, False), outer), half(9, False), outer, kept, 0, (eye, eye))
    assert target == 1.0
    assert ridge <= 1e-3
    ridge, target = choose_shrinkage(scale_moments(half(1, True), outer), half(9, True), outer, kept, 0, (eye, eye))
    assert target < 1.0 or ridge == 1.0


def test_every_neuron_kept_changes_nothing() -> None:
    planted = Planted()
    kept = torch.arange(NEURONS)
    moments, scaled, bias = planted.moments, planted.scaled, torch.zeros(WIDTH)
    made = refit(moments, scaled, bias, planted.outer, kept, 0, (EYE, EYE), 1e-3, with_error=True)
    assert made.error == pytest.approx(0, abs=1e-12)
    live = planted.inner.square().sum(1) > 0
    torch.testing.assert_close(made.outer[live], planted.outer[live])
    assert math.isfinite(made.bias.sum().item())


@pytest.mark.parametrize("with_inputs", [True, False])
def test_an_elimination_in_place_and_in_few_coordinates_finds_the_same(
    monkeypatch: pytest.MonkeyPatch, with_inputs: bool
) -> None:
    """Large blocks are not copied, and those of many outputs are turned: here both are done to a small block."""
    a = random(300, NEURONS, seed=1) @ random(NEURONS, NEURONS, seed=2)
    x, outer, root = random(300, WIDTH, seed=3) + a[:, :WIDTH], random(NEURONS, 90, seed=4), random(90, 90, seed=5)
    scaled = scale_moments(moments_of(x, a), outer)
    monkeypatch.setattr(selection, "STEP", 7)
    runs = []
    for few in (False, True):
        monkeypatch.setattr(selection, "COPIED_FEATURES", 0 if few else 10**6)
        monkeypatch.setattr(selection, "MANY_OUTPUTS", 0 if few else 10**6)
        runs.append(eliminate(scaled, root, [10, 20, 30, 50], with_inputs=with_inputs))
    expected, found = runs
    assert found.order.equal(expected.order)
    assert [s.kept.tolist() for s in found.subsets] == [s.kept.tolist() for s in expected.subsets]
    for one, other in zip(found.subsets, expected.subsets, strict=True):
        assert torch.allclose(one.errors, other.errors, rtol=1e-8, atol=1e-12 * expected.total)
