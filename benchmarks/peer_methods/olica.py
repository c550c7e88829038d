"""Olica (ICML 2025), its FFN part: neurons by activation-weighted size, then a low-rank linear correction of what is
missing, from the block's own input, in the blocks where that is most linear. The nearest relative of our hybrid form.

The paper's part for attention (rotated heads of which dimensions are dropped) is not here. The correction has a bias,
which the paper's has not, and is of the best low rank on the calibration rows: neither can hurt it there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from peer_methods.common import (
    Inapplicable,
    Subject,
    as_linear,
    ffn_linears,
    keep_neurons,
    ridged,
    share_copy,
    share_neurons,
    weight_and_bias,
)
from peer_methods.moments import LayerMoments, measure_moments

CORRECTED = 1 / 3  # of the blocks: those whose missing part is most linear
RANK = 1 / 16  # of the width
CORRECTION_RIDGE = 1e-4  # of the mean diagonal


class Corrected(nn.Module):
    """An FFN with a low-rank map of its input beside it."""

    def __init__(self, ffn: nn.Module, down: Tensor, up: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.ffn, self.down, self.up = ffn, as_linear(down, None), as_linear(up, bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.ffn(hidden_states) + self.up(self.down(hidden_states))


@dataclass(frozen=True)
class Residual:
    """What an FFN misses without some neurons, e = W_D a_D, and the best linear map of its input to that."""

    weight: Tensor  # [out, in]
    bias: Tensor
    inputs: Tensor  # covariance of x
    recoverable: float  # R² of the map

    def of_rank(self, rank: int) -> tuple[Tensor, Tensor]:
        """The best map of this rank as two factors, down and up: the fitted values' leading directions are kept."""
        _, vectors = torch.linalg.eigh(self.weight @ self.inputs @ self.weight.T)
        leading = vectors[:, -rank:]
        return leading.T @ self.weight, leading


def fit_residual(layer: LayerMoments, outputs: Tensor, dropped: Tensor) -> Residual:
    """The least-squares map of the FFN's input to what the dropped neurons wrote."""
    lost = outputs[:, dropped].double()
    mean_x, mean_a = layer.part("ffn", "x", "1")[:, 0], layer.part("ffn", "a", "1")[dropped, 0]
    inputs = layer.part("ffn", "x", "x") - mean_x[:, None] * mean_x
    cross = (layer.part("ffn", "x", "a")[:, dropped] - mean_x[:, None] * mean_a) @ lost.T
    activations = layer.part("ffn", "a", "a")[dropped][:, dropped] - mean_a[:, None] * mean_a
    weight = torch.linalg.solve(ridged(inputs, CORRECTION_RIDGE), cross).T
    energy = (lost @ activations * lost).sum()
    error = energy - 2 * (weight.T * cross).sum() + (weight @ inputs * weight).sum()
    recoverable = 1 - (error / energy.clamp_min(1e-300)).item()
    return Residual(weight, lost @ mean_a - weight @ mean_x, inputs, recoverable)


@torch.no_grad()
def olica(subject: Subject, parameters: int) -> Any:
    """The same share of the neurons of every FFN, so many that the corrections are paid for."""
    blocks, moments = subject.blocks, measure_moments(subject)
    if any(block.bypass or block.residual_inside for block in blocks):
        raise Inapplicable("its FFN is no module of its own, or adds the residual itself")
    width = blocks[0].width
    rank, count = max(1, round(RANK * width)), max(1, round(CORRECTED * len(blocks)))
    changed = share_copy(subject.model)
    residuals: dict[int, Residual] = {}
    numbers = share_neurons(subject, parameters + count * (2 * rank + 1) * width)
    for block, removed in zip(blocks, numbers, strict=True):
        layer = moments[block.layer]
        weight, _ = weight_and_bias(changed, ffn_linears(changed, block)[1])
        importance = weight.norm(dim=0) * layer.part("ffn", "a", "a").diagonal().sqrt()
        order = importance.argsort()
        kept, dropped = order[removed:].sort().values, order[:removed]
        residuals[block.layer] = fit_residual(layer, weight, dropped)
        keep_neurons(changed, block, kept, weight[:, kept])
    best = sorted(residuals, key=lambda layer: -residuals[layer].recoverable)[:count]
    for block in blocks:
        if block.layer in best:
            residual = residuals[block.layer]
            ffn = changed.get_submodule(block.path)
            changed.set_submodule(block.path, Corrected(ffn, *residual.of_rank(rank), residual.bias))
    return changed
