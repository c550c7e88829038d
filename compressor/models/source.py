"""The identity of a loaded model: where it came from, and everything that its outputs depend on."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, try_to_load_from_cache
from torch import Tensor
from transformers import PreTrainedModel

from compressor.models.config_check import CONFIG_BYTES
from compressor.models.offload import device_of, disk_weights_of, is_as_stored, read_tensor
from compressor.runtime.cache import bytes_of, digest
from compressor.runtime.card_rules import PLAIN_FILE, carry_over, read_front_matter
from compressor.runtime.errors import InputError
from compressor.runtime.names import BUILT_IN_MODELS
from compressor.runtime.network import is_hub_id, is_repo_id
from compressor.runtime.safe_files import read_json

SOURCE_ATTRIBUTE = "compressor_source"
HASHES_ATTRIBUTE = "compressor_hashes"  # of a model: hashes of its weights, by their checksum
PACKAGES = ("compressor", "torch", "transformers")  # whose version stands for their code


@dataclass(frozen=True)
class Source:
    """Where a model came from. The hash covers names, types, shapes and bytes of all tensors, not their sharding."""

    model: str
    revision: str | None
    model_type: str
    weights_sha256: str
    dtype: torch.dtype


def record_source(model: PreTrainedModel, source: Source) -> None:
    """Note on a model that was just loaded where it came from. Its present weights are those of the source."""
    setattr(model, SOURCE_ATTRIBUTE, source)
    setattr(model, HASHES_ATTRIBUTE, {("present", checksum(model)): source.weights_sha256})


def source_of(model: PreTrainedModel) -> Source:
    """The source that `load` recorded; for a model loaded otherwise, one made from its config and present weights."""
    recorded = getattr(model, SOURCE_ATTRIBUTE, None)
    if isinstance(recorded, Source):
        return recorded
    name = model.config.name_or_path or type(model).__name__
    if Path(name).is_dir():
        name = os.path.abspath(name)
    sha256 = hash_once(model, "stored", lambda: digest(sorted(model.state_dict().items())))
    return Source(name, getattr(model.config, "_commit_hash", None), model.config.model_type, sha256, model.dtype)


def stored_dtype(model: PreTrainedModel) -> torch.dtype:
    """The dtype of the checkpoint that the model came from."""
    recorded = getattr(model, SOURCE_ATTRIBUTE, None)
    return recorded.dtype if isinstance(recorded, Source) else model.dtype


def context_length(model: PreTrainedModel) -> int | None:
    """The longest sequence in tokens that the model takes, or None where its config does not say."""
    config = model.config.get_text_config()
    return getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)


def identify(model: Any) -> dict[str, Any]:
    """Everything that the outputs of a model depend on, for cache keys: its present weights and modules, config, dtype,
    device, attention, libraries, and the code that came with it."""
    config = model.config.to_dict()
    for name in ("_name_or_path", "name_or_path", "transformers_version"):
        config.pop(name, None)
    return {
        "weights": hash_once(model, "present", lambda: digest(present_tensors(model))),
        "modules": sha256_of(re.sub(r" at 0x[0-9a-f]+", "", repr(model))),
        "config": sha256_of(json.dumps(config, sort_keys=True, default=str)),
        "attention": str(getattr(model.config.get_text_config(), "_attn_implementation", None)),
        "code": hash_code(model),
        "dtype": str(model.dtype),
        "device": device_of(model).type,
        "threads": torch.get_num_threads(),
        **{name: version(name) for name in PACKAGES},
    }


def identify_weights(model: Any) -> dict[str, Any]:
    """What a model computes, wherever and however it runs: its present weights, its modules and its config."""
    identity = identify(model)
    return {name: identity[name] for name in ("weights", "modules", "config")}


def sha256_of(words: str) -> str:
    return hashlib.sha256(words.encode()).hexdigest()


def hash_once(model: Any, what: str, compute: Callable[[], str]) -> str:
    """The hash that `compute` gives for the present weights. It is computed again only when they have changed."""
    hashes = model.__dict__.setdefault(HASHES_ATTRIBUTE, {})
    key = (what, checksum(model))
    if key not in hashes:
        hashes[key] = compute()
    return str(hashes[key])


def named_tensors(model: Any) -> list[tuple[str, Tensor]]:
    """All parameters and buffers by name, also buffers that are not stored; a tied parameter stands there once."""
    return sorted([*model.named_parameters(), *model.named_buffers()], key=lambda item: item[0])


def present_tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """The same, one after the other; those that are on disk are read."""
    for name, _ in named_tensors(model):
        yield name, read_tensor(model, name)


def checksum(model: Any) -> str:
    """A checksum of all weights in memory, several times cheaper than their hash: it tells whether they have changed.

    It reads every byte, because torch's version counters miss what is written through `.data` or numpy. Weights on disk
    count by their name while they are as they were read.
    """
    disk = disk_weights_of(model)
    rows = []
    for name, tensor in named_tensors(model):
        unread = disk is not None and is_as_stored(disk, name, tensor)
        content = "on disk" if unread else f"{tensor.dtype} {tuple(tensor.shape)} {zlib.crc32(bytes_of(tensor))}"
        rows.append(f"{name} {content}")
    return sha256_of("\n".join(rows))


def hash_code(model: Any) -> str | None:
    """A hash of the Python files that define a model's modules, where no library's version stands for them.

    Code that came with a model is copied into one directory, whose files import each other: all of them count.
    """
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    own = {kind for kind in kinds if kind.__module__.partition(".")[0] not in (*PACKAGES, *sys.stdlib_module_names)}
    files: set[Path] = set()
    for kind in own:
        with suppress(TypeError, OSError):  # a class that was typed in has no file; `modules` has its name
            file = Path(inspect.getfile(kind))
            files.update(file.parent.glob("*.py") if kind.__module__.startswith("transformers_modules.") else [file])
    contents = sorted((file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files if file.is_file())
    return sha256_of(json.dumps(contents)) if contents else None


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
    directory = BUILT_IN_MODELS.get(source.model, Path(source.model))
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
