"""`compress frontier`: the source and compressed models of it in several precisions, in real llama.cpp."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SMALL, Compress, Refused, tree
from zoo import LINEAR_SHAPES, save_compressed

from compressor.pipelines.frontier import Candidate, describe_files
from compressor.pipelines.scoring import Scores
from compressor.report.frontier_record import FrontierFile, SizeFrontier, size_lines, size_table
from compressor.runtime.context import RunContext

DTYPES = "f16,q8_0,q4_0"


@pytest.fixture(scope="module")
def measured(
    compress: Compress, deployed: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], Path]:
    out = tmp_path_factory.mktemp("frontier") / "out"
    done = compress("frontier", deployed / "small", "--dtypes", DTYPES, "--tokens", "640", "--out", out, "--json")
    assert done.code == 0, done.err
    return json.loads(done.out), out


def test_every_model_in_every_precision(measured: tuple[dict[str, Any], Path]) -> None:
    report, out = measured
    files = {(file["model"], file["dtype"]): file for file in report["files"]}
    assert set(files) == {(name, dtype) for name in ("source", "small") for dtype in DTYPES.split(",")}
    assert [file["bytes"] for file in report["files"]] == sorted(file["bytes"] for file in report["files"])
    for name in ("source", "small"):
        sizes = [files[name, dtype]["bytes"] for dtype in DTYPES.split(",")]
        assert sizes == sorted(sizes, reverse=True)
    for dtype in DTYPES.split(","):
        assert files["small", dtype]["bytes"] < files["source", dtype]["bytes"]
        assert files["small", dtype]["parameters"] < files["source", dtype]["parameters"]
    assert files["source", "f16"]["change"]["delta"] == 0
    assert files["source", "f16"]["change"]["tokens"] == 20 * 31
    assert report["runtime"].startswith("llama.cpp (xllamacpp ")
    assert any(file["on_hull"] for file in report["files"])
    assert {path.name for path in out.iterdir()} == {"frontier.json", "sizes.png", "sizes.svg"}
    written = json.loads((out / "frontier.json").read_text())
    assert written == {key: value for key, value in report.items() if key != "written"}


def test_the_figures_are_those_of_the_exported_files(
    measured: tuple[dict[str, Any], Path], compress: Compress, deployed: Path
) -> None:
    """The same perplexity as `compress check` finds for the file that `compress export` wrote, and nearly its size."""
    options = ["--checkpoint", deployed / "small", "--verify-tokens", "640", "--json"]
    report = json.loads(compress("check", deployed / "q8_0.gguf", *options).out)
    contrasts = {found["name"]: found for found in report["export"]["contrasts"]}
    files = {(file["model"], file["dtype"]): file for file in measured[0]["files"]}
    assert files["small", "q8_0"]["change"]["compressed"] == contrasts["export"]["compressed"]
    assert files["source", "q8_0"]["change"]["compressed"] == contrasts["format"]["compressed"]
    record = 20_000  # at most; the files that are measured have none
    assert 0 < report["export"]["bytes"] - files["small", "q8_0"]["bytes"] < record


def test_again_it_comes_from_the_cache(
    measured: tuple[dict[str, Any], Path], compress: Compress, deployed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compressor.export.llamacpp.Runner", None)
    done = compress("frontier", deployed / "small", "--dtypes", DTYPES, "--tokens", "640", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["files"] == measured[0]["files"]


def test_in_words(measured: tuple[dict[str, Any], Path], compress: Compress, deployed: Path) -> None:
    done = compress("frontier", deployed / "small", "--dtypes", DTYPES, "--tokens", "640")
    assert done.code == 0, done.err
    assert "source f16" in done.out
    assert "on the lower hull of all files, by point estimates (*):" in done.out
    for dtype in DTYPES.split(","):
        (line,) = [line for line in done.out.splitlines() if line.startswith(f"small {dtype} (")]
        words = (
            "both together are",
            "alone is the better buy",
            "cannot be told apart",
            "smaller than the source in any",
        )
        assert sum(word in line for word in words) == 1


def test_a_stock_export_can_be_the_source(compress: Compress, corpus: Path, tmp_path: Path) -> None:
    """A stock checkpoint that --to hf-dense wrote is compressed again, and held against in every precision."""
    dense, small = tmp_path / "dense", tmp_path / "smaller"
    save_compressed(tmp_path / "first", "llama", LINEAR_SHAPES)
    assert compress("export", tmp_path / "first", "--to", "hf-dense", "--out", dense).code == 0
    done = compress(dense, "--text", corpus, *SMALL, "--max-dppl", "5%", "--out", small)
    assert done.code == 0, done.err
    done = compress("frontier", small, "--dtypes", "q4_0", "--tokens", "320", "--json")
    assert done.code == 0, done.err
    assert len(json.loads(done.out)["files"]) == 4  # f16, which all are compared with, goes without saying


def test_what_cannot_be_measured_is_refused(
    refused: Refused,
    compress: Compress,
    compressed: Path,
    deployed: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    small = deployed / "small"
    line = refused("frontier", compressed)
    assert "cannot be measured as GGUF: gpt2 is not of Llama's type" in line
    assert "made from" in refused("frontier", small, compressed)
    assert "is given twice" in refused("frontier", small, small)
    assert "is an export" in refused("frontier", deployed / "q8_0.gguf")
    assert "--dtypes 'q4_k' is not known" in refused("frontier", small, "--dtypes", "f16,q4_k")
    assert "--tokens 16 is not one window" in refused("frontier", small, "--tokens", "16")
    assert "does not exist" in refused("frontier", tmp_path / "nothing")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    assert "is not empty" in refused("frontier", small, "--out", tmp_path / "mine")
    monkeypatch.setattr("compressor.export.llamacpp.find_spec", lambda name: None)
    assert "pip install xllamacpp" in refused("frontier", small)


def planted(rows: dict[tuple[str, str], tuple[int, float]], noise: float) -> list[FrontierFile]:
    """Files of these sizes and mean losses; a file's losses differ by `noise` from window to window."""
    generator = torch.Generator().manual_seed(1)
    shared = 3 + torch.rand(40, 31, generator=generator)
    candidates = []
    for (model, dtype), (size, loss) in rows.items():
        own = noise * torch.randn(40, 1, generator=generator)
        nats = shared - shared.mean() + loss + own - own.mean()
        scores = Scores(nats, torch.zeros(40, 31, dtype=torch.long), size)
        candidates.append(Candidate(model, model != "source", dtype, 1, scores))
    return describe_files(candidates, None, RunContext())


def test_which_is_the_better_buy_is_found() -> None:
    """Where the answer is planted: on the line between two precisions, well below it, and well above."""
    source = {("source", "f16"): (200, 3.01), ("source", "q8_0"): (100, 3.0), ("source", "q4_0"): (50, 3.2)}
    small = {("a", "f16"): (180, 3.05), ("b", "q8_0"): (75, 3.02), ("c", "q8_0"): (75, 3.1), ("d", "q4_0"): (40, 3.5)}
    found = planted({**source, **small}, 0.01)
    files = {file.model: file for file in found}
    rivals = {name: files[name].rival for name in "abcd"}
    assert [rival and rival.verdict for rival in rivals.values()] == ["precision", "both", "open", None]
    between = rivals["b"]
    assert between is not None
    assert (between.smaller, between.larger, between.share) == ("q4_0", "q8_0", 0.5)
    assert between.change.baseline == pytest.approx(math.exp(3.1), rel=1e-5)
    assert between.change.compressed == pytest.approx(math.exp(3.02), rel=1e-5)
    beyond = rivals["a"]  # larger than the source in eight bits, which is as good as sixteen
    assert beyond is not None
    assert (beyond.smaller, beyond.larger) == ("q8_0", "q8_0")
    hull = [(file.model, file.dtype) for file in found if file.on_hull]
    assert hull == [("d", "q4_0"), ("source", "q4_0"), ("b", "q8_0"), ("source", "q8_0")]


def test_what_noise_hides_is_not_decided() -> None:
    source = {("source", "f16"): (200, 3.0), ("source", "q4_0"): (50, 3.2)}
    (verdict,) = [file.rival.verdict for file in planted({**source, ("b", "q8_0"): (125, 3.08)}, 0.5) if file.rival]
    assert verdict == "open"


def test_the_table_and_the_words_say_it(measured: tuple[dict[str, Any], Path]) -> None:
    source = {("source", "f16"): (2000, 3.0), ("source", "q4_0"): (500, 3.2)}
    small = {("a", "f16"): (1800, 3.3), ("b", "q8_0"): (750, 3.02), ("d", "q4_0"): (400, 3.5)}
    record = SizeFrontier.model_validate({**measured[0], "files": []}).model_copy(
        update={"files": planted({**source, **small}, 0.001)}
    )
    lines = "\n".join(size_lines(record))
    assert "a f16 (2 kB): a smaller precision of the source alone is the better buy" in lines
    assert "b q8_0 (1 kB): both together are the better buy" in lines
    assert "d q4_0 (1 kB): smaller than the source in any precision here" in lines
    assert len(size_table(record).rows) == 5


def test_a_checkpoint_without_a_record_is_refused(refused: Refused, tmp_path: Path) -> None:
    save_compressed(tmp_path / "bare", "llama")
    before = tree(tmp_path / "bare")
    assert "compression.json" in refused("frontier", tmp_path / "bare")
    assert tree(tmp_path / "bare") == before
