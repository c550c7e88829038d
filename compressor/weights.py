"""The safetensors files of a model directory: which they are, what they hold, and their hash."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from compressor.errors import InputError
from compressor.hub import Snapshot, add_files, reason_of

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
STORAGE_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
SAFETENSORS_DTYPES = {  # in the order in which safetensors lays tensors out
    **{"U64": torch.uint64, "I64": torch.int64, "F64": torch.float64, "C64": torch.complex64, "F32": torch.float32},
    **{"U32": torch.uint32, "I32": torch.int32, "BF16": torch.bfloat16, "F16": torch.float16, "U16": torch.uint16},
    **{"I16": torch.int16, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I8": torch.int8},
    **{"U8": torch.uint8, "BOOL": torch.bool},
}


def read_json(path: Path, model: str) -> dict[str, Any]:
    if not path.is_file():
        adapter = (path.parent / "adapter_config.json").is_file()
        remedy = "merge the adapter into its base model first" if adapter else "give the directory of a saved model"
        raise InputError(f"{model} has no {path.name}; {remedy}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
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
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise InputError(
            f"{INDEX} of {model} names {outside[0]!r}, which is outside the directory; save the model again"
        )
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


def locate_tensors(shards: list[Path], model: str) -> tuple[dict[str, Path], torch.dtype]:
    """Which file holds which tensor, and the dtype that holds most of the floating-point bytes."""
    place: dict[str, Path] = {}
    sizes: Counter[torch.dtype] = Counter()
    for shard in shards:
        with open_shard(shard, model) as file:
            for name in file.keys():  # noqa: SIM118  it is not a mapping
                place[name] = shard
                part = file.get_slice(name)
                if part.get_dtype() not in SAFETENSORS_DTYPES:
                    raise InputError(f"{model} has {name} as {part.get_dtype()}; give an unquantised model")
                dtype = STORAGE_DTYPES.get(part.get_dtype())
                if dtype:
                    sizes[dtype] += dtype.itemsize * torch.Size(part.get_shape()).numel()
    if not sizes:
        raise InputError(f"{model} has no floating-point weights; give an unquantised model")
    return place, sizes.most_common(1)[0][0]


def hash_weights(place: dict[str, Path], model: str, computed: torch.dtype) -> str:
    """The hash of all tensors, one in memory at a time; NaN and infinite values, as computed with, are refused."""

    def sound() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in read_tensors(place):
            if tensor.dtype in STORAGE_DTYPES.values() and not tensor.to(computed).isfinite().all():
                kind = str(computed).removeprefix("torch.")
                raise InputError(
                    f"{model} has NaN or infinite values in {name} (as {kind}); use a sound checkpoint or "
                    "--dtype float32"
                )
            yield name, tensor

    return digest(sound())


def open_shard(shard: Path, model: str) -> Any:
    """The open file; its header and its length are checked here, so a truncated file does not get further."""
    try:
        return safe_open(shard, framework="pt")
    except (SafetensorError, OSError) as error:
        with shard.open("rb") as file:
            pointer = file.read(40).startswith(b"version https://git-lfs")
        reason = "only a Git LFS pointer" if pointer else f"damaged ({reason_of(error)})"
        raise InputError(f"{shard.name} of {model} is {reason}; copy or download it again") from error


class Shard:
    """A safetensors file, read tensor by tensor.

    Not mapped into memory: pages of a mapped file count as this process's own for as long as it is open.
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

    `tensors` say names, shapes and dtypes (they may be on the meta device); `read` gives their contents.
    """
    kinds = {dtype: (place, word) for place, (word, dtype) in enumerate(SAFETENSORS_DTYPES.items())}
    names = sorted(tensors, key=lambda name: (kinds[tensors[name].dtype][0], name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in names:
        end = offset + tensors[name].numel() * tensors[name].element_size()
        word = kinds[tensors[name].dtype][1]
        header[name] = {"dtype": word, "shape": list(tensors[name].shape), "data_offsets": [offset, end]}
        offset = end
    words = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    words += b" " * (-len(words) % 8)
    with path.open("wb") as file:
        file.write(len(words).to_bytes(8, "little") + words)
        for name in names:
            tensor = read(name)
            assert (tensor.dtype, tensor.shape) == (tensors[name].dtype, tensors[name].shape), name
            file.write(bytes_of(tensor))


def bytes_of(tensor: Tensor) -> Any:
    """A view of the tensor's bytes."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def read_tensors(place: dict[str, Path]) -> Iterator[tuple[str, Tensor]]:
    shards = {path: Shard(path) for path in set(place.values())}
    for name in sorted(place):
        yield name, shards[place[name]].read(name)


def digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 of named tensors in the given order, one tensor in memory at a time."""
    sha = hashlib.sha256()
    for name, tensor in tensors:
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        sha.update(bytes_of(tensor))
    return sha.hexdigest()
