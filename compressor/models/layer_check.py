"""Whether the decoder layers of a model can be run one at a time: compared with the model's own forward pass.

Everything that works layer by layer (`residual.Stream`) rests on three things: a layer depends only on the hidden
states and on arguments that can be recorded without running the layers before it; its output is the next layer's
input; and its block is a function of single rows. A family that does it otherwise would be measured wrong without a
word, so each model is tried on a few random tokens before any work, and refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from compressor.models.blocks import Block, Rows, capture_rows, hidden_states_of, run_block, unsupported
from compressor.models.branches import BranchIndex
from compressor.models.calls import (
    ArgumentPath,
    Call,
    LayerCalls,
    is_same,
    list_leaves,
    passing_through,
    record_calls,
    split_arguments,
    with_leaves,
)
from compressor.models.config_check import numbers_in
from compressor.models.offload import device_of
from compressor.models.source import context_length
from compressor.runtime.errors import is_out_of_memory, reason_of

CHECKED = "compressor_tuple_length"  # the attribute of a model that was checked: what `check_layers` returned
BATCHES = (2, 2, 1)  # windows of each batch: two of one size with different tokens, and one of another size
TOKENS = 12  # of each window
SPECIAL = re.compile("token_(id|index)s?$")  # settings that name tokens, of images for example: no such token is tried


def check_layers(model: Any, blocks: Sequence[Block]) -> int:
    """Refuse a model whose layers cannot be run one at a time, with an InputError that names its family.

    Returns how many values a layer returns in a tuple (0: a bare tensor). A model is checked once.
    """
    if CHECKED not in model.__dict__:
        family = model.config.get_text_config().model_type
        try:
            tuple_length, problem = compare_with_own_pass(model, list(blocks))
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise unsupported(family, f"its layers cannot be run one at a time ({reason_of(error)})") from error
        if problem is not None:
            raise unsupported(family, problem)
        model.__dict__[CHECKED] = tuple_length
    return int(model.__dict__[CHECKED])


class OwnPass:
    """What every layer gets and returns in the model's own forward pass over one batch."""

    def __init__(self) -> None:
        self.order: list[int] = []  # the layers as they ran
        self.inputs: list[Tensor] = []
        self.calls: list[Call] = []
        self.outputs: list[Tensor] = []
        self.rows: dict[BranchIndex, Rows] = {}
        self.tuple_length = 0
        self.logits = torch.zeros(0)


@torch.no_grad()
def compare_with_own_pass(model: Any, blocks: list[Block]) -> tuple[int, str | None]:
    """How many values a layer returns in a tuple, and what stands in the way of running layers one at a time, if any.

    The layers are run from the last to the first, so that nothing which one leaves behind for another is there.
    """
    layers = [model.get_submodule(block.layer_path) for block in blocks]
    batches = random_batches(model)
    passes = [run_own_pass(model, blocks, layers, batch) for batch in batches]
    tuple_length = passes[0].tuple_length
    for own, batch in zip(passes, batches, strict=True):
        problem = find_unusual_order(own, blocks, batch)
        if problem is not None:
            return tuple_length, problem
    calls = LayerCalls()
    for own, batch in zip(passes, batches, strict=True):
        state, recorded = record_calls(model, layers, batch, tuple_length)
        if len(recorded) != len(layers):
            return tuple_length, "the number of its layers that run depends on the hidden states"
        if not is_close(state, own.inputs[0]):
            return tuple_length, "the hidden states that enter its first layer cannot be reproduced"
        calls.add(len(batch), recorded)
    for position in reversed(range(len(layers))):
        for number, own in [*enumerate(passes), (0, passes[0])]:  # the first once more: a layer may keep something
            problem = find_unusual_layer(layers[position], calls.get(number, position), own, position)
            if problem is not None:
                return tuple_length, f"{blocks[position].layer_path} {problem}"
        problem = find_unusual_block(model, blocks[position], passes[0].rows[position])
        if problem is not None:
            return tuple_length, problem
    for own, batch in zip(passes, batches, strict=True):
        with passing_through(layers, tuple_length, iter([own.outputs[-1]])):
            if not is_close(model(input_ids=batch, use_cache=False).logits, own.logits):
                return tuple_length, "its logits depend on more than the output of its last layer"
    return tuple_length, None


def random_batches(model: Any) -> list[Tensor]:
    """Windows of random tokens in batches of two sizes; tokens that the config names are avoided."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    named = [number for key, number in numbers_in(model.config.to_dict()) if SPECIAL.search(key)]
    tokens = torch.arange(vocabulary)
    usual = tokens[~torch.isin(tokens, torch.tensor(named, dtype=torch.long))]
    usual = usual if len(usual) else tokens
    length = max(2, min(TOKENS, context_length(model) or TOKENS))
    chosen = torch.randint(len(usual), (sum(BATCHES), length), generator=torch.Generator().manual_seed(0))
    return list(torch.split(usual[chosen].to(device_of(model)), list(BATCHES)))


def run_own_pass(model: Any, blocks: list[Block], layers: list[nn.Module], batch: Tensor) -> OwnPass:
    """The model's own forward pass over one batch, with all that its layers get and return."""
    own = OwnPass()
    with (
        watch_layers(layers, own),
        capture_rows(model, blocks, lambda block, rows: own.rows.update({block.index: rows})),
    ):
        own.logits = model(input_ids=batch, use_cache=False).logits
    return own


@contextmanager
def watch_layers(layers: list[nn.Module], own: OwnPass) -> Iterator[None]:
    """While open, forward passes add to `own` what the layers get and return."""
    numbers = {id(layer): number for number, layer in enumerate(layers)}

    def before(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        state, call = split_arguments(layer, args, kwargs)
        own.order.append(numbers[id(layer)])
        own.inputs.append(state.clone())
        own.calls.append(Call(with_leaves(call.arguments, {}), call.name))  # as they are before the layer writes

    def after(_: nn.Module, args: Any, output: Any) -> None:
        own.outputs.append(hidden_states_of(output).clone())
        own.tuple_length = len(output) if isinstance(output, (tuple, list)) else 0

    handles = [layer.register_forward_pre_hook(before, with_kwargs=True) for layer in layers]
    handles += [layer.register_forward_hook(after) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def find_unusual_order(own: OwnPass, blocks: list[Block], batch: Tensor) -> str | None:
    """What is unusual about the way from layer to layer: the order, the shape, or a step between two layers."""
    if own.order != list(range(len(blocks))):
        return "its layers do not run once each, one after the other"
    shape = (*batch.shape, blocks[0].width)
    for block, entered, returned in zip(blocks, own.inputs, own.outputs, strict=True):
        for state in (entered, returned):
            if state.shape != shape:
                return f"the hidden states of {block.layer_path} have shape {list(state.shape)}, not {list(shape)}"
    for block, returned, entered in zip(blocks[1:], own.outputs, own.inputs[1:], strict=False):
        if not is_close(returned, entered):
            return f"the input of {block.layer_path} is not the output of the layer before it"
    return None


def find_unusual_block(model: nn.Module, block: Block, rows: Rows) -> str | None:
    """Whether a block is something else than a function of single rows, tried with the rows in another order."""
    if rows.x.shape != rows.h.shape or rows.y.shape != rows.h.shape:
        return f"{block.path} takes rows {list(rows.x.shape)} and returns {list(rows.y.shape)}"
    if not is_close(run_block(model, block, rows.x.flip(0)), rows.y.flip(0)):
        return f"the output of {block.path} depends on more than the row it is computed from"
    return None


def find_unusual_layer(layer: nn.Module, call: Call, own: OwnPass, position: int) -> str | None:
    """What is unusual about a layer that is run by itself with its recorded arguments, if anything."""
    state = own.inputs[position].clone()
    recorded, real = dict(list_leaves(call.arguments)), dict(list_leaves(own.calls[position].arguments))
    other = [
        path for path, value in recorded.items() if isinstance(value, Tensor) and not is_same(value, real.get(path))
    ]
    if other:
        return f"takes {name_argument(other[0])}, which depends on the layers before it"
    try:
        output = hidden_states_of(call.run(layer, state))
    except (KeyError, IndexError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        return f"cannot be run by itself{blame(recorded, real)} ({reason_of(error)})"
    if not is_close(output, own.outputs[position]):
        return f"returns something else when it is run by itself{blame(recorded, real)}"
    same = torch.equal(state.nan_to_num(), own.inputs[position].nan_to_num())  # NaN differs even from itself
    return None if same else "changes its input in place"


def blame(recorded: Mapping[ArgumentPath, Any], real: Mapping[ArgumentPath, Any]) -> str:
    """Names an argument into which the layers before have written, as far as one is found."""
    more = [path for path in real if path not in recorded]
    return f": other layers write into {name_argument(more[0])}" if more else ""


def name_argument(path: ArgumentPath) -> str:
    return f"an argument ({path[0]})" if isinstance(path[0], str) else f"argument {path[0] + 2}"


def is_close(one: Tensor, other: Any) -> bool:
    """Whether two results of the same computation differ by rounding only."""
    if not isinstance(other, Tensor) or one.shape != other.shape:
        return False
    if not other.is_floating_point():
        return is_same(one, other)
    one, finite = one.to(other.device), other.isfinite()
    if not torch.equal(one.isfinite(), finite):  # what overflows must overflow in both
        return False
    one, expected = one[finite].double(), other[finite].double()
    return bool((one - expected).norm() <= max(1e-5, 4 * torch.finfo(other.dtype).eps) * expected.norm())
