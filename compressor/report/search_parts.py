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


class HealingLook(Part):
    """One look at the selection text while healing: after so many tokens, how far the model is from its source."""

    tokens: int
    kl: Figure
    rise: Figure  # of the loss, in nats per token
    dppl: dict[str, Figure]


class Healing(Part):
    """How replacements were trained towards the source's predictions: on what, how long, what was trained, and what
    that won on the selection text. `looks` begins with the state before, and the best of them is what was kept."""

    asked_tokens: int
    tokens: int  # trained on, until it stopped
    text: str
    text_tokens: int  # different ones; where more were trained on, they came again in another order
    text_sha256: str
    params: str
    trained_parameters: int
    loss: str = "KL(source ‖ compressed), all logits, temperature 1"
    optimizer: str = "AdamW, linear warm-up, cosine to zero"
    learning_rate: Figure
    batch_tokens: int
    clip: Figure
    seed: int
    precision: str
    seconds: Figure
    looks: list[HealingLook]
    kept: HealingLook
    stopped: str | None = None


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
    heal: int | None = None  # tokens that it must be healed on to stay inside; its figures are those before that
