"""Write a compressed Llama-like model for vLLM: architecture DeciLMForCausalLM (`nemotron-nas`), a width per block.

The format follows the source of vLLM (model_executor/models/nemotron_nas.py); it was never run in vLLM. vLLM computes a
block's width from `ffn_mult` as int(2·ffn_mult·hidden/3), rounded up to a multiple of 256. So every width here is such
a multiple. It knows attention with as many query heads in every layer, in groups of one size, and layers without any
(`no_op`), whose input norm does not exist.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from compressor.export.llama import Llama, block_widths, head_counts
from compressor.patch.checkpoint import write_checkpoint

MULTIPLE = 256
CONFIGURATION = Path(__file__).with_name("configuration_decilm.py")


def write_decilm(llama: Llama, tokenizer: Any, directory: Path, dtype: torch.dtype) -> None:
    """Write the config, the code that reads it, weights and tokenizer into an empty directory."""
    write_checkpoint(llama.model, tokenizer, directory, dtype=dtype)
    file = directory / "config.json"
    config = decilm_config(
        json.loads(file.read_text(encoding="utf-8")),
        llama.layout.activation,
        block_widths(llama.model),
        head_counts(llama.model),
    )
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    shutil.copyfile(CONFIGURATION, directory / CONFIGURATION.name)


def decilm_config(
    config: dict[str, Any], activation: str, widths: list[int], heads: list[tuple[int, int]]
) -> dict[str, Any]:
    """The config.json of a DeciLM, made from that of a Llama, the widths of its blocks and its `head_counts`."""
    hidden = config["hidden_size"]
    blocks = [
        {
            "attention": {
                "n_heads_in_group": queries // keys if keys else None,
                "no_op": not keys,
                "replace_with_linear": False,
            },
            "ffn": {
                "ffn_mult": 3 * width / (2 * hidden),
                "hidden_act": activation,
                "no_op": False,
                "replace_with_linear": False,
            },
        }
        for width, (queries, keys) in zip(widths, heads, strict=True)
    ]
    return {
        **config,
        "architectures": ["DeciLMForCausalLM"],
        "auto_map": {"AutoConfig": f"{CONFIGURATION.stem}.DeciLMConfig"},
        "block_configs": blocks,
        "intermediate_size": max(widths),
        "mlp_bias": True,
        "model_type": "nemotron-nas",
    }
