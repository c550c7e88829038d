"""The shape of the code: one direction of imports, mathematics apart, quick to start."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "compressor"
# Each module may import those before it, never those after it.
ORDER = [
    "errors",
    "modeling_compressor",
    "names",
    "charts",
    "hovering",
    "forms",
    "moments",
    "registration",
    "options",
    "configuration_decilm",
    "words",
    "capacity",
    "progress",
    "parsing",
    "llamacpp",
    "ranks",
    "interrupting",
    "network",
    "reporting",
    "scales",
    "frontier",
    "regression",
    "vocabulary",
    "ending",
    "locking",
    "text",
    "hub",
    "taskfiles",
    "markup",
    "record",
    "layout",
    "subsets",
    "directories",
    "budget",
    "planfile",
    "charting",
    "summarising",
    "plots",
    "figures",
    "terminal",
    "cache",
    "sections",
    "weights",
    "page",
    "streaming",
    "scrutiny",
    "blocks",
    "checkpoint",
    "sources",
    "neurons",
    "profiles",
    "stream",
    "models",
    "patching",
    "folding",
    "evaluating",
    "measuring",
    "probing",
    "origins",
    "rereading",
    "timing",
    "stock",
    "sweeping",
    "tasks",
    "sensitivity",
    "dissecting",
    "generating",
    "crossing",
    "metadata",
    "scores",
    "llamas",
    "onnx_files",
    "verdicts",
    "surveying",
    "recipe",
    "assessing",
    "card",
    "decilm",
    "gguf_files",
    "exports",
    "studying",
    "statistics",
    "baseline",
    "parcels",
    "announcing",
    "leaflets",
    "jobs",
    "fitting",
    "pushing",
    "exporting",
    "agreement",
    "delivery",
    "trials",
    "planning",
    "records",
    "walkback",
    "linearity",
    "checking",
    "saving",
    "pipeline",
    "profiling",
    "cli",
    "__main__",
]


def imports(file: Path) -> set[str]:
    """The package's modules that a file imports, at the top or inside a function."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "compressor":
            names = [alias.name for alias in node.names] if node.module == "compressor" else [node.module.split(".")[1]]
            found |= {name for name in names if (PACKAGE / f"{name}.py").exists()}
    return found


def test_imports_point_one_way() -> None:
    assert sorted(ORDER) == sorted(file.stem for file in PACKAGE.glob("*.py") if file.stem != "__init__")
    for name in ORDER:
        later = imports(PACKAGE / f"{name}.py") & set(ORDER[ORDER.index(name) :])
        assert not later, f"{name} imports {later}, which come after it"


def test_the_mathematics_knows_nothing_of_transformers() -> None:
    for name in ("moments", "regression"):
        source = (PACKAGE / f"{name}.py").read_text(encoding="utf-8")
        assert "transformers" not in source
        assert imports(PACKAGE / f"{name}.py") <= {"moments"}


def test_the_copied_file_is_self_contained() -> None:
    tree = ast.parse((PACKAGE / "modeling_compressor.py").read_text(encoding="utf-8"))
    roots = {node.module.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    assert "compressor" not in roots
    assert roots & {"torch", "transformers"} == {"torch", "transformers"}


def test_no_module_is_over_500_lines() -> None:
    for file in PACKAGE.glob("*.py"):
        assert len(file.read_text(encoding="utf-8").splitlines()) <= 500, file.name
