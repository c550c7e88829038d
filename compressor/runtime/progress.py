"""Progress of a command on stderr: which step of how many, how far it is, and what is left of the whole job.

On a terminal the step that runs has a bar. Elsewhere a step is one line when it is done, and a line a minute meanwhile.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.text import Text

from compressor.runtime.errors import visible as escape

Item = TypeVar("Item")
HEARTBEAT = 60.0  # seconds without a line after which one says that the work goes on
LEAST_SHARE = 0.1  # of a bar, from which on its own pace is believed


@dataclass(frozen=True)
class PlannedStep:
    """One step of a command: what the user reads, the names of the bars that belong to it (`source *` stands for all
    that begin so), and how much work it is, in a unit that all steps of the command share."""

    title: str
    bars: tuple[str, ...]
    work: float = 0.0

    def has(self, bar: str, exactly: bool) -> bool:
        return bar in self.bars if exactly else any(n.endswith("*") and bar.startswith(n[:-1]) for n in self.bars)


@dataclass
class RunningBar:
    """A bar that is open: how many of its parts are done, since when."""

    label: str
    total: int
    began: float
    done: int = 0

    @property
    def share(self) -> float:
        return min(1.0, self.done / self.total) if self.total else 0.0


class Progress:
    """Progress bars and lines on stderr, or none (the default in the Python API), and the seconds of each step.

    `verbose` shows the notes of the search as well.
    """

    def __init__(self, visible: bool = False, verbose: bool = False) -> None:
        self.console = Console(stderr=True, quiet=not visible, highlight=False)
        self.verbose = verbose
        self.bars = visible and sys.stderr.isatty()
        self.seconds: dict[str, float] = {}
        self.steps: Sequence[PlannedStep] = ()
        self.spent: dict[int, float] = {}  # seconds by the number of the planned step
        self.number: int | None = None  # of the planned step that runs
        self.entered = 0.0
        self.running: list[RunningBar] = []
        self.last_line = time.monotonic()

    def follow(self, steps: Sequence[PlannedStep]) -> None:
        """Number what comes by these steps. The same steps may be given again, with the work that was counted since."""
        if [step.title for step in steps] != [step.title for step in self.steps]:
            self.leave()
            self.spent = {}
        self.steps = list(steps)

    def enter(self, bar: str) -> None:
        """Begin the planned step that a bar of this name belongs to; the one before it is done."""
        found = [n for exactly in (True, False) for n, step in enumerate(self.steps) if step.has(bar, exactly)]
        if found and found[0] != self.number:
            self.leave()
            self.number, self.entered = found[0], time.monotonic()

    def leave(self) -> None:
        """Say how long the step took that ran until now."""
        if self.number is None:
            return
        seconds = time.monotonic() - self.entered
        self.spent[self.number] = self.spent.get(self.number, 0.0) + seconds
        label, self.number = self.label(self.number), None
        self.say(f"{label}: {duration(seconds)}{self.left_words()}")

    def label(self, number: int) -> str:
        return f"[{number + 1}/{len(self.steps)}] {self.steps[number].title}"

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
        self.enter(step)
        label = escape(f"{step} {detail}".rstrip())
        shown = label if self.number is None else self.label(self.number)
        running = RunningBar(shown, total, time.monotonic())
        self.running.append(running)
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeLeft(self),
        )
        try:
            with Bars(*columns, console=self.console, disable=not self.bars, transient=True) as bars:
                task = bars.add_task(shown, total=total)

                def advance(count: int) -> None:
                    running.done += count
                    bars.advance(task, count)

                yield advance
        finally:
            self.running.remove(running)
        seconds = time.perf_counter() - began
        self.seconds[step] = self.seconds.get(step, 0.0) + seconds
        (self.note if self.steps else self.say)(f"{label}: {seconds:.1f} s")

    def say(self, line: str) -> None:
        """Print one line; control characters are escaped."""
        self.last_line = time.monotonic()
        self.console.print(escape(line).replace("\n", " "), markup=False, soft_wrap=not sys.stderr.isatty())

    def note(self, line: str) -> None:
        """Print a line that only a verbose command shows."""
        if self.verbose:
            self.say(line)

    def seconds_left(self) -> float | None:
        """What is left of all planned steps, by how long those so far took for their work; None where that is not known
        yet."""
        if not self.steps:
            return None
        number = self.number if self.number is not None else max(self.spent, default=-1)
        work = [step.work for step in self.steps]
        done = {n: seconds for n, seconds in self.spent.items() if n != self.number and work[n]}
        pace_work, pace_seconds = sum(work[n] for n in done), sum(done.values())
        rest = 0.0
        if self.number is not None:
            running = self.running[-1] if self.running else None
            here = self.spent.get(number, 0.0) + time.monotonic() - self.entered
            if running is not None and running.share >= LEAST_SHARE:
                own = time.monotonic() - running.began
                rest = own / running.share - own
                if not pace_work:
                    pace_work, pace_seconds = running.share * work[number], here
            if pace_work:
                rest = max(rest, work[number] * pace_seconds / pace_work - here)
        if not pace_work:
            return None
        return rest + sum(work[number + 1 :]) * pace_seconds / pace_work

    def left_words(self) -> str:
        """What is left, as the end of a line; nothing where it is not known, or the job is nearly done."""
        left = self.seconds_left()
        return "" if left is None or left < 1 else f"; about {duration(left)} left"

    def beat(self) -> None:
        """One line on what runs, for whoever sees no bar."""
        running = self.running[-1] if self.running else None
        if running is not None:
            so_far = duration(time.monotonic() - running.began)
            self.say(f"{running.label}: {running.done} of {running.total}, {so_far} so far{self.left_words()}")
        elif self.number is not None:
            so_far = duration(time.monotonic() - self.entered)
            self.say(f"{self.label(self.number)}: {so_far} so far{self.left_words()}")
        else:
            self.last_line = time.monotonic()

    @contextmanager
    def alive(self) -> Iterator[None]:
        """While the context is open, at least a line a minute is printed where there is no bar to look at."""
        over = threading.Event()

        def watch() -> None:
            while not over.wait(1.0):
                if time.monotonic() - self.last_line >= HEARTBEAT:
                    self.beat()

        if self.console.quiet or self.bars:
            yield
            return
        thread = threading.Thread(target=watch, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


class TimeLeft(ProgressColumn):
    """What is left of the whole job or, where its steps are not planned, of this bar."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self.progress = progress

    def render(self, task: Task) -> Text:
        left = self.progress.seconds_left() if self.progress.steps else task.time_remaining
        return Text("" if left is None else f"about {duration(left)} left", no_wrap=True)


def duration(seconds: float) -> str:
    """Seconds, minutes or hours, to as many digits as a person wants."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.1f} min" if seconds < 600 else f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
