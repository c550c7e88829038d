"""What it costs to replace a block, measured: every block alone, and the cheapest ones together.

Nothing before a block changes when it is replaced, and nothing changes inside its layer but what the block adds. So the
windows are carried through the model once, and each replacement runs only the layers behind it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compressor.evaluate.perplexity import Losses, PerplexityChange, compare, evaluate, has_plain_head, limit_batch_size
from compressor.measure.moments import ACCUMULATION_DTYPE
from compressor.measure.profile import BlockProfile, Profile
from compressor.modeling_compressor import Replacement
from compressor.models.blocks import Block, Rows, watch
from compressor.models.residual import Stream, open_stream, stream_gain
from compressor.models.source import identify, source_of
from compressor.patch.checkpoint import count_parameters
from compressor.patch.tree import as_stored, patched
from compressor.runtime.cache import Tensors, cache_key
from compressor.runtime.context import RunContext
from compressor.text import Split, Text

SWAPPED_BELOW = 500_000_000  # parameters: smaller models are swapped block by block without being asked for
GROUP_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # blocks replaced together
ENOUGH_SEEN = 1 / 3  # of the baseline: past this rise no larger group is tried


@dataclass(frozen=True)
class Together:
    """The blocks that are cheapest alone, all replaced at once."""

    blocks: tuple[int, ...]
    removed: int
    change: PerplexityChange


@dataclass(frozen=True)
class Sweep:
    """Every block alone, by index; `seconds` of the sweep and of one whole evaluation of the same windows."""

    alone: dict[int, PerplexityChange]
    together: list[Together]
    seconds: float
    whole_seconds: float

    @property
    def ratio(self) -> float:
        """What the sweep cost, of one whole evaluation per block."""
        return self.seconds / (len(self.alone) * self.whole_seconds)


class SingleBlockTrials:
    """The losses of a model with one block replaced, for one block after another in order of depth."""

    def __init__(self, model: Any, blocks: list[Block], windows: Tensor, context: RunContext) -> None:
        self.model, self.blocks, self.windows, self.context = model, blocks, windows, context
        self.batch_size = limit_batch_size(model, windows.shape[1], context.batch_size)
        self.stream: Stream | None = None  # the windows before the present block's layer
        self.sample: Stream | None = None  # a few tokens of them: enough to see how a layer adds its block
        self.plain = False  # whether the shorter way to the losses is exact for this model

    def begin(self) -> Stream:
        """The pass over the windows, begun when the first block needs it."""
        if self.stream is None:
            self.plain = has_plain_head(self.model, self.windows)
            self.stream = open_stream(self.model, self.blocks, self.windows, self.batch_size)
            self.sample = open_stream(self.model, self.blocks, self.windows[:1, :16], 1)
        return self.stream

    def losses(self, start: Stream | None = None) -> Losses:
        """The losses from where this stream stands, or of a whole pass."""
        self.begin()
        return evaluate(self.model, self.windows, self.context, plain=self.plain, start=start)

    def replaced(self, index: int, module: Replacement) -> Losses:
        """The losses with this block replaced; its whole layer runs again."""
        stream = self.begin()
        stream.advance(index)
        with patched(self.model, self.blocks, {index: module}):
            return self.losses(stream)

    def swapped(self, index: int, module: Replacement) -> Losses:
        """The same by the shortest way: where the layer only adds its block to the stream, the difference is added."""
        stream = self.begin()
        assert self.sample is not None
        for each in (stream, self.sample):
            each.advance(index)
        gain = stream_gain(self.model, self.blocks[index], self.sample)
        if gain is None:  # something stands between the block and the stream
            return self.replaced(index, module)
        return self.losses(self.pass_layer(stream, index, module, gain))

    def unchanged(self) -> Losses:
        """The losses of the model as it is, at the end of the pass."""
        stream = self.begin()
        stream.advance(len(self.blocks))
        return self.losses(stream)

    def pass_layer(self, stream: Stream, index: int, module: Replacement, gain: float) -> Stream:
        """Move the stream behind the block's layer, which adds `gain` times the block's output; return the same place
        with the block replaced."""
        changes: list[Tensor] = []

        def see(_: Block, rows: Rows) -> None:
            changes.append(gain * (module(rows.x) - rows.y))

        with torch.no_grad(), watch(self.model, [self.blocks[index]], see):
            states = stream.run()
        changed = (state + change.reshape(state.shape) for state, change in zip(states, changes, strict=True))
        swapped = stream.behind(changed)
        stream.states, stream.position = states, stream.position + 1
        return swapped


class Sweeper:
    """Replaces blocks of a measured model by their least-squares maps, on the first windows of the selection text."""

    def __init__(self, model: Any, profile: Profile, text: Text, tokens: int, context: RunContext) -> None:
        self.model, self.profile, self.context = model, profile, context
        self.cache, self.progress = context.cache, context.progress
        self.blocks = [p.block for p in profile.blocks]
        self.windows = text.selection.windows[: max(2, tokens // text.seq_len)]
        more = {"windows": Split(self.windows, "").sha256, "seq_len": text.seq_len, "batch": context.batch_size}
        self.key = cache_key("swap", identify(model), text.calibration.sha256, **more)
        self.trials = SingleBlockTrials(model, self.blocks, self.windows, context)
        self.before: Losses | None = None

    def alone(self) -> tuple[dict[int, PerplexityChange], float, float]:
        """Every block by itself, kept at once; then the seconds of the sweep, and of one whole evaluation."""
        after: dict[int, Tensor] = {}
        seconds = 0.0
        if all(self.cache.has({**self.key, "block": p.block.path}) for p in self.profile.blocks):
            self.progress.say("swap: measured before")
        for p in self.progress.track("swap", self.profile.blocks, len(self.blocks)):
            kept = self.cache.get("", {**self.key, "block": p.block.path}, partial(self.swap, p))
            after[p.block.index] = kept["nats"]
            seconds += kept["seconds"].item()
        kept = self.cache.get("", self.key, self.baseline)
        self.before = Losses(kept["nats"])
        self.trials.stream = self.trials.sample = None
        took, whole = kept["seconds"].tolist()
        seed = self.context.seed
        changes = {index: compare(self.before, Losses(nats), seed=seed) for index, nats in after.items()}
        # The pass over the unchanged model is the baseline's own evaluation: it is not what the sweep adds.
        return changes, seconds + took - whole, whole

    def swap(self, p: BlockProfile) -> Tensors:
        """The losses with this block replaced, and the seconds that it took."""
        began = time.perf_counter()
        nats = self.trials.swapped(p.block.index, linear_module(self.model, p)).nats
        return {"nats": nats, "seconds": torch.tensor(time.perf_counter() - began, dtype=ACCUMULATION_DTYPE)}

    def baseline(self) -> Tensors:
        """The losses of the unchanged model, the seconds that they took, and those of one whole evaluation."""
        began = time.perf_counter()
        nats = self.trials.unchanged().nats
        took = time.perf_counter() - began
        self.time_whole()  # the first pass may be slow
        whole = (self.time_whole() + self.time_whole()) / 2
        return {"nats": nats, "seconds": torch.tensor([took, whole], dtype=ACCUMULATION_DTYPE)}

    def time_whole(self) -> float:
        """Seconds of one whole evaluation of the windows, judged by the first batch."""
        first = self.windows[: self.trials.batch_size]
        began = time.perf_counter()
        evaluate(self.model, first, self.context)
        return (time.perf_counter() - began) * len(self.windows) / len(first)

    def together(self, chosen: Sequence[BlockProfile]) -> list[Together]:
        """More and more of these blocks, in this order, until perplexity has risen by a third."""
        assert self.before is not None
        groups: list[Together] = []
        counts = [count for count in GROUP_SIZES if count <= len(chosen)]
        with self.progress.bar("together", len(counts)) as advance:
            for count in counts:
                fits = {p.block.index: linear_module(self.model, p) for p in chosen[:count]}
                key = {**self.key, "together": sorted(fits)}
                nats = self.cache.get("", key, partial(self.replace, fits))["nats"]
                removed = sum(p.block.parameters - count_parameters(fits[p.block.index]) for p in chosen[:count])
                change = compare(self.before, Losses(nats), seed=self.context.seed)
                groups.append(Together(tuple(sorted(fits)), removed, change))
                advance(1)
                if change.delta > ENOUGH_SEEN * change.baseline:
                    break
        return groups

    def replace(self, fits: dict[int, Replacement]) -> Tensors:
        with patched(self.model, self.blocks, fits):
            return {"nats": evaluate(self.model, self.windows, self.context).nats}


def linear_module(model: Any, p: BlockProfile) -> Replacement:
    """The block's least-squares map as a module that can stand in its place."""
    module = Replacement(p.block.width, None, p.block.residual_inside, dtype=ACCUMULATION_DTYPE)
    module.bypass = p.block.bypass
    with torch.no_grad():
        linear = p.linear
        module.weight.copy_(linear.weight.T)
        module.bias.copy_(linear.bias)
    return as_stored(module, model, p.block, source_of(model).dtype)
