"""HTML from values: everything is built with `e`, which escapes whatever it is given except `Html`, its own output."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from compressor.report.tables import name_replacement
from compressor.runtime.errors import visible

Record = Mapping[str, Any]
MISSING = "–"


class Html(str):
    """Text that is HTML already."""


def put(value: Any) -> str:
    """Anything as HTML: `Html` as it is; all else escaped, and always possible to write as UTF-8."""
    if isinstance(value, Html):
        return value
    return html.escape(visible(MISSING if value is None else str(value)))


def join(*parts: Any) -> Html:
    return Html("".join(map(put, parts)))


def e(tag: str, *children: Any, **attributes: Any) -> Html:
    """An element. `class_` is `class`, `text_anchor` is `text-anchor`; an attribute that is None is left out."""
    given = ((name.rstrip("_").replace("_", "-"), value) for name, value in attributes.items() if value is not None)
    opened = "".join(f' {name}="{put(value)}"' for name, value in given)
    return Html(f"<{tag}{opened}>{join(*children)}</{tag}>")


def some(tag: str, *children: Any, **attributes: Any) -> Html:
    """An element, or nothing when there is nothing to put in it."""
    return e(tag, *children, **attributes) if any(children) else NOTHING


def titled(tag: str, title: Any, *body: Any, **attributes: Any) -> Html:
    """An element under a heading, or nothing when there is nothing under it."""
    heading = {"section": "h2", "div": "h3", "details": "summary"}[tag]
    return e(tag, e(heading, title), *body, **attributes) if any(body) else NOTHING


def is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)


def num(value: Any, sign: str = "", form: str = "") -> str:
    """A whole number as it is; else three decimals, fewer for a large number, one digit for a tiny one."""
    if not is_number(value):
        return MISSING if value is None or isinstance(value, float) else str(value)
    if isinstance(value, int) and not sign:
        return f"{value:,}"
    size = abs(value)
    usual = ".1g" if 0 < size < 0.0005 else ",.3f" if size < 100 else ",.1f" if size < 10_000 else ",.0f"
    return format(float(value), sign + (form or usual)).replace("-", "−").replace("inf", "∞")


def percent(value: Any, digits: int = 1) -> str:
    return f"{num(100.0 * value, form=f'.{digits}f')} %" if is_number(value) else MISSING


def interval(pair: Any) -> str:
    return " … ".join(num(end, "+") for end in pair) if pair else MISSING


def change(entry: Record, before: str, after: str) -> str:
    return " → ".join(dict.fromkeys(num(entry.get(key)) for key in (before, after)))


def last_part(path: Any) -> str:
    """The last component of a name or path: a page is made to be passed on, so it holds no local directory."""
    return str(path or "").replace("\\", "/").rstrip("/").rpartition("/")[2].strip(". ") or "model"


def failed(entry: Record) -> bool:
    return entry.get("passed") not in (True, None) or entry.get("verdict") == "unsafe"


def noted(word: Any, note: Any) -> Html:
    return join(word, some("div", note, class_="note"))


NOTHING = Html("")
NUMBERS: dict[str, Callable[[Any], str]] = {
    **{"num": num, "signed": lambda value: num(value, "+"), "percent": percent, "interval": interval},
    "exponent": lambda value: f"{value:.1e}" if is_number(value) else MISSING,
    "size": lambda block: change(block, "params_before", "params_after"),
}
PASSED, FAILED, UNSAFE = (e("b", w, class_=c) for w, c in (("passed", "good"), ("FAILED", "bad"), ("unsafe", "bad")))
WORDS: dict[str, Callable[[Any], Any]] = {
    **{"words": lambda value: value, "code": lambda value: e("code", value)},
    "files": lambda names: ", ".join(map(last_part, str(names or MISSING).split(", "))),
    "check": lambda check: noted(check.get("name"), check.get("detail")),
    "yes": lambda value: "yes" if value else "NO",
    "result": lambda passed: NOTHING if passed is None else PASSED if passed is True else FAILED,
    "judged": lambda block: noted(UNSAFE if failed(block) else block.get("verdict"), block.get("reason")),
    "replaced": lambda now: name_replacement(now) if now else "",
}
# Columns of each table: heading; how to show it, if not as a number; key in the record, if not the heading (* is all).
COLUMNS = {
    "checks": "check, check, *; measured; limit; result, result, passed",
    "texts": "text, words, name; source, num, baseline; compressed; Δ, signed, delta; 95 % interval, interval,"
    "delta_ci95; budget, signed, max_dppl; result, result, passed; tokens; window length, num, seq_len",
    "tasks": "task, words, name; metric, words; source; compressed; drop, signed; 95 % interval, interval, drop_ci95;"
    "documents; changed; budget, signed, max_drop; result, result, passed",
    "talk": "measure, words, name; source; compressed; 95 % interval of the rise, interval, rise_ci95",
    "bands": "band, words; tokens; source, num, baseline; compressed; Δ, signed, delta; nats per token, signed, nats;"
    "share of rise, percent, share",
    "blocks": "block, words, index; R²_lin, num, r2_lin; stream R², num, r2_stream; verdict, judged, *;"
    "replacement, replaced; parameters, size, *",
    "linearity": "block, words, index; R²_lin, num, r2_lin; 95 % interval, interval, r2_lin_ci95; stream R², num,"
    "r2_stream; median feature, num, r2_median; effective rank of the output, num, effective_rank; of the input, num,"
    "input_effective_rank; directions of the input, num, input_rank; condition number, exponent, condition_number;"
    "top 0.1 % of rows, percent, top_row_share; ΔPPL alone, signed, swap_delta; predicted nats, num, predicted_dloss",
    "verdicts": "block, words, index; verdict, judged, *; parameters, num, params_before; as a linear map, num,"
    "linear_params; rank for 99 %, num, rank_99; its parameters, num, rank_99_params",
    "together": "blocks, words, names; removed, percent, removed_fraction; perplexity, num, compressed;"
    "Δ, signed, delta; 95 % interval, interval, delta_ci95",
    "rows": "token, code; position; window; share of variance, percent, share; text around it, words, around",
    "ladder": "block, words, index; R²_lin, num, r2_lin; rank for 99 %, num, rank_99; its parameters, num,"
    "rank_99_params; the block's, num, params_before; a full linear map's, num, linear_params",
    "bilinear": "block, words, index; R²_lin, num, bilinear_r2_lin; with the probe, num, bilinear_r2_poly; gain,"
    "signed, bilinear_gain; iterations, num, bilinear_iterations; converged, yes, bilinear_converged",
    "trained": "block, words, index; closed form, num, trained_r2_lin; trained, num, trained_r2; below it by, num,"
    "trained_gap; condition number, exponent, condition_number",
    "cross": "block, words, index; other's block, num, cross_other_index; own on own, num, cross_own; own on other's,"
    "num, cross_own_on_other; own on white, num, cross_own_on_white; other's on its own, num, cross_other; other's on"
    " these, num, cross_other_on_own; other's on white, num, cross_other_on_white",
    "agreed": "corpus, words, first; and, words, second; rank correlation of R²_lin, num, rank_correlation;"
    "largest difference, num, largest_difference",
    "models": "model, words, name; parameters; blocks; lowest R²_lin, num, lowest; median; highest; spread;"
    "mean step between neighbours, num, mean_jump; turns; rank correlation with depth, num,"
    "rank_correlation_with_depth",
    "agreement": "block, words, index; replacement, words; predicted; measured, signed; standard error, num,"
    "standard_error",
    "speed": "measure, words, name; source; compressed; ratio",
    "facts": "what, words, name; value, words",
    "splits": "text, words, name; source, files; tokens; sha256, code",
}


def records(entries: Any) -> list[Record]:
    """A list of records, also from a mapping of names to records or to single values."""
    if isinstance(entries, Mapping):
        return [{**(x if isinstance(x, Mapping) else {"value": x}), "name": name} for name, x in entries.items()]
    return list(entries or [])


def table(label: str, kind: str, entries: Any) -> Html:
    """A table in a container that scrolls by itself; the first column names the row, bad rows are highlighted."""
    said = [[part.strip() for part in column.split(",")] for column in COLUMNS[kind].split(";")]
    fields = [(name, *more, *("num", name)[len(more) :]) for name, *more in said]
    sides, shows, body = ["n" if how in NUMBERS else None for _, how, _ in fields], {**NUMBERS, **WORDS}, []
    for row in records(entries):
        first, *cells = (shows[how](row if key == "*" else row.get(key)) for _, how, key in fields)
        line = [e("td", cell, class_=side) for cell, side in zip(cells, sides[1:], strict=True)]
        attributes = {"class_": "hit" if failed(row) else None, "data_block": row.get("index")}
        body.append(e("tr", e("th", first, scope="row"), *line, **attributes))
    top = [e("th", name, scope="col", class_=side) for (name, *_), side in zip(fields, sides, strict=True)]
    full = e("table", e("thead", e("tr", *top)), e("tbody", *body))
    return e("div", full, class_="scroll", role="region", aria_label=label, tabindex="0") if body else NOTHING


def listed(title: str, key: str) -> Callable[[Record], Html]:
    """A section that is one table."""
    return lambda report: titled("section", title, table(title, key, report.get(key)))
