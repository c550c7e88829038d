"""The shape of a replacement: the rank of its linear part, and the number of neurons that it keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

KINDS = ("linear", "lowrank", "pruned", "hybrid", "bias")


@dataclass(frozen=True)
class Shape:
    """Rank None is a dense linear map, rank 0 no linear part. With neither rank nor neurons, only a bias is left."""

    rank: int | None = None
    neurons: int = 0

    @property
    def kind(self) -> str:
        if self.neurons:
            return "pruned" if self.rank == 0 else "hybrid"
        return "linear" if self.rank is None else "lowrank" if self.rank else "bias"

    def weights(self, width: int, neuron_size: int) -> int:
        """Parameters without the bias; `neuron_size` is the number of parameters of one neuron."""
        return (width * width if self.rank is None else 2 * width * self.rank) + self.neurons * neuron_size

    def parameters(self, width: int, neuron_size: int) -> int:
        return width + self.weights(width, neuron_size)

    def __str__(self) -> str:
        linear = "linear" if self.rank is None else f"rank {self.rank}" if self.rank else ""
        neurons = f"{self.neurons} neurons" if self.neurons else ""
        return " + ".join(part for part in (neurons, linear) if part) or "bias"


Shapes = Mapping[int, Shape]  # block index → shape of its replacement


def list_shapes(shapes: Shapes) -> str:
    """The blocks of a plan with their shapes, in one line."""
    return ", ".join(f"{index} ({shape})" for index, shape in sorted(shapes.items()))
