"""What a loaded model is: where it came from, and all that its outputs depend on."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from compressor.models.offload import device_of
from compressor.runtime.cache import digest

SOURCE_ATTRIBUTE = "compressor_source"


@dataclass(frozen=True)
class Source:
    """Where a model came from. The hash covers names, types, shapes and bytes of all tensors, not their sharding."""

    model: str
    revision: str | None
    model_type: str
    weights_sha256: str
    dtype: torch.dtype


def source_of(model: PreTrainedModel) -> Source:
    """What `load` recorded; for a model that came another way, what its config and its present weights say."""
    recorded = getattr(model, SOURCE_ATTRIBUTE, None)
    if isinstance(recorded, Source):
        return recorded
    name = model.config.name_or_path or type(model).__name__
    if Path(name).is_dir():
        name = os.path.abspath(name)
    sha256 = digest(sorted(model.state_dict().items()))
    return Source(name, getattr(model.config, "_commit_hash", None), model.config.model_type, sha256, model.dtype)


def context_of(model: PreTrainedModel) -> int | None:
    """The tokens that the model can take, where its config says so."""
    config = model.config.get_text_config()
    return getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)


def identify(model: Any) -> dict[str, Any]:
    """All that a stored model's outputs depend on: weights, configuration, precision, device, libraries."""
    config = model.config.to_dict()
    for name in ("_name_or_path", "name_or_path", "transformers_version"):
        config.pop(name, None)
    return {
        "weights": source_of(model).weights_sha256,
        "config": hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest(),
        "dtype": str(model.dtype),
        "device": device_of(model).type,
        "threads": torch.get_num_threads(),
        **{name: version(name) for name in ("compressor", "torch", "transformers")},
    }
