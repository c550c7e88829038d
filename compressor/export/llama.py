"""Convert a compressed model of a Llama-like family to a Llama, which llama.cpp, vLLM and transformers can run.

Multipliers that a family applies while it computes (Granite) go into the weights, fused matrices are split, and rows of
interleaved rotations are reordered. All of this is exact. Families whose layers compute something else are refused.

Attention that was compressed stays what it is where every layer may have heads of its own: fewer heads, one matrix or
none. A constant goes into the output bias of the block before, which is exact: between the two nothing reads the
stream. Where all layers have as many heads, heads of zeros are added.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from compressor.export.attention import (
    HeadSizes,
    NoAttention,
    find_compressed_attention,
    most_units,
    pad_heads,
    refuse_attention,
    refuse_biased_maps,
    refuse_first_constant,
    tensors_with_stock_names,
)
from compressor.export.fold import OrdinaryBlock
from compressor.export.stock import (
    Layout,
    assemble,
    count_needed_neurons,
    find_layout,
    fold_blocks,
    has_replacement,
    stock_config,
)
from compressor.modeling_compressor import Replacement
from compressor.models.blocks import find_blocks
from compressor.runtime.errors import InputError

# The families whose layers compute what Llama's do. True: their rotations pair neighbouring numbers instead of halves.
LLAMA_TYPES = {
    "cwm": False,
    "ernie4_5": True,
    "granite": False,
    "helium": True,
    "llama": False,
    "ministral": False,
    "mistral": False,
    "phi3": False,
    "qwen2": False,
    "seed_oss": False,
}
WHY_NOT_LLAMA = {
    "gemma": "its gate is a gelu",
    "gemma2": "its gate is a gelu, and it has norms after its blocks and soft caps on its logits",
    "gemma3_text": "its gate is a gelu, and it has norms after its blocks",
    "glm4": "it has norms after its blocks and rotates half of each head",
    "olmo": "its norms have no weights and subtract the mean",
    "olmo2": "its norms stand after its blocks",
    "qwen3": "it normalises queries and keys",
    "smollm3": "some of its layers have no rotations",
    "stablelm": "its norms subtract the mean",
}
# Settings that have the same name in all of these families.
SHARED_SETTINGS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "hidden_act", "rms_norm_eps", "tie_word_embeddings", "initializer_range"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)


# How many heads the layers of a Llama get: those that each has left; as many query heads, in groups of one size within
# a layer; or the same in all.
HeadArrangement = Literal["own", "grouped", "same"]


@dataclass(frozen=True)
class Llama:
    """A compressed model as a LlamaForCausalLM whose blocks may have different widths, and its layers other heads."""

    model: Any
    layout: Layout
    widths: list[int]  # the neurons that the blocks need; they may have been given more
    window: int | None  # the source's sliding window, to which the Llama's context is cut
    scaled: bool  # whether the source's multipliers went into the weights


def refuse_other_types(model: Any) -> None:
    """Refuse a family that cannot be converted, and say why."""
    config = model.config
    family = config.model_type
    if family not in LLAMA_TYPES:
        layout = find_layout(stock_config(model))
        gated = layout is not None and layout.gated
        reason = WHY_NOT_LLAMA.get(family, "its layers are not Llama's" if gated else "its blocks have no gate")
        known = ", ".join(sorted(LLAMA_TYPES))
        raise InputError(
            f"{family} is not of Llama's type: {reason}, and only Llamas have an architecture there with a width for "
            f"every block; of that type are {known}"
        )
    if config.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise InputError(f"this {family} rotates only a part of each head, which no Llama does")


@torch.no_grad()
def convert_to_llama(
    model: Any,
    *,
    uniform: bool = False,
    multiple: int = 1,
    keep_original_widths: bool = False,
    heads: HeadArrangement | None = None,
) -> Llama:
    """Convert a compressed model to a Llama.

    Each block gets the width that it needs, rounded up to a multiple; with `uniform`, all get the largest of these.
    With `keep_original_widths`, blocks that were not replaced keep their width, even if it is not a multiple. The heads
    are arranged as `heads` says: by default "same" with `uniform`, else "own".
    """
    arrangement = heads or ("same" if uniform else "own")
    refuse_other_types(model)
    refuse_other_attention(model, arrangement)
    config = llama_config(model)
    config.mlp_bias = True
    layout = find_layout(config)
    if layout is None:
        raise InputError(f"the activation of its blocks, {config.hidden_act}, is not one that is known here")
    needed = count_needed_neurons(model, layout)
    rounded = [-(-max(width, 1) // multiple) * multiple for width in needed]
    unrounded = [keep_original_widths and not has_replacement(model, block) for block in find_blocks(model)]
    widths = [exact if keep else up for exact, up, keep in zip(needed, rounded, unrounded, strict=True)]
    if uniform:
        widths = [max(widths)] * len(widths)
        config.intermediate_size = widths[0]
    multipliers = find_multipliers(model.config, config)
    folded = [scale_output(ffn, multipliers["residual"]) for ffn in fold_blocks(model, layout)]
    tensors = llama_tensors(model, config)
    modules: dict[str, nn.Module] = {}
    for attention in find_compressed_attention(model):
        if attention.kind in ("linear", "lowrank"):
            modules[attention.path] = Replacement(config.hidden_size, None, returns=2, biased=False, device="meta")
            tensors[f"{attention.path}.linear.weight"] = attention.matrix * multipliers["residual"]
        elif attention.kind == "bias" and arrangement != "same":
            modules[attention.path] = NoAttention()
            modules[attention.path.replace("self_attn", "input_layernorm")] = nn.Identity()
            if attention.bias is not None:
                folded = add_constant(folded, attention.layer, attention.bias * multipliers["residual"])
    if arrangement != "own":
        arrange_heads(model, config, tensors, grouped=arrangement == "grouped")
    blocks = [ffn.padded(width) for ffn, width in zip(folded, widths, strict=True)]
    llama = assemble(config, layout, tensors, blocks, dict(model.named_buffers()), modules)
    for layer, (queries, keys) in zip(llama.model.layers, head_counts(llama), strict=True):
        if keys:
            layer.self_attn.num_key_value_groups = queries // keys
    llama.generation_config = copy.deepcopy(model.generation_config)
    scaled = any(multiplier != 1.0 for multiplier in multipliers.values())
    return Llama(llama, layout, needed, find_window(model.config), scaled)


def refuse_other_attention(model: Any, arrangement: HeadArrangement) -> None:
    """Refuse attention that became something which the form does not have, and name the layers."""
    if arrangement == "own":
        refuse_attention(model, ("hybrid",), "llama.cpp's `deci` has heads or one matrix in a layer, never both")
        refuse_biased_maps(model, "llama.cpp's `deci` adds no bias to one matrix")
    else:
        what = "vLLM's DeciLM has" if arrangement == "grouped" else "a stock architecture has"
        refuse_attention(model, ("linear", "lowrank", "hybrid"), f"{what} heads in its layers and nothing else")
    if arrangement != "same":
        refuse_first_constant(model)


def add_constant(blocks: Sequence[OrdinaryBlock], layer: int, constant: Tensor) -> list[OrdinaryBlock]:
    """The blocks, of which the one before this layer adds the constant too."""
    added = list(blocks)
    before = blocks[layer - 1]
    added[layer - 1] = replace(before, bias=constant if before.bias is None else before.bias + constant)
    return added


def arrange_heads(model: Any, config: LlamaConfig, tensors: dict[str, Tensor], grouped: bool) -> None:
    """Add heads of zeros until all layers have as many, and set the counts in the config.

    When `grouped`, only the query heads are as many: the key-value heads are those that are left, and more until their
    number divides that of the query heads.
    """
    full, width = config.num_key_value_heads, config.head_dim
    queries = config.num_attention_heads // full
    units = next(
        count
        for count in range(most_units(model, full), full + 1)
        if config.hidden_size % (count * queries) == 0  # else the config is refused
    )
    config.num_key_value_heads, config.num_attention_heads, config.head_dim = units, units * queries, width
    for attention in find_compressed_attention(model):
        names = [name for name in tensors if name.startswith(f"{attention.path}.")]
        found = {name.removeprefix(f"{attention.path}."): tensors[name] for name in names}
        kept = attention.units
        if attention.kind == "bias":
            if grouped:
                continue
            found, kept = heads_of_zeros(tensors["model.norm.weight"], config.hidden_size, queries * width, width), 1
            if attention.bias is not None:
                found["o_proj.bias"] = attention.bias * find_multipliers(model.config, config)["residual"]
                config.attention_bias = True
        then = HeadSizes(units, queries, width)
        if grouped:
            groups = next(count for count in range(kept, units + 1) if units * queries % count == 0)
            then = HeadSizes(groups, units * queries // groups, width)
        padded = pad_heads(found, HeadSizes(kept, queries, width), then)
        tensors |= {f"{attention.path}.{name}": tensor for name, tensor in padded.items()}


def heads_of_zeros(like: Tensor, hidden: int, queries: int, keys: int) -> dict[str, Tensor]:
    """The projections of a Llama's attention, with so many rows for queries and for keys, all of zeros; deferred if the
    tensor `like` is."""
    rows = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    return {f"{name}.weight": like.new_zeros(count, hidden) for name, count in rows.items()} | {
        "o_proj.weight": like.new_zeros(hidden, queries)
    }


def head_counts(model: Any) -> list[tuple[int, int]]:
    """The query heads and key-value heads of every layer of a converted Llama.

    Query heads alone, without key-value heads, stand for one matrix, and no heads at all for no attention.
    """
    counts = []
    for layer in model.model.layers:
        attention = layer.self_attn
        if isinstance(attention, NoAttention):
            counts.append((0, 0))
        elif isinstance(attention, Replacement):
            counts.append((model.config.num_attention_heads, 0))
        else:
            widths = attention.q_proj.out_features, attention.k_proj.out_features
            counts.append((widths[0] // attention.head_dim, widths[1] // attention.head_dim))
    return counts


def block_widths(model: Any) -> list[int]:
    """The number of neurons of every block of a LlamaForCausalLM."""
    return [layer.mlp.down_proj.in_features for layer in model.model.layers]


def scale_output(ffn: OrdinaryBlock, scale: float) -> OrdinaryBlock:
    """The block whose output is `scale` times as large."""
    if scale == 1.0:
        return ffn
    bias = None if ffn.bias is None else ffn.bias * scale
    return replace(ffn, outer=ffn.outer * scale, bias=bias)


def find_window(config: Any) -> int | None:
    """The model's sliding attention window in tokens, or None if it is not shorter than the context."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and "sliding_attention" not in kinds:
        return None
    window = getattr(config, "sliding_window", None)
    return window if window is not None and window < config.max_position_embeddings else None


def llama_config(model: Any) -> LlamaConfig:
    """The LlamaConfig of a Llama-like model, with the source's block width."""
    config = stock_config(model)
    state = tensors_with_stock_names(model)
    rope = {key: value for key, value in config.rope_parameters.items() if key != "partial_rotary_factor"}
    return LlamaConfig(
        **{name: getattr(config, name) for name in SHARED_SETTINGS if hasattr(config, name)},
        max_position_embeddings=find_window(config) or config.max_position_embeddings,
        head_dim=getattr(config, "head_dim", None),
        rope_parameters=rope,
        attention_bias=any(".self_attn." in name and name.endswith("bias") for name in state),
        mlp_bias=False,
        architectures=["LlamaForCausalLM"],
    )


def llama_tensors(model: Any, config: LlamaConfig) -> dict[str, Tensor]:
    """Every tensor outside the feed-forward blocks, under the name that it has in a Llama."""
    source = model.config
    tensors: dict[str, Tensor] = {}
    group = config.num_attention_heads // config.num_key_value_heads
    multipliers = find_multipliers(source, config)
    for name, tensor in tensors_with_stock_names(model).items():
        if ".qkv_proj." in name:
            keys = len(tensor) // (group + 2)
            parts = torch.split(tensor, [group * keys, keys, keys])
            tensors |= {
                name.replace("qkv_proj", f"{letter}_proj"): part for letter, part in zip("qkv", parts, strict=True)
            }
        elif ".mlp." not in name:
            tensors[name] = tensor
    for name, tensor in tensors.items():
        part = name.rsplit(".", 2)[-2]
        if part in ("q_proj", "k_proj") and LLAMA_TYPES[source.model_type]:
            tensors[name] = tensor = pairs_to_halves(tensor, config.head_dim)
        scale = multipliers["attention"] if part == "q_proj" else multipliers["residual"] if part == "o_proj" else 1.0
        if scale != 1.0:
            tensors[name] = tensor * scale
    if multipliers["embedding"] != 1.0:
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"] * multipliers["embedding"]
    head = multipliers["logits"] * (multipliers["embedding"] if source.tie_word_embeddings else 1.0)
    if head != 1.0:  # goes into the last norm, so that tied weights stay tied
        tensors["model.norm.weight"] = tensors["model.norm.weight"] / head
    return tensors


def find_multipliers(source: Any, config: LlamaConfig) -> dict[str, float]:
    """The factors that a family (Granite) multiplies by while it computes; a Llama has none."""
    attention = getattr(source, "attention_multiplier", None)
    return {
        "embedding": getattr(source, "embedding_multiplier", 1.0),
        "attention": 1.0 if attention is None else attention * config.head_dim**0.5,
        "residual": getattr(source, "residual_multiplier", 1.0),
        "logits": getattr(source, "logits_scaling", 1.0),
    }


def pairs_to_halves(tensor: Tensor, head: int) -> Tensor:
    """Reorder the rows of every head from neighbouring pairs to two halves, which is what a Llama rotates."""
    shape = tensor.shape
    return tensor.reshape(-1, head // 2, 2, *shape[1:]).transpose(1, 2).reshape(shape)
