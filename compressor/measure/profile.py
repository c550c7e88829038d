"""How linear every block is: one pass over the calibration text, one block's moments at a time.

A block is the feed-forward network (FFN) of one decoder layer; a row is one token position, with the block's input x
and output y there; the stream is the residual stream, h its state after the layer. The fitting windows come first:
their moments give the block's exact least-squares map. The held-out windows then give the error of that map, so that
no window runs twice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compressor.measure.calibration_pass import RowCollector, own_blocks, owner_of, visit_rows
from compressor.measure.moments import ACCUMULATION_DTYPE, Moments
from compressor.measure.r2_interval import WindowSums, fit_variance, group_count, group_of, interval, merge
from compressor.measure.regression import (
    ROUNDING_ULPS,
    AffineMap,
    Spectrum,
    choose_ridge,
    decompose,
    effective_count,
    effective_rank,
    feature_errors,
    r_squared,
    rank_r2,
    solve,
)
from compressor.models.blocks import Block, Rows, find_blocks, find_branches
from compressor.models.branches import BRANCHES, BranchIndex
from compressor.models.layer_states import LayerStates
from compressor.models.offload import device_of
from compressor.models.residual import FITTING, HELD_OUT
from compressor.models.source import identify
from compressor.runtime import distributed
from compressor.runtime.cache import cache_key
from compressor.runtime.context import RunContext
from compressor.runtime.errors import InputError
from compressor.text import HELD_OUT_EVERY, Split, Text

FIGURES = (
    "r2_lin",
    "r2_stream",
    "r2_ridge",
    "r2_ridge_stream",
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
ROWS_PER_FEATURE = 10  # fitted rows per input feature: a least-squares map on fewer shows their noise


def row_weights(h: Tensor) -> Tensor:
    """1/mean(h²) of every row: the next norm divides by the root of mean(h²), so a squared error counts by this."""
    return h.to(ACCUMULATION_DTYPE).square().mean(-1).clamp_min(1e-12).reciprocal()


def moments_device(model: Any) -> torch.device:
    """The device that moments are summed on: that of the rows, or the CPU where the device has no float64."""
    device: torch.device = device_of(model)
    return torch.device("cpu") if device.type == "mps" else device


@dataclass
class _Collected:
    """The moments of a block's rows: plain, in groups of windows, and stream-weighted."""

    groups: list[Moments]
    weighted: Moments
    rounding: Tensor  # Σ over rows and features of the squared rounding that the captured outputs may have
    batches: int = 0


@dataclass
class _Solved:
    """A block's least-squares map, and what its owner solved it from (None in other processes)."""

    linear: AffineMap
    spectrum: Spectrum | None = None
    total: Moments | None = None  # of all fitted rows
    fitted: _Collected | None = None
    window_sums: WindowSums = field(default_factory=WindowSums)


def measure(
    model: Any,
    text: Text,
    context: RunContext | None = None,
    *,
    branches: Collection[str] = BRANCHES,
    beside: Sequence[RowCollector] = (),
    states: LayerStates | None = None,
) -> Profile:
    """Measure every branch of the model on the calibration text, or the kinds of `branches` that are named.

    In memory: the model, the moments of one layer's blocks, the stream.

    With a cache, every block is stored as soon as it is measured. Collectors that are given `beside` get their rows
    from the same pass, and `states` the residual stream.
    """
    context = context or RunContext()
    layers, measured = find_blocks(model), find_branches(model, branches)
    collector = ProfileCollector(model, measured, text, context)
    visit_rows(model, layers, text, context, [collector, *beside], "measure", states)
    profiles = [collector.profiles[block.index] for block in measured]
    blocks, attention = ([p for p in profiles if p.block.is_attention == chosen] for chosen in (False, True))
    rows = text.fitting.numel(), text.held_out.numel()
    return Profile(blocks, *rows, text.seq_len, attention, identify(model)["weights"])


class ProfileCollector:
    """Measures the linearity of blocks from their rows; `profiles` has those that were measured, by block."""

    parts = (FITTING, HELD_OUT)

    def __init__(self, model: Any, blocks: list[Block], text: Text, context: RunContext) -> None:
        self.model, self.blocks, self.text, self.context = model, blocks, text, context
        self.cache = context.cache
        self.device = moments_device(model)
        more = {"seq_len": text.seq_len, "batch": context.batch_size, "seed": context.seed}
        self.key = cache_key("profile", identify(model), text.calibration_sha256, **more)
        self.profiles: dict[BranchIndex, BlockProfile] = {}
        self.collected: dict[BranchIndex, _Collected] = {}
        self.solved: dict[BranchIndex, _Solved] = {}

    def block_key(self, block: Block) -> dict[str, Any]:
        return {**self.key, "block": block.path}

    def find_missing(self) -> list[Block]:
        """The blocks that were not measured before."""
        missing = []
        for block in self.blocks:
            cached = self.cache.find(self.block_key(block))
            if cached is None:
                missing.append(block)
            else:
                self.profiles[block.index] = unpack_block(block, self.text, cached, partial(self.read, block))
        if not missing:
            self.context.progress.note("profile: measured before")
        return missing

    def inner_path(self, block: Block) -> str | None:
        return None

    def read(self, block: Block) -> Mapping[str, Tensor]:
        """The cached tensors of a block. Where the cache has lost them, the block is measured again."""
        tensors = self.cache.find(self.block_key(block))
        if tensors is None:
            again = _MeasuredAgain(self.model, self.blocks, self.text, self.context, block)
            visit_rows(self.model, find_blocks(self.model), self.text, self.context, [again], "measure")
            tensors = again.tensors
        return tensors

    def begin(self, group: Sequence[Block]) -> None:
        self.collected, self.solved = {block.index: self.empty(block, FITTING) for block in group}, {}

    def empty(self, block: Block, part: str) -> _Collected:
        """No rows yet. Those of the fitting windows are kept in groups of windows."""
        fitting = part == FITTING
        return _Collected(
            [
                Moments.zeros(block.width, block.width, self.device, whole_yy=not fitting)
                for _ in range(group_count(len(self.text.fitting)) if fitting else 1)
            ],
            Moments.zeros(block.width, block.width, self.device, whole_yy=False),
            torch.zeros((), dtype=ACCUMULATION_DTYPE, device=self.device),
        )

    def add(self, block: Block, part: str, rows: Rows) -> None:
        """Add the moments of a batch. Of held-out windows, the error of the fitted map in each is summed too."""
        collected, seq_len = self.collected[block.index], self.text.seq_len
        fitting, windows = part == FITTING, len(self.text.fitting)
        x, y = rows.x.to(self.device, ACCUMULATION_DTYPE), rows.y.to(self.device, ACCUMULATION_DTYPE)
        self.refuse_nonfinite(block, x, y, part, collected.batches)
        first = self.window_number(collected.batches)
        collected.batches += 1
        numbers = range(first, first + len(x) // seq_len)
        members = [group_of(number, windows) if fitting else 0 for number in numbers]
        for member in sorted(set(members)):
            start = members.index(member) * seq_len
            rows_of = slice(start, start + members.count(member) * seq_len)
            collected.groups[member].add(Moments.of(x[rows_of], y[rows_of], whole_yy=not fitting))
        collected.weighted.add(Moments.of(x, y, row_weights(rows.h).to(self.device), whole_yy=False))
        collected.rounding.add_(squared_rounding(rows, block).to(self.device))
        if not fitting:
            fit, sums = self.solved[block.index].linear, self.solved[block.index].window_sums
            centred = y - fit.mean_y
            error = centred - (x - fit.mean_x) @ fit.weight
            sums.errors.append(error.square().sum(-1).reshape(-1, seq_len).sum(-1))
            sums.energies.append(centred.square().sum(-1))
            sums.sums.append(centred.reshape(-1, seq_len, centred.shape[-1]).sum(1))

    def end_block(self, block: Block, owner: int, part: str) -> None:
        collected = self.collected[block.index]
        for moments in (*collected.groups, collected.weighted):
            merge_processes(moments, owner)
        distributed.sum_over_processes([collected.rounding])
        if part == HELD_OUT:
            self.solved[block.index].window_sums.gather()

    def end_part(self, group: Sequence[Block], part: str) -> None:
        """Solve the maps after the fitting windows; summarise the blocks after the held-out ones."""
        if part == FITTING:
            self.solve_group(group)
            self.collected = {block.index: self.empty(block, HELD_OUT) for block in group}
            return
        own = {b.index: self.summarise(self.solved[b.index], self.collected[b.index]) for b in own_blocks(group)}
        for place, block in enumerate(group):
            self.finish(block, distributed.broadcast(own.get(block.index), owner_of(place)))
        self.collected, self.solved = {}, {}

    def solve_group(self, group: Sequence[Block]) -> None:
        """Every owner solves the least-squares map of its block; all processes get all maps."""
        own: dict[BranchIndex, _Solved] = {}
        for block in own_blocks(group):
            fitted = self.collected[block.index]
            total = merge(fitted.groups)
            spectrum = decompose(total.xx)
            own[block.index] = _Solved(solve(total, spectrum), spectrum, total, fitted)
        for place, block in enumerate(group):
            solved = own.get(block.index)
            fields = vars(solved.linear) if solved else None
            shared = AffineMap(**distributed.broadcast(fields, owner_of(place)))
            self.solved[block.index] = solved or _Solved(shared)

    def finish(self, block: Block, tensors: dict[str, Tensor]) -> None:
        """Store the tensors of a block that is measured."""
        self.cache.keep(self.block_key(block), tensors)
        read = partial(self.read, block) if self.cache.directory else partial(dict, tensors)
        self.profiles[block.index] = unpack_block(block, self.text, tensors, read)

    def window_number(self, batch: int) -> int:
        """The number of the first window of this process's batch, among the fitting or the held-out windows."""
        return (distributed.rank() + batch * distributed.size()) * self.context.batch_size

    def refuse_nonfinite(self, block: Block, x: Tensor, y: Tensor, which: str, batch: int) -> None:
        """Refuse rows with NaN or Inf, and say in which block and window they are."""
        if (x.sum() + y.sum()).isfinite():
            return
        side, rows = ("input", x) if not x.isfinite().all() else ("output", y)
        row = int((~rows.isfinite().all(1)).nonzero()[0])
        window = calibration_window(self.text, which, self.window_number(batch) + row // self.text.seq_len)
        raise InputError(
            f"block {block.index} ({block.path}) has NaN or Inf in its {side}, in calibration window {window} at "
            f"token {row % self.text.seq_len}: its activations overflow in {str(self.model.dtype).split('.')[-1]}; "
            "try --dtype float32, or another text"
        )

    def summarise(self, solved: _Solved, held_out: _Collected) -> dict[str, Tensor]:
        """Everything that is reported of one block, as tensors for the cache."""
        seq_len, fit, window_sums = self.text.seq_len, solved.linear, solved.window_sums
        spectrum, total, fitted = solved.spectrum, solved.total, solved.fitted
        assert spectrum is not None
        assert total is not None
        assert fitted is not None
        held, stream_held = held_out.groups[0], held_out.weighted
        constant = held.variances.sum() <= held_out.rounding
        errors = feature_errors(fit, held)
        _, ridge_map = choose_ridge(total, spectrum, held)
        stream_spectrum = decompose(fitted.weighted.xx)
        stream_maps = (
            solve(fitted.weighted, stream_spectrum),
            choose_ridge(fitted.weighted, stream_spectrum, stream_held)[1],
        )
        r2_stream, r2_ridge_stream = (r_squared(feature_errors(m, stream_held), stream_held) for m in stream_maps)
        energies = torch.cat(window_sums.energies)
        shares = torch.zeros_like(energies) if constant else energies / energies.sum()
        top_rows = shares.topk(0 if constant else min(NAMED_ROWS, len(shares)))
        positions = shares.reshape(-1, seq_len).sum(0)
        varying = held.variances > 0
        features = torch.where(varying, 1 - errors / torch.where(varying, held.variances, 1.0), 1.0)
        figures = {
            "r2_lin": r_squared(errors, held),
            "r2_stream": r2_stream,
            "r2_ridge": r_squared(feature_errors(ridge_map, held), held),
            "r2_ridge_stream": r2_ridge_stream,
            "r2_median": features.median().item(),
            "effective_rank": 0.0 if constant else effective_rank(held.yy),
            "condition_number": spectrum.condition_number,
            "input_effective_rank": effective_count(spectrum.values),
            "input_rank": spectrum.rank,
            "top_row_share": shares.topk(max(1, round(TOP_ROWS * len(shares)))).values.sum().item(),
            "top_position": int(positions.argmax()),
            "top_position_share": positions.max().item(),
        }
        ladder = rank_r2(fit, spectrum, held).cpu()
        if constant:  # the mean explains all there is: what is left is rounding, and its shares say nothing
            figures |= {name: 1.0 for name in FIGURES if name.startswith("r2_")}
            ends, ladder = (1.0, 1.0), torch.ones_like(ladder)
        else:
            noise = fit_variance(fitted.groups, spectrum, held)
            errors, spreads = torch.cat(window_sums.errors), window_sums.spreads(seq_len)
            lack = window_sums.lack(seq_len)
            ends = interval(figures["r2_lin"], errors, spreads, lack, noise, len(fitted.groups))
        rows = [
            [row // seq_len, row % seq_len, share]
            for row, share in zip(top_rows.indices.tolist(), top_rows.values.tolist(), strict=True)
        ]
        tensors = {
            "figures": torch.tensor([*(figures[name] for name in FIGURES), *ends], dtype=ACCUMULATION_DTYPE),
            "tops": torch.tensor(rows, dtype=ACCUMULATION_DTYPE).reshape(-1, 3),
            "ladder": ladder,
            "weight": fit.weight.cpu(),
            "mean_x": fit.mean_x.cpu(),
            "mean_y": fit.mean_y.cpu(),
        }
        if not carries(total.rows, len(fit.mean_x)):
            tensors["ridge_weight"] = ridge_map.weight.cpu()
        return tensors


class _MeasuredAgain(ProfileCollector):
    """Measures one block, whatever the cache has; `tensors` is what was measured."""

    def __init__(self, model: Any, blocks: list[Block], text: Text, context: RunContext, block: Block) -> None:
        super().__init__(model, blocks, text, context)
        self.block = block
        self.tensors: dict[str, Tensor] = {}

    def find_missing(self) -> list[Block]:
        return [self.block]

    def finish(self, block: Block, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors


def squared_rounding(rows: Rows, block: Block) -> Tensor:
    """The squared rounding that the block's captured outputs may have, summed over rows and features.

    A value in half precision is off by up to half a unit in its last place. In float32 and float64 it is the sums
    inside the block that round, by a few units. Where the block adds the residual stream itself, so does the stream.
    """
    precision = torch.finfo(rows.y.dtype)
    level = precision.eps**2 / 12 if precision.bits < 32 else (ROUNDING_ULPS * precision.eps) ** 2
    energy = rows.y.to(ACCUMULATION_DTYPE).square().sum()
    return level * (energy + rows.h.to(ACCUMULATION_DTYPE).square().sum() if block.residual_inside else energy)


def carries(rows: int, width: int) -> bool:
    """Whether this many rows are enough to fit a linear map of this many inputs."""
    return rows >= ROWS_PER_FEATURE * width


def tokens_to_fit(rows: int, seq_len: int) -> int:
    """The calibration tokens of which this many rows are fitted, in whole windows: a share of them is held out."""
    windows = -(-rows // seq_len)
    return -(-windows * HELD_OUT_EVERY // (HELD_OUT_EVERY - 1)) * seq_len


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


def calibration_window(text: Text, which: str, number: int) -> int:
    """The number of a window among all calibration windows, from its number among the fitting or the held-out ones."""
    numbers = Split(torch.arange(len(text.calibration.windows))[:, None], "")
    return int(getattr(replace(text, calibration=numbers), which)[number, 0])


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
    r2_ridge: float  # of the ridge that errs least on the held-out rows, and the same stream-weighted
    r2_ridge_stream: float
    r2_median: float
    effective_rank: float
    condition_number: float
    input_effective_rank: float  # directions that carry the input's variance
    input_rank: float  # directions in which the input varies at all
    top_row_share: float
    top_position: float  # the position in the window that carries most variance, and its share of it
    top_position_share: float
    top_rows: tuple[TopRow, ...]
    rows_fitted: int
    seq_len: int
    ladder: Tensor = field(repr=False)  # R² of the best map of rank 0, 1, …
    read: Callable[[], Mapping[str, Tensor]] = field(repr=False)  # gives the tensors of `unpack_block` again

    @property
    def linear(self) -> AffineMap:
        """The least-squares map. It is read when needed, since the maps of all blocks may not fit into memory."""
        tensors = self.read()
        return AffineMap(tensors["weight"], tensors["mean_x"], tensors["mean_y"])

    @property
    def carried(self) -> bool:
        """Whether the fitted rows are enough for a least-squares map."""
        return carries(self.rows_fitted, self.block.width)

    @property
    def tokens_needed(self) -> int:
        """The calibration tokens that would be enough for it."""
        return tokens_to_fit(ROWS_PER_FEATURE * self.block.width, self.seq_len)

    @property
    def trial_map(self) -> AffineMap:
        """The map that predictions and trials are about: least squares; on too few rows, that of the chosen ridge."""
        tensors = self.read()
        weight = tensors["weight" if self.carried else "ridge_weight"]
        return AffineMap(weight, tensors["mean_x"], tensors["mean_y"])

    @property
    def sufficient_rank(self) -> int:
        """The smallest rank whose R² reaches 99 % of R²_lin."""
        least = min(SUFFICIENT_SHARE * self.r2_lin, self.r2_lin) - 1e-9  # the full rank reaches R²_lin up to rounding
        return int((self.ladder >= least).nonzero()[0])


@dataclass(frozen=True)
class Profile:
    """The linearity of every FFN (`blocks`) and, where it was asked for, of `attention`; what it was measured on."""

    blocks: list[BlockProfile]
    rows_fitted: int
    rows_held_out: int
    seq_len: int
    attention: list[BlockProfile] = field(default_factory=list)
    weights: str | None = None  # a hash of the weights that were measured, where it is known

    @property
    def branches(self) -> list[BlockProfile]:
        """All that was measured, in order of depth."""
        return sorted([*self.blocks, *self.attention], key=lambda p: p.block.index)

    def of(self, indices: Collection[BranchIndex]) -> Profile:
        """The profile of these branches alone."""
        blocks, attention = ([p for p in found if p.block.index in indices] for found in (self.blocks, self.attention))
        return replace(self, blocks=blocks, attention=attention)


def unpack_block(
    block: Block, text: Text, tensors: Mapping[str, Tensor], read: Callable[[], Mapping[str, Tensor]]
) -> BlockProfile:
    """The profile of one block from its cached tensors; `read` gives these again."""
    *figures, low, high = tensors["figures"].tolist()
    return BlockProfile(
        block=block,
        r2_lin_ci95=(low, high),
        top_rows=tuple(
            TopRow(int(window), int(position), share) for window, position, share in tensors["tops"].tolist()
        ),
        rows_fitted=text.fitting.numel(),
        seq_len=text.seq_len,
        ladder=tensors["ladder"],
        read=read,
        **dict(zip(FIGURES, figures, strict=True)),
    )
