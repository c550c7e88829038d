"""The notebook of docs/ is one, has no stale outputs, and runs from the first cell to the last."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parent.parent / "docs" / "example.ipynb"


@pytest.fixture(scope="module")
def cells() -> list[dict[str, Any]]:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert set(notebook) == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    found: list[dict[str, Any]] = notebook["cells"]
    return found


def test_every_cell_is_well_formed_and_has_no_output(cells: list[dict[str, Any]]) -> None:
    keys = {"cell_type", "id", "metadata", "source"}
    assert len({cell["id"] for cell in cells}) == len(cells)
    for cell in cells:
        assert cell["cell_type"] in ("code", "markdown")
        assert set(cell) == (keys | {"execution_count", "outputs"} if cell["cell_type"] == "code" else keys)
        assert all(line.endswith("\n") for line in cell["source"][:-1])
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


def test_it_runs(cells: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code cells in one namespace, in order; the value of a cell's last line is shown as Jupyter shows it."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    shown = []
    for cell in (cell for cell in cells if cell["cell_type"] == "code"):
        program = ast.parse("".join(cell["source"]))
        last = program.body.pop() if isinstance(program.body[-1], ast.Expr) else None
        exec(compile(program, cell["id"], "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), cell["id"], "eval"), names)
            shown.append(value._repr_html_() if hasattr(value, "_repr_html_") else repr(value))
    assert names["checked"].passed is True
    assert names["result"].parameters.removed > 0
    assert shown[0].startswith("<div>")
    assert "True" in shown
    assert (tmp_path / "demo-small" / "report.html").is_file()
    assert names["model"].num_parameters() == names["result"].parameters.after
