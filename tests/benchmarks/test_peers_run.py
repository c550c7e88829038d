"""The whole command of benchmarks/peers.py on a tiny model: several texts, resumed, tables, refusals."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import peers
import pytest
import torch
from conftest import sentences
from peer_methods.tables import Point, cost_at, render
from zoo import tiny_model, tiny_tokenizer


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    tiny_model("llama").save_pretrained("model")
    tiny_tokenizer().save_pretrained("model")
    for name, words in (("seen.txt", 3000), ("other.txt", 1500)):
        Path(name).write_text(sentences(words), encoding="utf-8")
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, *more: str) -> Any:
    words = [
        "model",
        "--calibration",
        "seen.txt",
        "--text",
        "seen=seen.txt",
        "--text",
        "other=other.txt",
        "--out",
        "out",
    ]
    words += ["--seq-len", "32", "--calib-tokens", "1920", "--eval-tokens", "320", *more]
    monkeypatch.setattr(sys, "argv", ["peers.py", *words])
    peers.main()
    return json.loads(Path("out/peers.json").read_text())


def test_a_run_goes_on_where_it_was(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(monkeypatch, "--methods", "width", "--fractions", "2.5")
    assert [(p["method"], p["fraction"]) for p in first["points"]] == [("width", 0.025)]
    assert set(first["baseline"]) == set(first["points"][0]["perplexities"]) == {"seen", "other"}
    both = run(monkeypatch, "--methods", "width,nbl,ours-ffn", "--fractions", "2.5,5")
    assert both["points"][0] == first["points"][0]  # with the seconds that it took: it was not measured again
    measured = {(p["method"], p["fraction"]) for p in both["points"] if p["perplexities"]}
    assert measured == {(name, f) for name in ("width", "nbl", "ours-ffn") for f in (0.025, 0.05)}
    assert all(p["removed"] >= p["fraction"] for p in both["points"])
    table = Path("out/peers.md").read_text()
    assert "| 2.5% | width |" in table
    assert "ours-ffn ÷ it" in table


def test_another_amount_of_training_is_another_point(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for tokens in ("64", "128", "128"):
        found = run(monkeypatch, "--methods", "ours-healed", "--fractions", "5", "--heal-tokens", tokens)
        assert [(p["method"], p["trained"]) for p in found["points"]] == [("ours-healed", int(tokens))]
    assert "| 5.0% | ours-healed (trained) |" in Path("out/peers.md").read_text()


def test_other_settings_are_refused(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, "--methods", "width", "--fractions", "2.5")
    before = Path("out/peers.json").read_bytes()
    with pytest.raises(SystemExit, match="other settings"):
        run(monkeypatch, "--methods", "width", "--fractions", "2.5", "--calib-tokens", "1600")
    assert Path("out/peers.json").read_bytes() == before


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--methods", "widht"], "unknown methods widht"),
        (["--methods", "ours-healed"], "needs --heal-tokens"),
        (["--fractions", "0"], "--fractions takes percentages"),
        (["--text", "code"], "NAME=FILE"),
        (["--text", "code=absent.py"], "absent.py is no file"),
        (["--eval-tokens", "10000000"], "tokens wanted of seen"),
    ],
)
def test_bad_input_is_one_line(more: list[str], message: str, desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match=message) as error:
        run(monkeypatch, *more)
    assert str(error.value).startswith("error: ")
    assert "\n" not in str(error.value)
    assert not Path("out").exists()


def test_a_text_that_calibrates_is_measured_elsewhere(desk: Path) -> None:
    words = [
        "model",
        "--calibration",
        "seen.txt",
        "--text",
        "seen=seen.txt",
        "--seq-len",
        "32",
        "--calib-tokens",
        "640",
    ]
    args = peers.make_parser().parse_args([*words, "--eval-tokens", "320", "--heal-tokens", "1280"])
    texts = peers.parse_texts(args.text)
    calibration, healing = peers.read_calibration(args, tiny_tokenizer(), texts.values())
    whole = peers.cut_windows([Path("seen.txt")], tiny_tokenizer(), 32, (0, 0.5))
    known = {tuple(row) for row in whole.tolist()}
    assert {tuple(row) for row in torch.cat([calibration, healing]).tolist()} <= known
    measured = peers.read_text(args, tiny_tokenizer(), "seen", texts["seen"])
    assert not {tuple(row) for row in measured.tolist()} & known


BASELINE = {"wiki": 20.0, "code": 10.0}


def point(method: str, fraction: float, removed: float, wiki: float, code: float) -> Point:
    return Point(method, fraction, removed, {"wiki": wiki, "code": code}, 1.0)


def test_costs_are_compared_at_equal_parameters() -> None:
    own = [point("a", 0.05, 0.1, 24.0, 10.0)]
    assert cost_at(own, 0.05, lambda p: p.deltas(BASELINE)["wiki"]) == pytest.approx(2.0)
    assert cost_at(own, 0.2, lambda p: p.worst(BASELINE)) != cost_at(own, 0.2, lambda p: p.worst(BASELINE))  # no number


def test_the_best_peer_trains_nothing_and_the_worst_text_is_told() -> None:
    points = [
        point("width", 0.05, 0.05, 24.0, 10.5),
        point("nbl", 0.05, 0.07, 22.0, 13.0),
        point("ours", 0.05, 0.05, 21.0, 10.4),
        replace(point("ours-healed", 0.05, 0.05, 20.5, 10.2), trained=640),
        Point("svd-llm", 0.05, reason="too large"),
    ]
    settings = {"eval_tokens": 320, "seq_len": 32, "model": "m", "parameters": 1000, "calib_tokens": 640}
    table = render(settings, BASELINE, points)
    assert "| 5.0% | ΔPPL wiki | nbl +1.4286 | 0.70 | 0.35 |" in table
    assert "| 5.0% | ΔPPL code | width +0.5000 | 0.80 | 0.40 |" in table
    assert "| 5.0% | worst Δnats | width +0.1823 | 0.27 | 0.14 |" in table  # log 1.05 and log 1.025 over log 1.2
    assert "| ours-healed (trained) | +0.500, +0.0247 |" in table
    assert "| svd-llm | – |" in table
    assert "| nbl | +2.000, +0.2624 (7.0%) |" in table
    assert "too large" in table
