"""How linear every block is: one pass over the calibration text, one block's moments at a time.

A block is the feed-forward network (FFN) of one decoder layer; a row is one token position, with the block's input x
and output y there; the stream is the residual stream, h its state after the layer. The fitting windows come first:
their moments give the block's exact least-squares map. The held-out windows then give the error of that map, so that
no window runs twice.
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
SUFFICIENT_SHARE = 0.99  # of R²_lin: the smallest rank that reaches this is reported
TOP_ROWS = 0.001  # of the rows: the share of the variance that the largest of them carry is reported
NAMED_ROWS = 8  # of a block's largest held-out rows, those that are reported one by one
RESAMPLES = 2000


def row_weights(h: Tensor) -> Tensor:
    """1/mean(h²) of every row: the next norm divides by the root of mean(h²), so a squared error counts by this."""
    return h.to(ACCUMULATION_DTYPE).square().mean(-1).clamp_min(1e-12).reciprocal()


def moments_device(model: Any) -> torch.device:
    """The device that moments are summed on: that of the rows, or the CPU where the device has no float64."""
    device: torch.device = device_of(model)
    return torch.device("cpu") if device.type == "mps" else device


@dataclass
class _WindowSums:
    """Sums over the rows of each held-out window, about the fitted mean of y: what the bootstrap over windows needs."""

    errors: list[Tensor] = field(default_factory=list)  # squared error of the map, per window
    energies: list[Tensor] = field(default_factory=list)  # |y|² per row, not summed
    sums: list[Tensor] = field(default_factory=list)  # Σ y per window

    def gather(self) -> None:
        """Collect the sums of all processes."""
        self.errors, self.energies, self.sums = map(distributed.gather, (self.errors, self.energies, self.sums))


def measure(
    model: Any,
    text: Text,
    context: RunContext | None = None,
) -> Profile:
    """Measure every FFN of the model on the calibration text. In memory: the model, one block's moments, the stream.

    With a cache, every block is stored as soon as it is measured.
    """
    context = context or RunContext()
    blocks = _Measurer(model, find_blocks(model), text, context).measure_all()
    return Profile(blocks, text.fitting.numel(), text.held_out.numel(), text.seq_len)


class _Measurer:
    """One pass over the calibration text, as many blocks at a time as there are processes: each process solves one."""

    def __init__(self, model: Any, blocks: list[Block], text: Text, context: RunContext) -> None:
        self.model, self.blocks, self.text, self.context = model, blocks, text, context
        self.cache = context.cache
        self.device = moments_device(model)
        more = {"seq_len": text.seq_len, "batch": context.batch_size, "seed": context.seed}
        self.key = cache_key("profile", identify(model), text.calibration.sha256, **more)

    def block_key(self, block: Block) -> dict[str, Any]:
        return {**self.key, "block": block.path}

    def measure_all(self) -> list[BlockProfile]:
        progress = self.context.progress
        profiles: dict[int, BlockProfile] = {}
        missing = []
        for block in self.blocks:
            cached = self.cache.find(self.block_key(block))
            if cached is None:
                missing.append(block)
            else:
                profiles[block.index] = unpack_block(block, cached, partial(self.read, block))
        if not missing:
            progress.say("profile: measured before")
        with progress.bar("measure", len(self.blocks)) as advance:
            advance(len(profiles))
            streams = self.streams(missing[0]) if missing else []
            for group in distributed.rounds(missing):
                for block, tensors in zip(group, self.measure_group(group, *streams), strict=True):
                    self.cache.keep(self.block_key(block), tensors)
                    read = partial(self.read, block) if self.cache.directory else partial(dict, tensors)
                    profiles[block.index] = unpack_block(block, tensors, read)
                    advance(1)
                for stream in streams:
                    stream.save_periodically()
        delete_saved_streams(self.cache, self.key)
        return [profiles[block.index] for block in self.blocks]

    def read(self, block: Block) -> Mapping[str, Tensor]:
        """The cached tensors of a block. Where the cache has lost them, the block is measured again."""
        tensors = self.cache.find(self.block_key(block))
        if tensors is None:
            [tensors] = self.measure_group([block], *self.streams(block))
        return tensors

    def streams(self, first: Block) -> list[Stream]:
        """The fitting and the held-out windows, at this block's layer or before it."""
        return calibration_streams(
            self.model, self.blocks, self.text, self.context.batch_size, self.cache, self.key, first.index
        )

    @torch.no_grad()
    def measure_group(self, group: Sequence[Block], fitting: Stream, held_out: Stream) -> list[dict[str, Tensor]]:
        """Measure these blocks, one per process. All processes run a share of its rows, and its owner solves it."""
        moments: dict[int, tuple[Moments, Moments]] = {}
        for owner, block in enumerate(group):
            moments[owner] = self.collect(block, fitting, CALIBRATION_PARTS[0], owner)
        me = distributed.rank()
        spectrum = decompose(moments[me][0].xx) if me in moments else None
        linear = solve(moments[me][0], spectrum) if spectrum is not None else None
        fields = None if linear is None else {"weight": linear.weight, "mean_x": linear.mean_x, "mean_y": linear.mean_y}
        maps = [AffineMap(**distributed.broadcast(fields, owner)) for owner in range(len(group))]
        held: dict[int, tuple[Moments, Moments, _WindowSums]] = {}
        for owner, (block, fit) in enumerate(zip(group, maps, strict=True)):
            window_sums = _WindowSums()
            held[owner] = (*self.collect(block, held_out, CALIBRATION_PARTS[1], owner, fit, window_sums), window_sums)
        summary = None
        if spectrum is not None:
            summary = self.summarise(maps[me], spectrum, moments[me][1], *held[me])
        return [distributed.broadcast(summary, owner) for owner in range(len(group))]

    def collect(
        self,
        block: Block,
        stream: Stream,
        which: str,
        owner: int,
        fit: AffineMap | None = None,
        window_sums: _WindowSums | None = None,
    ) -> tuple[Moments, Moments]:
        """Plain and stream-weighted moments of the rows of all processes, for the owner; the stream passes the block.

        With a fitted map, `window_sums` gets its error in every window.
        """
        stream.advance(block.index)
        plain = Moments.zeros(block.width, block.width, self.device, whole_yy=fit is not None)
        weighted = Moments.zeros(block.width, block.width, self.device, whole_yy=False)
        batch = 0

        def add(_: Block, rows: Rows) -> None:
            nonlocal batch
            x, y = rows.x.to(self.device, ACCUMULATION_DTYPE), rows.y.to(self.device, ACCUMULATION_DTYPE)
            self.refuse_nonfinite(block, x, y, which, batch)
            batch += 1
            plain.add(Moments.of(x, y, whole_yy=plain.whole_yy))
            weighted.add(Moments.of(x, y, row_weights(rows.h).to(self.device), whole_yy=False))
            if fit is not None and window_sums is not None:
                centred = y - fit.mean_y
                error = centred - (x - fit.mean_x) @ fit.weight
                window_sums.errors.append(error.square().sum(-1).reshape(-1, self.text.seq_len).sum(-1))
                window_sums.energies.append(centred.square().sum(-1))
                window_sums.sums.append(centred.reshape(-1, self.text.seq_len, centred.shape[-1]).sum(1))

        with capture_rows(self.model, [block], add):
            stream.step()
        merge_processes(plain, owner)
        merge_processes(weighted, owner)
        if window_sums is not None:
            window_sums.gather()
        return plain, weighted

    def refuse_nonfinite(self, block: Block, x: Tensor, y: Tensor, which: str, batch: int) -> None:
        """Refuse rows with NaN or Inf, and say in which block and window they are."""
        if (x.sum() + y.sum()).isfinite():
            return
        side, rows = ("input", x) if not x.isfinite().all() else ("output", y)
        row = int((~rows.isfinite().all(1)).nonzero()[0])
        number = (distributed.rank() + batch * distributed.size()) * self.context.batch_size + row // self.text.seq_len
        window = calibration_window(which, number)
        raise InputError(
            f"block {block.index} ({block.path}) has NaN or Inf in its {side}, in calibration window {window} at "
            f"token {row % self.text.seq_len}: its activations overflow in {str(self.model.dtype).split('.')[-1]}; "
            "try --dtype float32, or another text"
        )

    def summarise(
        self,
        fit: AffineMap,
        spectrum: Spectrum,
        stream_fit: Moments,
        held: Moments,
        stream_held: Moments,
        window_sums: _WindowSums,
    ) -> dict[str, Tensor]:
        """Everything that is reported of one block, as tensors for the cache."""
        seq_len = self.text.seq_len
        errors = feature_errors(fit, held)
        features = 1 - errors / held.variances
        energies = torch.cat(window_sums.energies)
        shares = (energies / energies.sum()).nan_to_num()
        top_rows = shares.topk(min(NAMED_ROWS, len(shares)))
        positions = shares.reshape(-1, seq_len).sum(0)
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
            "top_position": int(positions.argmax()),
            "top_position_share": positions.max().item(),
        }
        rows = [
            [row // seq_len, row % seq_len, share]
            for row, share in zip(top_rows.indices.tolist(), top_rows.values.tolist(), strict=True)
        ]
        numbers = [*(figures[name] for name in FIGURES), *bootstrap_r2(window_sums, seq_len, self.context.seed)]
        return {
            "figures": torch.tensor(numbers, dtype=ACCUMULATION_DTYPE),
            "tops": torch.tensor(rows, dtype=ACCUMULATION_DTYPE),
            "ladder": rank_r2(fit, spectrum, held).cpu(),
            "weight": fit.weight.cpu(),
            "mean_x": fit.mean_x.cpu(),
            "mean_y": fit.mean_y.cpu(),
        }


def merge_processes(moments: Moments, owner: int | None = None) -> None:
    """Turn the moments of each process's rows into those of all rows: on every process, or only on the owner."""
    if distributed.size() == 1:
        return
    total = moments.weight.clone()
    mean_x, mean_y = moments.mean_x * moments.weight, moments.mean_y * moments.weight
    distributed.sum_over_processes([total, mean_x, mean_y])
    mean_x, mean_y = mean_x / total, mean_y / total
    moments.recentre(mean_x, mean_y)
    rows = torch.tensor(moments.rows)
    distributed.sum_over_processes([rows])
    moments.rows = int(rows)
    moments.weight.copy_(total)
    distributed.sum_over_processes([moments.xx, moments.xy, moments.yy], owner)


def calibration_window(which: str, number: int) -> int:
    """The number of a window among all calibration windows, from its number among the fitting or the held-out ones."""
    held = HELD_OUT_EVERY - 1
    return (
        number * HELD_OUT_EVERY + held
        if which == CALIBRATION_PARTS[1]
        else number // held * HELD_OUT_EVERY + number % held
    )


def bootstrap_r2(window_sums: _WindowSums, seq_len: int, seed: int) -> tuple[float, float]:
    """The 95 % interval of R²_lin, by a bootstrap over the held-out windows."""
    errors = torch.cat(window_sums.errors)
    energies = torch.cat(window_sums.energies).reshape(-1, seq_len).sum(-1)
    sums = torch.cat(window_sums.sums)
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
    """A held-out row that carries much of its block's variance: its window, its position there, its share."""

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
    top_position: float  # the position in the window that carries most variance, and its share of it
    top_position_share: float
    top_rows: tuple[TopRow, ...]
    ladder: Tensor = field(repr=False)  # R² of the best map of rank 0, 1, …
    read: Callable[[], Mapping[str, Tensor]] = field(repr=False)  # gives the tensors of `unpack_block` again

    @property
    def linear(self) -> AffineMap:
        """The least-squares map. It is read when needed, since the maps of all blocks may not fit into memory."""
        tensors = self.read()
        return AffineMap(tensors["weight"], tensors["mean_x"], tensors["mean_y"])

    @property
    def sufficient_rank(self) -> int:
        """The smallest rank whose R² reaches 99 % of R²_lin."""
        least = min(SUFFICIENT_SHARE * self.r2_lin, self.r2_lin) - 1e-9  # the full rank reaches R²_lin up to rounding
        return int((self.ladder >= least).nonzero()[0])


@dataclass(frozen=True)
class Profile:
    """The linearity of every block, and what it was measured on."""

    blocks: list[BlockProfile]
    rows_fitted: int
    rows_held_out: int
    seq_len: int


def unpack_block(block: Block, tensors: Mapping[str, Tensor], read: Callable[[], Mapping[str, Tensor]]) -> BlockProfile:
    """The profile of one block from its cached tensors; `read` gives these again."""
    *figures, low, high = tensors["figures"].tolist()
    return BlockProfile(
        block=block,
        r2_lin_ci95=(low, high),
        top_rows=tuple(
            TopRow(int(window), int(position), share) for window, position, share in tensors["tops"].tolist()
        ),
        ladder=tensors["ladder"],
        read=read,
        **dict(zip(FIGURES, figures, strict=True)),
    )
