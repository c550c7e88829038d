"""What one block could be replaced by, and what that is predicted to cost, from the moments of z = [x, a].

x is the block's input, a the activations of its units: neurons of an FFN, or heads of attention. A linear map in place
of attention has a bias only where the attention's output projection has one (GGUF could not say it): it is fitted to
moments about zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from compressor.measure.gradients import Damage, Gradients, orders_from_errors, predict_ladder_damage
from compressor.measure.moments import ACCUMULATION_DTYPE, Moments
from compressor.measure.regression import RankLadder, choose_ridge, decompose, reduce_rank
from compressor.models.blocks import Block
from compressor.models.branches import BranchIndex
from compressor.models.heads import Heads
from compressor.models.neurons import Neurons
from compressor.plan.frontier import FORMS, Candidate, form_of, list_ranks, lower_hull
from compressor.plan.selection import (
    FREE_SHARE,
    Elimination,
    Fitted,
    ScaledMoments,
    choose_shrinkage,
    eliminate,
    factor_metric,
    refit,
    scale_moments,
    spread_units,
)
from compressor.plan.shapes import Shape
from compressor.runtime.cache import Tensors

Units = Neurons | Heads

# Shares of a block's units that are kept.
UNIT_SHARES = (0.97, 0.94, 0.91, 0.87, 0.83, 0.78, 0.71, 0.61, 0.5, 0.38, 0.25, 0.13, 0.05)
RANK_SHARES = (0, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4)  # ranks beside kept units, of the width
NEURON_MULTIPLE = 8  # where there are many neurons, multiples of this are kept: matrix products are faster then
# Candidates of each kind that have their damage computed row by row; those of the others are interpolated.
PROBED_PRUNED, PROBED_HYBRID = 3, 3
WIDE_FEATURES = 4096  # with more inputs and units than this, units are removed in one order, whatever is beside them
ROWS_ALIKE = 4.0  # rows of one window are not independent: so many count as one


@dataclass(frozen=True)
class BlockCandidates:
    """The candidates of one block, and what fitting them needs in addition to the block's moments."""

    block: Block
    units: Units | None
    metric: Tensor  # E[g·gᵀ] of the loss gradients at the block's output
    damage: Damage  # of linear maps
    candidates: list[Candidate]
    orders: tuple[Tensor, Tensor]  # units in the order of removal, without and with x beside them
    ridges: tuple[float, float]  # for a linear map, and for kept units
    rows: int = 0  # of the gradients

    def saved(self, shape: Shape) -> int:
        """Parameters that go when the block takes this shape."""
        return self.block.parameters - shape_size(self.block, self.units, shape)

    def lightened(self, shape: Shape, seq_len: int) -> int:
        """What goes with the heads that this shape does not keep, beside parameters: operations over half a window, two
        for each parameter that would cost as many, and the keys and values that a cache would read for them."""
        if not isinstance(self.units, Heads):
            return 0
        gone = self.units.count - shape.neurons
        return gone * (2 * self.units.columns + self.units.cached_values) * (seq_len // 2)


def is_biased(block: Block, units: Units | None, shape: Shape) -> bool:
    """Whether a replacement of this shape has a bias: all but linear maps of attention without one."""
    return bool(shape.neurons or shape.rank == 0 or not isinstance(units, Heads) or units.biased)


def shape_size(block: Block, units: Units | None, shape: Shape) -> int:
    """The number of parameters of a replacement of this shape."""
    fixed = units.fixed if units and shape.neurons else 0
    bias = block.width if is_biased(block, units, shape) else 0
    return bias + fixed + shape.weights(block.width, units.size if units else 0)


def output_weights(block: Block, units: Units | None, device: torch.device) -> Tensor:
    """The matrix `outer` in output = a·outer. Where a block's units are not known, a is its output."""
    if units is None:
        return torch.eye(block.width, dtype=ACCUMULATION_DTYPE, device=device)
    return units.outer.to(device, ACCUMULATION_DTYPE)


def moments_for(moments: Moments, block: Block, units: Units | None, shape: Shape) -> Moments:
    """The moments that a shape is fitted to: about zero where it has no bias."""
    if is_biased(block, units, shape):
        return moments
    names = ("weight", "mean_x", "mean_y", "xx", "xy", "yy")
    copied = replace(moments, **{name: getattr(moments, name).clone() for name in names})
    copied.recentre(torch.zeros_like(moments.mean_x), torch.zeros_like(moments.mean_y))
    return copied


def linear_moments(moments: Moments, outer: Tensor, bias: Tensor) -> Moments:
    """The moments of (x, y) from those of [x, a], since y = a·outer + bias."""
    width = len(moments.mean_x) - len(outer)
    aa = moments.xx[width:, width:]
    return Moments(
        rows=moments.rows,
        weight=moments.weight,
        mean_x=moments.mean_x[:width],
        mean_y=moments.mean_x[width:] @ outer + bias,
        xx=moments.xx[:width, :width],
        xy=moments.xx[:width, width:] @ outer,
        yy=(outer * (aa @ outer)).sum(0),
    )


def fit_ladder(fit: Moments, held: Moments, metric: Tensor | None) -> RankLadder:
    """All ranks of a block's linear map, its ridge chosen on the held-out rows."""
    spectrum = decompose(fit.xx)
    _, full = choose_ridge(fit, spectrum, held)
    return reduce_rank(full, spectrum, metric)


def survey_block(
    block: Block, units: Units | None, bias: Tensor, fit: Moments, held: Moments, gradients: Gradients
) -> Tensors:
    """Everything that planning needs of one block in addition to its moments, as tensors for the cache.

    The products of `fit` are dropped on the way: with many neurons each such matrix is a large part of the memory.
    """
    device = fit.xx.device
    outer = output_weights(block, units, device)
    metric = gradients.metric.to(fit.xx)
    root = factor_metric(metric)
    damage = predict_map_damage(block, units, bias, outer, fit, held, gradients, metric)
    assert damage.by_rank is not None
    assert damage.slopes is not None
    table = [
        (r, 0, damage.by_rank[r].item(), damage.slopes[r].item())
        for r in (-1 if rank is None else rank for rank in list_ranks(block.width))
    ]
    mapped, mapped_held = (moments_for(m, block, units, Shape(None)) for m in (fit, held))
    no_units = torch.empty(0, dtype=torch.long, device=device)
    ridges = [choose_shrinkage(scale_moments(mapped, outer), mapped_held, outer, no_units, None, root)[0], 0.0]
    del mapped, mapped_held
    orders = torch.zeros(2, 0, dtype=torch.long)
    if units is not None:
        scaled = scale_moments(fit, outer)
        fit.drop_products()  # only its means are needed from here on
        counts = unit_counts(units)
        wide = len(scaled.gram) > WIDE_FEATURES
        runs = [
            eliminate(scaled, root[0], counts, with_inputs=with_inputs, columns=units.columns)
            for with_inputs in ((False,) if wide else (False, True))
        ]
        orders = torch.stack([runs[0].order.cpu(), runs[-1].order.cpu()])
        three_quarters = orders[0, units.count // 4 :].to(device).sort().values
        ridges[1] = choose_shrinkage(scaled, held, outer, spread_units(three_quarters, units.columns), 0, root)[0]
        activations = activations_of(units, gradients)

        def probe(shape: Shape) -> tuple[float, float]:
            fitted = fit_shape(fit, bias, outer, shape, orders, root, (ridges[0], ridges[1]), scaled=scaled)
            return orders_from_errors(fit_errors(fitted, activations, gradients), gradients)

        table += unit_candidates(block, units, runs, probe)
    scalars = [damage.linear, damage.factorised, *ridges, float(len(gradients.g))]
    return {
        "metric": metric.cpu(),
        "by_rank": damage.by_rank,
        "scalars": torch.tensor(scalars, dtype=torch.float64),
        "orders": orders,
        "table": torch.tensor(table, dtype=torch.float64),
    }


def predict_map_damage(
    block: Block,
    units: Units | None,
    bias: Tensor,
    outer: Tensor,
    fit: Moments,
    held: Moments,
    gradients: Gradients,
    metric: Tensor,
) -> Damage:
    """The predicted damage of a linear map of every rank in the block's place; with rank 0 it is its mean output."""
    linear, linear_held = (linear_moments(moments_for(m, block, units, Shape(None)), outer, bias) for m in (fit, held))
    damage = predict_ladder_damage(fit_ladder(linear, linear_held, metric), gradients)
    assert damage.by_rank is not None
    assert damage.slopes is not None
    mean_errors = linear_moments(fit, outer, bias).mean_y - gradients.y.to(fit.xx)
    damage.by_rank[0], damage.slopes[0] = orders_from_errors(mean_errors, gradients)
    return damage


def activations_of(units: Units, gradients: Gradients) -> Tensor:
    """The activations of all units in the gradients' rows; those of heads depend on other rows, and were captured."""
    if isinstance(units, Neurons):
        return units.activate(gradients.x.to(units.outer))
    assert gradients.a is not None
    return gradients.a.to(units.outer)


def unit_counts(units: Units) -> list[int]:
    """How many units a replacement may keep."""
    if isinstance(units, Heads) and units.count <= len(UNIT_SHARES):
        return list(range(1, units.count))
    step = NEURON_MULTIPLE if isinstance(units, Neurons) and units.count >= 8 * NEURON_MULTIPLE else 1
    return sorted({round(share * units.count / step) * step for share in UNIT_SHARES})


def unit_candidates(
    block: Block, units: Units, runs: list[Elimination], probe: Callable[[Shape], tuple[float, float]]
) -> list[tuple[int, int, float, float]]:
    """(rank, units, damage, slope) of the shapes with units that are on a convex frontier.

    Pruned shapes and hybrid ones, which have a linear part too, have a frontier each.
    """
    least_errors: dict[Shape, float] = {}
    for run in runs:
        for subset in run.subsets:
            enough = int((subset.errors > subset.errors[-1] + FREE_SHARE * run.total).sum())  # more ranks gain nothing
            for rank in {round(share * block.width) for share in RANK_SHARES} | {enough}:
                if len(subset.kept) and rank < len(subset.errors) and 2 * rank < block.width:
                    shape = Shape(rank, len(subset.kept))
                    least_errors[shape] = min(least_errors.get(shape, math.inf), subset.errors[rank].item())
    candidates = [
        Candidate(block.index, shape, block.parameters - shape_size(block, units, shape), error)
        for shape, error in least_errors.items()
    ]
    pruned = [candidate for candidate in candidates if candidate.shape.rank == 0]
    hybrid = [candidate for candidate in candidates if candidate.shape.rank != 0]
    kinds = [(lower_hull(pruned), PROBED_PRUNED), (lower_hull(hybrid), PROBED_HYBRID)]
    if isinstance(units, Heads):  # they are few, and each may have another slope
        kinds = [(front, len(front)) for front, _ in kinds]
    return [row for front, probes in kinds for row in interpolate_damages(front, probe, probes)]


def interpolate_damages(
    front: list[Candidate], probe: Callable[[Shape], tuple[float, float]], probes: int
) -> list[tuple[int, int, float, float]]:
    """(rank, units, damage, slope) of candidates whose `damage` is, so far, their error in the metric.

    `probe` computes the damage and the slope of a few of them. For the others the ratio of damage and error is
    interpolated, and the slope.
    """
    front = sorted(front, key=lambda candidate: candidate.damage)
    probed = sorted({round(k * (len(front) - 1) / max(probes - 1, 1)) for k in range(probes)}) if front else []
    errors = [math.log(max(candidate.damage, 1e-300)) for candidate in front]
    found = {k: probe(front[k].shape) for k in probed}
    ratios = {k: math.log(max(damage, 1e-300)) - errors[k] for k, (damage, _) in found.items()}
    table = []
    for k, candidate in enumerate(front):
        low, high = max(p for p in probed if p <= k), min(p for p in probed if p >= k)
        share = (errors[k] - errors[low]) / max(errors[high] - errors[low], 1e-12)
        damage = math.exp(errors[k] + (1 - share) * ratios[low] + share * ratios[high])
        slope = (1 - share) * found[low][1] + share * found[high][1]
        table.append((candidate.shape.rank or 0, candidate.shape.neurons, damage, slope))
    return table


def fit_shape(
    moments: Moments,
    bias: Tensor,
    outer: Tensor,
    shape: Shape,
    orders: Tensor | tuple[Tensor, Tensor],
    root: tuple[Tensor, Tensor],
    ridges: tuple[float, float],
    shrinkage: tuple[float, float] | None = None,
    scaled: ScaledMoments | None = None,
) -> Fitted:
    """The fit of one shape, with the block's ridge or the `shrinkage` (ridge and target) of `choose_shrinkage`.

    Beside a low rank there are two removal orders to take the kept units from: the fit that errs less is returned.
    `scaled` are the moments scaled to unit variances, where they are at hand.
    """
    ridge, target = shrinkage or (ridges[1 if shape.neurons else 0], 0.0)
    scaled = scaled or scale_moments(moments, outer)
    sets = kept_sets(shape, orders, outer.device, len(outer) // max(1, len(orders[0])))
    fits = [
        refit(moments, scaled, bias, outer, kept, shape.rank, root, ridge, target, with_error=len(sets) > 1)
        for kept in sets
    ]
    return min(fits, key=lambda fitted: fitted.error) if len(fits) > 1 else fits[0]


def kept_sets(
    shape: Shape, orders: Tensor | tuple[Tensor, Tensor], device: torch.device, columns: int = 1
) -> list[Tensor]:
    """The columns of a that a shape may keep: those of the last units of each removal order that suits its rank."""
    if shape.neurons == 0:
        return [torch.empty(0, dtype=torch.long, device=device)]
    both = (0,) if torch.equal(*orders) else (0, 1)
    suited = (0,) if shape.rank == 0 else (1,) if shape.rank is None else both
    sets = [orders[k][len(orders[k]) - shape.neurons :].sort().values.to(device) for k in suited]
    return [spread_units(kept, columns) for kept in sets]


def fit_errors(fitted: Fitted, activations: Tensor, gradients: Gradients) -> Tensor:
    """The errors of a fit on the gradients' rows: its output less the block's, from its neurons' activations there."""
    x = gradients.x.to(activations)
    output = activations[:, fitted.kept.to(x.device)] @ fitted.outer.to(x) + fitted.bias.to(x)
    if fitted.outputs is not None:
        output = output + (x if fitted.inputs is None else x @ fitted.inputs.to(x)) @ fitted.outputs.to(x).T
    return output - gradients.y.to(x)


def pack_moments(moments: Moments) -> Tensors:
    """The moments of [x, a], as tensors for the cache."""
    rows = torch.tensor([float(moments.rows), moments.weight.item()], dtype=ACCUMULATION_DTYPE)
    return {"rows": rows, "mean": moments.mean_x.cpu(), "xx": moments.xx.cpu()}


def unpack_moments(tensors: Tensors) -> Moments:
    (rows, weight), mean, xx = tensors["rows"], tensors["mean"], tensors["xx"]
    empty = mean.new_zeros(0)
    return Moments(int(rows), weight, mean, empty, xx, xx[:, :0], empty)


def unpack_candidates(block: Block, units: Units | None, tensors: Tensors) -> BlockCandidates:
    """The candidates of one block, from the tensors of `survey_block`."""
    linear, factorised, *ridges, rows = tensors["scalars"].tolist()
    candidates = []
    for rank, count, damage, slope in tensors["table"].tolist():
        shape = Shape(None if rank < 0 else int(rank), int(count))
        saved = block.parameters - shape_size(block, units, shape)
        candidates.append(Candidate(block.index, shape, saved, damage, slope))
    return BlockCandidates(
        block=block,
        units=units,
        metric=tensors["metric"],
        damage=Damage(by_rank=tensors["by_rank"], linear=linear, factorised=factorised),
        candidates=candidates,
        orders=(tensors["orders"][0], tensors["orders"][1]),
        ridges=(ridges[0], ridges[1]),
        rows=int(rows),
    )


def shrink_slopes(found: Mapping[BranchIndex, BlockCandidates]) -> dict[BranchIndex, BlockCandidates]:
    """The candidates with their slopes shrunk by what noise there is in them, form by form.

    A slope over the root of twice its damage is the mean of g·e in its own size: over n independent rows it scatters by
    1/√n where there is no slope at all. How much more it scatters over the blocks tells how much of it is real. FFNs
    have none: their refits leave errors without a slope, and to choose by what is left is to choose by noise.
    """
    shares = dict.fromkeys(FORMS, 0.0)
    for form in ("heads", "map"):
        row = [(c, of.rows) for of in found.values() for c in of.candidates if form_of(c) == form]
        row = [(c, rows) for c, rows in row if 0 < c.damage < math.inf]
        signal = sum(c.slope**2 / (2 * c.damage) for c, _ in row)
        if signal > 0:
            shares[form] = max(0.0, 1 - sum(ROWS_ALIKE / rows for _, rows in row) / signal)
    return {
        index: replace(of, candidates=[replace(c, slope=shares[form_of(c)] * c.slope) for c in of.candidates])
        for index, of in found.items()
    }
