"""Charts as files: PNG, and SVG that is the same to the byte whenever the chart is.

Drawn from the layout of a page, two thirds of a point for a pixel, in light colours. No text is read as mathematics.
"""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor.report.charts import Axis, Chart, Point, Series
from compressor.report.layout import LIGHT, RAMPS, SHAPES, Drawn, Layout, blend, brief, crest, lay_out, middle, settle
from compressor.report.scales import ticks
from compressor.runtime.errors import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ALARM, INK, DIM, GRID = "#b3231b", "#1b1d21", "#5a616c", "#dde0e5"
UNIT = 2 / 3  # points for a pixel of a page
WIDE, HIGH = 640.0, 350.0  # of the plot, in pixels of a page
ABOVE: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (-0.01, 1.0), "borderaxespad": 0.2, "borderpad": 0.2}
SETTINGS: dict[Any, Any] = {
    **{"svg.hashsalt": "compressor", "svg.fonttype": "none", "font.family": ["sans-serif"], "font.size": 8.0},
    **{
        "axes.unicode_minus": True,
        "text.color": INK,
        "text.usetex": False,
        "text.parse_math": False,
        "path.simplify": False,
    },
}


def draw(chart: Chart, directory: Path) -> list[str]:
    """Write `<name>.png` and `<name>.svg` into a directory. Returns the names of the files."""
    directory.mkdir(parents=True, exist_ok=True)
    return write(chart, directory / chart.name)


def draw_frontier(points: Sequence[Mapping[str, Any]], beside: Path, model: str, seq_len: int) -> list[str]:
    """Parameters and FLOPs removed against ΔPPL, next to the file of the plan. Returns the names of the files."""
    removed, flops = [], []
    for point in points:
        if point["removed"]:
            texts = point["texts"].values()
            rise, low, high = (
                max(text["delta"] for text in texts),
                min(text["delta_ci95"][0] for text in texts),
                max(text["delta_ci95"][1] for text in texts),
            )
            label = f"budget {point['asked']}"
            removed.append(Point(100 * point["removed_fraction"], rise, low, high, label=label))
            flops.append(Point(100 * (1 - 1 / point["flops_ratio"]), rise))
    most = max((point.x for point in (*removed, *flops)), default=0.0)
    chart = Chart(
        name=beside.stem,
        title=Path(model).name or "model",
        x=Axis("removed, %", limits=(0.0, 1.08 * most)),
        y=Axis(f"ΔPPL, windows of {seq_len} tokens"),
        series=(Series("parameters", tuple(removed)), Series("FLOPs per token", tuple(flops), dashed=True)),
    )
    return write(chart, beside.with_suffix(""))


def write(chart: Chart, stem: Path) -> list[str]:
    import matplotlib

    files = [stem.with_name(stem.name + suffix) for suffix in (".png", ".svg")]
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a name in a script that the font lacks
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(SETTINGS)
        figure = build(chart)
        figure.savefig(files[0], dpi=150, metadata={"Software": None})
        figure.savefig(files[1], metadata={"Date": None, "Creator": None})
    return [str(file) for file in files]


def clean(text: str, most: int | None = None) -> str:
    """Text in one line that any font and any XML can hold, of so many letters at most."""
    line = " ".join(visible(text).split())
    return line if most is None else brief(line, most)


def build(chart: Chart) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    layout = lay_out(chart)
    caption = textwrap.wrap(clean(chart.caption), 118)
    figure = Figure(figsize=(7.0, 4.2 + 0.16 * len(caption)), facecolor="white")
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.06)
    axes = figure.subplots()
    figure.suptitle(clean(chart.title, 80), x=0.012, ha="left", fontsize=10, fontweight="bold", color=INK)
    axes.set(xlim=(0, 1), ylim=(0, 1))
    frame(chart, layout, axes)
    for one in layout.drawn:
        bars(one, axes) if one.series.kind == "bars" else lines(one, axes)
    for label in settle(layout, (WIDE,), HIGH):
        mark, at = label.mark, (UNIT * label.dx, -UNIT * label.dy)
        side = {"start": "left", "middle": "center", "end": "right"}[label.anchor]
        text = axes.annotate(
            clean(label.text),
            (middle(label.drawn, mark), crest(label.drawn, mark)),
            at,
            textcoords="offset points",
            ha=side,
            zorder=6,
        )
        if label.drawn.series.alarm:
            text.set(color=ALARM, fontweight="bold")
    legend(chart, layout, figure, axes)
    if caption:
        figure.supxlabel("\n".join(caption), x=0.012, ha="left", fontsize=8, color=DIM)
    return figure


def frame(chart: Chart, layout: Layout, axes: Axes) -> None:
    """Ticks, grid, names of the axes and diagonal."""
    along = ticks(layout.x, chart.x.whole, 0.7 * WIDE, level=True)
    up = ticks(layout.y, chart.y.whole, 0.8 * HIGH, level=False)
    axes.set_xticks([tick.at for tick in along], [tick.text for tick in along], color=DIM)
    axes.set_yticks([tick.at for tick in up], [tick.text for tick in up], color=DIM)
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    for tick in up:
        if tick.value == 0 and not layout.y.log:
            axes.axhline(tick.at, color=DIM, linewidth=0.7, zorder=0.9)
    axes.set_xlabel(clean(chart.x.label, 80), color=DIM)
    axes.set_ylabel(clean(chart.y.label, 56), color=DIM)
    if layout.diagonal:
        axes.plot(*zip(*layout.diagonal, strict=True), color=DIM, linewidth=0.8, linestyle=(0, (3, 4)), zorder=1)


def colour(one: Drawn) -> str:
    style = one.style
    if style.shade is not None:
        return blend(style.shade, RAMPS[0])
    return ALARM if style.colour is None else LIGHT[style.colour]


def dashes(one: Drawn) -> Any:
    return (0, tuple(0.5 * float(part) for part in one.style.dash.split())) if one.style.dash else "solid"


def marker(shape: int) -> tuple[Any, float]:
    """A marker, and the area in points that gives it the area of a circle of radius 1: markers are scaled to a box."""
    from matplotlib.path import Path as Outline

    corners = SHAPES[shape]
    if not corners:
        return "o", 4.0
    return Outline([*corners, corners[0]], closed=True), (2 * max(abs(v) for corner in corners for v in corner)) ** 2


def lines(one: Drawn, axes: Axes) -> None:
    """A line with its band, or dots with their whiskers."""
    tint, line = colour(one), one.series.kind == "line"
    for run in one.runs:
        ends = [(mark.x, *mark.ends) for mark in run if mark.ends]
        if len(ends) > 1:
            xs, lows, highs = zip(*ends, strict=True)
            axes.fill_between(xs, lows, highs, color=tint, alpha=0.16, linewidth=0, zorder=2)
        thin = 1.0 if one.style.shade is not None else 1.4
        places = [mark.x for mark in run], [mark.y for mark in run]
        axes.plot(*places, color=tint, linewidth=thin, linestyle=dashes(one), zorder=3)
    if not line:
        ranges = [(mark.x, *mark.ends) for mark in one.marks if mark.ends]
        if ranges:
            axes.vlines(*zip(*ranges, strict=True), color=tint, linewidth=1, alpha=0.7, zorder=4)
    seen = [mark for mark in one.marks if mark.seen]
    shape, area = marker(one.style.shape)
    for out in (False, True):
        part = [mark for mark in seen if mark.out == out]
        if part:
            axes.scatter(
                [mark.x for mark in part],
                [mark.y for mark in part],
                s=[area * (UNIT * mark.radius) ** 2 for mark in part],
                marker=shape,
                facecolor="white" if out else tint,
                edgecolor=tint if out else "white",
                linewidth=1.0 if out else 0.5,
                alpha=1.0 if out or line else 0.82,
                clip_on=False,
                zorder=5,
            )


def bars(one: Drawn, axes: Axes) -> None:
    tint, fill = colour(one), one.style.fill
    lefts, heights = [mark.x + one.left for mark in one.marks], [mark.y - one.base for mark in one.marks]
    axes.bar(lefts, heights, one.wide, one.base, align="edge", zorder=3, **filled(tint, fill))
    ranges = [(middle(one, mark), *mark.ends) for mark in one.marks if mark.ends]
    if ranges:
        axes.vlines(*zip(*ranges, strict=True), color=INK, linewidth=1, alpha=0.8, zorder=4)


def filled(tint: str, fill: int) -> dict[str, Any]:
    """How bars are filled: fully, hollow, half, hollow and dashed."""
    edge = {"edgecolor": tint, "linewidth": 0.8, "linestyle": (0, (3, 2)) if fill == 3 else "solid"} if fill else {}
    return {"facecolor": (tint, (1.0, 0.12, 0.5, 0.12)[fill]), **edge}


def legend(chart: Chart, layout: Layout, figure: Figure, axes: Axes) -> None:
    """Names of the series above the plot, the gradient beside it; nothing for a series alone."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    if chart.shades:
        shown = ScalarMappable(cmap=ListedColormap([blend(k / 31, RAMPS[0]) for k in range(32)]))
        scale = figure.colorbar(shown, ax=axes, fraction=0.025, pad=0.015, shrink=0.5, ticks=[0, 1])
        scale.ax.set_yticklabels([clean(end, 16) for end in chart.shades])
        scale.ax.tick_params(length=0, labelcolor=DIM)
        scale.outline.set_visible(False)
    keys = [one for one in sorted(layout.drawn, key=lambda one: one.index) if one.style.shade is None]
    if len(keys) < (1 if chart.shades else 2):
        return
    shown_keys: list[Any] = []
    for one in keys:
        if one.series.kind == "bars":
            shown_keys.append(Patch(**filled(colour(one), one.style.fill)))
            continue
        shape, area = marker(one.style.shape) if one.style.marked else ("", 0.0)
        line: Any = dashes(one) if one.series.kind == "line" else "none"
        shown_keys.append(Line2D([], [], color=colour(one), linestyle=line, marker=shape, markersize=2.6 * area**0.5))
    names = [clean(one.series.name or "–", 60) for one in keys]
    columns = max(1, min(len(keys), int(115 / (max(map(len, names)) + 8))))
    drawn = axes.legend(shown_keys, ["-"] * len(keys), ncols=columns, frameon=False, **ABOVE)
    for text, name in zip(drawn.get_texts(), names, strict=True):
        text.set(text=name)
