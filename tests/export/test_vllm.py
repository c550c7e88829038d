"""The checkpoint for vLLM, read as vLLM's source reads it; vLLM itself is not run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP
from zoo import LINEAR_SHAPES, SHAPES, compressed, logits, stored, tiny_tokenizer

from compressor.export.llama import convert_to_llama
from compressor.export.vllm import MULTIPLE, write_decilm


def width_in_vllm(ffn_mult: float, hidden: int) -> int:
    width = int(2 * ffn_mult * hidden / 3)
    return width if width % 256 == 0 else width + 256 - width % 256


def read_as_vllm(directory: Path) -> Any:
    """A Llama built from block_configs, as nemotron_nas.py builds it, with the stored weights and no others."""
    config = AutoConfig.from_pretrained(directory, trust_remote_code=True)
    assert config.architectures == ["DeciLMForCausalLM"]
    plain = LlamaConfig(**{k: v for k, v in config.to_dict().items() if k not in ("block_configs", "model_type")})
    model = LlamaForCausalLM(plain).eval()
    for layer, block in zip(model.model.layers, config.block_configs, strict=True):
        assert not block.attention.no_op
        assert not block.ffn.no_op
        assert plain.num_attention_heads // block.attention.n_heads_in_group == plain.num_key_value_heads
        width = width_in_vllm(block.ffn.ffn_mult, plain.hidden_size)
        widened = LlamaConfig(**{**plain.to_dict(), "intermediate_size": width, "hidden_act": block.ffn.hidden_act})
        layer.mlp = LlamaMLP(widened)
    tensors = {name: tensor.float() for name, tensor in stored(directory).items()}
    if plain.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model.load_state_dict(tensors, strict=True)
    return model


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
    config = {"hidden_size": hidden, "num_attention_heads": 8, "num_key_value_heads": 2}
    blocks = decilm_config(config, "silu", widths)["block_configs"]
    assert [width_in_vllm(block["ffn"]["ffn_mult"], hidden) for block in blocks] == widths


def test_the_config_survives_a_round_trip(tmp_path: Path) -> None:
    write_decilm(convert_to_llama(compressed("llama"), multiple=256), tiny_tokenizer(), tmp_path, torch.bfloat16)
    before = json.loads((tmp_path / "config.json").read_text())
    config = AutoConfig.from_pretrained(tmp_path, trust_remote_code=True)
    assert config.to_dict()["block_configs"] == before["block_configs"]
    assert before["mlp_bias"] is True
    assert before["dtype"] == "bfloat16"
    assert {tensor.dtype for tensor in stored(tmp_path).values()} == {torch.bfloat16}
