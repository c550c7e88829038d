"""What `import compressor` offers: the names of `__all__`, each with a docstring, and no torch before it is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

import compressor


def test_dir_lists_the_public_names_and_nothing_else() -> None:
    import compressor.pipelines.check
    import compressor.report.tables  # what was imported does not show

    public = {name for name in dir(compressor) if not name.startswith("__")}
    assert public == {name for name in compressor.__all__ if not name.startswith("__")}
    assert {"__doc__", "__name__", "__version__"} <= set(dir(compressor))
    assert "tables" not in dir(compressor.report)


def test_every_name_can_be_imported_by_a_star() -> None:
    names: dict[str, object] = {}
    exec("from compressor import *", names)
    assert set(compressor.__all__) <= set(names)


@pytest.mark.parametrize("name", compressor.__all__)
def test_every_public_name_has_a_docstring(name: str) -> None:
    documented = getattr(compressor, name).__doc__
    assert documented
    assert len(documented.split()) > 4


def test_asking_what_there_is_imports_no_torch() -> None:
    program = "import sys, compressor; dir(compressor); compressor.BudgetError; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
