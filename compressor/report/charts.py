"""The charts of a record, as Vega-Lite: one specification is drawn by the page and written as PNG and SVG.

Each chart is a function of the record that returns None when the record lacks what it shows. Names and notes from a
record are data of a chart, never part of a formula.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import altair as alt

from compressor.report.chart_style import (
    BEFORE,
    DIM,
    INK,
    SAFE,
    SERIES,
    UNSAFE,
    WIDTH,
    Chart,
    Row,
    beside,
    block_axis,
    by_branch,
    by_name,
    clean_rows,
    finish,
    fixed,
    log_axis,
    log_domain,
    marks,
    overlay,
    r2_ends,
    write,
)
from compressor.report.chart_style import draw as draw
from compressor.report.fidelity import Fidelity, format_nats, format_share
from compressor.report.formats import (
    describe_replacement,
    interval,
    last_part,
    name_verdict,
    num,
    percent,
    say_documents,
)
from compressor.report.frontier_record import SizeFrontier
from compressor.report.linearity_charts import (
    BLOCKS,
    FEW,
    VERDICTS,
    corpora,
    cost_rows,
    cross,
    depth,
    draw_costs,
    draw_scatter,
    ladder,
    measured_on,
    models,
    regimes,
    residual,
    seen_verdicts,
    swap,
    trained,
)
from compressor.report.record import ProfileSet, Record, profiles_of
from compressor.report.record_parts import ATTENTION, FFN, Band, Block, PerplexityChange
from compressor.report.search_parts import FrontierPoint
from compressor.runtime.figures import count
from compressor.runtime.names import NO_LIMIT
from compressor.runtime.resources import format_bytes


def blocks(record: Record) -> Chart | None:
    """R²_lin of every block above what became of its parameters; of a profile, above what its linear map costs.
    Attention has a panel of its own, and marks of its own below."""
    rows = clean_rows(map(describe_block, record.branches), "index", "r2", "before", "after")
    if not rows:
        return None
    costs = cost_rows(record) if record.perplexity is None else []
    upper_height, height = (66, 80) if record.attention else (110, 120)  # all of it is to fit on a phone's first screen
    lower = draw_costs(costs, height=height, legend=False) if costs else draw_parameters(rows, height)
    if costs and record.swap:
        under = (
            f"the rise in perplexity (from {num(record.swap.baseline)}) when this block alone becomes its linear map; "
        )
        under += f"{count(record.swap.tokens, 'token')} in windows of {num(record.swap.seq_len)}; logarithmic"
        title, description = "How linear each block is, and what replacing it costs", "R² and ΔPPL by block"
    else:
        under = "parameters before and after"
        title, description = (
            "How linear each block is, and what is left",
            "R² and parameters before and after, by block",
        )
    caption = (
        f"Above: how much of each block's output its least-squares linear map explains (R²_lin, 95 % interval; "
        f"diamonds: rows weighted as the next norm sees them). Below: {under}. {measured_on(record)}"
    )
    seen, parted = seen_verdicts(rows), by_branch(rows)
    panels = [
        draw_linearity(found, seen, f"R²_lin, {branch}" if record.attention else "R²_lin", place == 0, upper_height)
        for place, (branch, found) in enumerate(parted.items())
    ]
    drawing = alt.vconcat(*panels, lower, spacing=14).resolve_scale(
        color="independent", x="shared", shape="independent"
    )
    return finish("blocks", title, caption, description, drawing)


def describe_block(block: Block) -> Row:
    low, high = block.r2_lin_ci95
    verdict = name_verdict(block.verdict)
    note = (
        f"{block.words} · {verdict}\nR²_lin {num(block.r2_lin)} ({num(low)} … {num(high)}), "
        f"stream-weighted {num(block.r2_stream)}\nparameters {num(block.params_before)} → {num(block.params_after)}"
    )
    if block.replacement.kind != "keep":
        note += f"\nnow: {describe_replacement(block.replacement)}"
    sizes = {"before": block.params_before, "after": block.params_after}
    figures = {"r2": block.r2_lin, "low": low, "high": high, "stream": block.r2_stream}
    return {"index": block.index, "branch": block.branch, "verdict": verdict, "note": note, **figures, **sizes}


def draw_linearity(rows: Sequence[Row], seen: Sequence[str], title: str, legend: bool, height: int) -> alt.LayerChart:
    """The panel of one kind of branch; one legend serves all panels."""
    scale = fixed(r2_ends(rows, "r2", "stream", zero=True))
    axis = alt.Axis(tickCount=4)
    y = alt.Y("r2:Q", title=title, scale=scale, axis=axis)
    colour = by_name("verdict", seen, [VERDICTS[word] for word in seen])
    colour = colour if legend else colour.legend(None)
    x, base = block_axis(labels=False), alt.Chart()
    layers = [
        base.mark_rule(strokeWidth=2, opacity=0.6).encode(x, alt.Y("low:Q", scale=scale), alt.Y2("high:Q"), colour),
        base.mark_point(shape="diamond", size=36, filled=False, color=DIM).encode(x, alt.Y("stream:Q", scale=scale)),
        base.mark_point(size=64, opacity=1).encode(x, y, colour),
        marks(x=x, y=y),
    ]
    return overlay(rows, height, *layers)


def draw_parameters(rows: Sequence[Row], height: int) -> alt.LayerChart:
    """A bar for what each block was, and one in it for what is left; attention's stand beside the FFN's."""
    after_ffn = f"after, {FFN}" if any(row["branch"] == ATTENTION for row in rows) else "after"
    after_attention = f"after, {ATTENTION}"
    names = {"before": dict.fromkeys((FFN, ATTENTION), "before"), "after": {FFN: after_ffn, ATTENTION: after_attention}}
    sized = [
        {"index": r["index"], "branch": r["branch"], "which": names[side][r["branch"]], "size": r[side]}
        | {"note": r["note"]}
        for side in names
        for r in rows
    ]
    colours = {"before": BEFORE, after_ffn: SERIES[0], after_attention: SERIES[1]}
    seen = [name for name in colours if any(row["which"] == name for row in sized)]
    y = alt.Y("size:Q", title="parameters", stack=None, axis=alt.Axis(format="~s", tickCount=4))
    colour = by_name("which", seen, [colours[name] for name in seen])
    bars = alt.Chart().mark_bar().encode(block_axis(), y, colour, *beside(rows), tooltip="note:N")
    return overlay(sized, height, bars)


INSIDE, OUTSIDE, UNASKED = "inside its budget", "OUTSIDE its budget", "no budget asked"
STATES = {INSIDE: SERIES[0], OUTSIDE: UNSAFE, UNASKED: SERIES[7]}


def budgets(record: Record) -> Chart | None:
    """Perplexity of each text and score of each task, with intervals, against what was allowed."""
    texts = [
        describe_text(name, result, result.max_dppl, result.passed) for name, result in record.text_results().items()
    ]
    divergences = [
        describe_divergence(name, result.fidelity) for name, result in record.text_results().items() if result.fidelity
    ]
    tasks = []
    for name, task in record.tasks.items():
        figures = f"{num(task.source)} → {num(task.compressed)}"
        ends: Row = {"value": task.drop, "low": task.drop_ci95[0], "high": task.drop_ci95[1], "budget": task.max_drop}
        note = f"{name} {task.metric}: {figures}\n{say_documents(task)}"
        tasks.append({"name": f"{name}, {task.metric}: {figures}", "state": state(task.passed), "note": note, **ends})
    seen = [word for word in STATES if any(row["state"] == word for row in (*texts, *divergences, *tasks))]
    panels = [
        draw_ranges(rows, axis, seen, ticks)
        for rows, axis, ticks in (
            (texts, "rise in perplexity", 6),
            (divergences, "KL from the source, nats per token", 3),  # their labels are long
            (tasks, "change of the score for the worse", 6),
        )
        if rows
    ]
    if not panels:
        return None
    tokens = sum(result.tokens for result in record.text_results().values())
    windows = " and ".join(sorted({num(result.seq_len) for result in record.text_results().values()}))
    caption = "Each mark is the change with its 95 % interval; the upright bar is the budget. "
    limited = any(result.max_dppl is not None for result in record.text_results().values())
    if record.budget and record.budget.confidence and limited:
        caption += f"The upper end at {percent(record.budget.confidence, 0)} confidence must be left of it. "
    caption += f"{count(tokens, 'predicted token')} in windows of {windows or 'unknown length'}."
    description = (
        "change of perplexity, divergence from the source and change of tasks with intervals, against the budgets"
    )
    drawing = alt.vconcat(*panels, spacing=18).resolve_scale(x="independent", y="independent", color="shared")
    return finish("budgets", "Measured against the budgets", caption, description, drawing)


def state(passed: bool | None) -> str:
    return UNASKED if passed is None else INSIDE if passed else OUTSIDE


def describe_text(name: str, change: PerplexityChange, limit: float | None, passed: bool | None) -> Row:
    figures = f"{num(change.baseline)} → {num(change.compressed)}"
    note = f"perplexity of {name}: {figures}\n{num(change.delta, '+')} ({interval(change.delta_ci95)})"
    note += f", {NO_LIMIT}" if limit is None else f", budget {num(limit, '+')}"
    ends: Row = {"value": change.delta, "low": change.delta_ci95[0], "high": change.delta_ci95[1], "budget": limit}
    return {"name": f"perplexity, {name}: {figures}", "state": state(passed), "note": note, **ends}


def describe_divergence(name: str, found: Fidelity) -> Row:
    note = f"{name}: {found}" + (f"\nbudget {format_nats(found.max_kl)}" if found.max_kl is not None else "")
    ends: Row = {"value": found.kl, "low": found.kl_ci95[0], "high": found.kl_ci95[1], "budget": found.max_kl}
    label = f"KL, {name}: {format_nats(found.kl)}; {format_share(found.top1_agreement)} % of top tokens agree"
    return {"name": label, "state": state(found.passed), "note": note, **ends}


def draw_ranges(rows: Sequence[Row], axis: str, seen: Sequence[str], ticks: int) -> alt.LayerChart:
    """A line for each row: its name above the mark, its interval and its budget."""
    placed = clean_rows(({"place": place, **row} for place, row in enumerate(rows)))
    values = [0.0, *(row[key] for row in placed for key in ("value", "low", "high", "budget") if row[key] is not None)]
    span = max(values) - min(values) or 1.0
    scale = alt.Scale(domain=[min(values), max(values) + 0.04 * span], nice=False)
    x = alt.X("value:Q", title=axis, scale=scale, axis=alt.Axis(tickCount=ticks))
    y = alt.Y("place:O", axis=None, scale=alt.Scale(padding=0))
    colour = by_name("state", seen, [STATES[word] for word in seen])
    base = alt.Chart()
    layers = [
        base.mark_tick(orient="vertical", thickness=1, height=24, color=DIM, yOffset=7).encode(y=y, x=alt.datum(0)),
        base.mark_text(align="left", baseline="top", dy=-20, limit=WIDTH).encode(y=y, x=alt.value(5), text="name:N"),
        base.mark_rule(strokeWidth=3, opacity=0.55, yOffset=7).encode(alt.X("low:Q"), y, alt.X2("high:Q"), colour),
        base.mark_tick(orient="vertical", thickness=4, height=20, color=INK, yOffset=7).encode(alt.X("budget:Q"), y),
        base.mark_point(size=80, opacity=1, yOffset=7).encode(x, y, colour),
        base.mark_bar(opacity=0).encode(y=y, x=alt.value(0), x2=alt.value("width"), tooltip="note:N"),
    ]
    return overlay(placed, 44 * len(placed), *layers)


def agreement(record: Record) -> Chart | None:
    """The planner's own calibration: each block's replacement alone, predicted against measured."""
    if not record.agreement:
        return None
    rows = []
    for prediction, name in record.agreement.named:
        cost = prediction.measured if prediction.kl is None else prediction.kl
        note = (
            f"block {name}, {prediction.replacement}\npredicted {num(prediction.predicted)}, loss "
            f"{num(prediction.measured, '+')} ± {num(prediction.standard_error)} nats per token"
        )
        if prediction.kl is not None:
            note += f", KL {num(prediction.kl)} ± {num(prediction.kl_standard_error)}"
        label = str(prediction.index) if len(record.agreement.named) <= FEW else ""
        kind = ATTENTION if name.endswith(ATTENTION) else BLOCKS
        rows.append({"x": prediction.predicted, "y": cost, "note": note, "label": label, "kind": kind})
    points = clean_rows(rows, "x", "y")
    if not points:
        return None
    ends = log_domain(row[key] for row in points for key in ("x", "y"))
    for row in points:
        row["out"] = min(row["x"], row["y"]) < ends[0]
        row |= {"x": max(row["x"], ends[0]), "y": max(row["y"], ends[0])}
    scale = fixed(ends, log=True)
    axis = log_axis(ends)
    x = alt.X("x:Q", title="predicted, nats per token", scale=scale, axis=axis)
    y = alt.Y("y:Q", title="measured, nats per token", scale=scale, axis=axis)
    by_kl = record.agreement.kl_rank_correlation is not None
    correlation = record.agreement.kl_rank_correlation if by_kl else record.agreement.rank_correlation
    caption = (
        f"One replacement in every block alone, on a few selection windows; measured is "
        f"{'the KL divergence from the source' if by_kl else 'the rise of the loss'}. Rank correlation "
        f"{num(correlation)}. The line is equality; both axes are logarithmic; a hollow mark is "
        f"beyond the end of an axis. {measured_on(record)}"
    )
    description = "measured against predicted cost, one dot per block"
    return finish(
        "agreement", "Predicted against measured", caption, description, draw_scatter(points, x, y, False, ends)
    )


def bands(name: str, title: str, loss_bands: Sequence[Band], record: Record) -> Chart | None:
    """Nats per token that each band lost: the perplexity of rare tokens is in the millions, and says nothing."""
    rows = []
    for place, band in enumerate(loss_bands):
        note = f"{band.band}: {num(band.nats, '+')} nats per token\n{count(band.tokens, 'token')}, "
        note += f"{percent(band.share)} of the rise"
        about: Row = {"kind": "lost" if band.nats > 0 else "gained", "note": note, "said": num(band.nats, "+")}
        rows.append({"place": place, "name": band.band, "nats": band.nats, **about})
    safe = clean_rows(rows, "nats")
    if not safe:
        return None
    x = alt.X("nats:Q", title="rise of the loss, nats per token", axis=alt.Axis(tickCount=5))
    y, base = alt.Y("place:O", axis=None), alt.Chart()
    colours = alt.Color("kind:N", scale=alt.Scale(domain=["lost", "gained"], range=[SERIES[0], SAFE]), legend=None)
    layers = [
        base.mark_bar(height=9, yOffset=8).encode(x, y, colours),
        base.mark_rule(color=DIM).encode(x=alt.datum(0)),
        base.mark_text(align="left", dy=-6, limit=WIDTH - 80).encode(y=y, x=alt.value(5), text="name:N"),
        base.mark_text(align="right", dy=-6).encode(y=y, x=alt.value("width"), text="said:N"),
        base.mark_bar(opacity=0).encode(y=y, x=alt.value(0), x2=alt.value("width"), tooltip="note:N"),
    ]
    windows = f" in windows of {num(record.perplexity.seq_len)}" if record.perplexity else ""
    tokens = count(sum(band.tokens for band in loss_bands), "token")
    caption = f"How much worse the next token is predicted, by kind; {tokens}{windows}."
    drawing = overlay(safe, 36 * len(safe), *layers)
    return finish(name, title, caption, "rise of the loss in nats per token, one bar per band", drawing)


def frequency(record: Record) -> Chart | None:
    return bands("frequency", "Loss by token frequency", record.where.frequency, record) if record.where else None


def position(record: Record) -> Chart | None:
    return bands("position", "Loss by position in the window", record.where.position, record) if record.where else None


def frontier(points: Sequence[FrontierPoint], name: str, model: str, seq_len: int) -> Chart:
    """Parameters and FLOPs removed against the rise in perplexity, for each budget or size; empty without a plan."""
    rows, names = [], ("parameters", "FLOPs per token")
    for point in points:
        if point.removed and point.texts:
            texts = point.texts.values()
            low, high = min(text.delta_ci95[0] for text in texts), max(text.delta_ci95[1] for text in texts)
            rise = max(text.delta for text in texts)
            label = f"{'at least' if point.remove else 'budget'} {point.asked}"
            note = f"{label}\n{num(rise, '+')} ({interval((low, high))})"
            row: Row = {"y": rise, "low": low, "high": high, "note": note}
            rows.append({"x": 100 * point.removed_fraction, "series": names[0], "label": label, **row})
            if point.flops_ratio:
                rows.append({"x": 100 * (1 - 1 / point.flops_ratio), "series": names[1], "label": "", **row})
    drawn = clean_rows(rows, "x", "y")
    scale = alt.Scale() if drawn else alt.Scale(domain=[0, 1])
    x, y = alt.X("x:Q", title="removed, %", scale=scale), alt.Y("y:Q", title="ΔPPL", scale=scale)
    colour, base = by_name("series", names), alt.Chart()
    dash = alt.StrokeDash("series:N", scale=alt.Scale(domain=names, range=[[1, 0], [6, 3]]), legend=None)
    layers = [
        base.mark_rule(opacity=0.5).encode(x, alt.Y("low:Q"), alt.Y2("high:Q"), colour),
        base.mark_line(strokeWidth=1.8).encode(x, y, colour, dash),
        base.mark_point(size=50, opacity=1).encode(x, y, colour),
        base.mark_text(align="left", dx=7, dy=8).encode(x, y, text="label:N"),
        marks(x=x, y=y),
    ]
    drawing = overlay(drawn, 280, *layers)
    which = "cheapest plan for each size" if any(point.remove for point in points) else "largest plan for each budget"
    caption = f"The {which}, with the 95 % interval of ΔPPL on windows of {count(seq_len, 'token')}."
    return finish(name, last_part(model), caption, "rise in perplexity against what was removed", drawing)


def draw_frontier(points: Sequence[FrontierPoint], out: Path, model: str, seq_len: int) -> list[str]:
    """The frontier of a plan, next to the plan's file. Returns the paths of the files."""
    return write(frontier(points, out.stem, model, seq_len), out.with_suffix(""))


def size_chart(record: SizeFrontier) -> Chart:
    """Size against perplexity of the source and the models made of it, each in several precisions, and their hull."""
    names = list(dict.fromkeys(file.model for file in sorted(record.files, key=lambda file: file.compressed)))
    rows = []
    for file in record.files:
        low, high = (file.change.baseline + end for end in file.change.delta_ci95)
        words = f"{format_bytes(file.bytes)}, perplexity {num(file.change.compressed)}"
        note = f"{file.name}\n{words}\nagainst source {record.reference}: {interval(file.change.delta_ci95)}"
        row: Row = {"x": file.bytes / 1e6, "y": file.change.compressed, "low": low, "high": high, "hull": file.on_hull}
        rows.append({**row, "series": file.model, "label": file.dtype, "note": note})
    drawn = clean_rows(rows, "x", "y")
    x = alt.X("x:Q", title="size, MB", scale=alt.Scale(zero=False))
    y = alt.Y("y:Q", title="perplexity", scale=alt.Scale(zero=False))
    colour, base = by_name("series", names), alt.Chart()
    layers = [
        base.mark_line(strokeWidth=1.2, color=DIM, strokeDash=[5, 3]).transform_filter("datum.hull").encode(x, y),
        base.mark_rule(opacity=0.5).encode(x, alt.Y("low:Q"), alt.Y2("high:Q"), colour),
        base.mark_point(size=50, opacity=1).encode(x, y, colour),
        base.mark_text(align="left", dx=7, dy=8).encode(x, y, text="label:N"),
        marks(x=x, y=y),
    ]
    split = record.text.verification
    caption = (
        f"GGUF files in llama.cpp, {count(split.tokens, 'token')}, windows of {record.text.seq_len}. Bars: the 95 % "
        f"interval of the change from the source as {record.reference}. Dashed: the lower hull of all files."
    )
    return finish(
        "sizes", last_part(record.source.model), caption, "perplexity against size", overlay(drawn, 320, *layers)
    )


PROFILE: tuple[Callable[[Record], Chart | None], ...] = (
    *(blocks, budgets, depth, swap, regimes, ladder, corpora, residual, trained, cross),
    *(agreement, frequency, position),
)


def charts_of(record: Record | ProfileSet) -> list[Chart]:
    """Every chart of a record; those of several models are description apart by their names."""
    profiles = profiles_of(record)
    charts = [models(record)] if isinstance(record, ProfileSet) else []
    for place, profile in enumerate(profiles, start=1):
        for build in PROFILE:
            chart = build(profile)
            several = chart and len(profiles) > 1
            charts.append(replace(chart, name=f"{place}-{chart.name}") if chart and several else chart)
    return [chart for chart in charts if chart is not None]
