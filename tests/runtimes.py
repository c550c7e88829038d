"""Exports as other runtimes read them: GGUF files in llama.cpp, and checkpoints for vLLM by what its source says."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP
from zoo import VOCAB, stored

from compressor.export.attention import NoAttention
from compressor.export.llamacpp import Runner

# How far a log-probability of a tiny random model may be off in llama.cpp, by the type of its file.
OFF = {"f32": 1e-5, "f16": 1e-2, "bf16": 0.1, "q8_0": 0.3, "q5_1": 1.0, "q5_0": 1.0, "q4_1": 2.0, "q4_0": 2.0}


def read_gguf(file: Path) -> Any:
    import gguf

    return gguf.GGUFReader(file)


@torch.no_grad()
def expected_log_probabilities(model: Any, ids: list[int]) -> torch.Tensor:
    log_probabilities = model(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
    return log_probabilities.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]


def check_in_llamacpp(model: Any, file: Path, off: float = 1e-4) -> None:
    """Greedy tokens equal, log-probabilities within the tolerance, perplexity equal to 0.1 %."""
    ids = torch.randint(1, VOCAB, (40,), generator=torch.Generator().manual_seed(5)).tolist()
    expected = expected_log_probabilities(model, ids)
    with torch.no_grad():
        greedy = model.generate(torch.tensor([ids[:20]]), max_new_tokens=24, do_sample=False)[0, 20:].tolist()
    with Runner(file) as run:
        measured = torch.tensor(run.log_probabilities(ids), dtype=torch.float64)
        continued = run.continue_greedily(ids[:20], 24)
    assert (measured - expected).abs().max() < off
    assert math.exp(expected.mean() - measured.mean()) == pytest.approx(1, abs=1e-3)
    end = model.generation_config.eos_token_id
    stop = greedy.index(end) if end in greedy else len(greedy)
    assert [token for token in continued if token != end] == greedy[:stop]


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
        assert not block.ffn.no_op
        if block.attention.no_op:
            layer.self_attn, layer.input_layernorm = NoAttention(), nn.Identity()
        else:
            keys = plain.num_attention_heads // block.attention.n_heads_in_group
            grouped = copy.deepcopy(model.config)
            grouped.num_key_value_heads = keys
            layer.self_attn = LlamaAttention(grouped, layer.self_attn.layer_idx)
        width = width_in_vllm(block.ffn.ffn_mult, plain.hidden_size)
        widened = LlamaConfig(**{**plain.to_dict(), "intermediate_size": width, "hidden_act": block.ffn.hidden_act})
        layer.mlp = LlamaMLP(widened)
    tensors = {name: tensor.float() for name, tensor in stored(directory).items()}
    if plain.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model.load_state_dict(tensors, strict=True)
    return model
