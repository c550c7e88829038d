"""The HTML report: well formed, self-contained, safe with hostile text, and never quiet about a failure."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from functools import cache
from html.parser import HTMLParser
from itertools import cycle, pairwise
from typing import Any

import pytest
from report.records import (
    SCRIPT,
    assessment,
    assessment_values,
    attending,
    attending_profile,
    hostile_assessment,
    hostile_attention,
    hostile_profile,
    mix_figures,
    profile,
    profile_set,
    profile_values,
    real,
)

from compressor.report.page import bundle_script, hash_source, page
from compressor.report.record import Record

VOID = {"meta", "link"}
PAGES: dict[str, Callable[[], Any]] = {
    **{"assessment": assessment, "profile": profile, "profiles": profile_set},
    **{"attention": attending, "attention profile": attending_profile},
    **{"hostile assessment": hostile_assessment, "hostile profile": hostile_profile},
    "hostile attention": hostile_attention,
    **{"thirty": real, "twenty-eight twice": lambda: real(28, attention=True)},
}


@cache
def built(name: str) -> str:
    return page(PAGES[name]())


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

    def lines(self, tag: str) -> list[str]:
        return [data for one, data in self.words if one == tag and data.strip()]

    def names(self) -> list[str]:
        return [tag for tag, _ in self.tags]

    def titles(self) -> list[str]:
        return [data for tag, data in self.words if tag == "h2"]

    def charts(self) -> list[dict[str, Any]]:
        return [json.loads(str(attributes["data-spec"])) for _, attributes in self.tags if "data-spec" in attributes]


def read(values: dict[str, Any]) -> Document:
    return Document(page(Record.model_validate(values)))


def outside_of_the_script(source: str) -> str:
    return source.replace(bundle_script(), "")


def test_the_answer_and_one_picture_come_first() -> None:
    document = Document(built("assessment"))
    assert document.text("h1") == "tiny-model, compressed"
    assert document.text("title") == "tiny-model, compressed"
    assert document.lines("p")[:3] == [
        "8.39 % smaller: 3,360,192 → 3,078,336 parameters, 6.7 MB → 6.2 MB of weights.",
        "Perplexity rises by 0.809 (95 % interval +0.659 … +0.974) from 27.730 to 28.539, inside the budget of +1.000.",
        "Speed: prefill 1.155× as fast (95 % 1.120–1.190×); decoding: no difference told.",
    ]
    order = [
        "chart" if "data-spec" in attributes else tag
        for tag, attributes in document.tags
        if tag in ("h1", "h2", "nav", "table") or "data-spec" in attributes
    ]
    assert order[:5] == ["h1", "nav", "chart", "h2", "chart"]


def test_every_section_is_in_its_place_and_in_the_contents() -> None:
    document = Document(built("assessment"))
    assert document.titles() == [
        *("Against the budgets", "What it writes", "Where it loses", "Block by block"),
        *("What it costs to replace a block", "Several blocks at once", "Two regimes", "The rank ladder"),
        *("Predicted against measured", "Speed", "Provenance"),
    ]
    assert [data for tag, data in document.words if tag == "a"] == document.titles()
    links = [str(attributes["href"])[1:] for tag, attributes in document.tags if tag == "a"]
    anchors = [attributes["id"] for tag, attributes in document.tags if tag == "section"]
    assert links == anchors
    said = document.text()
    for wanted in (
        *("16,320 tokens", "−0.010 … +0.030", "93.0 %", "31.2 tokens", "' house'", "+12.10 nats", "reason 2"),
        *(
            "keeps 384 + rank 48",
            "384 neurons kept, and a linear map of rank 48 beside them",
            "295,872 → 166,464",
            "book.txt",
            "ab" * 32,
            "cd" * 32,
            "18.270",
            "the text is small",
        ),
        *("it mumbles", "as in May", "14 answers changed"),
    ):
        assert wanted in said, wanted


def test_a_profile_opens_with_its_answer_too() -> None:
    document = Document(built("profile"))
    assert document.text("h1") == "How linear is tiny-model?"
    assert document.text("p").startswith("Parameters that linear maps save, and what they cost in perplexity")
    assert "7.7 % for +0.46 (block 1)" in document.text("p")
    assert "Not to be touched: 2." in document.text("p")
    assert "Safe: 1, 3, 5" in document.text("li")
    assert document.titles() == [
        *("Block by block", "Several blocks at once", "Two regimes", "The rank ladder"),
        *("The same blocks on other text", "What the residual is not", "The pitfall of training it"),
        *("Learned, not architectural?", "Provenance"),
    ]
    for wanted in (
        "Block 2: outlier rows.",
        "' the\\n'",
        "probes ran on 19,712 sampled rows",
        "cross other: mean R²_lin",
    ):
        assert wanted in document.text(), wanted
    assert ("mark", " the\\n") in document.words


def test_several_models_are_compared_and_then_told_one_by_one() -> None:
    document = Document(built("profiles"))
    assert document.text("h1") == "How linear are tiny-model, other-model?"
    assert document.titles() == ["tiny-model", "other-model"]
    anchors = [attributes["id"] for _, attributes in document.tags if "id" in attributes]
    assert len(set(anchors)) == len(anchors)
    links = {str(attributes["href"])[1:] for tag, attributes in document.tags if tag == "a"}
    assert links <= set(anchors)
    assert len(document.charts()) == 1 + 2 * 7


def test_no_figure_stands_in_two_tables() -> None:
    """The checks, the texts and the tasks are one table; the windows' and bands' perplexity of rare tokens is none."""
    document = Document(built("assessment"))
    assert document.text("th").count("perplexity text") == 1
    assert document.text("th").count("task riddles") == 1
    assert "1,674,602" not in document.text()
    assert "+0.020" in document.text("td")
    assert document.text().count("reason 2") == 1


@pytest.mark.parametrize("name", PAGES)
def test_no_local_directory_is_shown(name: str) -> None:
    assert "secret" not in built(name)


@pytest.mark.parametrize("model", ["C:\\secret\\tiny", "/secret/tiny/", "secret/tiny", "../secret/tiny"])
def test_a_model_goes_by_the_last_part_of_its_path(model: str) -> None:
    values = assessment_values()
    shown = page(Record.model_validate(values | {"source": values["source"] | {"model": model}}))
    assert "tiny, compressed" in shown
    assert "secret" not in shown


def policy_of(document: Document) -> dict[str, str]:
    content = str(next(a["content"] for _, a in document.tags if a.get("http-equiv") == "Content-Security-Policy"))
    return dict(rule.strip().split(" ", 1) for rule in content.split(";"))


@pytest.mark.parametrize("name", PAGES)
def test_it_loads_nothing_and_allows_one_script(name: str) -> None:
    source = built(name)
    document = Document(source)
    for tag, attributes in document.tags:
        assert tag not in {"img", "iframe", "object", "embed", "base", "form", "image", "use"}
        assert not any(attribute.startswith("on") for attribute in attributes)
        for attribute in {"src", "href", "srcset", "data", "action", "xlink:href"} & set(attributes):
            assert str(attributes[attribute]).startswith(("data:", "#"))
    rest = outside_of_the_script(source)
    assert "http:" not in rest
    assert rest.count("https:") == rest.count('"$schema":"https:') == len(document.charts())  # a name, not a request
    assert "url(" not in rest
    assert "@import" not in rest
    assert [attributes for tag, attributes in document.tags if tag == "script"] == [{}]
    assert "".join(data for tag, data in document.words if tag == "script") == bundle_script()
    (style,) = (data for tag, data in document.words if tag == "style")
    assert policy_of(document) == {
        **{"default-src": "'none'", "script-src": f"'{hash_source(bundle_script())}'", "img-src": "data:"},
        **{"style-src": f"'{hash_source(style)}'", "base-uri": "'none'", "form-action": "'none'"},
    }


def test_the_script_can_stand_in_a_page() -> None:
    assert "</script" not in bundle_script().lower()
    assert "<!--" not in bundle_script()
    assert "\r" not in bundle_script()  # a browser would read another character, and the hash would not fit


@pytest.mark.parametrize("name", ["assessment", "profile", "profiles"])
def test_it_is_a_page_for_phones_and_screen_readers(name: str) -> None:
    source = built(name)
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
    pictures = [attributes for _, attributes in document.tags if "data-spec" in attributes]
    assert all(attributes["role"] == "img" and attributes["aria-label"] for attributes in pictures)
    inside = [before for before, tag in zip(document.tags, document.names()[1:], strict=False) if tag == "table"]
    assert inside
    for _, attributes in inside:
        assert attributes["class"] == "scroll"
        assert attributes["tabindex"] == "0"
        assert attributes["aria-label"]
    assert "prefers-color-scheme:dark" in source


@pytest.mark.parametrize(("calm", "attacked"), [("assessment", "hostile assessment"), ("profile", "hostile profile")])
def test_hostile_text_is_only_text(calm: str, attacked: str) -> None:
    before, source = Document(built(calm)), built(attacked)
    source.encode("utf-8")
    rest = outside_of_the_script(source)
    assert SCRIPT not in rest
    assert rest.count("</script>") == 1
    assert not {"\x00", "\x1b", "\u202e"} & set(rest)
    assert "\\u001b" not in rest
    document = Document(source)
    assert set(document.names()) <= {*before.names(), "b"}
    allowed = {name for _, attributes in before.tags for name in attributes}
    assert {name for _, attributes in document.tags for name in attributes} <= allowed
    assert "{{ 7*7 }}" in document.text()
    for tag in ("h1", "th", "td", "li", "code", "figcaption"):
        assert "onload=alert(1)" in document.text(tag), f"is it dropped from <{tag}>?"
    assert any("alert(1)" in json.dumps(spec) for spec in document.charts())


def test_half_characters_can_be_written() -> None:
    record = assessment().model_copy(
        update={"warnings": ["half \ud83d"], "tasks": {"\udfff": assessment().tasks["riddles"]}}
    )
    assert "half ?" in page(record).encode("utf-8").decode("utf-8")


def test_a_hostile_model_name_is_escaped() -> None:
    values = assessment_values()
    source = page(
        Record.model_validate(values | {"source": values["source"] | {"model": "<img src=x onerror=alert(1)>"}})
    )
    assert "<img" not in source.replace(bundle_script(), "")
    assert Document(source).text("h1") == "<img src=x onerror=alert(1)>, compressed"


OPTIONAL = sorted(set(assessment_values()) - {"schema_version", "tool", "source", "parameters", "budget", "text"})


@pytest.mark.parametrize("key", OPTIONAL)
def test_any_part_may_be_missing(key: str) -> None:
    values = assessment_values()
    del values[key]
    document = read(values)
    titles = {"where": "Where it loses", "generation": "What it writes", "blocks": "Block by block", "speed": "Speed"}
    titles |= {"agreement": "Predicted against measured", "swap": "Several blocks at once"}
    assert key not in titles or titles[key] not in document.text("h2")
    assert "None" not in document.text()


@pytest.mark.parametrize("key", sorted(set(profile_values(3)) - {"schema_version", "tool", "source", "parameters"}))
def test_any_part_of_a_profile_may_be_missing(key: str) -> None:
    values = profile_values(3)
    del values[key]
    assert "None" not in read(values).text()


def test_a_record_without_measurements_is_still_a_page() -> None:
    values = assessment_values()
    document = read({key: values[key] for key in ("schema_version", "tool", "source")} | {"parameters": {}})
    assert "No measurement is recorded." in document.text("p")
    assert ("div", {"class": "answer no"}) in document.tags


def failing() -> dict[str, Any]:
    values = assessment_values()
    values["perplexity"] |= {"delta": 1.2, "delta_ci95": [0.9, 1.4], "delta_upper": 1.4}
    values["texts"]["text"] |= values["perplexity"] | {"passed": False}
    values["checks"][0] |= {"passed": False, "measured": 1.4}
    return values | {"passed": False}


def test_a_failure_is_said_first_in_words_and_colour() -> None:
    document = read(failing())
    said = document.text("p")
    assert "OUTSIDE the budget of +1.000." in said
    assert "Checks failed: perplexity text." in said
    assert "inside the budget" not in said
    assert "FAILED" in document.text("b")
    assert ("tr", {"class": "hit"}) in document.tags
    assert ("div", {"class": "answer no"}) in document.tags
    good = Document(built("assessment"))
    assert ("div", {"class": "answer"}) in good.tags
    assert "FAILED" not in good.text()


def test_a_task_may_fail_where_perplexity_does_not() -> None:
    values = assessment_values()
    check = {"name": "task riddles", "passed": False, "measured": 0.07, "limit": 0.05, "detail": ""}
    values["checks"].append(check)
    document = read(values)  # although the record claims that it passed
    assert "inside the budget of +1.000." in document.text("p")
    assert "Checks failed: task riddles." in document.text("p")
    assert document.text("b").count("FAILED") == 1
    assert ("div", {"class": "answer no"}) in document.tags


def test_a_record_that_failed_without_saying_why_is_not_good_news() -> None:
    document = read(assessment_values() | {"passed": False})
    assert "Checks failed: the record does not say which." in document.text("p")
    assert ("div", {"class": "answer no"}) in document.tags


def test_several_texts_are_judged_one_by_one() -> None:
    values = assessment_values()
    values["texts"]["code"] = {**values["texts"]["text"], "max_dppl": 0.5, "passed": False}
    assert "OUTSIDE the budget of code" in read(values).text("p")
    values["texts"]["code"]["passed"] = True
    assert "inside each budget" in read(values).text("p")


def test_fidelity_is_said_in_words_and_held_against_its_budget() -> None:
    values = assessment_values()
    said = "KL from the source 0.0123 nats per token (0.0110 … 0.0140); 94.1 % of the most likely tokens agree"
    document = read(values)
    assert f"{said} (93.0 … 95.0 %)." in document.text("li"), "without a budget it can wait"
    assert ("div", {"class": "answer"}) in document.tags
    values["budget"]["max_kl"] = 0.013
    values["texts"]["text"]["fidelity"] |= {"max_kl": 0.013, "passed": False}
    document = read(values)
    assert "OUTSIDE the KL budget of 0.0130." in document.text("p")
    assert ("div", {"class": "answer no"}) in document.tags
    assert {"kl text", "0.0123", "0.0110 … 0.0140", "0.0130"} <= {data for _, data in document.words}


def test_a_record_of_an_earlier_version_has_no_fidelity() -> None:
    values = assessment_values()
    del values["fidelity"], values["texts"]["text"]["fidelity"]
    assert "KL" not in read(values).text()


@pytest.mark.parametrize("figure", [math.nan, math.inf])
def test_a_broken_figure_is_never_good_news(figure: float) -> None:
    values = assessment_values()
    values["perplexity"] |= {"delta": figure, "delta_upper": figure, "delta_ci95": [figure, figure]}
    document = read(values)
    assert ("div", {"class": "answer no"}) in document.tags
    wanted = "perplexity is not a number" if math.isnan(figure) else "Perplexity rises by ∞"
    assert wanted in document.text("p")


@pytest.mark.parametrize("figure", [math.nan, math.inf, -math.inf, 1e308, -1e308, 5e-324])
@pytest.mark.parametrize("make", [assessment_values, profile_values])
def test_no_figure_breaks_a_page(make: Any, figure: float) -> None:
    values = mix_figures(make(4), cycle([figure, 0.5]))
    values["parameters"]["before"] = 10**400
    for block in values["blocks"]:
        block |= {"params_after": 10**400, "linear_params": 10**400, "rank_99": -(10**400)}
    document = read(values)
    assert document.charts()
    assert not {"nan", "inf"} & set(document.text().split())


def test_a_model_that_got_better_is_said_to() -> None:
    values = assessment_values()
    values["perplexity"] |= {"delta": -0.1, "delta_ci95": [-0.2, 0.0], "delta_upper": 0.0}
    said = read(values).text("p")
    assert "Perplexity falls by 0.100 (95 % interval −0.200 … +0.000) from 27.730 to 28.539, inside the budget" in said


def test_continuations_show_where_they_part() -> None:
    document = Document(built("assessment"))
    assert document.text("mark").startswith("there wasit rained")
    assert ("span", "a time ") in document.words
    assert "3 more continuations" in document.text("summary")
    values = assessment_values(1)
    values["generation"]["samples"] = [
        {"prompt": "a", "source": "b", "compressed": "b", "agreement": 1.0, "first_difference": None}
    ]
    document = read(values)
    assert "mark" not in document.names()
    assert "no difference" in document.text()


@pytest.mark.parametrize(("name", "blocks"), [("thirty", 30), ("twenty-eight twice", 2 * 28)])
def test_every_block_is_a_line_with_its_reason_on_demand(name: str, blocks: int) -> None:
    source = built(name)
    section = source[source.index('<section id="blocks">') :]
    document = Document(section[: section.index("</section>") + len("</section>")])
    lines = [attributes for tag, attributes in document.tags if tag == "summary" and attributes.get("class") == "line"]
    assert len(lines) == blocks
    assert not [tag for tag in document.names() if tag in ("table", "script", "button")], "nothing has to scroll or run"
    assert sum("nats per token" in data or "perplexity" in data for data in document.lines("p")) >= 20
    assert document.text("summary", "span").count("keeps 1,088 of 1,536") > 2
    assert "1,088 of 1,536 neurons kept" in document.text("p")
    assert not re.search(r"pruned|hybrid|lowrank", document.text())


EACH = "inside each budget: wikitext2 +0.422 (up to +0.587) of +0.703, code +0.111 (up to +0.276) of +0.500."


def test_the_answer_has_the_budget_of_every_text() -> None:
    document = Document(built("thirty"))
    assert EACH in document.lines("p")[1]
    assert "budget 2 % of 35.161" in document.text("div")
    assert "269 MB → 242 MB of weights" in document.lines("p")[0]
    assert "Healed on 196,608 tokens: ΔPPL on the selection text" in document.text("li")


def test_a_percentage_that_was_asked_is_said_with_its_number() -> None:
    values = assessment_values()
    for budget in (values["budget"], values["texts"]["text"]):
        budget |= {"asked": "5%", "max_dppl": 1.3864}
    assert "inside the budget of +1.386 (5 % of 27.730)." in read(values).text("p")


@pytest.mark.parametrize("dtype", ["", "int4"])
def test_weights_of_an_unknown_dtype_have_no_size(dtype: str) -> None:
    values = assessment_values()
    values["source"]["dtype"] = dtype
    assert read(values).lines("p")[0] == "8.39 % smaller: 3,360,192 → 3,078,336 parameters."


def test_one_token_is_not_several() -> None:
    values = assessment_values()
    values["generation"]["samples"][0]["first_difference"] = 1
    assert "they part after 1 token</p>" in page(Record.model_validate(values))


@pytest.mark.parametrize("name", PAGES)
def test_one_minus_sign(name: str) -> None:
    said = f"{Document(built(name)).text()}{json.dumps(Document(built(name)).charts(), ensure_ascii=False)}"
    notes = re.findall(r'"(?:note|said|name)": "((?:[^"\\\\]|\\\\.)*)"', said)
    for words in (Document(built(name)).text(), *notes):
        assert not re.search(r"(?<![\w.…-])-[0-9.]|[0-9]e-[0-9]", words.replace("SmolLM2-135M", "")), words
