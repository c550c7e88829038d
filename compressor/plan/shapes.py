"""The shape of a replacement: the rank of its linear part, and the number of units that it keeps.

A unit is a neuron of an FFN, or a key-value head of attention with all of its query heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from compressor.models.branches import AttentionOf, BranchIndex
from compressor.runtime.figures import count

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
        neurons = f"keeps {count(self.neurons, 'neuron')}" if self.neurons else ""
        return " + ".join(part for part in (neurons, linear) if part) or "bias"


Shapes = Mapping[BranchIndex, Shape]  # block index → shape of its replacement


def describe_shape(index: BranchIndex, shape: Shape) -> str:
    """A block's shape in words: attention keeps heads."""
    if not isinstance(index, AttentionOf):
        return str(shape)
    return str(shape).replace("neuron", "head")


def list_shapes(shapes: Shapes) -> str:
    """The blocks of a plan with their shapes, in one line."""
    ordered = sorted(shapes.items(), key=lambda item: item[0])
    return ", ".join(f"{index} ({describe_shape(index, shape)})" for index, shape in ordered)
