"""The statistics of all blocks: one pass over the calibration text, one block at a time.

The pass keeps, for every block, the moments of z = [x, a] (inputs and neurons): every replacement of any form is then a
closed-form solve with no new pass. They are kept on disk, so that only one block's are in memory at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from compressor.measure.gradients import GRADIENT_TOKENS, Gradients, visit_gradients
from compressor.measure.moments import ACCUMULATION_DTYPE, Moments
from compressor.measure.profile import merge_processes, moments_device, row_weights
from compressor.models.blocks import Block, Rows, find_blocks, watch
from compressor.models.neurons import Neurons, find_neurons
from compressor.models.residual import Stream, calibration_streams, forget_streams
from compressor.models.source import identify
from compressor.plan.candidates import BlockCandidates, pack_moments, survey_block, unpack, unpack_moments
from compressor.runtime import distributed
from compressor.runtime.cache import Cache, Tensors, cache_key
from compressor.runtime.context import RunContext
from compressor.runtime.errors import InputError
from compressor.runtime.locks import scratch_directory
from compressor.runtime.progress import Progress
from compressor.runtime.resources import available_memory, format_bytes, free_disk
from compressor.text import Text

WORKSPACES = 5  # matrices of the size of the moments that a block needs at once
MEMORY_SHARE = 0.8


class MomentsStore:
    """The candidates of all blocks, and the moments that they are fitted on, by block. `open_store` makes one."""

    def __init__(
        self, model: Any, text: Text, neurons: dict[int, Neurons | None], cache: Cache, context: RunContext
    ) -> None:
        self.model, self.text, self.neurons = model, text, neurons
        self.cache, self.context, self.progress = cache, context, context.progress
        self.blocks = find_blocks(model)
        self.identity, self.text_sha256 = identify(model), text.calibration.sha256

    def key(self, kind: str, block: Block, **more: Any) -> dict[str, Any]:
        """All that a measurement of this block on the calibration windows depends on."""
        return cache_key(
            kind,
            self.identity,
            self.text_sha256,
            seq_len=self.text.seq_len,
            batch=self.context.batch_size,
            gradients=GRADIENT_TOKENS,
            block=block.path,
            neurons=self.neurons[block.index] is not None,
            **more,
        )

    def candidates(self) -> dict[int, BlockCandidates]:
        """What every block could become. A block that was surveyed before comes from disk; others are kept at once."""
        found: dict[int, BlockCandidates] = {}
        missing = []
        for block in self.blocks:
            kept = self.cache.find(self.key("survey", block)) if self.cache.has(self.key("moments", block)) else None
            if kept is None:
                missing.append(block)
            else:
                found[block.index] = self.unpack(block, kept)
        if not missing:
            self.progress.say("survey: measured before")
        self.find_gradients(missing)
        with self.progress.bar("survey", len(self.blocks)) as advance:
            advance(len(found))
            streams = self.streams(missing[0]) if missing else []
            for group in distributed.rounds(missing):
                for block, kept in zip(group, self.look(group, streams), strict=True):
                    found[block.index] = self.unpack(block, kept)
                    advance(1)
                for stream in streams:
                    stream.keep()
        self.forget()
        return {block.index: found[block.index] for block in self.blocks}

    def unpack(self, block: Block, kept: Tensors) -> BlockCandidates:
        return unpack(block, self.neurons[block.index], kept)

    def find_gradients(self, blocks: list[Block]) -> None:
        """Have the loss gradients of these blocks on disk; one backward pass gives those of all blocks."""
        if all(self.cache.has(self.key("gradients", block)) for block in blocks):
            return
        wanted = {block.index for block in blocks}

        def see(block: Block, rows: Gradients) -> None:
            if block.index in wanted:
                columns = {"x": rows.x.cpu(), "y": rows.y.cpu(), "g": rows.g.cpu()}
                self.cache.keep(self.key("gradients", block), columns, needed=True)

        visit_gradients(self.model, self.blocks, self.text.held_out, see, self.progress)

    def streams(self, first: Block) -> list[Stream]:
        """The fitting and the held-out windows, at this block's layer or before it."""
        key = self.key("stream", self.blocks[0])
        return calibration_streams(
            self.model, self.blocks, self.text, self.context.batch_size, self.cache, key, first.index
        )

    def forget(self) -> None:
        """Drop what only an unfinished survey needs."""
        forget_streams(self.cache, self.key("stream", self.blocks[0]))
        if distributed.rank() == 0:
            for block in self.blocks:
                self.cache.drop(self.key("gradients", block))

    def look(self, group: Sequence[Block], streams: list[Stream]) -> list[Tensors]:
        """Run the calibration text through the layers of these blocks and survey them, a block by each process."""
        device = moments_device(self.model)
        mine: list[Moments] = []
        rows: Tensors = {}
        for owner, block in enumerate(group):
            both = []
            for stream in streams:
                stream.advance(block.index)
                both.append(collect(self.model, block, self.neurons[block.index], stream, device, owner=owner))
            gradients = self.gradients_of(block)
            if owner == distributed.rank():
                mine, rows = both, gradients
        found, moments = None, None
        if mine:
            block = group[distributed.rank()]
            neurons, gone = self.neurons[block.index], Gradients(**{name: t.to(device) for name, t in rows.items()})
            found = survey_block(block, neurons, own_bias(block, neurons, device), mine[0], mine[1], gone)
            moments = pack_moments(mine[0])
        kept = []
        for owner, block in enumerate(group):
            # The moments first: a survey on disk says that they are there too.
            self.cache.keep(self.key("moments", block), distributed.broadcast(moments, owner), needed=True)
            kept.append(distributed.broadcast(found, owner))
            self.cache.keep(self.key("survey", block), kept[-1])
        return kept

    def gradients_of(self, block: Block) -> Tensors:
        """The rows of a block's gradients. Another run that shares the cache may have dropped them."""
        for _ in range(2):
            kept = self.cache.find(self.key("gradients", block))
            if kept is not None:
                return kept
            self.find_gradients([b for b in self.blocks if b.index >= block.index])
        raise InputError(f"the gradients in {self.cache.directory} vanish as they are made; name another with --cache")

    def moments(self, index: int) -> Moments:
        """The moments of z that the block's replacements are fitted on."""
        block = self.blocks[index]
        kept = self.cache.find(self.key("moments", block))
        if kept is None:  # lost since
            self.look([block], self.streams(block))
            kept = self.cache.find(self.key("moments", block))
            if kept is None:
                raise InputError(f"the cache {self.cache.directory} cannot keep what is measured; see the warnings")
        return unpack_moments(kept)


def open_store(model: Any, text: Text, context: RunContext) -> MomentsStore:
    """A store for this model and text, on the run's cache or in a directory that goes with it; refused when memory or
    disk cannot hold it."""
    neurons = afford_neurons(model, text, context.progress)
    cache = context.cache
    store = MomentsStore(model, text, neurons, cache, context)
    if cache.directory is None:
        store.cache = Cache(scratch_directory(store), Progress())
    refuse_short_disk(store)
    return store


def moment_bytes(block: Block, neurons: Neurons | None) -> int:
    """The size of one block's moments of [x, a]."""
    return 8 * (block.width + (neurons.count if neurons else block.width)) ** 2


def disk_bytes(blocks: Sequence[Block], neurons: Mapping[int, Neurons | None], text: Text) -> int:
    """Moments of every block, and for a while the rows of its gradients."""
    rows = min(GRADIENT_TOKENS, text.held_out.numel())
    return sum(moment_bytes(block, neurons[block.index]) + 12 * rows * block.width for block in blocks)


def afford_neurons(model: Any, text: Text, progress: Progress) -> dict[int, Neurons | None]:
    """The neurons of every block. Say what memory and disk they take; where memory is short, blocks are linear."""
    blocks = find_blocks(model)
    neurons = {block.index: find_neurons(model, block) for block in blocks}
    free = distributed.broadcast_value(
        int(MEMORY_SHARE * available_memory())
    )  # all processes must come to the same plan
    most = WORKSPACES * max(moment_bytes(block, neurons[block.index]) for block in blocks)
    progress.say(
        f"statistics: {format_bytes(disk_bytes(blocks, neurons, text))} on disk, {format_bytes(most)} of memory at a "
        f"time ({format_bytes(free)} can be had)"
    )
    if most <= free:
        return neurons
    least = WORKSPACES * max(moment_bytes(block, None) for block in blocks)
    if least > free:
        raise InputError(
            f"one block's statistics need {format_bytes(least)} of memory, and {format_bytes(free)} can be had"
        )
    progress.say("warning: memory is short, so no neurons are kept: only linear and low-rank replacements")
    return dict.fromkeys(neurons)


def refuse_short_disk(store: MomentsStore) -> None:
    assert store.cache.directory is not None
    needed = disk_bytes(store.blocks, store.neurons, store.text)
    free = distributed.broadcast_value(free_disk(store.cache.directory))
    if needed > free and not all(store.cache.has(store.key("moments", block)) for block in store.blocks):
        raise InputError(
            f"the statistics need {format_bytes(needed)} of disk, and {store.cache.directory} has "
            f"{format_bytes(free)}; name another place with --cache DIR"
        )


def own_bias(block: Block, neurons: Neurons | None, device: torch.device) -> Tensor:
    """What the block adds to the sum over its neurons."""
    bias = neurons.outer_matrix.bias if neurons else None
    zeros = torch.zeros(block.width, dtype=ACCUMULATION_DTYPE, device=device)
    return zeros if bias is None else bias.to(zeros)


def collect(
    model: Any,
    block: Block,
    neurons: Neurons | None,
    stream: Stream,
    device: torch.device,
    wanted: Sequence[Tensor] | None = None,
    gain: float = 1.0,
    owner: int | None = None,
) -> Moments:
    """The stream-weighted moments of [x, a] over the layer where the stream stands, of all processes' rows. With an
    owner only it gets them, and the stream moves behind the layer.

    `wanted` are the hidden states that should come out: then xy holds the moments of what the block's output lacks, of
    which the layer adds `gain` times to its stream.
    """
    count = neurons.count if neurons else block.width
    moments = Moments.zeros(block.width + count, block.width if wanted else 0, device, whole_yy=False)
    turns = iter(wanted or [])

    def add(_: Block, rows: Rows) -> None:
        x, a = rows.x.to(device, ACCUMULATION_DTYPE), rows.a.to(device, ACCUMULATION_DTYPE)
        missing = (next(turns).to(device).reshape(rows.h.shape) - rows.h.to(device)) / gain if wanted else x[:, :0]
        moments.add(Moments.of(torch.cat([x, a], dim=1), missing, row_weights(rows.h).to(device), whole_yy=False))

    with watch(model, [block], add, {block.index: neurons.outer_path} if neurons else None):
        if owner is None:
            stream.run()
        else:
            stream.step()
    merge_processes(moments, owner)
    return moments
