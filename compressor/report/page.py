"""A record, of an assessment or of a profile, as one HTML page (report.html): no request, no other file, one script.

A section is a function of the record that returns `NOTHING` when the record lacks what it shows: `ASSESSMENT`,
`PROFILE` and `SEVERAL` say which stand on which page.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from compressor.report import plots, sections
from compressor.report.charts import Axis, Chart, Point, Series
from compressor.report.markup import (
    NOTHING,
    Html,
    Record,
    change,
    e,
    failed,
    interval,
    is_number,
    join,
    last_part,
    listed,
    num,
    percent,
    records,
    some,
    table,
    titled,
)
from compressor.report.plots import SCRIPT, plot


def cost(report: Record) -> tuple[str, bool]:
    """What it costs in perplexity, in words, and whether that was allowed; by every text, if there are several."""
    perplexity, limit = report.get("perplexity") or {}, (report.get("budget") or {}).get("max_dppl")
    delta, texts = perplexity.get("delta"), records(report.get("texts"))
    if not is_number(delta):
        return ("", True) if delta is None else ("; perplexity is not a number", False)
    said = f"; perplexity {'falls' if delta < 0 else 'rises'} by {num(abs(delta))} (95 % interval "
    said += interval(perplexity.get("delta_ci95")) + ")"
    if len(texts) > 1:
        outside = ", ".join(str(text["name"]) for text in texts if failed(text))
        return f"{said}, {f'OUTSIDE the budget of {outside}' if outside else 'inside each budget'}", not outside
    inside = limit is None or (is_number(upper := perplexity.get("delta_upper", delta)) and upper <= limit)
    end = "" if limit is None else f", {'inside' if inside else 'OUTSIDE'} the budget of {num(limit, '+')}"
    return said + end, inside


def headline(report: Record) -> Html:
    """The answer first: how much is gone, what it costs, whether that was allowed, and which checks failed."""
    gone = (report.get("parameters") or {}).get("removed_fraction")
    said = "No measurement is recorded" if gone is None else f"{percent(gone, 2)} of the parameters are gone"
    loss, good = cost(report)
    wrong = [str(check.get("name")) for check in report.get("checks") or [] if failed(check)]
    if wrong or failed(report):
        good, loss = False, f"{loss}. Checks failed: {', '.join(wrong) or 'the record does not say which'}"
    lead = e("p", said, loss, ".", class_="answer" if good and loss else "answer no")
    name = last_part((report.get("source") or {}).get("model"))
    return e("header", e("h1", name, ", compressed"), lead, warned(report.get("warnings")))


def warned(warnings: Any) -> Html:
    return some("ul", *(e("li", e("b", "Warning: "), warning) for warning in warnings or []), class_="warnings")


def talk(report: Record) -> Html:
    found = report.get("generation") or {}
    pairs = {f"distinct-{n}": pair for n, pair in (found.get("distinct") or {}).items()}
    pairs["repetition"] = found.get("repetition")
    samples = [sample(pair) for pair in found.get("samples") or []]
    said = (
        f"{num(found.get('prompts'))} prompts of {num(found.get('prompt_tokens'))} tokens, each continued by "
        f"{num(found.get('tokens'))}. Agreement: given the source’s words so far, it picks the same next token in "
        f"{percent(found.get('agreement'))} of places. Same prefix: the two part after "
        f"{num(found.get('same_prefix'), form='.1f')} tokens on average."
    )
    more = titled("details", f"{len(samples) - 3} more continuations", *samples[3:])
    told = titled("div", "Continuations side by side", *samples[:3], more)
    figures = warned(found.get("warnings")), table("Variety and repetition", "talk", pairs)
    return titled("section", "Does it still talk?", e("p", said), *figures, told) if found else NOTHING


def sample(pair: Record) -> Html:
    """A prompt and both continuations: what they begin with in common dimmed, the rest marked."""
    sides = {name: str(pair.get(name) or "") for name in ("source", "compressed")}
    same = len(list(takewhile(lambda letters: letters[0] == letters[1], zip(*sides.values(), strict=False))))
    first, sets = pair.get("first_difference"), []
    for name, text in sides.items():
        parts = some("span", text[:same].lstrip(" "), class_="dim"), some("mark", text[same:])
        sets.append(e("div", e("h4", name), e("p", *parts, class_="text")))
    differ = "no difference" if first is None else f"they part after {num(first)} tokens"
    note = e("p", f"agreement {percent(pair.get('agreement'), 0)}, {differ}", class_="note")
    return e("article", e("p", pair.get("prompt"), class_="text prompt"), e("div", *sets, class_="pair"), note)


def hurts(report: Record) -> Html:
    found = report.get("where") or {}
    kinds = {"frequency": "Δ perplexity by token frequency", "position": "Δ perplexity by position in the window"}
    charts = [titled("div", title, bands(title, found[key])) for key, title in kinds.items() if found.get(key)]
    windows = [window(place, entry) for place, entry in enumerate(found.get("windows") or [], start=1)]
    worst = titled("div", "The windows that lost most", *windows)
    return titled("section", "Where it hurts", some("div", *charts, class_="charts"), worst)


def bands(title: str, found: Sequence[Record]) -> Html:
    """Horizontal bars, their table beneath. Places are percentages and letters keep their size at every width.

    Bars are nats per token: the perplexity of rare tokens is in the millions, and would leave no bar to the others.
    """
    sizes = [d if is_number(d := band.get("nats")) and math.isfinite(d) else 0.0 for band in found]
    low, height = min(0.0, *sizes), 42 * len(found)
    unit = 100 / ((max(0.0, *sizes) - low) or 1.0)
    told = "; ".join(f"{band.get('band')} {num(band.get('delta'), '+')}" for band in found)
    shapes = [e("title", f"{title}: {told}")]
    for y, band, size in zip(range(0, height, 42), found, sizes, strict=True):
        left, wide, zero = (f"{share * unit:.2f}%" for share in (min(0.0, size) - low, abs(size), -low))
        shapes.append(e("text", str(band.get("band"))[:40], x="0", y=y + 14))
        shapes.append(e("text", num(band.get("delta"), "+"), x="100%", y=y + 14, text_anchor="end"))
        shapes.append(e("rect", x=left, width=wide, y=y + 20, height="12", class_="down" if size < 0 else None))
        shapes.append(e("line", x1=zero, x2=zero, y1=y + 20, y2=y + 32))
    drawn = e("svg", *shapes, width="100%", height=height, role="img")
    return join(drawn, titled("details", "Table", table(title, "bands", found)))


def window(place: int, found: Record) -> Html:
    losses = f"perplexity {change(found, 'baseline', 'compressed')}, {num(found.get('nats'), '+', '.2f')} nats"
    name = e("b", f"{place}. {found.get('text_name')}, window {num(found.get('window'))}")
    worst = found.get("worst") or []
    tokens = [e("li", e("code", repr(w.get("token"))), " ", num(w.get("nats"), "+", ".2f")) for w in worst]
    text, summary = e("p", found.get("excerpt"), class_="text"), join(name, " ", e("span", losses, class_="dim"))
    label = e("li", "Tokens that lost most, in nats:", class_="dim")
    hardest = e("ul", label, *tokens, class_="tokens") if tokens else NOTHING
    return titled("details", summary, text, hardest, open="" if place == 1 else None)


def agreement(report: Record) -> Html:
    """The planner's own calibration plot: every block's replacement alone, predicted against measured nats."""
    found = report.get("agreement") or {}
    title = "Predicted against measured"
    points = [p for p in found.get("blocks") or [] if all(is_number(p.get(k)) for k in ("predicted", "measured"))]
    if not points:
        return NOTHING
    most = max(max(p["predicted"], p["measured"]) for p in points)
    least = max(1e-3 * most, min(min(p["predicted"], p["measured"]) for p in points))
    ends = (least / 1.4, most * 1.4) if least > 0 else None
    x, y = (Axis(f"{which}, nats per token", log=True, limits=ends) for which in ("predicted", "measured"))
    dots = Series("blocks", tuple(map(calibration, points)), kind="dots")
    said = f"Rank correlation {num(found.get('rank_correlation'))}. The line is equality; both axes are logarithmic; "
    said += "a hollow mark is beyond the end of an axis."
    name = "One replacement in every block alone"
    chart = Chart("agreement", name, x, y, (dots,), caption=said, diagonal=True)
    return titled("section", title, plot(chart), titled("details", "Table", table(title, "agreement", points)))


def calibration(entry: Record) -> Point:
    """One block of the calibration plot."""
    index, error = entry.get("index"), entry.get("standard_error")
    said = f"block {index}, {entry.get('replacement')}: predicted {num(entry['predicted'])}, measured "
    said += num(entry["measured"], "+") + (f" ± {num(error)}" if is_number(error) else "")
    block = index if isinstance(index, int) else None
    return Point(entry["predicted"], entry["measured"], label=str(index), note=said, block=block)


def speed(report: Record) -> Html:
    found = report.get("speed") or {}
    if not found:
        return NOTHING
    kinds = {
        "FLOPs per token": "flops",
        "prefill, tokens per second": "prefill",
        "decoding, tokens per second": "decode",
    }
    rows = {
        name: {
            "source": found.get(f"{k}_before"),
            "compressed": found.get(f"{k}_after"),
            "ratio": found.get(f"{k}_ratio"),
        }
        for name, k in kinds.items()
    }
    said = f"Measured in turns in one run; windows of {num(found.get('seq_len'))} tokens."
    return titled("section", "Speed", table("Speed", "speed", rows), e("p", said, class_="note"))


def provenance(report: Record) -> Html:
    tool, source, text, parameters = (report.get(key) or {} for key in ("tool", "source", "text", "parameters"))
    facts = {str(tool.get("name") or "compressor"): tool.get("version"), **(report.get("environment") or {})}
    facts |= {key.replace("_", " "): value for key, value in source.items() if key != "model"}
    facts |= {"parameters": change(parameters, "before", "after"), "window length": text.get("seq_len")}
    facts |= {"seed": (report.get("recipe") or {}).get("seed")}
    splits = {name: split for name, split in text.items() if isinstance(split, Mapping)}
    times = titled("div", "Time of each stage, in seconds", table("Timings", "facts", report.get("timings")))
    return titled("section", "Provenance", table("Versions", "facts", facts), table("Texts", "splits", splits), times)


TITLES = {"checks": "Checks", "texts": "Perplexity", "tasks": "Tasks", "blocks": "Blocks"}
checks, texts, tasks, blocks = (listed(title, key) for key, title in TITLES.items())
Layout = tuple[Callable[[Record], Html], ...]
ASSESSMENT: Layout = (headline, checks, texts, tasks, speed, talk, hurts, blocks)
ASSESSMENT += (*sections.SECTIONS, agreement, provenance)
PROFILE: Layout = (sections.opening, *sections.SECTIONS, sections.verdicts, provenance)
SEVERAL: Layout = (sections.opening, sections.compared, lambda report: sections.each(report, provenance))
HASH = base64.b64encode(hashlib.sha256(SCRIPT.encode("utf-8")).digest()).decode("ascii")
POLICY = f"default-src 'none'; script-src 'sha256-{HASH}'; style-src 'unsafe-inline'; img-src data:; "
POLICY += "base-uri 'none'; form-action 'none'"
CSS = """
:root{color-scheme:light dark;--bg:#fff;--soft:#f4f5f7;--ink:#1b1d21;--dim:#5a616c;--line:#dde0e5;--good:#17693a;
--bad:#b3231b;--hit:#fdefee;--bar:#39699f;--mark:#fbe7a9;--warn:#9a6700}
@media(prefers-color-scheme:dark){:root{--bg:#14161a;--soft:#1d2025;--ink:#e4e6ea;--dim:#9ca4b0;--line:#31353c;
--good:#74cf98;--bad:#ff8d83;--hit:#34201f;--bar:#6d9fd6;--mark:#54430f;--warn:#dcaa3f}}
body{margin:0;background:var(--bg);color:var(--ink);font:16px/1.55 system-ui,sans-serif;overflow-wrap:anywhere}
main{font-variant-numeric:tabular-nums;max-width:62rem;margin:auto;padding:2.5rem 1.25rem 4rem}h1,h2,h3{line-height:1.2}
h1{font-size:1.75rem;margin:0 0 1rem}h2{font-size:1.25rem;margin:3rem 0 .7rem}h3{font-size:1rem;margin:1.7rem 0 .5rem}
h4{font-size:.8rem;margin:.6rem 0 0;color:var(--dim)}p{margin:.5rem 0;max-width:46rem}.no{--good:var(--bad)}
.answer{font-size:1.2rem;line-height:1.45;padding-left:1rem;border-left:4px solid var(--good)}.good{color:var(--good)}
.bad{color:var(--bad)}.dim,.note{color:var(--dim)}.note{font-size:.85rem;font-weight:400}ul{padding:0;list-style:none}
ul.warnings{margin:1rem 0;padding:.6rem 1rem;background:var(--soft);border-left:4px solid var(--warn)}
.scroll{overflow-x:auto;margin:.75rem 0}table{border-collapse:collapse;font-size:.9rem;min-width:min(100%,34rem)}
th,td{padding:.4rem 1.1rem .4rem 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--line);
white-space:nowrap;overflow-wrap:normal}table .n{text-align:right}thead th{vertical-align:bottom;white-space:normal}
table .note,table .text{white-space:normal;min-width:14rem;max-width:32rem}th{font-weight:500}
thead{color:var(--dim);font-size:.8rem}
.hit>*{background:var(--hit)}.hit th{box-shadow:inset 3px 0 var(--bad);padding-left:.7rem}.prompt{font-weight:500}
code{font:.88em ui-monospace,monospace;unicode-bidi:isolate}summary{cursor:pointer;padding:.35rem 0}
details+details,article+article{border-top:1px solid var(--line)}article{padding:.75rem 0}.text{white-space:pre-wrap}
mark{background:var(--mark);color:inherit}svg{display:block;font-size:13px}text{fill:var(--ink)}rect,circle{fill:var(--bar)}
.down{fill:var(--good)}line{stroke:var(--dim)}.tokens{display:flex;flex-wrap:wrap;gap:.4rem 1rem}p{text-wrap:pretty}
.pair,.charts{display:grid;grid-template-columns:1fr 1fr;gap:0 2.5rem}.pair>*,.charts>*{min-width:0}
@media(max-width:44rem){main{padding:1.5rem 1rem}th,td{padding-right:.7rem}.pair,.charts{display:block}}
"""


def page(report: Record) -> str:
    """The whole document; a key that is missing leaves out its section."""
    layout, name = ASSESSMENT, f"{last_part((report.get('source') or {}).get('model'))}, compressed"
    if "profiles" in report:
        layout, name = SEVERAL, sections.title(report)
    elif "shape" in report and "perplexity" not in report:
        layout, name = PROFILE, sections.title(report)
    meta = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    meta += f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><link rel="icon" href="data:,">'
    head = e("head", Html(meta), e("title", name), e("style", Html(CSS + plots.CSS)))
    main = e("main", *(build(report) for build in layout))
    return f"<!DOCTYPE html>\n{e('html', head, e('body', main, e('script', Html(SCRIPT))), lang='en')}\n"
