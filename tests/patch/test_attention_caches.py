"""`generate` with narrowed attention, and with none in some layers: the same tokens with every cache as without one.

Not run here: offloaded caches, which need a GPU, and those that are quantised by a package that is not installed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CompileConfig, DynamicCache, StaticCache
from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS
from zoo import FAMILIES, VOCAB, WITHOUT_UNITS, attention_shapes, compressed, find_branches, tiny_model, tokens

from compressor.modeling_compressor import KeptHeads, replacements
from compressor.models.blocks import AttentionOf
from compressor.models.heads import anchor_layers, find_heads, record_attention
from compressor.patch.tree import patch
from compressor.plan.shapes import Shape

NEW_TOKENS = 10
WINDOW = 6  # shorter than the prompts
SLIDING, FULL = "sliding_attention", "full_attention"
# Families with every way of finding keys and positions, and with windows.
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {},
    "gemma2": {"num_hidden_layers": 4, "sliding_window": WINDOW, "layer_types": [SLIDING, FULL, SLIDING, FULL]},
    "gemma3": {"num_hidden_layers": 4, "sliding_window": WINDOW, "layer_types": [SLIDING, SLIDING, FULL, SLIDING]},
    "bloom": {},
    "mpt": {},
    "falcon": {"alibi": True, "multi_query": False, "bias": True},
    "falcon-new": {},
    "gpt_neo": {},
    "gpt_neox": {},
    "mistral": {"sliding_window": WINDOW},
    "opt": {},
    "phi3": {"sliding_window": WINDOW},
    "qwen3": {},
}
STATIC = {"cache_implementation": "static"}
CACHES = [name for name in ALL_CACHE_IMPLEMENTATIONS if "offloaded" not in name and name != "quantized"]


def narrowed(family: str, **settings: Any) -> Any:
    """Layers that caches ask keep one unit, the first of them nothing else; the others have no heads."""
    settings = {**CASES.get(family, {}), **settings}
    layers, anchors = settings.get("num_hidden_layers", 3), anchor_layers(tiny_model(family, **settings))
    shapes: dict[Any, Shape] = {AttentionOf(layer): Shape([None, 4][layer % 2]) for layer in range(layers)}
    shapes |= {AttentionOf(layer): Shape(2 * layer, 1) for layer in anchors}
    return compressed(family, attention_shapes(family) if family in WITHOUT_UNITS else shapes, **settings)


def static_of(family: str) -> list[dict[str, Any]]:
    """A static cache, if the stock model can use one: Falcon's slopes do not have its length."""
    return [] if CASES.get(family, {}).get("alibi") else [STATIC]


def padded() -> dict[str, Tensor]:
    """Two prompts, of which the second is shorter, and filled up at the left."""
    ids, mask = tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    ids[1, :4], mask[1, :4] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def generate(model: Any, inputs: dict[str, Tensor], **options: Any) -> Any:
    """The tokens, and the logits that they were chosen by."""
    usual = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    usual |= {"use_cache": True, "disable_compile": True, "return_dict_in_generate": True, "output_logits": True}
    return model.generate(**inputs, **{**usual, **options})


def assert_same_as_without_cache(
    model: Any, inputs: dict[str, Tensor], *ways: dict[str, Any], num_beams: int = 1
) -> None:
    """Every way of generating gives the tokens, and the logits up to rounding, of the way without a cache."""
    expected = generate(model, inputs, use_cache=False, num_beams=num_beams)
    assert expected.sequences.shape[1] == inputs["input_ids"].shape[1] + NEW_TOKENS
    for options in ways:
        found = generate(model, inputs, num_beams=num_beams, **options)
        assert torch.equal(found.sequences, expected.sequences), options
        torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_continues_padded_texts_as_without_a_cache(family: str) -> None:
    assert_same_as_without_cache(narrowed(family), padded(), {}, *static_of(family))


@pytest.mark.parametrize("family", CASES)
@pytest.mark.parametrize("cache", CACHES)
def test_every_kind_of_cache(family: str, cache: str) -> None:
    if cache == "dynamic" or static_of(family):
        assert_same_as_without_cache(narrowed(family), padded(), {"cache_implementation": cache})


@pytest.mark.parametrize("family", CASES)
def test_beams_chunks_and_guesses(family: str) -> None:
    """Beams reorder the cache, chunks fill it in steps, and tokens that were guessed wrongly are cut off it."""
    model = narrowed(family)
    assert_same_as_without_cache(model, padded(), {}, *static_of(family), num_beams=3)
    chunks = [{**options, "prefill_chunk_size": 4} for options in ({}, *static_of(family))]
    assert_same_as_without_cache(model, padded(), *chunks)
    twice = {"input_ids": tokens(1, 9).repeat(1, 2)}
    assistants = [tiny_model(family, **CASES[family]), narrowed(family)]
    guesses = [{"prompt_lookup_num_tokens": 3}, *({"assistant_model": assistant} for assistant in assistants)]
    assert_same_as_without_cache(model, twice, *guesses)


@pytest.mark.parametrize("family", CASES)
@pytest.mark.parametrize("kind", ["lazy", "dynamic", "static"])
def test_a_cache_of_the_user_over_two_turns(family: str, kind: str) -> None:
    model = narrowed(family)
    if kind == "lazy" and True in DynamicCache(config=model.config).is_sliding:
        pytest.skip("a cache that knows no config holds no window")
    if kind == "static" and not static_of(family):
        pytest.skip("the stock model cannot")
    static = {"config": model.config, "max_cache_len": 48}
    caches = {"lazy": DynamicCache(), "dynamic": DynamicCache(config=model.config), "static": StaticCache(**static)}
    given = {"past_key_values": caches[kind]}
    assert_same_as_without_cache(model, {"input_ids": tokens(2, 7)}, given)
    first = int(caches[kind].get_seq_length())
    assert first == 7 + NEW_TOKENS - 1
    turns = [generate(model, {"input_ids": tokens(2, 7)}).sequences, tokens(2, 3)]
    assert_same_as_without_cache(model, {"input_ids": torch.cat(turns, dim=1)}, given)
    assert caches[kind].get_seq_length() == first + 1 + 3 + NEW_TOKENS - 1


@pytest.mark.parametrize("family", CASES)
@torch.no_grad()
def test_a_layer_without_heads_keeps_nothing(family: str) -> None:
    """Caches that are moved to the CPU pass over such layers, and those that stay hold what is left."""
    model = narrowed(family)
    cache = DynamicCache(config=model.config)
    model(tokens(2, 9), past_key_values=cache, use_cache=True)
    kept = [isinstance(module, KeptHeads) for module in replacements(model).values()]
    assert False in kept
    assert [not dummy for dummy in cache.is_dummy] == kept
    for layer, has_heads in zip(cache.layers, kept, strict=True):
        assert (layer.keys is not None) == has_heads
        if has_heads:
            copies = 2 if family == "falcon-new" else 1  # one for each query head
            assert layer.keys.shape[1] == copies
    assert cache.get_seq_length() == 9


def test_a_compiled_model_with_a_static_cache() -> None:
    compiled = CompileConfig(fullgraph=True, backend="eager")
    compiled._compile_all_devices = True
    way = {**STATIC, "disable_compile": False, "compile_config": compiled}
    assert_same_as_without_cache(narrowed("llama"), {"input_ids": tokens(2, 9)}, way)


@torch.no_grad()
def test_a_quantised_cache() -> None:
    """Rounded keys give other tokens than exact ones; all units give those of the stock model, rounded alike."""
    stock, model = tiny_model("llama"), tiny_model("llama")
    options: dict[str, Any] = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
    blocks = find_branches(model)
    block = blocks[AttentionOf(1)]
    heads = find_heads(model, block, record_attention(model, [block])[1])
    assert heads is not None
    module = heads.keep(torch.arange(heads.count)).eval()
    module.output_projection.weight.copy_(heads.outer_matrix.weight)
    patch(model, list(blocks.values()), {AttentionOf(1): module})
    expected = generate(stock, padded(), **options)
    assert torch.equal(generate(model, padded(), **options).sequences, expected.sequences)
    found = generate(narrowed("llama"), padded(), **options).sequences
    assert found.shape == (2, 9 + NEW_TOKENS)
    assert found.max() < VOCAB


@pytest.mark.parametrize("family", CASES)
def test_logits_depend_on_tokens_that_only_the_cache_holds(family: str) -> None:
    """Else equal logits would say little: the layers that kept a unit look at the first token, or, with windows, at one
    that is a window before the last."""
    model, inputs = narrowed(family), {"input_ids": tokens(1, 9)}
    changed = inputs["input_ids"].clone()
    changed[0, 9 - WINDOW + 1] += 1
    one, other = (torch.stack(generate(model, {"input_ids": ids}).logits) for ids in (inputs["input_ids"], changed))
    assert (one - other).abs().max() > 1e-3
