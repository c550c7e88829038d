"""Replacements go into a model and come out again without a trace."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from zoo import FAMILIES, SHAPES, WIDTH, logits, random_replacement, tiny_model

from compressor.modeling_compressor import Replacement, build
from compressor.models.blocks import find_blocks
from compressor.patch.tree import patch, patched, specs


@pytest.mark.parametrize("family", FAMILIES)
def test_patched_restores_the_very_modules(family: str) -> None:
    model = tiny_model(family)
    before = dict(model.named_modules())
    expected = logits(model)
    blocks = find_blocks(model)
    with patched(model, blocks, {i: random_replacement(blocks[i], shape, model) for i, shape in SHAPES.items()}):
        assert specs(model)[blocks[1].path]["rank"] == SHAPES[1].rank
        assert specs(model)[blocks[1].path]["neurons"] == SHAPES[1].neurons
        assert (logits(model) - expected).abs().max() > 1e-3
    assert dict(model.named_modules()) == before
    assert specs(model) == {}
    assert "save_pretrained" not in vars(model)
    assert torch.equal(logits(model), expected)


def test_patch_refuses_a_replacement_that_does_not_fit() -> None:
    model = tiny_model("bloom")
    blocks = find_blocks(model)
    with pytest.raises(ValueError, match="no block 7"):
        patch(model, blocks, {7: Replacement(WIDTH, 1, True)})
    with pytest.raises(ValueError, match="residual_inside"):
        patch(model, blocks, {0: Replacement(WIDTH, 1, False)})
    with pytest.raises(ValueError, match="width"):
        patch(model, blocks, {0: Replacement(WIDTH + 1, 1, True)})


@pytest.mark.parametrize("neurons", [{}, {"neurons": 3, "activation": "silu", "gated": True, "inner_bias": True}])
@pytest.mark.parametrize("rank", [None, 0, 1, WIDTH])
def test_a_spec_builds_the_same_replacement(rank: int | None, neurons: dict[str, Any]) -> None:
    module = Replacement(WIDTH, rank, True, **neurons)
    again = build(json.loads(json.dumps(module.spec())))
    assert again.spec() == module.spec()
    assert {name: p.shape for name, p in again.named_parameters()} == {
        name: p.shape for name, p in module.named_parameters()
    }
