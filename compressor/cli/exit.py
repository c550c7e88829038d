"""The exit code of a command, and the one line that is printed when it fails, by one of however many processes."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stderr
from types import ModuleType
from typing import Any, NoReturn

from compressor.cli.streams import patient_streams
from compressor.runtime.errors import DONE, INTERRUPTED, refuse_invalid_utf8, report_error
from compressor.runtime.interrupts import handle_interrupts


def run_and_exit(command: Callable[[], Any], words: Sequence[str]) -> NoReturn:
    """Run the command that was called with these arguments, and exit the process with its code."""
    resumes = not {"--no-cache", "--dry-run"} & set(words) and words[:1] not in (
        ["export"],
        ["push"],
        ["info"],
        ["cache"],
        ["sample"],
    )
    with patient_streams(), handle_interrupts(resumes, is_first_to_fail) as caught:
        try:
            refuse_invalid_utf8([*words, os.getcwd()])
            code = command()
            sys.stdout.flush()  # a full disk is noticed here
            if code == INTERRUPTED:  # typer returns this code for an interrupt and prints nothing
                code = caught.print_line()
        except KeyboardInterrupt:
            code = caught.print_line()
        except Exception as error:
            if "--debug" in words:
                raise
            with nullcontext() if caught.number or is_first_to_fail() else redirect_stderr(io.StringIO()):
                code = caught.print_line() if caught.number else report_error(describe_failure(error))
            let_others_fail()
        if code and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            sys.stdout.flush()  # a failed check has printed its table
            sys.stderr.flush()
            os._exit(code)  # an orderly exit would wait for the other processes, which may be gone
    sys.exit(code or DONE)


def joined_processes() -> ModuleType | None:
    """The module `distributed` if a command has imported it; importing it here would import torch."""
    return sys.modules.get("compressor.runtime.distributed")


def describe_failure(error: Exception) -> BaseException:
    """The error; the loss of another process becomes an error that says so."""
    distributed: Any = joined_processes()
    return distributed.describe_failure(error) if distributed else error


def let_others_fail() -> None:
    """Wait a moment until the other processes have asked whether they are the first to fail."""
    distributed: Any = joined_processes()
    if distributed:
        distributed.let_others_fail()


def is_first_to_fail() -> bool:
    """Whether this process prints the line. Before the processes have joined, that is the first one's task."""
    distributed: Any = joined_processes()
    return bool(distributed.is_first_to_fail()) if distributed else int(os.environ.get("RANK", "0")) == 0
