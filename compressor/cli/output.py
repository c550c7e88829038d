"""The result on stdout: JSON alone, or tables and a few lines. Control characters are escaped."""

from __future__ import annotations

import codecs
import json
import re
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, TextIO

from compressor.runtime.errors import visible

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.segment import Segment
    from rich.table import Table

    from compressor.report.record_parts import Part

# JSON escapes only the control characters below a space; these command a terminal as well, or cannot be encoded.
UNPRINTABLE = re.compile("[\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

NOT_ASCII = re.compile("[\x7f-\U0010ffff]")


class Fitting(Protocol):
    """What becomes a table for a terminal of some width."""

    def fitted(self, width: int) -> Table: ...


class EscapedTable:
    """A table as wide as the terminal, in whose cells control characters are escaped."""

    def __init__(self, table: Fitting) -> None:
        self.table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for segment in console.render(self.table.fitted(options.max_width), options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))


def emit(
    record: Part,
    as_json: bool,
    lines: list[str],
    table: Fitting | Sequence[Fitting] | None,
    *,
    without: str | None = None,
) -> None:
    """Print the record as JSON, or the tables and the lines. Of several processes only the first prints.

    `without` is a key of the record that its JSON leaves out.
    """
    processes = sys.modules.get("compressor.runtime.distributed")  # importing it here would import torch
    first = processes is None or processes.rank() == 0
    if processes is not None:
        processes.leave_processes()
    if not first:
        return
    if as_json:
        from compressor.runtime.safe_files import to_json

        value = {key: part for key, part in record.to_json_value().items() if key != without}
        escaped = UNPRINTABLE if is_utf8(sys.stdout) else NOT_ASCII
        print(escaped.sub(lambda match: json.dumps(match[0])[1:-1], to_json(value)))
        return
    from rich.console import Console

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    for part in table if isinstance(table, Sequence) else [table] if table else []:
        console.print(EscapedTable(part))
        console.print()
    for line in lines:
        # Sentences are broken between words; a command, which is indented, stays whole, so that it can be copied.
        whole = line.startswith(" ") or not sys.stdout.isatty()
        console.print(escape_line(line), markup=False, soft_wrap=whole)


def is_utf8(stream: TextIO) -> bool:
    """Whether a stream takes every character; one that is no file takes text as it is."""
    return stream.encoding is None or codecs.lookup(stream.encoding).name.startswith("utf")


def escape_line(text: str) -> str:
    """Control characters and newlines are escaped, so that a name with a newline in it does not begin a new line."""
    return visible(text).replace("\n", "␊")
