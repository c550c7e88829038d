"""What one block could be replaced by, and what that is predicted to cost, from the moments of z = [x, a]."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from compressor.measure.gradients import Damage, Gradients, damage_from_errors, predict_ladder_damage
from compressor.measure.moments import ACCUMULATION_DTYPE, Moments
from compressor.measure.regression import RankLadder, choose_ridge, decompose, reduce_rank
from compressor.models.blocks import Block
from compressor.models.neurons import Neurons
from compressor.plan.frontier import Candidate, efficient, ladder_of
from compressor.plan.selection import FREE, Elimination, Fitted, choose_strength, eliminate, refit, root_of, scale
from compressor.plan.shapes import Shape
from compressor.runtime.cache import Tensors

KEPT = (0.97, 0.94, 0.91, 0.87, 0.83, 0.78, 0.71, 0.61, 0.5, 0.38, 0.25, 0.13, 0.05)  # of the neurons
RANKS = (0, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4)  # of the width
ROUND = 8  # neurons come in multiples of this, which matrix products like, when there are many
PROBES = 3  # candidates of each kind whose damage is computed row by row; the others lie between them


@dataclass(frozen=True)
class BlockCandidates:
    """What one block could become: its candidates, and what their fits are made from beside its moments."""

    block: Block
    neurons: Neurons | None
    metric: Tensor
    damage: Damage  # of linear maps
    candidates: list[Candidate]
    orders: tuple[Tensor, Tensor]  # neurons in the order of removal, without and with x beside them
    ridges: tuple[float, float]  # of a linear map, and of kept neurons

    @property
    def neuron(self) -> int:
        """Parameters of one neuron."""
        return self.neurons.size if self.neurons else 0

    def saved(self, shape: Shape) -> int:
        """Parameters that go when the block takes this shape."""
        return self.block.parameters - shape.parameters(self.block.width, self.neuron)


def outer_of(block: Block, neurons: Neurons | None, device: torch.device) -> Tensor:
    """Output = a·outer: of a block without known neurons, a is its output."""
    if neurons is None:
        return torch.eye(block.width, dtype=ACCUMULATION_DTYPE, device=device)
    return neurons.outer.to(device, ACCUMULATION_DTYPE)


def linear_moments(moments: Moments, outer: Tensor, bias: Tensor) -> Moments:
    """The moments of (x, y) inside those of [x, a], for y is linear in a."""
    width = len(moments.mean_x) - len(outer)
    inside = moments.xx[width:, width:]
    return Moments(
        rows=moments.rows,
        weight=moments.weight,
        mean_x=moments.mean_x[:width],
        mean_y=moments.mean_x[width:] @ outer + bias,
        xx=moments.xx[:width, :width],
        xy=moments.xx[:width, width:] @ outer,
        yy=(outer * (inside @ outer)).sum(0),
    )


def fit_ladder(fit: Moments, held: Moments, metric: Tensor | None) -> RankLadder:
    """All ranks of a block's linear map, its ridge chosen on the held-out rows."""
    spectrum = decompose(fit.xx)
    _, full = choose_ridge(fit, spectrum, held)
    return reduce_rank(full, spectrum, metric)


def survey_block(
    block: Block, neurons: Neurons | None, bias: Tensor, fit: Moments, held: Moments, gradients: Gradients
) -> Tensors:
    """Everything that planning needs of one block beside its moments, as tensors for the cache."""
    outer = outer_of(block, neurons, fit.xx.device)
    linear, linear_held = (linear_moments(m, outer, bias) for m in (fit, held))
    metric = gradients.metric.to(fit.xx)
    damage = predict_ladder_damage(fit_ladder(linear, linear_held, metric), gradients)
    root = root_of(metric)
    none = torch.empty(0, dtype=torch.long, device=outer.device)
    assert damage.by_rank is not None
    table = [
        (-1 if r is None else r, 0, damage.linear if r is None else damage.by_rank[r].item())
        for r in ladder_of(block.width)
    ]
    ridges = [choose_strength(fit, held, outer, none, None, root)[0], 0.0]
    orders = torch.zeros(2, 0, dtype=torch.long)
    if neurons is not None:
        scaled = scale(fit, outer)
        counts = sorted({rounded(share * neurons.count, neurons.count) for share in KEPT})
        runs = [eliminate(scaled, root[0], counts, with_inputs=which) for which in (False, True)]
        orders = torch.stack([run.order.cpu() for run in runs])
        typical = orders[0, neurons.count // 4 :].to(outer.device).sort().values
        ridges[1] = choose_strength(fit, held, outer, typical, 0, root)[0]

        def probe(shape: Shape) -> float:
            made = best_fit(fit, bias, outer, shape, orders, root, (ridges[0], ridges[1]))
            return damage_from_errors(errors_of(made, neurons, gradients), gradients)

        table += neuron_candidates(block, neurons, runs, probe)
    scalars = [damage.linear, damage.factorised, *ridges]
    return {
        "metric": metric.cpu(),
        "by_rank": damage.by_rank,
        "scalars": torch.tensor(scalars, dtype=torch.float64),
        "orders": orders,
        "table": torch.tensor(table, dtype=torch.float64),
    }


def rounded(count: float, neurons: int) -> int:
    step = ROUND if neurons >= 8 * ROUND else 1
    return round(count / step) * step


def neuron_candidates(
    block: Block, neurons: Neurons, runs: list[Elimination], probe: Callable[[Shape], float]
) -> list[tuple[int, int, float]]:
    """(rank, neurons, damage) of the efficient shapes with neurons, those without a linear part and those with one."""
    found: dict[Shape, float] = {}
    for run in runs:
        for mark in run.marks:
            free = int((mark.errors > mark.errors[-1] + FREE * run.total).sum())
            for rank in {round(share * block.width) for share in RANKS} | {free}:
                if len(mark.kept) and 2 * rank < block.width:
                    shape = Shape(rank, len(mark.kept))
                    found[shape] = min(found.get(shape, math.inf), mark.errors[rank].item())
    candidates = [
        Candidate(block.index, shape, block.parameters - shape.parameters(block.width, neurons.size), error)
        for shape, error in found.items()
    ]
    pruned = [candidate for candidate in candidates if candidate.shape.rank == 0]
    hybrid = [candidate for candidate in candidates if candidate.shape.rank != 0]
    return [row for some in (pruned, hybrid) for row in predicted(efficient(some), probe)]


def predicted(front: list[Candidate], probe: Callable[[Shape], float]) -> list[tuple[int, int, float]]:
    """Damages from errors: a shape's error in the metric is known exactly, its damage is computed for a few of them,
    and their ratio lies in between for the others."""
    front = sorted(front, key=lambda candidate: candidate.damage)
    places = sorted({round(k * (len(front) - 1) / max(1, PROBES - 1)) for k in range(PROBES)}) if front else []
    errors = [math.log(max(candidate.damage, 1e-300)) for candidate in front]
    ratios = {k: math.log(max(probe(front[k].shape), 1e-300)) - errors[k] for k in places}
    table = []
    for k, candidate in enumerate(front):
        low, high = max(p for p in places if p <= k), min(p for p in places if p >= k)
        share = (errors[k] - errors[low]) / max(errors[high] - errors[low], 1e-12)
        damage = math.exp(errors[k] + (1 - share) * ratios[low] + share * ratios[high])
        table.append((candidate.shape.rank or 0, candidate.shape.neurons, damage))
    return table


def best_fit(
    moments: Moments,
    bias: Tensor,
    outer: Tensor,
    shape: Shape,
    orders: Tensor | tuple[Tensor, Tensor],
    root: tuple[Tensor, Tensor],
    ridges: tuple[float, float],
    strength: tuple[float, float] | None = None,
) -> Fitted:
    """The fit of one shape. Neurons beside a low rank are those of the removal order that errs less."""
    ridge, target = strength or (ridges[1 if shape.neurons else 0], 0.0)
    fits = [
        refit(moments, bias, outer, kept, shape.rank, root, ridge, target)
        for kept in kept_sets(shape, orders, outer.device)
    ]
    return min(fits, key=lambda fitted: fitted.error)


def kept_sets(shape: Shape, orders: Tensor | tuple[Tensor, Tensor], device: torch.device) -> list[Tensor]:
    if shape.neurons == 0:
        return [torch.empty(0, dtype=torch.long, device=device)]
    which = (0,) if shape.rank == 0 else (1,) if shape.rank is None else (0, 1)
    return [orders[k][len(orders[k]) - shape.neurons :].sort().values.to(device) for k in which]


def errors_of(fitted: Fitted, neurons: Neurons, gradients: Gradients) -> Tensor:
    """What a fit gives on the gradients' rows, less the block's own output."""
    x = gradients.x.to(neurons.outer)
    output = neurons.activate(x)[:, fitted.kept.to(x.device)] @ fitted.outer.to(x) + fitted.bias.to(x)
    if fitted.outputs is not None:
        output = output + (x if fitted.inputs is None else x @ fitted.inputs.to(x)) @ fitted.outputs.to(x).T
    return output - gradients.y.to(x)


def pack_moments(moments: Moments) -> Tensors:
    """The moments of [x, a], as tensors for the cache."""
    rows = torch.tensor([float(moments.rows), moments.weight.item()], dtype=ACCUMULATION_DTYPE)
    return {"rows": rows, "mean": moments.mean_x.cpu(), "xx": moments.xx.cpu()}


def unpack_moments(kept: Tensors) -> Moments:
    empty = kept["mean"].new_zeros(0)
    return Moments(int(kept["rows"][0]), kept["rows"][1], kept["mean"], empty, kept["xx"], kept["xx"][:, :0], empty)


def unpack(block: Block, neurons: Neurons | None, kept: Tensors) -> BlockCandidates:
    linear, factorised, *ridges = kept["scalars"].tolist()
    shapes = [
        (Shape(None if rank < 0 else int(rank), int(count)), cost) for rank, count, cost in kept["table"].tolist()
    ]
    size = neurons.size if neurons else 0
    return BlockCandidates(
        block=block,
        neurons=neurons,
        metric=kept["metric"],
        damage=Damage(by_rank=kept["by_rank"], linear=linear, factorised=factorised),
        candidates=[
            Candidate(block.index, shape, block.parameters - shape.parameters(block.width, size), cost)
            for shape, cost in shapes
        ],
        orders=(kept["orders"][0], kept["orders"][1]),
        ridges=(ridges[0], ridges[1]),
    )
