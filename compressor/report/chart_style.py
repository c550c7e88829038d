"""How charts look and become files: colours for light and dark pages, axes, and figures that are safe to draw."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import altair as alt

from compressor.report.formats import is_number
from compressor.report.record_parts import ATTENTION, FFN
from compressor.runtime.errors import shorten, visible

Row = dict[str, Any]

VEGA_LITE = ".".join(alt.SCHEMA_VERSION.lstrip("v").split(".")[:2])
INK, DIM, GRID, GROUND, BEFORE = "#1b1d21", "#5a616c", "#dde0e5", "#ffffff", "#c3cddc"
SAFE, COSTLY, UNSAFE = "#0a8a56", "#d07008", "#b3231b"
# The first four are far apart with each kind of colour blindness.
SERIES = ["#1c58cc", "#e07708", "#0aa064", "#b35399", "#3f87da", "#b25e00", "#5a4ea7", "#707976"]
RAMP = ["#2c1a75", "#2468a8", "#12967f", "#b59a00"]
# What stands for each colour on a dark page.
DARK = {
    **{INK: "#e4e6ea", DIM: "#9ca4b0", GRID: "#31353c", GROUND: "#14161a", BEFORE: "#434d5e"},
    **{SAFE: "#5fd39a", COSTLY: "#f0a057", UNSAFE: "#ff8d83"},
    **dict(
        zip(
            SERIES,
            ["#7094fb", "#f09858", "#46e9aa", "#d596ca", "#9fd5fd", "#e1cd4c", "#ad9eeb", "#9dbdb2"],
            strict=True,
        )
    ),
    **dict(zip(RAMP, ["#9583f2", "#4fa3e6", "#42cba6", "#f2dc62"], strict=True)),
}
TEXT = {"labelColor": DIM, "titleColor": DIM, "labelFontSize": 11, "titleFontSize": 11, "titleFontWeight": "normal"}
CONFIG: dict[str, Any] = {
    "background": GROUND,
    "font": "system-ui, sans-serif",
    "view": {"stroke": None},
    "axis": {**TEXT, "gridColor": GRID, "domainColor": GRID, "tickColor": GRID, "labelPadding": 4},
    "axisY": {
        "minExtent": 38,
        "maxExtent": 38,
        "titleAnchor": "end",
        "labelLimit": 36,
        "domain": False,
        "ticks": False,
    },
    "axisX": {"grid": False},
    "axisXQuantitative": {"tickCount": 8},
    "legend": {
        **TEXT,
        "orient": "top",
        "direction": "horizontal",
        "offset": 6,
        "labelLimit": 300,
        "symbolSize": 60,
        "symbolOpacity": 1,
    }
    | {
        "symbolOpacity": 1,
        "symbolStrokeWidth": 0,
        "title": None,
        "gradientLength": 120,
        "gradientThickness": 8,
        "columns": 3,
    },
    "title": {"color": INK, "subtitleColor": DIM, "anchor": "start", "frame": "group", "offset": 12, "fontSize": 14}
    | {"subtitleFontSize": 11, "subtitlePadding": 6},
    "text": {"color": INK, "fontSize": 11},
    "range": {"category": SERIES},
    "point": {"filled": True},
}
LARGEST = 1e15  # figures beyond it have no place on an axis
WIDTH = 640  # of the plot, in a file


@dataclass(frozen=True)
class Chart:
    """`name` is its file name without suffix; `alt` says what is drawn to those who do not see it."""

    name: str
    title: str
    caption: str
    alt: str
    spec: Mapping[str, Any]


def draw(chart: Chart, directory: Path) -> list[str]:
    """Write `<name>.png` and `<name>.svg` into a directory. Returns the paths of the files."""
    directory.mkdir(parents=True, exist_ok=True)
    return write(chart, directory / chart.name)


def write(chart: Chart, stem: Path) -> list[str]:
    import vl_convert

    files = [stem.with_name(stem.name + suffix) for suffix in (".png", ".svg")]
    drawn = draw_svg(chart)
    files[0].write_bytes(vl_convert.svg_to_png(drawn, scale=2))
    files[1].write_text(drawn, encoding="utf-8")
    return [str(file) for file in files]


def draw_svg(chart: Chart) -> str:
    """The chart with its title and caption as SVG."""
    import vl_convert

    title = {"text": clean(chart.title), "subtitle": textwrap.wrap(clean(chart.caption, 2000), 112)}
    spec: Row = {**chart.spec, "title": title, "padding": 12}
    if "vconcat" in spec:
        spec["vconcat"] = [{**panel, "width": WIDTH} for panel in spec["vconcat"]]
    else:
        spec["width"] = WIDTH
    drawn: str = vl_convert.vegalite_to_svg(spec, vl_version=VEGA_LITE)
    return drawn


def clean(text: str, most: int = 80) -> str:
    """Text in one line that any font and any XML can hold."""
    return shorten(" ".join(visible(text).split()), most)


def drawable(value: Any) -> bool:
    """Whether a figure has a place on an axis."""
    return is_number(value) and abs(value) <= LARGEST


def clean_rows(rows: Iterable[Row], *needed: str) -> list[Row]:
    """The rows that have these figures, safe to draw: a figure without a place is null, text is without controls."""
    cleaned = []
    for row in rows:
        if all(drawable(row[key]) for key in needed):
            safe: Row = {}
            for key, value in row.items():
                if isinstance(value, str):
                    safe[key] = shorten(visible(value), 300)
                else:
                    safe[key] = value if isinstance(value, bool) or drawable(value) else None
            cleaned.append(safe)
    return cleaned


def finish(name: str, title: str, caption: str, description: str, drawing: alt.TopLevelMixin) -> Chart:
    """The chart as a value; `description` says what is drawn against what."""
    alt_text = clean(f"{title}: {description}", 600)
    spec = drawing.to_dict(validate=False)
    return Chart(name, title, caption, alt_text, {**spec, "config": CONFIG, "description": alt_text})


def marks(**encoding: Any) -> alt.Chart:
    """Invisible points with a note, larger than those that are seen: easy to hit with a finger."""
    points: alt.Chart = alt.Chart().mark_point(size=260, opacity=0).encode(tooltip="note:N", **encoding)
    return points


def by_name(key: str, names: Sequence[str], colours: Sequence[str] | None = None) -> alt.Color:
    """A colour for each name, and a legend where there are several."""
    scale = alt.Scale(domain=list(names), range=list(colours)) if colours else alt.Scale(domain=list(names))
    return alt.Color(f"{key}:N", scale=scale, legend=alt.Legend() if len(names) > 1 else None)


def r2_ends(rows: Iterable[Row], *keys: str, zero: bool = False) -> tuple[float, float]:
    """R² from what the marks need, but not below −1, up to at most 1: a lower one is drawn at the end."""
    values = [row[key] for row in rows for key in keys if row.get(key) is not None]
    bottom = max(-1.0, min([0.0, *values]) if zero else min(values, default=0.0) - 0.03)
    return bottom, 1.0 if zero else max(bottom + 0.1, min(1.0, max(values, default=1.0) + 0.03))


def fixed(ends: tuple[float, float], log: bool = False) -> alt.Scale:
    """A scale between these ends; what is beyond is drawn at them."""
    return alt.Scale(type="log" if log else "linear", domain=list(ends), clamp=True, nice=False)


def block_axis(labels: bool = True) -> alt.X:
    axis = (
        alt.Axis(labelAngle=0, labelOverlap=True, labelSeparation=3, title="block", grid=False, ticks=False)
        if labels
        else None
    )
    return alt.X("index:O", axis=axis, scale=alt.Scale(paddingInner=0.25, paddingOuter=0.2))


def by_branch(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows of FFNs, and those of attention, where there are any."""
    parted: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["branch"] != FFN):
        parted.setdefault(row["branch"], []).append(row)
    return parted


def beside(rows: Iterable[Row]) -> list[alt.SchemaBase]:
    """Marks of attention and of FFNs side by side over the same number, where there are both."""
    branches = [branch for branch in (ATTENTION, FFN) if any(row["branch"] == branch for row in rows)]
    return [alt.XOffset("branch:N", scale=alt.Scale(domain=branches))] if len(branches) > 1 else []


def log_domain(values: Iterable[float]) -> tuple[float, float]:
    """The ends of a logarithmic axis: at most five orders of magnitude, the largest value inside."""
    positive = [value for value in values if value > 0]
    most = max(positive, default=1.0)
    return max(min(positive, default=0.1), 1e-5 * most) / 1.4, most * 1.4


def log_axis(ends: tuple[float, float]) -> alt.Axis:
    """Ticks at 1, 2 and 5 times powers of ten; at the powers alone where there are many."""
    powers = range(math.floor(math.log10(ends[0])), math.ceil(math.log10(ends[1])) + 1)
    steps = (1, 2, 5) if len(powers) <= 4 else (1,)
    ticks = [float(f"{step}e{power}") for power in powers for step in steps]
    return alt.Axis(values=[tick for tick in ticks if ends[0] <= tick <= ends[1]], format="~g", labelOverlap=True)


def dots(rows: Sequence[Row], area: int, *encoding: alt.SchemaBase) -> list[alt.Chart]:
    """Points; those whose `out` is true are hollow: their value is beyond the end of an axis."""
    kinds = {"datum.out": [row for row in rows if row["out"]], "!datum.out": [row for row in rows if not row["out"]]}
    return [
        alt.Chart()
        .mark_point(size=area, opacity=0.9, filled=chosen != "datum.out")
        .transform_filter(chosen)
        .encode(*encoding)
        for chosen, chosen_rows in kinds.items()
        if chosen_rows  # a layer without a mark has no extent, and Vega complains
    ]


def inline(rows: Sequence[Row]) -> alt.Data:
    return alt.Data(values=list(rows))  # type: ignore[no-untyped-call]


def overlay(rows: Sequence[Row], height: int, *layers: alt.Chart) -> alt.LayerChart:
    """Layers over the same rows, the first beneath."""
    drawing: alt.LayerChart = alt.layer(*layers, data=inline(rows)).properties(height=height)
    return drawing
