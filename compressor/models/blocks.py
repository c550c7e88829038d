"""Where the feed-forward blocks of a causal language model are, and what flows through them.

A block is the feed-forward network (FFN) of one decoder layer. A row is the vector of one token: a block maps rows of
`width` numbers to rows of the same width, which its layer adds to the residual stream.

ARCHITECTURES says for each family where its decoder layers are and what its FFN is called. For a family that is not in
the table, the usual names are tried; if none fits, the model is refused with an error that names the family.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compressor.models.offload import device_of, fetch_weights
from compressor.runtime.errors import InputError

FFN_NAMES = ("mlp", "ffn", "feed_forward")
SPLIT_FFN = ("fc1", "activation_fn", "fc2")


@dataclass(frozen=True)
class Architecture:
    """Where a family keeps its decoder layers (`layers`) and, in each, its FFN (`ffn`).

    An `ffn` of "fc1" means that there is no FFN module: fc1, activation_fn and fc2 are members of the layer itself.
    """

    layers: str
    ffn: str = "mlp"


ARCHITECTURES: dict[str, Architecture] = {
    "bloom": Architecture("transformer.h"),
    "falcon": Architecture("transformer.h"),
    "gemma2": Architecture("model.layers"),
    "gemma3_text": Architecture("model.layers"),
    "glm4": Architecture("model.layers"),
    "gpt2": Architecture("transformer.h"),
    "gpt_neo": Architecture("transformer.h"),
    "gpt_neox": Architecture("gpt_neox.layers"),
    "gptj": Architecture("transformer.h"),
    "granite": Architecture("model.layers"),
    "llama": Architecture("model.layers"),
    "mistral": Architecture("model.layers"),
    "mpt": Architecture("transformer.blocks", "ffn"),
    "olmo2": Architecture("model.layers"),
    "opt": Architecture("model.decoder.layers", "fc1"),
    "phi": Architecture("model.layers"),
    "phi3": Architecture("model.layers"),
    "qwen2": Architecture("model.layers"),
    "qwen3": Architecture("model.layers"),
    "smollm3": Architecture("model.layers"),
    "stablelm": Architecture("model.layers"),
    "starcoder2": Architecture("model.layers"),
}


@dataclass(frozen=True)
class Block:
    """One FFN: the `path` of the module that is replaced, and the `layer_path` of the decoder layer around it."""

    index: int
    path: str
    layer_path: str
    residual_inside: bool  # the FFN is called as ffn(x, residual) and adds the residual itself
    bypass: tuple[str, ...]  # modules that become identities when the block is replaced (activation_fn and fc2)
    width: int
    parameters: int


@dataclass(frozen=True)
class Rows:
    """The rows of one forward pass at one block: FFN input x, FFN output y, residual stream h after the layer.

    `a` is the input of the module that `capture_rows` was asked to capture inside the block; without one it is y.
    """

    x: Tensor
    y: Tensor
    h: Tensor
    a: Tensor


def find_blocks(model: nn.Module) -> list[Block]:
    """Every FFN of the model in order of depth, or an InputError that names the family."""
    full_config: Any = model.config
    config = full_config.get_text_config()
    family = full_config.model_type
    if full_config.is_encoder_decoder:
        raise unsupported(family, "it has an encoder, and only decoder-only language models can be compressed")
    for name in ("num_hidden_layers", "hidden_size"):
        if not isinstance(getattr(config, name, None), int):
            raise unsupported(family, f"its config says no {name}")
    refuse_mixture(model, family)
    architecture = ARCHITECTURES.get(config.model_type)
    module_lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    if architecture is None or architecture.layers not in module_lists:  # it may be a part of a larger model
        architecture = guess_architecture(model, module_lists, config.num_hidden_layers, family)
    if not module_lists[architecture.layers]:
        raise unsupported(family, "it has no layers")
    return [
        describe_block(model, index, f"{architecture.layers}.{index}", architecture.ffn, config.hidden_size, family)
        for index in range(len(module_lists[architecture.layers]))
    ]


def describe_block(model: nn.Module, index: int, layer_path: str, ffn: str, width: int, family: str) -> Block:
    """The block of one decoder layer, or an InputError when the layer has no FFN of that name."""
    layer = model.get_submodule(layer_path)
    parts = SPLIT_FFN if ffn == "fc1" else (ffn,)
    modules = [getattr(layer, name, None) for name in parts]
    if not all(isinstance(module, nn.Module) for module in modules):
        raise unsupported(family, f"{layer_path} has no {' / '.join(parts)}")
    parameters = sum(p.numel() for module in modules if module is not None for p in module.parameters())
    takes_residual = "residual" in inspect.signature(modules[0].forward).parameters  # type: ignore[union-attr]
    return Block(
        index=index,
        path=f"{layer_path}.{parts[0]}",
        layer_path=layer_path,
        residual_inside=getattr(modules[0], "residual_inside", takes_residual),  # a replacement has it as an attribute
        bypass=tuple(f"{layer_path}.{name}" for name in parts[1:]),
        width=width,
        parameters=parameters,
    )


def guess_architecture(model: Any, module_lists: dict[str, nn.ModuleList], depth: int, family: str) -> Architecture:
    """The shallowest list with as many modules as the config has layers, each with an FFN under a usual name.

    Lists in the decoder come first: an encoder of images may have as many layers.
    """
    decoder = {id(module) for module in model.get_decoder().modules()}
    order = sorted(module_lists.items(), key=lambda item: (id(item[1]) not in decoder, item[0].count(".")))
    for name, module in order:
        if len(module) != depth:
            continue
        for ffn in (*FFN_NAMES, "fc1"):
            if all(hasattr(layer, part) for layer in module for part in (SPLIT_FFN if ffn == "fc1" else (ffn,))):
                return Architecture(name, ffn)
    raise unsupported(family, "no feed-forward block was found in its layers")


def refuse_mixture(model: nn.Module, family: str) -> None:
    """Refuse a mixture of experts, whose layers have several FFNs."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in ("experts", "router", "block_sparse_moe"):
            raise unsupported(family, f"it is a mixture of experts ({name} is a {type(module).__name__})")


def unsupported(family: str, reason: str) -> InputError:
    """The error for a model whose blocks cannot be found or replaced."""
    known = ", ".join(sorted(ARCHITECTURES))
    return InputError(f"model type {family!r} is not supported: {reason}; supported are {known}")


def backbone(model: Any) -> nn.Module:
    """The model without its language-modelling head."""
    return getattr(model, model.base_model_prefix, model)  # type: ignore[no-any-return]


def modules_of(model: nn.Module, block: Block) -> list[nn.Module]:
    """The block's modules in the order in which they run, with their weights in memory."""
    parts = [model.get_submodule(path) for path in (block.path, *block.bypass)]
    for part in parts:
        fetch_weights(part)
    return parts


def placement_of(model: nn.Module, block: Block) -> dict[str, Any]:
    """The device and the dtype that the block computes in, as arguments of `Tensor.to`."""
    reference = next(model.get_submodule(block.path).parameters())
    on_disk = reference.device.type == "meta"
    return {"device": device_of(model) if on_disk else reference.device, "dtype": reference.dtype}


def run_block(model: nn.Module, block: Block, x: Tensor) -> Tensor:
    """The block's output for rows [count, width], called as its layer calls it: one sequence, a residual of zero."""
    first, *rest = modules_of(model, block)
    output = first(x[None], torch.zeros_like(x[None])) if block.residual_inside else first(x[None])
    for module in rest:
        output = module(output)
    return output[0]  # type: ignore[no-any-return]


def hidden_states_of(output: Any) -> Tensor:
    """The hidden states in a layer's output, which is a tensor or, in some families, a tuple that begins with it."""
    hidden = output[0] if isinstance(output, (tuple, list)) else output
    if not isinstance(hidden, Tensor):
        raise InputError(f"a decoder layer returned {type(hidden).__name__} instead of hidden states")
    return hidden


@contextmanager
def capture_rows(
    model: nn.Module,
    blocks: list[Block],
    receive: Callable[[Block, Rows], None],
    inner_paths: Mapping[int, str] | None = None,
) -> Iterator[None]:
    """While the context is open, every forward pass calls `receive(block, rows)` as each block's layer returns.

    Rows are flattened to [tokens, width]. The FFN output is copied, because some layers add to it in place (Falcon).
    `inner_paths` gives, by block index, the path of a module inside the block whose input is captured too.
    """
    inputs: dict[int, Tensor] = {}
    outputs: dict[int, Tensor] = {}
    inner_inputs: dict[int, Tensor] = {}
    handles = []
    for block in blocks:
        ffn = model.get_submodule(block.path)
        last = model.get_submodule(block.bypass[-1]) if block.bypass else ffn

        def before_ffn(_: nn.Module, args: Any, kwargs: Any, block: Block = block) -> None:
            x = args[0] if args else kwargs.get("hidden_states")
            if x is None or block.index in inputs:
                raise InputError(f"{block.path} is called {'without hidden states' if x is None else 'twice'}")
            inputs[block.index] = x.reshape(-1, x.shape[-1])

        def after_ffn(_: nn.Module, args: Any, kwargs: Any, output: Any, block: Block = block) -> None:
            if not isinstance(output, Tensor):
                raise InputError(f"{block.path} returns a {type(output).__name__}, not a tensor")
            residual = (args[1] if len(args) > 1 else kwargs.get("residual")) if block.residual_inside else None
            y = output - residual if residual is not None else output.clone()
            outputs[block.index] = y.reshape(-1, y.shape[-1])

        def after_layer(_: nn.Module, args: Any, output: Any, block: Block = block) -> None:
            h = hidden_states_of(output)
            if block.index not in outputs:
                raise InputError(f"{block.path} does not run in a pass of its layer")
            x, y = inputs.pop(block.index), outputs.pop(block.index)
            receive(block, Rows(x=x, y=y, h=h.reshape(-1, h.shape[-1]), a=inner_inputs.pop(block.index, y)))

        def before_inner(_: nn.Module, args: Any, block: Block = block) -> None:
            inner_inputs[block.index] = args[0].reshape(-1, args[0].shape[-1])

        if inner_paths and block.index in inner_paths:
            handles.append(model.get_submodule(inner_paths[block.index]).register_forward_pre_hook(before_inner))

        handles.append(ffn.register_forward_pre_hook(before_ffn, with_kwargs=True))
        handles.append(last.register_forward_hook(after_ffn, with_kwargs=True))
        handles.append(model.get_submodule(block.layer_path).register_forward_hook(after_layer))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
