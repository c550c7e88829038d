"""Pages in a real browser: nothing fails or is fetched, charts are drawn, tell their figures and fit the screen."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from itertools import cycle, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from report.records import (
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

from compressor.report.chart_style import DARK
from compressor.report.page import page
from compressor.report.record import Record

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ARGUMENTS = [
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--no-first-run", "--disable-quic"),
]
WIDE, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
BROKEN = (0.3, float("nan"), float("inf"), 1e308, -1e308, 5e-324, 0.7)
RECORDS: dict[str, Callable[[], Any]] = {
    "seven": assessment,
    "thirty": lambda: assessment(30),
    "profile": profile,
    "profiles": profile_set,
    "attention": lambda: attending(30),
    "attention profile": attending_profile,
    "real": real,
    "real attention": lambda: real(28, attention=True),
    "hostile": hostile_assessment,
    "hostile profile": hostile_profile,
    "hostile attention": hostile_attention,
    "broken": lambda: Record.model_validate(mix_figures(assessment_values(), cycle(BROKEN))),
    "broken profile": lambda: Record.model_validate(mix_figures(profile_values(5), cycle(BROKEN))),
}


def without(reason: str) -> NoReturn:
    """No browser: a reason to skip here, a failure where it has to be there."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        without("no Playwright: it is in the extra `test`")
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        without("no Chromium: `make browser` installs one")
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=program, args=ARGUMENTS)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("pages")
    found = {name: directory / f"{name}.html" for name in RECORDS}
    for name, file in found.items():
        file.write_text(page(RECORDS[name]()), encoding="utf-8")
    return found


class Opened:
    """A page in the browser with its charts drawn, and everything that it said and asked for."""

    def __init__(self, browser: Browser, file: Path, **how: Any) -> None:
        self.file = file
        self.context = browser.new_context(**{"viewport": WIDE, **how})
        self.page: Page = self.context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(file.as_uri())
        self.page.wait_for_selector("body[data-drawn]", timeout=30_000)

    def charts(self) -> list[Locator]:
        return self.page.locator(".chart").all()

    def tip(self) -> str:
        shown = self.page.locator(".vg-tooltip.visible")
        return shown.inner_text() if shown.count() else ""

    def close(self) -> None:
        """Whatever a test did, the page asked for itself alone and complained about nothing."""
        self.context.close()
        assert self.asked == [self.file.as_uri()]
        assert self.said == []


Open = Callable[..., Opened]


@pytest.fixture
def visit(browser: Browser, files: dict[str, Path]) -> Iterator[Open]:
    """Open one of the pages."""
    opened: list[Opened] = []

    def run(name: str, **how: Any) -> Opened:
        opened.append(Opened(browser, files[name], **how))
        return opened[-1]

    yield run
    for one in opened:
        one.close()


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
@pytest.mark.parametrize("name", RECORDS)
def test_every_chart_is_drawn_and_fits(visit: Open, name: str, size: Any) -> None:
    opened = visit(name, viewport=size)
    assert opened.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert opened.charts()
    for chart in opened.charts():
        room, box = chart.bounding_box(), chart.locator("svg").bounding_box()
        assert room
        assert box
        assert abs(box["width"] - room["width"]) < 3
        assert box["height"] > 60
        shapes = chart.locator("svg path[d], svg line, svg text").count()
        assert shapes > 4
        drawn = chart.locator("svg").inner_html()
        assert "NaN" not in drawn
        assert "Infinity" not in drawn


@pytest.mark.parametrize(
    "name", ["seven", "thirty", "profile", "attention", "attention profile", "real", "real attention"]
)
@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_the_answer_and_the_first_picture_are_on_the_first_screen(visit: Open, name: str, size: Any) -> None:
    opened = visit(name, viewport=size)
    box = opened.charts()[0].bounding_box()
    assert box
    assert box["y"] + box["height"] <= size["height"]
    answer = opened.page.locator(".answer").bounding_box()
    assert answer
    contents = opened.page.get_by_role("navigation").bounding_box()
    assert contents
    assert answer["y"] < contents["y"] < contents["y"] + contents["height"] <= box["y"]


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_names_of_blocks_do_not_overlap(visit: Open, size: Any) -> None:
    opened = visit("thirty", viewport=size)
    boxes = (
        opened.charts()[0]
        .locator(".role-axis-label text")
        .evaluate_all(
            "(all) => all.filter((one) => /^\\d+$/.test(one.textContent) && +getComputedStyle(one).opacity > 0)"
            ".map((one) => one.getBoundingClientRect().toJSON())"
        )
    )
    bottom = max(box["top"] for box in boxes)
    row = sorted((box for box in boxes if abs(box["top"] - bottom) < 2), key=lambda box: box["left"])
    assert len(row) >= 8
    assert all(one["right"] <= two["left"] for one, two in pairwise(row))


def test_hovering_tells_the_figures(visit: Open) -> None:
    opened = visit("seven")
    bar = opened.charts()[0].locator(".mark-rect path").nth(7)  # after, of block 0
    bar.hover()
    assert opened.tip().startswith("block 0 · costly\nR²_lin 0.811")
    assert "parameters 295,872 → 166,464" in opened.tip()
    tip, view = opened.page.locator(".vg-tooltip").bounding_box(), opened.page.viewport_size
    assert tip
    assert view
    assert 0 <= tip["x"] <= tip["x"] + tip["width"] <= view["width"]
    opened.page.mouse.move(2, 2)
    assert opened.tip() == ""


def test_a_tap_tells_until_the_next(visit: Open) -> None:
    opened = visit("thirty", viewport=PHONE, has_touch=True, is_mobile=True)
    opened.charts()[0].locator(".mark-rect path").nth(31).tap()
    assert opened.tip().startswith("block 1 · safe")
    tip = opened.page.locator(".vg-tooltip").bounding_box()
    assert tip
    assert 0 <= tip["x"] <= tip["x"] + tip["width"] <= PHONE["width"]


def test_hostile_notes_are_shown_as_text(visit: Open) -> None:
    opened = visit("hostile")
    opened.charts()[1].scroll_into_view_if_needed()
    box = opened.charts()[1].locator("svg").bounding_box()
    assert box
    opened.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 45)
    assert "<script>alert(1)</script>" in opened.tip()
    assert opened.page.locator("script").count() == 1


def test_tables_scroll_with_the_keyboard(visit: Open) -> None:
    opened = visit("profile", viewport=PHONE)
    opened.page.locator("#cross summary").click()
    table = opened.page.get_by_role("region", name="Crossed with another model", exact=True)
    table.focus()
    assert table.evaluate("(one) => one.scrollWidth > one.clientWidth")
    for _ in range(3):
        opened.page.keyboard.press("ArrowRight")
    opened.page.wait_for_function("(one) => one.scrollLeft > 0", arg=table.element_handle())
    assert opened.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("name", ["real", "real attention", "profile"])
@pytest.mark.parametrize(("size", "lines"), [(WIDE, 1), (PHONE, 2)], ids=["wide", "phone"])
def test_blocks_are_lines_that_need_no_scrolling_sideways(visit: Open, name: str, size: Any, lines: int) -> None:
    opened = visit(name, viewport=size)
    blocks = opened.page.get_by_role("group", name="Blocks", exact=True)
    assert blocks.evaluate("(one) => one.scrollWidth <= one.clientWidth")
    heights = blocks.locator("summary").evaluate_all("(all) => all.map((one) => one.getBoundingClientRect().height)")
    assert len(heights) >= 28
    assert max(heights) < 20 + 23 * lines
    inside = "(all) => all.every((one) => one.scrollWidth <= one.clientWidth + 1)"
    assert blocks.locator("summary > *").evaluate_all(inside)
    ends = blocks.locator("summary > :nth-child(4)").evaluate_all(
        "(all) => all.map((one) => Math.round(one.getBoundingClientRect().right))"
    )
    assert len(set(ends)) == 1, "the figures of a column end below each other"


def test_a_block_opens_with_the_keyboard(visit: Open) -> None:
    opened = visit("real", viewport=PHONE)
    block = opened.page.locator(".blocks details").nth(3)
    reason = block.get_by_text("alone as a linear map it raises perplexity")
    assert not reason.is_visible()
    block.locator("summary").focus()
    opened.page.keyboard.press("Enter")
    assert reason.is_visible()
    assert block.get_by_text("neurons kept").is_visible()
    assert block.evaluate("(one) => one.scrollWidth <= one.clientWidth")


def test_budgets_need_no_scrolling_on_a_phone(visit: Open) -> None:
    opened = visit("real", viewport=PHONE)
    table = opened.page.get_by_role("region", name="Budgets")
    assert table.evaluate("(one) => one.scrollWidth <= one.clientWidth")
    assert "+0.272 … +0.587" in table.inner_text()


def test_print_keeps_every_chart_on_the_sheet(visit: Open) -> None:
    opened = visit("real")
    opened.page.emulate_media(media="print")
    opened.page.set_viewport_size({"width": 718, "height": 1000})
    opened.page.wait_for_timeout(1500)
    assert opened.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert not opened.page.get_by_role("navigation").is_visible()


def test_contents_lead_to_their_section(visit: Open) -> None:
    opened = visit("seven")
    opened.page.get_by_role("link", name="Provenance").click()
    assert opened.page.locator("#provenance").evaluate("(one) => one.getBoundingClientRect().top < innerHeight")


def light(colour: str) -> float:
    """Relative luminance of `rgb(…)` or `#…`."""
    if colour.startswith("#"):
        colour = " ".join(str(int(colour[k : k + 2], 16)) for k in (1, 3, 5))
    shares = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, two: str) -> float:
    darker, lighter = sorted((light(one), light(two)))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("name", ["seven", "profile"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_can_be_read_in_light_and_dark(visit: Open, name: str, scheme: str) -> None:
    opened = visit(name, color_scheme=scheme)
    ground = opened.page.locator("body").evaluate("(one) => getComputedStyle(one).backgroundColor")
    assert (light(ground) < 0.05) == (scheme == "dark")

    def seen(what: str, how: str) -> set[str]:
        return set(opened.page.locator(what).evaluate_all(f"(all) => all.map((one) => getComputedStyle(one).{how})"))

    for letters in seen(".chart text", "fill") | seen("figcaption, p, th, td, a, summary", "color"):
        assert contrast(letters, ground) >= 4.5, letters
    opaque = "(all) => all.map((one) => one.getAttribute('stroke')).filter((one) => /^(#|rgb)/.test(one))"
    strokes = set(opened.page.locator(".mark-line path").evaluate_all(opaque))
    for colour in strokes:
        assert contrast(colour, ground) >= 2.5, colour
    shades = {colour.lower() for colour in seen(".chart .background", "fill")}
    assert all(abs(light(shade) - light(ground)) < 0.02 for shade in shades if shade.startswith("rgb("))


def test_charts_follow_the_colour_scheme_and_the_width(visit: Open) -> None:
    opened = visit("seven", color_scheme="light")
    bars = opened.charts()[0].locator(".mark-rect path[aria-label]")
    blue = bars.last.get_attribute("fill")
    assert blue in DARK
    opened.page.emulate_media(color_scheme="dark")
    opened.page.wait_for_function(f"() => document.querySelector('.chart').innerHTML.includes('{DARK[blue]}')")
    opened.page.set_viewport_size({"width": 600, "height": 900})
    opened.page.wait_for_function("() => document.querySelector('.chart svg').getBoundingClientRect().width < 600")
    opened.page.wait_for_timeout(1500)
    assert opened.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_without_script_the_tables_are_there(browser: Browser, files: dict[str, Path]) -> None:
    context = browser.new_context(java_script_enabled=False)
    opened = context.new_page()
    opened.goto(files["seven"].as_uri())
    assert "The charts need JavaScript" in opened.locator("body").inner_text()
    assert opened.locator("table").count() > 3
    block = opened.locator(".blocks details").nth(2)
    block.locator("summary").click()
    assert block.get_by_text("reason 2").is_visible()
    context.close()
