"""stdout and stderr of a command: nothing that happens to them changes what the command does or how it ends.

A reader that leaves (`compress info DIR | head -1`) is no failure, a locale without UTF-8 stops no output, and a stream
that was closed before the command began is not there to be written to.
"""

from __future__ import annotations

import codecs
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO


class PatientFile(io.FileIO):
    """The file behind a stream. When its reader has left, what is written from then on is discarded."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            discard(self.fileno())
            return len(data)


@contextmanager
def patient_streams() -> Iterator[None]:
    """While the context is open, stdout and stderr take every character, and their readers may leave."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (open_patiently(stream) for stream in before)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            finish(stream)
        sys.stdout, sys.stderr = before


def open_patiently(stream: TextIO | None) -> TextIO:
    """A stream to the same file; one that is no file, such as a notebook's, is returned as it is."""
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8")
    if os.name == "nt":  # its console is no file
        return stream
    try:
        number = stream.fileno()
    except (OSError, ValueError):
        return stream
    with suppress(OSError):
        stream.flush()
    file: Any = PatientFile(number, "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(file), choose_encoding(stream.encoding), "replace", line_buffering=True)


def choose_encoding(encoding: str) -> str:
    """The stream's own encoding. A locale that knows only ASCII says nothing about the terminal: then it is UTF-8."""
    asked = os.environ.get("PYTHONIOENCODING", "").partition(":")[0]
    return "utf-8" if codecs.lookup(encoding).name == "ascii" and not asked else encoding


def finish(stream: TextIO) -> None:
    """Write what is left; where that is impossible, give it up, so that the end of Python does not try again."""
    try:
        stream.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            discard(stream.fileno())
            stream.flush()


def discard(number: int) -> None:
    """Let a descriptor lead nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)
