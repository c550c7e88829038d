"""Exit codes, the errors that end a run early, and the one line that is printed of an error."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from typing import Any

REASON_LENGTH = 200

DONE, MISSED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
OUT_OF_MEMORY = re.compile("out of memory|can't allocate memory|not enough memory", re.IGNORECASE)  # as torch says it
MESSAGE_LENGTH = 2000  # characters of one message
# Control characters are shown as pictures (but tab and newline); those that turn the writing direction as �.
PICTURES = {c: 0x2400 + c for c in range(32) if c not in (9, 10)} | {127: 0x2421}
PICTURES |= dict.fromkeys([*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)], 0xFFFD)


class InputError(Exception):
    """The user's input cannot be used: exit code 2. Say what, which value, and what to do instead."""


class NumericsError(InputError):
    """Numbers overflow: activations of a model, or weights in the dtype of its checkpoint."""


class BudgetError(Exception):
    """The budget is missed, or nothing fits it: exit code 1, nothing is written."""


def report_error(error: BaseException) -> int:
    """Print the line for an error that ended the command, and return the exit code."""
    if any(is_out_of_memory(cause) for cause in causes(error)):
        return print_error("out of memory; try a smaller --batch-size, --seq-len or model", BAD_INPUT)
    if isinstance(error, (BudgetError, InputError)):
        return print_error(str(error), MISSED if isinstance(error, BudgetError) else BAD_INPUT)
    if hasattr(error, "format_message"):  # the command line itself was wrong
        return print_error(describe_usage_error(error), BAD_INPUT)
    if type(error).__name__ == "Abort":  # the end of the input where a question was asked
        return print_error("interrupted; nothing was written", INTERRUPTED)
    if errno_of(error) in NO_ROOM:
        return print_error(f"out of disk ({disk_reason(error)}); make room and give the same command again", BAD_INPUT)
    if isinstance(error, OSError) and error.strerror:
        where = f" ({shorten(str(error.filename))})" if error.filename else ""
        return print_error(
            f"the system says: {error.strerror}{where}; check the names, the rights and the space", BAD_INPUT
        )
    reason = " ".join(str(error).split())[:300]
    return print_error(f"unexpected {type(error).__name__}: {reason}; run again with --debug and report it", BAD_INPUT)


def describe_usage_error(error: Any) -> str:
    """What is wrong with a command line, what was probably meant, and which help says more."""
    command = getattr(getattr(error, "ctx", None), "info_name", None)
    where = {None: "compress", "compress": "compress", "run": "compress MODEL"}.get(command, f"compress {command}")
    message = error.format_message().rstrip(".")
    if hasattr(error, "possibilities"):
        near = " or ".join(get_close_matches(error.option_name, error.possibilities or [], cutoff=0.75))
        message = f"there is no option {error.option_name}" + (f"; did you mean {near}?" if near else "")
    see = " See" if message.endswith("?") else "; see"
    return f"{message[:1].lower()}{message[1:]}{see} {where} --help"


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and the errors that it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: an error of Python, of the system, or of torch, which raises a RuntimeError."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return errno_of(error) == errno.ENOMEM or (
        isinstance(error, RuntimeError) and bool(OUT_OF_MEMORY.search(str(error)))
    )


def errno_of(error: BaseException) -> int | None:
    """The system's number of an error, or None. Libraries written in Rust give it only in the message."""
    if isinstance(error, OSError):
        return error.errno
    match = re.search(r"\(os error (\d+)\)", str(error))
    return int(match[1]) if match else None


def disk_reason(error: BaseException) -> str | None:
    """Why the system could not read or write, or None for an error of another kind."""
    number = errno_of(error)
    if number is not None:
        return os.strerror(number)
    return str(error) if isinstance(error, OSError) else None


def print_error(message: str, code: int) -> int:
    """Print one line `error: …` on stderr and return the exit code."""
    print(f"error: {shorten(visible(' '.join(message.split())), MESSAGE_LENGTH)}", file=sys.stderr)
    return code


def shorten(text: str, most: int = 200) -> str:
    """The first `most` characters, with an ellipsis if there are more."""
    return text if len(text) <= most else f"{text[:most]}…"


def refuse_invalid_utf8(words: Iterable[str]) -> None:
    """Refuse names that are not UTF-8: they could not be written into the record."""
    for word in words:
        if word == word.encode("utf-8", "replace").decode("utf-8"):
            continue
        try:
            name = os.fsencode(word).decode("utf-8")
        except UnicodeError:
            raise InputError(f"{word!r} is not UTF-8; rename the file or directory") from None
        raise InputError(f"{name!r} cannot be opened in this locale, which is not UTF-8; set PYTHONUTF8=1")


def visible(text: str) -> str:
    """Control characters are replaced by visible signs, and characters that UTF-8 cannot encode by a question mark."""
    return text.encode("utf-8", "replace").decode("utf-8").translate(PICTURES)


def reason_of(error: BaseException) -> str:
    """The first line of an exception's message, shortened so that it fits into a one-line message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = lines[0].rstrip(".:;") if lines else type(error).__name__
    if isinstance(error, KeyError):
        reason = f"{reason} is missing"
    return reason if len(reason) <= REASON_LENGTH else reason[: REASON_LENGTH - 1] + "…"
