"""One pass over the calibration text, layer by layer, that feeds everyone who needs the rows of blocks.

A row is one token position: the input and the output of a block there, and the residual stream after its layer. The
profile of a model and the moments that replacements are fitted on both need the rows of every block: a collector for
each gets them from one pass. The fitting windows of a block come first, then the guard windows, the held-out windows
last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from compressor.models.blocks import Block, Rows, capture_rows
from compressor.models.branches import BranchIndex
from compressor.models.layer_states import LayerStates
from compressor.models.residual import Stream, calibration_streams, delete_saved_streams
from compressor.models.source import identify
from compressor.runtime import distributed
from compressor.runtime.cache import cache_key
from compressor.runtime.context import RunContext
from compressor.text import Text


class RowCollector(Protocol):
    """Takes the rows of one group of blocks after another; a group has those of as many layers as there are processes.

    All processes run a share of every block's rows; one of them, its owner, has the last word on a block.
    """

    @property
    def parts(self) -> Sequence[str]:
        """Which parts of the calibration windows it wants the rows of."""
        ...

    def find_missing(self) -> list[Block]:
        """The blocks whose rows are still needed, in order of depth; what they need beforehand is made now."""
        ...

    def inner_path(self, block: Block) -> str | None:
        """The path of a module inside the block whose input rows are wanted too."""
        ...

    def begin(self, group: Sequence[Block]) -> None: ...

    def add(self, block: Block, part: str, rows: Rows) -> None:
        """Take one batch of rows of one part of the windows."""
        ...

    def end_block(self, block: Block, owner: int, part: str) -> None:
        """All rows of this part of the block have been added, by all processes."""
        ...

    def end_part(self, group: Sequence[Block], part: str) -> None:
        """The same holds for all blocks of the group."""
        ...


def visit_rows(
    model: Any,
    blocks: list[Block],
    text: Text,
    context: RunContext,
    collectors: Sequence[RowCollector],
    step: str,
    states: LayerStates | None = None,
) -> None:
    """Run the calibration text through the layers once, for all collectors; `states` keeps the stream on the way.

    A run that was killed goes on at the layer where it last saved the stream.
    """
    missing = [collector.find_missing() for collector in collectors]
    wanted = sorted({block.layer for found in missing for block in found})
    more = {"seq_len": text.seq_len, "batch": context.batch_size}
    key = cache_key("stream", identify(model), text.fitted_sha256, **more)
    parts = {part for collector, found in zip(collectors, missing, strict=True) if found for part in collector.parts}

    with context.progress.bar(step, len(blocks)) as advance:
        advance(len(blocks) - len(wanted))
        streams: dict[str, Stream] = {}
        if wanted:
            size, cache = context.batch_size, context.cache
            streams = calibration_streams(model, blocks, text, size, cache, key, wanted[0], sorted(parts))
        for layers in distributed.rounds(wanted):
            groups = [[block for block in found if block.layer in layers] for found in missing]
            pairs = [(each, group) for each, group in zip(collectors, groups, strict=True) if group]
            visit_layers(model, layers, streams, pairs, states)
            for stream in streams.values():
                stream.save_periodically()
            advance(len(layers))
    delete_saved_streams(context.cache, key)


@torch.no_grad()
def visit_layers(
    model: Any,
    layers: Sequence[int],
    streams: dict[str, Stream],
    collectors: list[tuple[RowCollector, list[Block]]],
    states: LayerStates | None,
) -> None:
    """Run these layers, and hand the rows of every collector's blocks to it."""
    for collector, group in collectors:
        collector.begin(group)
    for part, stream in streams.items():
        takers = [(collector, group) for collector, group in collectors if part in collector.parts]
        for layer in layers:
            move(part, stream, layer, states)
            visited: dict[BranchIndex, Block] = {}
            inner_paths: dict[BranchIndex, str] = {}
            for collector, group in takers:
                for block in (block for block in group if block.layer == layer):
                    visited[block.index] = block
                    path = collector.inner_path(block)
                    inner_paths |= {block.index: path} if path is not None else {}

            def receive(block: Block, rows: Rows, part: str = part, takers: Any = takers) -> None:
                for collector, group in takers:
                    if any(block.index == member.index for member in group):
                        collector.add(block, part, rows)

            with capture_rows(model, list(visited.values()), receive, inner_paths):
                move(part, stream, layer + 1, states)
            for collector, group in takers:
                for place, block in enumerate(group):
                    if block.layer == layer:
                        collector.end_block(block, owner_of(place), part)
        for collector, group in takers:
            collector.end_part(group, part)


def owner_of(place: int) -> int:
    """The process that owns the block at this place of a group."""
    return place % distributed.size()


def own_blocks(group: Sequence[Block]) -> list[Block]:
    """The blocks of a group that this process owns."""
    return [block for place, block in enumerate(group) if owner_of(place) == distributed.rank()]


def move(part: str, stream: Stream, to: int, states: LayerStates | None) -> None:
    """Run layers until the stream stands at the input of layer `to`."""
    while stream.position < to:
        if states is not None:
            states.keep(part, stream)
        stream.step()
    if states is not None:
        states.keep(part, stream)
