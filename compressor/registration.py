"""Teach transformers to load compressed checkpoints as soon as it is imported, and not import it before.

`import compressor` must stay quick for the command line, yet be enough for `AutoModelForCausalLM.from_pretrained`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

AWAITED = "transformers.quantizers.auto"  # no model loads before this module is there


def register_when_transformers_loads() -> None:
    """Register the loader now if transformers is there already, else when it gets imported. Safe to call again."""
    if AWAITED in sys.modules:
        register()
    elif not any(isinstance(finder, Awaiter) for finder in sys.meta_path):
        sys.meta_path.insert(0, Awaiter())


def register() -> None:
    importlib.import_module("compressor.modeling_compressor")


class Awaiter(MetaPathFinder):
    """Finds the awaited module as the next finders do, with a loader that registers after running it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != AWAITED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            register_after(spec.loader)
        return spec


def register_after(loader: Loader) -> None:
    run = loader.exec_module

    def run_and_register(module: ModuleType) -> None:
        run(module)
        register()

    loader.exec_module = run_and_register  # type: ignore[method-assign]
