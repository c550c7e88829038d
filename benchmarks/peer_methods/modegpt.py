"""MoDeGPT (2408.09632): every module of a layer is cut by the decomposition that suits it, with its own allocation.

FFN: Nyström on the activations. Values and outputs: an SVD per head. Queries and keys: rotary pairs are dropped. A
layer of little influence gives more than others.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from peer_methods.common import (
    Inapplicable,
    Subject,
    ffn_linears,
    keep_neurons,
    neuron_count,
    neuron_size,
    ridged,
    share_copy,
    weight_and_bias,
)
from peer_methods.moments import LayerMoments, attention_of, measure_moments
from peer_methods.unit_attention import UnitAttention, UnitWeights

LEVERAGE_RIDGE = 1e-3  # λ, of the mean diagonal of C
SHRINKAGE = 1e-6  # of the same, where C_SS is inverted
TEMPERATURE = 0.1  # ε of the allocation


def allocate(importance: Tensor, mean: float) -> Tensor:
    """The share that every layer loses: a softmax of −importance / ε that has this mean, each at most 1."""
    shares = (-importance.double() / TEMPERATURE).softmax(0) * mean * len(importance)
    while (shares > 1 + 1e-12).any():
        full = shares >= 1
        left = mean * len(shares) - full.sum()
        shares = torch.where(full, 1.0, shares * left / shares[~full].sum())
    return shares


def leverage(gram: Tensor) -> Tensor:
    """Ridge leverage scores diag(C (C + λI)⁻¹)."""
    return (gram * torch.linalg.inv(ridged(gram, LEVERAGE_RIDGE)).T).sum(1)


def nystroem(gram: Tensor, outputs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` neurons of the largest leverage, and their output weights (C_SS⁻¹ C_S: W)ᵀ [width, count]."""
    kept = leverage(gram).argsort(descending=True)[:count].sort().values
    return kept, refit(gram, outputs, kept)


def refit(gram: Tensor, outputs: Tensor, kept: Tensor) -> Tensor:
    """The output weights of these neurons that make up for the others."""
    inner = ridged(gram[kept][:, kept], SHRINKAGE)
    return torch.linalg.solve(inner, gram[kept] @ outputs.double().T).T


def drop_dims(units: UnitWeights, layer: LayerMoments, removed: int) -> UnitWeights:
    """Queries and keys without so many rotary pairs (i, i + half) in every unit; without rotations, dimensions.

    The score is E q_i²·E k_i² + E q_j²·E k_j², summed over the query heads of the unit, so that they keep the same.
    """
    assert layer.queries is not None
    assert layer.keys is not None
    scores = (layer.queries * layer.keys[:, None]).sum(1)
    if units.rotary:
        first, second = scores.chunk(2, dim=1)
        scores = first + second
    kept = scores.argsort(dim=1, descending=True)[:, : scores.shape[1] - removed].sort(dim=1).values
    return units.keep_dims(torch.cat([kept, kept + scores.shape[1]], dim=1) if units.rotary else kept)


def narrow_values(units: UnitWeights, layer: LayerMoments, size: int) -> UnitWeights:
    """Values and outputs of every unit with `size` value dimensions.

    The paper's SVD of C^½ W_v W_o, C of the attention's input, keeps the leading eigenvectors Q of S^½ W_oᵀ W_o S^½
    with S = E[v vᵀ]: new values Qᵀ S^-½ W_v, new outputs W_o S^½ Q. For query heads that share values our derivation
    (not the paper's) has W_oᵀ W_o summed over them, and S = Σ E[c cᵀ] of what they have mixed of the values.
    """
    heads = units.outputs.shape[1]
    values, outputs, biases = [], [], []
    for unit, own in enumerate(units.columns):
        if heads == 1:
            moment = value_moment(units, layer, unit)
        else:
            mixed = layer.part("attention", "c", "c")[own][:, own].unflatten(0, (heads, -1)).unflatten(2, (heads, -1))
            moment = torch.einsum("hahb->ab", mixed)
        outer = units.outputs[unit].double()
        eigenvalues, vectors = torch.linalg.eigh(ridged(moment))
        root = vectors * eigenvalues.sqrt() @ vectors.T
        inverse = vectors / eigenvalues.sqrt() @ vectors.T
        metric = root @ torch.einsum("hwa,hwb->ab", outer, outer) @ root
        leading = torch.linalg.eigh(metric).eigenvectors[:, -size:]
        down = leading.T @ inverse
        values.append(down @ units.values[unit].double())
        outputs.append(outer @ (root @ leading))
        if units.value_bias is not None:
            biases.append(down @ units.value_bias[unit].double())
    return replace(
        units,
        values=torch.stack(values),
        outputs=torch.stack(outputs),
        value_bias=torch.stack(biases) if biases else None,
    )


def value_moment(units: UnitWeights, layer: LayerMoments, unit: int) -> Tensor:
    """E[v vᵀ] of a unit's values."""
    weight = units.values[unit].double()
    found = weight @ layer.part("attention", "x", "x") @ weight.T
    if units.value_bias is not None:
        bias = units.value_bias[unit].double()
        crossed = (weight @ layer.part("attention", "x", "1")) * bias
        found = found + crossed + crossed.T + bias[:, None] * bias
    return found


def cut_attention(units: UnitWeights, layer: LayerMoments, share: float) -> UnitWeights:
    """Attention without this share of its value dimensions and of its rotary pairs, rounded; one of each stays."""
    size = units.values.shape[1]
    steps = units.keys.shape[1] // 2 if units.rotary else units.keys.shape[1]
    narrower = narrow_values(units, layer, size - min(round(share * size), size - 1))
    return drop_dims(narrower, layer, min(round(share * steps), steps - 1))


@torch.no_grad()
def modegpt(subject: Subject, parameters: int) -> Any:
    """Every layer loses its share: attention to the nearest dimension, neurons for what is missing then."""
    model, blocks, moments = subject.model, subject.blocks, measure_moments(subject)
    attention, units = attention_of(subject)
    sizes = [neuron_size(model, block) for block in blocks]
    counts = [neuron_count(model, block) for block in blocks]
    of_layers = [size * n + units[b.layer].parameters for b, size, n in zip(blocks, sizes, counts, strict=True)]
    if parameters > sum(of_layers):
        raise Inapplicable("that is more than its layers have")
    influence = torch.tensor([1 - moments[block.layer].similarity for block in blocks])
    shares = allocate(influence, parameters / sum(of_layers))
    changed = share_copy(model)
    missing = 0.0  # what the layers up to here have still to lose
    for block, share, own, size, count in zip(blocks, shares.tolist(), of_layers, sizes, counts, strict=True):
        layer, before = moments[block.layer], units[block.layer]
        after = cut_attention(before, layer, share)
        changed.set_submodule(attention[block.layer].path, UnitAttention(after))
        missing += share * own - (before.parameters - after.parameters)
        removed = min(max(0, -int(-missing // size)), count - 1)
        missing -= removed * size
        if removed:
            weight, _ = weight_and_bias(changed, ffn_linears(changed, block)[1])
            gram = layer.part("ffn", "a", "a")
            keep_neurons(changed, block, *nystroem(gram, weight, count - removed))
    if missing > 0.5:
        raise Inapplicable("its allocation asks for more than some layers have")
    return changed
