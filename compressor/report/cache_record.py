"""What `compress cache` shows: the record that `--json` prints, and its lines and tables."""

from __future__ import annotations

from pydantic import Field

from compressor.report.grid import Grid
from compressor.report.record_parts import Count, Part
from compressor.runtime.resources import format_bytes


class CacheGroup(Part):
    """Entries of one kind of measurement, or of one model."""

    name: str
    entries: Count
    bytes: Count
    newest_use: str


class PrunedEntries(Part):
    """What a pruning removed."""

    entries: Count
    bytes: Count


class CacheRecord(Part):
    """What the cache holds. Dates are those of the last use, in UTC; a limit of None is no limit."""

    directory: str
    entries: Count
    bytes: Count
    limit: Count | None
    oldest_use: str | None
    newest_use: str | None
    kinds: list[CacheGroup]
    models: list[CacheGroup]
    running: Count  # runs that use the cache now
    used_by_runs: Count  # bytes of entries that they have used, which no pruning removes
    pruned: PrunedEntries | None = Field(default=None)


def cache_tables(record: CacheRecord) -> list[Grid]:
    """One table of the kinds of measurement, one of the models."""
    tables = []
    for title, groups in (("measurement", record.kinds), ("model", record.models)) if record.entries else ():
        table = Grid((title, "entries", "size", "last used"), left=(title,), optional=("entries",))
        for group in groups:
            size = format_bytes(group.bytes)
            table.add_row(group.name, f"{group.entries:,}", size, as_words(group.newest_use))
        tables.append(table)
    return tables


def cache_lines(record: CacheRecord) -> list[str]:
    lines = []
    if record.pruned is not None:
        removed = record.pruned
        lines.append(
            f"removed: {count(removed.entries)}, {format_bytes(removed.bytes)}"
            if removed.entries
            else "removed: nothing, no unused entry stands above the limit"
        )
    limit = "no limit" if record.limit is None else f"limit {format_size(record.limit)}"
    lines.append(f"cache: {record.directory}: {count(record.entries)}, {format_size(record.bytes)} ({limit})")
    if record.oldest_use and record.newest_use:
        lines.append(f"last used: between {as_words(record.oldest_use)} and {as_words(record.newest_use)} UTC")
    if record.running:
        runs = "1 run uses" if record.running == 1 else f"{record.running} runs use"
        lines.append(f"in use: {runs} it now; {format_size(record.used_by_runs)} of it stay for them")
    if record.limit is not None and record.bytes > record.limit:
        over = format_bytes(record.bytes - record.limit)
        lines.append(f"over the limit by {over}: compress cache --prune removes what was not used for longest")
    return lines


def count(entries: int) -> str:
    return "1 entry" if entries == 1 else f"{entries:,} entries"


def format_size(size: int) -> str:
    return format_bytes(size) if size else "0"


def as_words(date: str) -> str:
    """A date of the record to the minute."""
    return date[:16].replace("T", " ")
