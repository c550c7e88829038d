"""Weights that stay on disk: a decoder layer, the embedding or the head is read when it runs, and dropped when another
one does.

A model loaded this way takes the memory of its largest part, however many layers it has. Whoever runs a module finds
its weights there. Working layer by layer (`stream.Stream`) reads each of them once.
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

WEIGHTS = "compressor_weights"  # the attribute of a model that has its Weights
UNITS = "compressor_units"  # of a module, the units that its own parameters belong to
SMALL = 4 * 2**20  # bytes: norms and biases outside the layers stay in memory once they were read
MMAP_THRESHOLD, THRESHOLD_BYTES = -3, 2**20  # M_MMAP_THRESHOLD of glibc


@dataclass(eq=False)
class DiskTensor:
    """One stored tensor, and every place in the model that holds it (tied weights have several)."""

    empty: nn.Parameter  # on the meta device
    shard: Shard
    name: str
    unit: Unit
    places: list[tuple[nn.Module, str]] = field(default_factory=list)

    def put(self, parameter: nn.Parameter) -> None:
        for module, name in self.places:
            module._parameters[name] = parameter


@dataclass(eq=False)
class Unit:
    """A part of the model that is in memory together."""

    weights: Weights
    is_layer: bool
    tensors: list[DiskTensor] = field(default_factory=list)
    loaded: list[DiskTensor] = field(default_factory=list)

    @property
    def stays(self) -> bool:
        return (
            not self.is_layer and sum(slot.empty.numel() * slot.empty.element_size() for slot in self.tensors) <= SMALL
        )

    def load(self, modules: list[nn.Module]) -> None:
        """Read what these modules hold of it and is not there yet; a block that is replaced is not read for nothing."""
        wanted = {id(module) for module in modules}
        missing = [s for s in self.tensors if s not in self.loaded and any(id(part) in wanted for part, _ in s.places)]
        if missing and not self.stays:
            self.weights.make_room(self)
        for slot in missing:
            tensor = slot.shard.read(slot.name).to(device=self.weights.device, dtype=slot.empty.dtype)
            slot.put(nn.Parameter(tensor, requires_grad=slot.empty.requires_grad))
            self.loaded.append(slot)

    def drop(self) -> None:
        for slot in self.loaded:
            slot.put(slot.empty)
        self.loaded = []


class Weights:
    """All parameters of a model, on disk; one large unit of them is in memory at a time."""

    def __init__(self, device: torch.device, scratch: Path | None) -> None:
        self.device = device
        self.scratch = scratch_directory(self, scratch)  # for residual streams
        self.tensors: dict[str, DiskTensor] = {}  # by every name of the tensor in the model
        self.present: Unit | None = None

    def make_room(self, unit: Unit) -> None:
        if self.present is not None and self.present is not unit:
            self.present.drop()
        self.present = unit


def offload_to_disk(
    model: Any, index: dict[str, tuple[Shard, str]], layers: list[str], device: torch.device, scratch: Path | None
) -> None:
    """Let a model whose parameters are all on the meta device read them as they are needed.

    `index` says where each parameter lies; `layers` are the paths of the modules that are read as a whole.
    """
    return_freed_memory()
    weights = Weights(device, scratch)
    slots: dict[int, DiskTensor] = {}
    units: dict[str, Unit] = {}
    for path, module in model.named_modules():
        root = next((layer for layer in layers if f"{path}.".startswith(f"{layer}.")), path)
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            full = f"{path}.{name}" if path else name
            slot = slots.get(id(parameter))
            if slot is None:
                unit = units.setdefault(root, Unit(weights, root in layers))
                slot = slots[id(parameter)] = DiskTensor(parameter, *index[full], unit)
                unit.tensors.append(slot)
            slot.places.append((module, name))
            weights.tensors[full] = slot
            module.__dict__.setdefault(UNITS, {})[slot.unit] = None
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)
    for path, module in model.named_modules():
        if path in layers:
            module.register_forward_pre_hook(_enter_layer)
        elif UNITS in module.__dict__ and not any(path.startswith(f"{layer}.") for layer in layers):
            module.register_forward_pre_hook(lambda module, _: fetch_weights(module, inside=False))
    model.__dict__[WEIGHTS] = weights


def _enter_layer(layer: nn.Module, _: Any) -> None:
    if "forward" not in layer.__dict__:  # one that only hands its input on needs no weights: `stream.handing_on`
        fetch_weights(layer)


def disk_weights_of(model: Any) -> Weights | None:
    """The weights of a model that keeps them on disk, or None for one that is in memory."""
    found = model.__dict__.get(WEIGHTS)
    return found if isinstance(found, Weights) else None


def device_of(model: Any) -> torch.device:
    """Where the model computes."""
    weights = disk_weights_of(model)
    device: torch.device = model.device if weights is None else weights.device
    return device


def fetch_weights(module: nn.Module, *, inside: bool = True) -> None:
    """Have the module's weights in memory, with those of the modules inside it; running it does this by itself."""
    parts = list(module.modules()) if inside else [module]
    for unit in {unit: None for part in parts for unit in part.__dict__.get(UNITS, ())}:
        unit.load(parts)


def read_tensor(model: Any, name: str) -> Tensor:
    """A parameter or buffer of the model by its name; one that is on disk is read and stays in nobody's memory."""
    place, _, last = name.rpartition(".")
    module = model.get_submodule(place)
    tensor: Tensor = getattr(module, last)
    weights = disk_weights_of(model)
    if weights is None or tensor.device.type != "meta":
        return tensor.detach()
    slot = weights.tensors[name]
    return slot.shard.read(slot.name).to(slot.empty.dtype)


def return_freed_memory() -> None:
    """Have glibc give large blocks back at once: otherwise the layers that are gone stay in its heap."""
    try:
        ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, THRESHOLD_BYTES)
    except (OSError, AttributeError):
        return  # another C library, which has its own ways
