"""The residual stream of some windows, carried through a model one decoder layer at a time.

The residual stream is the sequence of hidden states that every decoder layer reads and adds to. A `Stream` holds it for
all windows at the input of one layer, and can move on by one layer. So all blocks can be measured, or fitted on the
inputs they will really get, at the cost of one forward pass and with one layer in memory. With several processes, each
one carries its share of the batches.
"""

from __future__ import annotations

import inspect
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from compressor.models.blocks import Block, backbone, hidden_states_of
from compressor.models.offload import device_of, disk_weights_of
from compressor.runtime import distributed
from compressor.runtime.cache import Cache
from compressor.text import Text, batches

CALIBRATION_PARTS = ("fitting", "held_out")  # attributes of Text, and part of cache keys
SAVE_SECONDS = 60.0  # a stream is saved at most this often


class _FirstLayerReached(Exception):
    """Raised to leave a forward pass at the first layer."""


class TensorSpool(Sequence[Tensor]):
    """A sequence of tensors: in memory or, with a directory, each in a file that is deleted with the spool."""

    def __init__(self, tensors: Iterable[Tensor] = (), directory: Path | None = None) -> None:
        self.directory = directory
        self.items: list[Any] = []
        for tensor in tensors:
            self.append(tensor)

    def append(self, tensor: Tensor) -> None:
        if self.directory is None:
            self.items.append(tensor)
            return
        file = self.directory / uuid.uuid4().hex
        tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tofile(file)
        self.items.append((file, tensor.dtype, tensor.shape, tensor.device))

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: Any) -> Any:
        item = self.items[index]
        if self.directory is None:
            return item
        file, dtype, shape, device = item
        return torch.from_numpy(np.fromfile(file, dtype=np.uint8)).view(dtype).reshape(shape).to(device)

    def __del__(self) -> None:
        for item in self.items if self.directory is not None else ():
            item[0].unlink(missing_ok=True)


class Stream:
    """The hidden states of all windows at the input of layer `position`; made by `open_stream`, moved by `advance`."""

    def __init__(
        self,
        layers: list[nn.Module],
        calls: dict[int, list[dict[str, Any]]],
        tuple_length: int,
        directory: Path | None = None,
        cache: Cache | None = None,
        key: Mapping[str, Any] | None = None,
    ) -> None:
        self.layers = layers
        # By batch size and layer, the arguments beside the hidden states (masks, positions); only shapes decide them.
        self.calls = calls
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
        layer = self.layers[self.position]
        calls = ((state, self.calls[len(state)][self.position]) for state in self.states)
        return TensorSpool((hidden_states_of(layer(state, **call)) for state, call in calls), self.directory)

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
    own_batches = [batch.to(device_of(model)) for batch in distributed.own_share(batches(windows, batch_size))]
    calls: dict[int, list[dict[str, Any]]] = {}
    tuple_length = 0
    for batch in own_batches:
        if len(batch) not in calls:
            calls[len(batch)], tuple_length = record_calls(model, layers, batch)
    directory = weights.scratch if weights else None
    stream = Stream(layers, calls, tuple_length, directory, cache, None if key is None else process_key(key))
    if not stream.restore_saved(device_of(model), latest):
        stream.states = TensorSpool((embed(model, layers[0], batch) for batch in own_batches), directory)
    return stream


def calibration_streams(
    model: Any,
    blocks: list[Block],
    text: Text,
    batch_size: int,
    cache: Cache | None = None,
    key: Mapping[str, Any] | None = None,
    latest: int = 0,
) -> list[Stream]:
    """Two streams: the fitting windows of a text, and its held-out windows."""
    keys = {part: None if key is None else {**key, "stream": part} for part in CALIBRATION_PARTS}
    return [open_stream(model, blocks, getattr(text, p), batch_size, cache, k, latest) for p, k in keys.items()]


def delete_saved_streams(cache: Cache, key: Mapping[str, Any]) -> None:
    """Delete what `calibration_streams` saved in this process, once their pass is complete."""
    for part in CALIBRATION_PARTS:
        cache.drop(process_key({**key, "stream": part}))


def process_key(key: Mapping[str, Any]) -> dict[str, Any]:
    """The cache key of this process's share of a stream."""
    return {**key, "rank": distributed.rank(), "ranks": distributed.size()}


def split_arguments(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """Split the arguments of a layer's forward into the hidden states and the others by name."""
    forward = type(layer).forward  # of the class, because `passing_through` replaces that of the instance
    names = list(inspect.signature(forward).parameters)[1:]
    named = dict(zip(names, args, strict=False)) | kwargs
    hidden = named.pop("hidden_states")
    return hidden, named


@contextmanager
def passing_through(
    layers: Sequence[nn.Module], tuple_length: list[int], states: Iterator[Tensor] | None = None
) -> Iterator[None]:
    """While open, these layers return their input unchanged, in the form of their usual output.

    With `states`, the first layer returns the next of those instead. `tuple_length` is a list of one number, because
    `record_calls` learns it only during the pass.
    """

    def pass_through(hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        return hidden_states if tuple_length[0] == 0 else (hidden_states, *[None] * (tuple_length[0] - 1))

    def insert_state(hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        return pass_through(hidden_states if states is None else next(states))

    forwards = [layer.__dict__.get("forward") for layer in layers]  # accelerate sets one on layers that it placed
    for layer in layers:
        layer.forward = insert_state if layer is layers[0] else pass_through
    try:
        yield
    finally:
        for layer, forward in zip(layers, forwards, strict=True):
            del layer.__dict__["forward"]
            if forward is not None:
                layer.forward = forward


@torch.no_grad()
def record_calls(model: Any, layers: list[nn.Module], batch: Tensor) -> tuple[list[dict[str, Any]], int]:
    """The arguments of every layer beside the hidden states, and how many values a layer returns (0: a bare tensor).

    Only the first layer is run: the arguments of the others do not depend on the hidden states.
    """
    calls: list[dict[str, Any]] = []
    tuple_length = [0]

    def record_arguments(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(split_arguments(layer, args, kwargs)[1])

    def record_output(_: nn.Module, args: Any, output: Any) -> None:
        tuple_length[0] = len(output) if isinstance(output, tuple) else 0

    handles = [layer.register_forward_pre_hook(record_arguments, with_kwargs=True) for layer in layers]
    handles.append(layers[0].register_forward_hook(record_output))
    try:
        with passing_through(layers[1:], tuple_length):
            backbone(model)(input_ids=batch, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return calls, tuple_length[0]


@torch.no_grad()
def embed(model: Any, first: nn.Module, batch: Tensor) -> Tensor:
    """The hidden states that enter the first layer."""
    states: list[Tensor] = []

    def stop(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states.append(split_arguments(layer, args, kwargs)[0])
        raise _FirstLayerReached

    handle = first.register_forward_pre_hook(stop, with_kwargs=True, prepend=True)
    try:
        backbone(model)(input_ids=batch, use_cache=False)
    except _FirstLayerReached:
        pass
    finally:
        handle.remove()
    return states[0]


@torch.no_grad()
def measure_stream_gain(model: Any, block: Block, stream: Stream) -> float | None:
    """The factor g by which the layer multiplies the block's output when it adds it to the residual stream.

    None when the layer does something else with it, such as a norm.
    """
    return distributed.broadcast_value(estimate_gain(model, block, stream) if len(stream.states) else None)  # type: ignore[no-any-return]


def estimate_gain(model: Any, block: Block, stream: Stream) -> float | None:
    """The same gain, from the first batch of this process: noise is added to the block's output."""
    last = model.get_submodule(block.bypass[-1] if block.bypass else block.path)
    state = stream.states[0]
    call = stream.calls[len(state)][stream.position]
    layer = stream.layers[stream.position]
    perturbations: list[Tensor] = []

    def perturb(_: torch.nn.Module, args: Any, output: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(output.shape, generator=generator).to(output)
        perturbations.append(noise * output.float().square().mean().sqrt().to(output))
        return output + perturbations[0]

    before = hidden_states_of(layer(state, **call)).double()
    handle = last.register_forward_hook(perturb)
    try:
        effect = hidden_states_of(layer(state, **call)).double() - before
    finally:
        handle.remove()
    cause = perturbations[0].double().reshape(effect.shape)  # OPT flattens its rows
    gain = (effect * cause).sum() / cause.square().sum().clamp_min(1e-300)
    rest = (effect - gain * cause).square().sum()
    return gain.item() if gain > 0 and rest <= 1e-4 * effect.square().sum() else None


@contextmanager
def resume(model: Any, stream: Stream) -> Iterator[None]:
    """While open, forward passes over the stream's batches, in their order, begin at its layer with its states."""
    states = iter(stream.states)

    def insert_states(
        layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (next(states),), split_arguments(layer, args, kwargs)[1]

    if stream.position:
        with passing_through(stream.layers[: stream.position], [stream.tuple_length], states):
            yield
        return
    handle = stream.layers[0].register_forward_pre_hook(insert_states, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
