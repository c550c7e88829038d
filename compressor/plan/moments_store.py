"""The moments of all blocks, on disk: one pass over the calibration text, one block at a time.

For every block these are the moments of z = [x, a], its inputs and the activations of its neurons. A replacement of any
shape is then a closed-form solve with no new pass. Only one block's moments are in memory at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from compressor.measure.gradients import GRADIENT_TOKENS, Gradients, visit_gradients
from compressor.measure.moments import ACCUMULATION_DTYPE, Moments
from compressor.measure.profile import merge_processes, moments_device, row_weights
from compressor.models.blocks import Block, Rows, capture_rows, find_blocks
from compressor.models.neurons import Neurons, find_neurons
from compressor.models.residual import Stream, calibration_streams, delete_saved_streams
from compressor.models.source import identify
from compressor.plan.candidates import BlockCandidates, pack_moments, survey_block, unpack_candidates, unpack_moments
from compressor.runtime import distributed
from compressor.runtime.cache import Cache, Tensors, cache_key
from compressor.runtime.context import RunContext
from compressor.runtime.errors import InputError
from compressor.runtime.locks import scratch_directory
from compressor.runtime.progress import Progress
from compressor.runtime.resources import available_memory, format_bytes, free_disk
from compressor.text import Text

MATRICES_AT_ONCE = 5  # of the size of a block's moments, which its survey has in memory at once
MEMORY_SHARE = 0.8  # of the free memory that a survey may use


class MomentsStore:
    """The candidates of all blocks, and the moments that they are fitted on. `open_store` makes one."""

    def __init__(
        self, model: Any, text: Text, neurons: dict[int, Neurons | None], cache: Cache, context: RunContext
    ) -> None:
        self.model, self.text, self.neurons = model, text, neurons
        self.cache, self.context, self.progress = cache, context, context.progress
        self.blocks = find_blocks(model)
        self.identity, self.text_sha256 = identify(model), text.calibration_sha256

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
        """The candidates of every block, from the cache where a block was surveyed before."""
        candidates: dict[int, BlockCandidates] = {}
        missing = []
        for block in self.blocks:
            survey = self.cache.find(self.key("survey", block)) if self.cache.has(self.key("moments", block)) else None
            if survey is None:
                missing.append(block)
            else:
                candidates[block.index] = unpack_candidates(block, self.neurons[block.index], survey)
        if not missing:
            self.progress.say("survey: measured before")
        self.ensure_gradients(missing)
        with self.progress.bar("survey", len(self.blocks)) as advance:
            advance(len(candidates))
            streams = self.streams(missing[0]) if missing else []
            for group in distributed.rounds(missing):
                for block, survey in zip(group, self.survey_group(group, streams), strict=True):
                    candidates[block.index] = unpack_candidates(block, self.neurons[block.index], survey)
                    advance(1)
                for stream in streams:
                    stream.save_periodically()
        self.drop_temporary()
        return {block.index: candidates[block.index] for block in self.blocks}

    def ensure_gradients(self, blocks: list[Block]) -> None:
        """Make sure that the loss gradients of these blocks are on disk; one backward pass gives those of all."""
        if all(self.cache.has(self.key("gradients", block)) for block in blocks):
            return
        indices = {block.index for block in blocks}

        def store(block: Block, rows: Gradients) -> None:
            if block.index in indices:
                columns = {"x": rows.x.cpu(), "y": rows.y.cpu(), "g": rows.g.cpu()}
                self.cache.keep(self.key("gradients", block), columns, needed=True)

        visit_gradients(self.model, self.blocks, self.text.held_out, store, self.progress)

    def streams(self, first: Block) -> list[Stream]:
        """The fitting and the held-out windows, at this block's layer or before it."""
        key = self.key("stream", self.blocks[0])
        return calibration_streams(
            self.model, self.blocks, self.text, self.context.batch_size, self.cache, key, first.index
        )

    def drop_temporary(self) -> None:
        """Drop from the cache what only an unfinished survey needs."""
        delete_saved_streams(self.cache, self.key("stream", self.blocks[0]))
        if distributed.rank() == 0:
            for block in self.blocks:
                self.cache.drop(self.key("gradients", block))

    def survey_group(self, group: Sequence[Block], streams: list[Stream]) -> list[Tensors]:
        """Survey these blocks, one per process. All processes run a share of every block's rows."""
        device = moments_device(self.model)
        own_moments: list[Moments] = []
        own_gradients: Tensors = {}
        for owner, block in enumerate(group):
            block_moments = []
            for stream in streams:
                stream.advance(block.index)
                block_moments.append(
                    collect_moments(self.model, block, self.neurons[block.index], stream, device, owner=owner)
                )
            gradients = self.load_gradients(block)
            if owner == distributed.rank():
                own_moments, own_gradients = block_moments, gradients
        survey, moments = None, None
        if own_moments:
            block, (fit, held) = group[distributed.rank()], own_moments
            neurons = self.neurons[block.index]
            rows = Gradients(**{name: tensor.to(device) for name, tensor in own_gradients.items()})
            survey = survey_block(block, neurons, output_bias(block, neurons, device), fit, held, rows)
            fit.add(held)  # the ridges are chosen: replacements are fitted on all rows
            moments = pack_moments(fit)
        surveys = []
        for owner, block in enumerate(group):
            # The moments are stored first: where a survey is on disk, they are there too.
            self.cache.keep(self.key("moments", block), distributed.broadcast(moments, owner), needed=True)
            surveys.append(distributed.broadcast(survey, owner))
            self.cache.keep(self.key("survey", block), surveys[-1])
        return surveys

    def load_gradients(self, block: Block) -> Tensors:
        """The rows of a block's gradients, computed again where another run that shares the cache has dropped them."""
        for _ in range(2):
            rows = self.cache.find(self.key("gradients", block))
            if rows is not None:
                return rows
            self.ensure_gradients([b for b in self.blocks if b.index >= block.index])
        raise InputError(f"the gradients in {self.cache.directory} vanish as they are made; name another with --cache")

    def moments(self, index: int) -> Moments:
        """The moments of z that the block's replacements are fitted on: those of all calibration windows."""
        block = self.blocks[index]
        tensors = self.cache.find(self.key("moments", block))
        if tensors is None:  # the cache has lost them since
            self.survey_group([block], self.streams(block))
            tensors = self.cache.find(self.key("moments", block))
            if tensors is None:
                raise InputError(f"the cache {self.cache.directory} cannot keep what is measured; see the warnings")
        return unpack_moments(tensors)


def open_store(model: Any, text: Text, context: RunContext) -> MomentsStore:
    """A store for this model and text, in the run's cache or in a temporary directory.

    InputError where memory or disk cannot hold it.
    """
    neurons = choose_neurons(model, text, context.progress)
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
    """The size of all blocks' moments, and of the rows of their gradients, which are stored for a while."""
    rows = min(GRADIENT_TOKENS, text.held_out.numel())
    return sum(moment_bytes(block, neurons[block.index]) + 12 * rows * block.width for block in blocks)


def choose_neurons(model: Any, text: Text, progress: Progress) -> dict[int, Neurons | None]:
    """The neurons of every block; None for all blocks where memory is too short for moments with neurons."""
    blocks = find_blocks(model)
    neurons = {block.index: find_neurons(model, block) for block in blocks}
    # All processes must come to the same plan, so all take the free memory of the first.
    free = distributed.broadcast_value(int(MEMORY_SHARE * available_memory()))
    needed = MATRICES_AT_ONCE * max(moment_bytes(block, neurons[block.index]) for block in blocks)
    progress.say(
        f"statistics: {format_bytes(disk_bytes(blocks, neurons, text))} on disk, {format_bytes(needed)} of memory at a "
        f"time ({format_bytes(free)} can be had)"
    )
    if needed <= free:
        return neurons
    least = MATRICES_AT_ONCE * max(moment_bytes(block, None) for block in blocks)
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


def output_bias(block: Block, neurons: Neurons | None, device: torch.device) -> Tensor:
    """The bias of the block's output; zeros where it has none."""
    bias = neurons.outer_matrix.bias if neurons else None
    zeros = torch.zeros(block.width, dtype=ACCUMULATION_DTYPE, device=device)
    return zeros if bias is None else bias.to(zeros)


def collect_moments(
    model: Any,
    block: Block,
    neurons: Neurons | None,
    stream: Stream,
    device: torch.device,
    goal: Sequence[Tensor] | None = None,
    gain: float = 1.0,
    owner: int | None = None,
) -> Moments:
    """The stream-weighted moments of [x, a] at the layer where the stream stands, of all processes' rows.

    With an owner, only that process gets them, and the stream moves past the layer. `goal` are the states that the
    residual stream should have after the layer, which adds `gain` times the block's output to it: with them, xy are the
    moments of [x, a] with what the block's output lacks.
    """
    count = neurons.count if neurons else block.width
    moments = Moments.zeros(block.width + count, block.width if goal else 0, device, whole_yy=False)
    goals = iter(goal or [])

    def add(_: Block, rows: Rows) -> None:
        x, a = rows.x.to(device, ACCUMULATION_DTYPE), rows.a.to(device, ACCUMULATION_DTYPE)
        missing = (next(goals).to(device).reshape(rows.h.shape) - rows.h.to(device)) / gain if goal else x[:, :0]
        moments.add(Moments.of(torch.cat([x, a], dim=1), missing, row_weights(rows.h).to(device), whole_yy=False))

    with capture_rows(model, [block], add, {block.index: neurons.outer_path} if neurons else None):
        if owner is None:
            stream.run_layer()
        else:
            stream.step()
    merge_processes(moments, owner)
    return moments
