"""A chart as a value: what is drawn, apart from how. `plots` makes it a part of a page, `figures` makes it files."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Point:
    """One mark. `low` and `high` are its interval, `size` is what its area stands for, `note` what is told about it."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    size: float | None = None
    label: str = ""  # drawn beside the mark
    note: str = ""  # told on hover or tap
    block: int | None = None  # marks of the same block are lit up together, in every chart of a page


@dataclass(frozen=True)
class Series:
    """Marks of one kind: a `line` through them (its interval a band), `dots`, or `bars` from zero."""

    name: str
    points: tuple[Point, ...]
    kind: str = "line"
    shade: float | None = None  # 0 … 1: its place in a row of many series (colour from a gradient, one legend for all)
    alarm: bool = False  # drawn in the colour of what must not be touched
    dashed: bool = False


@dataclass(frozen=True)
class Axis:
    label: str
    log: bool = False  # values that are not positive are drawn at its lower end
    whole: bool = False  # ticks at whole numbers only
    limits: tuple[float, float] | None = None  # None: what the marks need


@dataclass(frozen=True)
class Chart:
    """`name` is its file name without suffix; `caption` says what to see, and on how many tokens of which windows."""

    name: str
    title: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    caption: str = ""
    diagonal: bool = False  # a line where x equals y
    shades: tuple[str, str] | None = (
        None  # what the two ends of the gradient stand for, such as ("block 0", "block 29")
    )
