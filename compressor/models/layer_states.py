"""The residual streams of the calibration windows at the input of every layer of the original model.

Replacements that compensate for those before them are fitted to what the original stream was. A pass over the text that
is made anyway leaves its states here, so that no fit has to run the original model again.
"""

from __future__ import annotations

from typing import Any

from compressor.models.blocks import Block
from compressor.models.offload import disk_weights_of
from compressor.models.residual import CALIBRATION_PARTS, Stream, calibration_streams
from compressor.runtime import distributed
from compressor.runtime.resources import available_memory, free_disk
from compressor.text import Text

ROOM_SHARE = 0.25  # of the free memory (or disk, see below) that kept states may take


class LayerStates:
    """The states of the calibration and guard windows, by part and layer, as far as they were run and memory allows.

    A model whose weights are on disk has its states in files too.
    """

    def __init__(self, model: Any, blocks: list[Block], text: Text, batch_size: int) -> None:
        self.model, self.blocks, self.text, self.batch_size = model, blocks, text, batch_size
        tokens = (text.calibration.tokens + text.guard.numel()) // distributed.size()
        needed = 4 * tokens * blocks[0].width * (len(blocks) + 1)
        weights = disk_weights_of(model)
        free = available_memory() if weights is None else free_disk(weights.scratch)
        # All processes must run the same layers, so all go by what the first one has.
        self.keeps: bool = distributed.broadcast_value(needed <= ROOM_SHARE * free)
        self.kept: dict[str, dict[int, Any]] = {part: {} for part in CALIBRATION_PARTS}
        self.first: dict[str, Stream] = {}

    def keep(self, part: str, stream: Stream) -> None:
        """Keep the states of a stream of the original model, over this part of the windows."""
        if self.keeps:
            self.kept[part].setdefault(stream.position, stream.states)

    def open(self) -> dict[str, Stream]:
        """The streams of all parts at the input of the first layer."""
        if not self.first:
            self.first = calibration_streams(self.model, self.blocks, self.text, self.batch_size)
        return {part: stream.copy() for part, stream in self.first.items()}

    def move(self, part: str, stream: Stream, to: int) -> None:
        """Move a stream of the original model to the input of layer `to`: to the kept states, or by running layers."""
        states: Any = self.kept[part].get(to)
        if states is not None:
            stream.states, stream.position = states, to
            return
        nearest = max((k for k in self.kept[part] if stream.position < k < to), default=None)
        if nearest is not None:
            self.move(part, stream, nearest)
        while stream.position < to:
            self.keep(part, stream)
            stream.step()
        self.keep(part, stream)
