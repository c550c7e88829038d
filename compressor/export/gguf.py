"""A compressed Llama-type model as one GGUF file for llama.cpp.

The architecture is `deci`: Llama with a width of its own for every feed-forward block, heads of their own for every
layer, and optional biases. A width of zero would make llama.cpp skip the layer's attention too, so a block always keeps
a few neurons. A layer with query heads but no key-value heads has one matrix for its attention; one without any heads
has no attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from compressor.export.gguf_tokenizer import add_vocabulary
from compressor.export.llama import Llama, block_widths, head_counts
from compressor.models.deferred import realize
from compressor.report.export_record import VECTORS, StoredTensors
from compressor.runtime.errors import InputError

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFWriter

# What --dtype takes, and llama.cpp's name for a file of it. The package `gguf` has no quantiser for the k-quants.
FILE_TYPES = {
    "f32": "ALL_F32",
    "f16": "MOSTLY_F16",
    "bf16": "MOSTLY_BF16",
    **{dtype: f"MOSTLY_{dtype.upper()}" for dtype in ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0")},
}
DTYPES = tuple(FILE_TYPES)
HEAD, RAGGED = "the matrix that gives the logits", "rows that 32 does not divide"
# Block widths are multiples of this: quantised types store groups of 32, and every backend computes them quickly.
MULTIPLE = 32
GGUF_NAMES = {  # from the names of a LlamaForCausalLM
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{letter}_proj": f"attn_{letter}" for letter in "qkv"},
    "self_attn.o_proj": "attn_output",
    "self_attn.linear": "attn_output",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}


def refuse_activation(llama: Llama) -> None:
    """Refuse an activation that the `deci` architecture does not have."""
    if llama.layout.activation != "silu":
        raise InputError(f"the gate of its blocks is a {llama.layout.activation}, and llama.cpp's `deci` has only silu")


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of the file and the type that it is stored as; `why` says it where that is not the file's own."""

    name: str
    tensor: Tensor
    kind: GGMLQuantizationType
    why: str | None

    @property
    def bytes(self) -> int:
        from gguf import GGML_QUANT_SIZES

        group, size = GGML_QUANT_SIZES[self.kind]
        return self.tensor.numel() // group * size


def list_stored(model: Any, dtype: str) -> list[StoredTensor]:
    """Every tensor of the file, as it is stored in a file of this type."""
    tensors = dict(list_gguf_tensors(model))
    head = "output.weight" if "output.weight" in tensors else "token_embd.weight"
    return [
        StoredTensor(name, tensor, *choose_storage_type(tensor, dtype, gives_logits=name == head))
        for name, tensor in tensors.items()
    ]


def write_gguf(
    llama: Llama, tokenizer: Any, file: Path, dtype: str, name: str, extra: Mapping[str, str] | None = None
) -> tuple[list[str], list[StoredTensors]]:
    """Write the file, with the block widths of the model; return notes on how llama.cpp's tokenizer differs, and what
    was stored as which type.

    `extra` are further keys of the file's metadata.
    """
    import gguf

    refuse_activation(llama)
    writer = gguf.GGUFWriter(file, "deci")
    writer.add_name(choose_name(name, tokenizer))
    writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[dtype]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_sizes(writer, llama.model)
    for key, value in (extra or {}).items():
        writer.add_string(key, value)
    notes = add_vocabulary(writer, tokenizer, llama.model.config.vocab_size, llama.model.generation_config)
    stored = list_stored(llama.model, dtype)
    for each in stored:
        writer.add_tensor_info(each.name, each.tensor.shape, np.dtype(np.float32), each.bytes, each.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for each in stored:  # one after the other, so that the whole file is never in memory
        tensor = realize(each.tensor).float().contiguous()
        writer.write_tensor_data(gguf.quants.quantize(tensor.numpy(), each.kind))
    writer.close()
    return notes, group_by_type(stored)


def group_by_type(stored: list[StoredTensor]) -> list[StoredTensors]:
    """How many tensors, parameters and bytes are stored as which type, and why."""
    groups: dict[tuple[str, str | None], list[StoredTensor]] = {}
    for each in stored:
        groups.setdefault((each.kind.name.lower(), each.why), []).append(each)
    return [
        StoredTensors(
            type=kind,
            why=why,
            tensors=len(members),
            parameters=sum(each.tensor.numel() for each in members),
            bytes=sum(each.bytes for each in members),
        )
        for (kind, why), members in groups.items()
    ]


def choose_name(name: str, tokenizer: Any) -> str:
    """The name to store. A name with "phi-3" in it makes llama.cpp look for Phi-3's tokens, and fail without them."""
    is_phi3 = any(part in name.lower() for part in ("phi-3", "phi3"))
    return "compressed" if is_phi3 and {"<unk>", "<s>", "<|endoftext|>"} - set(tokenizer.get_vocab()) else name


def add_sizes(writer: GGUFWriter, model: Any) -> None:
    """Write the sizes of the model and its blocks."""
    config = model.config
    layers = config.num_hidden_layers
    writer.add_block_count(layers)
    writer.add_context_length(exact_context_length(config))
    writer.add_embedding_length(config.hidden_size)
    writer.add_vocab_size(config.vocab_size)
    writer.add_feed_forward_length(block_widths(model))
    counts = head_counts(model)
    writer.add_head_count([queries for queries, _ in counts])
    writer.add_head_count_kv([keys for _, keys in counts])
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def exact_context_length(config: Any) -> int:
    """How many tokens the file computes exactly: longrope's rotations change beyond the original context."""
    rope = config.rope_parameters
    if rope["rope_type"] == "longrope":
        return int(rope["original_max_position_embeddings"])
    return int(config.max_position_embeddings)


def list_gguf_tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor with its GGUF name. Biases of zeros are left out, and so are rotation factors that are all one."""
    config, rotations = model.config, model.model.rotary_emb
    rope = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    factors = config.rope_parameters["rope_theta"] ** -rope / rotations.inv_freq.double()
    if (factors - 1).abs().max() > 1e-6:  # llama.cpp divides the frequencies by them
        yield "rope_freqs.weight", factors.float()
    tied = config.tie_word_embeddings
    for path, tensor in model.state_dict().items():
        if path.startswith("lm_head.") and tied:
            continue
        if path.endswith("_proj.bias") and not tensor.any():
            continue
        owner, _, kind = path.rpartition(".")
        if ".q_proj" in path:  # transformers scales the rotations of queries and of keys: here the queries take both
            tensor = halves_to_pairs(tensor, config.head_dim) * rotations.attention_scaling**2
        elif ".k_proj" in path:
            tensor = halves_to_pairs(tensor, config.head_dim)
        _, layer, part = owner.rpartition(".layers.")
        number, _, part = part.partition(".") if layer else ("", "", owner)
        yield f"blk.{number}.{GGUF_NAMES[part]}.{kind}" if layer else f"{GGUF_NAMES[part]}.{kind}", tensor


def halves_to_pairs(tensor: Tensor, head: int) -> Tensor:
    """Reorder the rows of every head from two halves to neighbouring pairs, which is what `deci` rotates."""
    return tensor.reshape(-1, 2, head // 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def choose_storage_type(
    tensor: Tensor, dtype: str, *, gives_logits: bool = False
) -> tuple[GGMLQuantizationType, str | None]:
    """The type that a tensor is stored as in a file of this type and, where it is another, why.

    As llama.cpp's own converter does it, vectors are float32, and a matrix whose rows cannot be divided into groups is
    float16. As llama-quantize does it, the matrix that gives the logits keeps more bits than 4 or 5.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    asked = GGMLQuantizationType[dtype.upper()]
    if tensor.ndim == 1:
        return GGMLQuantizationType.F32, None if dtype == "f32" else VECTORS
    if tensor.shape[-1] % GGML_QUANT_SIZES[asked][0]:
        return GGMLQuantizationType.F16, RAGGED
    if gives_logits and dtype.startswith(("q4", "q5")):
        return GGMLQuantizationType.Q8_0, HEAD
    return asked, None
