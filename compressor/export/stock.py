"""Stock models with ordinary feed-forward blocks, assembled in memory from a config, tensors and folded blocks.

"Stock" means an architecture of transformers as it is, without the replacement modules of this package. All its layers
have as many heads, so layers that have fewer left get heads of zeros.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from compressor.export.attention import (
    CompressedAttention,
    buffers_with_stock_names,
    find_compressed_attention,
    most_units,
    refuse_attention,
    tensors_with_stock_names,
)
from compressor.export.fold import OrdinaryBlock, fold, neurons_needed, read_ordinary_block
from compressor.models.blocks import Block, find_blocks, modules_of
from compressor.models.deferred import defer
from compressor.models.heads import AttentionCall, Heads, describe_heads
from compressor.models.neurons import Matrix, find_neurons
from compressor.runtime.errors import InputError

WIDTH_KEYS = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff", "inner_dim")
ATTENTION_BIAS_KEYS = ("attention_bias", "attention_out_bias", "use_bias", "bias")
BIAS_KEYS = ("mlp_bias", "use_mlp_bias", "use_bias", "enable_bias", "bias")


@dataclass(frozen=True)
class MatrixLocation:
    """Where a matrix of a block is stored: the module's path within the layer, and how it is stored there."""

    path: str
    transposed: bool
    start: int  # the first output, where two matrices are stored as one
    biased: bool


@dataclass(frozen=True)
class Layout:
    """How the feed-forward blocks of a stock architecture are built."""

    activation: str
    neurons: int
    locations: Mapping[str, MatrixLocation]  # of inner, outer and, if there is one, gate

    @property
    def gated(self) -> bool:
        return "gate" in self.locations

    @property
    def missing_bias(self) -> str | None:
        """The first matrix without a bias where a folded block needs one, or None."""
        needed = ("outer", "gate", "inner") if self.gated else ("outer",)
        return next((name for name in needed if not self.locations[name].biased), None)


def build_empty(config: Any) -> Any:
    """The stock model of a config on the meta device, without weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32).eval()


def find_layout(config: Any) -> Layout | None:
    """The layout of the stock model's first block, found by trying; None if the block is not made of neurons."""
    model = build_empty(config)
    block = find_blocks(model)[0]
    generator = torch.Generator().manual_seed(0)
    for part in modules_of(model, block):
        part.to_empty(device="cpu")
        for parameter in part.parameters():
            parameter.data.normal_(generator=generator)
            parameter.data /= parameter.shape[-1] ** 0.5
    neurons = find_neurons(model, block)
    if neurons is None:
        return None
    names = {id(module): name for name, module in model.get_submodule(block.layer_path).named_modules()}

    def locate(matrix: Matrix) -> MatrixLocation:
        module = matrix.module
        transposed = not isinstance(module, nn.Linear)
        return MatrixLocation(
            names[id(module)], transposed, matrix.start or 0, getattr(module, "bias", None) is not None
        )

    locations = {"inner": locate(neurons.inner_matrix), "outer": locate(neurons.outer_matrix)}
    if neurons.gate_matrix is not None:
        locations["gate"] = locate(neurons.gate_matrix)
    return Layout(neurons.activation, neurons.count, locations)


def count_needed_neurons(model: Any, layout: Layout) -> list[int]:
    """How many neurons each block of a compressed model needs as an ordinary block."""
    return [
        neurons_needed(model.get_submodule(block.path), layout.gated)
        if has_replacement(model, block)
        else layout.neurons
        for block in find_blocks(model)
    ]


def has_replacement(model: Any, block: Block) -> bool:
    """Whether the block was replaced."""
    return bool(getattr(model.get_submodule(block.path), "is_compressor_replacement", False))


def fold_blocks(model: Any, layout: Layout) -> list[OrdinaryBlock]:
    """Every block of a compressed model as an ordinary block."""
    folded = []
    for block in find_blocks(model):
        if has_replacement(model, block):
            try:
                folded.append(fold(model.get_submodule(block.path), layout.activation, layout.gated))
            except InputError as error:
                raise InputError(f"{block.path} cannot be an ordinary block: {error}") from error
            continue
        neurons = find_neurons(model, block)
        if neurons is None or neurons.gated != layout.gated:
            raise InputError(f"{block.path} is not made of neurons that could be read")
        folded.append(read_ordinary_block(neurons))
    return folded


def assemble(
    config: Any,
    layout: Layout,
    tensors: Mapping[str, Tensor],
    blocks: Sequence[OrdinaryBlock],
    buffers: Mapping[str, Tensor],
    modules: Mapping[str, nn.Module] | None = None,
) -> Any:
    """The stock model of the config with these tensors and blocks, sharing their memory.

    The blocks may have different widths, attention different numbers of heads, and `modules` may stand at some paths
    instead of the stock ones: the model computes correctly, but its config cannot express it, so the caller must store
    the sizes otherwise. A bias that is not among the tensors is zero; any other missing tensor is an error.
    """
    model = build_empty(config)
    for path, module in (modules or {}).items():
        model.set_submodule(path, module)
    parameters = dict(tensors)
    for block, ffn in zip(find_blocks(model), blocks, strict=True):
        parameters |= {f"{block.layer_path}.{name}": tensor for name, tensor in name_block_tensors(layout, ffn).items()}
    for owner, name, path in list_owners(model, "_parameters"):
        if path not in parameters:
            if not path.endswith("bias"):
                raise InputError(f"the model has no {path}, which {config.model_type} needs")
            rows = owner.out_features if isinstance(owner, nn.Linear) else owner._parameters[name].shape
            parameters[path] = torch.zeros(rows)
        owner._parameters[name] = nn.Parameter(parameters[path].detach(), requires_grad=False)
        if isinstance(owner, nn.Linear) and name == "weight":
            owner.out_features, owner.in_features = parameters[path].shape
    for owner, name, path in list_owners(model, "_buffers"):
        owner._buffers[name] = buffers[path]
    if config.tie_word_embeddings:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    return model


def list_owners(model: nn.Module, kind: str) -> list[tuple[Any, str, str]]:
    """Every tensor in the modules' attribute `kind` (`_parameters` or `_buffers`): module, name there, full name."""
    return [
        (module, name, f"{path}.{name}" if path else name)
        for path, module in model.named_modules()
        for name, tensor in getattr(module, kind).items()
        if tensor is not None
    ]


def name_block_tensors(layout: Layout, ffn: OrdinaryBlock) -> dict[str, Tensor]:
    """A block's tensors by their names in the layer; matrices that share a module are concatenated."""
    stored: dict[str, Tensor] = {}
    roles = [("outer", ffn.outer, ffn.bias), ("inner", ffn.inner, ffn.inner_bias)]
    if ffn.gate is not None:
        roles.append(("gate", ffn.gate, ffn.gate_bias))
    for role, weight, bias in sorted(roles, key=lambda entry: layout.locations[entry[0]].start):
        location = layout.locations[role]
        name = f"{location.path}.weight"
        weight = weight.T.contiguous() if location.transposed else weight
        stored[name] = torch.cat([stored[name], weight], dim=int(location.transposed)) if name in stored else weight
        if location.biased:
            name = f"{location.path}.bias"
            bias = weight.new_zeros(ffn.neurons if role != "outer" else len(ffn.outer)) if bias is None else bias
            stored[name] = torch.cat([stored[name], bias]) if name in stored else bias
        elif bias is not None and bias.any():
            raise InputError(f"{location.path} has no bias in this architecture")
    return stored


def find_stock_layout(model: Any, config: Any) -> tuple[Any, Layout]:
    """The config and the layout of the stock architecture that a compressed model came from.

    Biases that folded blocks need are switched on in the config; an architecture that cannot have them is refused.
    """
    family = config.model_type
    layout = find_layout(config)
    if layout is None:
        raise InputError(f"the blocks of this {family} are not made of neurons with an activation that is known here")
    if layout.missing_bias and any(has_replacement(model, block) for block in find_blocks(model)):
        for key in BIAS_KEYS:
            if getattr(config, key, None) is False:
                biased_config = copy.deepcopy(config)
                setattr(biased_config, key, True)
                biased_layout = find_layout(biased_config)
                if biased_layout is not None and not biased_layout.missing_bias:
                    return biased_config, biased_layout
        matrix = layout.locations[layout.missing_bias].path
        raise InputError(f"{family} has no bias at {matrix}, without which no ordinary block computes a linear map")
    return config, layout


def widen_blocks(config: Any, layout: Layout, neurons: int) -> tuple[Any, Layout]:
    """The config and the layout of the same architecture with blocks of this many neurons."""
    if neurons == layout.neurons:
        return config, layout
    for key in WIDTH_KEYS:
        if hasattr(config, key):
            wider_config = copy.deepcopy(config)
            setattr(wider_config, key, neurons)
            wider_layout = find_layout(wider_config)
            if wider_layout is not None and wider_layout.neurons == neurons:
                return wider_config, wider_layout
    raise InputError(f"{config.model_type} has blocks of a fixed width, {layout.neurons} neurons")


def stock_config(model: Any) -> Any:
    """The config of the model's stock architecture: its own, without the entries of a compressed checkpoint."""
    config = copy.deepcopy(model.config)
    for name in ("quantization_config", "auto_map"):
        config.__dict__.pop(name, None)
    return config


@torch.no_grad()
def convert_to_stock(model: Any) -> tuple[Any, list[int]]:
    """A compressed model in its stock architecture, where all blocks have one width, and the widths that they need."""
    config, layout = find_stock_layout(model, find_stock_heads(model, stock_config(model)))
    needed = count_needed_neurons(model, layout)
    config, layout = widen_blocks(config, layout, max(needed))
    blocks = [ffn.padded(max(needed)) for ffn in fold_blocks(model, layout)]
    tensors, buffers = tensors_with_stock_names(model), buffers_with_stock_names(model)
    compressed = find_compressed_attention(model)
    if compressed:
        empty, heads = describe_stock_heads(config, compressed[0].block)
        for attention in compressed:
            found, made = spread_heads(attention, empty.get_submodule(attention.path), heads)
            tensors |= {f"{attention.path}.{name}": tensor for name, tensor in found.items()}
            buffers = {f"{attention.path}.{name}": tensor for name, tensor in made.items()} | buffers
    stock = assemble(config, layout, tensors, blocks, buffers)
    stock.generation_config = copy.deepcopy(model.generation_config)
    return stock, needed


def find_stock_heads(model: Any, config: Any) -> Any:
    """The config with as many heads as the layer that has the most left, and with an output bias where one is needed.

    An architecture that cannot have the bias is refused; one that cannot have fewer heads gets more of them.
    """
    compressed = find_compressed_attention(model)
    if not compressed:
        return config
    family = config.model_type
    refuse_attention(
        model, ("linear", "lowrank", "hybrid"), "a stock architecture has heads in its layers and nothing else"
    )
    block = compressed[0].block
    _, heads = describe_stock_heads(config, block)
    fewest = most_units(model, heads.count)
    candidates = (narrow_heads(config, block, heads, units) for units in range(fewest, heads.count + 1))
    narrowed = next(candidate for candidate in candidates if candidate is not None)
    if all(attention.bias is None for attention in compressed) or describe_stock_heads(narrowed, block)[1].biased:
        return narrowed
    for key in ATTENTION_BIAS_KEYS:
        biased = copy.deepcopy(narrowed)
        if getattr(biased.get_text_config(), key, None) is False:
            setattr(biased.get_text_config(), key, True)
            if describe_stock_heads(biased, block)[1].biased:
                return biased
    raise InputError(
        f"{family} has no bias at {heads.layout.output}, and compressed attention has one that is not zero"
    )


def describe_stock_heads(config: Any, attention: Block) -> tuple[Any, Heads]:
    """The empty stock model of a config, and the heads of this attention in it."""
    model = build_empty(config)
    heads = describe_heads(model, attention, AttentionCall((), {}, None, torch.empty(0)))
    if heads is None:
        raise InputError(f"the heads of this {config.model_type} cannot be told apart")
    return model, heads


def narrow_heads(config: Any, attention: Block, heads: Heads, units: int) -> Any | None:
    """The config with so many key-value heads of the same width, or None where it cannot say that."""
    if units == heads.count:
        return config
    narrowed = copy.deepcopy(config)
    text_config = narrowed.get_text_config()
    counts = {"num_attention_heads": units * heads.queries, "num_key_value_heads": units, "num_kv_heads": units}
    try:
        text_config.head_dim = heads.head_width
        for key, count in counts.items():
            if getattr(text_config, key, None) is not None:
                setattr(text_config, key, count)
        _, found = describe_stock_heads(type(narrowed).from_dict(narrowed.to_dict()), attention)
    except (AttributeError, ValueError, RuntimeError, InputError, StrictDataclassError):
        return None
    sizes = [(each.queries, each.head_width, each.columns) for each in (heads, found)]
    return narrowed if found.count == units and sizes[0] == sizes[1] else None


def spread_heads(
    attention: CompressedAttention, stock: nn.Module, heads: Heads
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of the stock module, with zeros for the heads that are gone, and buffers for it if it is a constant.

    Heads stay where they were if the stock module has as many as before: with ALiBi, a head is known by its number.
    """
    kept, output = attention.tensors(), heads.layout.output
    if attention.bias is not None:
        kept[f"{output}.bias"] = attention.bias
    numbers = attention.module.heads if attention.units else []
    slots = torch.tensor(numbers if max(numbers, default=-1) < heads.count else range(attention.units))

    def spread(name: str, parameter: Tensor, tensor: Tensor) -> Tensor:
        """The stock module's tensor of this name, made of the one that is kept."""
        owner, _, kind = name.rpartition(".")
        transposed = kind == "weight" and not isinstance(stock.get_submodule(owner), nn.Linear) and parameter.ndim == 2
        whole = torch.zeros(parameter.T.shape if transposed else parameter.shape)
        if name in kept:
            if owner in heads.layout.inputs:
                whole[heads.rows_of(owner, slots)] = tensor
            elif name == f"{output}.weight":
                whole[:, heads.columns_of(slots)] = tensor
            else:
                whole = tensor
        return whole.T.contiguous() if transposed else whole

    small = attention.module.output_bias.detach()  # deferred where the kept tensors would be
    tensors = {
        name: defer(parameter, partial(spread, name, parameter), kept.get(name, small))
        for name, parameter in stock.named_parameters()
    }
    buffers = {name: torch.zeros(buffer.shape, dtype=buffer.dtype) for name, buffer in stock.named_buffers()}
    return tensors, buffers
