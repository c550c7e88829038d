"""The cache: what is in it and, when asked, its least recently used entries removed. torch is not imported."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from pathlib import Path

from compressor.report.cache_record import CacheGroup, CacheRecord, PrunedEntries
from compressor.runtime.cache_files import (
    Entry,
    EntryNotes,
    choose_limit,
    count_living,
    default_directory,
    list_entries,
    prune,
    read_notes,
)
from compressor.runtime.errors import InputError

UNKNOWN = "not known"


def run(named: Path | None, asked: str | None, *, prune: bool) -> CacheRecord:
    """What the cache holds and its limit, after the least recently used entries were removed if that is wanted."""
    directory = (named or find_default()).expanduser()
    limit = choose_limit(directory, asked)
    if directory.is_dir():
        try:
            return inspect(directory, limit, prune)
        except OSError as error:
            raise InputError(
                f"the cache {directory} cannot be read: {error.strerror}; name another with --cache"
            ) from error
    if directory.exists() or named is not None:
        what = "is no directory" if directory.exists() else "does not exist"
        raise InputError(f"the cache {directory} {what}; name the directory that --cache names in a run")
    return describe(directory, limit, [])


def find_default() -> Path:
    try:
        return default_directory()
    except RuntimeError as error:
        raise InputError("this user has no home, so there is no default cache; name one with --cache") from error


def inspect(directory: Path, limit: float, wanted: bool) -> CacheRecord:
    """The record of a cache that is there."""
    more: dict[str, object] = {}
    if wanted:
        done = prune(directory, limit)
        more["pruned"] = PrunedEntries(entries=done.removed, bytes=done.freed)
    entries = list_entries(directory)
    more["running"], more["used_by_runs"] = count_living(directory, entries)
    return describe(directory, limit, entries).model_copy(update=more)


def describe(directory: Path, limit: float, entries: list[Entry]) -> CacheRecord:
    """The record of these entries, the least recently used first."""
    notes = [read_notes(entry.file) for entry in entries]
    names = {note.weights: note.model for note in notes if note.weights and note.model}

    def name_model(note: EntryNotes) -> str:
        """The model's name; where no entry of it says it, the beginning of the hash of its weights."""
        if note.weights is None:
            return UNKNOWN
        return names.get(note.weights) or f"weights {note.weights[:12]}"

    return CacheRecord(
        directory=str(directory),
        entries=len(entries),
        bytes=sum(entry.size for entry in entries),
        limit=None if limit == math.inf else int(limit),
        oldest_use=as_date(entries[0]) if entries else None,
        newest_use=as_date(entries[-1]) if entries else None,
        kinds=group(entries, notes, lambda note: note.kind or UNKNOWN),
        models=group(entries, notes, name_model),
        running=0,
        used_by_runs=0,
    )


def group(entries: Iterable[Entry], notes: Iterable[EntryNotes], name: Callable[[EntryNotes], str]) -> list[CacheGroup]:
    """The entries of each name together, the largest first; entries come in the order of their last use."""
    groups: dict[str, list[Entry]] = {}
    for entry, note in zip(entries, notes, strict=True):
        groups.setdefault(name(note), []).append(entry)
    rows = [
        CacheGroup(
            name=name, entries=len(of_it), bytes=sum(entry.size for entry in of_it), newest_use=as_date(of_it[-1])
        )
        for name, of_it in groups.items()
    ]
    return sorted(rows, key=lambda row: (-row.bytes, row.name))


def as_date(entry: Entry) -> str:
    return datetime.fromtimestamp(entry.used, timezone.utc).isoformat(timespec="seconds")
