"""Attention in the record: a list of its own, with the figures and the sizes of what was measured and replaced."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from planted import random_text
from zoo import random_replacement, tiny_model, tiny_tokenizer

from compressor.evaluate.kv_cache import kv_cache_bytes
from compressor.measure.gradients import Damage
from compressor.measure.profile import Profile, measure
from compressor.measure.study import Study
from compressor.measure.verdicts import Verdict
from compressor.modeling_compressor import Replacement
from compressor.models.blocks import AttentionOf, find_attention, find_blocks
from compressor.models.heads import find_heads, record_attention
from compressor.patch.checkpoint import count_parameters
from compressor.patch.tree import patch
from compressor.pipelines.describe import describe_model, put_replacements
from compressor.pipelines.describe_profile import describe_doubts, describe_profile, tables_of
from compressor.plan.shapes import Shape
from compressor.report.record import Record, SavedRecord


def profile_both(model: Any) -> Profile:
    """A profile with the attention of every layer in it; its figures are those of the layer's FFN."""
    profile = measure(model, random_text())
    attention = [replace(p, block=block) for p, block in zip(profile.blocks, find_attention(model), strict=True)]
    return replace(profile, attention=attention)


def study_both(profile: Profile) -> Study:
    indices: list[Any] = [p.block.index for p in (*profile.blocks, *profile.attention)]
    verdicts = dict.fromkeys(indices, Verdict("costly", "for the test"))
    return Study(verdicts, dict.fromkeys(indices, Damage(linear=0.1, factorised=0.1)))


def replacements(model: Any) -> dict[Any, Any]:
    """An FFN as a linear map, an attention with its last unit and a map of rank 3, and one as a linear map."""
    ffns, attention = find_blocks(model), find_attention(model)
    calls = record_attention(model, attention)
    heads = find_heads(model, attention[1], calls[1])
    assert heads is not None
    whole = Replacement(attention[2].width, None, returns=2, biased=heads.biased)
    return {
        1: random_replacement(ffns[1], Shape(None)),
        AttentionOf(1): heads.keep(torch.tensor([heads.count - 1]), rank=3),
        AttentionOf(2): whole,
    }


def describe(family: str) -> tuple[Record, Any, dict[Any, Any]]:
    model = tiny_model(family)
    profile = profile_both(model)
    record = describe_profile(model, tiny_tokenizer(), random_text(), profile, study_both(profile))
    fits = replacements(model)
    return put_replacements(record, fits), model, fits


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_attention_is_a_list_of_its_own_and_its_parameters_count(family: str) -> None:
    record, model, fits = describe(family)
    units, queries = {"gpt2": (4, 1), "llama": (2, 2)}[family]
    assert [block.replacement.kind for block in record.blocks] == ["keep", "linear", "keep"]
    kept, some, none = (entry.replacement for entry in record.attention)
    assert {(entry.units, entry.query_heads_per_unit) for entry in (kept, some, none)} == {(units, queries)}
    assert (kept.kind, kept.heads, kept.kept_heads) == ("keep", None, None)
    assert (some.kind, some.rank, some.heads, some.kept_heads) == ("hybrid", 3, 1, [units - 1])
    assert (none.kind, none.rank, none.heads, none.kept_heads) == ("linear", None, 0, [])
    assert [entry.path for entry in record.attention] == [block.path for block in find_attention(model)]
    assert record.attention[2].linear_params == record.attention[2].params_after
    assert [block.name for block in record.branches] == ["0 attention", "0", "1 attention", "1", "2 attention", "2"]

    patch(model, find_blocks(model) + find_attention(model), fits)
    assert record.parameters.after == count_parameters(model)


def test_the_json_has_the_keys_of_a_block_and_is_read_again() -> None:
    record, _, _ = describe("llama")
    values = json.loads(json.dumps(record.to_json_value()))
    assert set(values["attention"][1]) == set(values["blocks"][1])
    assert set(values["blocks"][1]["replacement"]) == {"kind", "rank", "neurons", "units"}
    assert {block["replacement"]["units"] for block in values["blocks"]} == {48}, "as many as were there before"
    replacement = {"kind": "hybrid", "rank": 3, "heads": 1, "kept_heads": [1], "units": 2, "query_heads_per_unit": 2}
    assert values["attention"][1]["replacement"] == replacement
    assert Record.model_validate(values) == record
    old = {key: value for key, value in values.items() if not key.startswith("attention")}
    assert Record.model_validate(old).attention == []


def test_without_attention_the_list_is_empty() -> None:
    model = tiny_model("gpt2")
    profile = replace(profile_both(model), attention=[])
    record = describe_profile(model, tiny_tokenizer(), random_text(), profile, study_both(profile))
    assert record.to_json_value()["attention"] == []


def test_tables_have_a_line_for_every_branch() -> None:
    record, _, _ = describe("llama")
    tables = tables_of(record)
    assert [(row["branch"], row["block"]) for row in tables["profile"]] == [
        (branch, layer) for branch in ("ffn", "attention") for layer in range(3)
    ]
    largest = {row["branch"]: row["parameters"] for row in tables["ladder"] if row["block"] == 2}
    assert largest == {"ffn": 32 * 33, "attention": 32 * 32}  # Llama's attention has no bias


def test_too_few_rows_are_told_of_both_kinds_of_branches() -> None:
    profile = profile_both(tiny_model("gpt2"))
    few = replace(profile.attention[2], rows_fitted=40)
    warning, *_ = describe_doubts(replace(profile, attention=[*profile.attention[:2], few]))
    assert "R²_lin of attention 2 shows the noise" in warning


def test_a_model_of_the_python_api_lists_its_attention() -> None:
    model = tiny_model("llama")
    patch(model, find_blocks(model) + find_attention(model), replacements(model))
    record = describe_model(model)
    assert [block.path for block in record.blocks] == ["model.layers.1.mlp"]
    assert {block.path: block.replacement.heads for block in record.attention} == {
        "model.layers.1.self_attn": 1,
        "model.layers.2.self_attn": 0,
    }
    assert record.kv_cache is not None
    assert record.kv_cache.bytes_per_token_after == kv_cache_bytes(model)
    assert SavedRecord.model_validate(record.to_json_value()) == record
