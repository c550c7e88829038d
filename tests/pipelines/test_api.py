"""`compressor.compress` and `compressor.check`: what the commands do, and results that can be shown and saved."""

from __future__ import annotations

import base64
import inspect
import json
import re
from pathlib import Path

import pytest
import torch
from conftest import Compress, tree

import compressor
from compressor.cli.options import COMMANDS
from compressor.pipelines.api import CHECKED
from compressor.pipelines.recipe import Recipe
from compressor.report.record import read_record

SETTINGS = {"seq_len": 32, "calib_tokens": 4000, "select_tokens": 1000, "verify_tokens": 2000, "max_dppl": "0.2%"}


@pytest.fixture(scope="module")
def held(models: Path, corpus: Path) -> compressor.Compression:
    """A result without `out`: nothing is written."""
    return compressor.compress(models / "gpt2", text=corpus, **SETTINGS)


def weights(directory: Path) -> bytes:
    return (directory / "model.safetensors").read_bytes()


def test_it_does_what_the_command_does(models: Path, corpus: Path, compressed: Path, tmp_path: Path) -> None:
    out = tmp_path / "small"
    result = compressor.compress(str(models / "gpt2"), text=[str(corpus)], out=out, **SETTINGS)
    assert result.out == out
    assert result.passed is True
    assert weights(out) == weights(compressed)
    assert sorted(tree(out)) == sorted(tree(compressed))
    assert (out / "recipe.yaml").read_text() == (compressed / "recipe.yaml").read_text()
    record = json.loads((compressed / "compression.json").read_text())
    assert result.perplexity.delta == record["perplexity"]["delta"]
    assert list(result.perplexity.interval) == record["perplexity"]["delta_ci95"]
    assert result.parameters.removed_fraction == record["parameters"]["removed_fraction"]
    assert [block.path for block in result.blocks] == [block["path"] for block in record["blocks"]]
    assert result.record.out == str(out)
    # The model is loaded on demand, and is the one that was written.
    assert sum(p.numel() for p in result.model.parameters()) == result.parameters.after
    assert result.tokenizer("a")["input_ids"]


def test_a_result_without_out_is_saved_later_with_everything(
    held: compressor.Compression, compressed: Path, tmp_path: Path, compress: Compress
) -> None:
    assert held.out is None
    assert held.passed
    assert "in memory" in repr(held)
    assert held.perplexity.compressed > 0
    written = held.save(tmp_path / "later")
    assert held.out == written == tmp_path / "later"
    assert weights(written) == weights(compressed)
    assert sorted(tree(written)) == sorted(tree(compressed))
    assert read_record(written).perplexity == read_record(compressed).perplexity  # type: ignore[union-attr]
    checked = compress("check", written)
    assert checked.code == 0, checked.err
    with pytest.raises(compressor.InputError, match="exists and is not empty"):
        held.save(written)


def test_a_model_that_was_changed_after_it_was_measured_is_not_saved_as_measured(
    held: compressor.Compression, tmp_path: Path
) -> None:
    parameter = next(held.model.parameters())
    before = parameter.detach().clone()
    with torch.no_grad():
        parameter.view(-1)[0] += 1
    try:
        with pytest.raises(compressor.InputError, match="changed after it was measured"):
            held.save(tmp_path / "changed")
        assert not list(tmp_path.iterdir())
    finally:
        with torch.no_grad():
            parameter.copy_(before)
    assert held.save(tmp_path / "as-measured").is_dir()


def test_a_written_result_can_be_saved_again(compressed: Path, models: Path, corpus: Path, tmp_path: Path) -> None:
    result = compressor.compress(models / "gpt2", text=corpus, out=tmp_path / "first", **SETTINGS)
    result.save(tmp_path / "second")
    assert tree(tmp_path / "second") == tree(tmp_path / "first")


def test_check_does_what_the_command_does(compressed: Path, compress: Compress) -> None:
    result = compressor.check(compressed)
    told = json.loads(compress("check", compressed, "--json").out)
    assert result.passed is True
    assert result.out == compressed
    assert result.perplexity.delta == told["perplexity"]["delta"]
    assert [block.path for block in result.blocks] == [block["path"] for block in told["replaced"]]
    assert compressor.check(str(compressed), max_dppl=1e-9).passed is False  # as the exit code 1 of the command


def test_it_refuses_in_the_words_of_the_command(models: Path, corpus: Path, compressed: Path, tmp_path: Path) -> None:
    gpt2 = models / "gpt2"
    with pytest.raises(compressor.InputError, match="--max-dppl is missing"):
        compressor.compress(gpt2)
    with pytest.raises(compressor.InputError, match="unknown key 'max_ddpl'"):
        compressor.compress(gpt2, max_ddpl=1.0)
    with pytest.raises(compressor.InputError, match="not empty"):
        compressor.compress(gpt2, max_dppl=1.0, out=compressed)
    with pytest.raises(compressor.InputError, match="not a GPT2LMHeadModel; a model in memory"):
        compressor.compress(compressor.load(str(gpt2))[0], max_dppl=1.0)
    with pytest.raises(compressor.InputError, match="check does not take kinds"):
        compressor.check(compressed, kinds=["linear"])
    with pytest.raises(compressor.InputError, match="does not exist"):
        compressor.check(tmp_path / "absent")
    with pytest.raises(compressor.BudgetError):
        compressor.compress(gpt2, text=corpus, out=tmp_path / "out", **{**SETTINGS, "max_dppl": 1e-9})
    assert not list(tmp_path.iterdir())


def test_a_check_takes_the_settings_of_the_command() -> None:
    assert set(CHECKED) == set(COMMANDS["check"]) & set(Recipe.model_fields)
    assert {"source", "baseline", "update_baseline", "tolerance", "junit"} <= set(
        inspect.signature(compressor.check).parameters
    )


def test_progress_is_shown_where_it_is_asked_for(compressed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compressor.check(compressed)
    quiet = capsys.readouterr()
    assert quiet.out == quiet.err == ""
    compressor.check(compressed, progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "[1/3] load both models: " in shown.err


def test_it_is_shown_in_a_few_lines_and_with_a_picture(held: compressor.Compression, compressed: Path) -> None:
    for result in (held, compressor.check(compressed)):
        lines = repr(result).splitlines()
        assert 4 <= len(lines) <= 8
        assert lines[0] == "gpt2, compressed: every promise holds"
        assert f"{result.parameters.after:,}" in repr(result)
        html = result._repr_html_()
        assert len(html) < 400_000
        assert "every promise holds" in html
        assert not re.search(r"(?:src|href)=\"(?!data:)|<script", html)  # nothing from the network, nothing that runs
        picture = re.search(r"data:image/svg\+xml;base64,([\w+/=]+)", html)
        assert picture
        assert base64.b64decode(picture[1]).startswith(b"<svg")


def test_names_in_a_notebook_are_no_markup(held: compressor.Compression) -> None:
    source = held.record.source.model_copy(update={"model": "<img src=x onerror=alert(1)>"})
    result = compressor.Result(held.record.with_parts(source=source), None)
    assert "<img src=x" not in result._repr_html_()
