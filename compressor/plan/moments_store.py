"""The moments of all blocks, on disk: one pass over the calibration text, one block at a time.

For every block these are the moments of z = [x, a], its inputs and the activations of its neurons. A replacement of any
shape is then a closed-form solve with no new pass. Only one block's moments are in memory at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from compressor.measure.calibration_pass import visit_rows
from compressor.measure.gradients import GRADIENT_TOKENS, Gradients, visit_gradients
from compressor.measure.moments import ACCUMULATION_DTYPE, Moments
from compressor.measure.profile import merge_processes, moments_device, row_weights
from compressor.models.blocks import Block, Rows, capture_rows, find_blocks
from compressor.models.layer_states import LayerStates
from compressor.models.neurons import Neurons, find_neurons
from compressor.models.residual import CALIBRATION_PARTS, Stream
from compressor.models.source import identify
from compressor.plan.candidates import (
    BlockCandidates,
    pack_moments,
    survey_block,
    unpack_candidates,
    unpack_moments,
)
from compressor.plan.choices import ANYTHING, Choices
from compressor.plan.shapes import Shapes
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
        self.states = LayerStates(model, self.blocks, text, context.batch_size)

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

    def collector(self) -> SurveyCollector:
        """What surveys the blocks that were not surveyed before, in a pass over the calibration text."""
        return SurveyCollector(self)

    def candidates(self) -> dict[int, BlockCandidates]:
        """The candidates of every block; those that were not surveyed before are surveyed now."""
        candidates = self.find_candidates()
        if len(candidates) < len(self.blocks):
            self.visit(self.collector())
            candidates = self.find_candidates()
        else:
            self.progress.say("survey: measured before")
        self.drop_gradients()
        return {block.index: candidates[block.index] for block in self.blocks}

    def visit(self, collector: SurveyCollector) -> None:
        """Make a pass over the calibration text for one survey."""
        visit_rows(self.model, self.blocks, self.text, self.context, [collector], "survey", self.states)

    def find_candidates(self) -> dict[int, BlockCandidates]:
        """The candidates of the blocks that were surveyed before."""
        candidates = {}
        for block in self.blocks:
            survey = self.cache.find(self.key("survey", block)) if self.cache.has(self.key("moments", block)) else None
            if survey is not None:
                candidates[block.index] = unpack_candidates(block, self.neurons[block.index], survey)
        return candidates

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

    def drop_gradients(self) -> None:
        """Drop from the cache what only an unfinished survey needs."""
        if distributed.rank() == 0:
            for block in self.blocks:
                self.cache.drop(self.key("gradients", block))

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
            self.visit(SurveyCollector(self, [block]))
            tensors = self.cache.find(self.key("moments", block))
            if tensors is None:
                raise InputError(f"the cache {self.cache.directory} cannot keep what is measured; see the warnings")
        return unpack_moments(tensors)


class SurveyCollector:
    """Surveys blocks from their rows: sums the moments of [x, a], finds candidates, and stores both.

    With `only`, these blocks are surveyed again, whatever the cache has.
    """

    def __init__(self, store: MomentsStore, only: list[Block] | None = None) -> None:
        self.store, self.only = store, only
        self.device = moments_device(store.model)
        self.moments: dict[tuple[int, str], Moments] = {}

    def find_missing(self) -> list[Block]:
        """The blocks to survey; their gradients are on disk from here on."""
        store = self.store
        known = {} if self.only else store.find_candidates()
        missing = self.only or [block for block in store.blocks if block.index not in known]
        store.ensure_gradients(missing)
        return missing

    def inner_path(self, block: Block) -> str | None:
        neurons = self.store.neurons[block.index]
        return neurons.outer_path if neurons else None

    def begin(self, group: Sequence[Block]) -> None:
        self.moments = {
            (block.index, part): empty_moments(block, self.store.neurons[block.index], self.device)
            for block in group
            for part in CALIBRATION_PARTS
        }

    def add(self, block: Block, part: str, rows: Rows) -> None:
        x, a = rows.x.to(self.device), rows.a.to(self.device)
        self.moments[block.index, part].add_neurons(x, a, x[:, :0], row_weights(rows.h).to(self.device))

    def end_block(self, block: Block, owner: int, part: str) -> None:
        merge_processes(self.moments[block.index, part], owner)
        if owner != distributed.rank():
            del self.moments[block.index, part]

    def end_part(self, group: Sequence[Block], part: str) -> None:
        """After the held-out windows: every owner surveys its block, and all are stored."""
        if part != CALIBRATION_PARTS[1]:
            return
        store, survey, packed = self.store, None, None
        gradients = [store.load_gradients(block) for block in group]
        if distributed.rank() < len(group):
            block = group[distributed.rank()]
            fit, held = (self.moments[block.index, part] for part in CALIBRATION_PARTS)
            neurons = store.neurons[block.index]
            rows = Gradients(**{name: rows.to(self.device) for name, rows in gradients[distributed.rank()].items()})
            survey = survey_block(block, neurons, output_bias(block, neurons, self.device), fit, held, rows)
            fit.add(held)  # the ridges are chosen: replacements are fitted on all rows
            packed = pack_moments(fit)
        for owner, block in enumerate(group):
            # The moments are stored first: where a survey is on disk, they are there too.
            store.cache.keep(store.key("moments", block), distributed.broadcast(packed, owner), needed=True)
            store.cache.keep(store.key("survey", block), distributed.broadcast(survey, owner), needed=True)
        self.moments = {}


def open_store(
    model: Any, text: Text, context: RunContext, choices: Choices = ANYTHING, planned: Shapes | None = None
) -> MomentsStore:
    """A store for this model and text, in the run's cache or in a temporary directory.

    Where neither the `choices` of a search nor the shapes that are `planned` keep a block's neurons, its statistics are
    without them, which is faster. InputError where memory or disk cannot hold it.
    """
    indices = range(len(find_blocks(model)))
    with_neurons = {index for index in indices if choices.keeps_neurons(index)}
    with_neurons |= {index for index, shape in (planned or {}).items() if shape.neurons}
    neurons = choose_neurons(model, text, context.progress, with_neurons)
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


def choose_neurons(
    model: Any, text: Text, progress: Progress, with_neurons: Collection[int]
) -> dict[int, Neurons | None]:
    """The neurons of these blocks, None for the others, and for all where memory is too short for moments with them."""
    blocks = find_blocks(model)
    neurons = {block.index: find_neurons(model, block) if block.index in with_neurons else None for block in blocks}
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


def empty_moments(
    block: Block, neurons: Neurons | None, device: torch.device, *, inputs: bool = True, outputs: int = 0
) -> Moments:
    """The moments of [x, a] of no rows yet. Where a block's neurons are not known, a is its output."""
    count = neurons.count if neurons else block.width
    return Moments.zeros((block.width if inputs else 0) + count, outputs, device, whole_yy=False)


def collect_moments(
    model: Any,
    block: Block,
    neurons: Neurons | None,
    stream: Stream,
    device: torch.device,
    goal: Sequence[Tensor] | None = None,
    gain: float = 1.0,
    *,
    inputs: bool = True,
) -> Moments:
    """The stream-weighted moments of [x, a] at the layer where the stream stands, of all processes' rows.

    `goal` are the states that the residual stream should have after the layer, which adds `gain` times the block's
    output to it: with them, xy are the moments of [x, a] with what the block's output lacks. Without `inputs` there is
    no x: a replacement that only keeps neurons has no use for it.
    """
    width = block.width if inputs else 0
    moments = empty_moments(block, neurons, device, inputs=inputs, outputs=block.width if goal else 0)
    goals = iter(goal or [])

    def add(_: Block, rows: Rows) -> None:
        x, a = rows.x.to(device), rows.a.to(device)
        lack = (next(goals).to(device).reshape(rows.h.shape) - rows.h.to(device)) / gain if goal else x[:, :0]
        moments.add_neurons(x[:, :width], a, lack, row_weights(rows.h).to(device))

    with capture_rows(model, [block], add, {block.index: neurons.outer_path} if neurons else None):
        stream.run_layer()
    merge_processes(moments)
    return moments
