"""The heads of attention are found in every family, counted, and believed only where they compute what is claimed."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from torch import nn
from zoo import FAMILIES, WIDTH, WITHOUT_UNITS, logits, tiny_model

from compressor.modeling_compressor import COUNTS, KeptHeads, Replacement
from compressor.models import heads as heads_module
from compressor.models.blocks import AttentionOf, find_attention, find_blocks
from compressor.models.heads import LAYOUTS, Heads, Layout, anchor_layers, find_heads, record_attention
from compressor.patch.tree import patched

FALCON_RW: dict[str, Any] = {"alibi": True, "multi_query": False, "bias": True}
FALCON_40B: dict[str, Any] = {"alibi": True, "new_decoder_architecture": True, "num_kv_heads": 2}
SLIDING = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 4}
# What attention may have besides: how many units it has, and of how many query heads.
SETTINGS: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "soft caps": ("gemma2", {"attn_logit_softcapping": 2.0, "attn_implementation": "eager", **SLIDING}, 2, 2),
    "sliding windows": ("gemma3", SLIDING, 2, 2),
    "a sliding window": ("mistral", {"sliding_window": 4}, 2, 2),
    "phi3's window": ("phi3", {"sliding_window": 4}, 2, 2),
    "norms of queries and keys": ("phi", {"qk_layernorm": True}, 2, 2),
    "biases": ("llama", {"attention_bias": True}, 2, 2),
    "no groups": ("llama", {"num_key_value_heads": 4}, 4, 1),
    "one key-value head": ("llama", {"num_key_value_heads": 1}, 1, 4),
    "wide heads": ("qwen3", {"head_dim": 16}, 2, 2),
    "clipped projections": ("mpt", {"attn_config": {"clip_qkv": 0.05}}, 4, 1),
    "Falcon-RW": ("falcon", FALCON_RW, 4, 1),
    "Falcon-RW, eager": ("falcon", {**FALCON_RW, "attn_implementation": "eager"}, 4, 1),
    "groups with ALiBi": ("falcon", FALCON_40B, 2, 2),
    "multi-query": ("falcon", {}, 1, 4),
    "scores scaled by layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, 4, 1),
}


def heads_of(model: Any, layer: int = 1) -> Heads | None:
    block = find_attention(model)[layer]
    return find_heads(model, block, record_attention(model, [block])[layer])


@torch.no_grad()
def keep_all(heads: Heads, units: Any = None) -> KeptHeads:
    """Attention with these of its units (all), and the columns of the output projection that belong to them."""
    kept = torch.arange(heads.count) if units is None else torch.tensor(units)
    module = heads.keep(kept, dtype=heads.outer_matrix.weight.dtype).eval()
    module.output_projection.weight.copy_(heads.outer_matrix.weight[:, heads.columns_of(kept)])
    if heads.outer_matrix.bias is not None:
        module.output_bias.copy_(heads.outer_matrix.bias)
    return module


@pytest.mark.parametrize("family", FAMILIES)
def test_the_attention_of_every_layer_is_found(family: str) -> None:
    model = tiny_model(family)
    blocks = find_attention(model)
    assert [block.index for block in blocks] == [AttentionOf(layer) for layer in range(3)]
    ffns = find_blocks(model)
    for block, ffn in zip(blocks, ffns, strict=True):
        assert block.is_attention
        assert (block.layer, block.layer_path, block.width) == (ffn.layer, ffn.layer_path, WIDTH)
        assert block.path != ffn.path
        assert block.parameters == sum(p.numel() for p in model.get_submodule(block.path).parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_units_are_found_and_counted(family: str) -> None:
    model = tiny_model(family)
    blocks = find_attention(model)
    calls = record_attention(model, blocks)
    for block in blocks:
        heads = find_heads(model, block, calls[block.layer])
        if family in WITHOUT_UNITS:
            assert heads is None
            continue
        assert heads is not None
        fixed = heads.fixed + (heads.width if heads.biased else 0)
        assert heads.size * heads.count + fixed == block.parameters
        assert heads.outer.shape == (heads.count * heads.columns, WIDTH)
        assert len(calls[block.layer].output) == 2
        whole = sum(p.numel() for p in keep_all(heads).parameters())
        assert whole == heads.size * heads.count + heads.fixed + heads.width  # the output projection gets a bias
        if heads.count > 1:
            half = heads.keep(torch.arange(1, heads.count, 2), 3)
            expected = heads.size * (heads.count // 2) + heads.fixed + heads.width + 2 * 3 * heads.width
            assert sum(p.numel() for p in half.parameters()) == expected


@pytest.mark.parametrize("name", SETTINGS)
def test_units_with_what_attention_may_have_besides(name: str) -> None:
    family, settings, units, queries = SETTINGS[name]
    model = tiny_model(family, **settings)
    for layer in range(3):
        heads = heads_of(model, layer)
        assert heads is not None
        assert (heads.count, heads.queries) == (units, queries)
        assert heads.columns == heads.outer.shape[0] // units
    expected = logits(model)
    blocks = find_attention(model)
    with patched(model, blocks, {AttentionOf(1): keep_all(heads_of(model))}):
        torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["falcon", "falcon-sequential", "falcon-new"])
def test_the_keys_of_falcon_have_the_width_of_a_head(family: str) -> None:
    heads = heads_of(tiny_model(family))
    assert heads is not None
    assert (heads.head_width, heads.cached_values) == (WIDTH // 4, 2 * WIDTH // 4)


def test_a_norm_of_its_own_for_every_head_keeps_units_together() -> None:
    """The kept heads would be given the norms of others; where all norms are one, they may be."""
    model = tiny_model("stablelm", qk_layernorm=True)
    assert heads_of(model) is None
    for layer in model.model.layers:
        for norm in (*layer.self_attn.q_layernorm.norms, *layer.self_attn.k_layernorm.norms):
            norm.weight.data.fill_(1.5)
    assert heads_of(model) is not None


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("gpt2", Layout(("c_attn",), "c_proj", "interleaved", LAYOUTS["gpt2"].counts)),
        ("gpt_neox", Layout(("query_key_value",), "dense", "stacked")),
        ("mpt", replace(LAYOUTS["mpt"], fused="interleaved")),
        ("phi3", replace(LAYOUTS["phi3"], fused="interleaved")),
        ("falcon-new", replace(LAYOUTS["falcon"], fused="stacked")),
        ("bloom", replace(LAYOUTS["bloom"], per_head={})),
        ("mpt", replace(LAYOUTS["mpt"], per_head={})),
        ("gpt2", replace(LAYOUTS["gpt2"], counts={"num_heads": "queries"})),
        ("phi3", replace(LAYOUTS["phi3"], counts={"num_key_value_heads": "units"})),
        ("llama", Layout(("k_proj", "q_proj", "v_proj"), "v_proj")),
        ("llama", Layout(output="missing")),
    ],
)
def test_a_wrong_layout_is_not_believed(family: str, layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(family)
    assert heads_of(model) is not None
    monkeypatch.setitem(heads_module.LAYOUTS, model.config.model_type, layout)
    assert heads_of(model) is None


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "gemma3", "falcon-new", "gpt_neox"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_units_of_a_model_in_half_precision(family: str, dtype: torch.dtype) -> None:
    heads = heads_of(tiny_model(family).to(dtype))
    assert heads is not None
    assert {p.dtype for p in keep_all(heads).parameters()} == {dtype}


def test_a_wrong_layout_is_not_believed_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("gpt2").to(torch.bfloat16)
    monkeypatch.setitem(heads_module.LAYOUTS, "gpt2", replace(LAYOUTS["gpt2"], fused="interleaved"))
    assert heads_of(model) is None


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "mpt", "falcon-new", "phi3", "qwen3"])
@torch.no_grad()
def test_a_unit_adds_its_columns_to_the_output(family: str) -> None:
    """The whole is the sum of the units, each kept alone."""
    model = tiny_model(family)
    block = find_attention(model)[1]
    call = record_attention(model, [block])[1]
    heads = find_heads(model, block, call)
    assert heads is not None
    residual = call.args[1] if block.residual_inside else 0
    bias = 0 if heads.outer_matrix.bias is None else heads.outer_matrix.bias
    alone = [keep_all(heads, [unit])(*call.args, **call.kwargs)[0] - residual - bias for unit in range(heads.count)]
    torch.testing.assert_close(sum(alone) + residual + bias, call.output[0], rtol=1e-4, atol=1e-5)


def test_the_stock_module_stays_as_it_is() -> None:
    model = tiny_model("phi3")
    expected, stock = logits(model), model.model.layers[1].self_attn
    before = {name: tensor.clone() for name, tensor in stock.state_dict().items()}
    seen = []
    handle = stock.register_forward_hook(lambda *_: seen.append(1))
    heads = heads_of(model)
    assert heads is not None
    seen.clear()
    module = keep_all(heads, [1])
    assert not module.attention._forward_hooks
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(7)
    assert stock.config is model.config
    assert (stock.config.num_attention_heads, stock.num_key_value_heads) == (4, 2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in stock.state_dict().items())
    assert torch.equal(logits(model), expected)
    assert seen
    handle.remove()


@pytest.mark.parametrize("family", ["llama", "bloom", "falcon-new"])
def test_a_model_that_accelerate_has_placed(family: str) -> None:
    """The forward of its hooks is bound to the stock module."""
    model = tiny_model(family)
    expected = logits(model)
    places = {name: "cpu" for name, module in model.named_modules() if not list(module.children())}
    places |= {block.layer_path: "cpu" for block in find_attention(model)}
    model = dispatch_model(model, places, main_device="cpu", force_hooks=True)
    heads = heads_of(model)
    assert heads is not None
    module = keep_all(heads)
    with patched(model, find_attention(model), {AttentionOf(1): module}):
        torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)
        with torch.no_grad():
            module.output_projection.weight.zero_()
        assert (logits(model) - expected).abs().max() > 1e-3
    assert torch.equal(logits(model), expected)


def test_other_counts_in_a_config_follow_the_stock_config() -> None:
    """Phi-3 asks its config for the number of heads; how attention is computed may be changed later."""
    model = tiny_model("phi3")
    heads = heads_of(model)
    assert heads is not None
    config = copy.deepcopy(keep_all(heads, [0])).attention.config
    assert config.num_attention_heads == 2
    assert config.hidden_size == WIDTH
    module = keep_all(heads, [0])
    model.set_attn_implementation("eager")
    assert module.attention.config._attn_implementation == "eager"


@pytest.mark.parametrize("family", WITHOUT_UNITS)
def test_attention_without_units_can_become_linear(family: str) -> None:
    model = tiny_model(family)
    blocks = find_attention(model)
    before = logits(model)
    returns = len(record_attention(model, blocks)[1].output)
    for rank in (None, 3, 0):
        module = Replacement(WIDTH, rank, blocks[1].residual_inside, returns=returns)
        nn.init.normal_(module.output_bias)
        with patched(model, blocks, {AttentionOf(1): module}):
            after = logits(model)
        assert after.isfinite().all()
        assert (after - before).abs().max() > 1e-3


def test_layers_that_caches_ask_keep_a_unit() -> None:
    assert anchor_layers(tiny_model("llama")) == {0}
    assert anchor_layers(tiny_model("gpt2")) == {0}
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    assert anchor_layers(tiny_model("gemma3", layer_types=kinds, sliding_window=4)) == {0, 2}
    assert anchor_layers(tiny_model("gemma2", layer_types=kinds[::-1], sliding_window=4)) == {0, 1}


def test_every_count_of_the_table_may_be_written() -> None:
    assert {name for layout in LAYOUTS.values() for name in layout.counts} <= COUNTS
