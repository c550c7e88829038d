"""What it costs to replace a block, measured: every block alone, and the cheapest ones together.

Replacing a block changes nothing before it, and inside its layer only what the block adds to the residual stream. So
the windows are carried through the model once, and each replacement runs only the layers after it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compressor.evaluate.perplexity import (
    Losses,
    PerplexityChange,
    compare,
    compare_parts,
    evaluate,
    has_plain_head,
    limit_batch_size,
)
from compressor.measure.moments import ACCUMULATION_DTYPE
from compressor.measure.profile import BlockProfile, Profile
from compressor.modeling_compressor import Replacement
from compressor.models.blocks import ATTENTION_RETURNS, Block, Rows, capture_rows, find_blocks, placement_of
from compressor.models.branches import BranchIndex, layer_of
from compressor.models.residual import Stream, measure_stream_gain, open_stream
from compressor.models.source import identify, stored_dtype
from compressor.patch.checkpoint import count_parameters
from compressor.patch.tree import as_stored, patched
from compressor.runtime.cache import Tensors, cache_key
from compressor.runtime.context import RunContext
from compressor.runtime.errors import NumericsError
from compressor.text import Split, Text

SWAPPED_BELOW = 500_000_000  # parameters: in smaller models every block is replaced on trial by default
GROUP_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # blocks replaced together
LARGEST_RISE = 1 / 3  # of the baseline: after a group that costs more, no larger one is tried


@dataclass(frozen=True)
class BlockGroup:
    """The blocks that are cheapest alone, all replaced at once."""

    blocks: tuple[BranchIndex, ...]
    removed: int
    change: PerplexityChange


@dataclass(frozen=True)
class Sweep:
    """The cost of every block replaced alone, by index, and of groups of blocks, on all texts together.

    A block whose linear map overflows has no cost. `seconds` is the time that the single blocks took, `whole_seconds`
    that of one evaluation of the same windows.
    """

    alone: dict[BranchIndex, PerplexityChange]
    together: list[BlockGroup]
    seconds: float
    whole_seconds: float

    @property
    def ratio(self) -> float:
        """The time of the sweep, as a share of one whole evaluation per block."""
        return self.seconds / (len(self.alone) * self.whole_seconds)


def spread_windows(text: Text, tokens: int) -> tuple[Split, dict[str, slice]]:
    """About this many tokens of every text's selection windows, evenly spaced, and the windows of each text.

    A text may consist of several files, so its first windows alone would not do.
    """
    wanted = max(2, tokens // text.seq_len)
    chosen: list[int] = []
    parts: dict[str, slice] = {}
    for name, part in text.parts("selection").items():
        count = min(wanted, part.stop - part.start)
        start = len(chosen)
        chosen += [part.start + (2 * k + 1) * (part.stop - part.start) // (2 * count) for k in range(count)]
        parts[name] = slice(start, len(chosen))
    documents = text.selection.documents
    return Split(text.selection.windows[chosen], "", None if documents is None else documents[chosen]), parts


class SingleBlockTrials:
    """The losses of a model with one block replaced, for one block after another in order of depth."""

    def __init__(self, model: Any, blocks: list[Block], windows: Tensor, context: RunContext) -> None:
        self.model, self.windows, self.context = model, windows, context
        self.blocks = {block.index: block for block in blocks}
        self.layers = find_blocks(model)
        self.batch_size = limit_batch_size(model, windows.shape[1], context.batch_size)
        self.stream: Stream | None = None  # the windows at the layer of the present block
        self.sample: Stream | None = None  # a few tokens of them, to find out how a layer adds its block to the stream
        self.plain = False  # whether `evaluate` may compute the logits in parts, which is faster

    def start_pass(self) -> Stream:
        """The stream of the windows; the pass starts when the first block needs it."""
        if self.stream is None:
            self.plain = has_plain_head(self.model, self.windows)
            self.stream = open_stream(self.model, self.layers, self.windows, self.batch_size)
            self.sample = open_stream(self.model, self.layers, self.windows[:1, :16], 1)
        return self.stream

    def measure_losses(self, start: Stream | None = None) -> Losses:
        """The losses of the model as it is now, from where this stream stands, or of a whole pass."""
        self.start_pass()
        return evaluate(self.model, self.windows, self.context, plain=self.plain, start=start)

    def measure_replaced(self, index: BranchIndex, module: Replacement) -> Losses:
        """The losses with this block replaced; its whole layer runs again."""
        stream = self.start_pass()
        stream.advance(layer_of(index))
        with patched(self.model, self.blocks.values(), {index: module}):
            return self.measure_losses(stream)

    def measure_swapped(self, index: BranchIndex, module: Replacement) -> Losses:
        """The same in less time: where a layer only adds its FFN to the stream, just the difference is added.

        Not in half precision: what a large output was rounded to stays in the stream when the output is taken back.
        """
        block = self.blocks[index]
        if block.is_attention or placement_of(self.model, block)["dtype"].itemsize < 4:
            return self.measure_replaced(index, module)
        stream = self.start_pass()
        assert self.sample is not None
        stream.advance(block.layer)
        self.sample.advance(block.layer)
        gain = measure_stream_gain(self.model, block, self.sample)
        if gain is None:  # the layer does more with the block's output than to add it
            return self.measure_replaced(index, module)
        return self.measure_losses(self.pass_layer(stream, index, module, gain))

    def measure_unchanged(self) -> Losses:
        """The losses of the model as it is, at the end of the pass."""
        stream = self.start_pass()
        stream.advance(len(self.layers))
        return self.measure_losses(stream)

    def pass_layer(self, stream: Stream, index: BranchIndex, module: Replacement, gain: float) -> Stream:
        """Run the block's layer, which adds `gain` times the block's output to the stream, and move the stream past it;
        return the stream past the same layer with the block replaced."""
        changes: list[Tensor] = []

        def add_change(_: Block, rows: Rows) -> None:
            changes.append(gain * (module(rows.x) - rows.y))

        with torch.no_grad(), capture_rows(self.model, [self.blocks[index]], add_change):
            states = stream.run_layer()
        changed = (state + change.reshape(state.shape) for state, change in zip(states, changes, strict=True))
        swapped = stream.after_layer(changed)
        stream.states, stream.position = states, stream.position + 1
        return swapped


class Sweeper:
    """Replaces blocks of a measured model by their least-squares maps, on some selection windows of every text."""

    def __init__(self, model: Any, profile: Profile, text: Text, tokens: int, context: RunContext) -> None:
        self.model, self.profile, self.context = model, profile, context
        self.cache, self.progress = context.cache, context.progress
        self.blocks = [p.block for p in profile.branches]
        self.split, self.parts = spread_windows(text, tokens)
        self.windows = self.split.windows
        more = {"windows": self.split.sha256, "seq_len": text.seq_len, "batch": context.batch_size}
        self.key = cache_key("swap", identify(model), text.calibration_sha256, **more)
        self.trials = SingleBlockTrials(model, self.blocks, self.windows, context)
        self.before: Losses | None = None
        self.by_text: dict[BranchIndex, dict[str, PerplexityChange]] = {}  # the cost of every block alone, text by text
        self.overflowing: list[BranchIndex] = []  # blocks whose linear maps overflow

    def alone(self) -> tuple[dict[BranchIndex, PerplexityChange], float, float]:
        """The cost of every block replaced alone, the seconds of this sweep, and those of one whole evaluation."""
        after: dict[BranchIndex, Tensor] = {}
        seconds = 0.0
        if all(self.cache.has({**self.key, "block": block.path}) for block in self.blocks):
            self.progress.note("swap: measured before")
        for p in self.progress.track("swap", self.profile.branches, len(self.blocks)):
            trial = self.cache.get("", {**self.key, "block": p.block.path}, partial(self.swap, p))
            after[p.block.index] = trial["nats"]
            seconds += trial["seconds"].item()
        baseline = self.cache.get("", self.key, self.baseline)
        self.before = Losses(baseline["nats"])
        self.trials.stream = self.trials.sample = None
        pass_seconds, whole = baseline["seconds"].tolist()
        seed = self.context.seed
        losses = {index: Losses(nats) for index, nats in after.items() if nats.isfinite().all()}
        self.overflowing = [index for index in after if index not in losses]
        changes = {index: self.compare(found) for index, found in losses.items()}
        self.by_text = {
            index: compare_parts(self.before, found, self.split, self.parts, seed=seed)
            for index, found in losses.items()
        }
        # One evaluation of the unchanged model is needed in any case: it does not count as time of the sweep.
        return changes, seconds + pass_seconds - whole, whole

    def compare(self, after: Losses) -> PerplexityChange:
        """The change in perplexity on all windows of the sweep."""
        assert self.before is not None
        return compare(self.before, after, seed=self.context.seed, documents=self.split.documents)

    def swap(self, p: BlockProfile) -> Tensors:
        """The losses with this block replaced, and the seconds that it took; infinite losses where they overflow."""
        began = time.perf_counter()
        try:
            nats = self.trials.measure_swapped(p.block.index, linear_module(self.model, p)).nats
        except NumericsError:
            nats = torch.full((len(self.windows), self.windows.shape[1] - 1), math.inf)
        return {"nats": nats, "seconds": torch.tensor(time.perf_counter() - began, dtype=ACCUMULATION_DTYPE)}

    def baseline(self) -> Tensors:
        """The losses of the unchanged model, the seconds that they took, and those of one whole evaluation."""
        began = time.perf_counter()
        nats = self.trials.measure_unchanged().nats
        pass_seconds = time.perf_counter() - began
        self.time_whole()  # the first pass may be slow
        whole = (self.time_whole() + self.time_whole()) / 2
        return {"nats": nats, "seconds": torch.tensor([pass_seconds, whole], dtype=ACCUMULATION_DTYPE)}

    def time_whole(self) -> float:
        """Seconds of one whole evaluation of the windows, extrapolated from the first batch."""
        first = self.windows[: self.trials.batch_size]
        began = time.perf_counter()
        evaluate(self.model, first, self.context)
        return (time.perf_counter() - began) * len(self.windows) / len(first)

    def together(self, chosen: Sequence[BlockProfile]) -> list[BlockGroup]:
        """The cost of more and more of these blocks together, in this order, until perplexity rises by a third."""
        assert self.before is not None
        groups: list[BlockGroup] = []
        counts = [count for count in GROUP_SIZES if count <= len(chosen)]
        with self.progress.bar("together", len(counts)) as advance:
            for count in counts:
                fits = {p.block.index: linear_module(self.model, p) for p in chosen[:count]}
                key = {**self.key, "together": [str(index) for index in sorted(fits)]}
                nats = self.cache.get("", key, partial(self.replace, fits))["nats"]
                if not nats.isfinite().all():
                    break
                removed = sum(p.block.parameters - count_parameters(fits[p.block.index]) for p in chosen[:count])
                change = self.compare(Losses(nats))
                groups.append(BlockGroup(tuple(sorted(fits)), removed, change))
                advance(1)
                if change.delta > LARGEST_RISE * change.baseline:
                    break
        return groups

    def replace(self, fits: dict[BranchIndex, Replacement]) -> Tensors:
        try:
            with patched(self.model, self.blocks, fits):
                return {"nats": evaluate(self.model, self.windows, self.context).nats}
        except NumericsError:
            return {"nats": torch.full((len(self.windows), self.windows.shape[1] - 1), math.inf)}


def linear_module(model: Any, p: BlockProfile) -> Replacement:
    """A module that computes the block's least-squares map and can replace the block."""
    returns = ATTENTION_RETURNS if p.block.is_attention else 0
    module = Replacement(p.block.width, None, p.block.residual_inside, returns=returns, dtype=ACCUMULATION_DTYPE)
    module.bypass = p.block.bypass
    with torch.no_grad():
        linear = p.trial_map
        module.linear.weight.copy_(linear.weight.T)
        module.output_bias.copy_(linear.bias)
    return as_stored(module, model, p.block, stored_dtype(model))
