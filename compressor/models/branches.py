"""How the residual branches of a model are named: the FFN and the attention of every layer. No torch is needed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import total_ordering

BRANCHES = ("ffn", "attention")


@total_ordering
@dataclass(frozen=True)
class AttentionOf:
    """The name of a layer's attention among the branches; an FFN is named by the number of its layer alone.

    In order, attention comes before the FFN of its layer: AttentionOf(7) lies between 6 and 7.
    """

    layer: int

    def __lt__(self, other: int | AttentionOf) -> bool:
        if isinstance(other, AttentionOf):
            return self.layer < other.layer
        return self.layer <= other if isinstance(other, int) else NotImplemented

    def __str__(self) -> str:
        return f"{self.layer}.attention"


BranchIndex = int | AttentionOf


def layer_of(index: BranchIndex) -> int:
    """The number of the layer that a branch belongs to."""
    return index.layer if isinstance(index, AttentionOf) else index


def branch_of(index: BranchIndex) -> str:
    """Which branch of its layer an index names."""
    return "attention" if isinstance(index, AttentionOf) else "ffn"
