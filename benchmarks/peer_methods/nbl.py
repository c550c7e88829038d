"""NBL (2505.21077): attention as a linear map of its own position, in the layers where that is nearest to the truth."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from peer_methods.common import Inapplicable, Subject, as_linear, ridged, share_copy
from peer_methods.moments import LayerMoments, attention_of, measure_moments
from peer_methods.unit_attention import UnitWeights


class LinearAttention(nn.Module):
    """W x + b in place of attention."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        return self.linear(hidden_states), None


def covariances(layer: LayerMoments, units: UnitWeights) -> dict[str, Tensor]:
    """Means and covariances of x, y and y + h: what enters attention, what it puts out, and that with its residual."""
    outer = units.outer.double()
    bias = torch.zeros(len(outer)).double() if units.output_bias is None else units.output_bias.double()

    def part(first: str, second: str) -> Tensor:
        return layer.part("attention", first, second)

    means = {name: part(name, "1")[:, 0] for name in ("x", "c", "h")}

    def covariance(first: str, second: str) -> Tensor:
        return part(first, second) - means[first][:, None] * means[second]

    xy = covariance("x", "c") @ outer.T
    mixed = outer @ covariance("c", "h")
    return {
        "x": means["x"],
        "y": outer @ means["c"] + bias,
        "xx": covariance("x", "x"),
        "xy": xy,
        "xs": xy + covariance("x", "h"),  # s = y + h
        "ss": outer @ covariance("c", "c") @ outer.T + mixed + mixed.T + covariance("h", "h"),
    }


def cca_bound(found: dict[str, Tensor]) -> float:
    """Σ (1 − ρ²) over the canonical correlations of x and y + h: a bound of the normalised error of the best map."""
    explained = torch.linalg.solve(ridged(found["xx"]), found["xs"])
    correlations = torch.linalg.solve(ridged(found["ss"]), found["xs"].T @ explained)
    return len(correlations) - correlations.trace().item()


def linear_map(found: dict[str, Tensor]) -> nn.Linear:
    """W = C_yx C_xx⁻¹ and b = E y − W E x."""
    weight = torch.linalg.solve(ridged(found["xx"]), found["xy"]).T
    return as_linear(weight, found["y"] - weight @ found["x"])


@torch.no_grad()
def nbl(subject: Subject, parameters: int) -> Any:
    """As few attentions become linear maps as remove so many parameters: those of the least bound."""
    attention, units = attention_of(subject)
    moments = measure_moments(subject)
    width = attention[0].width
    saved = min(block.parameters for block in attention.values()) - width * (width + 1)
    count = math.ceil(parameters / saved) if saved > 0 else len(attention) + 1
    if count > len(attention):
        raise Inapplicable(
            f"the attention of all {len(attention)} layers as linear maps frees {saved * len(attention):,}"
        )
    bounds = {layer: cca_bound(covariances(moments[layer], units[layer])) for layer in attention}
    changed = share_copy(subject.model)
    for layer in sorted(bounds, key=lambda layer: bounds[layer])[:count]:
        found = covariances(moments[layer], units[layer])
        changed.set_submodule(attention[layer].path, LinearAttention(linear_map(found)))
    return changed
