"""A model that is made step by step in Python is saved with what was measured of its weights, and of no others."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Compress

import compressor
from compressor.evaluate.remembered import MOST_REMEMBERED, recall_losses
from compressor.models.source import identify_weights
from compressor.plan.api import SearchedPlan
from compressor.report.page import page
from compressor.report.record import Record, SavedRecord, read_record


@pytest.fixture(scope="module")
def steps(models: Path, corpus: Path) -> tuple[Any, Any, Any, Any]:
    """Everything up to a plan; no test may change the model, so each takes a copy."""
    model, tokenizer = compressor.load(str(models / "llama"))
    text = compressor.load_text(
        corpus, tokenizer, seq_len=32, calib_tokens=4000, select_tokens=1000, verify_tokens=2000
    )
    profile = compressor.measure(model, text)
    return model, tokenizer, text, profile


@pytest.fixture(scope="module")
def found(steps: tuple[Any, Any, Any, Any]) -> Any:
    model, _, text, profile = steps
    return compressor.plan(model, profile, text, max_dppl="1%")


def saved(model: Any, tokenizer: Any, out: Path) -> Record | SavedRecord:
    compressor.save(model, tokenizer, out)
    return read_record(out)


def test_what_the_search_measured_is_saved(
    steps: tuple[Any, Any, Any, Any], found: Any, tmp_path: Path, compress: Compress
) -> None:
    source, tokenizer, text, profile = steps
    model = copy.deepcopy(source)
    compressor.apply(model, found, text)
    record = saved(model, tokenizer, tmp_path / "out")
    assert isinstance(record, Record)
    assert [block.r2_lin for block in record.blocks] == [p.r2_lin for p in profile.blocks]
    assert {block.verdict for block in record.blocks} <= {"safe", "costly", "unsafe"}
    assert all(block.top_rows and block.top_rows[0].token for block in record.blocks)
    replaced = {b.index for b in record.blocks if b.replacement.kind != "keep"}
    assert replaced == {index for index in found.shapes if isinstance(index, int)} != set()
    assert record.selection["text"].delta == found.selection["text"].delta
    assert record.parameters.after == sum(p.numel() for p in model.parameters())
    assert record.parameters.before == sum(p.numel() for p in source.parameters())
    assert record.perplexity is None
    assert record.passed is None
    told = compress("info", tmp_path / "out")
    assert told.code == 0, told.err
    assert "selection text: perplexity" in told.out
    assert "not verified" in told.out
    assert "Not verified" in page(record)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "not measured on the verification text" in card
    assert "--recipe" not in card  # no command makes these weights again
    # Its own recipe says on what it is checked, so that a check needs no option.
    checked = compress("check", tmp_path / "out", "--json")
    report = json.loads(checked.out)
    assert checked.code == (0 if report["passed"] else 1), checked.err  # nothing verified this plan before
    assert report["text"]["verification"]["sha256"] == text.verification.sha256
    assert not [line for line in report["warnings"] if "verification tokens" in line]


def test_perplexity_is_saved_where_it_was_measured_on_the_verification_windows(
    steps: tuple[Any, Any, Any, Any], found: Any, tmp_path: Path, compress: Compress
) -> None:
    source, tokenizer, text, _ = steps
    model = copy.deepcopy(source)
    before = compressor.evaluate(model, text.verification.windows)
    compressor.apply(model, found, text)
    after = compressor.evaluate(model, text.verification.windows)
    record = saved(model, tokenizer, tmp_path / "out")
    assert isinstance(record, Record)
    assert record.perplexity is not None
    assert record.perplexity.baseline == pytest.approx(before.perplexity)
    assert record.perplexity.compressed == pytest.approx(after.perplexity)
    assert record.budget is not None
    assert record.budget.asked == "1%"
    assert record.passed is record.texts["text"].passed
    checked = json.loads(compress("check", tmp_path / "out", "--json").out)
    assert checked["perplexity"]["delta"] == pytest.approx(record.perplexity.delta, abs=1e-4)
    assert compress("info", tmp_path / "out").code == 0


def test_a_limit_on_kl_that_was_not_measured_is_not_called_kept(
    steps: tuple[Any, Any, Any, Any], tmp_path: Path
) -> None:
    source, tokenizer, text, profile = steps
    model = copy.deepcopy(source)
    plan = compressor.plan(model, profile, text, max_kl=0.5)
    compressor.apply(model, plan, text)
    compressor.evaluate(model, text.verification.windows)
    record = saved(model, tokenizer, tmp_path / "out")
    assert isinstance(record, Record)
    assert record.perplexity is not None
    assert record.passed is None
    assert any("was not measured" in warning for warning in record.warnings)


def test_a_model_that_was_changed_carries_no_figures_of_other_weights(
    steps: tuple[Any, Any, Any, Any], found: Any, tmp_path: Path
) -> None:
    source, tokenizer, text, profile = steps

    def change(model: Any) -> None:
        with torch.no_grad():
            next(model.parameters()).view(-1)[0] += 1

    after = copy.deepcopy(source)
    compressor.apply(after, found, text)
    compressor.evaluate(after, text.verification.windows)
    change(after)
    assert isinstance(saved(after, tokenizer, tmp_path / "changed-after"), SavedRecord)
    between = copy.deepcopy(source)
    change(between)
    compressor.apply(between, found, text)
    assert isinstance(saved(between, tokenizer, tmp_path / "changed-before"), SavedRecord)
    stale = copy.deepcopy(source)
    change(stale)
    plan = compressor.plan(stale, profile, text, max_dppl="1%")  # the profile is of other weights
    assert not isinstance(plan, SearchedPlan)
    compressor.apply(stale, plan, text)
    assert isinstance(saved(stale, tokenizer, tmp_path / "stale"), SavedRecord)
    shapes = copy.deepcopy(source)
    compressor.apply(shapes, {0: compressor.Shape(3)}, text)  # nothing was measured
    assert isinstance(saved(shapes, tokenizer, tmp_path / "shapes"), SavedRecord)


def test_losses_are_remembered_by_weights_and_windows(steps: tuple[Any, Any, Any, Any]) -> None:
    model, windows = copy.deepcopy(steps[0]), steps[2].verification.windows
    identity = identify_weights(model)
    losses = compressor.evaluate(model, windows[:4])
    assert recall_losses(model, identity, windows[:4]) is losses
    assert recall_losses(model, identity, windows[1:5]) is None
    assert recall_losses(model, {**identity, "weights": "others"}, windows[:4]) is None
    for start in range(MOST_REMEMBERED):
        compressor.evaluate(model, windows[start : start + 2])
    assert recall_losses(model, identity, windows[:4]) is None  # the oldest went
