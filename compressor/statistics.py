"""The statistics of all blocks: one pass over the calibration text, one block at a time.

The pass keeps, for every block, the moments of z = [x, a] (inputs and neurons): every replacement of any form is then a
closed-form solve with no new pass. They are kept on disk, so that only one block's are in memory at a time.
"""

from __future__ import annotations

import tempfile
import weakref
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor.blocks import Block, Rows, find_blocks, watch
from compressor.cache import Cache, Tensors
from compressor.capacity import amount, available_memory, free_disk
from compressor.errors import InputError
from compressor.locking import held_directory, sweep
from compressor.measuring import moments_device, stream_weights
from compressor.models import identify
from compressor.moments import ACCUMULATION_DTYPE, Moments
from compressor.neurons import Neurons, find_neurons
from compressor.progress import Progress
from compressor.sensitivity import GRADIENT_TOKENS, Gradients, sample_gradients
from compressor.stream import Stream
from compressor.surveying import Survey, survey, unpack, unpack_moments
from compressor.text import Text

VERSION = 2  # of what is kept
WORKSPACES = 5  # matrices of the size of the moments that a block needs at once
MEMORY_SHARE = 0.8
SCRATCH = "compressor-scratch-"


class Statistics:
    """The surveys of all blocks, and the moments that they were made from, by block."""

    def __init__(self, model: Any, text: Text, cache: Cache | None, batch_size: int, progress: Progress) -> None:
        self.model, self.text, self.batch_size, self.progress = model, text, batch_size, progress
        self.blocks = find_blocks(model)
        found = {block.index: find_neurons(model, block) for block in self.blocks}
        self.neurons = self.afford(found)
        self.cache = cache if cache is not None and cache.directory is not None else self.scratch()
        self.check_disk()
        self.gradients: dict[int, Gradients] = {}
        self.streams: list[Stream] = []

    def scratch(self) -> Cache:
        """A directory that is gone with this object, or, when the process is killed, with the next run's."""
        parent, held = Path(tempfile.gettempdir()), ExitStack()
        sweep(parent, SCRATCH)
        weakref.finalize(self, held.close)
        return Cache(held.enter_context(held_directory(parent, SCRATCH)), Progress())

    def bytes_of(self, index: int, neurons: Neurons | None) -> int:
        width = self.blocks[index].width
        return 8 * (width + (neurons.count if neurons else width)) ** 2

    def afford(self, found: dict[int, Neurons | None]) -> dict[int, Neurons | None]:
        """Say what memory and disk it takes. Blocks whose neurons are too many for the memory are only linear."""
        free = int(MEMORY_SHARE * available_memory())
        sizes = {index: self.bytes_of(index, neurons) for index, neurons in found.items()}
        most = WORKSPACES * max(sizes.values())
        self.progress.say(
            f"statistics: {amount(sum(sizes.values()))} on disk, {amount(most)} of memory at a time "
            f"({amount(free)} can be had)"
        )
        if most <= free:
            return found
        least = WORKSPACES * max(self.bytes_of(index, None) for index in found)
        if least > free:
            raise InputError(f"one block's statistics need {amount(least)} of memory, and {amount(free)} can be had")
        self.progress.say("warning: memory is short, so no neurons are kept: only linear and low-rank replacements")
        return dict.fromkeys(found)

    def check_disk(self) -> None:
        assert self.cache.directory is not None
        needed = sum(self.bytes_of(index, neurons) for index, neurons in self.neurons.items())
        free = free_disk(self.cache.directory)
        if needed > free and not all(self.cache.has(self.key(block)) for block in self.blocks):
            raise InputError(
                f"the statistics need {amount(needed)} of disk, and {self.cache.directory} has {amount(free)}; "
                "name another place with --cache DIR"
            )

    def key(self, block: Block) -> dict[str, Any]:
        return {
            **identify(self.model),
            "what": "survey",
            "version": VERSION,
            "text": self.text.calibration.sha256,
            "seq_len": self.text.seq_len,
            "batch": self.batch_size,
            "gradients": GRADIENT_TOKENS,
            "block": block.path,
            "neurons": self.neurons[block.index] is not None,
        }

    def tensors(self, block: Block) -> Tensors:
        return self.cache.get("", self.key(block), lambda: self.look(block))

    def surveys(self) -> dict[int, Survey]:
        """Look at every block that was not looked at before."""
        if all(self.cache.has(self.key(block)) for block in self.blocks):
            self.progress.say("survey: measured before")
        else:
            self.begin(self.progress)
        found = {}
        for block in self.progress.track("survey", self.blocks, len(self.blocks)):
            found[block.index] = unpack(block, self.neurons[block.index], self.tensors(block))
        self.gradients, self.streams = {}, []
        return found

    def begin(self, progress: Progress) -> None:
        """Gradients for all blocks, and the calibration text before the first layer."""
        self.gradients = sample_gradients(self.model, self.blocks, self.text.held_out, progress)
        windows = (self.text.fitting, self.text.held_out)
        self.streams = [Stream(self.model, self.blocks, w, self.batch_size) for w in windows]

    def look(self, block: Block) -> Tensors:
        """Run the calibration text through one layer and survey its block."""
        device = moments_device(self.model)
        if not self.gradients:  # a block that was looked at before, and whose file is damaged
            self.begin(Progress())
        neurons = self.neurons[block.index]
        both = []
        for stream in self.streams:
            stream.advance(block.index)
            both.append(collect(self.model, block, neurons, stream, device))
        gradients = self.gradients[block.index]
        return survey(block, neurons, own_bias(self.model, block, neurons, device), both[0], both[1], gradients)

    def moments(self, index: int) -> Moments:
        """The moments of z that the block's replacements are fitted on."""
        return unpack_moments(self.tensors(self.blocks[index]))


def own_bias(model: Any, block: Block, neurons: Neurons | None, device: torch.device) -> Tensor:
    """What the block adds to the sum over its neurons."""
    bias = getattr(model.get_submodule(neurons.outer_path), "bias", None) if neurons else None
    zeros = torch.zeros(block.width, dtype=ACCUMULATION_DTYPE, device=device)
    return zeros if bias is None else bias.detach().to(zeros)


def collect(
    model: Any,
    block: Block,
    neurons: Neurons | None,
    stream: Stream,
    device: torch.device,
    wanted: list[Tensor] | None = None,
    gain: float = 1.0,
) -> Moments:
    """The stream-weighted moments of [x, a] over the layer where the stream stands.

    `wanted` are the hidden states that should come out: then xy holds the moments of what the block's output lacks, of
    which the layer adds `gain` times to its stream.
    """
    count = neurons.count if neurons else block.width
    moments = Moments.zeros(block.width + count, block.width if wanted else 0, device, whole_yy=False)
    turns = iter(wanted or [])

    def add(_: Block, rows: Rows) -> None:
        x, a = rows.x.to(device, ACCUMULATION_DTYPE), rows.a.to(device, ACCUMULATION_DTYPE)
        missing = (next(turns).to(device).reshape(rows.h.shape) - rows.h.to(device)) / gain if wanted else x[:, :0]
        moments.add(Moments.of(torch.cat([x, a], dim=1), missing, stream_weights(rows.h).to(device), whole_yy=False))

    with watch(model, [block], add, {block.index: neurons.outer_path} if neurons else None):
        stream.run()
    return moments
