"""The checkpoint for vLLM, read as vLLM's source reads it; vLLM itself is not run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from runtimes import read_as_vllm, width_in_vllm
from transformers import AutoConfig
from zoo import LINEAR_SHAPES, SHAPES, compressed, logits, stored, tiny_tokenizer

from compressor.export.llama import convert_to_llama
from compressor.export.vllm import MULTIPLE, write_decilm


@pytest.mark.parametrize("shapes", [SHAPES, LINEAR_SHAPES])
@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3", "granite-scaled", "llama-llama3"])
def test_what_vllm_would_read_is_the_model(family: str, shapes: Any, tmp_path: Path) -> None:
    model = compressed(family, shapes)
    write_decilm(convert_to_llama(model, multiple=MULTIPLE), tiny_tokenizer(), tmp_path, torch.float32)
    expected = logits(model)
    assert (logits(read_as_vllm(tmp_path)) - expected).abs().max() < 2e-6 * expected.abs().max()


@pytest.mark.parametrize("hidden", [576, 768, 2048, 4096, 5120, 1536, 896])
def test_every_width_comes_back(hidden: int) -> None:
    from compressor.export.vllm import decilm_config

    widths = [256 * n for n in range(1, 120)]
    config = {"hidden_size": hidden}
    blocks = decilm_config(config, "silu", widths, [(8, 2)] * len(widths))["block_configs"]
    assert [width_in_vllm(block["ffn"]["ffn_mult"], hidden) for block in blocks] == widths


def test_the_config_survives_a_round_trip(tmp_path: Path) -> None:
    write_decilm(convert_to_llama(compressed("llama"), multiple=256), tiny_tokenizer(), tmp_path, torch.bfloat16)
    before = json.loads((tmp_path / "config.json").read_text())
    config = AutoConfig.from_pretrained(tmp_path, trust_remote_code=True)
    assert config.to_dict()["block_configs"] == before["block_configs"]
    assert before["mlp_bias"] is True
    assert before["dtype"] == "bfloat16"
    assert {tensor.dtype for tensor in stored(tmp_path).values()} == {torch.bfloat16}
