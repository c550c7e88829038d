"""`compress compare`: two checkpoints, or one and its source, from their records and measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import SMALL, Compress, Refused, sentences
from zoo import ONE_SHAPE, tiny_tokenizer
from zoo import compressed as compressed_model

import compressor


@pytest.fixture(scope="module")
def other(compress: Compress, models: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another compression of the model that `compressed` was made from, on the same text."""
    out = tmp_path_factory.mktemp("other") / "other"
    given = ["--max-dppl", "2%", "--kinds", "bias,pruned"]
    done = compress(models / "gpt2", "--text", corpus, *SMALL, *given, "--out", out)
    assert done.code == 0, done.err
    return out


def report_of(compress: Compress, *arguments: str | Path) -> dict[str, Any]:
    done = compress("compare", *arguments, "--json")
    assert done.code == 0, done.err
    report: dict[str, Any] = json.loads(done.out)
    return report


def record_of(directory: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((directory / "compression.json").read_text(encoding="utf-8"))
    return record


def test_the_figures_are_those_of_both_records(compress: Compress, compressed: Path, other: Path) -> None:
    report = report_of(compress, compressed, other)
    for side, directory in (("first", compressed), ("second", other)):
        record = record_of(directory)
        assert report[side]["parameters"] == record["parameters"]["after"]
        assert report[side]["perplexity"] == record["perplexity"]
        assert report[side]["budget"]["asked"] == record["budget"]["asked"]
        assert report[side]["bytes"] == (directory / "model.safetensors").stat().st_size
    assert (report["same_source"], report["same_text"]) == (True, True)


def test_the_blocks_that_differ_are_listed_and_no_others(compress: Compress, compressed: Path, other: Path) -> None:
    forms = [{b["path"]: b["replacement"] for b in record_of(directory)["blocks"]} for directory in (compressed, other)]
    expected = [path for path in forms[0] if forms[0][path] != forms[1][path]]
    report = report_of(compress, compressed, other)
    assert expected
    assert [block["path"] for block in report["blocks"]] == expected
    same = report_of(compress, compressed, compressed)
    assert same["blocks"] == []
    assert same["notes"] == ["their weights are the same, byte for byte"]


def test_measured_they_differ_as_they_are_recorded(compress: Compress, compressed: Path, other: Path) -> None:
    found = report_of(compress, compressed, other, "--measure")["measured"]
    first, second = (record_of(directory) for directory in (compressed, other))
    assert found["text"]["verification"]["sha256"] == first["text"]["verification"]["sha256"]
    change = found["contrast"]
    assert change["baseline"] == pytest.approx(first["perplexity"]["compressed"])
    assert change["compressed"] == pytest.approx(second["perplexity"]["compressed"])
    low, high = change["delta_ci95"]
    assert low < change["delta"] < high
    # The two are compared with each other, and their noise is largely the same: not two intervals added up.
    widths = [b - a for a, b in (record["perplexity"]["delta_ci95"] for record in (first, second))]
    assert high - low < sum(widths)


def test_a_checkpoint_and_its_source(compress: Compress, compressed: Path, models: Path) -> None:
    report = report_of(compress, compressed, models / "gpt2", "--measure")
    record = record_of(compressed)
    assert report["second"]["kind"] == "source"
    assert report["second"]["parameters"] == record["parameters"]["before"]
    assert {block["second"] for block in report["blocks"]} == {"as it was"}
    change, recorded = report["measured"]["contrast"], record["perplexity"]
    assert change["delta"] == pytest.approx(-recorded["delta"])
    assert change["delta_ci95"] == pytest.approx([-end for end in reversed(recorded["delta_ci95"])], rel=0.1)
    turned = report_of(compress, models / "gpt2", compressed)
    assert turned["first"]["kind"] == "source"


def test_different_texts_are_said_to_be_different(
    compress: Compress, compressed: Path, models: Path, tmp_path: Path
) -> None:
    (tmp_path / "other.txt").write_text(sentences(4000, seed=9), encoding="utf-8")
    text = ["--text", tmp_path / "other.txt", *SMALL]
    assert compress(models / "gpt2", *text, "--max-dppl", "2%", "--out", tmp_path / "b").code == 0
    report = report_of(compress, compressed, tmp_path / "b")
    assert report["same_text"] is False
    done = compress("compare", compressed, tmp_path / "b")
    assert "they were measured on different texts: the recorded perplexities cannot be compared" in done.out
    done = compress("compare", compressed, tmp_path / "b", "--measure")
    assert "measured on the same" in done.out
    assert "cannot be compared" not in done.out


def test_a_checkpoint_without_figures(compress: Compress, compressed: Path, tmp_path: Path) -> None:
    compressor.save(compressed_model("gpt2", ONE_SHAPE), tiny_tokenizer(), tmp_path / "bare")
    done = compress("compare", compressed, tmp_path / "bare")
    assert done.code == 0, done.err
    assert "cannot be compared" in done.out


def test_it_needs_no_torch(compressed: Path, other: Path) -> None:
    code = (
        "import sys, compressor.cli.app as cli\n"
        f"sys.argv = ['compress', 'compare', {str(compressed)!r}, {str(other)!r}]\n"
        "try: cli.main()\n"
        "except SystemExit as end: assert end.code == 0, end.code\n"
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_what_cannot_be_compared_is_one_line(refused: Refused, compressed: Path, models: Path, tmp_path: Path) -> None:
    assert "is not the source of the other model" in refused("compare", compressed, models / "llama")
    assert "is not the source of the other model" in refused("compare", compressed, tmp_path / "none")
    assert "was written by compress" in refused("compare", models / "llama", models / "gpt2")
    assert "is about measuring; add --measure" in refused("compare", compressed, models / "gpt2", "--text", "x")
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert "is an export; compare" in refused("compare", compressed, tmp_path / "m.gguf")
