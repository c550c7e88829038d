"""The hash of the weights that a checkpoint stores, from its files alone: no model is loaded, torch is not imported."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressor.runtime.errors import InputError, reason_of
from compressor.runtime.safe_files import read_json, unique_keys

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPE_NAMES = {  # of torch, in the order in which safetensors lays tensors out
    **{"U64": "uint64", "I64": "int64", "F64": "float64", "C64": "complex64", "F32": "float32", "U32": "uint32"},
    **{"I32": "int32", "BF16": "bfloat16", "F16": "float16", "U16": "uint16", "I16": "int16"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "I8": "int8", "U8": "uint8", "BOOL": "bool"},
}
HEADER_BYTES = 100_000_000  # at most, as safetensors has it
CHUNK_BYTES = 2**20


@dataclass(frozen=True)
class Entry:
    """Where a tensor is stored, and what `runtime.cache.digest` says of it besides its bytes."""

    file: Path
    begin: int
    size: int
    description: str


def hash_stored(directory: Path) -> str | None:
    """SHA-256 of names, types, shapes and bytes of all tensors, however they are sharded; None without weight files.

    It is the `weights_sha256` of the model that `load_model` makes of the directory.
    """
    entries: dict[str, Entry] = {}
    files = list_files(directory)
    for file in files:
        entries |= read_entries(file, str(directory))
    sha = hashlib.sha256()
    for name in sorted(entries):
        entry = entries[name]
        sha.update(f"{name} {entry.description}\n".encode())
        with entry.file.open("rb") as stream:
            stream.seek(entry.begin)
            left = entry.size
            while left:
                chunk = stream.read(min(left, CHUNK_BYTES))
                if not chunk:
                    raise InputError(f"{entry.file} ended while it was read; was it changed? copy it again")
                sha.update(chunk)
                left -= len(chunk)
    return sha.hexdigest() if files else None


def list_files(directory: Path) -> list[Path]:
    """The weight files that from_pretrained would read."""
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    if not (directory / INDEX).is_file():
        return []
    table = read_json(directory / INDEX, str(directory)).get("weight_map")
    names = (
        set(table.values()) if isinstance(table, dict) and all(isinstance(n, str) for n in table.values()) else set()
    )
    missing = next(
        (name for name in sorted(names) if Path(name).name != name or not (directory / name).is_file()), None
    )
    if missing is not None or not names:
        raise InputError(f"{directory} lacks {missing or 'weights'}, which its {INDEX} should name; copy it again")
    return [directory / name for name in sorted(names)]


def read_entries(file: Path, model: str) -> dict[str, Entry]:
    """The tensors that the header of a safetensors file lists."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = stream.read(length) if length <= min(size - 8, HEADER_BYTES) else b""
    try:
        values: dict[str, Any] = json.loads(header, object_pairs_hook=unique_keys)
        return {
            name: read_entry(file, 8 + length, size, value) for name, value in values.items() if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{file.name} of {model} is damaged ({reason_of(error)}); copy or download it again"
        ) from error


def read_entry(file: Path, start: int, size: int, value: Mapping[str, Any]) -> Entry:
    begin, end = value["data_offsets"]
    if not 0 <= begin <= end <= size - start:
        raise ValueError("a tensor lies outside the file")
    return Entry(file, start + begin, end - begin, f"torch.{DTYPE_NAMES[value['dtype']]} {tuple(value['shape'])}")
