"""A record as one HTML page (report.html): no request, no other file, one script, which draws the charts.

`ASSESSMENT` and `PROFILE` say which sections stand on which page; each is a template of its own, and is left out where
the record lacks what it shows.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import starmap, takewhile
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from compressor.report.chart_style import DARK, VEGA_LITE, Chart
from compressor.report.charts import charts_of
from compressor.report.fidelity import format_nats, say_agreement
from compressor.report.formats import (
    MISSING,
    SAME_SPEED,
    as_float,
    asked_size,
    block_numbers,
    branch_numbers,
    cache_change,
    chosen_elsewhere,
    describe_replacement,
    ends,
    interval,
    is_number,
    last_part,
    name_replacement,
    name_verdict,
    num,
    percent,
    ratio_interval,
    ridge_differs,
    say_cache,
    say_documents,
    say_limit,
    say_share,
    say_weights,
)
from compressor.report.healing import capitalised, list_looks, say_rises
from compressor.report.record import ProfileSet, Record
from compressor.report.record_parts import SIZE_CHECK, Block, Sample, TextResult, TopRow
from compressor.report.summary import answer, finding_lines
from compressor.report.unverified import unverified_lines
from compressor.runtime.errors import visible
from compressor.runtime.figures import count
from compressor.runtime.names import NO_LIMIT

TEMPLATES = Path(__file__).parent / "templates"
FEW_TEXTS = 3  # that have room in the answer with their figures


@dataclass(frozen=True)
class Answer:
    """What the page is opened for, in a few lines; `good` is whether every promise was kept, `more` can wait."""

    sentences: Sequence[str]
    good: bool
    more: Sequence[str] = ()


@dataclass(frozen=True)
class Promise:
    """A text, a task or another check against its budget; `passed` is None where no budget was asked."""

    name: str
    passed: bool | None
    source: float | None = None
    compressed: float | str | None = None
    change: float | None = None
    ends: Sequence[float | str] | None = None
    limit: float | str | None = None
    limit_words: str = ""  # where the limit is not a number
    note: str = ""


@dataclass(frozen=True)
class Section:
    """A part of a page under a heading; `name` is its template."""

    name: str
    title: str
    wanted: Callable[[Record, dict[str, Chart]], bool]


def charted(name: str) -> Callable[[Record, dict[str, Chart]], bool]:
    return lambda record, charts: name in charts


BUDGETS = Section("budgets", "Against the budgets", lambda record, charts: bool(list_promises(record)))
WRITING = Section("writing", "What it writes", lambda record, charts: record.generation is not None)
LOSSES = Section("losses", "Where it loses", lambda record, charts: record.where is not None)
BLOCKS = Section("blocks", "Block by block", lambda record, charts: bool(record.blocks))
COST = Section("swap", "What it costs to replace a block", charted("swap"))
TOGETHER = Section(
    "together", "Several blocks at once", lambda record, charts: bool(record.swap and record.swap.together)
)
REPLACED = Section(
    "replaced", "What was replaced", lambda record, charts: bool(record.replaced or record.replaced_attention)
)
SPEED = Section(
    "speed", "Speed", lambda record, charts: bool(record.speed or (record.kv_cache and record.kv_cache.shrinks))
)
PROVENANCE = Section("provenance", "Provenance", lambda record, charts: True)
LINEARITY = (
    Section("regimes", "Two regimes", charted("regimes")),
    Section("ladder", "The rank ladder", charted("ladder")),
    Section("corpora", "The same blocks on other text", charted("corpora")),
    Section("residual", "What the residual is not", charted("residual")),
    Section("trained", "The pitfall of training it", charted("trained")),
    Section("cross", "Learned, not architectural?", charted("cross")),
    Section("agreement", "Predicted against measured", charted("agreement")),
)
HEALING = Section("healing", "Healing", lambda record, charts: record.healing is not None)
ASSESSMENT = (BUDGETS, WRITING, LOSSES, BLOCKS, REPLACED, COST, TOGETHER, *LINEARITY, HEALING, SPEED, PROVENANCE)
PROFILE = (BLOCKS, TOGETHER, *LINEARITY, PROVENANCE)


@dataclass(frozen=True)
class Model:
    """One model of a page: its record, its charts by name, and the sections that it has."""

    record: Record
    charts: dict[str, Chart]
    sections: Sequence[Section]
    prefix: str = ""  # of the anchors, where there are several models

    @property
    def name(self) -> str:
        return last_part(self.record.source.model)

    @property
    def answer(self) -> list[str]:
        """What can be saved, and what must not be touched; what stands between is a finding."""
        first, *_, last = answer(self.record)
        return [first, last]

    @property
    def findings(self) -> list[str]:
        return [*answer(self.record)[1:-1], *finding_lines(self.record)]


def page(record: Record | ProfileSet) -> str:
    """The whole document."""
    if isinstance(record, ProfileSet):
        models = [describe(profile, PROFILE, f"model-{k}-") for k, profile in enumerate(record.profiles, start=1)]
        compared = {chart.name: chart for chart in charts_of(record)}.get("models")
        return render(
            "profiles.html", f"How linear are {', '.join(m.name for m in models)}?", models=models, compared=compared
        )
    if record.shape is not None and record.perplexity is None and not record.selection:
        model = describe(record, PROFILE)
        return render("profile.html", f"How linear is {model.name}?", model=model)
    model = describe(record, ASSESSMENT)
    first = model.charts.get("blocks") or model.charts.get("budgets")  # the chart under the answer
    parts = {"answer": headline(record), "promises": list_promises(record), "first": first}
    return render("assessment.html", f"{model.name}, compressed", model=model, **parts)


def describe(record: Record, sections: Sequence[Section], prefix: str = "") -> Model:
    charts = {chart.name: chart for chart in charts_of(record)}
    return Model(record, charts, [section for section in sections if section.wanted(record, charts)], prefix)


def render(template: str, title: str, **parts: Any) -> str:
    style, script = (TEMPLATES / "page.css").read_text(encoding="utf-8"), bundle_script()
    policy = (
        f"default-src 'none'; script-src '{hash_source(script)}'; style-src '{hash_source(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    inline = {"style": Markup(style), "script": Markup(script), "policy": policy, "dark": DARK}
    return environment().get_template(template).render(title=title, **inline, **parts)


@lru_cache(maxsize=1)
def bundle_script() -> str:
    """The script of every page: Vega's runtime, and how this page draws with it."""
    import vl_convert

    own = (TEMPLATES / "page.js").read_text(encoding="utf-8")
    script: str = vl_convert.javascript_bundle(own, vl_version=VEGA_LITE)
    return script


def hash_source(text: str) -> str:
    """How a Content-Security-Policy names an inline script or style."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


@lru_cache(maxsize=1)
def environment() -> Environment:
    """Templates that escape whatever they are given; control characters are made visible, None is a dash."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup) else show(value),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    filters: dict[str, Callable[..., Any]] = {
        **{"num": num, "percent": percent, "interval": interval, "numbers": block_numbers, "files": name_files},
        **{"ratios": ratio_interval, "signed": lambda value: num(value, "+"), "power": show_power, "quoted": repr},
        **{"replacement": name_replacement, "around": text_around, "split": split_sample},
        **{"count": lambda number, noun: count(number, noun), "describe": describe_replacement},
        **{"ends": ends, "verdict": name_verdict, "ridge_differs": ridge_differs},
        **{"say_healing": capitalised, "list_looks": list_looks, "say_rises": say_rises},
    }
    environment.filters |= filters
    environment.globals |= {"outlier_blocks": outlier_blocks, "change": show_change, "same_speed": SAME_SPEED}
    environment.globals |= {"branch_numbers": branch_numbers, "cache_change": cache_change, "share": show_share}
    environment.globals |= {"missing": MISSING}
    return environment


def show(value: Any) -> str:
    return visible(MISSING if value is None else str(value))


def show_power(value: Any) -> str:
    return num(value, form=".1e") if is_number(value) else MISSING


def show_change(before: Any, after: Any) -> str:
    """`before → after`, or one figure where nothing changed."""
    return " → ".join(dict.fromkeys((num(before), num(after))))


def show_share(before: int, after: int) -> str:
    """How much smaller a block is: `−6.2 %`, or a dash where it is as it was."""
    return MISSING if after == before else f"{num(100 * (as_float(after) / as_float(before) - 1), '+', '.1f')} %"


def name_files(names: str) -> str:
    """Files without their directories."""
    return ", ".join(map(last_part, names.split(", "))) if names else MISSING


def headline(record: Record) -> Answer:
    """How much smaller it is, what that costs, whether that was allowed, what it wins, and which checks failed."""
    loss, good = say_cost(record)
    nearness, near = say_fidelity(record)
    limited = record.budget is not None and record.budget.max_kl is not None
    sentences = [
        say_size(record),
        *loss,
        *(f"{line[0].upper()}{line[1:]}." for line in unverified_lines(record)),
        *(nearness if limited else []),
        *say_speed(record),
        *say_cache(record.kv_cache),
    ]
    failed = [check.name for check in record.checks if not check.passed]
    if failed or record.passed is False:
        good = False
        sentences.append(f"Checks failed: {', '.join(failed) or 'the record does not say which'}.")
    more = [*([] if limited else nearness), *say_trained(record)]
    return Answer(sentences, good and near and bool(loss), more)


def say_size(record: Record) -> str:
    """How much smaller it is, in parameters and in bytes of weights."""
    size = record.parameters
    if size.removed_fraction is None:
        return "No measurement is recorded."
    said = f"{percent(size.removed_fraction, 2)} smaller: {show_change(size.before, size.after)} parameters"
    weights = say_weights(size, record.source.dtype)
    said += f", {weights} of weights" if weights else ""
    asked = f" ({asked_size(record.budget.remove)})" if record.budget and record.budget.remove else ""
    return f"{said}{asked}."


def say_speed(record: Record) -> list[str]:
    """How many times as fast it is, where this machine's clock can tell."""
    steps = record.speed.steps if record.speed else []
    told = [f"{s.name} {num(s.ratio)}× as fast (95 % {ratio_interval(s.ci95)})" for s in steps if s.differs]
    alike = [f"{s.name}: no difference told" for s in steps if not s.differs]
    return [f"Speed: {'; '.join([*told, *alike])}."] if told else []


def say_trained(record: Record) -> list[str]:
    """On how much text replacements were trained, and what that won, where they were; its section has the rest."""
    if record.healing is None:
        return []
    before, after = (say_rises(look.dppl) for look in (record.healing.looks[0], record.healing.kept))
    return [f"Healed on {count(record.healing.tokens, 'token')}: ΔPPL on the selection text {before} → {after}."]


def say_cost(record: Record) -> tuple[list[str], bool]:
    """What it costs in perplexity, in a sentence, and whether that was allowed; by every text, if there are several."""
    change, texts = record.perplexity, record.text_results()
    if change is None or record.budget is None:
        return [], True
    if not is_number(change.delta):
        return ["The perplexity is not a number."], False
    said = f"Perplexity {'falls' if change.delta < 0 else 'rises'} by {num(abs(change.delta))} "
    said += f"(95 % interval {interval(change.delta_ci95)}) from {num(change.baseline)} to {num(change.compressed)}"
    if record.budget.max_dppl is None:
        return [f"{said}, {NO_LIMIT} was asked for."], True
    if len(texts) > 1:
        outside = {name: text for name, text in texts.items() if text.passed is False}
        held = f"OUTSIDE the budget of {', '.join(outside)}" if outside else "inside each budget"
        told = texts if len(texts) <= FEW_TEXTS else outside
        held += f": {', '.join(starmap(say_rise, told.items()))}" if told else ""
        return [f"{said}, {held}."], not outside
    inside = is_number(change.delta_upper) and change.delta_upper <= record.budget.max_dppl
    limit = " ".join(map(say_limit, texts.values()))
    return [f"{said}, {'inside' if inside else 'OUTSIDE'} the budget of {limit}."], inside


def say_rise(name: str, text: TextResult) -> str:
    """What a text lost of what it may lose: `code +0.111 (up to +0.276) of +0.500`."""
    upper = f" (up to {num(text.delta_upper, '+')})" if text.delta_upper != text.delta else ""
    return f"{name} {num(text.delta, '+')}{upper}" + ("" if text.max_dppl is None else f" of {num(text.max_dppl, '+')}")


def say_fidelity(record: Record) -> tuple[list[str], bool]:
    """How near its predictions are to its source's, in a sentence, and whether that was allowed."""
    if record.fidelity is None:
        return [], True
    said, limit = str(record.fidelity), record.budget.max_kl if record.budget else None
    if limit is None:
        return [f"{said}."], True
    outside = [name for name, text in record.texts.items() if text.fidelity and text.fidelity.passed is False]
    where = f" on {', '.join(outside)}" if len(record.texts) > 1 and outside else ""
    held = f"{'OUTSIDE' if outside else 'inside'} the KL budget of {format_nats(limit)}{where}"
    return [f"{said}, {held}."], not outside


def list_promises(record: Record) -> list[Promise]:
    """Every text, task and other check once, with its budget and whether it was kept."""
    promises = [
        Promise(
            *(f"perplexity {name}", text.passed, text.baseline, text.compressed, text.delta, text.delta_ci95),
            limit=text.max_dppl,
            limit_words=NO_LIMIT if text.max_dppl is None else "",
            note=f"{count(text.tokens, 'token')} in windows of {num(text.seq_len)}"
            + (f"; about {text.about}" if text.about else "")
            + (f"; budget {share}" if (share := say_share(text.asked, text.baseline)) else ""),
        )
        for name, text in record.text_results().items()
    ]
    promises += [
        Promise(
            *(f"kl {name}", text.fidelity.passed),
            compressed=format_nats(text.fidelity.kl),
            ends=[format_nats(end) for end in text.fidelity.kl_ci95],
            limit=None if text.fidelity.max_kl is None else format_nats(text.fidelity.max_kl),
            note=f"KL from the source in nats per token; {say_agreement(text.fidelity)}",
        )
        for name, text in record.text_results().items()
        if text.fidelity
    ]
    promises += [
        Promise(
            *(f"task {name}", task.passed, task.source, task.compressed, task.drop, task.drop_ci95),
            limit=task.max_drop,
            note=f"{task.metric} of {say_documents(task)}{chosen_elsewhere(task)}",
        )
        for name, task in record.tasks.items()
    ]
    if record.budget and record.budget.remove:
        size = record.parameters
        kept = next((check.passed for check in record.checks if check.name == SIZE_CHECK), None)
        change = None if size.removed is None else -size.removed
        asked = asked_size(record.budget.remove).removeprefix("asked: ")
        promises.append(Promise(SIZE_CHECK, kept, size.before, size.after, change, limit_words=asked))
    shown = {promise.name: place for place, promise in enumerate(promises)}
    for check in record.checks:
        if check.name not in shown:
            promises.append(
                Promise(check.name, check.passed, compressed=check.measured, limit=check.limit, note=check.detail)
            )
        elif not check.passed:
            promises[shown[check.name]] = replace(promises[shown[check.name]], passed=False)
    return promises


def outlier_blocks(record: Record) -> list[Block]:
    """The unsafe blocks, with the rows that carry their variance."""
    return [block for block in record.branches if block.verdict == "unsafe" and block.top_rows]


def text_around(row: TopRow) -> tuple[str, str, str]:
    """The text before a token, the token with its control characters written out, the text after it."""
    before, after = (" ".join(side.split()) for side in (row.before, row.after))
    return before[-80:], repr(row.token)[1:-1], after[:80]


def split_sample(sample: Sample) -> list[tuple[str, str, str]]:
    """Both continuations: whose, what they begin with in common, and the rest."""
    pairs = zip(sample.source, sample.compressed, strict=False)
    same = len(list(takewhile(lambda letters: letters[0] == letters[1], pairs)))
    sides = (("source", sample.source), ("compressed", sample.compressed))
    return [(name, text[:same].lstrip(" "), text[same:]) for name, text in sides]
