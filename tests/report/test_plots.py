"""Charts: ticks, places of marks and labels with known answers, on pages and in files; safe with any value and text."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
from compressor.report.figures import draw, draw_frontier
from compressor.report.layout import LARGEST_DOT, LEAST_DOT, LIGHT, RAMPS, SHAPES, blend, lay_out, settle, styles
from compressor.report.plots import plot
from compressor.report.scales import Scale, figure, fit, ticks
from test_page import HOSTILE, Document

from compressor.report import plots
from compressor.report.charts import Axis, Chart, Point, Series

NAN, INF = math.nan, math.inf
X, Y = Axis("x"), Axis("y")


def chart(*series: Series, x: Axis = X, y: Axis = Y, **more: Any) -> Chart:
    return Chart(name="chart", title="A chart", x=x, y=y, series=series, **more)


def dots(*pairs: tuple[float, float], **more: Any) -> Series:
    return Series("dots", tuple(Point(x, y) for x, y in pairs), kind="dots", **more)


def line(*ys: float, name: str = "line", **more: Any) -> Series:
    return Series(name, tuple(Point(x, y) for x, y in enumerate(ys)), **more)


def found(drawn: Chart, what: str, value: str = "") -> list[dict[str, str | None]]:
    """Elements with an attribute, or of a class."""
    tags = Document(plot(drawn)).tags
    return [a for _, a in tags if (value in str(a.get(what, "")).split() if value else what in a)]


def texts(scale: Scale, room: float = 470, level: bool = True, whole: bool = False) -> list[str]:
    return [tick.text for tick in ticks(scale, whole, room, level)]


# ticks


@pytest.mark.parametrize(
    ("scale", "wanted"),
    [
        (Scale(0, 1), "0 0.1 0.2 0.3 0.4 0.5 0.6 0.7 0.8 0.9 1.0"),
        (Scale(0, 29.5), "0 2 4 6 8 10 12 14 16 18 20 22 24 26 28"),
        (Scale(-0.5, 0.5), "−0.5 −0.4 −0.3 −0.2 −0.1 0 0.1 0.2 0.3 0.4 0.5"),
        (Scale(0, 1.2e6), "0 0.2M 0.4M 0.6M 0.8M 1.0M 1.2M"),
        (Scale(12_345.6, 12_346.0), "12,345.6 12,345.7 12,345.8 12,345.9 12,346.0"),
        (Scale(0, 45_000), "0 5k 10k 15k 20k 25k 30k 35k 40k 45k"),
        (Scale(0, 3e-6), "0 5·10⁻⁷ 10⁻⁶ 1.5·10⁻⁶ 2·10⁻⁶ 2.5·10⁻⁶ 3·10⁻⁶"),
        (Scale(-1e299, 1e299), "−10²⁹⁹ −5·10²⁹⁸ 0 5·10²⁹⁸ 10²⁹⁹"),
        (Scale(0, 2, log=True), "1 2 5 10 20 50 100"),
        (Scale(-3.05, -0.95, log=True), "0.001 0.002 0.005 0.01 0.02 0.05 0.1"),
        (Scale(0, 5, log=True), "1 10 100 1000 10k 100k"),
        (Scale(-8, 0, log=True), "10⁻⁸ 10⁻⁷ 10⁻⁶ 10⁻⁵ 10⁻⁴ 10⁻³ 10⁻² 10⁻¹ 10⁰"),
        (Scale(-299, 299, log=True), "10⁻²⁰⁰ 10⁻¹⁰⁰ 10⁰ 10¹⁰⁰ 10²⁰⁰"),
        (Scale(math.log10(1.1), math.log10(1.9), log=True), "1.1 1.2 1.3 1.4 1.5 1.6 1.7 1.8 1.9"),
    ],
)
def test_ticks_are_round_and_fit(scale: Scale, wanted: str) -> None:
    assert texts(scale) == wanted.split()


def test_fewer_ticks_on_a_phone() -> None:
    assert texts(Scale(0, 29.5), room=240) == ["0", "5", "10", "15", "20", "25"]
    assert texts(Scale(0, 2, log=True), room=120) == ["1", "10", "100"]


def test_ticks_at_whole_numbers_only() -> None:
    assert texts(Scale(-0.1, 2.1), whole=True) == ["0", "1", "2"]
    assert texts(Scale(-0.5, 1, log=True), whole=True) == ["1", "2", "5", "10"]
    assert texts(Scale(0.2, 0.8), whole=True) == []


@pytest.mark.parametrize("low", [0.0, -3.7, 1e-9, 12345.678, -1e12])
@pytest.mark.parametrize("size", [1e-6, 0.37, 9.99, 1e7, 1e200])
def test_letters_of_ticks_never_touch(low: float, size: float) -> None:
    for scale in (fit(X, [low, low + size]), Scale(-min(size, 200), min(abs(low), 200) + 0.1, log=True)):
        shown = ticks(scale, False, 240, True)
        assert all(0 <= tick.at <= 1 for tick in shown)
        assert len(shown) >= 2
        for a, b in pairwise(shown):
            assert 240 * (b.at - a.at) >= 7 * (len(a.text) + len(b.text)) / 2


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (3, "3"),
        (-2.0, "−2"),
        (0.123456, "0.1235"),
        (1234.56, "1,234.6"),
        (3.2e-5, "3.2·10⁻⁵"),
        (1e20, "10²⁰"),
        (0, "0"),
    ],
)
def test_numbers_are_told_with_four_digits(value: float, wanted: str) -> None:
    assert figure(value) == wanted


# places


def test_marks_are_where_their_values_are() -> None:
    drawn = chart(dots((5, 25), (10, 100), (0, 0)), x=Axis("x", limits=(0, 10)), y=Axis("y", limits=(0, 100)))
    assert [(a["x"], a["y"]) for a in found(drawn, "data-at")] == [
        *(("50.00%", "75.00%"), ("100.00%", "0.00%"), ("0.00%", "100.00%"))
    ]


def test_marks_on_logarithmic_axes() -> None:
    axis = Axis("a", log=True, limits=(0.01, 100))
    marks = found(chart(dots((1, 0.1), (0.01, 10), (10, -3), (10, 0)), x=axis, y=axis), "data-at")
    assert [a["data-at"] for a in marks] == ["50.00 75.00", "0.00 25.00", "75.00 100.00", "75.00 100.00"]
    assert [a["class"] for a in marks] == ["mark", "mark", "mark out", "mark out"]


def test_marks_beyond_the_axes_are_hollow_at_their_end() -> None:
    limited = Axis("y", limits=(0, 1))
    assert [(a["y"], a["class"]) for a in found(chart(dots((0, 9), (1, 0.5)), y=limited), "data-at")] == [
        *(("0.00%", "mark out"), ("50.00%", "mark"))
    ]
    cut = chart(line(0.5, 9, 0.5), y=limited)  # but a line is cut there, and goes where it went
    assert len(found(cut, "data-at")) == 2
    assert found(cut, "class", "cut")
    assert "L50.00 -800.00L" in plot(cut)


def test_a_gap_in_a_line() -> None:
    drawn = chart(Series("line", tuple(Point(x, y, y - 1, y + 1) for x, y in enumerate([1.0, 2, NAN, 4, 5, INF, 7]))))
    (path,) = found(drawn, "class", "line")
    assert str(path["d"]).count("M") == 2
    assert len(found(drawn, "class", "band")) == 2
    assert len(found(drawn, "data-at")) == 5


def test_a_point_alone_is_seen_even_in_a_line_without_marks() -> None:
    ys = [1.0] * 60
    ys[30] = ys[32] = NAN
    marks = found(chart(line(*ys)), "data-at")
    assert [k for k, mark in enumerate(marks) if mark["class"] == "mark"] == [30]
    assert len(marks) == 58


def test_bars_stand_on_zero() -> None:
    drawn = chart(Series("b", (Point(0, 4, 3, 5), Point(1, -1)), "bars"), y=Axis("y", limits=(-5, 5)))
    (up, down), (whisker,) = found(drawn, "data-at"), found(drawn, "class", "whisker")
    assert (up["y"], up["height"]) == ("10.00%", "40.00%")
    assert (down["y"], down["height"]) == ("50.00%", "10.00%")
    assert (whisker["y1"], whisker["y2"]) == ("0.00%", "20.00%")
    assert up["width"] == "36.36%"  # 0.8 of the distance, on an axis 0.6 of it longer at both ends
    assert up["x"] == "9.09%"


def test_bars_stand_on_the_lower_end_of_a_logarithmic_axis() -> None:
    drawn = chart(
        Series("b", (Point(0, 1), Point(1, 100), Point(2, 0)), "bars"), y=Axis("y", log=True, limits=(0.1, 100))
    )
    assert [(a["y"], a["height"]) for a in found(drawn, "data-at")] == [
        *(("66.67%", "33.33%"), ("0.00%", "100.00%"), ("100.00%", "0.00%"))
    ]
    least = lay_out(replace(drawn, y=Axis("y", log=True))).drawn[0].marks[0]
    assert least.y > 0.05  # the least bar is one that can be seen


def test_bars_of_several_series_stand_side_by_side() -> None:
    several = chart(*(Series(name, (Point(0, 1), Point(1, 2)), "bars") for name in "ab"))
    sides = sorted((float(str(a["x"])[:-1]), float(str(a["width"])[:-1])) for a in found(several, "data-at"))
    assert all(left + wide <= right + 0.02 for (left, wide), (right, _) in pairwise(sides))


def test_area_stands_for_size() -> None:
    sized = Series("s", tuple(Point(x, 1, size=size) for x, size in enumerate([100.0, 25.0, 1e-9, NAN, -4.0])), "dots")
    radii = [float(str(a["r"])) for a in found(chart(sized), "r")]
    assert radii == [LARGEST_DOT, LARGEST_DOT / 2, LEAST_DOT, LEAST_DOT, LEAST_DOT]
    for corners in SHAPES[1:]:
        twice = sum(a[0] * b[1] - b[0] * a[1] for a, b in pairwise([*corners, corners[0]]))
        assert abs(twice) / 2 == pytest.approx(math.pi, rel=0.003)


def test_the_diagonal_goes_from_corner_to_corner() -> None:
    log = Axis("a", log=True)
    (ends,) = found(chart(dots((0.1, 0.2), (3, 2)), x=log, y=log, diagonal=True), "class", "diagonal")
    assert [ends[k] for k in ("x1", "y1", "x2", "y2")] == ["0.00%", "100.00%", "100.00%", "0.00%"]
    assert not found(chart(dots((0.1, 0.2)), x=log, diagonal=True), "class", "diagonal")  # it is not a straight one


def test_axes_start_at_zero_only_when_that_is_near() -> None:
    assert fit(Y, [0.1, 10], ground=True).start == 0
    assert fit(Y, [9, 10], ground=True).start == pytest.approx(8.96)
    assert fit(Y, [9, 10], bars=True).start == 0
    assert fit(Y, [-9, -10], bars=True).stop == 0


# labels


def test_labels_turn_at_the_edge() -> None:
    at = Series("s", (Point(1, 1, label="right"), Point(0, 1, label="left")), "dots")
    left, right = sorted(settle(lay_out(chart(at)), (240,), 260), key=lambda label: label.mark.x)
    assert (left.anchor, right.anchor) == ("start", "end")


def crowd(alarm: bool) -> Series:
    return Series("s", tuple(Point(k / 100, k / 100, label=f"block {k}") for k in range(40)), "dots", alarm=alarm)


def test_labels_do_not_cover_each_other() -> None:
    layout = lay_out(chart(crowd(alarm=False), dots((0, 0), (4, 4))))
    labels = settle(layout, (470,), 260)
    assert 1 <= len(labels) < 40
    boxes = []
    for label in labels:
        x, y = 470 * label.mark.x + label.dx, 260 * (1 - label.mark.y) + label.dy
        left = x - {"start": 0, "middle": 0.5, "end": 1}[label.anchor] * 7 * len(label.text)
        boxes.append((left, y - 9, left + 7 * len(label.text), y + 2))
    for one, two in combinations(boxes, 2):
        assert one[2] <= two[0] or two[2] <= one[0] or one[3] <= two[1] or two[3] <= one[1]


def test_labels_of_alarms_are_never_left_out() -> None:
    layout = lay_out(chart(crowd(alarm=True), dots((0, 0), (4, 4))))
    assert len(settle(layout, (240, 450), 260)) == 40


# how series are told apart


def test_series_differ_in_more_than_colour() -> None:
    for kind in ("line", "dots", "bars"):
        looks = styles(chart(*(Series(str(k), (Point(0, 1),), kind) for k in range(4))))
        assert len({(look.shape, look.dash, look.fill) for look in looks}) == 4
    looks = styles(chart(*(line(*range(60), name=str(k)) for k in range(4))))
    assert len({look.dash for look in looks}) == 4
    looks = styles(chart(*(line(1, 2, name=str(k)) for k in range(14))))
    assert len({(look.colour, look.dash) for look in looks}) == 14
    looks = styles(chart(line(1), line(1), line(1, alarm=True)))
    assert [look.colour for look in looks] == [0, 2, None]
    assert looks[2].shape not in {look.shape for look in looks[:2]}


def test_a_row_of_series_is_a_gradient_with_one_legend() -> None:
    rows = [Series(f"block {k}", (Point(1, k, block=k), Point(2, k, block=k)), shade=k / 29) for k in range(30)]
    drawn = chart(*rows, shades=("block 0", "block 29"))
    document = Document(plot(drawn))
    assert "button" not in document.names()
    assert document.text("span") == "block 0block 29"
    groups = [a["style"] for _, a in document.tags if a.get("class") == "shade"]
    assert groups[0] == f"--l:{RAMPS[0][0]};--d:{RAMPS[1][0]}"
    assert groups[-1] == f"--l:{RAMPS[0][-1]};--d:{RAMPS[1][-1]}"
    assert len(set(groups)) == 30
    assert [a["data-block"] for a in found(drawn, "class", "line")] == [str(k) for k in range(30)]
    assert blend(NAN, RAMPS[0]) == RAMPS[0][0]


def test_the_legend_is_made_of_buttons() -> None:
    document = Document(plot(chart(line(1, 2, name="one"), line(2, 3, name="two"))))
    buttons = [a for tag, a in document.tags if tag == "button"]
    assert [(a["aria-pressed"], a["type"], a["data-series"]) for a in buttons] == [
        *(("true", "button", "0"), ("true", "button", "1"))
    ]
    assert document.text("button") == "onetwo"
    assert "button" not in Document(plot(chart(line(1, 2)))).names()


def test_what_is_said_about_a_mark() -> None:
    point = Point(3, 0.5, 0.4, 0.6)
    assert Document(plot(chart(Series("s", (point,))))).text("title") == "s\nx: 3\ny: 0.5 (0.4 … 0.6)"
    assert Document(plot(chart(Series("s", (replace(point, note="so"),))))).text("title") == "so"
    document = Document(plot(chart(line(1, 2, name="a"), caption="On 16,320 tokens.")))
    (picture,) = (a for _, a in document.tags if a.get("role") == "img")
    assert picture["aria-label"] == "A chart: y against x; a."
    assert document.text("figcaption") == "On 16,320 tokens."


# anything may be drawn

KINDS = ["line", "dots", "bars"]
DEGENERATE: dict[str, list[tuple[Any, Any]]] = {
    "nothing": [],
    "one": [(1, 1)],
    "zero": [(0, 0)],
    "two": [(0, 1), (1, 2)],
    "equal": [(5, 3), (5, 3), (5, 3)],
    "equal and tiny": [(5e-324, 5e-324)] * 2,
    "almost equal": [(1, 1), (1 + 1e-16, 1 + 1e-15)],
    "huge": [(-1e299, 1e299), (1e299, -1e299)],
    "wide": [(1e-300, 1e-300), (1e299, 1e299)],
    "negative": [(-1, -2), (-3, -4)],
    "broken": [(NAN, 1), (1, NAN), (INF, 2), (2, -INF), (None, 3), (3, None), (4, 10**400), ("4", "5")],
    "mixed": [(1, 2), (2, NAN), (-1, 3), (0, -4)],
}
AXES = [Axis("a"), Axis("a", log=True), Axis("a", whole=True), Axis("a", log=True, whole=True)]
AXES += [
    Axis("a", limits=(0, 1)),
    Axis("a", log=True, limits=(0, 1)),
    Axis("a", limits=(1, 1)),
    Axis("a", limits=(NAN, 2)),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pairs", DEGENERATE.values(), ids=DEGENERATE)
def test_no_value_breaks_a_chart(pairs: list[tuple[Any, Any]], kind: str) -> None:
    points = tuple(Point(x, y, y, NAN, size=y, label="l", block=1) for x, y in pairs)
    for axis in AXES:
        for other in (axis, Axis("b")):
            drawn = chart(
                Series("s", points, kind), Series("t", points[:1], kind, alarm=True), x=axis, y=other, diagonal=True
            )
            document = Document(plot(drawn))
            for tag, attributes in document.tags:
                places = " ".join(str(v) for k, v in attributes.items() if k not in ("class", "aria-label"))
                assert not re.search(r"\b(nan|inf)\b|e[+-]?\d", places), (tag, attributes)
    if pairs is DEGENERATE["broken"]:
        assert not [a for _, a in document.tags if "data-at" in a]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("pairs", DEGENERATE.values(), ids=DEGENERATE)
def test_no_value_breaks_a_file(pairs: list[tuple[Any, Any]], tmp_path: Path) -> None:
    points = tuple(Point(x, y, y, NAN, size=y, label="l") for x, y in pairs)
    for axis in AXES[:2]:
        series = (Series(kind, points, kind) for kind in KINDS)
        for file in draw(chart(*series, x=axis, y=axis), tmp_path):
            assert Path(file).stat().st_size > 1000


# files and hostile text


def everything() -> Chart:
    points = tuple(Point(x, 1 + x, x, 3 + x, size=1 + x, label=f"l{x}", block=x) for x in range(3))
    series = [Series(kind, points, kind) for kind in KINDS]
    return chart(
        *series,
        Series("shaded", points, shade=0.4),
        Series("no", points, "dots", alarm=True),
        shades=("a", "b"),
        caption="C. " * 60,
    )


def hostile_chart() -> Chart:
    words = f"{HOSTILE} $x_1$ \\frac $unclosed ]]> -->\n\t_first"
    points = tuple(Point(x, 1 + x, label=words, note=words) for x in range(3))
    series = tuple(Series(words, points, kind) for kind in KINDS)
    return Chart("chart", words, Axis(words), Axis(words), series, caption=words, shades=(words, words))


def test_hostile_text_is_only_text_on_a_page() -> None:
    calm, attacked = Document(plot(everything())), plot(hostile_chart())
    attacked.encode("utf-8")
    assert "<script" not in attacked
    assert "\x00" not in attacked
    document = Document(attacked)
    assert set(document.names()) <= set(calm.names())
    assert {name for _, a in document.tags for name in a} <= {name for _, a in calm.tags for name in a}
    for tag in ("p", "button", "div", "span", "title", "text", "figcaption"):
        assert "<script>" in document.text(tag), tag


@pytest.mark.filterwarnings("error")
def test_hostile_text_is_only_text_in_a_file(tmp_path: Path) -> None:
    _, file = draw(hostile_chart(), tmp_path)
    tree = ET.parse(file)
    said = [text for node in tree.iter() if node.tag.endswith("text") and (text := "".join(node.itertext()))]
    assert not [node for node in tree.iter() if node.tag.endswith("script")]
    assert any("$x_1$ \\frac $unclosed" in text for text in said)
    assert sum("<script>" in text for text in said) >= 8  # title, axes, legend, gradient, caption: none was dropped


def test_files_are_the_same_to_the_byte(tmp_path: Path) -> None:
    first, second = (draw(everything(), tmp_path / name) for name in "ab")
    assert [Path(file).name for file in first] == ["chart.png", "chart.svg"]
    for one, two in zip(first, second, strict=True):
        assert Path(one).read_bytes() == Path(two).read_bytes()
    picture, text = Path(first[0]).read_bytes(), Path(first[1]).read_text(encoding="utf-8")
    assert picture.startswith(b"\x89PNG")
    assert not any(chunk in picture for chunk in (b"tEXt", b"iTXt", b"tIME", b"Software"))
    assert "<dc:date>" not in text
    assert LIGHT[0] in text
    assert "<text" in text


def test_settings_of_the_user_change_nothing(tmp_path: Path) -> None:
    import matplotlib

    before = draw(everything(), tmp_path / "a")
    with matplotlib.rc_context({"font.size": 20.0, "axes.grid": False, "text.parse_math": True}):
        after = draw(everything(), tmp_path / "b")
        assert matplotlib.rcParams["font.size"] == 20.0
    assert [Path(file).read_bytes() for file in before] == [Path(file).read_bytes() for file in after]


def test_a_name_with_dots_keeps_them(tmp_path: Path) -> None:
    files = draw(replace(everything(), name="at-0.5"), tmp_path / "new")
    assert [Path(file).name for file in files] == ["at-0.5.png", "at-0.5.svg"]


def test_the_frontier_is_drawn_beside_the_plan(tmp_path: Path) -> None:
    text = {"delta": 0.5, "delta_ci95": [0.4, 0.6]}
    point = {"removed": 10, "removed_fraction": 0.1, "flops_ratio": 1.1, "asked": "2%", "texts": {"text": text}}
    files = draw_frontier([point, {**point, "removed": 0}], tmp_path / "plan.v1.json", "org/$model$", 256)
    assert files == [str(tmp_path / "plan.v1.png"), str(tmp_path / "plan.v1.svg")]
    said = Path(files[1]).read_text(encoding="utf-8")
    for words in ("$model$", "budget 2%", "ΔPPL, windows of 256 tokens", "removed, %", "FLOPs per token"):
        assert words in said
    assert draw_frontier([], tmp_path / "none.json", "", 256)


@pytest.mark.parametrize(
    "forbidden", ["innerHTML", "outerHTML", "eval", "Function(", "insertAdjacent", "</", "<!--", "http"]
)
def test_the_script_writes_text_only(forbidden: str) -> None:
    assert forbidden not in plots.SCRIPT


def test_colours_of_both_modes() -> None:
    light, dark = plots.CSS.split("prefers-color-scheme:dark", 1)
    names: Callable[[str], list[str]] = lambda css: re.findall(r"--(?:c\d|ramp):", css)  # noqa: E731
    assert names(light) == names(dark)
    assert len(names(light)) == 9
