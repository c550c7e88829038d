"""What it costs to replace a block by its linear map, measured: every block alone, and the cheapest ones together.

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

from compressor.evaluate.perplexity import Evaluation, Losses, compare, evaluate, has_plain_head, logits_batch
from compressor.measure.moments import ACCUMULATION_DTYPE
from compressor.measure.profile import BlockProfile, Profile
from compressor.modeling_compressor import Replacement
from compressor.models.blocks import Block, Rows, watch
from compressor.models.residual import Stream, stream_gain
from compressor.models.source import identify, source_of
from compressor.patch.checkpoint import count_parameters
from compressor.patch.tree import as_stored, patched
from compressor.runtime.cache import Cache
from compressor.runtime.progress import Progress
from compressor.text import Split, Text

MODEST = 500_000_000  # parameters: below this many the sweep is made without being asked for
FIRST_TOGETHER = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # blocks
ENOUGH_SEEN = 1 / 3  # of the baseline: past this rise no larger group is tried


@dataclass(frozen=True)
class Together:
    """The blocks that are cheapest alone, all replaced at once."""

    blocks: tuple[int, ...]
    removed: int
    evaluation: Evaluation


@dataclass(frozen=True)
class Sweep:
    """Every block alone, by index; `seconds` of the sweep and of one whole evaluation of the same windows."""

    alone: dict[int, Evaluation]
    together: list[Together]
    seconds: float
    whole_seconds: float

    @property
    def ratio(self) -> float:
        """What the sweep cost, of one whole evaluation per block."""
        return self.seconds / (len(self.alone) * self.whole_seconds)


@dataclass
class _Pass:
    """Where the windows are on their way through the model, a few tokens of them, and whether its head is plain."""

    stream: Stream
    few: Stream
    plain: bool


class Sweeper:
    """Replaces blocks of a measured model by their least-squares maps, on the first windows of the selection text."""

    def __init__(
        self,
        model: Any,
        profile: Profile,
        text: Text,
        *,
        tokens: int,
        batch_size: int = 8,
        seed: int = 0,
        cache: Cache | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.model, self.profile, self.seed = model, profile, seed
        self.progress = progress or Progress()
        self.cache = cache or Cache(None, self.progress)
        self.blocks = [p.block for p in profile.blocks]
        self.windows = text.selection.windows[: max(2, tokens // text.seq_len)]
        self.batch = logits_batch(model, text.seq_len, batch_size)
        self.key = {
            **identify(model),
            "what": "sweep",
            "maps": text.calibration.sha256,
            "windows": Split(self.windows, "").sha256,
            "seq_len": text.seq_len,
            "batch": batch_size,
        }
        self.dtype = source_of(model).dtype
        self.before: Losses | None = None
        self.pass_: _Pass | None = None

    def alone(self) -> tuple[dict[int, Evaluation], float, float]:
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
        self.before, self.pass_ = Losses(kept["nats"]), None
        took, whole = kept["seconds"].tolist()
        found = {index: compare(self.before, Losses(nats), seed=self.seed) for index, nats in after.items()}
        # The pass over the unchanged model is the baseline's own evaluation: it is not what the sweep adds.
        return found, seconds + took - whole, whole

    def begin(self) -> _Pass:
        """The pass over the windows, begun when the first block needs it."""
        if self.pass_ is None:
            plain = has_plain_head(self.model, self.windows)
            stream = Stream(self.model, self.blocks, self.windows, self.batch)
            few = Stream(self.model, self.blocks, self.windows[:1, :16], 1)  # enough to see how a layer adds its block
            self.pass_ = _Pass(stream, few, plain)
        return self.pass_

    def losses(self, start: Stream) -> Tensor:
        plain = self.begin().plain
        return evaluate(self.model, self.windows, batch_size=self.batch, plain=plain, start=start).nats

    def swap(self, p: BlockProfile) -> dict[str, Tensor]:
        """The losses with this block replaced, and the seconds that it took."""
        began = time.perf_counter()
        here = self.begin()
        here.stream.advance(p.block.index)
        here.few.advance(p.block.index)
        gain = stream_gain(self.model, p.block, here.few)
        swapped = self.pass_again(here.stream, p) if gain is None else self.pass_layer(here.stream, p, gain)
        nats = self.losses(swapped)
        return {"nats": nats, "seconds": torch.tensor(time.perf_counter() - began, dtype=ACCUMULATION_DTYPE)}

    def baseline(self) -> dict[str, Tensor]:
        """The losses of the unchanged model, the seconds that they took, and those of one whole evaluation."""
        began = time.perf_counter()
        stream = self.begin().stream
        stream.advance(len(self.blocks))
        nats = self.losses(stream)
        took = time.perf_counter() - began
        self.time_whole()  # the first pass may be slow
        whole = (self.time_whole() + self.time_whole()) / 2
        return {"nats": nats, "seconds": torch.tensor([took, whole], dtype=ACCUMULATION_DTYPE)}

    def time_whole(self) -> float:
        """Seconds of one whole evaluation of the windows, judged by the first batch."""
        first = self.windows[: self.batch]
        began = time.perf_counter()
        evaluate(self.model, first, batch_size=self.batch)
        return (time.perf_counter() - began) * len(self.windows) / len(first)

    def pass_again(self, stream: Stream, p: BlockProfile) -> Stream:
        """The place behind the block's layer with the block replaced, by running the layer once more: for a layer with
        something between the block and the stream."""
        with patched(self.model, self.blocks, {p.block.index: self.module(p)}):
            return stream.behind(stream.run())

    def pass_layer(self, stream: Stream, p: BlockProfile, gain: float) -> Stream:
        """Move the stream behind the block's layer, which adds `gain` times the block's output; return the same place
        with the block replaced."""
        module = self.module(p)
        changes: list[Tensor] = []

        def see(_: Block, rows: Rows) -> None:
            changes.append(gain * (module(rows.x) - rows.y))

        with torch.no_grad(), watch(self.model, [p.block], see):
            states = stream.run()
        changed = (state + change.reshape(state.shape) for state, change in zip(states, changes, strict=True))
        swapped = stream.behind(changed)
        stream.states, stream.position = states, stream.position + 1
        return swapped

    def together(self, chosen: Sequence[BlockProfile]) -> list[Together]:
        """More and more of these blocks, in this order, until perplexity has risen by a third."""
        assert self.before is not None
        found: list[Together] = []
        counts = [count for count in FIRST_TOGETHER if count <= len(chosen)]
        with self.progress.bar("together", len(counts)) as advance:
            for count in counts:
                fits = {p.block.index: self.module(p) for p in chosen[:count]}
                key = {**self.key, "together": sorted(fits)}
                nats = self.cache.get("", key, partial(self.replace, fits))["nats"]
                removed = sum(p.block.parameters - count_parameters(fits[p.block.index]) for p in chosen[:count])
                evaluation = compare(self.before, Losses(nats), seed=self.seed)
                found.append(Together(tuple(sorted(fits)), removed, evaluation))
                advance(1)
                if evaluation.delta > ENOUGH_SEEN * evaluation.baseline:
                    break
        return found

    def module(self, p: BlockProfile) -> Replacement:
        return linear_module(self.model, p, self.dtype)

    def replace(self, fits: dict[int, Replacement]) -> dict[str, Tensor]:
        with patched(self.model, self.blocks, fits):
            return {"nats": evaluate(self.model, self.windows, batch_size=self.batch).nats}


def linear_module(model: Any, p: BlockProfile, stored: torch.dtype) -> Replacement:
    """The block's least-squares map as a module that can stand in its place."""
    module = Replacement(p.block.width, None, p.block.residual_inside, dtype=ACCUMULATION_DTYPE)
    module.bypass = p.block.bypass
    with torch.no_grad():
        linear = p.linear
        module.weight.copy_(linear.weight.T)
        module.bias.copy_(linear.bias)
    return as_stored(module, model, p.block, stored)
