"""Make transformers able to load compressed checkpoints, without importing transformers here.

After `import compressor`, `AutoModelForCausalLM.from_pretrained` loads a compressed checkpoint. Yet `import compressor`
must stay quick for the command line, so the loader is registered only when transformers itself is imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

TRIGGER_MODULE = "transformers.quantizers.auto"  # transformers imports it before it loads any model


def register_when_transformers_loads() -> None:
    """Register the loader now if transformers is imported already, else when it gets imported. Safe to call again."""
    if TRIGGER_MODULE in sys.modules:
        register()
    elif not any(isinstance(finder, RegistrationFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, RegistrationFinder())


def register() -> None:
    """Import the modeling file, which registers its loader with transformers."""
    importlib.import_module("compressor.modeling_compressor")


class RegistrationFinder(MetaPathFinder):
    """An import hook: TRIGGER_MODULE is found as the other finders do, but its loader calls `register` afterwards."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != TRIGGER_MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            register_after(spec.loader)
        return spec


def register_after(loader: Loader) -> None:
    """Make this loader call `register` once it has executed its module."""
    execute = loader.exec_module

    def execute_and_register(module: ModuleType) -> None:
        execute(module)
        register()

    loader.exec_module = execute_and_register  # type: ignore[method-assign]
