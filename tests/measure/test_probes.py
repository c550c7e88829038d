"""Probes on planted rows: products that a bilinear probe must find, and inputs that Adam cannot cope with."""

from __future__ import annotations

import pytest
import torch
from planted import random_text
from torch import Tensor
from zoo import REPRESENTATIVE, tiny_model

from compressor.measure import probes as probing
from compressor.measure.probes import Sample, draw_windows, probe_bilinear, probe_trained, sample_rows
from compressor.measure.profile import measure
from compressor.models.blocks import find_blocks
from compressor.runtime.progress import Progress

WIDTH = 24


def planted(output: object, spread: float = 1.0, rows: int = 3000, seed: int = 0) -> Sample:
    """Rows of correlated inputs whose standard deviations fall to `spread`, and their outputs."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=generator)).Q
    sizes = torch.logspace(0, torch.log10(torch.tensor(spread)).item(), WIDTH)
    x = torch.randn(rows, WIDTH, generator=generator) * sizes @ mix + 0.5
    y = output(x)  # type: ignore[operator]
    return Sample(x[: rows * 4 // 5], y[: rows * 4 // 5], x[rows * 4 // 5 :], y[rows * 4 // 5 :])


def weights(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / WIDTH**0.5


def test_products_are_found() -> None:
    linear, left, right, outer = (
        weights(WIDTH, WIDTH),
        weights(WIDTH, 5, seed=2),
        weights(WIDTH, 5, seed=3),
        weights(5, WIDTH),
    )

    def output(x: Tensor) -> Tensor:
        return x @ linear + 3 * ((x @ left) * (x @ right)) @ outer

    found = probe_bilinear(planted(output, spread=0.1))
    assert found.r2_lin < 0.9
    assert found.r2_poly > 0.999
    assert found.converged
    assert found.gain == pytest.approx(found.r2_poly - found.r2_lin)


def test_leading_directions_are_those_of_the_matrix() -> None:
    generator = torch.Generator().manual_seed(3)
    z, weights = torch.randn(400, 12, generator=generator), torch.randn(400, generator=generator)
    z[:, 4] *= 3
    weights += 0.5 * (z[:, 4] * z[:, 7])  # makes two large eigenvalues of opposite sign
    values, vectors = torch.linalg.eigh(z.T @ (weights[:, None] * z))
    order = values.abs().argsort(descending=True)
    for found, expected in zip(probing.leading_pair(z, weights), vectors[:, order[:2]].T, strict=True):
        assert abs(found @ expected) == pytest.approx(1, abs=0.05)


def test_a_linear_map_leaves_nothing_to_find() -> None:
    found = probe_bilinear(planted(lambda x: x @ weights(WIDTH, WIDTH) + 7))
    assert found.r2_lin == pytest.approx(1.0, abs=1e-6)
    assert abs(found.gain) < 1e-6


def test_an_odd_residual_has_no_product_in_it() -> None:
    """tanh is odd: what a linear map leaves of it is cubic, and a product of centred inputs explains none of it."""
    sample = planted(lambda x: torch.tanh(3 * (x - 0.5) @ weights(WIDTH, WIDTH)), rows=12000)
    found = probe_bilinear(sample)
    assert found.r2_lin < 0.9
    assert abs(found.gain) < 0.02


def test_a_block_that_gives_nothing_is_no_obstacle() -> None:
    sample = planted(lambda x: torch.zeros_like(x))
    assert probe_bilinear(sample).gain == 0
    assert probe_trained(sample, steps=10).gap == pytest.approx(0, abs=1e-6)


def test_adam_reaches_the_closed_form_on_round_inputs_and_not_on_flat_ones() -> None:
    """The output stands in the directions that the inputs hardly use: a condition number of 1e8 hides them."""

    def output(x: Tensor) -> Tensor:
        mix = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0))).Q
        z = (x - 0.5) @ mix.T
        return z / z.std(0)

    easy, hard = (probe_trained(planted(output, spread), steps=3000) for spread in (1.0, 1e-4))
    assert easy.r2_lin == pytest.approx(1, abs=1e-4)
    assert hard.r2_lin == pytest.approx(1, abs=1e-2)
    assert abs(easy.gap) < 0.01
    assert hard.gap > 0.3
    assert easy.steps[-1] == 3000
    assert len(easy.curve) == len(easy.steps) == 10
    assert hard.curve[-1] == hard.r2 > hard.curve[0]


def test_the_same_seed_trains_the_same_map() -> None:
    sample = planted(lambda x: torch.tanh(x @ weights(WIDTH, WIDTH)))
    assert probe_trained(sample, steps=50, seed=3) == probe_trained(sample, steps=50, seed=3)
    assert probe_trained(sample, steps=50, seed=3) != probe_trained(sample, steps=50, seed=4)


@pytest.mark.parametrize("family", REPRESENTATIVE)
def test_the_sampled_rows_are_those_of_the_profile(family: str) -> None:
    model, text = tiny_model(family), random_text()
    profile = measure(model, text)
    for block, sample in sample_rows(model, find_blocks(model), text.fitting, text.held_out, batch_size=7):
        r2, _ = probing.held_out_r2(*sample.moments())
        assert r2 == pytest.approx(profile.blocks[block.index].r2_lin, abs=1e-5)
        assert len(sample.x) == text.fitting.numel()
        assert len(sample.held_y) == text.held_out.numel()


def test_rows_that_memory_does_not_hold_are_sampled_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = random_text()
    everything = draw_windows(text, 32, Progress(visible=True))
    assert everything[2] is False
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(probing, "rows_in_memory", lambda width: 640)
    fitting, held_out, sampled = draw_windows(text, 32, Progress(visible=True))
    assert sampled
    assert fitting.numel() + held_out.numel() == 640
    assert "memory holds 640 of 1,920 rows; 640 are sampled" in capsys.readouterr().err
    kept = {tuple(window) for window in fitting.tolist()}
    assert kept <= {tuple(window) for window in text.fitting.tolist()}
    assert len(kept) == len(fitting)
