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

__all__ = ["Originals", "identify_patched", "patch", "patched", "specs", "unpatch"]

Originals = dict[str, nn.Module]  # by path, the modules that were replaced
AnyModule = TypeVar("AnyModule", bound=Replacement | KeptHeads)
Replacements = Mapping[BranchIndex, Replacement | KeptHeads]


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
    return swap(model, modules)


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
    return {**identify(model), "replaced": replaced}


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
