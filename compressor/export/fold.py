"""Fold a replacement (linear map plus kept neurons) into an ordinary feed-forward block, exactly.

An ordinary block computes y = outer·act(inner x) + bias or, with a gate, y = outer·(act(gate x)·(inner x)) + bias.
Runtimes other than transformers know no other kind. Its neurons can compute a linear map:

- Without a gate, act(z) − act(−z) = z for every activation of the form z·s(z) with s(z) + s(−z) = 1 (silu, all gelus,
  relu). So two neurons with opposite signs are linear together, and a map of rank r takes 2r neurons.
- With a gate, a gate weight of zero and a large gate bias make act(gate x) the same number for every input. So one
  neuron is linear, and a map of rank r takes r neurons.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers.activations import ACT2FN

from compressor.modeling_compressor import Replacement
from compressor.models.neurons import Neurons
from compressor.runtime.errors import InputError

# The bias of a constant gate. At 32 an activation gives the same power of two in every precision, so dividing by it is
# exact. `inner` is divided by it, and not `outer`, so that the product of gate and inner keeps its size.
GATE_BIAS = 32.0
# Where activations are compared.
GRID = torch.linspace(-8, 8, 257, dtype=torch.float64)


@dataclass(frozen=True)
class OrdinaryBlock:
    """The matrices of an ordinary block, all as [outputs, inputs]; a bias of None is zero."""

    activation: str
    inner: Tensor
    outer: Tensor
    gate: Tensor | None = None
    inner_bias: Tensor | None = None
    gate_bias: Tensor | None = None
    bias: Tensor | None = None

    @property
    def neurons(self) -> int:
        return len(self.inner)

    def __call__(self, x: Tensor) -> Tensor:
        act = ACT2FN[self.activation]
        rows = functional.linear(x, self.inner, self.inner_bias)
        rows = act(rows) if self.gate is None else act(functional.linear(x, self.gate, self.gate_bias)) * rows
        return functional.linear(rows, self.outer, self.bias)

    def padded(self, neurons: int) -> OrdinaryBlock:
        """The block with neurons of zeros added up to this number; it computes the same."""
        missing = neurons - self.neurons
        rows: dict[str, Any] = {
            name: functional.pad(tensor, (0, 0, 0, missing) if tensor.ndim == 2 else (0, missing))
            for name in ("inner", "gate", "inner_bias", "gate_bias")
            if (tensor := getattr(self, name)) is not None
        }
        return replace(self, outer=functional.pad(self.outer, (0, missing)), **rows) if missing else self


def read_ordinary_block(neurons: Neurons) -> OrdinaryBlock:
    """The ordinary block that a block which was not replaced already is."""
    return OrdinaryBlock(
        neurons.activation, outer=neurons.outer.T, bias=neurons.outer_matrix.bias, **neurons.matrices()
    )


def neurons_needed(module: Replacement, gated: bool) -> int:
    """How many neurons an ordinary block takes to compute what this replacement computes."""
    rank = module.width if module.rank is None else module.rank
    return module.neurons + rank * (1 if gated else 2)


@torch.no_grad()
def fold(module: Replacement, activation: str, gated: bool) -> OrdinaryBlock:
    """The ordinary block with this activation that computes what the replacement computes."""
    refuse_other_neurons(module, activation, gated)
    rows, columns = factor_linear_map(module)
    parts: dict[str, list[Tensor]] = {"inner": [rows], "outer": [columns]}
    if gated:
        parts["gate"] = [torch.zeros_like(rows)]
        parts["inner_bias"] = [rows.new_zeros(len(rows))]
        parts["gate_bias"] = [rows.new_full((len(rows),), GATE_BIAS)]
        parts["inner"] = [rows / ACT2FN[activation](torch.tensor(GATE_BIAS)).item()]
    else:
        parts["inner"].append(-rows)
        parts["outer"].append(-columns)
        parts["inner_bias"] = [rows.new_zeros(2 * len(rows))]
        if len(rows) and not is_linear_in_pairs(activation):
            raise InputError(f"{activation}(z) − {activation}(−z) is not z, so no ordinary block computes a linear map")
    if module.neurons:
        for name in parts:
            part, _, kind = name.partition("_")  # such as inner, or inner_bias
            tensor = getattr(getattr(module, part), kind or "weight")
            parts[name].insert(0, rows.new_zeros(module.neurons) if tensor is None else tensor.detach())
    joined = {name: torch.cat(tensors, dim=int(name == "outer")) for name, tensors in parts.items()}
    return OrdinaryBlock(activation, bias=module.output_bias.detach(), **joined)


def refuse_other_neurons(module: Replacement, activation: str, gated: bool) -> None:
    """Refuse kept neurons of another kind than those of the target's blocks."""
    if not module.neurons:
        return
    kept, target = (ACT2FN[str(name)](GRID) for name in (module.activation, activation))
    same_activation = torch.allclose(kept, target, atol=1e-6)  # by value, because some have several names
    if module.gated != gated or not same_activation:
        kinds = [f"{'gated ' * gate}{act}" for act, gate in ((module.activation, module.gated), (activation, gated))]
        raise InputError(f"its kept neurons are {kinds[0]}, and the target's blocks are {kinds[1]}")


def factor_linear_map(module: Replacement) -> tuple[Tensor, Tensor]:
    """The replacement's linear map as a product: rows [rank, width] and columns [width, rank]."""
    bias = module.output_bias.detach()
    if module.rank is None:
        return module.linear.weight.detach(), torch.ones_like(bias).diag()
    if module.rank == 0:
        return bias.new_zeros(0, module.width), bias.new_zeros(module.width, 0)
    return module.down.weight.detach(), module.up.weight.detach()


def is_linear_in_pairs(activation: str) -> bool:
    """Whether act(z) − act(−z) = z, so that two neurons with opposite signs are linear together."""
    act = ACT2FN[activation]
    return torch.allclose(act(GRID) - act(-GRID), GRID, rtol=1e-12, atol=1e-12)
