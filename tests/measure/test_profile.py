"""The profile against lstsq on the raw rows, and what it says of planted blocks."""

from __future__ import annotations

import pytest
import torch
from planted import SEQ_LEN, LinearFFN, WildFFN, planted_model, random_text
from torch import Tensor
from zoo import REPRESENTATIVE, tiny_model

from compressor.measure.profile import measure, row_weights
from compressor.models.blocks import Block, Rows, backbone, capture_rows, find_blocks
from compressor.runtime.context import RunContext
from compressor.runtime.errors import InputError
from compressor.text import batches


def raw_rows(model: torch.nn.Module, windows: Tensor) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
    found: dict[int, list[tuple[Tensor, ...]]] = {}

    def keep(block: Block, rows: Rows) -> None:
        found.setdefault(block.index, []).append((rows.x.double(), rows.y.double(), rows.h.double()))

    with torch.no_grad(), capture_rows(model, find_blocks(model), keep):
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
    for block in profile.blocks:
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
