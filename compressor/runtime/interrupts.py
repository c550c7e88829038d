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

from compressor.runtime.errors import print_error

GRACE = 1.0  # seconds that Python gets for an orderly end
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass
class WrittenFiles:
    """The files and directories to remove if the process ends at once, and the output that is complete already."""

    unfinished: set[Path] = field(default_factory=set)
    finished: Path | None = None

    def remove_unfinished(self) -> None:
        for path in sorted(self.unfinished, key=Path.is_file):  # locks last
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


WRITTEN = WrittenFiles()  # one for the whole process, because a signal ends all of it


class Interrupts:
    """The first signal raises KeyboardInterrupt; a thread ends the process when that does not get through in time."""

    def __init__(self, resumes: bool, may_print: Callable[[], bool]) -> None:
        self.resumes, self.may_print = resumes, may_print
        self.number: int | None = None
        self.printed = threading.Lock()  # taken by the first thread that prints the line, never released
        self.over = threading.Event()

    def handle(self, number: int, _: FrameType | None) -> None:
        if self.number is None:
            self.number = number
            raise KeyboardInterrupt

    def watch(self, wakeups: socket.socket) -> None:
        """End the process if the main thread does not do so in time.

        Signals arrive here as bytes, also while the main thread is in a long call into torch.
        """
        while numbers := wakeups.recv(64):
            number = next((n for n in numbers if n in SIGNALS), None)
            if number is None:
                continue
            if not self.over.wait(GRACE):
                WRITTEN.remove_unfinished()
                self.print_line(number)
                os._exit(128 + number)
            return

    def print_line(self, number: int = signal.SIGINT) -> int:
        """Print the line about the interrupt, once, and return the exit code."""
        number = self.number or number
        if self.printed.acquire(blocking=False) and self.may_print():
            if sys.stderr.isatty():
                sys.stderr.write("\x1b[?25h\r")  # show the cursor, which a progress bar hides
            what = f"{WRITTEN.finished} is complete" if WRITTEN.finished else "nothing was written"
            onwards = "; the same command goes on where it stopped" if self.resumes and not WRITTEN.finished else ""
            print_error(f"interrupted; {what}{onwards}", 0)
            sys.stderr.flush()
        return 128 + number


@contextmanager
def handle_interrupts(resumes: bool, may_print: Callable[[], bool] = lambda: True) -> Iterator[Interrupts]:
    """Handle SIGINT and SIGTERM while the context is open.

    `resumes`: measurements are kept, so that the same command goes on where it stopped. `may_print`: whether this
    process prints the line. Outside the main thread signals are handled as before.
    """
    WRITTEN.finished = None
    interrupts = Interrupts(resumes, may_print)
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    wakeups, writer = socket.socketpair()
    writer.setblocking(False)
    # A signal that the caller ignores (nohup, a job in the background) stays ignored.
    before = {n: signal.signal(n, interrupts.handle) for n in SIGNALS if signal.getsignal(n) is not signal.SIG_IGN}
    wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

    def restore() -> None:
        if not interrupts.over.is_set():
            interrupts.over.set()
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)
            writer.close()  # ends the thread

    os.register_at_fork(after_in_child=restore)  # a child's signals must not look like the parent's
    thread = threading.Thread(target=interrupts.watch, args=(wakeups,), name="interrupts", daemon=True)
    thread.start()
    try:
        yield interrupts
    finally:
        restore()
        thread.join()
        wakeups.close()


@contextmanager
def exit_without_teardown() -> Iterator[None]:
    """Exit an interrupted process at once. Taking down the interpreter would take a second or more after torch is
    loaded. Only for a process that runs nothing but the command."""
    try:
        yield
    except SystemExit as end:
        if end.code not in [128 + number for number in SIGNALS]:
            raise
        WRITTEN.remove_unfinished()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code)
