"""Tiny models whose attention was compressed, for the tests of the exports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from zoo import random_replacement, tiny_model

from compressor.modeling_compressor import Replacement
from compressor.models.blocks import AttentionOf, find_attention, find_blocks
from compressor.models.heads import find_heads, record_attention
from compressor.patch.tree import patch
from compressor.plan.shapes import Shape

# Attention of a layer: a kind without heads (linear, lowrank, bias), the units that are kept, or these and a rank.
Kept = str | list[int] | tuple[list[int], int]
EVERY_KIND: dict[int, Kept] = {0: [1], 1: "linear", 2: "bias", 3: "lowrank", 4: "bias", 5: [0]}
FFNS = {1: Shape(3, 5), 2: Shape(0, 6), 3: Shape(None), 4: Shape(0)}


def compressed_attention(
    family: str, attention: Mapping[int, Kept] = EVERY_KIND, ffns: Mapping[int, Shape] = FFNS, **settings: Any
) -> Any:
    """A tiny model with random attention of these kinds and random blocks of these shapes.

    It has as many layers as these are given for, and at least three.
    """
    layers = max(2, *attention, *ffns) + 1
    if layers > 3:
        settings = {{"gpt2": "n_layer", "gptj": "n_layer"}.get(family, "num_hidden_layers"): layers, **settings}
    model = tiny_model(family, **settings)
    blocks, found = find_blocks(model), find_attention(model)
    calls = record_attention(model, found)
    modules: dict[Any, Any] = {index: random_replacement(blocks[index], shape, model) for index, shape in ffns.items()}
    for layer, kept in attention.items():
        modules[AttentionOf(layer)] = random_attention(model, found[layer], calls[layer], kept)
    patch(model, blocks + found, modules)
    return model


@torch.no_grad()
def random_attention(model: Any, block: Any, call: Any, kept: Kept) -> Any:
    heads = find_heads(model, block, call)
    generator = torch.Generator().manual_seed(block.layer)
    if isinstance(kept, str):
        rank = {"linear": None, "lowrank": 3, "bias": 0}[kept]
        given = {"returns": 2, "biased": heads is None or heads.biased}
        module: Any = Replacement(block.width, rank, block.residual_inside, **given)
        parameters = list(module.parameters())
    else:
        assert heads is not None
        units, rank = kept if isinstance(kept, tuple) else (kept, 0)
        module = heads.keep(torch.tensor(sorted({unit % heads.count for unit in units})), rank)
        parameters = [module.output_projection.weight, module.output_bias]
        parameters += [module.down.weight, module.up.weight] if rank else []
    for parameter in parameters:
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    return module.eval()
