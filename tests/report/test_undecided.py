"""A block without a verdict, the R² of the chosen ridge, and an R² without an interval: shown everywhere."""

from __future__ import annotations

from typing import Any

from report.records import profile_values
from rich.console import Console

from compressor.report.card import measured_blocks
from compressor.report.charts import charts_of
from compressor.report.page import page
from compressor.report.record import Record
from compressor.report.summary import profile_lines, profile_table
from compressor.report.tables import block_table


def few_rows(**changed: Any) -> Record:
    values = profile_values()
    few = {
        "r2_lin": -0.4,
        "verdict": None,
        "reason": "undecided: too few rows",
        "r2_ridge": 0.7654,
        "r2_lin_ci95": [None, None],
    }
    values["blocks"][0] |= {**few, **changed}
    values["warnings"] = ["R²_lin shows the noise of the fit; --calib-tokens 19200 would do"]
    return Record.model_validate(values)


def printed(table: Any) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table.fitted(200))
    return capture.get()


def test_an_undecided_block_is_shown_as_such() -> None:
    record = few_rows()
    table = printed(profile_table(record.blocks, None))
    assert "best ridge" in table
    first = table.splitlines()[1].split()
    assert "0.765" in first
    assert "–" in first
    assert first[-1] == "undecided"
    assert "undecided" in printed(block_table(record))
    lines = "\n".join(profile_lines(record))
    assert "warning: R²_lin shows the noise of the fit; --calib-tokens 19200 would do" in lines
    assert "Undecided, for too few rows were fitted: 0." in lines
    assert "| undecided |" in measured_blocks(record.blocks)
    shown = page(record)
    assert "undecided: too few rows" in shown
    assert "best ridge" in shown
    assert "0.765" in shown
    assert ">nan" not in shown
    assert any('"undecided"' in str(chart.spec).replace("'", '"') for chart in charts_of(record))


def test_where_every_block_is_decided_nothing_is_said_of_it() -> None:
    record = few_rows(verdict="safe", r2_ridge=-0.4, r2_lin_ci95=[0.1, 0.2])
    assert "best ridge" not in printed(profile_table(record.blocks, None))
    assert "best ridge" not in page(record)
    assert "Undecided" not in "\n".join(profile_lines(record))


def test_the_record_keeps_null() -> None:
    block = few_rows().to_json_value()["blocks"][0]
    assert block["verdict"] is None
    assert block["r2_ridge"] == 0.7654
    assert Record.model_validate(few_rows().to_json_value()).blocks[0].verdict is None
