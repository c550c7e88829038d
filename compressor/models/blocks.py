"""Where the residual branches of a causal language model are, and what flows through them.

A decoder layer adds two branches to the residual stream: its attention and its feed-forward network (FFN). A `Block` is
one branch. A row is the vector of one token: a block maps rows of `width` numbers to rows of the same width; attention
also looks at the tokens before.

ARCHITECTURES says for each family where its decoder layers are and what its FFN and its attention are called. For a
family that is not in the table, the usual names are tried; if no FFN fits, the model is refused with an error that
names the family.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from compressor.models.branches import BRANCHES, AttentionOf, BranchIndex, branch_of, layer_of
from compressor.models.offload import device_of, fetch_weights
from compressor.runtime.errors import InputError

FFN_NAMES = ("mlp", "ffn", "feed_forward")
ATTENTION_NAMES = ("self_attn", "attn", "attention", "self_attention")
ATTENTION_RETURNS = 2  # values in the tuple that attention returns: its output, and its weights or None
CHECKED = "compressor_attention"  # the attribute of a model that was tried: layers with usual attention
PROBE_TOKENS = 12
SPLIT_FFN = ("fc1", "activation_fn", "fc2")


@dataclass(frozen=True)
class Architecture:
    """Where a family keeps its decoder layers (`layers`) and, in each, its FFN (`ffn`) and its `attention`.

    An `ffn` of "fc1" means that there is no FFN module: fc1, activation_fn and fc2 are members of the layer itself.
    """

    layers: str
    ffn: str = "mlp"
    attention: str = "self_attn"


ARCHITECTURES: dict[str, Architecture] = {
    "bloom": Architecture("transformer.h", attention="self_attention"),
    "falcon": Architecture("transformer.h", attention="self_attention"),
    "gemma2": Architecture("model.layers"),
    "gemma3_text": Architecture("model.layers"),
    "glm4": Architecture("model.layers"),
    "gpt2": Architecture("transformer.h", attention="attn"),
    "gpt_neo": Architecture("transformer.h", attention="attn.attention"),
    "gpt_neox": Architecture("gpt_neox.layers", attention="attention"),
    "gptj": Architecture("transformer.h", attention="attn"),
    "granite": Architecture("model.layers"),
    "llama": Architecture("model.layers"),
    "mistral": Architecture("model.layers"),
    "mpt": Architecture("transformer.blocks", "ffn", "attn"),
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
    """One branch: the `path` of the module that is replaced, and the `layer_path` of the decoder layer around it."""

    index: BranchIndex
    path: str
    layer_path: str
    residual_inside: bool  # the branch is called as ffn(x, residual) and adds the residual itself
    bypass: tuple[str, ...]  # modules that become identities when the block is replaced (activation_fn and fc2)
    width: int
    parameters: int

    @property
    def layer(self) -> int:
        """The number of its decoder layer."""
        return layer_of(self.index)

    @property
    def is_attention(self) -> bool:
        return isinstance(self.index, AttentionOf)

    @property
    def branch(self) -> str:
        """Which branch of its layer it is."""
        return branch_of(self.index)


@dataclass(frozen=True)
class Rows:
    """The rows of one forward pass at one block: its input x, its output y, the residual stream h after the layer.

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


def find_attention(model: Any) -> list[Block]:
    """The attention of every layer in order of depth; layers without one that can be replaced are left out.

    A model is tried once on a few tokens: attention can be replaced where it takes hidden states and returns them in a
    pair with its weights.
    """
    family = model.config.get_text_config().model_type
    known = (ARCHITECTURES[family].attention,) if family in ARCHITECTURES else ()
    found = (describe_attention(model, ffn, (*known, *ATTENTION_NAMES)) for ffn in find_blocks(model))
    blocks = [block for block in found if block is not None]
    if CHECKED not in model.__dict__:
        model.__dict__[CHECKED] = list_usual_attention(model, blocks)
    return [block for block in blocks if block.layer in model.__dict__[CHECKED]]


@torch.no_grad()
def list_usual_attention(model: Any, blocks: list[Block]) -> list[int]:
    """The layers whose attention runs once in a pass of the model, on hidden states, and returns a pair with them."""
    usual: list[int] = []
    handles = []
    for block in blocks:

        def look(_: nn.Module, args: Any, kwargs: Any, output: Any, block: Block = block) -> None:
            states = args[0] if args else kwargs.get("hidden_states")
            pair = isinstance(output, (tuple, list)) and len(output) == ATTENTION_RETURNS
            if (
                pair
                and isinstance(states, Tensor)
                and isinstance(output[0], Tensor)
                and output[0].shape == states.shape
            ):
                usual.append(block.layer)

        handles.append(model.get_submodule(block.path).register_forward_hook(look, with_kwargs=True))
    run_probe(model, handles)
    return [layer for layer in usual if usual.count(layer) == 1]


def run_probe(model: Any, hooks: Iterable[RemovableHandle]) -> None:
    """Run the model on a few tokens, and take these hooks away."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    tokens = (torch.arange(PROBE_TOKENS) % vocabulary)[None].to(device_of(model))
    try:
        backbone(model)(input_ids=tokens, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()


def find_branches(model: nn.Module, branches: Collection[str] = BRANCHES) -> list[Block]:
    """The branches of these kinds in order of depth, the attention of a layer before its FFN."""
    found = find_blocks(model) if "ffn" in branches else []
    found += find_attention(model) if "attention" in branches else []
    return sorted(found, key=lambda block: block.index)


def describe_attention(model: nn.Module, ffn: Block, names: tuple[str, ...]) -> Block | None:
    """The attention in the layer of this FFN, under the first of these names that the layer has."""
    for name in names:
        path = f"{ffn.layer_path}.{name}"
        try:
            module = model.get_submodule(path)
        except AttributeError:
            continue
        takes_residual = "residual" in inspect.signature(module.forward).parameters
        return Block(
            index=AttentionOf(ffn.layer),
            path=path,
            layer_path=ffn.layer_path,
            residual_inside=getattr(module, "residual_inside", takes_residual),
            bypass=(),
            width=ffn.width,
            parameters=sum(p.numel() for p in module.parameters()),
        )
    return None


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


def hidden_states_of(output: Any, what: str = "a decoder layer") -> Tensor:
    """The hidden states in the output of a layer or a block: a tensor, or a tuple that begins with it."""
    hidden = output[0] if isinstance(output, (tuple, list)) else output
    if not isinstance(hidden, Tensor):
        raise InputError(f"{what} returned {type(hidden).__name__} instead of hidden states")
    return hidden


def with_hidden_states(output: Any, hidden: Tensor) -> Any:
    """The output of a layer or a block with other hidden states."""
    return (hidden, *output[1:]) if isinstance(output, (tuple, list)) else hidden


def input_rows(args: tuple[Any, ...], kwargs: Mapping[str, Any], block: Block) -> Tensor:
    """The block's input among the arguments of its call, as rows [tokens, width]."""
    x = args[0] if args else kwargs.get("hidden_states")
    if x is None:
        raise InputError(f"{block.path} is called without hidden states")
    return x.reshape(-1, x.shape[-1])  # type: ignore[no-any-return]


def output_rows(args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any, block: Block) -> Tensor:
    """What the block adds to the residual stream in this call, as rows of their own: some layers add in place."""
    if not block.is_attention and not isinstance(output, Tensor):  # a replacement of an FFN returns a tensor
        raise InputError(f"{block.path} returns a {type(output).__name__}, not a tensor")
    hidden = hidden_states_of(output, block.path)
    residual = (args[1] if len(args) > 1 else kwargs.get("residual")) if block.residual_inside else None
    y = hidden - residual if residual is not None else hidden.clone()
    return y.reshape(-1, y.shape[-1])


@contextmanager
def capture_rows(
    model: nn.Module,
    blocks: list[Block],
    receive: Callable[[Block, Rows], None],
    inner_paths: Mapping[BranchIndex, str] | None = None,
) -> Iterator[None]:
    """While the context is open, every forward pass calls `receive(block, rows)` as each block's layer returns.

    Rows are flattened to [tokens, width]. `inner_paths` gives, by block index, the path of a module inside the block
    whose input is captured too.
    """
    inputs: dict[BranchIndex, Tensor] = {}
    outputs: dict[BranchIndex, Tensor] = {}
    inner_inputs: dict[BranchIndex, Tensor] = {}
    handles = []
    for block in blocks:
        module = model.get_submodule(block.path)
        last = model.get_submodule(block.bypass[-1]) if block.bypass else module

        def before_block(_: nn.Module, args: Any, kwargs: Any, block: Block = block) -> None:
            if block.index in inputs:
                raise InputError(f"{block.path} is called twice")
            inputs[block.index] = input_rows(args, kwargs, block)

        def after_block(_: nn.Module, args: Any, kwargs: Any, output: Any, block: Block = block) -> None:
            outputs[block.index] = output_rows(args, kwargs, output, block)

        def after_layer(_: nn.Module, args: Any, output: Any, block: Block = block) -> None:
            h = hidden_states_of(output)
            if block.index not in outputs:
                raise InputError(f"{block.path} does not run in a pass of its layer")
            x, y = inputs.pop(block.index), outputs.pop(block.index)
            receive(block, Rows(x=x, y=y, h=h.reshape(-1, h.shape[-1]), a=inner_inputs.pop(block.index, y)))

        def before_inner(_: nn.Module, args: Any, block: Block = block) -> None:
            inner_inputs[block.index] = args[0].flatten(0, -2)

        if inner_paths and block.index in inner_paths:
            handles.append(model.get_submodule(inner_paths[block.index]).register_forward_pre_hook(before_inner))

        handles.append(module.register_forward_pre_hook(before_block, with_kwargs=True))
        handles.append(last.register_forward_hook(after_block, with_kwargs=True))
        handles.append(model.get_submodule(block.layer_path).register_forward_hook(after_layer))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
