"""One pass over the calibration text, layer by layer, that feeds everyone who needs the rows of blocks.

A row is one token position: the input and the output of a block there, and the residual stream after its layer. The
profile of a model and the moments that replacements are fitted on both need the rows of every block: a collector for
each gets them from one pass. The fitting windows of a block come first, the held-out windows after them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, Protocol

import torch

from compressor.models.blocks import Block, Rows, capture_rows
from compressor.models.layer_states import LayerStates
from compressor.models.residual import CALIBRATION_PARTS, Stream, calibration_streams, delete_saved_streams
from compressor.models.source import identify
from compressor.runtime import distributed
from compressor.runtime.cache import cache_key
from compressor.runtime.context import RunContext
from compressor.text import Text


class RowCollector(Protocol):
    """Takes the rows of one group of blocks after another; a group has as many blocks as there are processes.

    All processes run a share of every block's rows; process k, the owner, has the last word on block k of a group.
    """

    def find_missing(self) -> list[Block]:
        """The blocks whose rows are still needed, in order of depth; what they need beforehand is made now."""
        ...

    def inner_path(self, block: Block) -> str | None:
        """The path of a module inside the block whose input rows are wanted too."""
        ...

    def begin(self, group: Sequence[Block]) -> None: ...

    def add(self, block: Block, part: str, rows: Rows) -> None:
        """Take one batch of rows of the fitting or of the held-out windows."""
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
    missing = [{block.index for block in collector.find_missing()} for collector in collectors]
    wanted = [block for block in blocks if any(block.index in found for found in missing)]
    more = {"seq_len": text.seq_len, "batch": context.batch_size}
    key = cache_key("stream", identify(model), text.calibration_sha256, **more)

    def listeners(block: Block) -> list[int]:
        return [number for number, found in enumerate(missing) if block.index in found]

    with context.progress.bar(step, len(blocks)) as advance:
        advance(len(blocks) - len(wanted))
        streams = []
        if wanted:
            size, cache = context.batch_size, context.cache
            streams = calibration_streams(model, blocks, text, size, cache, key, wanted[0].index)
        for numbers, members in groupby(wanted, listeners):
            for group in distributed.rounds(list(members)):
                visit_group(model, group, streams, [collectors[number] for number in numbers], states)
                for stream in streams:
                    stream.save_periodically()
                advance(len(group))
    delete_saved_streams(context.cache, key)


@torch.no_grad()
def visit_group(
    model: Any,
    group: Sequence[Block],
    streams: list[Stream],
    collectors: list[RowCollector],
    states: LayerStates | None,
) -> None:
    """Run the layers of these blocks, and hand their rows to the collectors."""
    for collector in collectors:
        collector.begin(group)
    for number, (part, stream) in enumerate(zip(CALIBRATION_PARTS, streams, strict=True)):
        for owner, block in enumerate(group):
            move(number, stream, block.index, states)
            paths = [path for collector in collectors if (path := collector.inner_path(block)) is not None]

            def receive(block: Block, rows: Rows, part: str = part) -> None:
                for collector in collectors:
                    collector.add(block, part, rows)

            with capture_rows(model, [block], receive, {block.index: paths[0]} if paths else None):
                move(number, stream, block.index + 1, states)
            for collector in collectors:
                collector.end_block(block, owner, part)
        for collector in collectors:
            collector.end_part(group, part)


def move(part: int, stream: Stream, to: int, states: LayerStates | None) -> None:
    """Run layers until the stream stands at the input of layer `to`."""
    while stream.position < to:
        if states is not None:
            states.keep(part, stream)
        stream.step()
    if states is not None:
        states.keep(part, stream)
