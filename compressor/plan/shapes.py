"""The shape of a replacement: how many ranks of its input it sees linearly, and how many neurons it keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A rank of None is a dense linear map, 0 none at all; without rank and neurons the bias is left."""

    rank: int | None = None
    neurons: int = 0

    @property
    def kind(self) -> str:
        if self.neurons:
            return "pruned" if self.rank == 0 else "hybrid"
        return "linear" if self.rank is None else "lowrank" if self.rank else "bias"

    def weights(self, width: int, neuron: int) -> int:
        """Parameters beside the bias; `neuron` is the size of one. A multiply and an add each per token."""
        return (width * width if self.rank is None else 2 * width * self.rank) + self.neurons * neuron

    def parameters(self, width: int, neuron: int) -> int:
        return width + self.weights(width, neuron)

    def __str__(self) -> str:
        linear = "linear" if self.rank is None else f"rank {self.rank}" if self.rank else ""
        neurons = f"{self.neurons} neurons" if self.neurons else ""
        return " + ".join(part for part in (neurons, linear) if part) or "bias"


Shapes = Mapping[int, Shape]  # block index → what stands there


def list_shapes(shapes: Shapes) -> str:
    """Every block of a plan with what stands there, in a line."""
    return ", ".join(f"{index} ({shape})" for index, shape in sorted(shapes.items()))
