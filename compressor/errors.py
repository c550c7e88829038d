"""The two ways a run ends early. The message is the whole output a user sees."""

from __future__ import annotations


class InputError(Exception):
    """The user's input cannot be used: exit code 2. Say what, which value, and what to do instead."""


class BudgetError(Exception):
    """The budget is missed, or nothing fits it: exit code 1, nothing is written."""
