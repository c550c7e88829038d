"""The safetensors files of a model directory: finding them, listing and reading their tensors, hashing, writing."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from compressor.models.hub import Snapshot, download_files
from compressor.runtime.cache import bytes_of, digest
from compressor.runtime.errors import InputError, reason_of
from compressor.runtime.safe_files import read_json, unique_keys
from compressor.runtime.stored_weights import DTYPE_NAMES, INDEX, SINGLE

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
STORAGE_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
SAFETENSORS_DTYPES = {label: getattr(torch, name) for label, name in DTYPE_NAMES.items()}


def find_shards(directory: Path, model: str, snapshot: Snapshot | None) -> list[Path]:
    """The safetensors files that from_pretrained will read; for a hub snapshot they are downloaded first."""
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
    not_safetensors = next(
        (name for name in names if not name.endswith(".safetensors") or set(name) & set("*?[]")), None
    )
    if not_safetensors is not None:  # transformers would unpickle it
        raise InputError(
            f"{INDEX} of {model} names {not_safetensors!r}, which is no safetensors file; save the model again"
        )
    if snapshot:
        download_files(snapshot, names)
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
class StoredTensor:
    """The entry of one tensor in the header of a file."""

    file: Path
    shape: torch.Size
    dtype: torch.dtype | None  # None: not a floating-point number


def list_tensors(shards: list[Path], model: str) -> dict[str, StoredTensor]:
    """Every stored tensor by name; a name that occurs twice is refused, and so is an index that does not match."""
    tensors: dict[str, StoredTensor] = {}
    for shard in shards:
        with open_shard(shard, model) as file:
            refuse_repeated_names(shard, model)
            for name in file.keys():  # noqa: SIM118  it is not a mapping
                if name in tensors:
                    raise InputError(
                        f"{model} has {name} in {tensors[name].file.name} and in {shard.name}; save it again"
                    )
                part = file.get_slice(name)
                if part.get_dtype() not in SAFETENSORS_DTYPES:
                    raise InputError(f"{model} has {name} as {part.get_dtype()}; give an unquantised model")
                dtype = STORAGE_DTYPES.get(part.get_dtype())
                tensors[name] = StoredTensor(shard, torch.Size(part.get_shape()), dtype)
    index = shards[0].with_name(INDEX)
    table = {} if shards[0].name == SINGLE or not index.is_file() else read_json(index, model)["weight_map"]
    for name, shard_name in table.items():
        if name not in tensors or tensors[name].file.name != shard_name:
            raise InputError(f"{INDEX} of {model} puts {name} into {shard_name}, which does not hold it; save it again")
    return tensors


def refuse_repeated_names(shard: Path, model: str) -> None:
    """Refuse a header with two tensors of one name, of which safetensors silently takes the last."""
    with shard.open("rb") as file:
        header = file.read(int.from_bytes(file.read(8), "little"))
    try:
        json.loads(header, object_pairs_hook=unique_keys)
    except ValueError as error:
        raise InputError(
            f"{shard.name} of {model} is damaged ({reason_of(error)}); copy or download it again"
        ) from error


def main_dtype(stored: Mapping[str, StoredTensor], model: str) -> torch.dtype:
    """The dtype that holds most of the floating-point bytes."""
    sizes: Counter[torch.dtype] = Counter()
    for tensor in stored.values():
        if tensor.dtype:
            sizes[tensor.dtype] += tensor.dtype.itemsize * tensor.shape.numel()
    if not sizes:
        raise InputError(f"{model} has no floating-point weights; give an unquantised model")
    return sizes.most_common(1)[0][0]


def hash_weights(stored: Mapping[str, StoredTensor], model: str, computed: torch.dtype) -> str:
    """The hash of all tensors, one in memory at a time; NaN and infinite values in the dtype `computed` are refused."""

    def finite_tensors() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in read_tensors({name: tensor.file for name, tensor in stored.items()}):
            if tensor.dtype in STORAGE_DTYPES.values() and not tensor.to(computed).isfinite().all():
                kind = str(computed).removeprefix("torch.")
                raise InputError(
                    f"{model} has NaN or infinite values in {name} (as {kind}); use a sound checkpoint or "
                    "--dtype float32"
                )
            yield name, tensor

    return digest(finite_tensors())


def open_shard(shard: Path, model: str) -> Any:
    """The open file. safetensors checks header and length on opening, so a truncated file is refused here."""
    try:
        return safe_open(shard, framework="pt")
    except (SafetensorError, OSError) as error:
        with shard.open("rb") as file:
            pointer = file.read(40).startswith(b"version https://git-lfs")
        reason = "only a Git LFS pointer" if pointer else f"damaged ({reason_of(error)})"
        raise InputError(f"{shard.name} of {model} is {reason}; copy or download it again") from error


class Shard:
    """A safetensors file, read tensor by tensor.

    Not mapped into memory: the pages of a mapped file count as memory of this process for as long as it is open.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        self.entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        self.start = 8 + length

    def read(self, name: str) -> Tensor:
        entry = self.entries[name]
        begin, end = entry["data_offsets"]
        data = torch.empty(end - begin, dtype=torch.uint8)
        if end > begin:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self.start + begin)
                view = memoryview(data.numpy().data)
                while view:
                    count = file.readinto(view)
                    if not count:
                        raise InputError(f"{self.path} ended while it was read; was it changed? copy it again")
                    view = view[count:]
        return data.view(SAFETENSORS_DTYPES[entry["dtype"]]).reshape(entry["shape"])


def write_shard(path: Path, tensors: Mapping[str, Tensor], read: Callable[[str], Tensor]) -> None:
    """Write a safetensors file with one tensor in memory at a time, byte for byte as safetensors itself would.

    `tensors` give names, shapes and dtypes (they may be on the meta device); `read` returns the contents of one.
    """
    ranked = {dtype: (rank, label) for rank, (label, dtype) in enumerate(SAFETENSORS_DTYPES.items())}
    names = sorted(tensors, key=lambda name: (ranked[tensors[name].dtype][0], name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in names:
        end = offset + tensors[name].numel() * tensors[name].element_size()
        label = ranked[tensors[name].dtype][1]
        header[name] = {"dtype": label, "shape": list(tensors[name].shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name in names:
            tensor = read(name)
            assert (tensor.dtype, tensor.shape) == (tensors[name].dtype, tensors[name].shape), name
            file.write(bytes_of(tensor))


def read_tensors(files: dict[str, Path]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of these names, in their order, each from its file."""
    shards = {path: Shard(path) for path in set(files.values())}
    for name in sorted(files):
        yield name, shards[files[name]].read(name)
