"""The residual stream of some windows, carried through a model one decoder layer at a time.

The residual stream is the sequence of hidden states that every decoder layer reads and adds to. A `Stream` holds it for
all windows at the input of one layer, and can move on by one layer. So all blocks can be measured, or fitted on the
inputs they will really get, at the cost of one forward pass and with one layer in memory. With several processes, each
one carries its share of the batches.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compressor.models.blocks import Block, find_blocks, hidden_states_of, output_rows, with_hidden_states
from compressor.models.calls import LayerCalls, passing_through, record_calls, split_arguments
from compressor.models.layer_check import check_layers
from compressor.models.offload import device_of, disk_weights_of
from compressor.models.spool import TensorSpool
from compressor.runtime import distributed
from compressor.runtime.cache import Cache
from compressor.text import Text, batches

FITTING, GUARD, HELD_OUT = "fitting", "guard", "held_out"  # windows of a Text, and part of cache keys
CALIBRATION_PARTS = (FITTING, GUARD, HELD_OUT)
SAVE_SECONDS = 60.0  # a stream is saved at most this often
LOUDNESS = 16.0  # noise that finds out what a layer does with its block's output, in sizes of the residual stream
LARGEST_NOISE = 1 / 64  # of the largest number of the dtype: float16 ends at 65,504
UNEXPLAINED = 1e-4  # of the square of the noise's effect: more means that the layer does not just add the block


class Stream:
    """The hidden states of all windows at the input of layer `position`; made by `open_stream`, moved by `advance`."""

    def __init__(
        self,
        layers: list[nn.Module],
        calls: LayerCalls,
        tuple_length: int,
        directory: Path | None = None,
        cache: Cache | None = None,
        key: Mapping[str, Any] | None = None,
    ) -> None:
        self.layers = layers
        self.calls = calls  # the arguments beside the hidden states (masks, positions) of every batch and layer
        self.tuple_length = tuple_length  # how many values a layer returns in a tuple; 0: a bare tensor
        self.directory = directory
        self.cache, self.key, self.saved_at = cache, key, time.monotonic()
        self.position = 0
        self.states: Sequence[Tensor] = TensorSpool((), directory)

    def restore_saved(self, device: torch.device, latest: int) -> bool:
        """Continue from the stream that an earlier run saved, if every process has one at the same layer.

        Returns whether it did. A stream beyond layer `latest` is of no use, and is not restored.
        """
        saved = self.cache.read_own(self.key) if self.cache is not None and self.key is not None else None
        position = int(saved.pop("position")) if saved else 0
        positions = distributed.gather([torch.tensor([position])])
        if not 0 < position <= latest or any(int(other) != position for other in positions):
            return False
        assert saved is not None
        self.position = position
        self.states = TensorSpool((saved[f"{number:08d}"].to(device) for number in range(len(saved))), self.directory)
        return True

    def save_periodically(self) -> None:
        """Save the stream if SAVE_SECONDS have passed: a run that was killed need not begin at the first layer."""
        if self.cache is None or self.key is None or self.cache.directory is None:
            return
        if distributed.broadcast_value(time.monotonic() - self.saved_at > SAVE_SECONDS):
            states = {f"{number:08d}": state.cpu() for number, state in enumerate(self.states)}
            self.cache.write_own(self.key, {"position": torch.tensor(self.position), **states})
            self.saved_at = time.monotonic()

    def copy(self) -> Stream:
        """The same stream at the same layer; the two advance independently, and the copy is never saved."""
        other = object.__new__(Stream)
        other.__dict__.update(self.__dict__)
        other.cache = other.key = None
        return other

    def with_states(self, states: Sequence[Tensor]) -> Stream:
        """A stream at the same layer with other states."""
        other = self.copy()
        other.states = states
        return other

    def after_layer(self, states: Iterable[Tensor]) -> Stream:
        """A stream at the input of the next layer with these states."""
        other = self.with_states(TensorSpool(states, self.directory))
        other.position += 1
        return other

    @torch.no_grad()
    def run_layer(self) -> Sequence[Tensor]:
        """Run the present layer on every batch and return its outputs, without moving on."""
        return TensorSpool(
            (self.call_layer(number, self.position, state) for number, state in enumerate(self.states)), self.directory
        )

    def call_layer(self, number: int, position: int, state: Tensor) -> Tensor:
        """The output of one layer for the hidden states of batch `number`."""
        return hidden_states_of(self.calls.get(number, position).run(self.layers[position], state))

    def step(self) -> None:
        """Run the present layer and move to the input of the next."""
        self.states = self.run_layer()
        self.position += 1

    def advance(self, to: int) -> None:
        """Move the states to the input of layer `to`."""
        while self.position < to:
            self.step()


def open_stream(
    model: Any,
    blocks: list[Block],
    windows: Tensor,
    batch_size: int,
    cache: Cache | None = None,
    key: Mapping[str, Any] | None = None,
    latest: int = 0,
) -> Stream:
    """The stream of these windows at the input of the first layer.

    With a cache and a key it can be saved (`Stream.save_periodically`), and begins where an earlier run saved it, at
    layer `latest` at most.
    """
    weights = disk_weights_of(model)
    layers = [model.get_submodule(block.layer_path) for block in blocks]
    tuple_length = check_layers(model, blocks)
    directory = weights.scratch if weights else None
    calls, states = LayerCalls(directory), TensorSpool((), directory)
    for batch in distributed.own_share(batches(windows, batch_size)):
        state, batch_calls = record_calls(model, layers, batch.to(device_of(model)), tuple_length)
        calls.add(len(batch), batch_calls)
        states.append(state)
    stream = Stream(layers, calls, tuple_length, directory, cache, None if key is None else process_key(key))
    if not stream.restore_saved(device_of(model), latest):
        stream.states = states
    return stream


def calibration_streams(
    model: Any,
    blocks: list[Block],
    text: Text,
    batch_size: int,
    cache: Cache | None = None,
    key: Mapping[str, Any] | None = None,
    latest: int = 0,
    parts: Sequence[str] = CALIBRATION_PARTS,
) -> dict[str, Stream]:
    """The streams of these parts of a text's calibration windows, in the order of CALIBRATION_PARTS."""
    keys = {p: None if key is None else {**key, "stream": p} for p in CALIBRATION_PARTS if p in parts}
    return {p: open_stream(model, blocks, getattr(text, p), batch_size, cache, k, latest) for p, k in keys.items()}


def delete_saved_streams(cache: Cache, key: Mapping[str, Any]) -> None:
    """Delete what `calibration_streams` saved in this process, once their pass is complete."""
    for part in CALIBRATION_PARTS:
        cache.drop(process_key({**key, "stream": part}))


def process_key(key: Mapping[str, Any]) -> dict[str, Any]:
    """The cache key of this process's share of a stream."""
    return {**key, "rank": distributed.rank(), "ranks": distributed.size()}


@torch.no_grad()
def measure_stream_gain(model: Any, block: Block, stream: Stream) -> float | None:
    """The factor g by which the layer multiplies the block's output when it adds it to the residual stream.

    None when the layer does something else with it, such as a norm.
    """
    return distributed.broadcast_value(estimate_gain(model, block, stream) if len(stream.states) else None)  # type: ignore[no-any-return]


def estimate_gain(model: Any, block: Block, stream: Stream) -> float | None:
    """The same gain, from the first batch of this process: loud noise is added to the block's output.

    Against noise that is LOUDNESS times as large as the stream, the rounding of half precision is small (about 2e-5 of
    the effect's square in bfloat16), and a norm, which makes loud noise as large as any other input, is plain to see.
    """
    last = model.get_submodule(block.bypass[-1] if block.bypass else block.path)
    state = stream.states[0]
    causes: list[Tensor] = []

    def perturb(_: torch.nn.Module, args: Any, output: Any) -> Any:
        hidden = hidden_states_of(output)
        size = LOUDNESS * max(root_mean_square(before), root_mean_square(hidden))
        size = min(size, torch.finfo(hidden.dtype).max * LARGEST_NOISE)
        noise = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0))
        perturbed = hidden + (size * noise).to(hidden)
        causes.append(perturbed.double() - hidden.double())  # as rounded
        return with_hidden_states(output, perturbed)

    with silenced_ffn(model, block):
        before = stream.call_layer(0, stream.position, state).double()
        handle = last.register_forward_hook(perturb)
        try:
            effect = stream.call_layer(0, stream.position, state).double() - before
        finally:
            handle.remove()
    cause = causes[0].reshape(effect.shape)  # OPT flattens its rows
    gain = (effect * cause).sum() / cause.square().sum().clamp_min(1e-300)
    rest = (effect - gain * cause).square().sum()
    return gain.item() if gain > 0 and rest <= UNEXPLAINED * effect.square().sum() else None


@contextmanager
def silenced_ffn(model: Any, block: Block) -> Iterator[None]:
    """While open, the FFN in the layer of an attention adds nothing: it would answer to what attention adds."""
    if not block.is_attention:
        yield
        return
    ffn = next(other for other in find_blocks(model) if other.layer == block.layer)
    last = model.get_submodule(ffn.bypass[-1] if ffn.bypass else ffn.path)

    def silence(_: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
        return output - output_rows(args, kwargs, output, ffn).reshape(output.shape)

    handle = last.register_forward_hook(silence, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def root_mean_square(values: Tensor) -> float:
    return values.double().square().mean().sqrt().item()


@contextmanager
def resume(model: Any, stream: Stream) -> Iterator[None]:
    """While open, forward passes over the stream's batches, in their order, begin at its layer with its states."""
    states = iter(stream.states)

    def insert_states(
        layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return split_arguments(layer, args, kwargs)[1].insert(next(states))

    if stream.position:
        with passing_through(stream.layers[: stream.position], stream.tuple_length, states):
            yield
        return
    handle = stream.layers[0].register_forward_pre_hook(insert_states, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
