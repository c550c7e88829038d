"""Bytes per token of the key-value cache: what the projections say, in every family, before and after heads go."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from zoo import FAMILIES, compressed, tiny_model

from compressor.evaluate.kv_cache import kv_cache_bytes
from compressor.modeling_compressor import Replacement
from compressor.models.blocks import ATTENTION_RETURNS, AttentionOf, find_attention
from compressor.models.heads import find_heads, record_attention
from compressor.patch.tree import patch

FLOAT32 = 4


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_cached_follows_the_kept_heads(family: str) -> None:
    model = tiny_model(family)
    blocks = find_attention(model)
    calls = record_attention(model, blocks)
    heads = [find_heads(model, block, calls[block.layer]) for block in blocks]
    before = kv_cache_bytes(model)
    assert before
    modules: dict[Any, Any] = {}
    of_layer = [before // 3] * 3
    if heads[1] is not None:
        # Falcon's newer attention repeats keys and values for every query head before it caches them.
        size = FLOAT32 * heads[1].cached_values * (heads[1].queries if family == "falcon-new" else 1)
        assert before == 3 * size * heads[1].count
        modules[AttentionOf(1)] = heads[1].keep(torch.tensor([heads[1].count - 1]))
        of_layer[1] = size
    modules[AttentionOf(2)] = Replacement(
        blocks[2].width, None, blocks[2].residual_inside, returns=ATTENTION_RETURNS, biased=False
    )
    of_layer[2] = 0
    patch(model, blocks, modules)
    assert kv_cache_bytes(model) == sum(of_layer)


def test_replaced_ffns_change_nothing() -> None:
    assert kv_cache_bytes(compressed("llama")) == kv_cache_bytes(tiny_model("llama"))


def test_bytes_are_those_of_the_stored_dtype() -> None:
    whole, half = tiny_model("gpt2"), tiny_model("gpt2").half()
    assert kv_cache_bytes(whole) == 2 * (kv_cache_bytes(half) or 0)


def test_a_model_without_such_a_cache_has_none() -> None:
    assert kv_cache_bytes(tiny_model("openai-gpt")) is None
