"""How a run ends: exit codes, the two ways it ends early, and the one line that a user sees of an error."""

from __future__ import annotations

import sys

DONE, MISSED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


class InputError(Exception):
    """The user's input cannot be used: exit code 2. Say what, which value, and what to do instead."""


class BudgetError(Exception):
    """The budget is missed, or nothing fits it: exit code 1, nothing is written."""


def explain(error: BaseException) -> int:
    if isinstance(error, (BudgetError, InputError)):
        return fail(str(error), MISSED if isinstance(error, BudgetError) else BAD_INPUT)
    if hasattr(error, "format_message"):  # the command line itself was wrong
        return fail(f"{error.format_message().rstrip('.')}; see compress --help", BAD_INPUT)
    if type(error).__name__ == "Abort":
        return fail("interrupted; nothing was written", INTERRUPTED)
    if isinstance(error, MemoryError):
        return fail("out of memory; try a smaller --batch-size, --seq-len or model", BAD_INPUT)
    reason = " ".join(str(error).split())[:300]
    return fail(f"unexpected {type(error).__name__}: {reason}; run again with --debug and report it", BAD_INPUT)


def fail(message: str, code: int) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return code
