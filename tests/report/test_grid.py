"""Tables on narrow terminals."""

from __future__ import annotations

import io

import pytest
from report.records import assessment
from rich.console import Console

from compressor.report import tables
from compressor.report.grid import Grid


def printed(grid: Grid, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(grid.fitted(width))
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_the_least_important_columns_go_first() -> None:
    grid = Grid(("block", "R²_lin", "interval", "verdict"), left=("verdict",), optional=("interval", "R²_lin"))
    grid.add_row("11", "0.952", "0.950 … 0.954", "unsafe")
    assert printed(grid, 80)[0].split() == ["block", "R²_lin", "interval", "verdict"]
    assert printed(grid, 26)[0].split() == ["block", "R²_lin", "verdict"]
    assert printed(grid, 15)[0].split() == ["block", "verdict"]
    assert printed(grid, 15)[1].split() == ["11", "unsafe"]


def test_two_columns_may_have_one_name() -> None:
    grid = Grid(("", "model", "model"), left=("", "model"))
    grid.add_row("parameters", "10", "20")
    assert printed(grid, 80)[1].split() == ["parameters", "10", "20"]


@pytest.mark.parametrize("width", [60, 80, 106, 160])
def test_the_block_its_r2_and_what_stands_there_are_always_told(width: int) -> None:
    lines = printed(tables.block_table(assessment()), width)
    assert max(map(len, lines)) <= width
    assert lines[0].split()[:2] == ["block", "R²_lin"]
    assert "verdict" in lines[0]
    assert "now" in lines[0].split()
