"""How a command ends: with an exit code and, whatever went wrong, with one line, of however many processes."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stderr
from typing import Any, NoReturn

from compressor.runtime.errors import DONE, INTERRUPTED, explain, refuse_half_characters
from compressor.runtime.interrupts import interrupts


def run_and_exit(command: Callable[[], Any], words: Sequence[str]) -> NoReturn:
    """Run the command, which was given these words, and leave the process."""
    goes_on = "--no-cache" not in words and words[:1] not in (["export"], ["push"], ["info"])
    with interrupts(goes_on, is_first_to_fail) as caught:
        try:
            refuse_half_characters([*words, os.getcwd()])
            code = command()
            if code == INTERRUPTED:  # typer makes an interrupt this code, in silence
                code = caught.tell()
        except KeyboardInterrupt:
            code = caught.tell()
        except Exception as error:
            if "--debug" in words:
                raise
            with nullcontext() if caught.number or is_first_to_fail() else redirect_stderr(io.StringIO()):
                ranks = sys.modules.get("compressor.runtime.distributed")
                code = caught.tell() if caught.number else explain(ranks.told(error) if ranks else error)
    if code and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.stdout.flush()  # the table of a gate that found a broken promise
        sys.stderr.flush()
        os._exit(code)  # the others may be gone, and leaving in order would wait for them
    sys.exit(code or DONE)


def is_first_to_fail() -> bool:
    """Of several processes one prints the line. Before they have met, that is the first."""
    ranks = sys.modules.get("compressor.runtime.distributed")  # importing it here would import torch
    return bool(ranks.is_first_to_fail()) if ranks else int(os.environ.get("RANK", "0")) == 0
