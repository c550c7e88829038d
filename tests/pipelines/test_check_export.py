"""The gate for exports: GGUF files in real llama.cpp and ONNX graphs in real ONNX Runtime, against their source."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import gguf
import pytest
from conftest import Compress, Outcome, Refused
from zoo import LINEAR_SHAPES, save_compressed

from compressor.export import llamacpp

FILES = {"f32": "f32.gguf", "q8_0": "q8_0.gguf", "onnx": "graph"}


@pytest.fixture
def folder(deployed: Path) -> Path:
    """A compressed Llama with its exports; no test may change them."""
    return deployed


def checked(done: Outcome, code: int = 0) -> dict[str, Any]:
    assert done.code == code, (done.out, done.err)
    report: dict[str, Any] = json.loads(done.out)
    return report


def contrasts(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {found["name"]: found for found in report["export"]["contrasts"]}


@pytest.mark.parametrize("form", ["f32", "onnx"])
def test_an_exact_export_has_the_figures_of_its_checkpoint(compress: Compress, folder: Path, form: str) -> None:
    report = checked(compress("check", folder / FILES[form], "--checkpoint", folder / "small", "--json"))
    recorded = json.loads((folder / "small" / "compression.json").read_text())["perplexity"]
    for key in ("baseline", "compressed", "delta_upper"):
        assert report["perplexity"][key] == pytest.approx(recorded[key], rel=1e-4)
    assert report["perplexity"]["tokens"] == recorded["tokens"]
    assert report["passed"] is True
    assert report["budget"]["asked"] == "3%"
    found = contrasts(report)
    assert found["conversion"]["log_probability_off"] < 1e-4
    assert found["conversion"]["greedy_equal"] == found["conversion"]["tokens"]
    assert found["export"]["log_probability_off_mean"] > 0.01  # the compression itself, or nothing was compared
    assert ("format" in found) == (form == "f32")


def test_the_format_and_the_compression_are_told_apart(compress: Compress, folder: Path) -> None:
    report = checked(compress("check", folder / "q8_0.gguf", "--checkpoint", folder / "small", "--json"))
    found = contrasts(report)
    assert list(found) == ["export", "format", "compression", "checkpoint", "conversion"]
    assert found["export"]["delta"] == report["perplexity"]["delta"]
    assert found["format"]["delta"] + found["compression"]["delta"] == pytest.approx(found["export"]["delta"])
    assert found["checkpoint"]["delta"] + found["conversion"]["delta"] == pytest.approx(found["export"]["delta"])
    # What q8_0 does to the source and to the checkpoint is of the same size, and far from what the compression does.
    for name in ("format", "conversion"):
        assert 1e-3 < found[name]["log_probability_off_mean"] < 0.1 * found["export"]["log_probability_off_mean"]
        assert 0.9 < found[name]["greedy_equal"] / found[name]["tokens"] < 1
    assert report["export"]["runtime"].startswith("llama.cpp (xllamacpp ")


def test_source_and_text_may_be_named_instead(compress: Compress, folder: Path, models: Path, corpus: Path) -> None:
    by_names = ["--source", models / "llama", "--text", corpus]
    report = checked(compress("check", folder / "q8_0.gguf", *by_names, "--json"))
    again = checked(compress("check", folder / "q8_0.gguf", "--checkpoint", folder / "small", "--json"))
    assert report["perplexity"] == again["perplexity"]
    assert report["text"] == again["text"]
    assert set(contrasts(report)) == {"export", "format", "compression"}


def test_the_same_check_gives_the_same_json(compress: Compress, folder: Path) -> None:
    command = ["check", folder / "q8_0.gguf", "--checkpoint", folder / "small", "--verify-tokens", "640", "--json"]
    first, second = compress(*command, "--no-cache"), compress(*command, "--no-cache")
    assert first.out == second.out
    assert checked(first, code=first.code)["perplexity"]["tokens"] == 20 * 31


def test_a_missed_budget_is_exit_code_1_and_a_failed_case(compress: Compress, folder: Path, tmp_path: Path) -> None:
    options = ["--checkpoint", folder / "small", "--max-dppl", "0.001", "--junit", tmp_path / "gate.xml"]
    done = compress("check", folder / "graph", *options)
    assert done.code == 1, done.err
    assert done.out.splitlines()[-1] == "FAILED: perplexity text"
    (case,) = ElementTree.parse(tmp_path / "gate.xml").iter("testcase")
    assert case.attrib["name"] == "perplexity text"
    assert case.find("failure") is not None


def test_a_file_that_computes_something_else_fails(compress: Compress, folder: Path, tmp_path: Path) -> None:
    """Its header is whole and llama.cpp runs it, but its last norm was scaled."""
    shutil.copy(folder / "f32.gguf", tmp_path / "scaled.gguf")
    reader = gguf.GGUFReader(tmp_path / "scaled.gguf", "r+")
    (norm,) = (tensor for tensor in reader.tensors if tensor.name == "output_norm.weight")
    norm.data[:] = norm.data * 8
    del reader
    done = compress("check", tmp_path / "scaled.gguf", "--checkpoint", folder / "small")
    assert done.code == 1, (done.out, done.err)


def test_a_file_that_was_quantised_afterwards(compress: Compress, folder: Path, tmp_path: Path) -> None:
    """As llama-quantize leaves it: the record of the file that it was made of, and another type of file."""
    shutil.copy(folder / "q8_0.gguf", tmp_path / "small.gguf")
    reader = gguf.GGUFReader(tmp_path / "small.gguf", "r+")
    field = reader.fields["general.file_type"]
    field.parts[field.data[0]][0] = gguf.LlamaFileType.MOSTLY_Q4_K_M
    del reader
    assert "was exported as q8_0 and made q4_k_m afterwards" in compress("info", tmp_path / "small.gguf").out
    report = checked(compress("check", tmp_path / "small.gguf", "--checkpoint", folder / "small", "--json"))
    assert report["export"]["dtype"] == "q4_k_m"
    assert report["export"]["without_control"] == "the source cannot be written as q4_k_m here"
    assert set(contrasts(report)) == {"export", "checkpoint", "conversion"}


def test_in_words(compress: Compress, folder: Path) -> None:
    done = compress("check", folder / "q8_0.gguf", "--checkpoint", folder / "small")
    for words in (
        "the format alone: the source as q8_0 against itself",
        "the compression alone: the export against the source as q8_0",
        "is what q8_0 costs the source itself there",
        "against the source in transformers (float32)",
    ):
        assert words in done.out, words
    assert done.out.splitlines()[-1] == "passed"


def test_an_interval_that_is_too_wide_is_said(compress: Compress, folder: Path) -> None:
    options = ["--checkpoint", folder / "small", "--verify-tokens", "512", "--json"]
    wide = checked(compress("check", folder / "graph", *options, "--max-dppl", "1000%"))["perplexity"]
    between = (max(wide["delta"], 0) + wide["delta_upper"]) / 2
    report = checked(compress("check", folder / "graph", *options, "--max-dppl", f"{between:.6f}"), code=1)
    (warning,) = [word for word in report["warnings"] if "interval is not" in word]
    assert "raise --verify-tokens" in warning


def test_budgets_of_tasks_are_left_to_the_checkpoint(compress: Compress, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "small", tmp_path / "small")
    with (tmp_path / "small" / "recipe.yaml").open("a", encoding="utf-8") as recipe:
        recipe.write("max_task_drop: [demo_last_word=0.01]\n")
    report = checked(compress("check", folder / "graph", "--checkpoint", tmp_path / "small", "--json"))
    assert [check["name"] for check in report["checks"]] == ["perplexity text"]


def test_another_source_is_noticed(compress: Compress, folder: Path, models: Path, corpus: Path) -> None:
    options = ["--source", models / "gpt2", "--text", corpus, "--max-dppl", "1000%", "--json"]
    report = checked(compress("check", folder / "f32.gguf", *options))
    assert "the source's weights are not those the export was made from" in report["warnings"]
    assert "gpt2 is not of Llama's type" in report["export"]["without_control"]
    assert set(contrasts(report)) == {"export"}


def test_what_is_missing_is_asked_for(refused: Refused, folder: Path, models: Path, corpus: Path) -> None:
    file = folder / "f32.gguf"
    assert "was verified on corpus.txt" in refused("check", file)
    assert "--text FILE" in refused("check", file, "--source", models / "llama")
    line = refused("check", file, "--text", corpus)
    assert "was made from a local model called llama; give it with --source DIRECTORY" in line


def test_an_export_of_a_bare_checkpoint_asks_for_everything(
    compress: Compress, refused: Refused, models: Path, corpus: Path, tmp_path: Path
) -> None:
    save_compressed(tmp_path / "small", "llama", LINEAR_SHAPES)
    file = tmp_path / "m.gguf"
    assert compress("export", tmp_path / "small", "--to", "gguf", "--out", file).code == 0
    source = ["--source", models / "llama"]
    assert "give it with --source DIRECTORY" in refused("check", file)
    assert "records no text; give one with --text FILE" in refused("check", file, *source)
    assert "give one with --max-dppl 1.0" in refused("check", file, *source, "--text", corpus)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--baseline", "b.json"], "--baseline is not for an export"),
        (["--report", "r.html"], "--report is not for an export"),
        (["--tasks", "piqa"], "--tasks is not for an export: an export is measured on text alone"),
        (["--max-kl", "0.1"], "--max-kl is not for an export"),
        (["--dtype", "bfloat16"], "--dtype is not for an export"),
        (["--seq-len", "128"], "--seq-len 128 is beyond the model's context of 64"),
        (["--junit", "none/gate.xml"], "--junit none/gate.xml cannot be written"),
    ],
)
def test_an_option_that_means_nothing_is_refused_by_name(
    refused: Refused, folder: Path, options: list[str], words: str
) -> None:
    assert words in refused("check", folder / "f32.gguf", "--checkpoint", folder / "small", *options)


def test_the_checkpoint_must_be_its_own(refused: Refused, folder: Path, compressed: Path) -> None:
    assert "was not made from" in refused("check", folder / "f32.gguf", "--checkpoint", compressed)
    assert "is for an export" in refused("check", compressed, "--checkpoint", compressed)


def test_a_missing_runtime_is_one_line(refused: Refused, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(llamacpp, "find_spec", lambda name: None)
        line = refused("check", folder / "f32.gguf", "--checkpoint", folder / "small")
        assert "pip install xllamacpp" in line

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("compressor.pipelines.scoring.version", missing)
    line = refused("check", folder / "graph", "--checkpoint", folder / "small")
    assert "pip install 'compressor[onnx]'" in line


def test_a_damaged_graph_is_one_line(refused: Refused, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "graph", tmp_path / "graph")
    (tmp_path / "graph" / "model.onnx").write_bytes(b"no graph at all")
    line = refused("check", tmp_path / "graph", "--checkpoint", folder / "small")
    assert "ONNX Runtime cannot run" in line
    (tmp_path / "graph" / "model.onnx").unlink()
    assert "ONNX Runtime cannot run" in refused("check", tmp_path / "graph", "--checkpoint", folder / "small")
