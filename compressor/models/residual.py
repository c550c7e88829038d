"""The residual stream of some windows, carried through a model one decoder layer at a time.

A block can then be measured, or fitted on the inputs that it will really get, with one layer in memory and at the cost
of one forward pass for all blocks together. Of several processes each carries its share of the batches.
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

CALIBRATION_PARTS = ("fitting", "held_out")  # of the calibration windows
SAVE_SECONDS = 60.0  # between two times that a stream is kept on disk


class _Reached(Exception):
    """Raised to leave a forward pass at the first layer."""


class TensorSpool(Sequence[Tensor]):
    """Tensors in a row: in memory or, where there is a directory, each in a file that is deleted with the spool."""

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

    def __getitem__(self, place: Any) -> Any:
        item = self.items[place]
        if self.directory is None:
            return item
        file, dtype, shape, device = item
        return torch.from_numpy(np.fromfile(file, dtype=np.uint8)).view(dtype).reshape(shape).to(device)

    def __del__(self) -> None:
        for item in self.items if self.directory is not None else ():
            item[0].unlink(missing_ok=True)


class Stream:
    """Hidden states of all windows before one layer; `advance` moves them behind it. `open_stream` makes one."""

    def __init__(
        self,
        layers: list[nn.Module],
        calls: dict[int, list[dict[str, Any]]],
        returned: int,
        directory: Path | None = None,
        cache: Cache | None = None,
        key: Mapping[str, Any] | None = None,
    ) -> None:
        self.layers = layers
        # What a layer is called with beside the hidden states (masks, positions) depends on the batch's shape only.
        self.calls = calls
        self.returned = returned  # how many values a layer returns in a tuple; 0 is a bare tensor
        self.directory = directory
        self.cache, self.key, self.saved_at = cache, key, time.monotonic()
        self.position = 0
        self.states: Sequence[Tensor] = TensorSpool((), directory)

    def restore_saved(self, device: torch.device, latest: int) -> bool:
        """Begin where an earlier run kept the stream, if every process did so at the same place."""
        kept = self.cache.read_own(self.key) if self.cache is not None and self.key is not None else None
        place = int(kept.pop("position")) if kept else 0
        places = distributed.gather([torch.tensor([place])])
        if not 0 < place <= latest or any(int(other) != place for other in places):
            return False
        assert kept is not None
        self.position = place
        self.states = TensorSpool((kept[f"{number:08d}"].to(device) for number in range(len(kept))), self.directory)
        return True

    def save_periodically(self) -> None:
        """Once in a while, put the stream on disk, so that a run that was killed does not begin at the first layer."""
        if self.cache is None or self.key is None or self.cache.directory is None:
            return
        if distributed.broadcast_value(time.monotonic() - self.saved_at > SAVE_SECONDS):
            states = {f"{number:08d}": state.cpu() for number, state in enumerate(self.states)}
            self.cache.write_own(self.key, {"position": torch.tensor(self.position), **states})
            self.saved_at = time.monotonic()

    def copy(self) -> Stream:
        """The same stream at the same place; it can advance on its own."""
        other = object.__new__(Stream)
        other.__dict__.update(self.__dict__)
        other.cache = other.key = None
        return other

    def with_states(self, states: Sequence[Tensor]) -> Stream:
        """The same place with other states."""
        other = self.copy()
        other.states = states
        return other

    def after_layer(self, states: Iterable[Tensor]) -> Stream:
        """The stream behind its present layer, with these states."""
        other = self.with_states(TensorSpool(states, self.directory))
        other.position += 1
        return other

    @torch.no_grad()
    def run_layer(self) -> Sequence[Tensor]:
        """Run the present layer on every batch and return what comes out, without moving on."""
        layer = self.layers[self.position]
        calls = ((state, self.calls[len(state)][self.position]) for state in self.states)
        return TensorSpool((hidden_states_of(layer(state, **call)) for state, call in calls), self.directory)

    def step(self) -> None:
        """Run the present layer and move behind it."""
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
    """These windows before the first layer. With a cache and a key the stream is kept on disk now and then, and begins
    where it was kept, at layer `latest` at most."""
    weights = disk_weights_of(model)
    layers = [model.get_submodule(block.layer_path) for block in blocks]
    parts = [batch.to(device_of(model)) for batch in distributed.own_share(batches(windows, batch_size))]
    calls: dict[int, list[dict[str, Any]]] = {}
    returned = 0
    for batch in parts:
        if len(batch) not in calls:
            calls[len(batch)], returned = record_calls(model, layers, batch)
    directory = weights.scratch if weights else None
    stream = Stream(layers, calls, returned, directory, cache, None if key is None else process_key(key))
    if not stream.restore_saved(device_of(model), latest):
        stream.states = TensorSpool((embed(model, layers[0], batch) for batch in parts), directory)
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
    """The fitting and the held-out windows of a text, each as a stream of its own."""
    keys = {part: None if key is None else {**key, "stream": part} for part in CALIBRATION_PARTS}
    return [open_stream(model, blocks, getattr(text, p), batch_size, cache, k, latest) for p, k in keys.items()]


def delete_saved_streams(cache: Cache, key: Mapping[str, Any]) -> None:
    """Their pass is complete: what this process kept of the way is not needed again."""
    for part in CALIBRATION_PARTS:
        cache.drop(process_key({**key, "stream": part}))


def process_key(key: Mapping[str, Any]) -> dict[str, Any]:
    """Where this process keeps its share of a stream."""
    return {**key, "rank": distributed.rank(), "ranks": distributed.size()}


def bind(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """Split a layer's arguments into the hidden states and the rest by name."""
    names = list(inspect.signature(type(layer).forward).parameters)[1:]  # also of a forward that is decorated
    named = dict(zip(names, args, strict=False)) | kwargs
    hidden = named.pop("hidden_states")
    return hidden, named


@contextmanager
def passing_through(
    layers: Sequence[nn.Module], returned: list[int], first: Iterator[Tensor] | None = None
) -> Iterator[None]:
    """While open, these layers hand their input on as they would their output; the first puts in other states."""

    def hand_on(hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        return hidden_states if returned[0] == 0 else (hidden_states, *[None] * (returned[0] - 1))

    def put_in(hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        return hand_on(hidden_states if first is None else next(first))

    own = [layer.__dict__.get("forward") for layer in layers]  # of a layer that accelerate placed
    for layer in layers:
        layer.forward = put_in if layer is layers[0] else hand_on
    try:
        yield
    finally:
        for layer, forward in zip(layers, own, strict=True):
            del layer.__dict__["forward"]
            if forward is not None:
                layer.forward = forward


@torch.no_grad()
def record_calls(model: Any, layers: list[nn.Module], batch: Tensor) -> tuple[list[dict[str, Any]], int]:
    """What every layer is called with beside its hidden states, and how many values a layer returns (0: a tensor).

    Only the first layer is run: what the others are called with does not depend on the hidden states.
    """
    calls: list[dict[str, Any]] = []
    returned = [0]

    def record(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(bind(layer, args, kwargs)[1])

    def look(_: nn.Module, args: Any, output: Any) -> None:
        returned[0] = len(output) if isinstance(output, tuple) else 0

    handles = [layer.register_forward_pre_hook(record, with_kwargs=True) for layer in layers]
    handles.append(layers[0].register_forward_hook(look))
    try:
        with passing_through(layers[1:], returned):
            backbone(model)(input_ids=batch, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return calls, returned[0]


@torch.no_grad()
def embed(model: Any, first: nn.Module, batch: Tensor) -> Tensor:
    """The hidden states that enter the first layer."""
    states: list[Tensor] = []

    def stop(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states.append(bind(layer, args, kwargs)[0])
        raise _Reached

    handle = first.register_forward_pre_hook(stop, with_kwargs=True, prepend=True)
    try:
        backbone(model)(input_ids=batch, use_cache=False)
    except _Reached:
        pass
    finally:
        handle.remove()
    return states[0]


@torch.no_grad()
def measure_stream_gain(model: Any, block: Block, stream: Stream) -> float | None:
    """How many times over the layer adds the block's output to its stream; None when a norm stands between."""
    return distributed.broadcast_value(gain_in_process(model, block, stream) if len(stream.states) else None)  # type: ignore[no-any-return]


def gain_in_process(model: Any, block: Block, stream: Stream) -> float | None:
    last = model.get_submodule(block.bypass[-1] if block.bypass else block.path)
    state = stream.states[0]
    call = stream.calls[len(state)][stream.position]
    layer = stream.layers[stream.position]
    nudges: list[Tensor] = []

    def nudge(_: torch.nn.Module, args: Any, output: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(output.shape, generator=generator).to(output)
        nudges.append(noise * output.float().square().mean().sqrt().to(output))
        return output + nudges[0]

    before = hidden_states_of(layer(state, **call)).double()
    handle = last.register_forward_hook(nudge)
    try:
        moved = hidden_states_of(layer(state, **call)).double() - before
    finally:
        handle.remove()
    by = nudges[0].double().reshape(moved.shape)  # OPT flattens its rows
    gain = (moved * by).sum() / by.square().sum().clamp_min(1e-300)
    rest = (moved - gain * by).square().sum()
    return gain.item() if gain > 0 and rest <= 1e-4 * moved.square().sum() else None


@contextmanager
def resume(model: Any, stream: Stream) -> Iterator[None]:
    """While open, forward passes over the stream's batches, in their order, begin at the layer where it stands."""
    turns = iter(stream.states)

    def enter(
        layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (next(turns),), bind(layer, args, kwargs)[1]

    if stream.position:
        with passing_through(stream.layers[: stream.position], [stream.returned], turns):
            yield
        return
    handle = stream.layers[0].register_forward_pre_hook(enter, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
