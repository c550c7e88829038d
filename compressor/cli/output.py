"""The result on stdout: JSON alone, or tables and a few lines. Nothing that a file says commands the terminal."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from compressor.runtime.errors import visible

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.segment import Segment
    from rich.table import Table

# JSON escapes only the controls below a space; these are as able to harm, or cannot be written.
UNPRINTABLE = re.compile("[\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class Harmless:
    """A table whose cells hold no control characters."""

    def __init__(self, table: Table) -> None:
        self.table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for segment in console.render(self.table, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))


def emit(report: dict[str, Any], as_json: bool, lines: list[str], table: Table | list[Table] | None) -> None:
    """Once, however many processes there are."""
    from compressor.runtime import distributed

    first = distributed.rank() == 0
    distributed.end()
    if not first:
        return
    if as_json:
        from compressor.runtime.outputs import to_json

        print(UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", to_json(report)))
        return
    from rich.console import Console

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    for one in table if isinstance(table, list) else [table] if table else []:
        console.print(Harmless(one))
        console.print()
    for line in lines:
        console.print(one_line(line), markup=False, soft_wrap=True)


def one_line(text: str) -> str:
    """A line that stays one: a name with a newline in it must not look like a line of its own."""
    return visible(text).replace("\n", "␊")
