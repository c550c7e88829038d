"""`compress profile`: what it writes, several models and corpora, probes, a second model, and what it refuses."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from conftest import SMALL, Compress, sentences
from zoo import save_tiny

FILES = {"report.html", "profile.json", "profile.csv", "ladder.csv", "figures"}
CHARTS = {"blocks", "depth", "swap", "regimes", "ladder"}


def figures(directory: Path) -> set[str]:
    return {file.stem for file in (directory / "figures").iterdir()}


def read(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "profile.json").read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another corpus: the same words in another order."""
    file = tmp_path_factory.mktemp("text") / "code.txt"
    file.write_text("".join(line[::-1] + "\n" for line in sentences(4000, seed=5).splitlines()), encoding="utf-8")
    return file


def test_one_command_gives_the_page_the_figures_and_the_numbers(profiled: Path) -> None:
    assert {file.name for file in profiled.iterdir()} == FILES
    assert figures(profiled) == CHARTS | {"corpora", "residual", "trained", "cross"}
    for file in (profiled / "figures").iterdir():
        if file.suffix == ".svg":
            assert ElementTree.parse(file).getroot().tag.endswith("svg")
        else:
            assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    report = read(profiled)
    assert len(report["blocks"]) == 3
    for block in report["blocks"]:
        low, high = block["r2_lin_ci95"]
        assert low <= block["r2_lin"] <= high
        assert block["verdict"] in ("safe", "costly", "unsafe")
        assert block["reason"]
        assert block["ladder"]["ranks"][0] == 0
        assert block["ladder"]["r2"][-1] == pytest.approx(block["r2_lin"])
        assert 0 <= block["rank_99"] <= 32
        assert 1 <= block["input_effective_rank"] <= block["input_rank"] <= 32
        assert block["swap"]["delta_ci95"][0] <= block["swap"]["delta"] <= block["swap"]["delta_ci95"][1]
        assert block["swap"]["seq_len"] == 32
        assert block["bilinear"]["r2_lin"] == pytest.approx(block["r2_lin"], abs=1e-5)
        assert block["trained"]["gap"] == pytest.approx(block["r2_lin"] - block["trained"]["r2"], abs=1e-5)
        assert block["cross"]["own"] == pytest.approx(block["r2_lin"], abs=1e-5)
        assert {row["position"] for row in block["top_rows"]} <= set(range(32))
    assert report["probes"]["trained"]["steps"] == 20
    assert -1 <= report["probes"]["bilinear"]["pearson"] <= 1
    assert "L-BFGS" in report["probes"]["bilinear"]["criterion"]
    assert report["cross"]["source"]["model_type"] == "llama"
    assert report["swap"]["ratio"] > 0
    assert report["swap"]["together"][0]["removed"] > 0
    assert {"torch", "transformers"} <= report["environment"].keys()
    assert report["recipe"]["seed"] == 0
    assert {"measure", "swap", "probe", "cross", "total"} <= report["timings"].keys()


def test_corpora_have_profiles_of_their_own(profiled: Path) -> None:
    report = read(profiled)
    assert [corpus["name"] for corpus in report["corpora"]] == ["corpus", "other"]
    first, second = ([block["r2_lin"] for block in corpus["blocks"]] for corpus in report["corpora"])
    assert first == [block["r2_lin"] for block in report["blocks"]]
    assert first != second
    assert [word.partition("=")[0] for word in report["recipe"]["text"]] == ["corpus", "other"]
    (pair,) = report["corpus_agreement"]
    assert (pair["first"], pair["second"]) == ("corpus", "other")
    assert -1 <= pair["rank_correlation"] <= 1


def test_the_tables_hold_the_numbers_of_the_record(profiled: Path) -> None:
    report = read(profiled)
    with (profiled / "profile.csv").open(encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert [(row["corpus"], row["block"]) for row in rows] == [
        (corpus, str(block)) for corpus in ("corpus", "other") for block in range(3)
    ]
    for row, block in zip(rows, report["blocks"], strict=False):
        assert float(row["r2_lin"]) == block["r2_lin"]
        assert float(row["swap_delta_ci95_high"]) == block["swap"]["delta_ci95"][1]
        assert row["reason"] == block["reason"]
    with (profiled / "ladder.csv").open(encoding="utf-8") as stream:
        steps = list(csv.DictReader(stream))
    assert len(steps) == 3 * len(report["blocks"][0]["ladder"]["ranks"])
    assert [int(step["parameters"]) for step in steps[:3]] == [32, 32 + 64, 32 + 128]
    assert int(steps[-1]["parameters"]) == 32 * 33


def test_the_terminal_tells_the_answer(
    compress: Compress, models: Path, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = compress("profile", models / "gpt2", *options, "-v")
    assert done.code == 0, done.err
    assert "Parameters that linear maps save, and what they cost in perplexity" in done.out
    assert "of one whole evaluation per block" in done.out
    assert "windows of 32 tokens" in done.out
    assert f"written to {tmp_path / 'gpt2-profile'}" in done.out
    assert {file.name for file in (tmp_path / "gpt2-profile").iterdir()} == FILES
    assert compress("profile", models / "gpt2", *options).code == 0  # its own earlier report is replaced
    (tmp_path / "gpt2-profile" / "profile.json").unlink()
    refused = compress("profile", models / "gpt2", *options)
    assert refused.code == 2
    assert "was not written by compress" in refused.errors[0]


def test_without_the_sweep_costs_are_predicted(
    compress: Compress, models: Path, options: list[str], tmp_path: Path
) -> None:
    done = compress("profile", models / "gpt2", *options, "--no-swap", "--out", tmp_path / "p")
    assert done.code == 0, done.err
    assert "what it is predicted to cost" in done.out
    assert figures(tmp_path / "p") == CHARTS - {"swap"}
    assert "swap" not in read(tmp_path / "p")
    assert all("predicted" in block["reason"] for block in read(tmp_path / "p")["blocks"])


def test_large_models_are_not_swept_unless_asked(
    compress: Compress, models: Path, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compressor.measure.study.SWAPPED_BELOW", 1000)
    asked = ("profile", models / "gpt2", *options, "--json")
    assert "swap" not in json.loads(compress(*asked).out)
    assert "swap" in json.loads(compress(*asked, "--swap").out)


def test_numbers_alone_write_nothing(
    compress: Compress, models: Path, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = (compress("profile", models / "gpt2", *options, "--json", "--no-cache") for _ in range(2))
    reports = [json.loads(done.out) for done in (first, second)]
    for report in reports:
        del report["timings"], report["swap"]["ratio"], report["swap"]["seconds"]
        del report["swap"]["whole_evaluation_seconds"]
    assert reports[0] == reports[1]
    assert list(tmp_path.iterdir()) == []


def test_several_models_stand_side_by_side(
    compress: Compress, models: Path, options: list[str], tmp_path: Path
) -> None:
    done = compress("profile", models / "gpt2", models / "llama", *options, "--out", tmp_path / "both")
    assert done.code == 0, done.err
    report = read(tmp_path / "both")
    assert [profile["source"]["model_type"] for profile in report["profiles"]] == ["gpt2", "llama"]
    assert figures(tmp_path / "both") == {"models"} | {f"{k}-{name}" for k in (1, 2) for name in CHARTS}
    page = (tmp_path / "both" / "report.html").read_text(encoding="utf-8")
    assert "How linear are gpt2, llama?" in page
    with (tmp_path / "both" / "profile.csv").open(encoding="utf-8") as stream:
        assert [row["model"] for row in csv.DictReader(stream)] == ["gpt2"] * 3 + ["llama"] * 3
    alone = json.loads(compress("profile", models / "llama", *options, "--json").out)
    assert alone["blocks"] == report["profiles"][1]["blocks"]


def test_the_whole_job_writes_the_same_report(compressed: Path) -> None:
    record = json.loads((compressed / "compression.json").read_text(encoding="utf-8"))
    assert all({"ladder", "top_rows", "rank_99"} <= block.keys() for block in record["blocks"])
    assert figures(compressed) == (CHARTS - {"swap"}) | {"agreement", "budgets", "frequency", "position"}
    page = (compressed / "report.html").read_text(encoding="utf-8")
    for title in ("How linear each block is", "Two regimes", "The rank ladder"):
        assert title in page


def refused(compress: Compress, out: Path, *arguments: str | Path) -> str:
    done = compress("profile", *arguments, "--out", out)
    assert done.code == 2
    assert done.out == ""
    assert len(done.errors) == 1
    assert "Traceback" not in done.err
    assert not out.exists()
    return done.errors[0]


def test_another_width_is_refused_with_both(
    compress: Compress, models: Path, options: list[str], tmp_path: Path
) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    wide = tmp_path / "wide"
    shutil.copytree(models / "gpt2", wide)
    GPT2LMHeadModel(GPT2Config(n_embd=48, n_layer=2, n_head=4, vocab_size=300, n_positions=64)).save_pretrained(wide)
    said = refused(compress, tmp_path / "p", models / "gpt2", *options, "--cross", wide)
    assert "width 48" in said
    assert "width 32" in said


def test_a_short_corpus_is_refused_by_name(
    compress: Compress, models: Path, options: list[str], tmp_path: Path, code: Path
) -> None:
    short = tmp_path / "short.txt"
    short.write_text("Call me Ishmael.\n" * 30, encoding="utf-8")
    said = refused(compress, tmp_path / "p", models / "gpt2", *options, "--text", code, "--text", short)
    assert f"text {short} is too short" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--probe", "cubic"], "probe"),
        (["--probe-steps", "0"], "probe_steps"),
        (["--swap-tokens", "0"], "swap_tokens"),
        (["--cross", "./nowhere"], "./nowhere"),
        (["--text", "nowhere.txt"], "nowhere.txt does not exist"),
        (["--text", "wiki="], "nothing stands after the name"),
        (["--seq-len", "65"], "context of 64"),
    ],
)
def test_bad_input_is_one_line(
    compress: Compress, models: Path, options: list[str], tmp_path: Path, arguments: list[str], message: str
) -> None:
    assert message in refused(compress, tmp_path / "p", models / "gpt2", *options, *arguments)


def test_a_second_model_that_cannot_be_had_is_refused_before_the_first_is_measured(
    compress: Compress, models: Path, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compressor.pipelines.profile.profile_one", lambda *_: pytest.fail("measured"))
    assert "mixtral" in refused(compress, tmp_path / "p", models / "gpt2", models / "mixtral", *options)


def test_a_directory_that_is_there_is_left_alone(
    compress: Compress, models: Path, options: list[str], tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("all of it", encoding="utf-8")
    for more in ([], ["--overwrite"]):
        done = compress("profile", models / "gpt2", *options, "--out", tmp_path / "mine", *more)
        assert done.code == 2
        assert (tmp_path / "mine" / "thesis.txt").read_text(encoding="utf-8") == "all of it"


def test_two_corpora_of_one_name_are_told_apart(compress: Compress, models: Path, code: Path, tmp_path: Path) -> None:
    again = tmp_path / "code.txt"
    shutil.copy(code, again)
    done = compress("profile", models / "gpt2", "--text", code, "--text", again, *SMALL, "--no-swap", "--json")
    assert [corpus["name"] for corpus in json.loads(done.out)["corpora"]] == ["code", "code-2"]


def test_rows_that_memory_does_not_hold_are_sampled_and_the_report_says_so(
    compress: Compress, models: Path, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compressor.measure.probes.rows_in_memory", lambda width: 1000)
    done = compress("profile", models / "gpt2", *options, "--probe", "trained", "--probe-steps", "5", "--json")
    assert done.code == 0, done.err
    probes = json.loads(done.out)["probes"]
    assert probes["sampled"]
    assert probes["rows"] <= 1000
    assert "sampled" in done.err


def test_hostile_names_stay_text(compress: Compress, options: list[str], tmp_path: Path) -> None:
    model = tmp_path / "<script>alert(1)<"
    save_tiny("gpt2", model)
    done = compress("profile", model, *options, "--out", tmp_path / "p")
    assert done.code == 0, done.err
    page = (tmp_path / "p" / "report.html").read_text(encoding="utf-8")
    assert "<script>alert" not in page
    assert page.count("<script>") == 1
