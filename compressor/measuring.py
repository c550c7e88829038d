"""How linear every block is: one pass over the calibration text, moments for all blocks at once.

The fitting windows come first; from their moments every block's exact least-squares map is solved; the held-out windows
then give the held-out moments and, per window, the squared error of that map, so nothing is run twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from compressor.blocks import Block, Rows, find_blocks, watch
from compressor.errors import InputError
from compressor.evaluating import batches
from compressor.moments import ACCUMULATION_DTYPE, Moments
from compressor.progress import Progress
from compressor.regression import AffineMap, decompose, effective_rank, feature_errors, r_squared, solve
from compressor.text import Text

TOP_ROWS = 0.001
FIGURES = ("r2_lin", "r2_stream", "r2_median", "effective_rank", "condition_number", "top_row_share")
RESAMPLES = 2000


@dataclass(frozen=True)
class BlockProfile:
    """What was measured of one block, and the moments that its replacements are predicted from."""

    block: Block
    r2_lin: float
    r2_lin_ci95: tuple[float, float]
    r2_stream: float
    r2_median: float
    effective_rank: float
    condition_number: float
    top_row_share: float
    # Stream-weighted moments of the fitting and of the held-out windows; a profile that was read from disk has none.
    fit: Moments | None = field(default=None, repr=False)
    held: Moments | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Profile:
    """The linearity of every block, and what it was measured on."""

    blocks: list[BlockProfile]
    rows_fitted: int
    rows_held_out: int
    seq_len: int

    def pack(self) -> dict[str, Tensor]:
        """Everything but the moments, as tensors for the cache."""
        rows = [[*(getattr(p, name) for name in FIGURES), *p.r2_lin_ci95] for p in self.blocks]
        figures = torch.tensor(rows, dtype=ACCUMULATION_DTYPE)
        return {"figures": figures, "rows": torch.tensor([self.rows_fitted, self.rows_held_out, self.seq_len])}


def unpack_profile(blocks: list[Block], kept: Mapping[str, Tensor]) -> Profile:
    profiles = []
    for block, (*figures, low, high) in zip(blocks, kept["figures"].tolist(), strict=True):
        profiles.append(BlockProfile(block=block, r2_lin_ci95=(low, high), **dict(zip(FIGURES, figures, strict=True))))
    fitted, held_out, seq_len = kept["rows"].tolist()
    return Profile(profiles, fitted, held_out, seq_len)


def stream_weights(h: Tensor) -> Tensor:
    """1/mean(h²) per row: the next norm divides by this, so a row's error counts by it."""
    return h.to(ACCUMULATION_DTYPE).square().mean(-1).clamp_min(1e-12).reciprocal()


def moments_device(model: Any) -> torch.device:
    """Moments live beside the rows, except on devices without float64."""
    device: torch.device = model.device
    return torch.device("cpu") if device.type == "mps" else device


@dataclass
class _HeldOut:
    """Per-window sums over held-out rows about the fitted mean, for the bootstrap over windows."""

    errors: list[Tensor] = field(default_factory=list)
    energies: list[Tensor] = field(default_factory=list)  # per row
    sums: list[Tensor] = field(default_factory=list)


def body(model: Any) -> nn.Module:
    """The model without its head: measuring needs no logits."""
    return getattr(model, model.base_model_prefix, model)  # type: ignore[no-any-return]


@torch.no_grad()
def measure(model: Any, text: Text, *, batch_size: int = 8, seed: int = 0, progress: Progress | None = None) -> Profile:
    """Measure every FFN of the model on the calibration text. Memory: the model, the moments, one batch."""
    progress = progress or Progress()
    blocks = find_blocks(model)
    device = moments_device(model)
    seq_len = text.seq_len

    def empty(whole_yy: bool = False) -> dict[int, Moments]:
        return {b.index: Moments.zeros(b.width, b.width, device, whole_yy=whole_yy) for b in blocks}

    plain, weighted, held_plain, held_weighted = empty(), empty(), empty(whole_yy=True), empty()

    def add(block: Block, rows: Rows, to_plain: dict[int, Moments], to_weighted: dict[int, Moments]) -> None:
        x, y = rows.x.to(device, ACCUMULATION_DTYPE), rows.y.to(device, ACCUMULATION_DTYPE)
        if not (x.sum() + y.sum()).isfinite():
            raise InputError(f"block {block.index} ({block.path}) has NaN or Inf activations; try --dtype float32")
        to_plain[block.index].add(Moments.of(x, y, whole_yy=to_plain is held_plain))
        to_weighted[block.index].add(Moments.of(x, y, stream_weights(rows.h).to(device), whole_yy=False))

    def run(windows: Tensor, step: str) -> None:
        parts = batches(windows, batch_size)
        for batch in progress.track(step, parts, len(parts)):
            body(model)(input_ids=batch.to(model.device), use_cache=False)

    with watch(model, blocks, lambda block, rows: add(block, rows, plain, weighted)):
        run(text.fitting, "measure")

    maps: dict[int, AffineMap] = {}
    conditions: dict[int, float] = {}
    for block in progress.track("solve", blocks, len(blocks)):
        spectrum = decompose(plain[block.index].xx)
        maps[block.index], conditions[block.index] = solve(plain[block.index], spectrum), spectrum.condition_number
    rows_fitted = plain[blocks[0].index].rows
    plain.clear()

    held_out = {b.index: _HeldOut() for b in blocks}

    def see_held_out(block: Block, rows: Rows) -> None:
        add(block, rows, held_plain, held_weighted)
        fit, sums = maps[block.index], held_out[block.index]
        x, y = rows.x.to(device, ACCUMULATION_DTYPE), rows.y.to(device, ACCUMULATION_DTYPE)
        centred = y - fit.mean_y
        error = centred - (x - fit.mean_x) @ fit.weight
        sums.errors.append(error.square().sum(-1).reshape(-1, seq_len).sum(-1))
        sums.energies.append(centred.square().sum(-1))
        sums.sums.append(centred.reshape(-1, seq_len, centred.shape[-1]).sum(1))

    with watch(model, blocks, see_held_out):
        run(text.held_out, "measure")

    def describe(block: Block) -> BlockProfile:
        held, fit = held_plain[block.index], maps[block.index]
        errors = feature_errors(fit, held)
        features = 1 - errors / held.variances
        energies = torch.cat(held_out[block.index].energies)
        top = energies.topk(max(1, round(TOP_ROWS * len(energies)))).values.sum() / energies.sum()
        stream_fit, stream_held = weighted[block.index], held_weighted[block.index]
        stream_map = solve(stream_fit, decompose(stream_fit.xx))
        return BlockProfile(
            block=block,
            r2_lin=r_squared(errors, held),
            r2_lin_ci95=bootstrap_r2(held_out[block.index], seq_len, seed),
            r2_stream=r_squared(feature_errors(stream_map, stream_held), stream_held),
            r2_median=features.nan_to_num(nan=1.0, neginf=-1.0).median().item(),
            effective_rank=effective_rank(held.yy),
            condition_number=conditions[block.index],
            top_row_share=top.nan_to_num().item(),
            fit=stream_fit,
            held=stream_held,
        )

    profiles = [describe(block) for block in progress.track("solve", blocks, len(blocks))]
    return Profile(profiles, rows_fitted, text.held_out.numel(), seq_len)


def bootstrap_r2(held_out: _HeldOut, seq_len: int, seed: int) -> tuple[float, float]:
    """The 95 % interval of R²_lin when the held-out windows are drawn again."""
    errors = torch.cat(held_out.errors)
    energies = torch.cat(held_out.energies).reshape(-1, seq_len).sum(-1)
    sums = torch.cat(held_out.sums)
    windows = len(errors)
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randint(windows, (RESAMPLES, windows), generator=generator)
    counts = torch.zeros(RESAMPLES, windows, dtype=ACCUMULATION_DTYPE)
    counts = counts.scatter_add_(1, draws, torch.ones_like(draws, dtype=ACCUMULATION_DTYPE)).to(errors.device)
    total = counts @ energies - (counts @ sums).square().sum(-1) / (windows * seq_len)
    r2 = 1 - (counts @ errors) / total.clamp_min(torch.finfo(ACCUMULATION_DTYPE).tiny)
    low, high = torch.quantile(r2, torch.tensor([0.025, 0.975], dtype=r2.dtype, device=r2.device)).tolist()
    return low, high
