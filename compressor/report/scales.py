"""Axes: from a value to its place on one, and the round values that are written along it."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeGuard

from compressor.report.charts import Axis

HUGE, TINY, FAR = 1e300, 1e-200, 50.0  # beyond FAR lengths of an axis, further makes no difference
LETTER = 7.7  # pixels that a letter of 12 px takes, in a wide font
APART_EVENLY, APART = 30.0, 23.0  # pixels between two ticks, at least; of a logarithmic axis only some are so close
UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Scale:
    """From a value to its share of the axis, 0 at the lower end, 1 at the upper. The ends are logarithms if `log`."""

    start: float
    stop: float
    log: bool = False

    def share(self, value: float) -> float:
        if self.log and value <= 0:
            return 0.0
        at = math.log10(value) if self.log else float(value)
        return min(max((at - self.start) / (self.stop - self.start), -FAR), 1 + FAR)

    def holds(self, value: float) -> bool:
        return (value > 0 or not self.log) and -1e-9 <= self.share(value) <= 1 + 1e-9


@dataclass(frozen=True)
class Tick:
    at: float
    value: float
    text: str


def known(value: Any) -> TypeGuard[float]:
    """Whether there is a number to draw."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < HUGE


def width(text: str) -> float:
    """Pixels that a text takes, about."""
    return sum(LETTER * (1.7 if unicodedata.east_asian_width(letter) in "WF" else 1.0) for letter in text)


def measured(axis: Axis, values: Iterable[Any]) -> list[float]:
    """Values in the measure of the axis; those that have no place on it are left out."""
    kept = (value for value in values if known(value) and (value > 0 or not axis.log))
    return [math.log10(value) if axis.log else float(value) for value in kept]


def same(low: float, high: float) -> bool:
    return high - low <= max(1e-9 * max(abs(low), abs(high)), TINY)


def fit(
    axis: Axis, values: Iterable[Any], pad: float = 0.04, side: float = 0.0, ground: bool = False, bars: bool = False
) -> Scale:
    """The scale of an axis for these values.

    `pad`: room at both ends, as a share; `side`: the least of it, in the measure of the axis; `ground`: starts
    at 0 when that is near; `bars`: they stand on 0, or a little below the least value of a logarithmic axis.
    """
    given = sorted(measured(axis, axis.limits or ()))
    if len(given) == 2 and not same(*given):
        return Scale(given[0], given[1], axis.log)
    found = measured(axis, values) + ([0.0] if bars and not axis.log else [])
    least, most = min(found, default=0.0), max(found, default=1.0)
    low, high, size = least, most, max(abs(least), abs(most))
    if same(low, high):
        extra = 0.5 if axis.log else 0.6 if axis.whole else 0.1 * size if size > TINY else 1.0
        low, high = low - extra, high + extra
    room = max(pad * (high - low), side)
    low, high = low - (max(2 * room, 0.3) if bars and axis.log else room), high + room
    if not axis.log:
        low = 0.0 if least >= 0 and (bars or (ground and least < max(0.2 * most, room))) else low
        high = 0.0 if bars and least < 0 and most <= 0 else high
    return Scale(low, high, axis.log)


def steps(low: float, high: float, whole: bool) -> Iterator[list[float]]:
    """Round numbers from `low` to `high`, 1, 2 or 5 times a power of ten apart, from close to wide."""
    power = math.floor(math.log10((high - low) / 20))
    for exponent in range(max(power, 0) if whole else power, power + 4):
        for digit in (1, 2, 5):
            step = digit * 10.0**exponent
            first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
            yield [round(k * step, -exponent) if exponent < 0 else k * step for k in range(first, last + 1)]


def powers(scale: Scale, whole: bool) -> Iterator[list[float]]:
    """1, 2 and 5 times every power of ten, then powers alone, then fewer and fewer of them."""
    decades = range(math.floor(scale.start), math.ceil(scale.stop) + 1)
    yield [float(f"{digit}e{k}") for k in decades for digit in (1, 2, 5) if k >= 0 or not whole]
    for apart in (1, 2, 5, 10, 20, 50, 100, 200):
        yield [float(f"1e{k}") for k in decades if k % apart == 0 and (k >= 0 or not whole)]


def ticks(scale: Scale, whole: bool, room: float, level: bool) -> list[Tick]:
    """As many round values as fit into `room` pixels with their letters: side by side if `level`, else on each other.

    A logarithmic axis of less than half a power of ten has them evenly spaced, like any other.
    """
    even = not scale.log or scale.stop - scale.start < 0.5
    low, high = (10**scale.start, 10**scale.stop) if scale.log and even else (scale.start, scale.stop)
    chosen: list[Tick] = []
    least = APART_EVENLY if even else APART
    for values in steps(low, high, whole) if even else powers(scale, whole):
        inside = [value for value in values if scale.holds(value)]
        texts = written(inside, even)
        chosen = [
            Tick(min(max(scale.share(value), 0.0), 1.0), value, text) for value, text in zip(inside, texts, strict=True)
        ]
        sizes = [width(text) + 14 if level else 0.0 for text in texts]
        gaps = [room * (b.at - a.at) for a, b in pairwise(chosen)]
        if all(gap >= max((a + b) / 2, least) for gap, (a, b) in zip(gaps, pairwise(sizes), strict=True)):
            break
    return chosen


def written(values: Sequence[float], even: bool) -> list[str]:
    """Ticks in letters: with as many decimals each if `even`ly spaced, short if large, as powers of ten if extreme."""
    sizes = [abs(value) for value in values if value]
    least, most = min(sizes, default=1.0), max(sizes, default=1.0)
    step = min((b - a for a, b in pairwise(values)), default=least) if even else least
    texts = []
    for value in values:
        size = most if even else abs(value)
        fits = ((u, s) for u, s in UNITS if size >= max(u, 1e4) and (step >= 0.01 * u or not even))
        unit, letter = next(fits, (1.0, ""))
        if value and not 1e-4 <= step <= most < 1e15:
            texts.append(power_of_ten(value))
        elif value and even:
            decimals = max(0, -math.floor(math.log10(step / unit) + 1e-9))
            texts.append(f"{value / unit:,.{decimals}f}{letter}")
        else:
            texts.append(f"{value / unit:.12g}{letter}" if value else "0")
    return [text.replace("-", "−") for text in texts]


def power_of_ten(value: float) -> str:
    digits, _, exponent = f"{value:.3e}".partition("e")
    digits = digits.rstrip("0").rstrip(".")
    return {"1": "", "-1": "-"}.get(digits, f"{digits}·") + f"10{str(int(exponent)).translate(RAISED)}"


def figure(value: float) -> str:
    """A number as it is told: four digits, a whole one in full."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}".replace("-", "−")
    plain = f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.1f}"
    return (power_of_ten(value) if "e" in plain or abs(value) >= 1e15 else plain).replace("-", "−")
