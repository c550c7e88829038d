"""How a chart is laid out, alike on a page and in a file: colours and shapes, places of marks, which labels fit.

Places are shares of the plot, 0 at the lower end of an axis and 1 at its upper end; sizes are pixels of a page.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from compressor.report.charts import Chart, Point, Series
from compressor.report.scales import Scale, fit, known, measured, width

DOT, SMALL_DOT, LARGEST_DOT, LEAST_DOT = 4.5, 3.2, 15.0, 3.5  # radii
MOST_MARKED = 40  # points of a line that each have a mark
LONGEST, MOST_LABELS = 28, 300  # letters of a label; labels of a chart that are tried, besides those of alarms

# Colours for light and dark pages. The first four are far apart with each kind of colour blindness, all eight apart.
# The second is next to that of an alarm, and is left out beside one.
LIGHT = ("#1c58cc", "#e07708", "#0aa064", "#b35399", "#3f87da", "#b25e00", "#5a4ea7", "#707976")
DARK = ("#7094fb", "#f09857", "#46e9aa", "#d596ca", "#9fd5fd", "#e1cd4c", "#ad9eeb", "#9dbdb2")
RAMPS = ("#2c1a75", "#2468a8", "#12967f", "#b59a00"), ("#9583f2", "#4fa3e6", "#42cba6", "#f2dc62")
DASHES = ("", "7 4", "2 3", "9 3 2 3")
# Corners around the middle, y upwards, each shape of the same area as a circle of radius 1. The last is for alarms.
SHAPES: tuple[tuple[tuple[float, float], ...], ...] = (
    (),
    ((-0.886, -0.886), (0.886, -0.886), (0.886, 0.886), (-0.886, 0.886)),
    ((0.0, -1.253), (1.253, 0.0), (0.0, 1.253), (-1.253, 0.0)),
    ((0.0, -1.555), (1.347, 0.778), (-1.347, 0.778)),
    ((0.0, 1.555), (1.347, -0.778), (-1.347, -0.778)),
)

Box = tuple[float, float, float, float]  # left, top, right, bottom


@dataclass(frozen=True)
class Style:
    """How a series looks. `colour` is a place in `LIGHT`, None for an alarm and for a series of the gradient."""

    colour: int | None
    shade: float | None
    shape: int  # in `SHAPES`
    dash: str
    fill: int  # of bars: full, hollow, half full, hollow and dashed
    marked: bool  # its points are seen


@dataclass(frozen=True)
class Mark:
    """A point in its place. `out`: the value has no place inside the axes, and the mark is at their end."""

    point: Point
    x: float
    y: float
    ends: tuple[float, float] | None  # of its interval
    radius: float
    out: bool
    seen: bool = True


@dataclass(frozen=True)
class Drawn:
    """A series in its place: the marks inside the axes; of a line the runs without a gap; of bars where they are."""

    index: int
    series: Series
    style: Style
    marks: tuple[Mark, ...]
    runs: tuple[tuple[Mark, ...], ...] = ()
    left: float = 0.0  # from the mark to the side of its bar
    wide: float = 0.0
    base: float = 0.0


@dataclass(frozen=True)
class Layout:
    x: Scale
    y: Scale
    drawn: tuple[Drawn, ...]  # alarms last, above all others
    diagonal: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Label:
    """Letters beside a mark, moved from it by pixels (y downwards)."""

    drawn: Drawn
    mark: Mark
    text: str
    dx: float
    dy: float
    anchor: str


def brief(text: str, most: int = LONGEST) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def blend(shade: float, ramp: Sequence[str]) -> str:
    """A colour of a gradient, as #rrggbb."""
    at = min(max(shade, 0.0), 1.0) * (len(ramp) - 1) if known(shade) else 0.0
    first = min(int(at), len(ramp) - 2)
    pairs = [(int(ramp[first][k : k + 2], 16), int(ramp[first + 1][k : k + 2], 16)) for k in (1, 3, 5)]
    return "#" + "".join(f"{round(a + (b - a) * (at - first)):02x}" for a, b in pairs)


def styles(chart: Chart) -> list[Style]:
    """How series are told apart: by colour and shape; by dashes where points are not seen, and when colours run out."""
    colours = [colour for colour in range(len(LIGHT)) if colour != 1 or not any(s.alarm for s in chart.series)]
    found, count = [], 0
    for series in chart.series:
        plain = series.shade is None and not series.alarm
        marked = series.kind != "line" or (series.shade is None and len(series.points) <= MOST_MARKED)
        turn = count // len(colours) or (count if plain and not marked else 0)
        colour, shade = colours[count % len(colours)] if plain else None, None if series.alarm else series.shade
        shape, fill = (count % 4, count % 4) if plain else (4 if series.alarm else 0, 0)
        found.append(Style(colour, shade, shape, DASHES[1 if series.dashed else turn % 4], fill, marked))
        count += plain
    return found


def axes(chart: Chart, apart: float | None) -> tuple[Scale, Scale]:
    """The two axes; `apart`: the distance of neighbouring bars, if there are any."""
    points = [point for series in chart.series for point in series.points if known(point.x) and known(point.y)]
    xs = [point.x for point in points]
    ys = [value for point in points for value in (point.y, point.low, point.high) if known(value)]
    if chart.diagonal and chart.x.log == chart.y.log:
        xs, ys = xs + ys, ys + xs
    pad = 0.08 if any(point.size is not None for point in points) else 0.04
    x = fit(chart.x, xs, pad if pad > 0.04 or chart.diagonal else 0.02, side=0.6 * (apart or 0.0))
    return x, fit(chart.y, ys, pad, ground=True, bars=apart is not None)


def lay_out(chart: Chart) -> Layout:
    bars = [index for index, series in enumerate(chart.series) if series.kind == "bars"]
    at = sorted(set(measured(chart.x, (point.x for index in bars for point in chart.series[index].points))))
    apart = min((b - a for a, b in pairwise(at)), default=1.0) if bars else None
    x, y = axes(chart, apart)
    if sum(len(chart.series[index].points) for index in bars) == len(at):
        places = dict.fromkeys(bars, 0)  # no two bars share a place: each may take all of it
    else:
        places = {index: place for place, index in enumerate(bars)}
    abreast = max(places.values(), default=0) + 1
    wide = 0.8 * (apart or 0.0) / (x.stop - x.start) / abreast
    base = min(max(0.0 if y.log else y.share(0.0), 0.0), 1.0)
    sizes = (point.size for series in chart.series for point in series.points)
    most = max((size for size in sizes if known(size)), default=0.0)
    drawn = []
    for index, (series, style) in enumerate(zip(chart.series, styles(chart), strict=True)):
        runs: list[list[Mark]] = [[]]
        for point in series.points:
            if known(point.x) and known(point.y):
                runs[-1].append(place(point, x, y, series.kind, most))
            else:
                runs.append([])
        runs = [[replace(mark, seen=style.marked or len(run) == 1) for mark in run] for run in runs if run]
        marks = [mark for run in runs for mark in run if 0 <= mark.x <= 1 and 0 <= mark.y <= 1]
        if series.kind == "dots":
            marks.sort(key=lambda mark: -mark.radius)  # small ones above large ones
        lines = tuple(map(tuple, runs)) if series.kind == "line" else ()
        left = wide * (places[index] - abreast / 2) if series.kind == "bars" else 0.0
        drawn.append(Drawn(index, series, style, tuple(marks), lines, left, wide, base))
    return Layout(x, y, tuple(sorted(drawn, key=lambda one: one.series.alarm)), diagonal(chart, x, y))


def diagonal(chart: Chart, x: Scale, y: Scale) -> tuple[tuple[float, float], ...]:
    """The two ends of the line where x equals y, if it is a straight one."""
    low, high = max(x.start, y.start), min(x.stop, y.stop)
    if not chart.diagonal or x.log != y.log or low >= high:
        return ()
    return tuple(((v - x.start) / (x.stop - x.start), (v - y.start) / (y.stop - y.start)) for v in (low, high))


def place(point: Point, x: Scale, y: Scale, kind: str, most: float) -> Mark:
    """A mark in its place. Lines go on beyond the axes, where they are cut; other marks stay at the end."""
    shares = [x.share(point.x), *(y.share(value) for value in (point.y, point.low, point.high) if known(value))]
    across, up, *ends = shares if kind == "line" else [min(max(share, 0.0), 1.0) for share in shares]
    radius = SMALL_DOT if kind == "line" else DOT
    if kind == "dots" and most > 0 and point.size is not None:
        share = max(point.size, 0.0) / most if known(point.size) else 0.0
        radius = max(LEAST_DOT, LARGEST_DOT * math.sqrt(share))
    interval = (min(up, *ends), max(up, *ends)) if ends else None
    return Mark(point, across, up, interval, radius, not (x.holds(point.x) and y.holds(point.y)))


def settle(layout: Layout, widths: Sequence[float], high: float) -> list[Label]:
    """Labels that cover neither a mark nor each other in a plot of any of these widths; those of alarms in any case."""
    taken = [list(covered(layout, wide, high)) for wide in widths]
    labels: list[Label] = []
    wanted = [(one, mark) for one in reversed(layout.drawn) for mark in one.marks if mark.point.label]
    for drawn, mark in (pair for k, pair in enumerate(wanted) if k < MOST_LABELS or pair[0].series.alarm):
        text = brief(mark.point.label)
        long = width(text)
        choices: list[tuple[int, list[Box], Label]] = []
        for dx, dy, anchor in around(drawn, mark):
            boxes: list[Box] = []
            bad = 0
            for wide, others in zip(widths, taken, strict=True):
                left = wide * middle(drawn, mark) + dx - long * {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor]
                top = high * (1 - crest(drawn, mark)) + dy - 10
                boxes.append((left, top, left + long, top + 13))
                bad += 100 * (left < -4 or left + long > wide + 10 or top < -12 or top + 13 > high + 2)
                bad += sum(cost for owner, cost, box in others if owner is not mark and hit(boxes[-1], box))
            choices.append((bad, boxes, Label(drawn, mark, text, dx, dy, anchor)))
            if not bad:
                break
        bad, boxes, label = min(choices, key=lambda choice: choice[0])
        if not bad or drawn.series.alarm:
            labels.append(label)
            for others, box in zip(taken, boxes, strict=True):
                others.append((None, 6, box))
    return labels


def hit(one: Box, two: Box) -> bool:
    return one[0] < two[2] and one[2] > two[0] and one[1] < two[3] and one[3] > two[1]


def covered(layout: Layout, wide: float, high: float) -> Iterator[tuple[Mark | None, int, Box]]:
    """What is drawn already, of which mark, and how bad it is to cover it: marks, whiskers, lines in small pieces."""
    for drawn in layout.drawn:
        kind, reach = drawn.series.kind, 1.15 if drawn.style.shape else 0.85
        for mark in drawn.marks:
            x, y, r = wide * mark.x, high * (1 - mark.y), reach * mark.radius
            if kind == "bars":
                top, bottom = sorted((y, high * (1 - drawn.base)))
                yield mark, 4, (x + wide * drawn.left, top, x + wide * (drawn.left + drawn.wide), bottom)
            elif mark.seen:
                yield mark, 4, (x - r, y - r, x + r, y + r)
            if mark.ends and kind == "dots":
                yield mark, 1, (x - 1, high * (1 - mark.ends[1]), x + 1, high * (1 - mark.ends[0]))
        runs = drawn.runs if drawn.style.shade is None else ()  # a row of many lines leaves no room
        for one, two in (pair for run in runs for pair in pairwise(run)):
            x, y, dx, dy = wide * one.x, high * (1 - one.y), wide * (two.x - one.x), high * (one.y - two.y)
            parts = 1 + min(int(math.hypot(dx, dy) / 6), 200)
            for k in range(1, parts):
                at, up = x + dx * k / parts, y + dy * k / parts
                yield None, 1, (at - 1, up - 1, at + 1, up + 1)


def middle(drawn: Drawn, mark: Mark) -> float:
    """Where a mark is seen: a bar may stand beside its value, to leave room for others."""
    return mark.x + drawn.left + drawn.wide / 2 if drawn.series.kind == "bars" else mark.x


def crest(drawn: Drawn, mark: Mark) -> float:
    """How high the label of a mark is: at the end of a bar, or of its whisker."""
    if drawn.series.kind != "bars" or not mark.ends:
        return mark.y
    return mark.ends[0] if mark.y < drawn.base else mark.ends[1]


def around(drawn: Drawn, mark: Mark) -> list[tuple[float, float, str]]:
    """Where letters may stand beside a mark, best first; an alarm has more places."""
    if drawn.series.kind == "bars":
        off = -5.0 if mark.y >= drawn.base else 14.0
        return [(0.0, off, "middle"), (-4.0, off, "start"), (4.0, off, "end"), (0.0, off * 2.5, "middle")]
    near, above, below = mark.radius + 4, -mark.radius - 5, mark.radius + 14
    level = [(near, 4.0, "start"), (-near, 4.0, "end"), (0.0, above, "middle"), (0.0, below, "middle")]
    slanted = [(side, dy, anchor) for dy in (above, below) for side, anchor in ((near - 2, "start"), (2 - near, "end"))]
    far = [(0.0, above - 15, "middle"), (0.0, below + 15, "middle")]
    return [*level, *slanted, *(far if drawn.series.alarm else [])]
