"""How a model calls its decoder layers: the arguments beside the hidden states, recorded for every batch.

Most arguments, such as masks and positions, are the same for all batches of one size and are stored once. Those that
depend on the tokens, such as Gemma 4's inputs per layer, are stored for every batch.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compressor.models.blocks import backbone
from compressor.models.spool import TensorSpool
from compressor.runtime.errors import InputError

PLAIN_TYPES = (bool, int, float, str, type(None), torch.dtype, torch.device)
ArgumentPath = tuple[Any, ...]  # the name or number of an argument, then the keys inside it


@dataclass(frozen=True)
class Call:
    """The arguments of a layer beside the hidden states; `name` is set where those are given by name."""

    arguments: dict[Any, Any]  # by number, counted after the hidden states, or by name
    name: str | None = None

    def run(self, layer: nn.Module, state: Tensor) -> Any:
        """The layer's output for these hidden states."""
        args, kwargs = self.insert(state)
        return layer(*args, **kwargs)

    def insert(self, state: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with these hidden states, as the model gives them."""
        numbers = sorted(key for key in self.arguments if isinstance(key, int))
        kwargs = {key: value for key, value in self.arguments.items() if isinstance(key, str)}
        if self.name is not None:
            return (), {self.name: state, **kwargs}
        return (state, *(self.arguments[number] for number in numbers)), kwargs


def split_arguments(layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, Call]:
    """Split the arguments of a layer's forward into the hidden states, which come first, and the others."""
    if args:
        return args[0], Call({**dict(enumerate(args[1:])), **kwargs})
    forward = type(layer).forward  # of the class, because `passing_through` replaces that of the instance
    names = ["hidden_states", *list(inspect.signature(forward).parameters)[1:2]]
    name = next((name for name in names if name in kwargs), None)
    if name is None:
        raise InputError(f"its layers ({type(layer).__name__}) are called without hidden states")
    return kwargs[name], Call({key: value for key, value in kwargs.items() if key != name}, name)


def list_leaves(value: Any, path: ArgumentPath = ()) -> Iterator[tuple[ArgumentPath, Any]]:
    """Everything in nested dictionaries, lists and tuples, with its path."""
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield from list_leaves(child, (*path, key))
    elif isinstance(value, (list, tuple)):
        for number, child in enumerate(value):
            yield from list_leaves(child, (*path, number))
    else:
        yield path, value


def with_leaves(value: Any, leaves: Mapping[ArgumentPath, Any], path: ArgumentPath = ()) -> Any:
    """A copy of nested dictionaries, lists and tuples with other values at these paths.

    Dictionaries and lists are always copied: what a layer writes into one must not reach the next batch.
    """
    if isinstance(value, Mapping):
        changed: Any = copy.copy(value)
        for key, child in value.items():
            changed[key] = with_leaves(child, leaves, (*path, key))
        return changed
    if isinstance(value, list):
        return [with_leaves(child, leaves, (*path, number)) for number, child in enumerate(value)]
    if isinstance(value, tuple):
        children = [with_leaves(child, leaves, (*path, number)) for number, child in enumerate(value)]
        return type(value)(*children) if hasattr(value, "_fields") else tuple(children)
    return leaves.get(path, value)


def is_same(one: Any, other: Any) -> bool:
    """Whether two arguments are equal. Objects of unknown types are equal only if they are the same object."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
            return False
        return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())  # with NaN
    if isinstance(one, PLAIN_TYPES) and isinstance(other, PLAIN_TYPES):
        return bool(one == other)
    return one is other


class LayerCalls:
    """The calls of every layer for every batch; with a directory, tensors that depend on the batch are in files."""

    def __init__(self, directory: Path | None = None) -> None:
        self.first_calls: dict[int, list[Call]] = {}  # of the first batch of each size
        self.sizes: list[int] = []  # of every batch
        self.tensors = TensorSpool((), directory)
        # Of every batch and layer, what differs from the first batch of its size: a number in `tensors`, or an object.
        self.numbers: list[list[dict[ArgumentPath, int]]] = []
        self.objects: list[list[dict[ArgumentPath, Any]]] = []

    def add(self, size: int, calls: list[Call]) -> None:
        """Store the calls of the next batch."""
        first_calls = self.first_calls.setdefault(size, calls)
        self.sizes.append(size)
        self.numbers.append([{} for _ in calls])
        self.objects.append([{} for _ in calls])
        same: dict[tuple[int, int], bool] = {}  # the layers share most arguments: each pair is compared once
        stored: dict[int, int] = {}
        for position, (first, call) in enumerate(zip(first_calls, calls, strict=True)):
            ours, theirs = dict(list_leaves(call.arguments)), dict(list_leaves(first.arguments))
            if ours.keys() != theirs.keys() or call.name != first.name:
                raise InputError("its layers are called with other arguments in another batch of the same size")
            for path, value in ours.items():
                pair = (id(value), id(theirs[path]))
                if pair not in same:
                    same[pair] = is_same(value, theirs[path])
                if same[pair]:
                    continue
                if not isinstance(value, Tensor):
                    self.objects[-1][position][path] = value
                    continue
                if id(value) not in stored:
                    stored[id(value)] = len(self.tensors)
                    self.tensors.append(value)
                self.numbers[-1][position][path] = stored[id(value)]

    def get(self, number: int, position: int) -> Call:
        """The call of one layer for one batch."""
        first = self.first_calls[self.sizes[number]][position]
        tensors = {path: self.tensors[place] for path, place in self.numbers[number][position].items()}
        return Call(with_leaves(first.arguments, {**self.objects[number][position], **tensors}), first.name)


@contextmanager
def other_forwards(layers: Sequence[nn.Module], make: Callable[[nn.Module], Callable[..., Any]]) -> Iterator[None]:
    """While open, each of these layers runs what `make` makes of it instead of its own forward."""
    forwards = [layer.__dict__.get("forward") for layer in layers]  # accelerate sets one on layers that it placed
    for layer in layers:
        layer.forward = make(layer)
    try:
        yield
    finally:
        for layer, forward in zip(layers, forwards, strict=True):
            del layer.__dict__["forward"]
            if forward is not None:
                layer.forward = forward


@contextmanager
def passing_through(
    layers: Sequence[nn.Module], tuple_length: int, states: Iterator[Tensor] | None = None
) -> Iterator[None]:
    """While open, these layers return their input unchanged, in the form of their usual output.

    `tuple_length` is how many values that is (0: a bare tensor). With `states`, the first layer returns the next of
    those instead.
    """

    def make(layer: nn.Module) -> Callable[..., Any]:
        def pass_through(*args: Any, **kwargs: Any) -> Any:
            own = states if layer is layers[0] else None
            state = split_arguments(layer, args, kwargs)[0] if own is None else next(own)
            return state if tuple_length == 0 else (state, *[None] * (tuple_length - 1))

        return pass_through

    with other_forwards(layers, make):
        yield


@torch.no_grad()
def record_calls(
    model: Any, layers: Sequence[nn.Module], batch: Tensor, tuple_length: int
) -> tuple[Tensor, list[Call]]:
    """The hidden states that enter the first layer, and the call of every layer, for one batch. No layer is run."""
    states: list[Tensor] = []
    calls: list[Call] = []

    def record(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        state, call = split_arguments(layer, args, kwargs)
        if not states:
            states.append(state.clone())  # the model may go on to change it in place
        calls.append(call)

    handles = [layer.register_forward_pre_hook(record, with_kwargs=True) for layer in layers]
    try:
        with passing_through(layers, tuple_length):
            backbone(model)(input_ids=batch, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return states[0], calls
