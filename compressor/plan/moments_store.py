"""The moments of all blocks, on disk: one pass over the calibration text, one layer at a time.

For every block these are the moments of z = [x, a], its inputs and the activations of its units (neurons or heads). A
replacement of any shape is then a closed-form solve with no new pass. Only the moments of one layer's blocks are in
memory at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from compressor.measure.calibration_pass import own_blocks, owner_of, visit_rows
from compressor.measure.gradients import GRADIENT_TOKENS, Gradients, visit_gradients
from compressor.measure.moments import ACCUMULATION_DTYPE, Moments
from compressor.measure.profile import merge_processes, moments_device, row_weights
from compressor.models.blocks import Block, Rows, capture_rows, find_blocks, find_branches
from compressor.models.branches import AttentionOf, BranchIndex, branch_of
from compressor.models.heads import Heads, anchor_layers, find_heads, record_attention
from compressor.models.layer_states import LayerStates
from compressor.models.neurons import Neurons, find_neurons
from compressor.models.residual import CALIBRATION_PARTS, FITTING, GUARD, HELD_OUT, Stream
from compressor.models.source import identify
from compressor.plan.candidates import (
    BlockCandidates,
    Units,
    pack_moments,
    shrink_slopes,
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
        self, model: Any, text: Text, units: Mapping[BranchIndex, Units | None], cache: Cache, context: RunContext
    ) -> None:
        self.model, self.text, self.units = model, text, units
        self.cache, self.context, self.progress = cache, context, context.progress
        self.layers = find_blocks(model)
        self.blocks = {block.index: block for block in find_branches(model) if block.index in units}
        self.anchors = anchor_layers(model)
        self.identity, self.text_sha256 = identify(model), text.fitted_sha256
        self.states = LayerStates(model, self.layers, text, context.batch_size)

    def key(self, kind: str, block: Block, **more: Any) -> dict[str, Any]:
        """All that a measurement of this block on the calibration windows depends on."""
        if kind == "survey":
            more["slopes"] = True
        return cache_key(
            kind,
            self.identity,
            self.text_sha256,
            seq_len=self.text.seq_len,
            batch=self.context.batch_size,
            gradients=GRADIENT_TOKENS,
            block=block.path,
            neurons=self.units.get(block.index) is not None,
            **more,
        )

    def collector(self) -> SurveyCollector:
        """What surveys the blocks that were not surveyed before, in a pass over the calibration text."""
        return SurveyCollector(self)

    def candidates(self) -> dict[BranchIndex, BlockCandidates]:
        """The candidates of every block; those that were not surveyed before are surveyed now."""
        candidates = self.find_candidates()
        if len(candidates) < len(self.blocks):
            self.visit(self.collector())
            candidates = self.find_candidates()
        else:
            self.progress.note("survey: measured before")
        self.drop_gradients()
        return shrink_slopes({index: self.without_anchored(candidates[index]) for index in self.blocks})

    def without_anchored(self, of_block: BlockCandidates) -> BlockCandidates:
        """The candidates without those that take the last head from attention that caches ask for their length."""
        if not self.is_anchored(of_block.block.index):
            return of_block
        return replace(of_block, candidates=[c for c in of_block.candidates if c.shape.neurons])

    def is_anchored(self, index: BranchIndex) -> bool:
        """Whether this is attention that must keep a head."""
        return isinstance(index, AttentionOf) and index.layer in self.anchors

    def visit(self, collector: SurveyCollector) -> None:
        """Make a pass over the calibration text for one survey."""
        visit_rows(self.model, self.layers, self.text, self.context, [collector], "survey", self.states)

    def find_candidates(self) -> dict[BranchIndex, BlockCandidates]:
        """The candidates of the blocks that were surveyed before."""
        candidates = {}
        for block in self.blocks.values():
            survey = self.cache.find(self.key("survey", block)) if self.cache.has(self.key("moments", block)) else None
            if survey is not None:
                candidates[block.index] = unpack_candidates(block, self.units[block.index], survey)
        return candidates

    def ensure_gradients(self, blocks: list[Block]) -> None:
        """Make sure that the loss gradients of these blocks are on disk; one backward pass gives those of all."""
        if all(self.cache.has(self.key("gradients", block)) for block in blocks):
            return

        def store(block: Block, rows: Gradients) -> None:
            columns = {"x": rows.x.cpu(), "y": rows.y.cpu(), "g": rows.g.cpu()}
            columns |= {} if rows.a is None else {"a": rows.a.cpu()}
            self.cache.keep(self.key("gradients", block), columns, needed=True)

        heads = {index: units.outer_path for index, units in self.units.items() if isinstance(units, Heads)}
        visit_gradients(self.model, blocks, self.text.held_out, store, self.progress, inner_paths=heads)

    def drop_gradients(self) -> None:
        """Drop from the cache what only an unfinished survey needs."""
        if distributed.rank() == 0:
            for block in self.blocks.values():
                self.cache.drop(self.key("gradients", block))

    def load_gradients(self, block: Block) -> Tensors:
        """The rows of a block's gradients, computed again where another run that shares the cache has dropped them."""
        for _ in range(2):
            rows = self.cache.find(self.key("gradients", block))
            if rows is not None:
                return rows
            self.ensure_gradients([b for b in self.blocks.values() if b.index >= block.index])
        raise InputError(f"the gradients in {self.cache.directory} vanish as they are made; name another with --cache")

    def moments(self, index: BranchIndex) -> Moments:
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

    parts = CALIBRATION_PARTS

    def __init__(self, store: MomentsStore, only: list[Block] | None = None) -> None:
        self.store, self.only = store, only
        self.device = moments_device(store.model)
        self.moments: dict[tuple[BranchIndex, str], Moments] = {}

    def find_missing(self) -> list[Block]:
        """The blocks to survey; their gradients are on disk from here on."""
        store = self.store
        known = {} if self.only else store.find_candidates()
        missing = self.only or [block for block in store.blocks.values() if block.index not in known]
        store.ensure_gradients(missing)
        return missing

    def inner_path(self, block: Block) -> str | None:
        units = self.store.units[block.index]
        return units.outer_path if units else None

    def begin(self, group: Sequence[Block]) -> None:
        self.moments = {
            (block.index, part): empty_moments(block, self.store.units[block.index], self.device)
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
        elif part == GUARD:
            self.moments[block.index, FITTING].add(self.moments.pop((block.index, part)))

    def end_part(self, group: Sequence[Block], part: str) -> None:
        """After the held-out windows: every owner surveys its block, and all are stored."""
        if part != HELD_OUT:
            return
        store = self.store
        gradients = {block.index: store.load_gradients(block) for block in group}
        for place, block in enumerate(group):
            # The moments are stored first: where a survey is on disk, they are there too.
            is_own = owner_of(place) == distributed.rank()
            self.keep("moments", block, distributed.broadcast(self.pack(block) if is_own else None, owner_of(place)))
        surveys = {block.index: self.survey(block, gradients[block.index]) for block in own_blocks(group)}
        for place, block in enumerate(group):
            self.keep("survey", block, distributed.broadcast(surveys.get(block.index), owner_of(place)))
        self.moments = {}

    def pack(self, block: Block) -> Tensors:
        """The moments of all rows, on which replacements are fitted once the ridges are chosen."""
        fit, held = (self.moments[block.index, part] for part in (FITTING, HELD_OUT))
        whole = deepcopy(fit)
        whole.add(held)
        return pack_moments(whole)

    def survey(self, block: Block, gradients: Tensors) -> Tensors:
        """What could stand in for the block. Its moments, which are on disk now, are freed on the way."""
        units = self.store.units[block.index]
        fit, held = (self.moments.pop((block.index, part)) for part in (FITTING, HELD_OUT))
        rows = Gradients(**{name: rows.to(self.device) for name, rows in gradients.items()})
        return survey_block(block, units, output_bias(block, units, self.device), fit, held, rows)

    def keep(self, kind: str, block: Block, tensors: Tensors) -> None:
        self.store.cache.keep(self.store.key(kind, block), tensors, needed=True)


def open_store(
    model: Any, text: Text, context: RunContext, choices: Choices = ANYTHING, planned: Shapes | None = None
) -> MomentsStore:
    """A store for this model and text, in the run's cache or in a temporary directory.

    It has the branches that a search may change, or those that are `planned`. Where neither keeps a block's units, its
    statistics are without them, which is faster. InputError where memory or disk cannot hold it.
    """
    wanted = choices.searched_branches if planned is None else {branch_of(index) for index in planned}
    blocks = find_branches(model, wanted)
    with_units = {block.index for block in blocks if choices.keeps_neurons(block.index)}
    with_units |= {index for index, shape in (planned or {}).items() if shape.neurons}
    units = choose_units(model, blocks, text, context.progress, with_units)
    cache = context.cache
    store = MomentsStore(model, text, units, cache, context)
    if cache.directory is None:
        store.cache = Cache(scratch_directory(store), Progress())
    refuse_short_disk(store)
    return store


def count_features(block: Block, units: Units | None) -> int:
    """The inputs and activations of a block: the size of its Gram matrix."""
    return block.width + (units.count * units.columns if units else block.width)


def moment_bytes(block: Block, units: Units | None) -> int:
    """The size of one block's moments of [x, a]."""
    return 8 * count_features(block, units) ** 2


def disk_bytes(blocks: Iterable[Block], units: Mapping[BranchIndex, Units | None], text: Text) -> int:
    """The size of all blocks' moments, and of the rows of their gradients, which are stored for a while."""
    rows = min(GRADIENT_TOKENS, text.held_out.numel())
    return sum(moment_bytes(block, units[block.index]) + 12 * rows * block.width for block in blocks)


def memory_bytes(blocks: Iterable[Block], units: Mapping[BranchIndex, Units | None]) -> int:
    """The memory that the survey of a layer takes: the moments of its blocks, and work on one of them."""
    by_layer: dict[int, list[int]] = {}
    for block in blocks:
        by_layer.setdefault(block.layer, []).append(moment_bytes(block, units[block.index]))
    return max(
        (MATRICES_AT_ONCE * max(sizes) + 2 * (sum(sizes) - max(sizes)) for sizes in by_layer.values()), default=0
    )


def find_units(
    model: Any, blocks: Sequence[Block], with_units: Collection[BranchIndex]
) -> dict[BranchIndex, Units | None]:
    """The heads of attention, and the neurons of FFNs where they are wanted; None where there are none."""
    attention = [block for block in blocks if block.is_attention]
    calls = record_attention(model, attention) if attention else {}
    units: dict[BranchIndex, Units | None] = {}
    for block in blocks:
        found: Units | None
        if block.is_attention:
            found = find_heads(model, block, calls[block.layer])
        else:
            found = find_neurons(model, block) if block.index in with_units else None
        units[block.index] = found
    return units


def choose_units(
    model: Any, blocks: Sequence[Block], text: Text, progress: Progress, with_units: Collection[BranchIndex]
) -> dict[BranchIndex, Units | None]:
    """The units of these blocks, None for all FFNs where memory is too short for moments with their neurons."""
    units = find_units(model, blocks, with_units)
    # All processes must come to the same plan, so all take the free memory of the first.
    free = distributed.broadcast_value(int(MEMORY_SHARE * available_memory()))
    needed = memory_bytes(blocks, units)
    progress.note(
        f"statistics: {format_bytes(disk_bytes(blocks, units, text))} on disk, {format_bytes(needed)} of memory at a "
        f"time ({format_bytes(free)} can be had)"
    )
    if needed <= free:
        return units
    without: dict[BranchIndex, Units | None] = {
        index: None if isinstance(found, Neurons) else found for index, found in units.items()
    }
    least = memory_bytes(blocks, without)
    if least > free:
        raise InputError(
            f"one layer's statistics need {format_bytes(least)} of memory, and {format_bytes(free)} can be had"
        )
    progress.say("warning: memory is short, so no neurons are kept: only linear and low-rank replacements")
    return without


def refuse_short_disk(store: MomentsStore) -> None:
    assert store.cache.directory is not None
    blocks = list(store.blocks.values())
    needed = disk_bytes(blocks, store.units, store.text)
    free = distributed.broadcast_value(free_disk(store.cache.directory))
    if needed > free and not all(store.cache.has(store.key("moments", block)) for block in blocks):
        raise InputError(
            f"the statistics need {format_bytes(needed)} of disk, and {store.cache.directory} has "
            f"{format_bytes(free)}; name another place with --cache DIR"
        )


def output_bias(block: Block, units: Units | None, device: torch.device) -> Tensor:
    """The bias of the block's output; zeros where it has none."""
    bias = units.outer_matrix.bias if units else None
    zeros = torch.zeros(block.width, dtype=ACCUMULATION_DTYPE, device=device)
    return zeros if bias is None else bias.to(zeros)


def empty_moments(
    block: Block, units: Units | None, device: torch.device, *, inputs: bool = True, outputs: int = 0
) -> Moments:
    """The moments of [x, a] of no rows yet. Where a block's units are not known, a is its output."""
    features = count_features(block, units) - (0 if inputs else block.width)
    return Moments.zeros(features, outputs, device, whole_yy=False)


def collect_moments(
    model: Any,
    block: Block,
    units: Units | None,
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
    moments = empty_moments(block, units, device, inputs=inputs, outputs=0 if goal is None else block.width)
    goals = iter(goal or [])

    def add(_: Block, rows: Rows) -> None:
        x, a = rows.x.to(device), rows.a.to(device)
        lack = x[:, :0]
        if goal is not None:
            lack = (next(goals).to(device).reshape(rows.h.shape) - rows.h.to(device)) / gain
        moments.add_neurons(x[:, :width], a, lack, row_weights(rows.h).to(device))

    with capture_rows(model, [block], add, {block.index: units.outer_path} if units else None):
        stream.run_layer()
    merge_processes(moments)
    return moments
