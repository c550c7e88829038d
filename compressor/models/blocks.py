"""Where the feed-forward blocks of a causal language model are, and what flows through them.

A row of ARCHITECTURES says where the decoder layers of a family are and what its FFN is called. A family without a row
is looked for by the same names; what is not found is refused by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compressor.models.offload import device_of, fetch
from compressor.runtime.errors import InputError

FFN_NAMES = ("mlp", "ffn", "feed_forward")
SPLIT_FFN = ("fc1", "activation_fn", "fc2")


@dataclass(frozen=True)
class Architecture:
    """Where a family keeps its decoder layers (`layers`) and, in each, its FFN (`ffn`).

    An `ffn` of "fc1" means that there is no FFN module: fc1, activation_fn and fc2 stand in the layer itself.
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
    """One FFN: the place `path` where a replacement goes, and the decoder layer `layer_path` around it."""

    index: int
    path: str
    layer_path: str
    residual_inside: bool  # the FFN is called as ffn(x, residual) and adds the residual itself
    bypass: tuple[str, ...]  # modules that become identities when the block is replaced (activation_fn and fc2)
    width: int
    parameters: int


@dataclass(frozen=True)
class Rows:
    """What one forward pass sent through one block: FFN input x, FFN output y, residual stream h after the layer.

    `a` is what entered the module that was named as the block's inside; without one it is y.
    """

    x: Tensor
    y: Tensor
    h: Tensor
    a: Tensor


def find_blocks(model: nn.Module) -> list[Block]:
    """Every FFN of the model in order of depth, or an InputError that names the family."""
    whole: Any = model.config
    config = whole.get_text_config()
    family = config.model_type
    if whole.is_encoder_decoder:
        raise unsupported(family, "it has an encoder, and only decoder-only language models can be compressed")
    refuse_mixture(model, family)
    row = ARCHITECTURES.get(family)
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    if row is None or row.layers not in lists:  # the language model may be a part of a larger one
        row = guess_architecture(lists, config.num_hidden_layers, family)
    if not lists[row.layers]:
        raise unsupported(family, "it has no layers")
    return [
        describe_block(model, index, f"{row.layers}.{index}", row.ffn, config.hidden_size, family)
        for index in range(len(lists[row.layers]))
    ]


def describe_block(model: nn.Module, index: int, layer_path: str, ffn: str, width: int, family: str) -> Block:
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
        residual_inside=getattr(modules[0], "residual_inside", takes_residual),  # a replacement knows it
        bypass=tuple(f"{layer_path}.{name}" for name in parts[1:]),
        width=width,
        parameters=parameters,
    )


def guess_architecture(lists: dict[str, nn.ModuleList], depth: int, family: str) -> Architecture:
    """The shallowest list of as many modules as the config has layers, whose members hold an FFN by a usual name."""
    for name, module in sorted(lists.items(), key=lambda item: item[0].count(".")):
        if len(module) != depth:
            continue
        for ffn in (*FFN_NAMES, "fc1"):
            if all(hasattr(layer, part) for layer in module for part in (SPLIT_FFN if ffn == "fc1" else (ffn,))):
                return Architecture(name, ffn)
    raise unsupported(family, "no feed-forward block was found in its layers")


def refuse_mixture(model: nn.Module, family: str) -> None:
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in ("experts", "router", "block_sparse_moe"):
            raise unsupported(family, f"it is a mixture of experts ({name} is a {type(module).__name__})")


def unsupported(family: str, reason: str) -> InputError:
    known = ", ".join(sorted(ARCHITECTURES))
    return InputError(f"model type {family!r} is not supported: {reason}; supported are {known}")


def body(model: Any) -> nn.Module:
    """The model without its head."""
    return getattr(model, model.base_model_prefix, model)  # type: ignore[no-any-return]


def parts_of(model: nn.Module, block: Block) -> list[nn.Module]:
    """The block's modules in the order in which they run, with their weights in memory."""
    parts = [model.get_submodule(path) for path in (block.path, *block.bypass)]
    for part in parts:
        fetch(part)
    return parts


def placing(model: nn.Module, block: Block) -> dict[str, Any]:
    """The device and the dtype that the block computes in."""
    reference = next(model.get_submodule(block.path).parameters())
    on_disk = reference.device.type == "meta"
    return {"device": device_of(model) if on_disk else reference.device, "dtype": reference.dtype}


def run_block(model: nn.Module, block: Block, x: Tensor) -> Tensor:
    """The block on rows [count, width], as its layer calls it: one sequence, no residual."""
    first, *rest = parts_of(model, block)
    output = first(x[None], torch.zeros_like(x[None])) if block.residual_inside else first(x[None])
    for module in rest:
        output = module(output)
    return output[0]  # type: ignore[no-any-return]


def hidden_of(output: Any) -> Tensor:
    """The hidden states in what a layer returned: families return a tensor or a tuple that begins with it."""
    hidden = output[0] if isinstance(output, (tuple, list)) else output
    if not isinstance(hidden, Tensor):
        raise InputError(f"a decoder layer returned {type(hidden).__name__} instead of hidden states")
    return hidden


@contextmanager
def watch(
    model: nn.Module,
    blocks: list[Block],
    see: Callable[[Block, Rows], None],
    insides: Mapping[int, str] | None = None,
) -> Iterator[None]:
    """While the context is open, every forward pass calls `see(block, rows)` as each block's layer returns.

    Rows come flattened to [tokens, width]. The FFN output is copied when the layer may add to it in place (Falcon).
    `insides` names a module inside some blocks whose input is wanted too.
    """
    seen: dict[int, tuple[Tensor, Tensor]] = {}
    inside: dict[int, Tensor] = {}
    handles = []
    for block in blocks:
        ffn = model.get_submodule(block.path)
        last = model.get_submodule(block.bypass[-1]) if block.bypass else ffn

        def before(_: nn.Module, args: Any, kwargs: Any, block: Block = block) -> None:
            x = args[0] if args else kwargs["hidden_states"]
            seen[block.index] = (x.reshape(-1, x.shape[-1]), x)

        def after(_: nn.Module, args: Any, kwargs: Any, output: Any, block: Block = block) -> None:
            if not isinstance(output, Tensor):
                kind = type(output).__name__
                raise InputError(f"{block.path} returns a {kind}, not a tensor: its family is not supported")
            residual = (args[1] if len(args) > 1 else kwargs.get("residual")) if block.residual_inside else None
            y = output - residual if residual is not None else output.clone()
            seen[block.index] = (seen[block.index][0], y.reshape(-1, y.shape[-1]))

        def layer_done(_: nn.Module, args: Any, output: Any, block: Block = block) -> None:
            h = hidden_of(output)
            x, y = seen.pop(block.index)
            see(block, Rows(x=x, y=y, h=h.reshape(-1, h.shape[-1]), a=inside.pop(block.index, y)))

        def enter(_: nn.Module, args: Any, block: Block = block) -> None:
            inside[block.index] = args[0].reshape(-1, args[0].shape[-1])

        if insides and block.index in insides:
            handles.append(model.get_submodule(insides[block.index]).register_forward_pre_hook(enter))

        handles.append(ffn.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(last.register_forward_hook(after, with_kwargs=True))
        handles.append(model.get_submodule(block.layer_path).register_forward_hook(layer_done))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
