"""How a change and a count are written for people; files for programs keep plain numbers."""

from __future__ import annotations

MINUS = "−"  # U+2212, as wide as the plus; the only minus that people are shown


def figure(value: float, form: str) -> str:
    """A number in one of Python's formats; per cent stand apart from their sign."""
    words = format(value, form).replace("-", MINUS)
    return f"{words[:-1]} %" if words.endswith("%") else words


def signed(value: float, form: str = ".3f") -> str:
    """A change with its sign: `+0.809`, `−0.100`. `form` is Python's format without the sign, `.2%` too."""
    return figure(value, f"+{form}")


def signed_interval(low: float, high: float, form: str = ".3f") -> str:
    return f"{signed(low, form)} … {signed(high, form)}"


def count(number: int, noun: str) -> str:
    """`1 token`, `2,048 tokens`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
