"""Tiny GGUF files of the architecture `llama`, written by hand, to be run in real llama.cpp."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM


def make_llama(rows: int, layers: int = 1, width: int = 32) -> LlamaForCausalLM:
    """Random weights, large enough for probabilities that differ much."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=rows,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


def write_gguf(file: Path, model: LlamaForCausalLM, add_vocabulary: Callable[[gguf.GGUFWriter], object]) -> None:
    """All weights in float32; whoever calls this adds the vocabulary."""
    config = model.config
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    add_vocabulary(writer)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        stored = names.get_name(name, (".weight",))
        assert stored
        weights = tensor.float().numpy()
        for part, count in heads.items():
            if f".{part}." in stored:
                weights = interleave(weights, count)
        writer.add_tensor(stored, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleave(weights: np.ndarray, heads: int) -> np.ndarray:
    """The rows of each head in the order of llama.cpp's rotary embedding: pairs, not halves."""
    rows, columns = weights.shape
    return np.ascontiguousarray(
        weights.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
    )
