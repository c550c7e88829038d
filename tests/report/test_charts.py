"""Charts: what each shows, when it is left out, and that no name and no figure of a stranger's record breaks one."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from report.records import (
    HOSTILE,
    assessment,
    assessment_values,
    change,
    hostile_assessment,
    hostile_profile,
    mix_figures,
    profile,
    profile_set,
    profile_values,
)

from compressor.report.chart_style import CONFIG, DARK, LARGEST, Chart
from compressor.report.charts import charts_of, draw, draw_frontier
from compressor.report.record import ProfileSet, Record
from compressor.report.search_parts import FrontierPoint

BROKEN = (math.nan, math.inf, -math.inf, 1e308, -1e308, 5e-324, 0.0, -1.0, 1e14)
OF_ASSESSMENT = ["blocks", "budgets", "depth", "swap", "regimes", "ladder", "agreement", "frequency", "position"]
OF_PROFILE = ["blocks", "depth", "swap", "regimes", "ladder", "corpora", "residual", "trained", "cross"]


def charts(record: Record | ProfileSet) -> dict[str, Chart]:
    return {chart.name: chart for chart in charts_of(record)}


def walk(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every value in a specification with the keys above it."""
    if isinstance(value, dict):
        for key, entry in value.items():
            yield from walk(entry, (*path, key))
    elif isinstance(value, list):
        for entry in value:
            yield from walk(entry, path)
    else:
        yield path, value


def rows(chart: Chart) -> list[dict[str, Any]]:
    """All data of a chart."""
    found: list[dict[str, Any]] = []

    def look(value: Any) -> None:
        if isinstance(value, dict):
            if isinstance(value.get("values"), list) and all(isinstance(row, dict) for row in value["values"]):
                found.extend(value["values"])
            for entry in value.values():
                look(entry)
        elif isinstance(value, list):
            for entry in value:
                look(entry)

    look(dict(chart.spec))
    return found


def notes(chart: Chart) -> list[str]:
    return [row["note"] for row in rows(chart) if "note" in row]


def test_every_chart_that_the_record_has() -> None:
    assert list(charts(assessment())) == OF_ASSESSMENT
    assert list(charts(profile())) == OF_PROFILE
    several = charts(profile_set())
    assert list(several) == ["models", *(f"{k}-{name}" for k in (1, 2) for name in OF_PROFILE)]


@pytest.mark.parametrize(
    ("part", "lost"),
    [
        ("blocks", {"blocks", "depth", "swap", "regimes", "ladder", "residual", "trained", "cross"}),
        ("swap", {"swap"}),
        ("probes", {"residual", "trained"}),
        ("corpora", {"corpora"}),
        ("rows", set()),
        ("cross", set()),  # what each block was crossed with is still there
    ],
)
def test_a_chart_is_left_out_where_the_record_lacks_it(part: str, lost: set[str]) -> None:
    values = profile_values(4)
    del values[part]
    assert set(OF_PROFILE) - set(charts(Record.model_validate(values))) == lost


def test_captions_say_what_was_measured_on_how_much() -> None:
    for chart in (*charts_of(assessment()), *charts_of(profile()), *charts_of(profile_set())):
        assert "256" in chart.caption, chart.name
        assert "tokens" in chart.caption, chart.name
        assert chart.title
        assert chart.alt.startswith(chart.title)
        assert chart.spec["description"] == chart.alt


def test_the_first_picture_shows_parameters_and_linearity_of_every_block() -> None:
    for count in (1, 7, 30):
        chart = charts(assessment(count))["blocks"]
        sizes = [row for row in rows(chart) if "which" in row]
        assert [row["size"] for row in sizes if row["which"] == "before"] == [295872] * count
        assert [row["size"] for row in sizes if row["which"] == "after"].count(166464) == count - (count > 2)
        assert [row["index"] for row in rows(chart) if "r2" in row] == list(range(count))
    assert "block 2 · unsafe" in notes(chart)[2]
    assert "parameters 295,872 → 166,464" in notes(chart)[0]


def test_the_first_picture_of_a_profile_shows_what_a_block_costs() -> None:
    shown = rows(charts(profile(5))["blocks"])
    assert [row["delta"] for row in shown if "delta" in row] == pytest.approx([0.4, 0.5, 0.6, 0.7, 0.8])
    values = profile_values(5) | {"swap": None}
    for block in values["blocks"]:
        del block["swap"]
    without = charts(Record.model_validate(values))
    assert {row["which"] for row in rows(without["blocks"]) if "which" in row} == {"before", "after"}


def test_budgets_are_drawn_in_their_own_units() -> None:
    values = assessment_values()
    values["tasks"]["riddles"] |= {"max_drop": 0.02, "passed": False}
    shown = rows(charts(Record.model_validate(values))["budgets"])
    assert [(row["name"].split(":")[0], row["budget"], row["state"]) for row in shown] == [
        ("perplexity, text", 1.0, "inside its budget"),
        ("KL, text", None, "no budget asked"),
        ("last_word, acc", None, "no budget asked"),
        ("riddles, acc", 0.02, "OUTSIDE its budget"),
    ]
    assert shown[0]["low"] < shown[0]["value"] < shown[0]["high"]


def test_bands_are_nats_per_token() -> None:
    chart = charts(assessment())["frequency"]
    assert [row["nats"] for row in rows(chart)] == [0.02, -0.01]
    assert [row["kind"] for row in rows(chart)] == ["lost", "gained"]
    assert "1,674,602" not in json.dumps(chart.spec)


def test_what_has_no_place_on_a_logarithmic_axis_is_hollow_at_its_end() -> None:
    shown = rows(charts(assessment())["agreement"])
    dots = [row for row in shown if "out" in row]
    assert [row["out"] for row in dots] == [False, False, True]
    assert dots[2]["y"] > 0
    assert "loss −0.001" in dots[2]["note"]
    values = profile_values(4)
    values["blocks"][1]["swap"] |= {"delta": -0.2}
    dots = [row for row in rows(charts(Record.model_validate(values))["swap"]) if "out" in row]
    assert [row["out"] for row in dots] == [False, True, False, False]
    assert all(row["delta"] > 0 for row in dots)


def test_outlier_blocks_are_named_and_drawn_above_the_others() -> None:
    dots = [row for row in rows(charts(profile(5))["regimes"]) if "kind" in row]
    assert (dots[-1]["kind"], dots[-1]["label"]) == ("unsafe blocks", "2")


def test_two_models_of_one_name_stay_two_lines() -> None:
    both = profile_set()
    same = both.model_copy(update={"profiles": [both.profiles[0]] * 2})
    assert {row["series"] for row in rows(charts(same)["models"])} == {"tiny-model", "tiny-model (2)"}


@pytest.mark.parametrize("figure", BROKEN)
@pytest.mark.parametrize("make", [assessment_values, profile_values])
def test_no_figure_breaks_a_specification(make: Any, figure: float) -> None:
    record = Record.model_validate(mix_figures(make(4), cycle([figure])))
    for chart in charts_of(record):
        json.dumps(chart.spec, allow_nan=False)
        for path, value in walk(dict(chart.spec)):
            assert not isinstance(value, float) or abs(value) <= 1.3 * LARGEST, (chart.name, path)


@pytest.mark.parametrize("make", [assessment_values, profile_values])
def test_no_figure_breaks_a_file(make: Any, tmp_path: Path) -> None:
    mixed = mix_figures(make(7), cycle((0.3, *BROKEN, 0.7, 12.0)))
    for block in mixed["blocks"]:
        block["params_before"] = 10**400
    found = charts_of(Record.model_validate(mixed))
    assert found
    for chart in found:
        png, svg = (Path(file) for file in draw(chart, tmp_path))
        assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        assert not {"NaN", "Infinity"} & set(svg.read_text(encoding="utf-8").replace(",", " ").split())


@pytest.mark.parametrize("make", [hostile_assessment, hostile_profile])
def test_names_are_data_and_never_part_of_a_formula(make: Any, tmp_path: Path) -> None:
    seen = False
    for chart in charts_of(make()):
        for path, value in walk({key: entry for key, entry in chart.spec.items() if key != "config"}):
            if isinstance(value, str) and "alert" in value:
                seen = True
                assert "\x1b" not in value
                assert "\x00" not in value
                # data, the order of names in a legend, and the description are plain text to Vega
                assert "values" in path or path[-1] == "domain" or path == ("description",), path
            assert path[-1] not in ("expr", "signal", "url", "href"), path
            assert path[-1] != "filter" or value in ("datum.out", "!datum.out")
        svg = ElementTree.parse(draw(chart, tmp_path)[1])
        assert not any("script" in str(node.tag) for node in svg.iter())
        assert not any(name.startswith("on") for node in svg.iter() for name in node.attrib)
    assert seen, "no hostile name came through: is it dropped?"
    assert "alert" in HOSTILE


def test_files_are_the_same_to_the_byte(tmp_path: Path) -> None:
    chart = charts(profile(5))["depth"]
    first, second = (draw(chart, tmp_path / name) for name in "ab")
    assert [Path(file).name for file in first] == ["depth.png", "depth.svg"]
    for one, two in zip(first, second, strict=True):
        assert Path(one).read_bytes() == Path(two).read_bytes()
    said = " ".join(" ".join(ElementTree.parse(first[1]).getroot().itertext()).split())
    assert "Linearity over depth" in said
    assert "windows of 256 tokens" in said
    assert "R² on held-out rows" in said


def test_every_colour_has_one_for_a_dark_page() -> None:
    found = {
        value
        for chart in (*charts_of(assessment()), *charts_of(profile()))
        for path, value in walk(dict(chart.spec))
        if isinstance(value, str) and value.startswith("#") and "values" not in path
    }
    assert found
    assert found <= set(DARK)
    assert CONFIG["background"] in found


def point(**more: Any) -> FrontierPoint:
    values = {"asked": "2%", "removed": 10, "removed_fraction": 0.1, "flops_ratio": 1.1, "texts": {"text": change(0.5)}}
    return FrontierPoint.model_validate({**values, **more})


def test_the_frontier_is_drawn_beside_the_plan(tmp_path: Path) -> None:
    points = [point(), point(removed=0), point(flops_ratio=0.0), point(removed_fraction=math.nan)]
    files = draw_frontier(points, tmp_path / "plan.v1.json", "org/$model$", 256)
    assert files == [str(tmp_path / "plan.v1.png"), str(tmp_path / "plan.v1.svg")]
    said = " ".join(ElementTree.parse(files[1]).getroot().itertext())
    for words in ("$model$", "budget 2%", "ΔPPL", "windows of 256 tokens", "removed, %", "FLOPs per token"):
        assert words in said
    assert all(Path(file).is_file() for file in draw_frontier([], tmp_path / "none.json", "", 256))
