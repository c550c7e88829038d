"""The linearity report's sections of a page. Each returns `NOTHING` when the record lacks what it shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from compressor.report import charting
from compressor.report.charts import Chart
from compressor.report.markup import (
    NOTHING,
    Html,
    Record,
    e,
    join,
    last_part,
    num,
    percent,
    records,
    some,
    table,
    titled,
)
from compressor.report.plots import plot
from compressor.report.record import flat, profiles_of
from compressor.report.summary import answer, finding_lines
from compressor.report.summary import listed as block_numbers


def title(report: Record) -> str:
    names = [last_part((p.get("source") or {}).get("model")) for p in profiles_of(report)]
    return f"How linear is {names[0]}?" if len(names) == 1 else f"How linear are {', '.join(names)}?"


def opening(report: Record) -> Html:
    """The answer first: how much can go at which cost, which blocks, which not to touch."""
    lead = []
    for profile in profiles_of(report):
        name = e("h3", last_part(profile["source"]["model"])) if "profiles" in report else NOTHING
        lead += [name, e("div", *(e("p", sentence) for sentence in answer(profile)), class_="answer")]
    return e("header", e("h1", title(report)), *lead, NOTHING if "profiles" in report else findings(report))


def findings(report: Record) -> Html:
    return some("ul", *(e("li", told) for told in finding_lines(report)), class_="findings")


def drawn(chart: Chart | None, title: str = "") -> Html:
    """The chart under a title of its own, or none where its section has one."""
    return plot(replace(chart, title=title)) if chart else NOTHING


def in_table(report: Record, kind: str, *parts: str) -> Html:
    """The numbers behind a chart: all blocks that have these parts, unfolded on demand."""
    rows = [row(b) for b in report.get("blocks") or [] if all(part in b for part in parts)]
    return titled("details", "Table", table(kind, kind, rows))


def row(block: Record) -> Record:
    return {
        **flat(block),
        **{key: block.get(key) for key in ("index", "r2_lin_ci95", "verdict", "reason")},
        "whole": block,
    }


def depth(report: Record) -> Html:
    blocks = [row(b) for b in report.get("blocks") or [] if "r2_median" in b]
    offers = records((report.get("swap") or {}).get("together"))
    told = [{**o, "names": block_numbers(o["blocks"])} for o in offers]
    together = titled("div", "The cheapest blocks together, as linear maps", table("Together", "together", told))
    figures = titled("details", "Table", table("Linearity", "linearity", blocks))
    return titled(
        "section",
        "Linearity over depth",
        drawn(charting.depth(report)),
        drawn(charting.swap(report), "What it costs to replace a block"),
        together,
        figures,
    )


def regimes(report: Record) -> Html:
    unsafe = [b for b in report.get("blocks") or [] if b.get("verdict") == "unsafe" and b.get("top_rows")]
    return titled("section", "Two regimes", drawn(charting.regimes(report)), *map(outliers, unsafe))


def outliers(block: Record) -> Html:
    """The rows that carry an outlier block's variance: token, place, and the text around it."""
    rows = [{**r, "token": repr(r.get("token")), "around": around(r)} for r in block["top_rows"]]
    place = (
        f"position {num(block.get('top_position'))} of the windows carries {percent(block.get('top_position_share'))}"
    )
    said = e("p", f"{place} of the held-out variance of block {block['index']}; its largest rows:")
    return titled("div", f"Block {block['index']}: outlier rows", said, table("Outlier rows", "rows", rows))


def around(found: Record) -> Html:
    before, after = (" ".join(str(found.get(side) or "").split()) for side in ("before", "after"))
    return e("div", before[-80:], e("mark", repr(found.get("token"))[1:-1]), after[:80], class_="text")


def verdicts(report: Record) -> Html:
    rows = [row(b) for b in report.get("blocks") or [] if "verdict" in b and "rank_99" in b]
    said = "Unsafe blocks must not be touched, whatever their R²_lin. Safe: its linear map alone costs little. "
    said += "Costly: the rest."
    return titled("section", "Verdicts", e("p", said), table("Verdicts", "verdicts", rows)) if rows else NOTHING


def charted(title: str, chart: Callable[[Record], Chart | None], kind: str, *parts: str) -> Callable[[Record], Html]:
    """A section that is one chart and its numbers."""

    def section(report: Record) -> Html:
        figure = chart(report)
        return titled("section", title, drawn(figure), in_table(report, kind, *parts)) if figure else NOTHING

    return section


def corpora(report: Record) -> Html:
    figure = charting.corpora(report)
    agreed = table("Agreement of corpora", "agreed", report.get("corpus_agreement"))
    return titled("section", "Corpora", drawn(figure), agreed) if figure else NOTHING


ladder = charted("The rank ladder", charting.ladder, "ladder", "ladder")
residual = charted("What the residual is not", charting.residual, "bilinear", "bilinear")
trained = charted("The pitfall", charting.trained, "trained", "trained")
crossed = charted("Learned, not architectural?", charting.crossed, "cross", "cross")
SECTIONS = (depth, regimes, ladder, corpora, residual, trained, crossed)


def compared(report: Record) -> Html:
    """Several models: one chart, one line each."""
    rows = [
        {
            **p["shape"],
            "name": last_part(p["source"]["model"]),
            "blocks": len(p["blocks"]),
            "parameters": p["parameters"]["before"],
        }
        for p in profiles_of(report)
    ]
    figure = charting.models(report)
    return (
        titled("section", "Models side by side", drawn(figure), table("Models", "models", rows)) if figure else NOTHING
    )


def each(report: Record, provenance: Callable[[Record], Html]) -> Html:
    """Everything of every model, one under another."""
    parts = []
    for profile in profiles_of(report):
        name = last_part(profile["source"]["model"])
        body = (section(profile) for section in (*SECTIONS, verdicts, provenance))
        parts.append(e("article", e("h2", name, class_="model"), findings(profile), *body))
    return join(*parts)
