"""The HTML report: well formed, self-contained, safe with hostile text, and never quiet about a failure."""

from __future__ import annotations

import base64
import copy
import hashlib
import math
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any

import pytest
from compressor.report.markup import e

from compressor.report import plots
from compressor.report.page import page

SCRIPT = "<script>alert(1)</script>"
HOSTILE = f"{SCRIPT}\"' onload=alert(1) &amp; \x00\ud83d"
VOID = {"meta", "link"}


class Document(HTMLParser):
    """Every element and text of a page; refuses a tag that is not closed, or closed in the wrong order."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[tuple[str, str]] = []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append((self.open[-1] if self.open else "", data))

    def text(self, *tags: str) -> str:
        return "".join(data for tag, data in self.words if tag not in ("style", "script") and (not tags or tag in tags))

    def names(self) -> list[str]:
        return [tag for tag, _ in self.tags]


def full() -> dict[str, Any]:
    """A record with everything in it."""
    perplexity = {
        **{"baseline": 27.7301, "compressed": 28.5388, "delta": 0.8087, "delta_ci95": [0.6616, 0.9734]},
        **{"delta_upper": 0.9734, "tokens": 16320, "seq_len": 256},
    }
    split = {"source": "/secret/place/book.txt", "sha256": "ab" * 32, "tokens": 24576}
    band = {"tokens": 4000, "baseline": 5.1, "compressed": 5.2, "delta": 0.1, "nats": 0.02, "share": 0.12}
    block = {"r2_lin": 0.97, "r2_lin_ci95": [0.96, 0.98], "r2_stream": 0.9, "params_before": 295872}
    keep, low = {"kind": "keep", "rank": None, "neurons": None}, {"kind": "lowrank", "rank": 36, "neurons": 0}
    sample = {"prompt": "Once upon", "source": " a time there was", "compressed": " a time it rained"}
    return {
        "schema_version": 1,
        "tool": {"name": "compressor", "version": "0.1.0"},
        "environment": {"python": "3.11.7", "torch": "2.6.0", "threads": 2},
        "source": {"model": "/secret/place/tiny-model", "revision": None, "model_type": "gpt2", "dtype": "float16"}
        | {"weights_sha256": "cd" * 32},
        "text": {"calibration": split, "verification": split, "seq_len": 256},
        "parameters": {"before": 3360192, "after": 3078336, "removed": 281856, "removed_fraction": 0.08388},
        "perplexity": perplexity,
        "budget": {"max_dppl": 1.0, "asked": "1", "confidence": 0.95},
        "texts": {"text": {**perplexity, "max_dppl": 1.0, "asked": "1", "passed": True}},
        "tasks": {
            "last_word": {"metric": "acc", "source": 0.61, "compressed": 0.6, "drop": 0.01, "drop_ci95": [-0.01, 0.03]}
            | {"drop_upper": 0.03, "documents": 500, "changed": 14, "max_drop": None, "passed": None, "metrics": {}}
        },
        "generation": {
            **{"prompts": 16, "prompt_tokens": 32, "tokens": 48, "agreement": 0.93, "same_prefix": 31.25},
            "distinct": {"1": {"source": 0.5, "compressed": 0.49}},
            "repetition": {"source": 0.1, "compressed": 0.12, "rise_ci95": [-0.03, 0.07]},
            "warnings": ["it mumbles"],
            "samples": [{**sample, "agreement": 0.9, "first_difference": 2}] * 5,
        },
        "where": {
            "frequency": [
                {**band, "band": "1–10"},
                {**band, "band": "11–100", "delta": -0.05, "nats": -0.01, "share": -0.06},
            ],
            "position": [{**band, "band": "1"}],
            "windows": [
                {"text_name": "text", "window": 17, "baseline": 30.1, "compressed": 33.0, "nats": 12.1}
                | {"excerpt": "It rained.", "worst": [{"token": " house", "nats": 1.9}]}
            ],
        },
        "checks": [
            {"name": "perplexity text", "passed": True, "measured": 0.9734, "limit": 1.0, "detail": "27.730 → 28.539"}
        ],
        "warnings": ["the text is small"],
        "passed": True,
        "blocks": [
            {
                **block,
                "index": 0,
                "params_after": 295872,
                "verdict": "unsafe",
                "reason": "few rows",
                "replacement": keep,
            },
            {**block, "index": 1, "params_after": 14016, "verdict": "safe", "reason": "", "replacement": low},
        ],
        "agreement": {
            "rank_correlation": 0.94,
            "blocks": [
                {"index": 0, "replacement": "constant", "predicted": 0.2, "measured": 0.31, "standard_error": 0.02},
                {"index": 1, "replacement": "linear", "predicted": 0.01, "measured": 0.008, "standard_error": 0.001},
                {"index": 2, "replacement": "linear", "predicted": 0.002, "measured": -0.001, "standard_error": 0.001},
            ],
        },
        "recipe": {"seed": 7},
        "timings": {"measure": 3.78, "total": 18.27},
    }


def poisoned(value: Any) -> Any:
    """The same record with every string, and every name, replaced by a hostile one."""
    if isinstance(value, dict):
        return {key: poisoned(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [poisoned(entry) for entry in value]
    return HOSTILE if isinstance(value, str) else value


def hostile() -> dict[str, Any]:
    report: dict[str, Any] = poisoned(full())
    for key in ("tasks", "texts"):
        report[key] = {HOSTILE: next(iter(report[key].values()))}
    report["generation"]["distinct"] = {HOSTILE: {"source": HOSTILE, "compressed": None}}
    report["environment"] |= {HOSTILE: HOSTILE}
    report["timings"] |= {HOSTILE: 1.0}
    report["blocks"][0] |= {"verdict": "unsafe", "index": HOSTILE}
    report["agreement"]["blocks"][0] |= {"index": HOSTILE}
    report["generation"]["samples"].append({"prompt": HOSTILE, "source": HOSTILE + "x", "compressed": HOSTILE + "y"})
    return report


def test_the_answer_comes_first_and_every_section_in_its_place() -> None:
    document = Document(page(full()))
    assert document.text("h1") == "tiny-model, compressed"
    assert document.text("title").startswith("tiny-model, compressed")
    assert document.text("main", "header", "p").startswith(
        "8.39 % of the parameters are gone; perplexity rises by 0.809 (95 % interval +0.662 … +0.973), "
        "inside the budget of +1.000."
    )
    titles = [data for tag, data in document.words if tag == "h2"]
    assert titles == [
        *("Checks", "Perplexity", "Tasks", "Does it still talk?", "Where it hurts", "Blocks"),
        *("Linearity over depth", "Predicted against measured", "Provenance"),
    ]
    said = document.text()
    figures = (
        "16,320",
        "−0.010 … +0.030",
        "93.0 %",
        "31.2 tokens",
        "' house'",
        "+12.10 nats",
        "few rows",
        "lowrank 36",
    )
    for wanted_text in (*figures, "295,872 → 14,016", "book.txt", "ab" * 32, "cd" * 32, "18.27", "the text is small"):
        assert wanted_text in said, wanted_text
    assert "it mumbles" in said


def test_no_local_directory_is_shown() -> None:
    assert "secret" not in page(full())
    for model in ("C:\\secret\\tiny", "/secret/tiny/", "secret/tiny", "../secret/tiny"):
        shown = page({"source": {"model": model}})
        assert "tiny, compressed" in shown
        assert "secret" not in shown


def policy_of(document: Document) -> str:
    return str(next(a["content"] for _, a in document.tags if a.get("http-equiv") == "Content-Security-Policy"))


def test_it_loads_nothing() -> None:
    source = page(full())
    document = Document(source)
    for tag, attributes in document.tags:
        assert tag not in {"img", "iframe", "object", "embed", "base", "form", "image", "use"}
        assert not any(name.startswith("on") for name in attributes)
        for name in {"src", "href", "srcset", "data", "action", "xlink:href"} & set(attributes):
            assert str(attributes[name]).startswith("data:")
    assert "http:" not in source
    assert "https:" not in source
    assert "url(" not in source
    assert "@import" not in source
    for rule in ("default-src 'none'", "style-src 'unsafe-inline'", "img-src data:"):
        assert rule in policy_of(document)


@pytest.mark.parametrize("record", ["full", "hostile", "empty"])
def test_one_script_and_the_policy_knows_it(record: str) -> None:
    document = Document(page({"full": full, "hostile": hostile, "empty": dict}[record]()))
    scripts = [attributes for tag, attributes in document.tags if tag == "script"]
    assert scripts == [{}]
    text = "".join(data for tag, data in document.words if tag == "script")
    assert text == plots.SCRIPT
    known = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    (rule,) = (rule.strip() for rule in policy_of(document).split(";") if "script-src" in rule)
    assert rule == f"script-src 'sha256-{known}'"


def test_it_is_a_page_for_phones_and_screen_readers() -> None:
    source = page(full())
    assert source.startswith("<!DOCTYPE html>")
    document = Document(source)
    assert document.names()[:3] == ["html", "head", "meta"]
    assert document.tags[2][1] == {"charset": "utf-8"}
    assert any(attributes.get("name") == "viewport" for _, attributes in document.tags)
    assert document.names().count("main") == 1
    levels = [int(tag[1]) for tag in document.names() if tag in {"h1", "h2", "h3", "h4", "h5", "h6"}]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    pictures = [attributes for tag, attributes in document.tags if tag == "svg" and attributes.get("role") == "img"]
    assert len(pictures) == 4
    assert str(pictures[-1]["aria-label"]).startswith("One replacement in every block alone: measured, nats per token")
    marks = [attributes for _, attributes in document.tags if "data-at" in attributes]
    assert document.names().count("title") == 1 + 2 + len(marks)
    inside = [before for before, tag in zip(document.tags, document.names()[1:], strict=False) if tag == "table"]
    assert inside
    assert all(attributes.get("class") == "scroll" for _, attributes in inside)
    assert "prefers-color-scheme:dark" in source


def test_hostile_text_is_only_text() -> None:
    calm, attacked = Document(page(full())), page(hostile())
    attacked.encode("utf-8")
    assert attacked.count("<script") == 1
    assert "\x00" not in attacked
    document = Document(attacked)
    assert set(document.names()) <= {*calm.names(), "code"}
    allowed = {name for _, attributes in calm.tags for name in attributes}
    assert {name for _, attributes in document.tags for name in attributes} <= allowed
    for tag in ("th", "td", "li", "p", "span", "b", "div", "code", "text", "title"):
        assert "<script>alert(1)" in document.text(tag), f"no hostile text came through in <{tag}>: is it dropped?"


def test_attributes_are_escaped_too() -> None:
    assert e("p", class_='" onload="x') == '<p class="&quot; onload=&quot;x"></p>'


def test_a_hostile_model_name_is_escaped() -> None:
    source = page({**full(), "source": {"model": "<img src=x onerror=alert(1)>"}})
    assert "<img" not in source
    assert Document(source).text("h1") == "<img src=x onerror=alert(1)>, compressed"
    assert SCRIPT not in page({**full(), "source": {"model": SCRIPT}})


@pytest.mark.parametrize("empty", [None, {}, "missing"])
@pytest.mark.parametrize("key", sorted(full()))
def test_any_part_may_be_missing(key: str, empty: Any) -> None:
    report = full()
    if empty == "missing":
        del report[key]
    elif key != "passed":
        report[key] = empty
    document = Document(page(report))
    titles = {"checks": "Checks", "texts": "Perplexity", "tasks": "Tasks", "where": "Where it hurts"}
    titles |= {"generation": "Does it still talk?", "blocks": "Blocks"}
    assert key not in titles or titles[key] not in document.text("h2")
    assert "None" not in document.text()


def test_an_empty_record_is_still_a_page() -> None:
    assert "No measurement is recorded." in Document(page({})).text("p")


def failing() -> dict[str, Any]:
    report = full()
    report["perplexity"] |= {"delta": 1.2, "delta_ci95": [0.9, 1.4], "delta_upper": 1.4}
    report["checks"][0] |= {"passed": False, "measured": 1.4}
    return report | {"passed": False}


def test_a_failure_is_said_first_in_words_and_colour() -> None:
    document = Document(page(failing()))
    said = document.text("p")
    assert "OUTSIDE the budget of +1.000. Checks failed: perplexity text." in said
    assert "inside the budget" not in said
    assert "FAILED" in document.text("b")
    assert ("p", {"class": "answer no"}) in document.tags
    assert ("p", {"class": "answer"}) in Document(page(full())).tags
    assert "FAILED" not in Document(page(full())).text()


def test_a_task_may_fail_where_perplexity_does_not() -> None:
    report = full()
    report["checks"].append({"name": "task last_word", "passed": False, "measured": 0.07, "limit": 0.05, "detail": ""})
    said = Document(page(report)).text("p")  # although the record claims that it passed
    assert "inside the budget of +1.000. Checks failed: task last_word." in said


def test_several_texts_are_judged_one_by_one() -> None:
    report = full()
    report["texts"]["code"] = {**report["texts"]["text"], "max_dppl": 0.5, "passed": False}
    assert "OUTSIDE the budget of code" in Document(page(report)).text("p")
    report["texts"]["code"]["passed"] = True
    assert "inside each budget" in Document(page(report)).text("p")


@pytest.mark.parametrize("figure", [math.nan, math.inf])
def test_a_broken_figure_is_never_good_news(figure: float) -> None:
    report = copy.deepcopy(full())
    report["perplexity"] |= {"delta": figure, "delta_upper": figure, "delta_ci95": [figure, figure]}
    report["where"]["frequency"][0]["delta"] = figure
    document = Document(page(report))
    assert ("p", {"class": "answer no"}) in document.tags
    wanted = "perplexity is not a number" if math.isnan(figure) else "perplexity rises by ∞"
    assert wanted in document.text("p")
    for tag, attributes in document.tags:
        assert tag not in {"rect", "line"} or not any("nan" in str(v) or "inf" in str(v) for v in attributes.values())


def test_a_model_that_got_better_is_said_to() -> None:
    report = full()
    report["perplexity"] |= {"delta": -0.1, "delta_ci95": [-0.2, 0.0], "delta_upper": 0.0}
    said = Document(page(report)).text("p")
    assert "perplexity falls by 0.100 (95 % interval −0.200 … +0.000), inside the budget" in said


def test_continuations_show_where_they_part() -> None:
    document = Document(page(full()))
    assert document.text("mark").startswith("there wasit rained")
    assert ("span", "a time ") in document.words
    same = full()
    same["generation"]["samples"] = [{"prompt": "a", "source": "b", "compressed": "b", "agreement": 1.0}]
    document = Document(page(same))
    assert "mark" not in document.names()
    assert "no difference" in document.text()


def test_bars_are_as_long_as_what_they_show() -> None:
    document = Document(page(full()))
    bars = [attributes for tag, attributes in document.tags if tag == "rect"]
    assert [(bar["x"], bar["width"]) for bar in bars[:2]] == [("33.33%", "66.67%"), ("0.00%", "33.33%")]
    assert [bar.get("class") for bar in bars] == [None, "down", None]


def test_predicted_against_measured_is_a_chart_on_logarithmic_axes() -> None:
    document = Document(page(full()))
    marks = [attributes for _, attributes in document.tags if "data-at" in attributes][-3:]  # the last chart's
    assert [mark["data-block"] for mark in marks] == ["0", "1", "2"]
    assert [mark["class"] for mark in marks] == ["mark", "mark", "mark out"]  # a gain has no place on such an axis
    assert [str(mark["y"]) for mark in marks][2] == "100.00%"
    assert "block 0, constant: predicted 0.200, measured +0.310 ± 0.020" in document.text("title")
    assert [data for tag, data in document.words if tag == "text"][-3:] == ["0", "1", "2"]
    assert "Rank correlation 0.940." in document.text("figcaption")


def test_rows_of_blocks_know_their_block() -> None:
    rows = [attributes.get("data-block") for tag, attributes in Document(page(full())).tags if tag == "tr"]
    assert [row for row in rows if row is not None] == ["0", "1", "0", "1", "2"]
