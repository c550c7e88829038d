"""The neurons of a feed-forward block: y = outer·act(inner x), or with a gate y = outer·(act(gate x) · inner x).

Which matrix is inner, gate or outer follows from their shapes; the activation is found by trying each one. An
arrangement is accepted only if it reproduces the block's own output on random rows. So no table of families is needed,
and a block that is built differently is never misread.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers.activations import ACT2FN

from compressor.models.blocks import Block, modules_of, placement_of
from compressor.models.offload import fetch_weights

ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2", "quick_gelu", "gelu_fast", "mish")
PROBE_ROWS = 16
TOLERANCE = 1e-4  # of the output's size, in float32


@dataclass(frozen=True)
class Matrix:
    """A weight [outputs, inputs] and its bias in a module of the model, read on each access and not stored here."""

    module: Any
    start: int | None = None  # the range of outputs, where two matrices are stored as one
    stop: int | None = None

    @property
    def weight(self) -> Tensor:
        fetch_weights(self.module)
        return weight_of(self.module)[self.start : self.stop]

    @property
    def bias(self) -> Tensor | None:
        fetch_weights(self.module)
        bias = getattr(self.module, "bias", None)
        return None if bias is None else bias.detach()[self.start : self.stop]

    def apply(self, x: Tensor) -> Tensor:
        """The matrix's output for rows x, in the precision of the rows."""
        bias = self.bias
        return nn.functional.linear(x, self.weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


@dataclass(frozen=True)
class Neurons:
    """The matrices of one block; `outer_path` is the path of the module whose input the neurons' activations are."""

    activation: str
    gate_matrix: Matrix | None
    inner_matrix: Matrix
    outer_matrix: Matrix
    outer_path: str
    count: int
    width: int
    biased: bool
    columns = 1  # of the activations, that belong to a neuron
    fixed = 0  # parameters that stay as long as a neuron stays

    @property
    def gated(self) -> bool:
        return self.gate_matrix is not None

    @property
    def size(self) -> int:
        """The number of parameters of one neuron."""
        return self.width * (2 + self.gated) + (1 + self.gated if self.biased else 0)

    @property
    def outer(self) -> Tensor:
        """[neurons, width]: the row that each neuron adds to the output, times its activation."""
        return self.outer_matrix.weight.T

    def matrices(self) -> dict[str, Tensor]:
        """Weights and biases of inner and gate, by name; the first dimension is the neuron."""
        tensors = {"inner": self.inner_matrix.weight, "inner_bias": self.inner_matrix.bias}
        if self.gate_matrix is not None:
            tensors |= {"gate": self.gate_matrix.weight, "gate_bias": self.gate_matrix.bias}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def activate(self, x: Tensor) -> Tensor:
        """The activations of all neurons for these input rows, in the precision of the rows."""
        act = ACT2FN[self.activation]
        inner = self.inner_matrix.apply(x)
        return act(inner) if self.gate_matrix is None else act(self.gate_matrix.apply(x)) * inner  # type: ignore[no-any-return]


@torch.no_grad()
def find_neurons(model: nn.Module, block: Block) -> Neurons | None:
    """The block's neurons, or None when the block has none left, or neither of the two forms."""
    matrices = list_matrices(model, block)
    if not matrices or not all(module.weight.numel() for _, module in matrices):
        return None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(PROBE_ROWS, block.width, generator=generator).to(placement_of(model, block)["device"])
    expected = run_in_float32(model, block, x)
    scale = expected.square().mean().sqrt().clamp_min(1e-30)
    best, least = None, TOLERANCE
    for candidate in list_arrangements(matrices, block.width):
        output = candidate.outer_matrix.apply(candidate.activate(x))
        error = ((output - expected).square().mean().sqrt() / scale).item()
        if error < least:
            best, least = candidate, error
    return best


def count_neurons(model: nn.Module, block: Block) -> int | None:
    """How many neurons the shapes of the block's matrices speak of; None where they are arranged otherwise."""
    arrangement = next(list_arrangements(list_matrices(model, block), block.width), None)
    return None if arrangement is None else arrangement.count


def list_matrices(model: nn.Module, block: Block) -> list[tuple[str, Any]]:
    """The modules of a block that have a matrix, by path; none where they are not the two or three of an FFN."""
    paths = (block.path, *block.bypass)
    matrices = [
        (f"{path}.{name}" if name else path, module)
        for path, part in zip(paths, modules_of(model, block), strict=True)
        for name, module in part.named_modules()
        if isinstance(getattr(module, "weight", None), Tensor) and module.weight.ndim == 2
    ]
    return matrices if len(matrices) in (2, 3) else []


def run_in_float32(model: nn.Module, block: Block, x: Tensor) -> Tensor:
    """The block's output for rows [count, width] in float32: half precision cannot tell one gelu from another."""
    output = x[None]
    for number, module in enumerate(modules_of(model, block)):
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        precise = {name: tensor.float() for name, tensor in tensors.items() if tensor.is_floating_point()}
        residual = (torch.zeros_like(output),) if block.residual_inside and number == 0 else ()
        output = functional_call(module, precise, (output, *residual))
    return output[0]


def list_arrangements(matrices: list[tuple[str, Any]], width: int) -> Iterator[Neurons]:
    """Every way to read two or three matrices as the neurons of a block of this width, with every activation."""
    for *entries, (path, outer) in permutations(matrices) if matrices else ():
        weights = [weight_of(module) for _, module in entries]
        if len(weight_of(outer)) != width or any(weight.shape[1] != width for weight in weights):
            continue
        count = weight_of(outer).shape[1]
        inputs = [Matrix(module) for _, module in entries]
        if len(inputs) == 1 and len(weights[0]) == 2 * count:  # gate and inner in one matrix
            inputs = [Matrix(entries[0][1], start, start + count) for start in (0, count)]
        has_bias = {matrix.bias is not None for matrix in inputs}
        if any(len(matrix.weight) != count for matrix in inputs) or len(has_bias) > 1:
            continue
        for ordered in permutations(inputs):
            gate = ordered[0] if len(ordered) == 2 else None
            for activation in ACTIVATIONS:
                yield Neurons(activation, gate, ordered[-1], Matrix(outer), path, count, width, has_bias == {True})


def weight_of(module: Any) -> Tensor:
    """A module's weight as [outputs, inputs]; GPT-2's Conv1D stores it transposed."""
    weight: Tensor = module.weight.detach()
    return weight if isinstance(module, nn.Linear) else weight.T
