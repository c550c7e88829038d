"""The parts of a record that a search fills: whether predictions held, the plans that were tried, and the frontier."""

from __future__ import annotations

from pydantic import Field

from compressor.report.part import Figure, Part
from compressor.report.record_parts import ATTENTION, PerplexityChange, Removal


class Prediction(Part):
    """One replacement in one block alone: nats per token as predicted and as measured; `kl` is the divergence from the
    source, which fewer tokens tell as surely."""

    index: int
    replacement: str
    predicted: Figure
    measured: Figure
    standard_error: Figure
    kl: Figure | None = None
    kl_standard_error: Figure | None = None


class Agreement(Part):
    """Whether predictions hold, over all blocks; `attention` has the layer's number as index."""

    rank_correlation: Figure | None
    kl_rank_correlation: Figure | None = None
    blocks: list[Prediction]
    attention: list[Prediction] = Field(default_factory=list)

    @property
    def named(self) -> list[tuple[Prediction, str]]:
        """Every prediction and what its block is called in tables, in order of depth."""
        found = [(p, f"{p.index} {ATTENTION}") for p in self.attention] + [(p, str(p.index)) for p in self.blocks]
        return sorted(found, key=lambda pair: pair[0].index)


class TriedPlan(Part):
    """A plan that the search fitted and measured."""

    replacements: dict[str, dict[str, int | None]]
    compensated: bool
    removed: int
    predicted_dloss: Figure
    texts: dict[str, PerplexityChange]


class FrontierPoint(Part):
    """The largest plan for one of several budgets, or the cheapest of one of several sizes; without a plan, why."""

    asked: str
    removed: int
    removed_fraction: Figure
    file: str | None = None
    flops_per_token: int | None = None
    flops_ratio: Figure | None = None
    predicted_dloss: Figure | None = None
    texts: dict[str, PerplexityChange] = Field(default_factory=dict)
    blocks: int = 0
    reason: str | None = None
    remove: Removal | None = None  # the size, where that was asked for
