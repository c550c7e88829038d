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

from compressor.blocks import Block, run_block

ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2", "quick_gelu", "gelu_fast", "mish")
PROBE_ROWS = 16
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}  # of the output's size; half precision is given 1e-2


@dataclass(frozen=True)
class Neurons:
    """The matrices of one block, neurons first; `outer_path` is the module that the activations enter."""

    activation: str
    gate: Tensor | None  # [neurons, width]
    inner: Tensor  # [neurons, width]
    outer: Tensor  # [neurons, width]
    gate_bias: Tensor | None
    inner_bias: Tensor | None
    outer_path: str

    @property
    def count(self) -> int:
        return len(self.inner)

    @property
    def gated(self) -> bool:
        return self.gate is not None

    @property
    def size(self) -> int:
        """Parameters of one neuron."""
        biases = 0 if self.inner_bias is None else 1 + self.gated
        return self.inner.shape[1] * (2 + self.gated) + biases

    def activate(self, x: Tensor) -> Tensor:
        act = ACT2FN[self.activation]
        inner = nn.functional.linear(x, self.inner, self.inner_bias)
        if self.gate is None:
            return act(inner)  # type: ignore[no-any-return]
        return act(nn.functional.linear(x, self.gate, self.gate_bias)) * inner  # type: ignore[no-any-return]


@torch.no_grad()
def find_neurons(model: nn.Module, block: Block) -> Neurons | None:
    """The block's neurons, or None when it is not built from them in one of the two ways."""
    parts = [model.get_submodule(path) for path in (block.path, *block.bypass)]
    matrices = [
        (f"{path}.{name}" if name else path, module)
        for path, part in zip((block.path, *block.bypass), parts, strict=True)
        for name, module in part.named_modules()
        if isinstance(getattr(module, "weight", None), Tensor) and module.weight.ndim == 2
    ]
    if len(matrices) not in (2, 3) or any(p.device.type == "meta" for part in parts for p in part.parameters()):
        return None
    reference = matrices[0][1].weight
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(PROBE_ROWS, block.width, generator=generator).to(reference)
    wanted = run_block(model, block, x)
    scale = wanted.float().square().mean().sqrt().clamp_min(1e-30)
    best, least = None, TOLERANCE.get(reference.dtype, 1e-2)
    for candidate, outer_bias in arrangements(matrices, block.width):
        output = candidate.activate(x) @ candidate.outer
        output = output if outer_bias is None else output + outer_bias
        error = ((output - wanted).float().square().mean().sqrt() / scale).item()
        if error < least:
            best, least = candidate, error
    return best


def arrangements(matrices: list[tuple[str, Any]], width: int) -> Iterator[tuple[Neurons, Tensor | None]]:
    """Every way to read two or three matrices as a block of this width, with every activation."""
    for *entries, (path, last) in permutations(matrices):
        outer = oriented(last, out=width)
        weights = [oriented(module, into=width) for _, module in entries]
        if outer is None or any(weight is None for weight in weights):
            continue
        count = outer.shape[1]
        biases = [getattr(module, "bias", None) for _, module in entries]
        columns: list[tuple[Any, Any]] = list(zip(weights, biases, strict=True))
        if len(columns) == 1 and len(columns[0][0]) == 2 * count:  # gate and inner in one matrix
            weight, bias = columns[0]
            columns = [(weight[:count], None if bias is None else bias[:count]), (weight[count:], None)]
            columns[1] = (weight[count:], None if bias is None else bias[count:])
        if any(len(weight) != count for weight, _ in columns) or len({bias is None for _, bias in columns}) > 1:
            continue
        for ordered in permutations(columns):
            gate, gate_bias = ordered[0] if len(ordered) == 2 else (None, None)
            inner, inner_bias = ordered[-1]
            for activation in ACTIVATIONS:
                found = Neurons(activation, gate, inner, outer.T, gate_bias, inner_bias, path)
                yield found, getattr(last, "bias", None)


def oriented(module: Any, *, into: int | None = None, out: int | None = None) -> Tensor | None:
    """The weight as [outputs, inputs] when it has this many of either. GPT-2's Conv1D keeps it transposed."""
    weight: Tensor = module.weight.detach() if isinstance(module, nn.Linear) else module.weight.detach().T
    fits = (into is None or weight.shape[1] == into) and (out is None or weight.shape[0] == out)
    return weight if fits else None
