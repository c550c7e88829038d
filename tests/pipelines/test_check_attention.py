"""`compress check` and `compress info` of a checkpoint whose attention lost heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Compress
from zoo import tiny_tokenizer

from compressor.evaluate.kv_cache import kv_cache_bytes
from compressor.models.blocks import AttentionOf, find_attention
from compressor.models.heads import find_heads, record_attention
from compressor.models.load import load_model
from compressor.patch.tree import patch
from compressor.pipelines.steps import save

PATH = "transformer.h.1.attn"


@pytest.fixture(scope="module")
def without_heads(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GPT-2 whose second attention keeps heads 0 and 3 of four, as they were."""
    model, _ = load_model(str(models / "gpt2"))
    blocks = find_attention(model)
    heads = find_heads(model, blocks[1], record_attention(model, blocks)[1])
    assert heads is not None
    kept = torch.tensor([0, 3])
    module = heads.keep(kept)
    with torch.no_grad():
        module.output_projection.weight.copy_(heads.outer_matrix.weight[:, heads.columns_of(kept)])
    before = kv_cache_bytes(model)
    patch(model, blocks, {AttentionOf(1): module})  # type: ignore[dict-item]
    out = tmp_path_factory.mktemp("heads") / "small"
    save(model, tiny_tokenizer(), out)
    after = kv_cache_bytes(model)
    assert after is not None
    assert before is not None
    assert after / before == pytest.approx(5 / 6)
    return out


def check(compress: Compress, directory: Path, models: Path, corpus: Path, *more: str | Path) -> dict[str, Any]:
    text = ["--text", corpus, "--seq-len", "32", "--verify-tokens", "2000", "--generate", "0", "--no-cache"]
    budget = ["--source", models / "gpt2", "--max-dppl", "1000%"]
    done = compress("check", directory, *budget, *text, *more, "--json")
    assert done.code == 0, done.err
    record: dict[str, Any] = json.loads(done.out)
    return record


def test_a_check_describes_attention_and_the_cache(
    compress: Compress, without_heads: Path, models: Path, corpus: Path, tmp_path: Path
) -> None:
    baseline = tmp_path / "baseline.json"
    record = check(compress, without_heads, models, corpus, "--baseline", baseline, "--update-baseline")
    (entry,) = record["replaced_attention"]
    assert (entry["path"], record["replaced"]) == (PATH, [])
    replacement = {"kind": "pruned", "rank": 0, "heads": 2, "kept_heads": [0, 3], "units": 4, "query_heads_per_unit": 1}
    assert entry["replacement"] == replacement
    cache = record["kv_cache"]
    assert cache["bytes_per_token_after"] / cache["bytes_per_token_before"] == pytest.approx(5 / 6)
    assert not any(PATH in warning for warning in record["warnings"])
    figures = json.loads(baseline.read_text(encoding="utf-8"))["figures"]
    assert figures["key-value cache bytes per token compressed"]["value"] == cache["bytes_per_token_after"]


def test_a_check_warns_of_other_heads_than_recorded(
    compress: Compress, without_heads: Path, models: Path, corpus: Path
) -> None:
    file = without_heads / "compression.json"
    written = file.read_text(encoding="utf-8")
    record = json.loads(written)
    record["attention"][0]["replacement"]["kept_heads"] = [0, 1]
    file.write_text(json.dumps(record), encoding="utf-8")
    try:
        warnings = check(compress, without_heads, models, corpus)["warnings"]
    finally:
        file.write_text(written, encoding="utf-8")
    said = "keeps 2 of 4 heads (0, 3) in the checkpoint, keeps 2 of 4 heads (0, 1) in its record"
    assert f"{PATH}: {said}" in warnings


def test_info_lists_it(compress: Compress, without_heads: Path) -> None:
    done = compress("info", without_heads)
    assert done.code == 0, done.err
    assert f"{PATH}: keeps 2 of 4 heads" in done.out
    assert "key-value cache 640 bytes per token (float32)" in done.out
