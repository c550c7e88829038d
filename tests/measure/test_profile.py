"""The profile against lstsq on the raw rows, and what it says of planted blocks."""

from __future__ import annotations

import pytest
import torch
from planted import SEQ_LEN, ConstantFFN, LinearFFN, WildFFN, planted_model, random_text
from torch import Tensor
from zoo import REPRESENTATIVE, WIDTH, tiny_model

from compressor.measure.gradients import predict_damages
from compressor.measure.profile import ROWS_PER_FEATURE, BlockProfile, calibration_window, measure, row_weights
from compressor.measure.study import StudyOptions, study
from compressor.models.blocks import Block, BranchIndex, Rows, backbone, capture_rows, find_blocks, find_branches
from compressor.models.neurons import find_neurons
from compressor.runtime.context import RunContext
from compressor.runtime.errors import InputError
from compressor.text import batches


def raw_rows(model: torch.nn.Module, windows: Tensor) -> dict[BranchIndex, tuple[Tensor, Tensor, Tensor]]:
    found: dict[BranchIndex, list[tuple[Tensor, ...]]] = {}

    def keep(block: Block, rows: Rows) -> None:
        found.setdefault(block.index, []).append((rows.x.double(), rows.y.double(), rows.h.double()))

    with torch.no_grad(), capture_rows(model, find_branches(model), keep):
        for batch in batches(windows, 7):
            backbone(model)(input_ids=batch, use_cache=False)
    return {index: tuple(torch.cat(c) for c in zip(*parts, strict=True)) for index, parts in found.items()}  # type: ignore[misc]


def reference(fit: tuple[Tensor, ...], held: tuple[Tensor, ...], weighted: bool) -> float:
    """Weighted least squares by lstsq on rows scaled by the root of their weight, R² about the weighted mean."""
    (x, y, h), (hx, hy, hh) = fit, held
    w, hw = (row_weights(h), row_weights(hh)) if weighted else (torch.ones(len(x)), torch.ones(len(hx)))
    w, hw = w.double()[:, None], hw.double()[:, None]
    mx, my = (w * x).sum(0) / w.sum(), (w * y).sum(0) / w.sum()
    rows = w.sqrt() * (x - mx)
    # lstsq cuts singular values relative to the largest; the floor is 8 float32 roundings of a typical one.
    values = torch.linalg.svdvals(rows)
    floor = 8 * torch.finfo(torch.float32).eps * values.square().mean().sqrt() / values[0]
    weight = torch.linalg.lstsq(rows, w.sqrt() * (y - my), rcond=floor.item(), driver="gelsd").solution
    error = hy - my - (hx - mx) @ weight
    centred = hy - (hw * hy).sum(0) / hw.sum()
    return 1 - ((hw * error.square()).sum() / (hw * centred.square()).sum()).item()


@pytest.mark.parametrize("family", REPRESENTATIVE)
def test_r2_agrees_with_lstsq_on_the_raw_rows(family: str) -> None:
    model, text = tiny_model(family), random_text()
    profile = measure(model, text, RunContext(batch_size=5))
    fit, held = raw_rows(model, text.fitting), raw_rows(model, text.held_out)
    assert len(profile.branches) == 6
    for block in profile.branches:
        index = block.block.index
        assert block.r2_lin == pytest.approx(reference(fit[index], held[index], False), abs=1e-6)
        assert block.r2_stream == pytest.approx(reference(fit[index], held[index], True), abs=1e-6)
        assert block.r2_lin_ci95[0] <= block.r2_lin <= block.r2_lin_ci95[1]
    assert profile.rows_fitted == text.fitting.numel()
    assert profile.rows_held_out == text.held_out.numel()


def test_batches_do_not_change_the_profile() -> None:
    model, text = tiny_model("llama"), random_text()
    one, many = (measure(model, text, RunContext(batch_size=size)) for size in (1, 64))
    for a, b in zip(one.blocks, many.blocks, strict=True):
        assert a.r2_lin == pytest.approx(b.r2_lin, abs=1e-6)
        assert a.r2_lin_ci95 == pytest.approx(b.r2_lin_ci95, abs=1e-6)


def test_planted_blocks_are_recognised() -> None:
    """Linear is 1, wild is near 0, and outlier rows lift R²_lin but not the stream-weighted one."""
    model = planted_model(WildFFN(outliers=300.0), LinearFFN(), WildFFN(), mark_first_position=True)
    text = random_text()
    outlier, linear, wild = measure(model, text).blocks
    assert linear.r2_lin == pytest.approx(1.0, abs=1e-6)
    assert linear.r2_stream == pytest.approx(1.0, abs=1e-6)
    assert wild.r2_lin < 0.3
    assert outlier.r2_lin > 0.9
    assert outlier.r2_stream < 0.3
    assert outlier.effective_rank < 2 < wild.effective_rank
    # A window in 32 rows has one outlier: the top 0.1 % of 384 held-out rows is one row of twelve.
    assert outlier.top_row_share == pytest.approx(SEQ_LEN / text.held_out.numel(), rel=0.2)
    assert wild.top_row_share < 0.02


def test_the_interval_is_narrow_where_windows_agree() -> None:
    model = planted_model(LinearFFN(), WildFFN(), WildFFN(seed=5))
    linear, wild, _ = measure(model, random_text()).blocks
    assert linear.r2_lin_ci95[1] - linear.r2_lin_ci95[0] < 1e-9
    assert wild.r2_lin_ci95[1] - wild.r2_lin_ci95[0] > 1e-3


def test_nan_activations_are_refused_by_block() -> None:
    model = planted_model(LinearFFN(), WildFFN(outliers=float("nan")), WildFFN())
    with pytest.raises(InputError, match=r"block 1 \(transformer.h.1.mlp\) has NaN or Inf"):
        measure(model, random_text())


def assert_constant(block: BlockProfile) -> None:
    """What R² says of an output that never varies: the mean explains it all, and no row carries anything."""
    assert block.r2_lin == block.r2_stream == block.r2_ridge == block.r2_ridge_stream == block.r2_median == 1
    assert block.r2_lin_ci95 == (1, 1)
    assert block.top_row_share == block.top_position_share == block.effective_rank == 0
    assert block.top_rows == ()
    assert block.sufficient_rank == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", REPRESENTATIVE)
def test_a_block_without_output_weights_is_constant_and_safe(family: str, dtype: torch.dtype) -> None:
    """Its output is its bias, or zero; rounding divided by rounding must not be an alarm."""
    model, text = tiny_model(family).to(dtype), random_text()
    neurons = find_neurons(model, find_blocks(model)[1])
    assert neurons is not None
    with torch.no_grad():
        outer = neurons.outer_matrix.module
        outer.weight.zero_()
        if outer.bias is not None:
            outer.bias.copy_(torch.randn(outer.bias.shape, generator=torch.Generator().manual_seed(0)))
    profile = measure(model, text)
    assert_constant(profile.blocks[1])
    assert profile.blocks[0].r2_lin < 1
    damages = predict_damages(model, profile, text, RunContext())
    for swap in (False, True):
        found = study(model, profile, damages, text, StudyOptions(swap=swap), RunContext())
        assert found.verdicts[1].word == "safe", found.verdicts[1].reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-3, 3.0, 100.0])
def test_an_output_that_is_constant_up_to_rounding_is_constant(size: float, dtype: torch.dtype) -> None:
    model = planted_model(WildFFN(), LinearFFN(), ConstantFFN(size)).to(dtype)
    wild, linear, constant = measure(model, random_text(), RunContext(batch_size=3)).blocks
    assert_constant(constant)
    assert wild.r2_lin < 0.5
    assert 0.9 < linear.r2_lin < 1


def test_a_small_variation_about_a_large_mean_is_not_constant() -> None:
    block = LinearFFN()
    with torch.no_grad():
        block.bias.fill_(1000.0)
    measured = measure(planted_model(WildFFN(), block, WildFFN(seed=5)), random_text()).blocks[1]
    assert 0.9 < measured.r2_lin < 1
    assert measured.effective_rank > 2


def test_few_rows_are_named_and_the_ridge_is_chosen_on_held_out_rows() -> None:
    """Forty rows carry no map of 32 inputs: plain least squares shows its own noise, the ridge the block."""
    model = planted_model(LinearFFN(), WildFFN(), WildFFN(seed=5))
    many = measure(model, random_text(120)).blocks
    for calibration in (6, 12):
        text = random_text(calibration, seed=3)
        few = measure(model, text).blocks
        for block, enough in zip(few, many, strict=True):
            assert block.carried == (text.fitting.numel() >= ROWS_PER_FEATURE * WIDTH)
            assert block.r2_ridge >= block.r2_lin
            assert enough.carried
            assert enough.r2_ridge == pytest.approx(enough.r2_lin, abs=0.02)
            assert block.tokens_needed % SEQ_LEN == 0
            windows = block.tokens_needed // SEQ_LEN
            assert random_text(windows).fitting.numel() >= ROWS_PER_FEATURE * WIDTH
        if not few[1].carried:
            assert few[1].r2_lin < -0.05  # as if a constant were better
            assert few[1].r2_ridge > -0.05
            assert few[1].r2_ridge_stream > -0.05
            fit, held = (raw_rows(model, windows)[1] for windows in (text.fitting, text.held_out))
            tried, plain = few[1].trial_map, few[1].linear
            errors = [(held[1] - fitted(held[0])).square().sum() for fitted in (tried, plain)]
            assert errors[0] < errors[1]
            assert plain(fit[0]).shape == fit[1].shape


def test_the_window_of_a_row_is_its_number_in_the_calibration_text() -> None:
    text = random_text(17)
    for which in ("fitting", "held_out"):
        for number, window in enumerate(getattr(text, which)):
            assert torch.equal(text.calibration.windows[calibration_window(text, which, number)], window)
