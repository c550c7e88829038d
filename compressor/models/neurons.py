"""The neurons of a feed-forward block: y = outer·act(inner x), or outer·(act(gate x) · inner x), whatever its family
calls the parts.

The matrices are found by their shapes and the activation by trying: what is found must reproduce the block's own output
on random rows. So a family needs no table here, and one that is built differently is never misread.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from compressor.models.blocks import Block, parts_of, placing, run_block
from compressor.models.offload import fetch

ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2", "quick_gelu", "gelu_fast", "mish")
PROBE_ROWS = 16
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}  # of the output's size; half precision is given 1e-2


@dataclass(frozen=True)
class Matrix:
    """A weight and its bias where they stand in the model, as [outputs, inputs]: read when asked for, never kept."""

    module: Any
    start: int | None = None  # the outputs that are meant, where two matrices are stored as one
    stop: int | None = None

    @property
    def weight(self) -> Tensor:
        fetch(self.module)
        return oriented(self.module)[self.start : self.stop]

    @property
    def bias(self) -> Tensor | None:
        fetch(self.module)
        bias = getattr(self.module, "bias", None)
        return None if bias is None else bias.detach()[self.start : self.stop]


@dataclass(frozen=True)
class Neurons:
    """The matrices of one block; `outer_path` is the module that the activations enter."""

    activation: str
    gate_matrix: Matrix | None
    inner_matrix: Matrix
    outer_matrix: Matrix
    outer_path: str
    count: int
    width: int
    biased: bool

    @property
    def gated(self) -> bool:
        return self.gate_matrix is not None

    @property
    def size(self) -> int:
        """Parameters of one neuron."""
        return self.width * (2 + self.gated) + (1 + self.gated if self.biased else 0)

    @property
    def outer(self) -> Tensor:
        """[neurons, width]: what every neuron adds to the output."""
        return self.outer_matrix.weight.T

    def matrices(self) -> dict[str, Tensor]:
        """What the kept neurons of a replacement are copied from, neurons first."""
        found = {"inner": self.inner_matrix.weight, "inner_bias": self.inner_matrix.bias}
        if self.gate_matrix is not None:
            found |= {"gate": self.gate_matrix.weight, "gate_bias": self.gate_matrix.bias}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def activate(self, x: Tensor) -> Tensor:
        act = ACT2FN[self.activation]
        inner = nn.functional.linear(x, self.inner_matrix.weight, self.inner_matrix.bias)
        if self.gate_matrix is None:
            return act(inner)  # type: ignore[no-any-return]
        return act(nn.functional.linear(x, self.gate_matrix.weight, self.gate_matrix.bias)) * inner  # type: ignore[no-any-return]


@torch.no_grad()
def find_neurons(model: nn.Module, block: Block) -> Neurons | None:
    """The block's neurons, or None when it is not built from them in one of the two ways."""
    paths = (block.path, *block.bypass)
    matrices = [
        (f"{path}.{name}" if name else path, module)
        for path, part in zip(paths, parts_of(model, block), strict=True)
        for name, module in part.named_modules()
        if isinstance(getattr(module, "weight", None), Tensor) and module.weight.ndim == 2
    ]
    if len(matrices) not in (2, 3):
        return None
    place = placing(model, block)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(PROBE_ROWS, block.width, generator=generator).to(**place)
    wanted = run_block(model, block, x)
    scale = wanted.float().square().mean().sqrt().clamp_min(1e-30)
    best, least = None, TOLERANCE.get(place["dtype"], 1e-2)
    for candidate in arrangements(matrices, block.width):
        output, bias = candidate.activate(x) @ candidate.outer, candidate.outer_matrix.bias
        output = output if bias is None else output + bias
        error = ((output - wanted).float().square().mean().sqrt() / scale).item()
        if error < least:
            best, least = candidate, error
    return best


def arrangements(matrices: list[tuple[str, Any]], width: int) -> Iterator[Neurons]:
    """Every way to read two or three matrices as a block of this width, with every activation."""
    for *entries, (path, last) in permutations(matrices):
        weights = [oriented(module) for _, module in entries]
        if len(oriented(last)) != width or any(weight.shape[1] != width for weight in weights):
            continue
        count = oriented(last).shape[1]
        columns = [Matrix(module) for _, module in entries]
        if len(columns) == 1 and len(weights[0]) == 2 * count:  # gate and inner in one matrix
            columns = [Matrix(entries[0][1], start, start + count) for start in (0, count)]
        lone = {matrix.bias is None for matrix in columns}
        if any(len(matrix.weight) != count for matrix in columns) or len(lone) > 1:
            continue
        for ordered in permutations(columns):
            gate = ordered[0] if len(ordered) == 2 else None
            for activation in ACTIVATIONS:
                yield Neurons(activation, gate, ordered[-1], Matrix(last), path, count, width, lone == {False})


def oriented(module: Any) -> Tensor:
    """The weight as [outputs, inputs]. GPT-2's Conv1D keeps it transposed."""
    weight: Tensor = module.weight.detach()
    return weight if isinstance(module, nn.Linear) else weight.T
