"""Pages in a real browser: nothing fails or is fetched, and what is drawn answers to pointer, finger and keyboard."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from compressor.report.markup import Html, e, table
from compressor.report.plots import CSS as PLOT_CSS
from compressor.report.plots import SCRIPT, plot
from test_page import full, hostile

from compressor.report.charts import Axis, Chart, Point, Series
from compressor.report.page import CSS, POLICY, page

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ARGUMENTS = [
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--no-first-run", "--disable-quic"),
]
WIDE, PHONE = {"width": 1000, "height": 800}, {"width": 360, "height": 740}
BOXES = "(all) => all.map((one) => one.getBoundingClientRect().toJSON()).filter((box) => box.width > 0)"


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


def charts() -> list[Chart]:
    """One of each kind."""
    blocks = range(30)
    rank = Axis("rank", log=True, whole=True)
    nats = Axis("damage, nats per token", log=True)
    profile = [
        Series("held out", tuple(Point(k, 0.9 - k / 90, 0.85 - k / 90, 0.95 - k / 90, block=k) for k in blocks)),
        Series(
            "stream", tuple(Point(k, 0.7 - k / 99, note=f"stream of block {k}", block=k) for k in blocks), dashed=True
        ),
    ]
    bars = Series("bias only", tuple(Point(k, 0.001 * (k + 1), 0.0005, 0.05, block=k) for k in blocks), "bars")
    scatter = [
        Series(
            "blocks", tuple(Point(k / 30, 0.01 * (k + 1), size=k, label=str(k), block=k) for k in range(28)), "dots"
        ),
        Series("unsafe", (Point(0.95, 1, size=9, label="block 28", block=28),), "dots", alarm=True),
    ]
    ladder = [
        Series(f"block {b}", tuple(Point(r, (b + 1) / r, block=b) for r in (1, 4, 36, 144, 576)), shade=b / 29)
        for b in blocks
    ]
    overlay = [Series(f"plan {k}", tuple(Point(x, x**k) for x in range(9))) for k in (1, 2, 3)]
    return [
        Chart("profile", "Depth profile", Axis("block", whole=True), Axis("R²"), tuple(profile), caption="Bands."),
        Chart("bars", "Bars", Axis("block", whole=True), nats, (bars,)),
        Chart("scatter", "Scatter", Axis("R²"), nats, tuple(scatter), diagonal=True),
        Chart("ladder", "Ladder", rank, nats, tuple(ladder), shades=("block 0", "block 29")),
        Chart("overlay", "Overlay", Axis("removed, %"), Axis("ΔPPL"), tuple(overlay)),
    ]


def helper() -> str:
    rows = table("Blocks", "blocks", [{"index": k, "r2_lin": 0.5} for k in range(30)])
    meta = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    meta += f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><link rel="icon" href="data:,">'
    head = e("head", Html(meta), e("title", "charts"), e("style", Html(CSS + PLOT_CSS)))
    body = e("body", e("main", *map(plot, charts()), rows), e("script", Html(SCRIPT)))
    return f"<!DOCTYPE html>\n{e('html', head, body, lang='en')}\n"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, profiled: Path, compressed: Path) -> dict[str, Path]:
    """Pages made from records, and those that a profile and a whole job really wrote."""
    directory = tmp_path_factory.mktemp("pages")
    made = {name: directory / f"{name}.html" for name in ("report", "hostile", "charts")}
    for file, text in zip(made.values(), (page(full()), page(hostile()), helper()), strict=True):
        file.write_text(text, encoding="utf-8")
    return {**made, "profile": profiled / "report.html", "job": compressed / "report.html"}


class Opened:
    """A page in the browser, and everything that it said and asked for."""

    def __init__(self, browser: Browser, file: Path, **how: Any) -> None:
        self.context = browser.new_context(**{"viewport": WIDE, **how})
        self.page: Page = self.context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(file.as_uri())

    def area(self, index: int) -> Any:
        found = self.page.locator(".area > svg").nth(index)
        found.scroll_into_view_if_needed()
        return found

    def point_at(self, index: int, x: float, y: float) -> None:
        """Move the pointer to a place of a plot, as shares from its top left corner."""
        box = self.area(index).bounding_box()
        self.page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"])

    def tip(self) -> str:
        tip = self.page.locator(".tip")
        return tip.inner_text() if tip.is_visible() else ""

    def lit(self) -> set[str | None]:
        return {one.get_attribute("data-block") for one in self.page.locator(".lit").all()}


@pytest.fixture
def opened(browser: Browser, files: dict[str, Path], request: pytest.FixtureRequest) -> Iterator[Opened]:
    how = dict(getattr(request, "param", {}))
    found = Opened(browser, files[how.pop("file", "charts")], **how)
    yield found
    assert [line for line in found.said if not line.startswith(("log", "info", "debug"))] == []
    assert {url for url in found.asked if not url.startswith("data:")} == {found.page.url}
    found.context.close()


def given(*ways: dict[str, Any]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("opened", ways, indirect=True, ids=lambda how: "-".join(map(str, how.values()))[:30])


@given({"file": "report"}, {"file": "hostile"}, {"file": "charts"}, {"file": "charts", "java_script_enabled": False})
def test_every_figure_is_there(opened: Opened) -> None:
    figures = opened.page.locator("figure.plot")
    # On the hostile page one block's number is words: it has no place over depth.
    wanted = {"charts": [60, 30, 29, 150, 27], "report": [4, 3], "hostile": [2, 3]}[Path(opened.page.url).stem]
    assert figures.count() == len(wanted)
    for figure, count in zip(figures.all(), wanted, strict=True):
        assert len(figure.locator(".mark[data-at]").all()) == count
        boxes = figure.locator(".mark[data-at]:not(.ghost) > *, rect.mark, .line").evaluate_all(BOXES)
        assert boxes


@given({"file": "profile"}, {"file": "job"}, {"file": "profile", "java_script_enabled": False})
def test_a_real_report_shows_its_plots(opened: Opened) -> None:
    """Nothing is said on the console, nothing is asked for (see `opened`), and every plot has marks."""
    figures = opened.page.locator("figure.plot")
    assert figures.count() >= (8 if opened.page.title().startswith("How linear") else 5)
    for figure in figures.all():
        assert figure.locator(".mark[data-at]").count() >= 3
        assert figure.locator("figcaption").inner_text()
    assert opened.page.locator("h1").count() == 1


@given({"file": "charts", "java_script_enabled": False})
def test_without_script_the_marks_tell_by_themselves(opened: Opened) -> None:
    assert "stream of block 7" in opened.page.locator("figure").first.locator("title").all_text_contents()


def test_hovering_tells_about_the_nearest_mark(opened: Opened) -> None:
    opened.point_at(0, 0.51, 0.99)
    assert opened.tip() == "stream of block 15"
    opened.point_at(0, 0.51, 0.01)
    assert opened.tip() == "held out\nblock: 15\nR²: 0.7333 (0.6833 … 0.7833)"
    tip, view = opened.page.locator(".tip").bounding_box(), opened.page.viewport_size
    assert tip
    assert view
    assert tip["x"] >= 0
    assert tip["x"] + tip["width"] <= view["width"]
    opened.page.mouse.move(2, 2)
    assert opened.tip() == ""


def test_dots_are_told_only_from_near(opened: Opened) -> None:
    mark = opened.page.locator("[data-kind=dots][data-block='28']")
    mark.scroll_into_view_if_needed()
    opened.point_at(2, *(float(part) / 100 for part in str(mark.get_attribute("data-at")).split()))
    assert opened.tip().startswith("unsafe\nR²: 0.95\n")
    opened.point_at(2, 0.99, 0.99)
    assert opened.tip() == ""


def test_a_block_is_lit_everywhere(opened: Opened) -> None:
    opened.point_at(0, 0.02, 0.5)
    assert opened.lit() == {"0"}
    assert opened.page.locator("tr.lit").count() == 1
    assert opened.page.locator("figure:has(.lit)").count() == 4
    assert opened.page.locator(".line.lit").count() == 1
    opened.page.keyboard.press("Escape")
    assert opened.lit() == set()
    assert opened.tip() == ""
    opened.page.locator("tr[data-block='7']").hover()
    assert opened.lit() == {"7"}


def test_a_button_of_the_legend_hides_its_series(opened: Opened) -> None:
    button = opened.page.get_by_role("button", name="stream")
    lines = opened.page.locator("figure").first.locator("svg [data-series='1'] .line")
    assert lines.is_visible()
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert not lines.is_visible()
    opened.point_at(0, 0.5, 0.99)
    assert opened.tip().startswith("held out")
    button.focus()
    opened.page.keyboard.press("Space")
    assert button.get_attribute("aria-pressed") == "true"
    assert lines.is_visible()


def test_the_keyboard_goes_through_the_marks(opened: Opened) -> None:
    opened.page.get_by_role("button", name="stream").focus()
    press = opened.page.keyboard.press
    press("Tab")
    assert opened.tip().startswith("held out\nblock: 0\n")
    press("ArrowRight")
    press("ArrowRight")
    assert opened.tip().startswith("held out\nblock: 2\n")
    press("ArrowDown")
    assert opened.tip() == "stream of block 2"
    press("End")
    assert opened.tip() == "stream of block 29"
    press("ArrowRight")
    press("Home")
    assert opened.tip() == "stream of block 0"
    press("ArrowUp")
    press("ArrowLeft")
    assert opened.tip().startswith("held out\nblock: 0\n")
    outline = opened.area(0).evaluate("(one) => getComputedStyle(one).outlineStyle")
    assert outline == "solid"
    press("Escape")
    assert opened.tip() == ""
    press("Tab")
    assert opened.lit() == {"0"}  # of the next chart


@given({"viewport": PHONE, "has_touch": True, "is_mobile": True})
def test_a_tap_tells_until_the_next(opened: Opened) -> None:
    box = opened.area(0).bounding_box()
    opened.page.touchscreen.tap(box["x"] + 3, box["y"] + box["height"] - 3)
    assert opened.tip() == "stream of block 0"
    tip = opened.page.locator(".tip").bounding_box()
    assert tip
    assert tip["x"] >= 0
    opened.page.locator("figcaption").first.tap()
    assert opened.tip() == ""


@given(
    *(
        {"file": file, "viewport": size}
        for file in ("report", "hostile", "charts", "profile", "job")
        for size in (PHONE, WIDE)
    ),
    {"file": "charts", "viewport": {"width": 620, "height": 700}},
)
def test_it_fits_and_letters_do_not_overlap(opened: Opened) -> None:
    assert opened.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    for figure in opened.page.locator("figure").all():
        boxes = figure.locator("text.tick").evaluate_all(BOXES)
        assert len(boxes) >= 4
        for one, two in combinations(boxes, 2):
            beside = one["right"] <= two["left"] or two["right"] <= one["left"]
            assert beside or one["bottom"] <= two["top"] or two["bottom"] <= one["top"], (one, two)
        assert min(box["left"] for box in boxes) >= 0
        assert max(box["right"] for box in boxes) <= opened.page.viewport_size["width"]  # type: ignore[index]
        sizes = figure.locator("text").evaluate_all("(all) => all.map((one) => getComputedStyle(one).fontSize)")
        assert set(sizes) == {"12px"}


def light(colour: str) -> float:
    """Relative luminance of `rgb(…)`."""
    shares = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, two: str) -> float:
    darker, lighter = sorted((light(one), light(two)))
    return (lighter + 0.05) / (darker + 0.05)


@given({"color_scheme": "dark"}, {"color_scheme": "light"})
def test_everything_can_be_read_in_light_and_dark(opened: Opened) -> None:
    ground = opened.page.locator("body").evaluate("(one) => getComputedStyle(one).backgroundColor")
    assert (light(ground) < 0.05) == opened.page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")

    def seen(what: str, how: str) -> set[str]:
        return set(opened.page.locator(what).evaluate_all(f"(all) => all.map((one) => getComputedStyle(one).{how})"))

    for letters in seen("text.tick, .label text", "fill") | seen(".up, .along, figcaption, .keys button", "color"):
        assert contrast(letters, ground) >= 4.5
    for mark in seen(".line", "stroke") | seen("rect.mark, svg.mark > *", "fill"):
        assert contrast(mark, ground) >= 2.7, mark
