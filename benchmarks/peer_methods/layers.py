"""Whole layers dropped: ShortGPT, and ReplaceMe, which merges a linear map in place of those that go."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from compressor.evaluate.perplexity import evaluate
from compressor.models.blocks import Block
from compressor.runtime.context import RunContext
from peer_methods.common import (
    BATCH,
    Inapplicable,
    Method,
    Subject,
    as_linear,
    ffn_linears,
    observe,
    ridged,
    share_copy,
    weight_and_bias,
)

CUTS = 3  # ReplaceMe's best-ranked cuts, the best of which on CUT_TOKENS of calibration text is taken
CUT_TOKENS = 2048
POST_NORMS = ("post_feedforward_layernorm", "post_mlp_layernorm")


@cache
def similarities(model: Any, layers: tuple[str, ...], windows: Tensor) -> Tensor:
    """Mean cosine between the hidden states of every two depths: 0 enters the first layer, i leaves the i-th."""
    total = torch.zeros(())
    for seen in observe(model, windows, layers, lambda x, y: (x, y.clone())):
        states = torch.stack([seen[layers[0]][0], *(seen[path][1] for path in layers)])
        units = nn.functional.normalize(states, dim=-1).flatten(1)
        total = total + (units @ units.T).double()
    return total / windows.numel()


def drop_layers(model: Any, blocks: list[Block], dropped: Sequence[int]) -> Any:
    """A copy of the model without these decoder layers."""
    if len(dropped) >= len(blocks):
        raise Inapplicable(f"{len(dropped)} layers cannot be dropped from {len(blocks)}")
    changed = share_copy(model)
    kept = [block.index for block in blocks if block.index not in dropped]
    path, _, _ = blocks[0].layer_path.rpartition(".")
    layers: Any = changed.get_submodule(path)
    changed.set_submodule(path, nn.ModuleList(layers[index] for index in kept))
    config = changed.config.get_text_config()
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[index] for index in kept]
    config.num_hidden_layers = len(kept)
    for position, layer in enumerate(changed.get_submodule(path)):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = position
    return changed


def shortgpt(model: Any, blocks: list[Block], windows: Tensor, layers: int) -> Any:
    """Drop the layers of the least Block Influence: 1 − mean cosine of a layer's input and output."""
    influence = 1 - similarities(model, tuple(block.layer_path for block in blocks), windows).diagonal(1)
    return drop_layers(model, blocks, influence.argsort()[:layers].tolist())


def replaceme(model: Any, blocks: list[Block], windows: Tensor, layers: int) -> Any:
    """Drop the layers after layer i, whose FFN output is mapped by least squares to make up for them.

    i has the least cosine distance between the hidden states after it and after the span. To be generous to the peer,
    the best on calibration text of the three best-ranked i is taken.
    """
    first = model.get_submodule(blocks[0].layer_path)
    if layers >= len(blocks):
        raise Inapplicable(f"a layer and {layers} after it do not fit into {len(blocks)}")
    if any(hasattr(first, name) for name in POST_NORMS) or hasattr(model.config, "residual_multiplier"):
        raise Inapplicable("the FFN output is scaled before it is added, so a map of it cannot be merged")
    cosines = similarities(model, tuple(block.layer_path for block in blocks), windows).diagonal(layers)[1:]
    cuts = cosines.argsort(descending=True)[:CUTS].tolist()
    transforms = span_maps(model, blocks, windows, cuts, layers)
    candidates = (merge_span(model, blocks, cut, layers, transforms[cut]) for cut in cuts)
    sample = windows[:: max(1, windows.numel() // CUT_TOKENS)]
    return min(candidates, key=lambda changed: evaluate(changed, sample, RunContext(batch_size=BATCH)).perplexity)


def span_maps(model: Any, blocks: list[Block], windows: Tensor, cuts: list[int], length: int) -> dict[int, Tensor]:
    """T of every cut i, minimising ‖M T + Y − L‖² in float64: M is the output of layer i's FFN, Y what it is added to,
    L the hidden state after layer i + length."""
    ends = {cut: [blocks[cut].layer_path, blocks[cut + length].layer_path] for cut in cuts}
    downs = {cut: ffn_linears(model, blocks[cut])[1] for cut in cuts}
    grams, crosses = (dict.fromkeys(cuts, torch.zeros(())) for _ in range(2))
    paths = {*downs.values(), *(path for pair in ends.values() for path in pair)}
    for seen in observe(model, windows, paths, lambda _, y: y.double()):
        for cut in cuts:
            mapped, before, after = (seen[path] for path in (downs[cut], *ends[cut]))
            grams[cut] = grams[cut] + mapped.T @ mapped
            crosses[cut] = crosses[cut] + mapped.T @ (after - before + mapped)  # Y = before − M
    return {cut: torch.linalg.solve(ridged(grams[cut]), crosses[cut]) for cut in cuts}


def merge_span(model: Any, blocks: list[Block], cut: int, length: int, transform: Tensor) -> Any:
    """A copy without the layers after `cut`, whose FFN's last linear is followed by `transform` [width, width]."""
    changed = drop_layers(model, blocks, range(cut + 1, cut + 1 + length))
    down = ffn_linears(changed, blocks[cut])[1]
    weight, bias = weight_and_bias(changed, down)
    mapped = None if bias is None else bias.double() @ transform
    changed.set_submodule(down, as_linear(transform.T @ weight.double(), mapped))
    return changed


def by_layers(drop: Callable[[Any, list[Block], Tensor, int], Any]) -> Method:
    """A method that drops as few layers as remove so many parameters."""

    def remove(subject: Subject, parameters: int) -> Any:
        blocks = subject.blocks
        sizes = [sum(p.numel() for p in subject.model.get_submodule(block.layer_path).parameters()) for block in blocks]
        return drop(subject.model, blocks, subject.windows, math.ceil(parameters / min(sizes)))

    return remove
