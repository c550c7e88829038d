"""Charts of how linear a model is: over depth, by rank, by text, beside other models, and what a block costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized

import altair as alt

from compressor.report.chart_style import (
    COSTLY,
    DIM,
    INK,
    RAMP,
    SAFE,
    SERIES,
    UNSAFE,
    Chart,
    Row,
    beside,
    block_axis,
    by_branch,
    by_name,
    clean_rows,
    dots,
    finish,
    fixed,
    inline,
    log_axis,
    log_domain,
    marks,
    overlay,
    r2_ends,
)
from compressor.report.formats import interval, last_part, name_verdict, num, ridge_differs
from compressor.report.record import ProfileSet, Record
from compressor.report.record_parts import ATTENTION, FFN
from compressor.runtime.errors import shorten, visible
from compressor.runtime.figures import count

AnyDrawing = alt.LayerChart | alt.VConcatChart
VERDICTS = {"safe": SAFE, "costly": COSTLY, "unsafe": UNSAFE, "undecided": DIM}
R2 = "R² on held-out rows"
DASHES = [[1, 0], [6, 3], [2, 2], [8, 3, 2, 3]]
BLOCKS, UNSAFE_BLOCKS, UNSAFE_ATTENTION = "blocks", "unsafe blocks", "unsafe attention"
KINDS = {  # colour and shape of a mark
    BLOCKS: (SERIES[0], "circle"),
    UNSAFE_BLOCKS: (UNSAFE, "circle"),
    ATTENTION: (SERIES[1], "triangle-up"),
    UNSAFE_ATTENTION: (UNSAFE, "triangle-up"),
}
FEW = 12  # marks that can each have their number beside them


def measured_on(record: Record) -> str:
    """What the figures of a chart were measured on."""
    parts = []
    if record.rows:
        parts.append(f"{count(record.rows.fitted, 'row')} fitted, {num(record.rows.held_out)} held out")
    if record.text:
        parts.append(f"windows of {count(record.text.seq_len, 'token')}")
    return f"{last_part(record.source.model)}: {', '.join(parts) or 'tokens and windows are not recorded'}."


def draw_lines(rows: Sequence[Row], names: Sequence[str], x: alt.X, width: bool = False) -> AnyDrawing:
    """One line per series, description apart by colour, dashes and shape; `width` draws the intervals as bands.

    Rows of attention, where there are any, are drawn in a panel of their own on the same scale.
    """
    scale = fixed(r2_ends(rows, "y", "low", "high"))
    parted = by_branch({"branch": FFN} | row for row in rows)
    panels = [draw_panel(found, names, x, scale, name_panel(branch, parted), width) for branch, found in parted.items()]
    return panels[0] if len(panels) == 1 else alt.vconcat(*panels, spacing=14)


def name_panel(branch: str, panels: Sized) -> str:
    """The title of a panel's axis, which says of what it is where there are several."""
    return f"R², {branch}" if len(panels) > 1 else R2


def draw_panel(
    rows: Sequence[Row], names: Sequence[str], x: alt.X, scale: alt.Scale, title: str, width: bool
) -> alt.LayerChart:
    y = alt.Y("y:Q", title=title, scale=scale)
    names = [shorten(visible(name), 300) for name in names]
    colour, base = by_name("series", names), alt.Chart()
    legend = alt.Legend() if len(names) > 1 else None
    shape = alt.Shape("series:N", scale=alt.Scale(domain=names), legend=legend)
    dash = alt.StrokeDash("series:N", scale=alt.Scale(domain=names, range=DASHES), legend=legend)
    line = base.mark_line(strokeWidth=1.8).encode(x, y, colour, dash)
    points = base.mark_point(size=34, opacity=1).encode(x, y, colour, shape)
    bands = base.mark_area(opacity=0.16).encode(x, alt.Y("low:Q", scale=scale), alt.Y2("high:Q"), colour)
    height = 240 if title == R2 else 170
    return overlay(rows, height, *([bands] if width else []), line, points, marks(x=x, y=y))


def line_rows(name: str, values: Iterable[tuple[int, float]], branch: str = FFN) -> list[Row]:
    """A value of every block over depth."""
    what = "block" if branch == FFN else branch
    return [
        {"x": at, "y": y, "series": name, "branch": branch, "note": f"{what} {at}\n{name} {num(y)}"} for at, y in values
    ]


Lines = Mapping[str, Sequence[tuple[int, float]]]


def over_depth(name: str, title: str, caption: str, lines: Lines, attention: Lines | None = None) -> Chart | None:
    """Values of every block over depth, in a line for each name, and the same of attention."""
    found = [row for series, values in lines.items() for row in line_rows(series, values)]
    found += [row for series, values in (attention or {}).items() for row in line_rows(series, values, ATTENTION)]
    rows = clean_rows(found, "x", "y")
    if not rows:
        return None
    drawing = draw_lines(rows, list(lines), whole_numbers())
    return finish(name, title, caption, f"{R2} by block; {', '.join(lines)}", drawing)


def whole_numbers() -> alt.X:
    return alt.X(
        "x:Q", title="block", axis=alt.Axis(tickMinStep=1, format="d"), scale=alt.Scale(zero=False, nice=False)
    )


def depth(record: Record) -> Chart | None:
    names = ["R²_lin, 95 % interval", "stream-weighted"]
    ridge = ["best ridge"] if ridge_differs(record.branches) else []
    names += ridge
    rows = []
    for block in record.branches:
        low, high = block.r2_lin_ci95
        note = f"{block.words}\nR²_lin {num(block.r2_lin)} ({num(low)} … {num(high)})"
        about: Row = {"low": low, "high": high, "series": names[0], "branch": block.branch, "note": note}
        rows.append({"x": block.index, "y": block.r2_lin, **about})
        rows += line_rows(names[1], [(block.index, block.r2_stream)], block.branch)
        for name in ridge:
            rows += line_rows(name, [(block.index, block.r2_ridge)], block.branch)
    points = clean_rows(rows, "x", "y")
    if not points:
        return None
    caption = (
        "How much of every block's output its least-squares linear map explains, and the same with rows counted as the "
        f"next norm sees them. Where the two part, a few rows carry the variance. {measured_on(record)}"
    )
    drawing = draw_lines(points, names, whole_numbers(), width=True)
    return finish("depth", "Linearity over depth", caption, f"{R2} by block; {', '.join(names)}", drawing)


def corpora(record: Record) -> Chart | None:
    lines = {corpus.name: [(b.index, b.r2_lin) for b in corpus.blocks] for corpus in record.corpora}
    attention = {c.name: [(b.index, b.r2_lin) for b in c.attention] for c in record.corpora if c.attention}
    pairs = [f"{p.first} and {p.second} {num(p.rank_correlation, form='.2f')}" for p in record.corpus_agreement]
    agreed = f" Rank correlation: {', '.join(pairs)}." if pairs else ""
    caption = f"R²_lin of every block by corpus.{agreed} {measured_on(record)}"
    return over_depth("corpora", "The same blocks on other text", caption, lines, attention)


def trained(record: Record) -> Chart | None:
    probe = record.probes.trained if record.probes else None
    probed = [(block.index, block.trained) for block in record.blocks if block.trained]
    if not probed or not probe:
        return None
    lines = {
        "closed form": [(index, result.r2_lin) for index, result in probed],
        f"{probe.optimiser}, {count(probe.steps, 'step')}": [(index, result.r2) for index, result in probed],
    }
    caption = (
        f"The same linear map by {probe.optimiser} ({count(probe.steps, 'step')} of {count(probe.batch, 'row')}, "
        f"learning rate {probe.learning_rate:g}, from zero) stays below the exact solution by {num(probe.mean_gap)} on "
        f"average: a trained baseline understates linearity. {measured_on(record)}"
    )
    return over_depth("trained", "The pitfall of training it", caption, lines)


CROSSED = {
    "own": "own block, own inputs",
    "own_on_other": "own block, the other's inputs",
    "own_on_white": "own block, own inputs whitened",
    "other": "other block, its own inputs",
    "other_on_own": "other block, this model's inputs",
    "other_on_white": "other block, this model's inputs whitened",
}


def cross(record: Record) -> Chart | None:
    crossed = [(block.index, block.cross) for block in record.blocks if block.cross]
    if not crossed:
        return None
    lines = {name: [(index, getattr(crossing, part)) for index, crossing in crossed] for part, name in CROSSED.items()}
    other = last_part(record.cross.source.model) if record.cross else "the other model"
    caption = (
        f"R²_lin of this model's blocks and of {other}'s, each on its own inputs, on the other's, and on inputs "
        f"whitened to unit covariance: what follows the block is in its weights, what follows the inputs is not. "
        f"{measured_on(record)}"
    )
    return over_depth("cross", "Learned, not architectural?", caption, lines)


def models(record: ProfileSet) -> Chart | None:
    rows, names = [], []
    for place, profile in enumerate(record.profiles, start=1):
        name = last_part(profile.source.model)
        names.append(f"{name} ({place})" if name in names else name)
        last = max(1, len(profile.blocks) - 1)
        for k, block in enumerate(profile.blocks):
            note = f"{name}, block {block.index}\nR²_lin {num(block.r2_lin)}"
            rows.append({"x": k / last, "y": block.r2_lin, "series": names[-1], "note": note})
    points = clean_rows(rows, "y")
    if not points or len(names) < 2:
        return None
    x = alt.X("x:Q", title="relative depth", scale=alt.Scale(domain=[0, 1]))
    drawing = draw_lines(points, names, x)
    caption = " ".join(map(measured_on, record.profiles))
    return finish("models", "Models side by side", caption, f"{R2} by relative depth; {', '.join(names)}", drawing)


def cost_rows(record: Record) -> list[Row]:
    """What each block costs as a linear map, alone; what does not rise stands at the end of a logarithmic axis."""
    rows = []
    for block in record.branches:
        if trial := block.swap:
            low, high = trial.delta_ci95
            verdict = name_verdict(block.verdict)
            note = (
                f"{block.words} · {verdict}\nperplexity {num(trial.baseline)} → {num(trial.compressed)}\n"
                f"{num(trial.delta, '+')} ({interval(trial.delta_ci95)})"
            )
            figures: Row = {"delta": trial.delta, "low": low, "high": high}
            rows.append({"index": block.index, "branch": block.branch, "verdict": verdict, "note": note, **figures})
    points = clean_rows(rows, "index", "delta")
    bottom, _ = log_domain(row["delta"] for row in points)
    for row in points:
        row["out"] = row["delta"] <= bottom
        for key in ("delta", "low", "high"):
            row[key] = None if row[key] is None else max(bottom, row[key])
    return points


def draw_costs(rows: Sequence[Row], height: int, legend: bool = True) -> alt.LayerChart:
    values = [row[key] for row in rows for key in ("delta", "low", "high") if row[key] is not None]
    ends = (min(values), 1.2 * max(values))
    scale = fixed(ends, log=True)
    y = alt.Y("delta:Q", title="ΔPPL alone", scale=scale, axis=log_axis(ends))
    seen = seen_verdicts(rows)
    colour = by_name("verdict", seen, [VERDICTS[word] for word in seen])
    colour = colour if legend else colour.legend(None)
    x, base, aside = block_axis(), alt.Chart(), beside(rows)
    shapes = alt.Scale(domain=[FFN, ATTENTION], range=["circle", "triangle-up"])
    shape = [alt.Shape("branch:N", scale=shapes, legend=alt.Legend(symbolFillColor=DIM))] if aside else []
    layers = [
        base.mark_rule(strokeWidth=2, opacity=0.6).encode(
            x, alt.Y("low:Q", scale=scale), alt.Y2("high:Q"), colour, *aside
        ),
        *dots(rows, 56, x, y, colour, *aside, *shape),
        marks(x=x, y=y, **({"xOffset": aside[0]} if aside else {})),
    ]
    return overlay(rows, height, *layers)


def seen_verdicts(rows: Sequence[Row]) -> list[str]:
    return [word for word in VERDICTS if any(row["verdict"] == word for row in rows)]


def swap(record: Record) -> Chart | None:
    rows, sweep = cost_rows(record), record.swap
    if not rows or not sweep:
        return None
    caption = (
        f"The rise in perplexity (from {num(sweep.baseline)}) when this block alone becomes its linear map, with its "
        f"95 % interval. {count(sweep.tokens, 'token')} in windows of {num(sweep.seq_len)}; logarithmic; "
        "a hollow mark is at or below the lower end."
    )
    description = "ΔPPL of each block alone"
    return finish("swap", "What it costs to replace a block", caption, description, draw_costs(rows, height=200))


def draw_scatter(rows: Sequence[Row], x: alt.X, y: alt.Y, sized: bool, line: Sequence[float] | None) -> alt.LayerChart:
    """Dots, blocks that must not be touched in red; `line` are the ends of the line of equality."""
    base, layers = alt.Chart(), []
    if line:
        ends = inline([{"x": end, "y": end} for end in line])
        equal = alt.Chart(ends).mark_line(color=DIM, strokeDash=[3, 4], strokeWidth=1)
        layers.append(equal.encode(x, y))
    kinds = [kind for kind in KINDS if any(row["kind"] == kind for row in rows)]
    colour = by_name("kind", kinds, [KINDS[kind][0] for kind in kinds])
    shapes = alt.Scale(domain=kinds, range=[KINDS[kind][1] for kind in kinds])
    legend = alt.Legend(columns=len(kinds)) if len(kinds) > 1 else None
    colour, shape = colour.legend(legend), alt.Shape("kind:N", scale=shapes, legend=legend)
    areas = [alt.Size("size:Q", scale=alt.Scale(range=[30, 500]), legend=None)] if sized else []
    numbers = base.mark_text(align="left", dx=7, dy=-6).encode(x, y, text="label:N")
    layers += [*dots(rows, 64, x, y, colour, shape, *areas), numbers, marks(x=x, y=y)]
    return overlay(rows, 300, *layers)


def regimes(record: Record) -> Chart | None:
    rows = []
    for b in record.branches:
        unsafe = b.verdict == "unsafe"
        kinds = (BLOCKS, UNSAFE_BLOCKS) if b.branch == FFN else (ATTENTION, UNSAFE_ATTENTION)
        note = f"{b.words} · {name_verdict(b.verdict)}\nR²_lin {num(b.r2_lin)}, median feature {num(b.r2_median)}\n"
        note += f"effective rank {num(b.effective_rank, form='.1f')}"
        about: Row = {
            "kind": kinds[unsafe],
            "label": str(b.index) if unsafe else "",
            "out": False,
        }
        rows.append({"x": b.r2_lin, "y": b.r2_median, "size": b.effective_rank, "note": note, **about})
    points = sorted(
        clean_rows(rows, "x", "y", "size"), key=lambda row: str(row["kind"]).startswith("unsafe")
    )  # unsafe ones above all others
    if not points:
        return None
    caption = (
        "On the line, every output feature is as linear as the whole; far beneath it, the whole looks linear because a "
        f"few rows do. The area is the effective rank of the output. {measured_on(record)}"
    )
    ends = r2_ends(points, "x", "y")
    scale = fixed(ends)
    x, y = (
        alt.X("x:Q", title="R²_lin, all features together", scale=scale),
        alt.Y("y:Q", title="R² of the median feature", scale=scale),
    )
    drawing = draw_scatter(points, x, y, sized=True, line=ends)
    description = "R² of the median feature against R²_lin, one dot per block"
    return finish("regimes", "Two regimes", caption, description, drawing)


def residual(record: Record) -> Chart | None:
    probe = record.probes.bilinear if record.probes else None
    probed = [(block.index, block.bilinear) for block in record.blocks if block.bilinear]
    if not probed or not probe:
        return None
    rows = []
    for index, result in probed:
        note = f"block {index}\nR² {num(result.r2_lin)} → {num(result.r2_poly)}, gain {num(result.gain, '+')}"
        label = str(index) if len(probed) <= FEW else ""
        rows.append(
            {"x": 1 - result.r2_lin, "y": result.gain, "note": note, "label": label, "kind": BLOCKS, "out": False}
        )
    points = clean_rows(rows, "x", "y")
    if not points:
        return None
    caption = (
        f"What {num(probe.rank)} products (u·x)(v·x) explain beside the linear map. Pearson correlation with "
        f"1 − R²_lin {num(probe.pearson, form='.2f')}. Converged when {probe.criterion}. {measured_on(record)}"
    )
    x = alt.X("x:Q", title="1 − R²_lin: what the linear map leaves", scale=alt.Scale(zero=False))
    y = alt.Y("y:Q", title="gain of the bilinear probe in R²")
    description = "gain of the bilinear probe against 1 − R²_lin, result dot per block"
    return finish(
        "residual", "What the residual is not", caption, description, draw_scatter(points, x, y, sized=False, line=None)
    )


def ladder(record: Record) -> Chart | None:
    rows, reached = [], []
    for b in record.branches:
        if b.ladder:
            steps = zip(b.ladder.ranks, b.ladder.r2, strict=False)
            notes = ((rank, r2, f"{b.words}, rank {rank}\nR² {num(r2)}") for rank, r2 in steps if rank > 0)
            rows += [{"x": k, "y": r2, "block": b.index, "branch": b.branch, "note": note} for k, r2, note in notes]
            if b.rank_99 is not None:
                note = f"{b.words}\nrank {num(b.rank_99)} reaches 99 % of R²_lin\nwith {num(b.rank_99_params)} of "
                note += f"{num(b.params_before)} parameters"
                reached.append({"x": max(1, b.rank_99), "y": 0.99 * b.r2_lin, "branch": b.branch, "note": note})
    points = by_branch(clean_rows(rows, "x", "y", "block"))
    if not points:
        return None
    marked = by_branch(clean_rows(reached, "x", "y"))
    everything = [row for found in points.values() for row in found]
    scale = fixed(r2_ends(everything, "y"))
    ends = (1.0, max(2.0, *(row["x"] for row in everything)))
    panels = [
        draw_ladder(found, marked.get(branch, []), name_panel(branch, points), scale, ends)
        for branch, found in points.items()
    ]
    caption = (
        "R² of the best map of each rank (reduced-rank regression); the dots mark the rank that reaches 99 % of "
        f"the full map's. {measured_on(record)}"
    )
    drawing = panels[0] if len(panels) == 1 else alt.vconcat(*panels, spacing=14)
    return finish("ladder", "The rank ladder", caption, f"{R2} by rank, one line per block", drawing)


def draw_ladder(
    rows: Sequence[Row], reached: Sequence[Row], title: str, scale: alt.Scale, ends: tuple[float, float]
) -> alt.LayerChart:
    """One line per block, and a dot on each where its rank is enough."""
    marked = inline(reached)
    x = alt.X("x:Q", title="rank", scale=fixed(ends, log=True), axis=log_axis(ends))
    y = alt.Y("y:Q", title=title, scale=scale)
    legend = alt.Legend(title="block", titleOrient="left", format="d", tickMinStep=1)
    colour = alt.Color("block:Q", scale=alt.Scale(range=RAMP), legend=legend)
    base = alt.Chart()
    layers = [
        base.mark_line(strokeWidth=1.4).encode(x, y, colour, detail="block:N"),
        alt.Chart(marked).mark_point(size=48, opacity=1, color=INK).encode(x, y),
        marks(x=x, y=y),
        marks(x=x, y=y).properties(data=marked),
    ]
    return overlay(rows, 260 if title == R2 else 200, *layers)
