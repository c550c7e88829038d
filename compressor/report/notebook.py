"""A result in a Python session: a few plain lines, and for notebooks the same lines with the report's first picture."""

from __future__ import annotations

import base64

from markupsafe import escape

from compressor.report.chart_style import draw_svg
from compressor.report.charts import charts_of
from compressor.report.formats import last_part
from compressor.report.page import headline
from compressor.report.record import Record
from compressor.report.tables import parameters_line, perplexity_line
from compressor.runtime.errors import visible


def result_lines(record: Record, place: str) -> list[str]:
    """What was reached, in a few lines; `place` says where it is."""
    found = headline(record)
    verdict = "every promise holds" if found.good else "A PROMISE IS BROKEN"
    figures = [perplexity_line(record.perplexity)] if record.perplexity else []
    sizes = [] if record.parameters.removed is None else [parameters_line(record.parameters, record.budget)]
    lines = [f"{last_part(record.source.model)}, compressed: {verdict}", *found.sentences, *figures, *sizes, place]
    return [visible(line).replace("\n", " ") for line in lines]


def result_html(record: Record, place: str) -> str:
    """The same lines, and the report's first picture as an image inside the page: nothing is fetched."""
    first, *rest = result_lines(record, place)
    lines = "".join(f"<br>{escape(line)}" for line in rest)
    pictures = "".join(
        f'<img style="max-width:100%" alt="{escape(chart.alt)}" '
        f'src="data:image/svg+xml;base64,{base64.b64encode(draw_svg(chart).encode("utf-8")).decode("ascii")}">'
        for chart in charts_of(record)[:1]
    )
    return f"<div><p><strong>{escape(first)}</strong>{lines}</p>{pictures}</div>"
