"""The student: a compressed model's replacements, and what is trained beside them, as copies that can be trained."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from compressor.heal.settings import HealParams
from compressor.models.blocks import Block, find_blocks
from compressor.models.branches import layer_of
from compressor.models.offload import device_of
from compressor.models.source import stored_dtype
from compressor.patch.tree import HealedReplacements, Replacements, as_stored, modules_beside


def make_student(model: Any, blocks: list[Block], fits: Replacements, params: HealParams) -> HealedReplacements:
    """Copies of all that is trained, in float32: the replacements, and beside them nothing, the norms, or all weights
    of the layers from the first replaced one on. Embeddings and head are never trained."""
    sources = {**find_beside(model, blocks, fits, params), **modules_beside(fits)}
    beside = {path: copy_for_training(module) for path, module in sources.items()}
    return HealedReplacements({index: copy_for_training(module) for index, module in fits.items()}, beside)


def copy_for_training(module: Any) -> Any:
    """A float32 copy whose weights are trained; buffers stay as they are."""
    copied = copy.deepcopy(module)
    for part in copied.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if parameter.is_floating_point():
                setattr(part, name, nn.Parameter(parameter.detach().float().clone(), requires_grad=True))
    return copied


def find_beside(model: Any, blocks: list[Block], fits: Replacements, params: HealParams) -> dict[str, nn.Module]:
    """The modules of the source that are trained with the replacements, by path."""
    if params == "replaced":
        return {}
    first = min((layer_of(index) for index in fits), default=0)
    layers = [block.layer_path for block in find_blocks(model)]
    by_index = {block.index: block for block in blocks}
    replaced = [path for index in fits for path in (by_index[index].path, *by_index[index].bypass)]
    roots = [*layers[first:], *modules_after(model, layers[-1])]
    found = {}
    for root in roots:
        for name, module in model.get_submodule(root).named_modules(prefix=root):
            inside = any(name == path or name.startswith(f"{path}.") for path in replaced)
            if is_leaf(module) and not inside and (params == "all" or all(p.ndim == 1 for p in module.parameters())):
                found[name] = module
    return found


def is_leaf(module: nn.Module) -> bool:
    """Whether a module has weights, all its own."""
    return any(True for _ in module.parameters()) and not any(True for _ in module.children())


def find_changed(model: Any, source: Any) -> dict[str, nn.Module]:
    """The modules of a compressed model that stand in its source too, with other weights: an earlier healing trained
    them."""
    stock = {name: module for name, module in source.named_modules() if is_leaf(module)}
    changed = {}
    for name, module in model.named_modules():
        before = stock.get(name)
        if before is None or type(before) is not type(module) or not is_leaf(module):
            continue
        pairs = zip(module.parameters(), before.parameters(), strict=True)
        if any(now.shape == then.shape and not torch.equal(now, then) for now, then in pairs):
            changed[name] = module
    return changed


@torch.no_grad()
def modules_after(model: Any, last_layer: str) -> list[str]:
    """The paths of modules with weights that run after the last layer, without the head: the final norm."""
    names = {id(module): name for name, module in model.named_modules()}
    order: list[nn.Module] = []
    leaves = [module for module in model.modules() if is_leaf(module)]
    layer = model.get_submodule(last_layer)
    handles = [m.register_forward_hook(lambda m, _a, _o: order.append(m)) for m in [*leaves, layer]]
    try:
        model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=device_of(model)), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    after = order[max(i for i, m in enumerate(order) if m is layer) + 1 :]
    kept_out = {id(model.get_output_embeddings()), id(model.get_input_embeddings())}
    return [names[id(module)] for module in after if id(module) not in kept_out]


def trained_parameters(student: HealedReplacements) -> dict[str, nn.Parameter]:
    """Every weight that is trained, by a name that is the same in every run."""
    parameters: dict[str, nn.Parameter] = {}
    for index, module in sorted(student.items(), key=lambda item: item[0]):
        parameters |= {f"{index}/{name}": p for name, p in module.named_parameters() if p.requires_grad}
    for path, beside in sorted(student.beside.items()):
        parameters |= {f"{path}/{name}": p for name, p in beside.named_parameters() if p.requires_grad}
    return parameters


def finish_student(model: Any, blocks: list[Block], student: HealedReplacements) -> HealedReplacements:
    """The trained modules as replacements: rounded to the dtype of the checkpoint, and no longer trained."""
    stored, by_index = stored_dtype(model), {block.index: block for block in blocks}
    finished = copy.deepcopy(dict(student))
    modules = {index: as_stored(module, model, by_index[index], stored) for index, module in finished.items()}
    beside = {}
    for path, module in copy.deepcopy(student.beside).items():
        place: Tensor = next(model.get_submodule(path).parameters())
        for name, parameter in list(module.named_parameters()):
            rounded = parameter.detach().to(stored).to(place)
            setattr(module, name, nn.Parameter(rounded, requires_grad=False))
        beside[path] = module
    return HealedReplacements(modules, beside)


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """While open, no weight of the model collects a gradient."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    for p in trainable:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in trainable:
            p.requires_grad_(True)


def load_parameters(student: HealedReplacements, values: Mapping[str, Tensor]) -> None:
    """Give every trained weight the value of its name."""
    with torch.no_grad():
        for name, parameter in trained_parameters(student).items():
            parameter.copy_(values[name])
