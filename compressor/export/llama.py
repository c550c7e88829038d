"""Convert a compressed model of a Llama-like family to a Llama, which llama.cpp, vLLM and transformers can run.

Multipliers that a family applies while it computes (Granite) go into the weights, fused matrices are split, and rows of
interleaved rotations are reordered. All of this is exact. Families whose layers compute something else are refused.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

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


@dataclass(frozen=True)
class Llama:
    """A compressed model as a LlamaForCausalLM whose blocks may have different widths."""

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
    model: Any, *, uniform: bool = False, multiple: int = 1, keep_original_widths: bool = False
) -> Llama:
    """Convert a compressed model to a Llama.

    Each block gets the width that it needs, rounded up to a multiple; with `uniform`, all get the largest of these.
    With `keep_original_widths`, blocks that were not replaced keep their width, even if it is not a multiple.
    """
    refuse_other_types(model)
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
    folded = fold_blocks(model, layout)
    blocks = [
        scale_output(ffn, multipliers["residual"]).padded(width) for ffn, width in zip(folded, widths, strict=True)
    ]
    tensors = llama_tensors(model, config)
    llama = assemble(config, layout, tensors, blocks, dict(model.named_buffers()))
    llama.generation_config = copy.deepcopy(model.generation_config)
    scaled = any(multiplier != 1.0 for multiplier in multipliers.values())
    return Llama(llama, layout, needed, find_window(model.config), scaled)


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
    state = model.state_dict()
    rope = {key: value for key, value in config.rope_parameters.items() if key != "partial_rotary_factor"}
    return LlamaConfig(
        **{name: getattr(config, name) for name in SHARED_SETTINGS if hasattr(config, name)},
        max_position_embeddings=find_window(config) or config.max_position_embeddings,
        head_dim=getattr(config, "head_dim", None),
        rope_parameters=rope,
        attention_bias=any(name.startswith("model.layers.0.self_attn.") and name.endswith("bias") for name in state),
        mlp_bias=False,
        architectures=["LlamaForCausalLM"],
    )


def llama_tensors(model: Any, config: LlamaConfig) -> dict[str, Tensor]:
    """Every tensor outside the feed-forward blocks, under the name that it has in a Llama."""
    source = model.config
    tensors: dict[str, Tensor] = {}
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    multipliers = find_multipliers(source, config)
    for name, tensor in model.state_dict().items():
        if ".qkv_proj." in name:
            parts = tensor.split([queries, keys, keys])
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
