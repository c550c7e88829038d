"""SVD-LLM: every matrix of a decoder layer as two of low rank, whitened by its input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from compressor.models.blocks import find_attention
from compressor.models.heads import layout_of
from peer_methods.common import (
    Inapplicable,
    Subject,
    as_linear,
    ffn_linears,
    linears_in,
    ridged,
    share_copy,
    weight_and_bias,
)
from peer_methods.moments import measure_moments


@torch.no_grad()
def svd(subject: Subject, parameters: int) -> Any:
    """All linears of the decoder layers are cut to the same share of their parameters, as the paper has it."""
    model, moments = subject.model, measure_moments(subject)
    attention = {block.layer: block for block in find_attention(model)} if moments[0].attention is not None else {}
    inputs: dict[str, tuple[int, str, str]] = {}  # by linear: the layer, branch and name of what enters it
    for block in subject.blocks:
        ups, down = ffn_linears(model, block)
        inputs |= dict.fromkeys(ups, (block.layer, "ffn", "x")) | {down: (block.layer, "ffn", "a")}
        for path in linears_in(model, attention[block.layer].path) if attention else ():
            last = path.endswith(f".{layout_of(model).output}")
            inputs[path] = (block.layer, "attention", "c" if last else "x")
    linears = {path: weight_and_bias(model, path) for path in inputs}
    ratio = 1 - parameters / sum(weight.numel() for weight, _ in linears.values())
    if ratio <= 0:
        raise Inapplicable("that is more than the matrices of its layers have")
    changed = share_copy(model)
    for block in subject.blocks:
        layer = moments[block.layer]
        for path, (number, branch, name) in inputs.items():
            if number == block.layer:
                weight, bias = linears[path]
                rank = max(1, int(ratio * weight.numel() / sum(weight.shape)))  # at least what was asked for goes
                changed.set_submodule(path, low_rank(weight, bias, layer.part(branch, name, name), rank))
    return changed


def low_rank(weight: Tensor, bias: Tensor | None, gram: Tensor, rank: int) -> nn.Sequential:
    """The pair of linears of this rank that is nearest to the weight W on inputs of this Gram matrix S Sᵀ.

    W S = U Σ Vᵀ is truncated, and U_r Σ_r V_rᵀ S⁻¹ = U_r U_rᵀ W, which needs no inverse.
    """
    left, _, _ = torch.linalg.svd(weight.double() @ torch.linalg.cholesky(ridged(gram)), full_matrices=False)
    kept = left[:, :rank]
    return nn.Sequential(as_linear(kept.T @ weight.double(), None), as_linear(kept, bias))
