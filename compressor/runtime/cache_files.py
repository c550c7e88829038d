"""The entries of the cache as files: how large they are, when they were last used, and which of them go first.

An entry is used when it is written, read, or found to be there: the time of the file says when. A run marks the cache
while it lasts, so that nothing is removed that a living run has used. torch is not imported here.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressor.runtime.errors import InputError
from compressor.runtime.locks import OWNER_LOCK, SCRATCH, owned_directory, remove_abandoned
from compressor.runtime.resources import format_bytes

ENTRY = re.compile(r"[0-9a-f]{40}\.safetensors")
PARTIAL = ".partial-"  # an entry that is being written
RUNNING = ".running-"  # the mark of a living run
LIMIT_VARIABLE = "COMPRESSOR_CACHE_LIMIT"
USUAL_LIMIT = 20 * 10**9
DISK_SHARE = 10  # the usual limit is at most one part in so many of the disk
RECENT_SECONDS = 24 * 3600.0  # what was used so recently may be needed to resume, and is not removed unasked
LARGEST_HEADER = 64 * 2**20
PREFIXES = " KMGT"  # each is 1,000 of the one before it, or 1,024 where an i follows
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:(I?)B)?", re.IGNORECASE)


def default_directory() -> Path:
    """$COMPRESSOR_CACHE, else where this system keeps what can be made again."""
    named = os.environ.get("COMPRESSOR_CACHE")
    if named:
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "compressor"


def parse_size(words: str, option: str) -> float:
    """Bytes of a size such as 5GB (10⁹ bytes each, as everywhere here) or 5GiB (2³⁰); `none` is infinite: no limit."""
    if words.strip().lower() == "none":
        return math.inf
    match = SIZE.fullmatch(words.strip())
    if match is None:
        raise InputError(f"{option} {words!r} is not a size; use a number with MB, GB or TB, such as 5GB, or none")
    return float(match[1]) * (1024.0 if match[3] else 1000.0) ** PREFIXES.index(match[2].upper() or " ")


def choose_limit(directory: Path, asked: str | None = None) -> float:
    """The bytes that the cache may take: as asked, as the environment says, or 20 GB, at most a tenth of the disk."""
    if asked is not None:
        return parse_size(asked, "--limit")
    words = os.environ.get(LIMIT_VARIABLE)
    if words:
        return parse_size(words, LIMIT_VARIABLE)
    there = next(folder for folder in (directory.absolute(), *directory.absolute().parents) if folder.exists())
    return min(USUAL_LIMIT, shutil.disk_usage(there).total // DISK_SHARE)


@dataclass(frozen=True)
class Entry:
    """One file of the cache."""

    file: Path
    size: int
    used: float  # seconds since the epoch


@dataclass(frozen=True)
class EntryNotes:
    """What an entry says of itself: the kind of measurement, the hash of the model's weights, and the model's name.

    An entry that an earlier version wrote, or that is damaged, may say less.
    """

    kind: str | None = None
    weights: str | None = None
    model: str | None = None


def list_entries(directory: Path) -> list[Entry]:
    """The entries, the least recently used first. Files of other names are nobody's entries."""
    entries = []
    with os.scandir(directory) as files:
        for file in files:
            if ENTRY.fullmatch(file.name):
                with suppress(OSError):  # it has gone since
                    state = file.stat(follow_symlinks=False)
                    if file.is_file(follow_symlinks=False):
                        entries.append(Entry(Path(file.path), state.st_size, state.st_mtime))
    return sorted(entries, key=lambda entry: (entry.used, entry.file.name))


def read_notes(file: Path) -> EntryNotes:
    """What stands in the header of an entry; its tensors are not read."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 0 < length <= LARGEST_HEADER:
                return EntryNotes()
            notes = json.loads(stream.read(length))["__metadata__"]
        key = json.loads(notes["key"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return EntryNotes()
    model = key.get("model") if isinstance(key, dict) else None
    weights = model.get("weights") if isinstance(model, dict) else None
    kind = key.get("kind") if isinstance(key, dict) else None
    return EntryNotes(word(kind), word(weights), word(notes.get("model")))


def word(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def mark_used(file: Path) -> None:
    """Note that an entry was used now; in a cache that cannot be written it keeps its time."""
    with suppress(OSError):
        os.utime(file)


def living_runs(directory: Path) -> list[float]:
    """When the runs began that use this cache now. The marks of runs that were killed are removed."""
    remove_abandoned(directory, RUNNING)
    began = []
    for folder in directory.iterdir():
        if folder.name.startswith(RUNNING):
            with suppress(OSError):  # it has ended since
                began.append((folder / OWNER_LOCK).stat().st_mtime)
    return began


@dataclass(frozen=True)
class Pruning:
    """What a pruning removed, and what is left."""

    removed: int
    freed: int
    left: int  # bytes
    protected: int  # bytes of entries that a living run has used, or that were used recently


def prune(directory: Path, limit: float, unused_for: float = 0.0) -> Pruning:
    """Remove the least recently used entries until the others take at most `limit` bytes.

    What a living run has used stays, whatever the limit, and so does what was used in the last `unused_for` seconds.
    """
    for prefix in (PARTIAL, SCRATCH):
        remove_abandoned(directory, prefix)
    entries = list_entries(directory)  # before the runs: what a run writes that begins later is not among them
    latest = min([time.time() - unused_for if unused_for else math.inf, *living_runs(directory)])
    size = sum(entry.size for entry in entries)
    removed = freed = 0
    for entry in entries:
        if size - freed <= limit or entry.used >= latest:
            break
        if remove_unused(entry):
            removed, freed = removed + 1, freed + entry.size
    return Pruning(removed, freed, size - freed, sum(entry.size for entry in entries if entry.used >= latest))


def remove_unused(entry: Entry) -> bool:
    """Remove an entry, unless somebody has used it since it was listed, or it is not ours to remove."""
    try:
        if entry.file.stat().st_mtime != entry.used:
            return False
        entry.file.unlink()
    except OSError:
        return False
    return True


@contextmanager
def in_use(directory: Path | None, say: Callable[[str], None]) -> Iterator[None]:
    """A run that uses this cache: what it uses is safe from every pruning, and at its end the cache is pruned.

    A limit that cannot be read is refused before the run. A cache that cannot be written is left as it is.
    """
    if directory is None:
        yield
        return
    limit = choose_limit(directory)
    with ExitStack() as stack:
        try:
            stack.enter_context(owned_directory(directory, RUNNING))
        except OSError:
            limit = math.inf
        try:
            yield
        except KeyboardInterrupt:
            limit = math.inf  # whoever interrupts wants an end at once
            raise
        finally:
            if limit < math.inf:
                with suppress(OSError):
                    done = prune(directory, limit, RECENT_SECONDS)
                    if done.removed:
                        say(describe_pruning(done, limit))


def describe_pruning(done: Pruning, limit: float) -> str:
    """One line of what went and why."""
    entries = "entry" if done.removed == 1 else "entries"
    return (
        f"cache: the {done.removed:,} least recently used {entries} removed ({format_bytes(done.freed)}), because its "
        f"limit is {format_limit(limit)}"
    )


def format_limit(limit: float) -> str:
    return "none" if limit == math.inf else "0" if limit < 1 else format_bytes(int(limit))


def count_living(directory: Path, entries: Sequence[Entry]) -> tuple[int, int]:
    """How many runs use the cache now, and the bytes of entries that they have used."""
    began = living_runs(directory)
    return len(began), sum(entry.size for entry in entries if began and entry.used >= min(began))
