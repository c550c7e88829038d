"""The identity of a loaded model: where it came from, and everything that its outputs depend on."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, try_to_load_from_cache
from transformers import PreTrainedModel

from compressor.models.config_check import CONFIG_BYTES
from compressor.models.offload import device_of
from compressor.runtime.cache import digest
from compressor.runtime.card_rules import PLAIN_FILE, carry_over, read_front_matter
from compressor.runtime.errors import InputError
from compressor.runtime.names import DEMO
from compressor.runtime.network import is_hub_id, is_repo_id
from compressor.runtime.safe_files import read_json

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
    """The source that `load` recorded; for a model loaded otherwise, one made from its config and present weights."""
    recorded = getattr(model, SOURCE_ATTRIBUTE, None)
    if isinstance(recorded, Source):
        return recorded
    name = model.config.name_or_path or type(model).__name__
    if Path(name).is_dir():
        name = os.path.abspath(name)
    sha256 = digest(sorted(model.state_dict().items()))
    return Source(name, getattr(model.config, "_commit_hash", None), model.config.model_type, sha256, model.dtype)


def context_length(model: PreTrainedModel) -> int | None:
    """The longest sequence in tokens that the model takes, or None where its config does not say."""
    config = model.config.get_text_config()
    return getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)


def identify(model: Any) -> dict[str, Any]:
    """Everything that the outputs of a model depend on, for cache keys: weights, config, dtype, device, libraries."""
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


def describe_origin(source: Source) -> dict[str, Any]:
    """Licence, languages, data sets and base model for the card of a compressed copy, from the source's own card."""
    file = find_card(source)
    values = read_front_matter(file) if file else {}
    repo = source.model if is_hub_id(source.model, source.revision) else None
    link = values.get("license_link")
    if repo and isinstance(link, str) and PLAIN_FILE.fullmatch(link):  # a file of the source's repository
        values["license_link"] = f"https://huggingface.co/{repo}/blob/{source.revision or 'main'}/{link}"
    base = {} if repo else find_base_model(source, values)
    return {**base, **carry_over(values)}


def find_card(source: Source) -> Path | None:
    """README.md of the source, in its directory or in the Hub cache; nothing is downloaded."""
    if is_hub_id(source.model, source.revision):
        cached = try_to_load_from_cache(source.model, constants.REPOCARD_NAME, revision=source.revision)
        return Path(cached) if isinstance(cached, str) else None
    directory = DEMO if source.model == "demo" else Path(source.model)
    return directory / constants.REPOCARD_NAME if directory.is_absolute() else None


def find_base_model(source: Source, values: Mapping[str, Any]) -> dict[str, str]:
    """The base model of a local model, if its card or its config names exactly one repository, OWNER/NAME."""
    base = values.get("base_model")
    names = [base[0] if isinstance(base, list) and len(base) == 1 else base]  # a list of several is not used
    if Path(source.model).is_absolute():
        with suppress(InputError):
            names.append(read_json(Path(source.model) / "config.json", source.model, CONFIG_BYTES).get("_name_or_path"))
    for name in names:
        if isinstance(name, str) and "/" in name and is_repo_id(name) and not Path(name).exists():
            return {"base_model": name}
    return {}
