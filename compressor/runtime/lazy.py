"""Packages that import their public names on first use, so that the command line starts quickly."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any


class LazyPackage(ModuleType):
    """A package whose public names are imported on first use. One with a verb can be called as a function as well:
    `compressor.measure` is a room of this package and, as `compressor.measure(model, text)`, a step of its Python API.
    """

    _homes: Mapping[str, str]  # public name → "module" or "module:name" inside the package; a room is its own home
    _verb: str | None

    def __getattr__(self, name: str) -> Any:
        home = self.__dict__["_homes"].get(name)
        if home is None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        path, _, attribute = home.partition(":")
        module = importlib.import_module(f"{self.__name__}.{path}")
        return module if path == name else getattr(module, attribute or name)

    def __dir__(self) -> list[str]:
        """The public names, and what every module has; not the rooms and imports behind them."""
        return sorted({*self._homes, *(name for name in super().__dir__() if name.startswith("__"))})

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if self._verb is None:
            raise TypeError(f"module {self.__name__!r} is not callable")
        return getattr(self, self._verb)(*arguments, **options)

    @property
    def __signature__(self) -> inspect.Signature:
        if self._verb is None:
            raise AttributeError("__signature__")
        return inspect.signature(getattr(self, self._verb))


def offer(package: str, homes: Mapping[str, str], verb: str | None = None) -> list[str]:
    """Let the package offer these names lazily, and be callable as its verb; return the names for `__all__`."""
    module = sys.modules[package]
    module._homes, module._verb = dict(homes), verb  # type: ignore[attr-defined]
    module.__class__ = LazyPackage
    return list(homes)
