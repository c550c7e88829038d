"""The shape of the code: one direction of imports, mathematics apart, small modules."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "compressor"
# A room imports only from those to its right.
ROOMS = [
    "cli",
    "pipelines",
    "export",
    "report",
    "plan",
    "heal",
    "measure",
    "evaluate",
    "patch",
    "models",
    "text",
    "modeling_compressor",
    "runtime",
]
MAY = {"report": {"runtime"}, "export": {"report", "patch", "models", "text", "modeling_compressor", "runtime"}}
MAY |= {"text": {"runtime"}, "modeling_compressor": set()}


def imports(file: Path) -> set[str]:
    """The modules of this package that a file imports, at the top or inside a function, as `room.module`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "compressor":
            whole = [f"{node.module}.{alias.name}" for alias in node.names] if node.module.count(".") < 2 else []
            found |= {path.removeprefix("compressor.") for path in whole or [node.module]}
    return found


def test_rooms_import_one_way() -> None:
    for place, room in enumerate(ROOMS):
        files = [PACKAGE / f"{room}.py"] if (PACKAGE / f"{room}.py").exists() else (PACKAGE / room).rglob("*.py")
        for file in files:
            used = {path.split(".")[0] for path in imports(file)} & set(ROOMS) - {room}
            assert used <= MAY.get(room, set(ROOMS[place + 1 :])), f"{file} imports {used}"


def test_the_report_computes_nothing() -> None:
    for file in (PACKAGE / "report").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        roots = {alias.name.split(".")[0] for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        roots |= {str(node.module).split(".")[0] for node in nodes if isinstance(node, ast.ImportFrom)}
        assert not roots & {"torch", "numpy", "scipy", "transformers", "safetensors"}, file.name


def test_the_top_level_holds_the_rooms_and_little_else() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    modules = {path.stem for path in PACKAGE.glob("*.py")}
    assert folders | modules - {"__init__", "__main__", "registration"} == {*ROOMS, "demo", "demo_llama", "mix"}


def test_the_patcher_pulls_in_no_planner() -> None:
    code = "import sys, compressor.patch.tree; print(*(m for m in sys.modules if m.startswith('compressor.')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    rooms = {name.split(".")[1] for name in done.stdout.split()}
    assert rooms <= {"patch", "models", "text", "modeling_compressor", "runtime", "registration"}


def test_the_mathematics_knows_nothing_of_transformers() -> None:
    for file in ("measure/moments.py", "measure/regression.py", "plan/selection.py"):
        assert "transformers" not in (PACKAGE / file).read_text(encoding="utf-8")
        assert imports(PACKAGE / file) <= {"measure.moments", "measure.regression"}


def test_the_copied_file_is_self_contained() -> None:
    tree = ast.parse((PACKAGE / "modeling_compressor.py").read_text(encoding="utf-8"))
    roots = {node.module.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    assert "compressor" not in roots
    assert roots & {"torch", "transformers"} == {"torch", "transformers"}


def test_no_module_is_over_500_lines_and_most_are_under_200() -> None:
    copied = PACKAGE / "modeling_compressor.py"  # goes into checkpoints as one file
    lengths = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in PACKAGE.rglob("*.py")}
    sizes = sorted(length for file, length in lengths.items() if file != copied)
    assert sizes[-1] <= 500
    assert lengths[copied] <= 700
    assert sizes[len(sizes) // 2] < 200
