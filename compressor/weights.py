"""The safetensors files of a model directory: which they are, what they hold, and their hash."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from compressor.errors import InputError
from compressor.hub import Snapshot, add_files, reason_of
from compressor.parsing import JSON_BYTES, parse_json, unique

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
STORAGE_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def read_json(path: Path, model: str, most: int = JSON_BYTES) -> dict[str, Any]:
    if not path.is_file():
        adapter = (path.parent / "adapter_config.json").is_file()
        remedy = "merge the adapter into its base model first" if adapter else "give the directory of a saved model"
        raise InputError(f"{model} has no {path.name}; {remedy}")
    try:
        content = parse_json(path, most)
    except (OSError, ValueError) as error:
        raise InputError(f"{path.name} of {model} cannot be read: {reason_of(error)}; save the model again") from error
    if not isinstance(content, dict):
        raise InputError(f"{path.name} of {model} is not a JSON object; save the model again")
    return content


def find_shards(directory: Path, model: str, snapshot: Snapshot | None) -> list[Path]:
    """The safetensors files from_pretrained will read, downloaded if need be."""
    names = [SINGLE]
    if (directory / INDEX).is_file() and not (directory / SINGLE).is_file():
        table = read_json(directory / INDEX, model).get("weight_map")
        if not isinstance(table, dict) or not table or not all(isinstance(name, str) for name in table.values()):
            raise InputError(f"{INDEX} of {model} has no weight_map; save the model again")
        names = sorted(set(table.values()))
    outside = [name for name in names if Path(name).name != name or "\\" in name]
    if outside:
        raise InputError(
            f"{INDEX} of {model} names {outside[0]!r}, which is outside the directory; save the model again"
        )
    other = next((name for name in names if not name.endswith(".safetensors") or set(name) & set("*?[]")), None)
    if other is not None:  # transformers would unpickle it
        raise InputError(f"{INDEX} of {model} names {other!r}, which is no safetensors file; save the model again")
    if snapshot:
        add_files(snapshot, names)
    missing = [name for name in names if not (directory / name).is_file()]
    if missing and missing != [SINGLE]:
        raise InputError(f"{model} lacks {missing[0]}, which its {INDEX} names; copy or download it again")
    if missing:
        pickled = sorted(path.name for pattern in PICKLES for path in directory.glob(pattern))
        if pickled:
            raise InputError(
                f"{model} has only pickle weights ({pickled[0]}), which can run code; convert to safetensors"
            )
        raise InputError(f"{model} has no safetensors weights; it needs {SINGLE}, or shards with {INDEX}")
    return [directory / name for name in names]


@dataclass(frozen=True)
class Stored:
    """What the header of a file says of one tensor."""

    file: Path
    shape: torch.Size
    dtype: torch.dtype | None  # None: not a floating-point number


def list_tensors(shards: list[Path], model: str) -> dict[str, Stored]:
    """Every stored tensor by name; a name that stands twice is refused, and so is an index that is wrong."""
    found: dict[str, Stored] = {}
    for shard in shards:
        with open_shard(shard, model) as file:
            refuse_repeated(shard, model)
            for name in file.keys():  # noqa: SIM118  it is not a mapping
                if name in found:
                    raise InputError(
                        f"{model} has {name} in {found[name].file.name} and in {shard.name}; save it again"
                    )
                part = file.get_slice(name)
                dtype = STORAGE_DTYPES.get(part.get_dtype())
                found[name] = Stored(shard, torch.Size(part.get_shape()), dtype)
    index = shards[0].with_name(INDEX)
    table = {} if shards[0].name == SINGLE or not index.is_file() else read_json(index, model)["weight_map"]
    for name, shard_name in table.items():
        if name not in found or found[name].file.name != shard_name:
            raise InputError(f"{INDEX} of {model} puts {name} into {shard_name}, which does not hold it; save it again")
    return found


def refuse_repeated(shard: Path, model: str) -> None:
    """Of two tensors of one name in a header safetensors takes the last, in silence."""
    with shard.open("rb") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
    try:
        json.loads(header, object_pairs_hook=unique)
    except ValueError as error:
        raise InputError(
            f"{shard.name} of {model} is damaged ({reason_of(error)}); copy or download it again"
        ) from error


def inspect_weights(stored: Mapping[str, Stored], model: str) -> tuple[torch.dtype, str]:
    """The dtype that holds most of the floating-point bytes, and the hash of all tensors."""
    sizes: Counter[torch.dtype] = Counter()
    for tensor in stored.values():
        if tensor.dtype:
            sizes[tensor.dtype] += tensor.dtype.itemsize * tensor.shape.numel()
    if not sizes:
        raise InputError(f"{model} has no floating-point weights; give an unquantised model")
    return sizes.most_common(1)[0][0], digest(read_tensors({name: t.file for name, t in stored.items()}, model))


def open_shard(shard: Path, model: str) -> Any:
    """The open file; its header and its length are checked here, so a truncated file does not get further."""
    try:
        return safe_open(shard, framework="pt")
    except (SafetensorError, OSError) as error:
        with shard.open("rb") as file:
            pointer = file.read(40).startswith(b"version https://git-lfs")
        reason = "only a Git LFS pointer" if pointer else f"damaged ({reason_of(error)})"
        raise InputError(f"{shard.name} of {model} is {reason}; copy or download it again") from error


def read_tensors(place: dict[str, Path], model: str) -> Iterator[tuple[str, Tensor]]:
    files = {path: open_shard(path, model) for path in set(place.values())}
    for name in sorted(place):
        yield name, files[place[name]].get_tensor(name)


def digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 of named tensors in the given order, one tensor in memory at a time."""
    sha = hashlib.sha256()
    for name, tensor in tensors:
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        sha.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()
