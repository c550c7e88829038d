"""A chart as a part of a page: a figure with inline SVG, complete without script; `SCRIPT` makes it answer.

Places are percentages and letters keep their size at every width. Lines and bands, which have to be stretched, are in
an SVG of their own whose strokes are not. What does not fit a narrow page is of class `roomy`, its stand-in `tight`.
"""

from __future__ import annotations

from collections.abc import Iterable

from compressor.report.charts import Chart
from compressor.report.hovering import SCRIPT as SCRIPT
from compressor.report.layout import (
    DARK,
    LIGHT,
    RAMPS,
    SHAPES,
    Drawn,
    Label,
    Layout,
    Mark,
    Style,
    blend,
    brief,
    crest,
    lay_out,
    middle,
    settle,
)
from compressor.report.markup import NOTHING, Html, e, some
from compressor.report.scales import Tick, figure, known, ticks

HEIGHT = 260  # of the plot, in pixels
ROOMY, TIGHT = (470, 640, 860), (240, 330, 450)  # its widths on a page and on a phone, least first


def plot(chart: Chart) -> Html:
    """A figure: title, legend, axes, marks and caption."""
    layout = lay_out(chart)
    up = ticks(layout.y, chart.y.whole, HEIGHT, level=False)
    shapes = [*grid(chart, layout, up), *bands(layout)]
    shapes += [e("g", *lines(one), *marks(chart, one), **look(one)) for one in layout.drawn]
    shapes += labels(layout)
    said = f"{chart.title or chart.name}: {chart.y.label} against {chart.x.label}; {told(chart)}."
    drawn = e("svg", *shapes, width="100%", height=HEIGHT, role="img", aria_label=said)
    letters = max((len(tick.text) for tick in up), default=1)
    return e(
        "figure",
        some("p", chart.title, class_="name"),
        legend(chart, layout),
        e("div", chart.y.label, class_="up"),
        e("div", drawn, class_="area", style=f"--left:{letters}ch"),
        e("div", chart.x.label, class_="along"),
        some("figcaption", chart.caption),
        class_="plot",
    )


def told(chart: Chart) -> str:
    """What is in a chart, for those who do not see it."""
    names = [series.name for series in chart.series if series.shade is None]
    shaded = len(chart.series) - len(names)
    ends = f" from {chart.shades[0]} to {chart.shades[1]}" if chart.shades else ""
    parts = [", ".join(names), f"{shaded} lines{ends}" if shaded else ""]
    return " and ".join(filter(None, parts)) or "no data"


def percent(share: float) -> str:
    return f"{100 * share:.2f}%"


def look(one: Drawn) -> dict[str, str]:
    """The group of a series: its colour, and what its button switches."""
    return {"data_series": str(one.index), **tint(one.style)}


def tint(style: Style) -> dict[str, str]:
    if style.shade is not None:
        light, dark = (blend(style.shade, ramp) for ramp in RAMPS)
        return {"class_": "shade", "style": f"--l:{light};--d:{dark}"}
    return {"style": f"color:var(--{'bad' if style.colour is None else f'c{style.colour}'})"}


def grid(chart: Chart, layout: Layout, up: list[Tick]) -> list[Html]:
    """Lines at the ticks, their letters outside, and the diagonal."""
    shapes = []
    for tick in up:
        y, base = percent(1 - tick.at), tick.value == 0 and not layout.y.log
        shapes.append(e("line", x1="0", x2="100%", y1=y, y2=y, class_="grid base" if base else "grid"))
        shapes.append(e("text", tick.text, x="0", y=y, dx="-8", dy="4", text_anchor="end", class_="tick"))
    wide, tight = (ticks(layout.x, chart.x.whole, room[0], level=True) for room in (ROOMY, TIGHT))
    for tick in dict.fromkeys([*wide, *tight]):
        x, only = percent(tick.at), "" if tick in wide and tick in tight else " roomy" if tick in wide else " tight"
        shapes.append(e("line", x1=x, x2=x, y1="0", y2="100%", class_=f"grid{only}"))
        shapes.append(e("text", tick.text, x=x, y="100%", dy="18", text_anchor="middle", class_=f"tick{only}"))
    if layout.diagonal:
        (x1, y1), (x2, y2) = layout.diagonal
        ends = {"x1": percent(x1), "y1": percent(1 - y1), "x2": percent(x2), "y2": percent(1 - y2)}
        shapes.append(e("line", **ends, class_="diagonal"))
    return shapes


def stretched(one: Drawn, paths: Iterable[Html]) -> Html:
    """Shapes in percent of both sides; cut off at the axes if some of the series is beyond them."""
    beyond = any(not 0 <= v <= 1 for run in one.runs for mark in run for v in (mark.x, mark.y, *(mark.ends or ())))
    size = {"viewBox": "0 0 100 100", "preserveAspectRatio": "none", "width": "100%", "height": "100%"}
    return e("svg", *paths, **size, class_="cut" if beyond else None)


def through(places: Iterable[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{100 * x:.2f} {100 * (1 - y):.2f}" for x, y in places)


def bands(layout: Layout) -> list[Html]:
    """Intervals of lines, beneath everything else."""
    shapes = []
    for one in layout.drawn:
        paths = []
        for run in one.runs:
            ends = [(mark.x, *mark.ends) for mark in run if mark.ends]
            if len(ends) > 1:
                around = [*((x, high) for x, _, high in ends), *((x, low) for x, low, _ in reversed(ends))]
                paths.append(e("path", d=f"{through(around)}Z", class_="band"))
        if paths:
            shapes.append(e("g", stretched(one, paths), **look(one)))
    return shapes


def lines(one: Drawn) -> list[Html]:
    """A line through the points of a series; lit up with a block, if all its points are of that block."""
    blocks = {mark.point.block for run in one.runs for mark in run}
    block = blocks.pop() if len(blocks) == 1 else None
    d = "".join(through((mark.x, mark.y) for mark in run) for run in one.runs if len(run) > 1)
    path = e("path", d=d, class_="line", stroke_dasharray=one.style.dash or None, data_block=block)
    return [stretched(one, [path])] if d else []


def marks(chart: Chart, one: Drawn) -> list[Html]:
    whiskers, bars = [], one.series.kind == "bars"
    for mark in one.marks if one.series.kind != "line" else ():
        if mark.ends:
            x, (low, high) = percent(middle(one, mark)), mark.ends
            whiskers.append(e("line", x1=x, x2=x, y1=percent(1 - high), y2=percent(1 - low), class_="whisker"))
    shapes = [shape(one, mark, note(chart, one, mark)) for mark in one.marks]
    return [*shapes, *whiskers] if bars else [*whiskers, *shapes]


def shape(one: Drawn, mark: Mark, told: str) -> Html:
    """One mark, with what is said about it as its title."""
    title = e("title", told)
    at = f"{100 * middle(one, mark):.2f} {100 * (1 - mark.y):.2f}"
    data = {"data_at": at, "data_block": mark.point.block, "data_kind": one.series.kind}
    if one.series.kind == "bars":
        x, low, high = percent(mark.x + one.left), min(mark.y, one.base), max(mark.y, one.base)
        size = {"x": x, "y": percent(1 - high), "width": percent(one.wide), "height": percent(high - low)}
        return e("rect", title, **size, **data, class_=f"mark fill{one.style.fill}{' out' * mark.out}")
    kind = f"mark{' out' * mark.out}{'' if mark.seen else ' ghost'}"
    drawn = outline(one.style.shape, mark.radius)
    return e("svg", title, drawn, x=percent(mark.x), y=percent(1 - mark.y), **data, class_=kind)


def outline(shape: int, radius: float) -> Html:
    """The outline of a mark around (0, 0)."""
    if not SHAPES[shape]:
        return e("circle", r=f"{radius:.2f}")
    return e("path", d="M" + "L".join(f"{radius * x:.2f} {-radius * y:.2f}" for x, y in SHAPES[shape]) + "Z")


def note(chart: Chart, one: Drawn, mark: Mark) -> str:
    """What is told about a mark: its own note, or its numbers."""
    point = mark.point
    if point.note:
        return point.note
    name, ends = one.series.name or point.label, (point.low, point.high)
    interval = f" ({figure(ends[0])} … {figure(ends[1])})" if known(ends[0]) and known(ends[1]) else ""
    return f"{name}\n{chart.x.label}: {figure(point.x)}\n{chart.y.label}: {figure(point.y)}{interval}".lstrip("\n")


def labels(layout: Layout) -> list[Html]:
    """Letters beside marks, placed for a page and for a phone; once where both agree."""
    wide, tight = ({(id(x.mark), x.dx, x.dy): x for x in settle(layout, room, HEIGHT)} for room in (ROOMY, TIGHT))
    first = [beside(label, "" if place in tight else " roomy") for place, label in wide.items()]
    return first + [beside(label, " tight") for place, label in tight.items() if place not in wide]


def beside(label: Label, only: str) -> Html:
    x, y = percent(middle(label.drawn, label.mark)), percent(1 - crest(label.drawn, label.mark))
    text = e("text", label.text, x=x, y=y, dx=label.dx, dy=label.dy, text_anchor=label.anchor)
    alarm = " alarm" * label.drawn.series.alarm
    return e("g", text, class_=f"label{alarm}{only}", data_series=label.drawn.index, data_block=label.mark.point.block)


def legend(chart: Chart, layout: Layout) -> Html:
    """A button for every series, and the two ends of the gradient; nothing for a series alone."""
    keys = [key(one) for one in sorted(layout.drawn, key=lambda one: one.index) if one.style.shade is None]
    ramp = NOTHING
    if chart.shades:
        ramp = e("span", chart.shades[0], e("i", class_="ramp"), chart.shades[1], class_="ends")
    return some("div", *(keys if len(keys) > 1 or ramp else []), ramp, class_="keys")


def key(one: Drawn) -> Html:
    style, kind, drawn = one.style, one.series.kind, []
    if kind == "line":
        drawn.append(e("line", x1="0", x2="26", y1="7", y2="7", class_="line", stroke_dasharray=style.dash or None))
    if kind == "bars":
        drawn.append(e("rect", x="6", y="1.5", width="14", height="11", class_=f"fill{style.fill}"))
    elif style.marked:
        drawn.append(e("svg", outline(style.shape, 4.2), x="13", y="7", class_="mark"))
    swatch = e("svg", *drawn, width="26", height="14", aria_hidden="true", **tint(style))
    name = brief(one.series.name or "–", 80)
    return e("button", swatch, name, type="button", aria_pressed="true", data_series=one.index)


def palette(colours: Iterable[str], ramp: Iterable[str]) -> str:
    colours = "".join(f"--c{k}:{colour};" for k, colour in enumerate(colours))
    return f":root{{{colours}--ramp:{','.join(ramp)}}}"


CSS = (
    f"""{palette(LIGHT, RAMPS[0])}.shade{{color:var(--l)}}
@media(prefers-color-scheme:dark){{{palette(DARK, RAMPS[1])}.shade{{color:var(--d)}}}}
"""
    + """.plot{container-type:inline-size;margin:1.25rem 0 1.75rem;font-size:12px;line-height:1.35}
.plot svg{font-size:12px;overflow:visible}.plot .cut{overflow:hidden}
.plot .name{font-size:.95rem;font-weight:600;margin:0 0 .4rem}.plot figcaption{font-size:.85rem;color:var(--dim);
max-width:46rem;margin-top:.5rem;line-height:1.5}
.plot .up,.plot .along{color:var(--dim)}.plot .up{margin-bottom:.6rem}.plot .along{text-align:center;padding-top:26px}
.area{padding:0 18px 0 calc(var(--left) + 12px)}.plot .grid{stroke:var(--line);shape-rendering:crispEdges}
.plot .base{stroke:var(--dim)}.plot .tick{fill:var(--dim)}.plot .diagonal{stroke:var(--dim);stroke-dasharray:3 4}
.plot .line{fill:none;stroke:currentColor;stroke-width:2;stroke-linejoin:round;vector-effect:non-scaling-stroke}
.plot .shade .line{stroke-width:1.5}.plot .band{fill:currentColor;opacity:.16}
.plot .whisker{stroke:currentColor;stroke-width:1.5;opacity:.7}.plot rect~.whisker{stroke:var(--ink);opacity:.8}
.plot .mark,.plot .mark>*,.plot .fill0{fill:currentColor}.plot svg.mark>*{stroke:var(--bg);stroke-width:1}
.plot [data-kind=dots]>*{fill-opacity:.82}.plot svg.out>*{fill:var(--bg);stroke:currentColor;stroke-width:1.5}
.plot .ghost>*{opacity:0}.plot .fill1,.plot .fill2,.plot .fill3{fill:currentColor;fill-opacity:.12;stroke:currentColor}
.plot .fill2{fill-opacity:.5}.plot .fill3{stroke-dasharray:3 2}.plot .alarm text{fill:var(--bad);font-weight:600}
.plot .label text{paint-order:stroke;stroke:var(--bg);stroke-width:3;stroke-linejoin:round}.plot .off{display:none}
.plot svg.lit>*,.plot svg.at>*,.plot rect.lit,.plot rect.at{opacity:1;stroke:var(--ink);stroke-width:2}
.plot .lit text{font-weight:700}.plot .line.lit{stroke-width:3.5}.busy .shade .line:not(.lit){opacity:.25}
tr.lit>*{background:var(--mark)}
.keys{display:flex;flex-wrap:wrap;align-items:center;gap:0 .4rem;margin:0 0 .3rem -.5rem}.keys svg{flex:none}
.keys button,.ends{display:inline-flex;align-items:center;gap:.4rem;min-height:28px;padding:.1rem .5rem;border:0;
border-radius:6px;background:none;color:var(--ink);font:inherit;text-align:left}.keys button{cursor:pointer}
.keys button:hover{background:var(--soft)}.keys [aria-pressed=false]{color:var(--dim);text-decoration:line-through}
.keys [aria-pressed=false] svg{opacity:.3}.ramp{width:5.5rem;height:8px;border-radius:4px;
background:linear-gradient(90deg,var(--ramp))}.keys button:focus-visible,.area svg:focus-visible{outline:2px solid
var(--bar);outline-offset:2px}.tip{position:absolute;z-index:9;left:0;top:0;max-width:min(20rem,calc(100vw - 16px));
box-sizing:border-box;padding:.4rem .6rem;border-radius:6px;background:var(--ink);color:var(--bg);font-size:.8rem;
line-height:1.4;white-space:pre-line;pointer-events:none;font-variant-numeric:tabular-nums}.tip[hidden]{display:none}
.tight{display:none}@container(max-width:34rem){.tight{display:inline}.roomy{display:none}}
"""
)
