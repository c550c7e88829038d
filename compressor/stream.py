"""The residual stream of some windows, carried through a model one decoder layer at a time.

A block can then be fitted on the inputs that it will really get, everything before it already replaced, at the cost of
one forward pass for all blocks together.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from compressor.blocks import Block, body, hidden_of
from compressor.evaluating import batches


class _Reached(Exception):
    """Raised to leave a forward pass at the first layer."""


class Stream:
    """Hidden states of all windows before one layer; `advance` moves them behind it."""

    def __init__(self, model: Any, blocks: list[Block], windows: Tensor, batch_size: int) -> None:
        self.layers = [model.get_submodule(block.layer_path) for block in blocks]
        self.position = 0
        self.kinds = 0  # how many values a layer returns in a tuple; 0 is a bare tensor
        # What a layer is called with beside the hidden states (masks, positions) depends on the batch's shape only.
        self.calls: dict[int, list[dict[str, Any]]] = {}
        self.states: list[Tensor] = []
        for batch in batches(windows, batch_size):
            batch = batch.to(model.device)
            if len(batch) not in self.calls:
                self.calls[len(batch)] = record_calls(model, self.layers, batch)
            self.states.append(embed(model, self.layers[0], batch))

    def copy(self) -> Stream:
        """The same stream at the same place; it can advance on its own."""
        other = object.__new__(Stream)
        other.layers, other.position, other.calls, other.kinds = self.layers, self.position, self.calls, self.kinds
        other.states = list(self.states)
        return other

    def behind(self, states: list[Tensor]) -> Stream:
        """The stream behind its present layer, with these states."""
        other = self.copy()
        other.states, other.position = states, self.position + 1
        return other

    @torch.no_grad()
    def run(self) -> list[Tensor]:
        """Run the present layer on every batch and return what comes out, without moving on."""
        outputs = []
        for state in self.states:
            call = self.calls[len(state)][self.position]
            output = self.layers[self.position](state, **call)
            self.kinds = len(output) if isinstance(output, tuple) else 0
            outputs.append(hidden_of(output))
        return outputs

    def advance(self, to: int) -> None:
        """Move the states to the input of layer `to`."""
        while self.position < to:
            self.states = self.run()
            self.position += 1


def bind(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """Split a layer's arguments into the hidden states and the rest by name."""
    names = list(layer.forward.__code__.co_varnames[1 : layer.forward.__code__.co_argcount])
    named = dict(zip(names, args, strict=False)) | kwargs
    hidden = named.pop("hidden_states")
    return hidden, named


@torch.no_grad()
def record_calls(model: Any, layers: list[nn.Module], batch: Tensor) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []

    def record(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(bind(layer, args, kwargs)[1])

    handles = [layer.register_forward_pre_hook(record, with_kwargs=True) for layer in layers]
    try:
        body(model)(input_ids=batch, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return calls


@torch.no_grad()
def embed(model: Any, first: nn.Module, batch: Tensor) -> Tensor:
    """The hidden states that enter the first layer."""
    states: list[Tensor] = []

    def stop(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states.append(bind(layer, args, kwargs)[0])
        raise _Reached

    handle = first.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        body(model)(input_ids=batch, use_cache=False)
    except _Reached:
        pass
    finally:
        handle.remove()
    return states[0]


@torch.no_grad()
def stream_gain(model: Any, block: Block, stream: Stream) -> float | None:
    """How many times over the layer adds the block's output to its stream; None when a norm stands between."""
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

    before = hidden_of(layer(state, **call)).double()
    handle = last.register_forward_hook(nudge)
    try:
        moved = hidden_of(layer(state, **call)).double() - before
    finally:
        handle.remove()
    by = nudges[0].double().reshape(moved.shape)  # OPT flattens its rows
    gain = (moved * by).sum() / by.square().sum().clamp_min(1e-300)
    rest = (moved - gain * by).square().sum()
    return gain.item() if gain > 0 and rest <= 1e-4 * moved.square().sum() else None


@contextmanager
def resume(model: Any, stream: Stream) -> Iterator[None]:
    """While open, forward passes over the stream's batches, in their order, begin at the layer where the stream stands.

    The layers before it hand their input on as they would their output; the first of them puts in the stream's states.
    """
    turns = iter(stream.states)
    kinds = stream.kinds

    def hand_on(hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        return hidden_states if kinds == 0 else (hidden_states, *[None] * (kinds - 1))

    def put_in(hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        return hand_on(next(turns))

    def enter(
        layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (next(turns),), bind(layer, args, kwargs)[1]

    skipped = stream.layers[: stream.position]
    handle = None if skipped else stream.layers[0].register_forward_pre_hook(enter, with_kwargs=True)
    for layer in skipped:
        layer.forward = put_in if layer is skipped[0] else hand_on
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()
        for layer in skipped:
            del layer.__dict__["forward"]
