"""How linear every block is: one pass over the calibration text, one block's moments at a time.

The fitting windows come first; from their moments the block's exact least-squares map is solved; the held-out windows
then give the held-out moments and, per window, the squared error of that map, so nothing is run twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compressor.measure.moments import ACCUMULATION_DTYPE, Moments
from compressor.measure.regression import (
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
from compressor.models.blocks import Block, Rows, capture_rows, find_blocks
from compressor.models.offload import device_of
from compressor.models.residual import CALIBRATION_PARTS, Stream, calibration_streams, delete_saved_streams
from compressor.models.source import identify
from compressor.runtime import distributed
from compressor.runtime.cache import cache_key
from compressor.runtime.context import RunContext
from compressor.runtime.errors import InputError
from compressor.text import HELD_OUT_EVERY, Text

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
ENOUGH = 0.99  # of R²_lin: the rank that reaches it is reported

TOP_ROWS = 0.001
NAMED_ROWS = 8  # of the largest held-out rows of a block, the ones that are told by token
RESAMPLES = 2000


def row_weights(h: Tensor) -> Tensor:
    """1/mean(h²) per row: the next norm divides by this, so a row's error counts by it."""
    return h.to(ACCUMULATION_DTYPE).square().mean(-1).clamp_min(1e-12).reciprocal()


def moments_device(model: Any) -> torch.device:
    """Moments live beside the rows, except on devices without float64."""
    device: torch.device = device_of(model)
    return torch.device("cpu") if device.type == "mps" else device


@dataclass
class _HeldOut:
    """Per-window sums over held-out rows about the fitted mean, for the bootstrap over windows."""

    errors: list[Tensor] = field(default_factory=list)
    energies: list[Tensor] = field(default_factory=list)  # per row
    sums: list[Tensor] = field(default_factory=list)

    def gather(self) -> None:
        """Those of all processes."""
        self.errors, self.energies, self.sums = map(distributed.gather, (self.errors, self.energies, self.sums))


def measure(
    model: Any,
    text: Text,
    context: RunContext | None = None,
) -> Profile:
    """Measure every FFN of the model on the calibration text. Memory: the model, one block's moments, the stream.

    With a cache every block is kept as soon as it is measured.
    """
    context = context or RunContext()
    blocks = _Measurer(model, find_blocks(model), text, context).measure_all()
    return Profile(blocks, text.fitting.numel(), text.held_out.numel(), text.seq_len)


class _Measurer:
    """One pass over the calibration text, a few blocks at a time: as many as there are processes, each solves one."""

    def __init__(self, model: Any, blocks: list[Block], text: Text, context: RunContext) -> None:
        self.model, self.blocks, self.text, self.context = model, blocks, text, context
        self.cache = context.cache
        self.device = moments_device(model)
        more = {"seq_len": text.seq_len, "batch": context.batch_size, "seed": context.seed}
        self.key = cache_key("profile", identify(model), text.calibration.sha256, **more)

    def place(self, block: Block) -> dict[str, Any]:
        return {**self.key, "block": block.path}

    def measure_all(self) -> list[BlockProfile]:
        progress = self.context.progress
        found: dict[int, BlockProfile] = {}
        missing = []
        for block in self.blocks:
            kept = self.cache.find(self.place(block))
            if kept is None:
                missing.append(block)
            else:
                found[block.index] = unpack_block(block, kept, partial(self.read, block))
        if not missing:
            progress.say("profile: measured before")
        with progress.bar("measure", len(self.blocks)) as advance:
            advance(len(found))
            streams = self.streams(missing[0]) if missing else []
            for group in distributed.rounds(missing):
                for block, kept in zip(group, self.look(group, *streams), strict=True):
                    self.cache.keep(self.place(block), kept)
                    read = partial(self.read, block) if self.cache.directory else partial(dict, kept)
                    found[block.index] = unpack_block(block, kept, read)
                    advance(1)
                for stream in streams:
                    stream.save_periodically()
        delete_saved_streams(self.cache, self.key)
        return [found[block.index] for block in self.blocks]

    def read(self, block: Block) -> Mapping[str, Tensor]:
        """What was kept of a block; what has been lost since is measured again."""
        kept = self.cache.find(self.place(block))
        if kept is None:
            [kept] = self.look([block], *self.streams(block))
        return kept

    def streams(self, first: Block) -> list[Stream]:
        """The fitting and the held-out windows, at this block's layer or before it."""
        return calibration_streams(
            self.model, self.blocks, self.text, self.context.batch_size, self.cache, self.key, first.index
        )

    @torch.no_grad()
    def look(self, group: Sequence[Block], fitting: Stream, held_out: Stream) -> list[dict[str, Tensor]]:
        """Measure these blocks. Each is solved by one process; the rows of each are shared out among all."""
        sums: dict[int, tuple[Moments, Moments]] = {}
        for owner, block in enumerate(group):
            sums[owner] = self.collect(block, fitting, CALIBRATION_PARTS[0], owner)
        me = distributed.rank()
        spectrum = decompose(sums[me][0].xx) if me in sums else None
        own = solve(sums[me][0], spectrum) if spectrum is not None else None
        given = None if own is None else {"weight": own.weight, "mean_x": own.mean_x, "mean_y": own.mean_y}
        maps = [AffineMap(**distributed.broadcast(given, owner)) for owner in range(len(group))]
        held: dict[int, tuple[Moments, Moments, _HeldOut]] = {}
        for owner, (block, fit) in enumerate(zip(group, maps, strict=True)):
            sums_of = _HeldOut()
            held[owner] = (*self.collect(block, held_out, CALIBRATION_PARTS[1], owner, fit, sums_of), sums_of)
        mine = None
        if spectrum is not None:
            mine = self.describe(maps[me], spectrum, sums[me][1], *held[me])
        return [distributed.broadcast(mine, owner) for owner in range(len(group))]

    def collect(
        self,
        block: Block,
        stream: Stream,
        which: str,
        owner: int,
        fit: AffineMap | None = None,
        sums: _HeldOut | None = None,
    ) -> tuple[Moments, Moments]:
        """Plain and stream-weighted moments of all processes, for the owner, while the stream moves behind the block.

        With a fit, also the error that it makes in every window.
        """
        stream.advance(block.index)
        plain = Moments.zeros(block.width, block.width, self.device, whole_yy=fit is not None)
        weighted = Moments.zeros(block.width, block.width, self.device, whole_yy=False)
        turn = 0

        def see(_: Block, rows: Rows) -> None:
            nonlocal turn
            x, y = rows.x.to(self.device, ACCUMULATION_DTYPE), rows.y.to(self.device, ACCUMULATION_DTYPE)
            self.refuse_nonfinite(block, x, y, which, turn)
            turn += 1
            plain.add(Moments.of(x, y, whole_yy=plain.whole_yy))
            weighted.add(Moments.of(x, y, row_weights(rows.h).to(self.device), whole_yy=False))
            if fit is not None and sums is not None:
                centred = y - fit.mean_y
                error = centred - (x - fit.mean_x) @ fit.weight
                sums.errors.append(error.square().sum(-1).reshape(-1, self.text.seq_len).sum(-1))
                sums.energies.append(centred.square().sum(-1))
                sums.sums.append(centred.reshape(-1, self.text.seq_len, centred.shape[-1]).sum(1))

        with capture_rows(self.model, [block], see):
            stream.step()
        merge(plain, owner)
        merge(weighted, owner)
        if sums is not None:
            sums.gather()
        return plain, weighted

    def refuse_nonfinite(self, block: Block, x: Tensor, y: Tensor, which: str, turn: int) -> None:
        """Name the block and the window in which the model's numbers end."""
        if (x.sum() + y.sum()).isfinite():
            return
        where, rows = ("input", x) if not x.isfinite().all() else ("output", y)
        row = int((~rows.isfinite().all(1)).nonzero()[0])
        number = (distributed.rank() + turn * distributed.size()) * self.context.batch_size + row // self.text.seq_len
        window = calibration_window(which, number)
        raise InputError(
            f"block {block.index} ({block.path}) has NaN or Inf in its {where}, in calibration window {window} at "
            f"token {row % self.text.seq_len}: its activations overflow in {str(self.model.dtype).split('.')[-1]}; "
            "try --dtype float32, or another text"
        )

    def describe(
        self,
        fit: AffineMap,
        spectrum: Spectrum,
        stream_fit: Moments,
        held: Moments,
        stream_held: Moments,
        held_out: _HeldOut,
    ) -> dict[str, Tensor]:
        """All that is told of one block, as tensors."""
        seq_len = self.text.seq_len
        errors = feature_errors(fit, held)
        features = 1 - errors / held.variances
        energies = torch.cat(held_out.energies)
        shares = (energies / energies.sum()).nan_to_num()
        tops = shares.topk(min(NAMED_ROWS, len(shares)))
        places = shares.reshape(-1, seq_len).sum(0)
        stream_map = solve(stream_fit, decompose(stream_fit.xx))
        figures = {
            "r2_lin": r_squared(errors, held),
            "r2_stream": r_squared(feature_errors(stream_map, stream_held), stream_held),
            "r2_median": features.nan_to_num(nan=1.0, neginf=-1.0).median().item(),
            "effective_rank": effective_rank(held.yy),
            "condition_number": spectrum.condition_number,
            "input_effective_rank": effective_count(spectrum.values),
            "input_rank": spectrum.rank,
            "top_row_share": shares.topk(max(1, round(TOP_ROWS * len(shares)))).values.sum().item(),
            "top_position": int(places.argmax()),
            "top_position_share": places.max().item(),
        }
        rows = [
            [row // seq_len, row % seq_len, share]
            for row, share in zip(tops.indices.tolist(), tops.values.tolist(), strict=True)
        ]
        numbers = [*(figures[name] for name in FIGURES), *bootstrap_r2(held_out, seq_len, self.context.seed)]
        return {
            "figures": torch.tensor(numbers, dtype=ACCUMULATION_DTYPE),
            "tops": torch.tensor(rows, dtype=ACCUMULATION_DTYPE),
            "ladder": rank_r2(fit, spectrum, held).cpu(),
            "weight": fit.weight.cpu(),
            "mean_x": fit.mean_x.cpu(),
            "mean_y": fit.mean_y.cpu(),
        }


def merge(moments: Moments, owner: int | None = None) -> None:
    """Make these the moments of all processes' rows, about their common mean: for all, or only for the owner."""
    if distributed.size() == 1:
        return
    total = moments.weight.clone()
    mean_x, mean_y = moments.mean_x * moments.weight, moments.mean_y * moments.weight
    distributed.sum_over_processes([total, mean_x, mean_y])
    mean_x, mean_y = mean_x / total, mean_y / total
    moments.move_to(mean_x, mean_y)
    rows = torch.tensor(moments.rows)
    distributed.sum_over_processes([rows])
    moments.rows = int(rows)
    moments.weight.copy_(total)
    distributed.sum_over_processes([moments.xx, moments.xy, moments.yy], owner)


def calibration_window(which: str, number: int) -> int:
    """The place among all calibration windows of the one with this number among the fitting or the held-out ones."""
    held = HELD_OUT_EVERY - 1
    return (
        number * HELD_OUT_EVERY + held
        if which == CALIBRATION_PARTS[1]
        else number // held * HELD_OUT_EVERY + number % held
    )


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
    read: Callable[[], Mapping[str, Tensor]] = field(repr=False)  # all of it, as it is kept

    @property
    def linear(self) -> AffineMap:
        """The least-squares map: read from where it is kept, for those of all blocks may be too much for the memory."""
        kept = self.read()
        return AffineMap(kept["weight"], kept["mean_x"], kept["mean_y"])

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


def unpack_block(block: Block, kept: Mapping[str, Tensor], read: Callable[[], Mapping[str, Tensor]]) -> BlockProfile:
    """What was kept of one block; `read` gives it again."""
    *figures, low, high = kept["figures"].tolist()
    return BlockProfile(
        block=block,
        r2_lin_ci95=(low, high),
        top_rows=tuple(TopRow(int(window), int(position), share) for window, position, share in kept["tops"].tolist()),
        ladder=kept["ladder"],
        read=read,
        **dict(zip(FIGURES, figures, strict=True)),
    )
