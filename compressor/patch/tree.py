"""Put replacements into the module tree of a model in memory, and take them out again."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from compressor.modeling_compressor import KeptHeads, Replacement, restore, specs, swap
from compressor.models.blocks import Block, placement_of
from compressor.models.branches import BranchIndex
from compressor.models.source import identify
from compressor.runtime.cache import digest

__all__ = ["HealedReplacements", "Originals", "identify_patched", "patch", "patched", "specs", "unpatch"]

Originals = dict[str, nn.Module]  # by path, the modules that were replaced
AnyModule = TypeVar("AnyModule", bound=Replacement | KeptHeads)
Replacements = Mapping[BranchIndex, Replacement | KeptHeads]


class HealedReplacements(dict[BranchIndex, Replacement | KeptHeads]):
    """Replacements that were trained, with the modules `beside` them that were trained too, by path: copies of modules
    of the source, such as norms, with other weights."""

    def __init__(self, modules: Replacements, beside: Mapping[str, nn.Module] | None = None) -> None:
        super().__init__(modules)
        self.beside = dict(beside or {})


def modules_beside(replacements: Replacements) -> dict[str, nn.Module]:
    """The modules of the source that change with these replacements without being replaced, by path."""
    return replacements.beside if isinstance(replacements, HealedReplacements) else {}


def patch(model: nn.Module, blocks: Iterable[Block], replacements: Replacements) -> Originals:
    """Replace the blocks with these indices and return the original modules, which `unpatch` puts back.

    The replacements must already have the model's dtype and device (`as_stored`).
    """
    by_index = {block.index: block for block in blocks}
    modules: dict[str, Replacement | KeptHeads] = {}
    for index, module in replacements.items():
        if index not in by_index:
            raise ValueError(f"there is no block {index} to replace; the model has blocks {sorted(by_index)}")
        block = by_index[index]
        if (module.width, module.residual_inside) != (block.width, block.residual_inside):
            raise ValueError(
                f"the replacement for {block.path} has width {module.width} and residual_inside="
                f"{module.residual_inside}; the block has {block.width} and {block.residual_inside}"
            )
        module.bypass = block.bypass
        modules[block.path] = module
    originals = swap(model, modules)
    for path, beside in modules_beside(replacements).items():
        originals[path] = model.get_submodule(path)
        model.set_submodule(path, beside)
    return originals


def unpatch(model: nn.Module, originals: Originals) -> None:
    """Put the original modules back."""
    restore(model, originals)


@contextmanager
def patched(model: nn.Module, blocks: Iterable[Block], replacements: Replacements) -> Iterator[None]:
    """While the context is open, the model is patched."""
    originals = patch(model, blocks, replacements)
    try:
        yield
    finally:
        unpatch(model, originals)


def identify_patched(model: Any, replacements: Replacements) -> dict[str, Any]:
    """Everything that the outputs of a model with these replacements depend on, for cache keys."""
    replaced = {
        str(index): [json.dumps(module.spec(), sort_keys=True), digest(sorted(module.state_dict().items()))]
        for index, module in sorted(replacements.items(), key=lambda item: item[0])
    }
    beside = {
        path: digest(sorted(module.state_dict().items())) for path, module in modules_beside(replacements).items()
    }
    return {**identify(model), "replaced": replaced, **({"beside": beside} if beside else {})}


def as_stored(module: AnyModule, model: Any, block: Block, stored: torch.dtype) -> AnyModule:
    """The module with its parameters rounded to the checkpoint's dtype `stored`, on the device and in the dtype of the
    block. Buffers are only moved: positions would lose digits."""
    placement = placement_of(model, block)
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            rounded = parameter.detach().to(stored).to(**placement)
            setattr(part, name, torch.nn.Parameter(rounded, requires_grad=parameter.requires_grad))
    module.to(placement["device"])
    return module
