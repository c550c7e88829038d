"""Attention in plain PyTorch whose key-value heads may go, and whose queries, keys and values may be narrower.

A unit is a key-value head with its query heads. Of the rotary pairs of queries and keys, every unit knows which it has
left: pair i is turned by the angle that belongs to i, whatever its place is now.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from compressor.models.blocks import Block
from compressor.models.heads import AttentionCall, describe_heads, is_close, record_attention
from compressor.models.neurons import Matrix
from peer_methods.common import Inapplicable, as_linear


@dataclass(frozen=True)
class UnitWeights:
    """The matrices of one attention, unit by unit. Biases are None where it has none."""

    queries: Tensor  # [units, heads of a unit, size, width]
    keys: Tensor  # [units, size, width]
    values: Tensor  # [units, value size, width]
    outputs: Tensor  # [units, heads of a unit, width, value size]
    query_bias: Tensor | None  # [units, heads of a unit, size]
    key_bias: Tensor | None
    value_bias: Tensor | None
    output_bias: Tensor | None  # [width]
    dims: Tensor  # [units, size]: which of the stock head's dimensions these are
    rotary: bool
    scaling: float
    head_width: int

    @property
    def parameters(self) -> int:
        tensors = (self.queries, self.keys, self.values, self.outputs)
        biases = (self.query_bias, self.key_bias, self.value_bias, self.output_bias)
        return sum(tensor.numel() for tensor in (*tensors, *biases) if tensor is not None)

    @property
    def columns(self) -> Tensor:
        """[units, columns]: the columns of the output projection's input that belong to each unit."""
        units, heads, _, size = self.outputs.shape
        return torch.arange(units * heads * size).view(units, heads * size)

    @property
    def outer(self) -> Tensor:
        """[width, columns]: the weight of the output projection."""
        return self.outputs.permute(2, 0, 1, 3).flatten(1)

    def with_outer(self, outer: Tensor) -> UnitWeights:
        units, heads, _, size = self.outputs.shape
        return replace(self, outputs=outer.unflatten(1, (units, heads, size)).permute(1, 2, 0, 3))

    def keep_units(self, kept: Tensor) -> UnitWeights:
        names = ("queries", "keys", "values", "outputs", "query_bias", "key_bias", "value_bias", "dims")
        tensors = {name: getattr(self, name) for name in names}
        return replace(self, **{name: tensor[kept] for name, tensor in tensors.items() if tensor is not None})

    def keep_dims(self, kept: Tensor) -> UnitWeights:
        """Queries and keys with these of the dimensions that they have now: [units, size]."""

        def keep(tensor: Tensor | None, axis: int) -> Tensor | None:
            if tensor is None:
                return None
            shape = [len(kept), *[1] * (tensor.ndim - 1)]
            shape[axis] = kept.shape[1]
            index = kept.view(shape).expand(*tensor.shape[:axis], kept.shape[1], *tensor.shape[axis + 1 :])
            return tensor.gather(axis, index)

        biases = {"query_bias": keep(self.query_bias, 2), "key_bias": keep(self.key_bias, 1)}
        weights = {"queries": keep(self.queries, 2), "keys": keep(self.keys, 1), "dims": keep(self.dims, 1)}
        return replace(self, **weights, **biases)


class UnitAttention(nn.Module):
    """Causal attention with these weights; it takes the arguments of the stock module, and no cache."""

    dims: Tensor

    def __init__(self, weights: UnitWeights) -> None:
        super().__init__()
        self.units, self.heads = weights.queries.shape[:2]
        self.rotary, self.scaling, self.head_width = weights.rotary, weights.scaling, weights.head_width
        self.register_buffer("dims", weights.dims)
        biases = (weights.query_bias, weights.key_bias, weights.value_bias)
        matrices = [weights.queries.flatten(0, 2), weights.keys.flatten(0, 1), weights.values.flatten(0, 1)]
        vectors = [None if bias is None else bias.flatten() for bias in biases]
        self.queries, self.keys, self.values = map(as_linear, matrices, vectors)
        self.output = as_linear(weights.outer, weights.output_bias)

    def split(self, hidden_states: Tensor, position_embeddings: Any = None) -> tuple[Tensor, Tensor]:
        """Queries [batch, units, heads of a unit, tokens, size] and keys, one head a unit, as they are compared."""
        queries = self.queries(hidden_states).unflatten(-1, (self.units, self.heads, -1)).permute(0, 2, 3, 1, 4)
        keys = self.keys(hidden_states).unflatten(-1, (self.units, 1, -1)).permute(0, 2, 3, 1, 4)
        if self.rotary:
            cos, sin = (part[..., self.dims].transpose(1, 2)[:, :, None] for part in position_embeddings)
            queries, keys = (rows * cos + turn(rows) * sin for rows in (queries, keys))
        return queries, keys

    def forward(
        self, hidden_states: Tensor, *_: Any, attention_mask: Any = None, position_embeddings: Any = None, **__: Any
    ) -> tuple[Tensor, None]:
        queries, keys = self.split(hidden_states, position_embeddings)
        values = self.values(hidden_states).unflatten(-1, (self.units, 1, -1)).permute(0, 2, 3, 1, 4)
        keys, values = (rows.expand(-1, -1, self.heads, -1, -1).flatten(1, 2) for rows in (keys, values))
        mixed = nn.functional.scaled_dot_product_attention(
            queries.flatten(1, 2),
            keys,
            values,
            attn_mask=attention_mask,
            is_causal=attention_mask is None,
            scale=self.scaling,
        )
        return self.output(mixed.transpose(1, 2).flatten(2)), None


def turn(rows: Tensor) -> Tensor:
    """Every rotary pair (i, i + half) turned by a right angle."""
    first, second = rows.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


@torch.no_grad()
def read_units(model: Any, blocks: list[Block]) -> dict[int, UnitWeights]:
    """The units of the attention of every layer, by layer. Each is tried: it computes what the stock module does."""
    calls = record_attention(model, blocks)
    return {block.layer: units_of(model, block, calls.get(block.layer)) for block in blocks}


def units_of(model: Any, block: Block, call: AttentionCall | None) -> UnitWeights:
    heads = None if call is None else describe_heads(model, block, call)
    if heads is None or call is None or heads.residual_inside or heads.layout.fused == "interleaved":
        raise Inapplicable(f"the heads of {block.path} cannot be told apart")
    value_size = heads.columns // heads.queries
    sizes = [heads.queries * heads.head_width, heads.head_width, value_size]
    matrices = [Matrix(getattr(heads.module, name)) for name in heads.layout.inputs]
    weights = torch.cat([matrix.weight for matrix in matrices]).split([heads.count * size for size in sizes])
    vectors = [matrix.bias for matrix in matrices if matrix.bias is not None]
    biases = torch.cat(vectors).split([heads.count * size for size in sizes]) if vectors else [None] * 3
    queries, keys, values = (weight.unflatten(0, (heads.count, -1)) for weight in weights)
    query_bias, key_bias, value_bias = (None if b is None else b.unflatten(0, (heads.count, -1)) for b in biases)
    rotary = call.kwargs.get("position_embeddings") is not None
    units = UnitWeights(
        queries.unflatten(1, (heads.queries, -1)),
        keys,
        values,
        heads.outer_matrix.weight.unflatten(1, (heads.count, heads.queries, value_size)).permute(1, 2, 0, 3),
        None if query_bias is None else query_bias.unflatten(1, (heads.queries, -1)),
        key_bias,
        value_bias,
        heads.outer_matrix.bias,
        torch.arange(heads.head_width).expand(heads.count, -1),
        rotary,
        getattr(heads.module, "scaling", heads.head_width**-0.5),
        heads.head_width,
    )
    try:
        output = UnitAttention(units)(*call.args, **call.kwargs)[0]
        same = is_close(output, call.output[0], output.dtype)
    except (RuntimeError, IndexError, TypeError):
        same = False
    if not same:
        raise Inapplicable(f"{block.path} does more than attention by heads does")
    return units
