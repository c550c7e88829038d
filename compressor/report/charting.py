"""The charts of a record. Each is a function of it that returns None when the record lacks what it shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from compressor.report.charts import Axis, Chart, Point, Series
from compressor.report.markup import interval, is_number, last_part, num
from compressor.report.record import profiles_of

Record = Mapping[str, Any]
Blocks = Sequence[Record]
R2 = "R² on held-out rows"


def where(report: Record) -> str:
    """What the numbers of a chart were measured on."""
    rows, text = report.get("rows") or {}, report.get("text") or {}
    name, fitted, held = last_part((report.get("source") or {}).get("model")), rows.get("fitted"), rows.get("held_out")
    return f"{name}: {num(fitted)} rows fitted, {num(held)} held out, windows of {num(text.get('seq_len'))} tokens."


def has(blocks: Blocks, *keys: str) -> Blocks:
    """The blocks that have all of these, as numbers or as parts."""
    return [b for b in blocks if all(is_number(b.get(key)) or isinstance(b.get(key), Mapping) for key in keys)]


def line(name: str, blocks: Blocks, value: Callable[[Record], float], **more: Any) -> Series:
    """A value of every block over depth."""
    points = tuple(
        Point(b["index"], value(b), block=b["index"], note=f"block {b['index']}: {name} {num(value(b))}")
        for b in blocks
    )
    return Series(name, points, **more)


def depth(report: Record) -> Chart | None:
    blocks = has(report.get("blocks") or [], "r2_lin", "r2_stream")
    if not blocks:
        return None
    banded = []
    for b in blocks:
        low, high = b.get("r2_lin_ci95") or (b["r2_lin"], b["r2_lin"])
        note = f"block {b['index']}: R²_lin {num(b['r2_lin'])} ({num(low)} … {num(high)}), stream {num(b['r2_stream'])}"
        banded.append(Point(b["index"], b["r2_lin"], low, high, note=note, block=b["index"]))
    series = (
        Series("R²_lin, 95 % interval", tuple(banded)),
        line("stream-weighted", blocks, key("r2_stream"), dashed=True),
    )
    caption = (
        "How much of every block's output its least-squares linear map explains, and the same with rows counted as the "
        f"next norm sees them. Where the two part, a few rows carry the variance. {where(report)}"
    )
    return Chart("depth", "Linearity over depth", Axis("block", whole=True), Axis(R2), series, caption)


def key(name: str) -> Callable[[Record], float]:
    return lambda block: float(block[name])


def swap(report: Record) -> Chart | None:
    blocks, found = has(report.get("blocks") or [], "swap"), report.get("swap") or {}
    if not blocks or not found:
        return None

    def bars(name: str, some: Blocks, alarm: bool) -> Series:
        points = []
        for b in some:
            s = b["swap"]
            low, high = s["delta_ci95"]
            note = f"block {b['index']}: {num(s['baseline'])} → {num(s['compressed'])}, {num(s['delta'], '+')} "
            points.append(
                Point(
                    b["index"],
                    s["delta"],
                    low,
                    high,
                    block=b["index"],
                    note=note + f"({interval(s['delta_ci95'])})",
                )
            )
        return Series(name, tuple(points), "bars", alarm=alarm)

    unsafe = [b for b in blocks if b.get("verdict") == "unsafe"]
    series = [bars("ΔPPL, 95 % interval", [b for b in blocks if b not in unsafe], False)]
    series += [bars("unsafe", unsafe, True)] if unsafe else []
    caption = (
        f"The rise in perplexity (from {num(found['baseline'])}) when this block alone becomes its linear map. "
        f"{num(found['tokens'])} tokens in windows of {num(found['seq_len'])}; logarithmic."
    )
    y = Axis("ΔPPL of this block alone", log=True)
    return Chart("swap", "What it costs to replace a block", Axis("block", whole=True), y, tuple(series), caption)


def regimes(report: Record) -> Chart | None:
    blocks = has(report.get("blocks") or [], "r2_lin", "r2_median", "effective_rank")
    if not blocks:
        return None

    def dots(name: str, some: Blocks, alarm: bool) -> Series:
        points = []
        for b in some:
            note = (
                f"block {b['index']}: R²_lin {num(b['r2_lin'])}, median feature {num(b['r2_median'])}, effective rank "
            )
            note += num(b["effective_rank"], form=".1f")
            label = f"{b['index']}" if alarm else ""
            points.append(
                Point(b["r2_lin"], b["r2_median"], size=b["effective_rank"], label=label, note=note, block=b["index"])
            )
        return Series(name, tuple(points), "dots", alarm=alarm)

    unsafe = [b for b in blocks if b.get("verdict") == "unsafe"]
    series = [dots("blocks", [b for b in blocks if b not in unsafe], False)]
    series += [dots("outlier blocks", unsafe, True)] if unsafe else []
    caption = (
        "On the line, every output feature is as linear as the whole; far beneath it, the whole looks linear because "
        f"a few rows do. The area is the effective rank of the output. {where(report)}"
    )
    x, y = Axis("R²_lin, all features together"), Axis("R² of the median feature")
    return Chart("regimes", "Two regimes", x, y, tuple(series), caption, diagonal=True)


def ladder(report: Record) -> Chart | None:
    blocks = has(report.get("blocks") or [], "ladder")
    if not blocks:
        return None
    series = []
    for place, b in enumerate(blocks):
        steps = b["ladder"]
        points = tuple(
            Point(rank, r2, block=b["index"], note=f"block {b['index']}, rank {rank}: R² {num(r2)}")
            for rank, r2 in zip(steps["ranks"], steps["r2"], strict=True)
            if rank
        )
        series.append(Series(f"block {b['index']}", points, shade=place / max(1, len(blocks) - 1)))
    reached = [
        Point(max(1, b["rank_99"]), 0.99 * b["r2_lin"], block=b["index"], note=enough(b))
        for b in blocks
        if is_number(b.get("rank_99"))
    ]
    series.append(Series("99 % of R²_lin", tuple(reached), "dots"))
    caption = (
        "R² of the best map of each rank (reduced-rank regression); the dots mark the rank that reaches 99 % of "
        f"the full map's. {where(report)}"
    )
    ends = (f"block {blocks[0]['index']}", f"block {blocks[-1]['index']}")
    x = Axis("rank", log=True)
    return Chart("ladder", "The rank ladder", x, Axis(R2), tuple(series), caption, shades=ends)


def enough(block: Record) -> str:
    said = f"block {block['index']}: rank {num(block['rank_99'])} reaches 99 % of R²_lin"
    return f"{said} with {num(block['rank_99_params'])} of {num(block['params_before'])} parameters"


def corpora(report: Record) -> Chart | None:
    found = report.get("corpora") or []
    if not found:
        return None
    series = tuple(line(c["name"], c["blocks"], key("r2_lin"), dashed=k > 0) for k, c in enumerate(found))
    pairs = [
        f"{p['first']} and {p['second']} {num(p['rank_correlation'], form='.2f')}"
        for p in report.get("corpus_agreement") or []
    ]
    caption = f"R²_lin of every block by corpus. Rank correlation: {', '.join(pairs)}. {where(report)}"
    return Chart("corpora", "The same blocks on other text", Axis("block", whole=True), Axis(R2), series, caption)


def residual(report: Record) -> Chart | None:
    blocks, probe = has(report.get("blocks") or [], "bilinear"), (report.get("probes") or {}).get("bilinear")
    if not blocks or not probe:
        return None
    points = []
    for b in blocks:
        found = b["bilinear"]
        note = (
            f"block {b['index']}: R² {num(found['r2_lin'])} → {num(found['r2_poly'])}, gain {num(found['gain'], '+')}"
        )
        points.append(Point(1 - found["r2_lin"], found["gain"], label=str(b["index"]), note=note, block=b["index"]))
    caption = (
        f"What {probe['rank']} products (u·x)(v·x) explain beside the linear map. Pearson correlation with 1 − R²_lin: "
        f"{num(probe['pearson'], form='.2f')}. Converged when {probe['criterion']}. {where(report)}"
    )
    series = (Series("blocks", tuple(points), "dots"),)
    x, y = Axis("1 − R²_lin: what the linear map leaves"), Axis("gain of the bilinear probe in R²")
    return Chart("residual", "What the residual is not", x, y, series, caption)


def trained(report: Record) -> Chart | None:
    blocks, probe = has(report.get("blocks") or [], "trained"), (report.get("probes") or {}).get("trained")
    if not blocks or not probe:
        return None
    series = (
        line("closed form", blocks, lambda b: float(b["trained"]["r2_lin"])),
        line(
            f"{probe['optimiser']}, {num(probe['steps'])} steps",
            blocks,
            lambda b: float(b["trained"]["r2"]),
            dashed=True,
        ),
    )
    caption = (
        f"The same linear map by {probe['optimiser']} ({num(probe['steps'])} steps of {num(probe['batch'])} rows, "
        f"learning rate {probe['learning_rate']:g}, from zero) stays below the exact solution by "
        f"{num(probe['mean_gap'])} on average: a trained baseline understates linearity. {where(report)}"
    )
    return Chart("trained", "The pitfall of training it", Axis("block", whole=True), Axis(R2), series, caption)


CROSSED = {
    "own": "own block, own inputs",
    "own_on_other": "own block, the other's inputs",
    "own_on_white": "own block, own inputs whitened",
    "other": "other block, its own inputs",
    "other_on_own": "other block, this model's inputs",
    "other_on_white": "other block, this model's inputs whitened",
}


def crossed(report: Record) -> Chart | None:
    blocks, found = has(report.get("blocks") or [], "cross"), report.get("cross") or {}
    if not blocks:
        return None
    series = tuple(
        line(name, blocks, lambda b, part=part: float(b["cross"][part]), dashed=part.startswith("other"))  # type: ignore[misc]
        for part, name in CROSSED.items()
    )
    other = last_part((found.get("source") or {}).get("model"))
    caption = (
        f"R²_lin of this model's blocks and of {other}'s, each on its own inputs, on the other's, and on inputs "
        f"whitened to unit covariance: what follows the block is in its "
        f"weights, what follows the inputs is not. {where(report)}"
    )
    return Chart("cross", "Learned, not architectural?", Axis("block", whole=True), Axis(R2), series, caption)


def models(report: Record) -> Chart | None:
    profiles = report.get("profiles") or []
    if len(profiles) < 2:
        return None
    series = []
    for place, profile in enumerate(profiles):
        name = last_part(profile["source"]["model"])
        last = max(1, len(profile["blocks"]) - 1)
        points = tuple(
            Point(k / last, b["r2_lin"], note=f"{name}, block {b['index']}: R²_lin {num(b['r2_lin'])}")
            for k, b in enumerate(profile["blocks"])
        )
        series.append(Series(name, points, dashed=place > 0))
    caption = " ".join(map(where, profiles))
    x = Axis("relative depth", limits=(0.0, 1.0))
    return Chart("models", "Models side by side", x, Axis(R2), tuple(series), caption)


CHARTS = (depth, swap, regimes, ladder, corpora, residual, trained, crossed)


def charts_of(report: Record) -> list[Chart]:
    """Every chart of a record; those of several models are told apart by their names."""
    profiles = profiles_of(report)
    found = [models(report)]
    for place, profile in enumerate(profiles):
        prefix = f"{place + 1}-" if len(profiles) > 1 else ""
        found += [named(chart(profile), prefix) for chart in CHARTS]
    return [chart for chart in found if chart is not None]


def named(chart: Chart | None, prefix: str) -> Chart | None:
    return replace(chart, name=prefix + chart.name) if chart else None
