"""Group OBS with refit (SlimGPT, the local step of Týr): neurons and heads, each where it costs least.

Without the columns g of a weight W, whose inputs have the Gram matrix H, the best refit of the others costs
tr(W_gᵀ ([H⁻¹]_gg)⁻¹ W_g), and is W − W_g ([H⁻¹]_gg)⁻¹ [H⁻¹]_g:. Layers are pruned in order, on the inputs they get.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compressor.models.heads import layout_of
from compressor.models.residual import open_stream
from peer_methods.common import (
    BATCH,
    Inapplicable,
    Method,
    Subject,
    ffn_linears,
    keep_neurons,
    neuron_count,
    neuron_size,
    ridged,
    share_copy,
    share_neurons,
    weight_and_bias,
)
from peer_methods.moments import attention_of, input_gram, measure_moments
from peer_methods.unit_attention import UnitAttention, UnitWeights

DAMPING = 0.01  # of the mean diagonal of H
ROUNDS = 128  # at most, in which the columns of one matrix go: wide FFNs lose several neurons at a time


class Elimination:
    """A weight [out, columns] that loses groups [groups, columns of one] of its columns."""

    def __init__(self, gram: Tensor, weight: Tensor, groups: Tensor, damping: float = DAMPING) -> None:
        self.inverse = torch.linalg.inv(ridged(gram.double(), damping))
        self.weight, self.groups = weight.to(torch.float64, copy=True), groups
        self.alive = torch.ones(len(groups), dtype=torch.bool)

    def costs(self) -> Tensor:
        """What each group costs if it goes next; those that went cost infinitely much."""
        costs = torch.full((len(self.groups),), math.inf, dtype=torch.float64)
        groups = self.groups[self.alive]
        inner = self.inverse[groups[:, :, None], groups[:, None, :]]
        weights = self.weight[:, groups].permute(1, 2, 0)  # [groups, columns of one, out]
        costs[self.alive] = (weights * torch.linalg.solve(inner, weights)).sum((1, 2))
        return costs

    def remove(self, chosen: Tensor) -> None:
        """Remove these groups together, and refit the other columns."""
        columns = self.groups[chosen].flatten()
        rows = self.inverse[columns]
        factor = torch.linalg.solve(rows[:, columns], rows)
        self.weight -= self.weight[:, columns] @ factor
        self.inverse -= rows.T @ factor
        self.weight[:, columns] = 0.0
        self.alive[chosen] = False

    def shrink(self, count: int) -> list[float]:
        """Remove so many groups, the cheapest first; what each of them cost when it was its turn."""
        spent: list[float] = []
        at_once = max(1, math.ceil(count / ROUNDS))
        while len(spent) < count:
            costs = self.costs()
            chosen = costs.argsort()[: min(at_once, count - len(spent))]
            spent += costs[chosen].tolist()
            self.remove(chosen)
        return spent

    @property
    def kept(self) -> Tensor:
        return self.alive.nonzero()[:, 0]


def prune_units(units: UnitWeights, gram: Tensor, count: int) -> UnitWeights:
    """The attention without so many units: key-value heads with their query heads."""
    elimination = Elimination(gram, units.outer, units.columns)
    elimination.shrink(count)
    return units.with_outer(elimination.weight).keep_units(elimination.kept)


@torch.no_grad()
def prune_in_order(subject: Subject, neurons: Sequence[int], units_removed: Sequence[int] | None = None) -> Any:
    """A copy whose layers lose so many neurons and units each."""
    changed, blocks = share_copy(subject.model), subject.blocks
    attention, units = attention_of(subject) if units_removed else ({}, {})
    stream = open_stream(changed, blocks, subject.windows, BATCH)
    for block in blocks:
        if units_removed and units_removed[block.layer]:
            path = attention[block.layer].path
            gram = input_gram(changed, stream, f"{path}.{layout_of(changed).output}")
            pruned = prune_units(units[block.layer], gram, units_removed[block.layer])
            changed.set_submodule(path, UnitAttention(pruned))
        if neurons[block.layer]:
            down = ffn_linears(changed, block)[1]
            weight, _ = weight_and_bias(changed, down)
            gram = input_gram(changed, stream, down)
            elimination = Elimination(gram, weight, torch.arange(weight.shape[1])[:, None])
            elimination.shrink(neurons[block.layer])
            kept = elimination.kept
            keep_neurons(changed, block, kept, elimination.weight[:, kept])
        stream.step()
    return changed


def neurons_only(subject: Subject, parameters: int, *, logarithmic: bool) -> Any:
    """The same share of the neurons of every FFN, or one that grows with the logarithm of the depth (SlimGPT)."""
    depth = len(subject.blocks)
    shares = [math.log(layer + 1) for layer in range(depth)] if logarithmic and depth > 1 else None
    return prune_in_order(subject, share_neurons(subject, parameters, shares))


def neurons_and_heads(subject: Subject, parameters: int) -> Any:
    """The same share of the attention and of the FFN parameters. Units go where they cost least of their attention's
    output, in whichever layers; every layer keeps one. Neurons make up for what whole units miss."""
    blocks, moments = subject.blocks, measure_moments(subject)
    _, units = attention_of(subject)
    offers = []  # (dearest share of the output up to here, its size, layer)
    for block in blocks:
        own = units[block.layer]
        gram = moments[block.layer].part("attention", "c", "c")
        elimination = Elimination(gram, own.outer, own.columns)
        energy = (elimination.weight @ gram * elimination.weight).sum().item()
        size = own.parameters - own.keep_units(torch.arange(len(own.keys) - 1)).parameters
        dearest = 0.0
        for cost in elimination.shrink(len(own.keys) - 1):
            dearest = max(dearest, cost / energy)
            offers.append((dearest, size, block.layer))
    ffns = sum(neuron_count(subject.model, block) * neuron_size(subject.model, block) for block in blocks)
    attention = sum(own.parameters for own in units.values())
    wanted, freed = parameters * attention / (attention + ffns), 0
    removed = [0] * len(blocks)
    for _, size, layer in sorted(offers):
        if freed + size / 2 > wanted:
            break
        removed[layer] += 1
        freed += size
    if not freed:
        raise Inapplicable("its attention has too few units for this size: it would be neurons alone")
    return prune_in_order(subject, share_neurons(subject, parameters - freed), removed)


METHODS: dict[str, Method] = {
    "obs": partial(neurons_only, logarithmic=False),
    "obs-log": partial(neurons_only, logarithmic=True),
    "obs-heads": neurons_and_heads,
}
