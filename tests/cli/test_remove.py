"""`--remove`: a size instead of a budget, from the command line to the record, the card, the page and the gate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Compress, Refused

SIZE = ["--objective", "size", "--generate", "0", "--no-swap"]


@pytest.fixture(scope="module")
def removed(compress: Compress, models: Path, options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `compress MODEL --remove 8% --out DIR` wrote; no test may change it."""
    out = tmp_path_factory.mktemp("removed") / "small"
    done = compress(models / "gpt2", *options, *SIZE, "--remove", "8%", "--out", out)
    assert done.code == 0, done.err
    assert "; no limit on perplexity was asked for" in done.out
    assert "asked: at least 8 % (" in done.out
    assert "inf" not in done.out.replace("info", "")
    return out


def read(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "compression.json").read_text(encoding="utf-8")))


def test_the_record_says_what_was_asked_and_what_went(removed: Path) -> None:
    record = read(removed)
    sizes, budget = record["parameters"], record["budget"]
    least = -(-8 * sizes["before"] // 100)
    assert budget["max_dppl"] is None
    assert budget["remove"] == {"asked": "8%", "parameters": least}
    assert sizes["removed"] >= least
    assert sizes["removed_fraction"] >= 0.08
    text = record["texts"]["text"]
    assert (text["max_dppl"], text["passed"], text["asked"]) == (None, None, "no limit")
    assert [check["name"] for check in record["checks"]] == ["parameters removed"]
    assert record["passed"] is True
    assert record["verification_looks"] == 1
    assert record["recipe"]["remove"] == "8%"
    assert "max_dppl" not in record["recipe"]
    assert not any(trial["removed"] < least for trial in record["trials"] if trial["texts"] == record["selection"])


def test_card_and_page_say_so_too(removed: Path) -> None:
    least = read(removed)["budget"]["remove"]["parameters"]
    card = (removed / "README.md").read_text(encoding="utf-8").replace("\\", "")
    assert f"asked: at least 8 % ({least:,} parameters)" in card
    assert "Budget: no limit on perplexity was asked for; the upper end of the rise at 95% is" in card
    page = (removed / "report.html").read_text(encoding="utf-8")
    assert f"(asked: at least 8 % ({least:,} parameters))" in page
    assert "no limit was asked for" in page
    assert ">no limit</td>" in page
    for text in (card, page):
        assert "+inf" not in text
        assert "∞" not in text


def test_the_gate_needs_a_limit_or_a_baseline(
    removed: Path, compress: Compress, refused: Refused, tmp_path: Path
) -> None:
    message = refused("check", removed)
    assert "was made for a size (--remove 8%), with no limit on perplexity to check" in message
    assert "--max-dppl 1.0, or compare with --baseline FILE" in message
    done = compress("check", removed, "--max-dppl", "90%")
    assert done.code == 0, done.err
    assert "parameters removed" in done.out
    baseline, junit = tmp_path / "baseline.json", tmp_path / "junit.xml"
    written = compress("check", removed, "--baseline", baseline, "--update-baseline")
    assert written.code == 0, written.err
    assert "no limit" in written.out
    done = compress("check", removed, "--baseline", baseline, "--junit", junit, "--report", tmp_path / "page.html")
    assert done.code == 0, done.err
    assert "baseline perplexity text compressed" in done.out
    assert "inf" not in junit.read_text(encoding="utf-8")
    assert "no limit was asked for" in (tmp_path / "page.html").read_text(encoding="utf-8")
    info = compress("info", removed)
    assert info.code == 0, info.err
    assert "asked: at least 8 % (" in info.out


def test_the_recipe_of_the_result_gives_the_same_weights(removed: Path, compress: Compress, tmp_path: Path) -> None:
    done = compress("run", "--recipe", removed / "recipe.yaml", "--out", tmp_path / "again")
    assert done.code == 0, done.err
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (removed / "model.safetensors").read_bytes()


def test_both_must_hold(compress: Compress, models: Path, options: list[str], tmp_path: Path) -> None:
    both = [models / "gpt2", *options, *SIZE, "--branches", "ffn", "--remove", "8%"]
    done = compress(*both, "--max-dppl", "1e-9", "--out", tmp_path / "out")
    assert done.code == 1
    assert len(done.errors) == 1
    assert "--remove 8% is more than the budgets allow" in done.err
    assert "perplexity gave way" in done.err
    assert "--max-dppl 1e-09 allows" in done.err
    assert not (tmp_path / "out").exists()
    done = compress(*both, "--max-dppl", "90%", "--out", tmp_path / "out")
    assert done.code == 0, done.err
    record = read(tmp_path / "out")
    assert record["budget"]["max_dppl"] > 0
    assert [check["name"] for check in record["checks"]] == ["perplexity text", "parameters removed"]


def test_the_frontier_of_several_sizes(compress: Compress, models: Path, options: list[str], tmp_path: Path) -> None:
    command = ["plan", models / "llama", "--remove", "2%", "5%", "4000", *options, "--objective", "size"]
    done = compress(*command, "--out", tmp_path / "plan.json")
    assert done.code == 0, done.err
    assert "at least" in done.out
    assert "no limit on perplexity" in done.out
    points = json.loads((tmp_path / "plan.json").read_text())["frontier"]
    assert [point["asked"] for point in points] == ["2%", "5%", "4000"]
    assert [Path(point["file"]).name for point in points] == ["plan-2pct.json", "plan-5pct.json", "plan-4000.json"]
    assert all(point["removed"] >= point["remove"]["parameters"] for point in points)
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert "at least 5%" in (tmp_path / "plan.svg").read_text()
    done = compress("apply", models / "llama", tmp_path / "plan-5pct.json", "--out", tmp_path / "out")
    assert done.code == 0, done.err
    record = read(tmp_path / "out")
    assert record["parameters"]["removed"] == points[1]["removed"]
    assert record["budget"]["remove"]["asked"] == "5%"


def test_a_plan_that_was_cut_down_is_not_passed_off_as_its_size(
    compress: Compress, models: Path, options: list[str], tmp_path: Path
) -> None:
    plan = tmp_path / "plan.json"
    asked = ["--remove", "5%", "--branches", "ffn", "--objective", "size"]
    done = compress("plan", models / "llama", *asked, *options, "--out", plan)
    assert done.code == 0, done.err
    values = json.loads(plan.read_text())
    replaced = [block for block in values["blocks"] if block["replacement"]["kind"] != "keep"]
    replaced[0]["replacement"] = {"kind": "pruned", "rank": 0, "neurons": 47}
    for block in replaced[1:]:
        block["replacement"] = {"kind": "keep", "rank": None, "neurons": None}
    plan.write_text(json.dumps(values))
    done = compress("apply", models / "llama", plan, "--out", tmp_path / "out")
    assert done.code == 1, done.err
    assert "less than its --remove 5%" in done.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("0", "--remove must be above 0 and below 100 % of the parameters, got 0; try --remove 10%"),
        ("0%", "above 0 and below 100 %"),
        ("100%", "above 0 and below 100 %"),
        ("-5%", "above 0 and below 100 %"),
        ("nan", "above 0 and below 100 %"),
        ("much", "--remove must be a percentage or a number of parameters, got 'much'; try --remove 10%"),
        ("0.1", "--remove 0.1 is no whole number of parameters; a share is written --remove 10%"),
        ("99%", "replaceable blocks could free at most "),
        ("1000000000", "replaceable blocks could free at most "),
    ],
)
@pytest.mark.parametrize("command", ["run", "plan"])
def test_no_such_size(refused: Refused, models: Path, options: list[str], command: str, value: str, says: str) -> None:
    assert says in refused(command, models / "gpt2", *options, f"--remove={value}", "--out", "out")


def test_several_sizes_are_for_plans(refused: Refused, models: Path, options: list[str]) -> None:
    assert "--remove is given twice" in refused(models / "gpt2", *options, "--remove", "2%", "5%", "--out", "out")
    both = ["--remove", "2%", "5%", "--max-dppl", "1", "2"]
    assert "both have several values" in refused("plan", models / "gpt2", *options, *both, "--out", "plan.json")
    several = refused("plan", models / "gpt2", *options, "--remove", "2%", "99%", "--out", "plan.json")
    assert "--remove 99% is" in several  # before the first is searched for
