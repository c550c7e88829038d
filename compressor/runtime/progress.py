"""Progress of long steps on stderr: a bar with the time left on a terminal, one line per step elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from compressor.runtime.errors import visible

Item = TypeVar("Item")


class Progress:
    """Progress bars and lines on stderr, or none (the default in the Python API), and the seconds of each step."""

    def __init__(self, visible: bool = False) -> None:
        self.console = Console(stderr=True, quiet=not visible, highlight=False)
        self.bars = visible and sys.stderr.isatty()
        self.seconds: dict[str, float] = {}

    def track(self, step: str, items: Iterable[Item], total: int, detail: str = "") -> Iterator[Item]:
        """Yield the items of one step and show how many are done; steps of the same name add up in `seconds`."""
        with self.bar(step, total, detail) as advance:
            for item in items:
                yield item
                advance(1)

    @contextmanager
    def bar(self, step: str, total: int, detail: str = "") -> Iterator[Callable[[int], None]]:
        """A bar for one step of `total` parts; the function that it yields is called with the number of parts done."""
        began = time.perf_counter()
        label = visible(f"{step} {detail}".rstrip())
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        with Bars(*columns, console=self.console, disable=not self.bars, transient=True) as bars:
            task = bars.add_task(label, total=total)
            yield lambda count: bars.advance(task, count)
        seconds = time.perf_counter() - began
        self.seconds[step] = self.seconds.get(step, 0.0) + seconds
        self.say(f"{label}: {seconds:.1f} s")

    def say(self, line: str) -> None:
        """Print one line; control characters are escaped."""
        self.console.print(visible(line).replace("\n", " "), markup=False, soft_wrap=True)
