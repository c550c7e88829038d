"""Weights that stay on disk: each unit of a model is read when it runs, and dropped when the next one is read.

A unit is a part whose weights are in memory together: a decoder layer, or a single module outside the layers, such as
the embedding or the head. So a model takes the memory of its largest unit, however many layers it has. Reading happens
in forward hooks, so callers run modules as usual. Working layer by layer (`residual.Stream`) reads each layer once.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compressor.models.safetensors_files import Shard
from compressor.runtime.locks import scratch_directory

WEIGHTS = "compressor_weights"  # the attribute of a model that holds its DiskWeights
UNITS = "compressor_units"  # the attribute of a module that holds the units its own parameters belong to
SMALL_UNIT_BYTES = 4 * 2**20  # smaller units outside the layers, such as norms, stay in memory once they were read
M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES = -3, 2**20  # an option of glibc's mallopt, and its value


@dataclass(eq=False)
class DiskTensor:
    """One stored tensor, and every module that has it as a parameter (tied weights have several)."""

    placeholder: nn.Parameter  # on the meta device: stands in the model while the tensor is not in memory
    shard: Shard
    name: str
    unit: Unit
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)

    def read(self) -> Tensor:
        """The tensor as the model computes with it, on the CPU."""
        return self.shard.read(self.name).to(self.placeholder.dtype)

    def set_parameter(self, parameter: nn.Parameter) -> None:
        for module, name in self.owners:
            module._parameters[name] = parameter


@dataclass(eq=False)
class Unit:
    """A part of the model whose weights are in memory together."""

    weights: DiskWeights
    is_layer: bool
    tensors: list[DiskTensor] = field(default_factory=list)
    loaded: list[DiskTensor] = field(default_factory=list)

    @property
    def stays_in_memory(self) -> bool:
        parameters = [stored.placeholder for stored in self.tensors]
        return not self.is_layer and sum(p.numel() * p.element_size() for p in parameters) <= SMALL_UNIT_BYTES

    def load(self, modules: list[nn.Module]) -> None:
        """Read the tensors of these modules that are not in memory yet, and no others: a replaced block is not read."""
        wanted = {id(module) for module in modules}
        missing = [s for s in self.tensors if s not in self.loaded and any(id(part) in wanted for part, _ in s.owners)]
        if missing and not self.stays_in_memory:
            self.weights.drop_other_unit(self)
        for stored in missing:
            tensor = stored.read().to(self.weights.device)
            stored.set_parameter(nn.Parameter(tensor, requires_grad=stored.placeholder.requires_grad))
            self.loaded.append(stored)

    def drop(self) -> None:
        """Free the memory of the tensors; the files still have them."""
        for stored in self.loaded:
            stored.set_parameter(stored.placeholder)
        self.loaded = []


class DiskWeights:
    """All parameters of a model, on disk; one large unit of them is in memory at a time."""

    def __init__(self, device: torch.device, scratch: Path | None) -> None:
        self.device = device
        self.scratch = scratch_directory(self, scratch)  # for residual streams
        self.tensors: dict[str, DiskTensor] = {}  # a tied tensor under each of its names
        self.loaded_unit: Unit | None = None

    def drop_other_unit(self, unit: Unit) -> None:
        """Drop the unit that is in memory, unless it is this one, which is loaded next."""
        if self.loaded_unit is not None and self.loaded_unit is not unit:
            self.loaded_unit.drop()
        self.loaded_unit = unit


def offload_to_disk(
    model: Any, index: dict[str, tuple[Shard, str]], layers: list[str], device: torch.device, scratch: Path | None
) -> None:
    """Make a model whose parameters are all on the meta device read them from disk when they are needed.

    `index` gives the file and the stored name of each parameter; `layers` are the paths of the decoder layers.
    """
    return_freed_memory()
    weights = DiskWeights(device, scratch)
    tensors: dict[int, DiskTensor] = {}
    units: dict[str, Unit] = {}
    for path, module in model.named_modules():
        root = next((layer for layer in layers if f"{path}.".startswith(f"{layer}.")), path)
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            full_name = f"{path}.{name}" if path else name
            stored = tensors.get(id(parameter))
            if stored is None:
                unit = units.setdefault(root, Unit(weights, root in layers))
                stored = tensors[id(parameter)] = DiskTensor(parameter, *index[full_name], unit)
                unit.tensors.append(stored)
            stored.owners.append((module, name))
            weights.tensors[full_name] = stored
            module.__dict__.setdefault(UNITS, {})[stored.unit] = None
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)
    for path, module in model.named_modules():
        if path in layers:
            module.register_forward_pre_hook(_enter_layer)
        elif UNITS in module.__dict__ and not any(path.startswith(f"{layer}.") for layer in layers):
            module.register_forward_pre_hook(lambda module, _: fetch_weights(module, inside=False))
    model.__dict__[WEIGHTS] = weights


def _enter_layer(layer: nn.Module, _: Any) -> None:
    if "forward" not in layer.__dict__:  # `residual.passing_through` sets a forward that needs no weights
        fetch_weights(layer)


def disk_weights_of(model: Any) -> DiskWeights | None:
    """The weights of a model that keeps them on disk, or None for one that is in memory."""
    weights = model.__dict__.get(WEIGHTS)
    return weights if isinstance(weights, DiskWeights) else None


def forget_disk_weights(model: Any) -> None:
    """Let nothing be read from disk any more when the model runs; whoever calls this has put other tensors into it."""
    for module in model.modules():
        module.__dict__.pop(UNITS, None)
    del model.__dict__[WEIGHTS]


def is_as_stored(weights: DiskWeights, name: str, parameter: Tensor) -> bool:
    """Whether this parameter of the model is one that is on disk, and was not changed since it was read."""
    stored = weights.tensors.get(name)
    if stored is None:
        return False
    module, own_name = stored.owners[0]
    unchanged = parameter is stored.placeholder or parameter._version == 0
    return module._parameters[own_name] is parameter and unchanged


def device_of(model: Any) -> torch.device:
    """The device that the model computes on."""
    weights = disk_weights_of(model)
    device: torch.device = model.device if weights is None else weights.device
    return device


def fetch_weights(module: nn.Module, *, inside: bool = True) -> None:
    """Read the weights of the module and, with `inside`, of its submodules; a forward pass does so by itself."""
    parts = list(module.modules()) if inside else [module]
    for unit in {unit: None for part in parts for unit in part.__dict__.get(UNITS, ())}:
        unit.load(parts)


def read_tensor(model: Any, name: str) -> Tensor:
    """A parameter or buffer of the model by its name; one that is on disk is read, but not put into the model."""
    path, _, attribute = name.rpartition(".")
    tensor: Tensor = getattr(model.get_submodule(path), attribute)
    weights = disk_weights_of(model)
    if weights is None or tensor.device.type != "meta":
        return tensor.detach()
    return weights.tensors[name].read()


def return_freed_memory() -> None:
    """Make glibc return large freed blocks to the system at once; otherwise dropped layers stay in its heap."""
    try:
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
    except (OSError, AttributeError):
        return  # another C library than glibc
