"""Attention that was compressed, as other runtimes know attention: by its heads.

What takes the place of attention keeps some of its heads (pruned), keeps some with a low-rank map beside them (hybrid),
or keeps none: a linear map of the layer's normed input (linear, lowrank) or a constant (bias). A head whose rows and
columns are all zero adds nothing, so where a runtime wants as many heads in every layer, zeros are added, exactly.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from compressor.modeling_compressor import replacements
from compressor.models.blocks import Block, find_attention, find_blocks
from compressor.runtime.errors import InputError

KINDS_WITH_HEADS = ("pruned", "hybrid")
DESCRIPTIONS = {
    "hybrid": "some heads with a low-rank map beside them",
    "linear": "a linear map",
    "lowrank": "a low-rank map",
    "bias": "a constant",
}


@dataclass(frozen=True)
class CompressedAttention:
    """The attention of one layer that was compressed, and the module that is there now."""

    block: Block
    module: Any

    @property
    def layer(self) -> int:
        return self.block.layer

    @property
    def path(self) -> str:
        return self.block.path

    @property
    def kind(self) -> str:
        return str(self.module.kind)

    @property
    def units(self) -> int:
        """How many key-value heads are left."""
        return len(self.module.heads) if self.kind in KINDS_WITH_HEADS else 0

    @property
    def bias(self) -> Tensor | None:
        """What it adds for every input; None if that is zero."""
        bias: Tensor | None = self.module.output_bias.detach() if getattr(self.module, "biased", True) else None
        return bias if bias is not None and bias.any() else None

    @property
    def matrix(self) -> Tensor:
        """The linear map [width, width] of attention without heads."""
        module = self.module
        matrix: Tensor = module.linear.weight if module.rank is None else module.up.weight @ module.down.weight
        return matrix.detach()

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the heads by their names in the stock module; an output bias of zeros is left out."""
        if self.kind not in KINDS_WITH_HEADS:
            return {}
        found = dict(self.module.attention.state_dict())
        if self.bias is None:
            del found[f"{self.module.output[0]}.bias"]
        return found


class NoAttention(nn.Module):
    """Attention that adds nothing to the stream, and that keeps no keys and values."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        return torch.zeros_like(hidden_states), None


def find_compressed_attention(model: nn.Module) -> list[CompressedAttention]:
    """The attention of every layer in which it was compressed, in order of depth."""
    found = replacements(model)
    return [CompressedAttention(block, found[block.path]) for block in find_attention(model) if block.path in found]


def tensors_with_stock_names(model: Any) -> dict[str, Tensor]:
    """Every tensor of the model; those of kept heads have the names of the stock module, those of maps are left out."""
    state = dict(model.state_dict())
    for attention in find_compressed_attention(model):
        for name in attention.module.state_dict():
            del state[f"{attention.path}.{name}"]
        state |= {f"{attention.path}.{name}": tensor for name, tensor in attention.tensors().items()}
    return state


def buffers_with_stock_names(model: Any) -> dict[str, Tensor]:
    """Every buffer of the model; those of kept heads have the names of the stock module."""
    inside = {f"{attention.path}.attention.": f"{attention.path}." for attention in find_compressed_attention(model)}
    found = {}
    for name, buffer in model.named_buffers():
        prefix = next((prefix for prefix in inside if name.startswith(prefix)), "")
        found[inside.get(prefix, "") + name.removeprefix(prefix)] = buffer
    return found


def has_attention_of(model: nn.Module, kinds: Collection[str]) -> bool:
    return any(attention.kind in kinds for attention in find_compressed_attention(model))


def refuse_attention(model: nn.Module, kinds: Collection[str], reason: str) -> None:
    """Refuse a model in which attention became one of these kinds, and name the layers."""
    found = [attention for attention in find_compressed_attention(model) if attention.kind in kinds]
    if found:
        is_now = " or ".join(DESCRIPTIONS[kind] for kind in dict.fromkeys(attention.kind for attention in found))
        others = [kind for kind in ("linear", "lowrank", "pruned", "hybrid", "bias") if kind not in kinds]
        raise InputError(
            f"the attention of {name_layers(attention.layer for attention in found)} is {is_now}, and {reason}; "
            f"compress again with --kinds {','.join(others)}"
        )


def refuse_biased_maps(model: nn.Module, reason: str) -> None:
    """Refuse a model in which attention became a linear map with a bias that is not zero, and name the layers."""
    found = [each for each in find_compressed_attention(model) if each.kind in ("linear", "lowrank")]
    layers = [each.layer for each in found if each.bias is not None]
    if layers:
        raise InputError(
            f"the attention of {name_layers(layers)} is a linear map with a bias, and {reason}; compress again with "
            "--kinds pruned,bias"
        )


def refuse_first_constant(model: nn.Module) -> None:
    """Refuse a constant in the first layer, where no block stands before it that could add the constant."""
    for attention in find_compressed_attention(model):
        if attention.layer == 0 and attention.kind == "bias":
            raise InputError("the attention of layer 0 is a constant, and no block before it could add that")


def name_layers(layers: Any) -> str:
    """Such as "layer 3" or "layers 3, 5 and 8"."""
    *first, last = [str(layer) for layer in layers]
    return f"layers {', '.join(first)} and {last}" if first else f"layer {last}"


def most_units(model: nn.Module, units: int) -> int:
    """The most key-value heads that a layer has left, where stock attention has so many."""
    compressed = {attention.layer: attention.units for attention in find_compressed_attention(model)}
    return max(1, *(compressed.get(block.layer, units) for block in find_blocks(model)))


@dataclass(frozen=True)
class HeadSizes:
    """The sizes of an attention with projections of their own for queries, keys and values."""

    units: int  # key-value heads
    queries: int  # query heads of each
    width: int  # of a head


def pad_heads(tensors: Mapping[str, Tensor], now: HeadSizes, then: HeadSizes) -> dict[str, Tensor]:
    """The tensors of Llama's projections (such as q_proj.weight) with heads of zeros added to every unit, and units."""
    padded = dict(tensors)
    for name, tensor in tensors.items():
        part, _, kind = name.partition(".")
        if part not in ("q_proj", "k_proj", "v_proj", "o_proj") or (part, kind) == ("o_proj", "bias"):
            continue
        rows = tensor.T if part == "o_proj" else tensor
        heads = rows.reshape(now.units, -1, *rows.shape[1:])
        more = (then.queries - now.queries) * now.width if part in ("q_proj", "o_proj") else 0
        behind = (0, 0) * (heads.ndim - 2)
        rows = functional.pad(heads, (*behind, 0, more, 0, then.units - now.units)).flatten(0, 1)
        padded[name] = (rows.T if part == "o_proj" else rows).contiguous()
    return padded
