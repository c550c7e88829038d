"""Ctrl-C and SIGTERM end a run within two seconds and with one line, also in the middle of a long call into torch."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from compressor.runtime.errors import fail

GRACE = 1.0  # seconds that Python gets for an orderly end
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass
class Traces:
    """What this process must not leave behind when it is ended at once, and the output that is complete already."""

    unfinished: set[Path] = field(default_factory=set)
    finished: Path | None = None

    def remove(self) -> None:
        for path in sorted(self.unfinished, key=Path.is_file):  # locks last
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


TRACES = Traces()  # of the whole process, for a signal ends all of it


class Interrupts:
    """The first signal raises KeyboardInterrupt; a thread ends the process when that does not get through in time."""

    def __init__(self, resumes: bool, speaks: Callable[[], bool]) -> None:
        self.resumes, self.speaks = resumes, speaks
        self.number: int | None = None
        self.told = threading.Lock()  # taken once, by whoever prints the line
        self.over = threading.Event()

    def handle(self, number: int, _: FrameType | None) -> None:
        if self.number is None:
            self.number = number
            raise KeyboardInterrupt

    def watch(self, wakeups: socket.socket) -> None:
        """Every signal arrives here as a byte, whatever the main thread does."""
        while found := wakeups.recv(64):
            number = next((n for n in found if n in SIGNALS), None)
            if number is None:
                continue
            if not self.over.wait(GRACE):
                TRACES.remove()
                self.tell(number)
                os._exit(128 + number)
            return

    def tell(self, number: int = signal.SIGINT) -> int:
        """The one line, and the exit code."""
        number = self.number or number
        if self.told.acquire(blocking=False) and self.speaks():
            if sys.stderr.isatty():
                sys.stderr.write("\x1b[?25h\r")  # a bar hides the cursor
            what = f"{TRACES.finished} is complete" if TRACES.finished else "nothing was written"
            onwards = "; the same command goes on where it stopped" if self.resumes and not TRACES.finished else ""
            fail(f"interrupted; {what}{onwards}", 0)
            sys.stderr.flush()
        return 128 + number


@contextmanager
def interrupts(resumes: bool, speaks: Callable[[], bool] = lambda: True) -> Iterator[Interrupts]:
    """While the context is open, SIGINT and SIGTERM are taken care of; afterwards all is as before.

    `resumes`: what was measured is kept, so the same command goes on; `speaks`: the line is this process's to print.
    Outside the main thread signals stay as they are.
    """
    TRACES.finished = None
    found = Interrupts(resumes, speaks)
    if threading.current_thread() is not threading.main_thread():
        yield found
        return
    wakeups, writer = socket.socketpair()
    writer.setblocking(False)
    # A signal that the caller ignores (nohup, a job in the background) stays ignored.
    before = {n: signal.signal(n, found.handle) for n in SIGNALS if signal.getsignal(n) is not signal.SIG_IGN}
    wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

    def put_back() -> None:
        if not found.over.is_set():
            found.over.set()
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)
            writer.close()  # ends the thread

    os.register_at_fork(after_in_child=put_back)  # a child's signals must not look like the parent's
    thread = threading.Thread(target=found.watch, args=(wakeups,), name="interrupts", daemon=True)
    thread.start()
    try:
        yield found
    finally:
        put_back()
        thread.join()
        wakeups.close()


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """For a process that is nothing but the command: interrupted, it does not wait until the interpreter is taken down,
    which takes a second or more once torch is loaded."""
    try:
        yield
    except SystemExit as end:
        if end.code not in [128 + number for number in SIGNALS]:
            raise
        TRACES.remove()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code)
