"""A rough guess, before any work, at how many parameters a budget may remove: from the gradients of a few windows.

With x, a and g the rows of a block's inputs, neurons' activations and loss gradients, and w the row that neuron j adds
to the output, c_tj = (a_tj − mean a_j)·(w_j·g_t) is what the removal of neuron j costs token t to first order. Removing
a set S, its mean in the bias, costs about ½·E[(Σ_S c_tj)²] nats per token. Neurons go in the order of E[c²], and the
budget is spent over all blocks by damage per parameter, as the planner does. That is pessimistic: refits and
compensation win a factor that depends on the model. The range of this factor is what real runs have shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compressor.measure.gradients import Gradients, visit_gradients
from compressor.measure.moments import ACCUMULATION_DTYPE
from compressor.models.blocks import Block
from compressor.models.branches import BranchIndex
from compressor.models.heads import Heads
from compressor.plan.candidates import Units, activations_of, shape_size, unit_counts
from compressor.plan.frontier import Candidate, grow_plans, lower_hull
from compressor.plan.shapes import Shape
from compressor.runtime.progress import Progress

# How many times the budget this estimate needs to remove what a real run removes, which has refits, compensation and
# other kinds of replacement: 1.2 to 2 in runs of the built-in model (+0.25 to +2), 1.6 to 3.2 in those of SmolLM2-135M
# (+1 to +10). A run whose plan a task or the clock refuses removes less.
GAINS = (1.0, 4.0)


@dataclass(frozen=True)
class SizeRange:
    """The parameters that a budget may remove, roughly."""

    least: int
    most: int


def unit_damages(units: Units, rows: Gradients, counts: Sequence[int]) -> list[float]:
    """Predicted nats per token of keeping so many of a block's units, for each of the counts."""
    a = activations_of(units, rows)
    contributions = ((a - a.mean(0)) * (rows.g.to(a) @ units.outer.T)).to(ACCUMULATION_DTYPE)
    contributions = contributions.reshape(len(a), units.count, units.columns).sum(2)
    damages = torch.stack([damages_in_order(*halves) for halves in both_ways(contributions)]).mean(0)
    return [0.0 if count == units.count else damages[units.count - count - 1].item() for count in counts]


def both_ways(rows: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Two halves of the rows, to choose on the one and to judge on the other."""
    first, second = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    return [(first, second), (second, first)]


def damages_in_order(choosing: Tensor, judging: Tensor) -> Tensor:
    """The damage of removing the first, the first two, … neurons. Their order comes from other rows than the damage: in
    its own rows what was chosen would look cheaper than it is."""
    order = choosing.square().mean(0).argsort()
    return judging[:, order].cumsum(1).square().mean(0) / 2


def mean_damage(rows: Gradients) -> float:
    """Predicted nats per token of the block's mean output in its place, where its neurons are not known."""
    y, g = rows.y.to(ACCUMULATION_DTYPE), rows.g.to(ACCUMULATION_DTYPE)
    return ((y - y.mean(0)) * g).sum(1).square().mean().item() / 2


def estimate_candidates(block: Block, units: Units | None, rows: Gradients) -> list[Candidate]:
    """What the block may become, with rough damages."""
    counts = sorted({*unit_counts(units), 0}) if units else [0]
    damages = unit_damages(units, rows, counts) if units else [mean_damage(rows)]
    return [
        Candidate(block.index, Shape(0, count), block.parameters - shape_size(block, units, Shape(0, count)), damage)
        for count, damage in zip(counts, damages, strict=True)
    ]


def survey_roughly(
    model: Any, blocks: list[Block], units: Mapping[BranchIndex, Units | None], windows: Tensor
) -> list[list[Candidate]]:
    """The candidates of every block from one forward and one backward pass over these windows."""
    hulls: list[list[Candidate]] = []

    def visit(block: Block, rows: Gradients) -> None:
        with torch.no_grad():
            hulls.append(lower_hull(estimate_candidates(block, units[block.index], rows)))

    heads = {index: found.outer_path for index, found in units.items() if isinstance(found, Heads)}
    visit_gradients(model, blocks, windows, visit, Progress(), tokens=windows.numel(), inner_paths=heads)
    return hulls


def estimate_nats(hulls: list[list[Candidate]], parameters: int) -> tuple[float, float] | None:
    """The range of nats per token that the removal of so many parameters may cost; None where neurons alone do not
    free as many."""
    saved = {(c.index, c.shape): c.saved for hull in hulls for c in hull}
    for shapes, damage in grow_plans(hulls):
        if sum(saved[item] for item in shapes.items()) >= parameters:
            return damage / GAINS[1], damage / GAINS[0]
    return None


def count_removed(hulls: list[list[Candidate]], nats: float) -> int:
    """Parameters that go when so many nats per token are spent where they save most."""
    saved = {(c.index, c.shape): c.saved for hull in hulls for c in hull}
    fitting = [shapes for shapes, damage in grow_plans(hulls) if damage <= nats]
    return sum(saved[item] for item in fitting[-1].items()) if fitting else 0


def estimate_size(hulls: list[list[Candidate]], nats: float) -> SizeRange:
    """The range of parameters that a budget of so many nats per token may remove."""
    least, most = (count_removed(hulls, gain * nats) for gain in GAINS)
    return SizeRange(least, most)
