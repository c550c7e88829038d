"""How linear every block is: one pass over the calibration text, moments for all blocks at once.

The fitting windows come first; from their moments every block's exact least-squares map is solved; the held-out windows
then give the held-out moments and, per window, the squared error of that map, so nothing is run twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from compressor.blocks import Block, Rows, body, find_blocks, watch
from compressor.errors import InputError
from compressor.evaluating import batches
from compressor.moments import ACCUMULATION_DTYPE, Moments
from compressor.progress import Progress
from compressor.regression import (
    AffineMap,
    Spectrum,
    decompose,
    effective_count,
    effective_rank,
    feature_errors,
    r_squared,
    rank_r2,
    solve,
)
from compressor.text import Text

TOP_ROWS = 0.001
NAMED_ROWS = 8  # of the largest held-out rows of a block, the ones that are told by token
FIGURES = (
    "r2_lin",
    "r2_stream",
    "r2_median",
    "effective_rank",
    "condition_number",
    "input_effective_rank",
    "input_rank",
    "top_row_share",
    "top_position",
    "top_position_share",
)
RESAMPLES = 2000
ENOUGH = 0.99  # of R²_lin: the rank that reaches it is reported


@dataclass(frozen=True)
class TopRow:
    """A held-out row that carries much of its block's variance: its window, its place there, its share."""

    window: int
    position: int
    share: float


@dataclass(frozen=True)
class BlockProfile:
    """What was measured of one block, and its exact least-squares map."""

    block: Block
    r2_lin: float
    r2_lin_ci95: tuple[float, float]
    r2_stream: float
    r2_median: float
    effective_rank: float
    condition_number: float
    input_effective_rank: float  # directions that carry the input's variance
    input_rank: float  # directions in which the input varies at all
    top_row_share: float
    top_position: float  # the place in the window that carries most variance, and its share
    top_position_share: float
    top_rows: tuple[TopRow, ...]
    ladder: Tensor = field(repr=False)  # R² of the best map of rank 0, 1, …
    linear: AffineMap = field(repr=False)

    @property
    def enough_rank(self) -> int:
        """The smallest rank whose R² reaches 99 % of R²_lin."""
        wanted = min(ENOUGH * self.r2_lin, self.r2_lin) - 1e-9  # the full rank reaches R²_lin but for its rounding
        return int((self.ladder >= wanted).nonzero()[0])


@dataclass(frozen=True)
class Profile:
    """The linearity of every block, and what it was measured on."""

    blocks: list[BlockProfile]
    rows_fitted: int
    rows_held_out: int
    seq_len: int

    def pack(self) -> dict[str, Tensor]:
        """All of it, as tensors for the cache."""
        rows = [[*(getattr(p, name) for name in FIGURES), *p.r2_lin_ci95] for p in self.blocks]
        tops = [[[row.window, row.position, row.share] for row in p.top_rows] for p in self.blocks]
        return {
            "figures": torch.tensor(rows, dtype=ACCUMULATION_DTYPE),
            "rows": torch.tensor([self.rows_fitted, self.rows_held_out, self.seq_len]),
            "tops": torch.tensor(tops, dtype=ACCUMULATION_DTYPE),
            "ladders": torch.stack([p.ladder.cpu() for p in self.blocks]),
            "weights": torch.stack([p.linear.weight.cpu() for p in self.blocks]),
            "means_x": torch.stack([p.linear.mean_x.cpu() for p in self.blocks]),
            "means_y": torch.stack([p.linear.mean_y.cpu() for p in self.blocks]),
        }


def unpack_profile(blocks: list[Block], kept: Mapping[str, Tensor]) -> Profile:
    profiles = []
    maps = map(AffineMap, kept["weights"], kept["means_x"], kept["means_y"])
    columns = zip(blocks, kept["figures"].tolist(), kept["tops"].tolist(), kept["ladders"], maps, strict=True)
    for block, (*figures, low, high), tops, ladder, linear in columns:
        profiles.append(
            BlockProfile(
                block=block,
                r2_lin_ci95=(low, high),
                top_rows=tuple(TopRow(int(window), int(position), share) for window, position, share in tops),
                ladder=ladder,
                linear=linear,
                **dict(zip(FIGURES, figures, strict=True)),
            )
        )
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
    spectra: dict[int, Spectrum] = {}
    for block in progress.track("solve", blocks, len(blocks)):
        spectra[block.index] = decompose(plain[block.index].xx)
        maps[block.index] = solve(plain[block.index], spectra[block.index])
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
        held, fit, spectrum = held_plain.pop(block.index), maps[block.index], spectra.pop(block.index)
        errors = feature_errors(fit, held)
        features = 1 - errors / held.variances
        energies = torch.cat(held_out[block.index].energies)
        shares = (energies / energies.sum()).nan_to_num()
        tops = shares.topk(min(NAMED_ROWS, len(shares)))
        places = shares.reshape(-1, seq_len).sum(0)
        stream_fit, stream_held = weighted.pop(block.index), held_weighted.pop(block.index)
        stream_map = solve(stream_fit, decompose(stream_fit.xx))
        return BlockProfile(
            block=block,
            r2_lin=r_squared(errors, held),
            r2_lin_ci95=bootstrap_r2(held_out[block.index], seq_len, seed),
            r2_stream=r_squared(feature_errors(stream_map, stream_held), stream_held),
            r2_median=features.nan_to_num(nan=1.0, neginf=-1.0).median().item(),
            effective_rank=effective_rank(held.yy),
            condition_number=spectrum.condition_number,
            input_effective_rank=effective_count(spectrum.values),
            input_rank=spectrum.rank,
            top_row_share=shares.topk(max(1, round(TOP_ROWS * len(shares)))).values.sum().item(),
            top_position=int(places.argmax()),
            top_position_share=places.max().item(),
            top_rows=tuple(
                TopRow(row // seq_len, row % seq_len, share)
                for row, share in zip(tops.indices.tolist(), tops.values.tolist(), strict=True)
            ),
            ladder=rank_r2(fit, spectrum, held),
            linear=fit,
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
