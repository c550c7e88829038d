"""What the terminal says of a record: every figure with its unit, its interval and its budget."""

from __future__ import annotations

import io
from typing import Any

import pytest
from records_cards import FIDELITY, HEAD, TASK, TEXT, block, measured, saved
from rich.console import Console

from compressor.report import tables
from compressor.report.export_record import ExportRecord, PushRecord
from compressor.report.formats import block_numbers
from compressor.report.grid import Grid


def cells(table: Grid) -> list[list[str]]:
    """The rows of a table as they are printed, without their header."""
    console = Console(file=io.StringIO(), width=400)
    console.print(table.fitted(400))
    assert isinstance(console.file, io.StringIO)
    return [[cell for cell in line.split("  ") if cell.strip()] for line in console.file.getvalue().splitlines()[1:]]


def test_every_text_is_held_against_its_own_budget() -> None:
    record = measured(texts={"text": TEXT, "wiki": {**TEXT, "max_dppl": 0.6, "asked": "3%"}})
    first, budget, second, other = tables.text_lines(record)
    assert first.startswith("perplexity 20.000 → 20.500  (Δ +0.500, 95 % interval +0.250 … +0.750; 2,000 tokens")
    assert budget == "budget +1.000 (5 % of 20.000): inside (upper end at 95% +0.750)"
    assert second == f"wiki: {first}"
    assert other == "wiki: budget +0.600 (3 % of 20.000): OUTSIDE (upper end at 95% +0.750)"


NEARNESS = (
    "KL from the source 0.0123 nats per token (0.0110 … 0.0140); 94.1 % of the most likely tokens agree (93.0 … 95.1 %)"
)


def test_fidelity_stands_beside_perplexity() -> None:
    record = measured(fidelity=FIDELITY, texts={"text": {**TEXT, "fidelity": FIDELITY}})
    assert tables.text_lines(record)[2:] == [NEARNESS]
    limited = {**FIDELITY, "max_kl": 0.013, "passed": False}
    both = {
        "text": {**TEXT, "fidelity": limited},
        "wiki": {**TEXT, "fidelity": {**limited, "max_kl": 0.1, "passed": True}},
    }
    lines = tables.text_lines(measured(texts=both))
    assert lines[2] == f"{NEARNESS}; budget 0.013: OUTSIDE (upper end at 95% 0.0140)"
    assert lines[5] == f"wiki: {NEARNESS}; budget 0.1: inside (upper end at 95% 0.0140)"
    rows = cells(tables.check_table(measured(texts=both, checks=[])))
    assert [row[0].strip() for row in rows] == [
        *("perplexity text", "perplexity wiki", "kl text (nats per token)", "top-1 agreement text"),
        *("kl wiki (nats per token)", "top-1 agreement wiki"),
    ]
    assert [cell.strip() for cell in rows[2][1:]] == ["0.0123", "0.0110 … 0.0140", "0.013", "FAILED"]
    assert [cell.strip() for cell in rows[3][1:]] == ["94.1 %", "93.0 … 95.1 %", "–", "no budget"]


def test_perplexity_without_a_limit_is_only_reported() -> None:
    text = {
        **TEXT,
        "max_dppl": None,
        "asked": "no limit",
        "passed": None,
        "fidelity": {**FIDELITY, "max_kl": 0.02, "passed": True},
    }
    record = measured(
        texts={"text": text}, budget={"max_dppl": None, "asked": "no limit", "max_kl": 0.02, "confidence": 0.95}
    )
    assert tables.text_lines(record)[1] == "no limit on perplexity was asked for (upper end at 95% +0.750)"
    assert tables.text_row("text", record.texts["text"])[-2:] == ["no limit", "no budget"]


@pytest.mark.parametrize(
    ("kl", "agreement", "said"),
    [
        (0.0, 1.0, "KL from the source 0 nats per token (0 … ∞); 100 % of"),
        (2.6e-5, 0.99996, "KL from the source 2.6e−05 nats per token (0 … ∞); 99.99 % of"),
        (1.5, 0.0, "KL from the source 1.500 nats per token (0 … ∞); 0.0 % of"),
        (float("nan"), float("nan"), "KL from the source – nats per token (0 … ∞); – % of"),
    ],
)
def test_small_and_large_divergences_can_be_read(kl: float, agreement: float, said: str) -> None:
    found = {**FIDELITY, "kl": kl, "kl_ci95": [0.0, float("inf")], "top1_agreement": agreement}
    assert str(measured(fidelity=found).fidelity).startswith(said)


def test_a_number_that_was_asked_for_is_said_once() -> None:
    record = measured(texts={"text": {**TEXT, "asked": "1"}})
    assert tables.text_lines(record)[1] == "budget +1.000: inside (upper end at 95% +0.750)"


def test_an_older_record_of_one_text_says_the_same() -> None:
    assert tables.text_lines(measured(texts={})) == tables.text_lines(measured())


def test_a_point_estimate_is_called_one() -> None:
    record = measured(budget={"max_dppl": 1.0, "asked": "1", "confidence": 0.0})
    assert "(point estimate +0.750)" in tables.text_lines(record)[1]


@pytest.mark.parametrize(
    ("higher", "limit", "passed", "row"),
    [
        (True, 0.15, False, ["−0.1000", "−0.2000 … +0.0000", "−0.1500", "FAILED"]),
        (False, 0.25, True, ["+0.1000", "+0.0000 … +0.2000", "+0.2500", "passed"]),
        (True, None, None, ["−0.1000", "−0.2000 … +0.0000", "–", "no budget"]),
    ],
)
def test_a_task_s_change_has_the_sign_of_its_metric(
    higher: bool, limit: float | None, passed: bool | None, row: list[str]
) -> None:
    task = {**TASK, "higher_is_better": higher, "max_drop": limit, "passed": passed}
    assert tables.task_row("piqa", measured(tasks={"piqa": task}).tasks["piqa"])[3:] == row


def test_a_check_names_what_failed() -> None:
    checks = [{"name": "perplexity text", "passed": True}, {"name": "task a", "passed": False, "detail": "too low"}]
    record = measured(checks=checks, tasks={"a": {**TASK, "max_drop": 0.15, "passed": False}}, warnings=["beware"])
    lines = tables.check_lines(record)
    assert lines[-3:] == ["warning: beware", "FAILED task a: too low", "FAILED: task a"]
    assert [row[-1].strip() for row in cells(tables.check_table(record))] == ["passed", "FAILED"]


def test_blocks_that_must_not_be_touched_are_named() -> None:
    assert tables.notes(measured()) == ["block 1 is unsafe: one row carries it"]
    kept = {"kind": "pruned", "rank": 0, "neurons": 83}
    mild = block(0, "pruned", 900, verdict="unsafe", reason="one row carries it", replacement=kept)
    (line,) = tables.notes(measured(blocks=[mild]))
    assert line.startswith("block 0 is unsafe as a linear map (one row carries it); it keeps 83 neurons")
    assert [row[-1].strip() for row in cells(tables.block_table(measured()))] == ["10.0×", "1,000"]


def test_a_model_without_measurements_says_so() -> None:
    head, block, end, weights = tables.info_lines(saved())
    assert head == "made from /home/me/gpt2 (gpt2) by compressor 0.1.0"
    assert block == "transformer.h.0.mlp: keeps 5 + rank 3"
    assert end.startswith("no measurements are recorded")
    assert weights.startswith("weights: the record has no hash")
    known = saved().model_copy(update={"compressed_sha256": "0123456789abcdef", "weights_match": False})
    assert tables.info_lines(known)[-1] == "weights: NOT those of the record (sha256 0123456789ab…)"


def test_block_numbers_are_drawn_together() -> None:
    assert block_numbers([]) == ""
    assert block_numbers([4, 1, 2, 3, 7, 8, 11]) == "1–4, 7, 8, 11"


EXPORT: dict[str, Any] = {
    **HEAD,
    "to": "onnx",
    "family": "opt",
    "dtype": "f32",
    "parameters": {"source": 100, "compressed": 80, "exported": 90},
    "without_cache_because": None,
    "for": "scoring",
    "checked": {"runtime": "ONNX Runtime 1", "logits_off": 2e-6},
    "out": "graph",
    "bytes": 1000,
}


def test_an_export_s_record_is_what_it_says() -> None:
    record = ExportRecord.model_validate(EXPORT)
    assert record.to_json_value() == EXPORT, "a key that was never set is not written, one that is null is"
    assert tables.export_lines(record) == [
        "graph: 1 kB, f32, 90 parameters (−10.00 % of the source's; compressed −20.00 %)",
        "checked in ONNX Runtime 1: logits off by 2e−06 of the largest",
        "for scoring",
    ]


def test_an_export_that_was_not_run_is_not_called_checked() -> None:
    record = ExportRecord.model_validate({**EXPORT, "checked": {"runtime": None}, "context": 2048})
    assert not any("checked" in line for line in tables.export_lines(record))
    assert tables.export_lines(record)[-1] == "context 2,048 tokens; run it: llama-cli -m graph"


def test_a_push_says_what_is_sent_and_what_is_not() -> None:
    values = {
        **{"directory": "small", "repo": "me/small", "branch": "main", "private": True, "sent": False},
        **{"files": [{"path": "config.json", "bytes": 1200}], "bytes": 1200, "notes": [], "reason": "--dry-run"},
        **{"left_out": {".env": "not written by compress"}, "card": {"pipeline_tag": "text-generation"}},
    }
    record = PushRecord.model_validate(values)
    assert record.to_json_value() == values
    lines = tables.push_lines(record)
    assert lines[:2] == [
        "1 file, 1,200 bytes would be sent to me/small, branch main, private",
        "left out: .env (not written by compress)",
    ]
    assert lines[-1] == "nothing was sent: --dry-run"
    assert any("names no license" in line for line in lines)
    done = record.model_copy(update={"sent": True, "url": "https://hub.example/me/small", "commit": "c0ffee"})
    assert tables.push_lines(done)[-1] == "https://hub.example/me/small (commit c0ffee)"
