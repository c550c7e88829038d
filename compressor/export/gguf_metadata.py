"""The header of a GGUF file, read from its first bytes alone: no tensor is read, neither numpy nor torch is imported.

The package `gguf` makes a numpy array of every token of the vocabulary, which takes seconds where this takes a tenth.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressor.runtime.errors import InputError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
DEEPEST = 4  # arrays in arrays
MOST_DIMENSIONS = 4
# The types that an export has: elements of a group, and its bytes.
TENSOR_TYPES = {0: (1, 4), 1: (1, 2), 30: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34)}
USUAL_ALIGNMENT = 32


class Damaged(ValueError):
    """The header is not that of a whole GGUF file; the message says why."""


@dataclass(frozen=True)
class Header:
    """What a GGUF file says of itself. Arrays, such as the vocabulary, are left out."""

    values: dict[str, Any]
    places: dict[str, tuple[int, int]]  # of every string: where its bytes begin, and how many there are


@dataclass
class Cursor:
    """A place in a file that moves on as it is read."""

    data: Any
    at: int = 0

    def number(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self.data, self.at)
        self.at += struct.calcsize(f"<{code}")
        return value

    def skip(self, count: int) -> int:
        """Move on by so many bytes; return where they begin."""
        start = self.at
        self.at += count
        if self.at > len(self.data):
            raise Damaged("it ends within its header")
        return start

    def string(self) -> str:
        length = self.number("Q")
        start = self.skip(length)
        return bytes(self.data[start : self.at]).decode("utf-8")

    def value(self, kind: int, depth: int = 0) -> Any:
        """A number or a string; an array is skipped, and None stands for it."""
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == STRING:
            return self.string()
        if kind != ARRAY or depth >= DEEPEST:
            raise Damaged(f"it has a value of type {kind}")
        inner, count = self.number("I"), self.number("Q")
        if inner in SCALARS:
            self.skip(count * struct.calcsize(SCALARS[inner]))
        elif inner == STRING:
            for _ in range(count):
                self.skip(self.number("Q"))
        else:
            for _ in range(count):
                self.value(inner, depth + 1)
        return None


def read_header(file: Path) -> Header:
    """The metadata of a GGUF file. One that is no GGUF file, or ends before its last tensor, is refused."""
    try:
        with file.open("rb") as stream:
            if stream.read(4) != MAGIC:
                raise InputError(f"{file} is not a GGUF file; give one that compress export --to gguf wrote")
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return parse_header(data)
    except FileNotFoundError:
        raise InputError(f"file {file} does not exist; give one that compress export --to gguf wrote") from None
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror or error}; check its name and rights") from error
    except (Damaged, struct.error, UnicodeDecodeError) as error:
        reason = str(error) if isinstance(error, Damaged) else "it ends within its header, or has other bytes there"
        raise InputError(f"{file} is damaged: {reason}; copy it again, or export it again") from error


def parse_header(data: Any) -> Header:
    cursor = Cursor(data, len(MAGIC))
    version, tensors, keys = (cursor.number(code) for code in "IQQ")
    if version not in VERSIONS:
        raise Damaged(f"it is of GGUF version {version}, and known are {', '.join(map(str, VERSIONS))}")
    values: dict[str, Any] = {}
    places: dict[str, tuple[int, int]] = {}
    for _ in range(keys):
        key, kind = cursor.string(), cursor.number("I")
        value = cursor.value(kind)
        if value is not None:
            values[key] = value
        if kind == STRING:
            length = len(value.encode())
            places[key] = cursor.at - length, length
    end = max((read_tensor_end(cursor) for _ in range(tensors)), default=0)
    alignment = values.get("general.alignment", USUAL_ALIGNMENT)
    alignment = alignment if isinstance(alignment, int) and alignment > 0 else USUAL_ALIGNMENT
    missing = -(-cursor.at // alignment) * alignment + end - len(data)
    if missing > 0:
        raise Damaged(f"it ends {missing:,} bytes before its last tensor does")
    return Header(values, places)


def read_tensor_end(cursor: Cursor) -> int:
    """Where the data of the next listed tensor ends, counted from the first tensor's."""
    cursor.string()
    dimensions = cursor.number("I")
    if dimensions > MOST_DIMENSIONS:
        raise Damaged(f"it has a tensor of {dimensions} dimensions")
    elements = 1
    for _ in range(dimensions):
        elements *= cursor.number("Q")
    kind, offset = cursor.number("I"), cursor.number("Q")
    group, size = TENSOR_TYPES.get(kind, (1, 0))  # the size of other types is not known here
    return int(offset + elements // group * size)


def replace_string(file: Path, key: str, value: str) -> None:
    """Write another value over a string, filled up with spaces. It must not be longer than the one that is there."""
    begin, length = read_header(file).places[key]
    content = value.encode()
    if len(content) > length:
        raise ValueError(f"{key} has room for {length} bytes, and {len(content)} are given")
    with file.open("r+b") as stream:
        stream.seek(begin)
        stream.write(content.ljust(length))
