"""Which units to keep, and the least-squares weights of those kept, from the moments of z = [x, a] alone.

x is a block's input, a the activations of its units: one column for a neuron of an FFN, several for a key-value head of
attention with its query heads. The block's output is linear in a, through the matrix `outer`, so the text need not be
run again. Features are scaled to unit variance, so that one ridge means the same for all.
Errors e are measured in the metric F = E[g·gᵀ] of the loss gradients, as ‖e·root‖² with root·rootᵀ = F.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from compressor.measure.moments import Moments
from compressor.measure.regression import decompose

SELECTION_RIDGE = 1e-9
FREE_SHARE = 1e-7  # of the output's energy: as much as rounding loses, so removals that lose less are free
MANY_COUNTS = 4  # with more counts of neurons than this, the ranks beside them are measured at every second one
SKETCHED_OUTPUTS = 64  # combinations of outputs that ridges are compared on
STEP = 64  # removals per update of the whole inverse; within a step each removal takes the earlier ones into account
COPIED_FEATURES = 4096  # an inverse of at most so many is copied after every update
MANY_OUTPUTS = 1024  # with more outputs than this, removals are compared in coordinates of the few rows that are
LARGER_RIDGES = 10  # tenfold steps that a ridge may be raised by where rounding needs it
RIDGES = (1e-6, 1e-3, 1e-2, 1e-1, 1.0)  # shrink to the original weights, times the variance of the feature
TARGETS = (0.0, 0.5, 1.0)  # 0: the original block's output on the present inputs; 1: the original residual stream


@dataclass(frozen=True)
class ScaledMoments:
    """The moments of z with unit variances, and the output weights that belong to them."""

    deviations: Tensor  # standard deviations of z [inputs + neurons]
    gram: Tensor  # correlations of z
    outer: Tensor  # output weights [neurons, outputs]
    cross: Tensor | None  # moments of z with what the residual stream lacks [inputs + neurons, outputs]

    @property
    def inputs(self) -> int:
        return len(self.gram) - len(self.outer)


def scale_moments(moments: Moments, outer: Tensor, like: ScaledMoments | None = None) -> ScaledMoments:
    """Scale to unit variances, or by the deviations of other rows (`like`).

    A neuron that never varies gets weight zero: its mean goes into the bias.
    """
    deviations = (moments.xx.diagonal() / moments.weight).sqrt() if like is None else like.deviations
    divisor = deviations.clone()
    divisor[deviations <= 1e-12 * deviations.max()] = torch.inf
    gram = (moments.xx / moments.weight).div_(divisor).div_(divisor[:, None])
    live = divisor[-len(outer) :].isfinite()
    weights = outer.to(gram) * torch.where(live, deviations[-len(outer) :], 0.0)[:, None]
    cross = moments.xy / moments.weight / divisor[:, None] if moments.xy.shape[1] else None
    return ScaledMoments(deviations, gram, weights, cross)


def factor_metric(metric: Tensor) -> tuple[Tensor, Tensor]:
    """`root` with root·rootᵀ = metric, and its inverse. A direction without any gradient still gets a small cost."""
    values, vectors = torch.linalg.eigh(metric)
    values = values.clamp_min(0)
    roots = (values + 1e-2 * values.mean() + torch.finfo(values.dtype).tiny).sqrt()
    return vectors * roots, vectors.T / roots[:, None]


@dataclass(frozen=True)
class Subset:
    """A set of kept units, and the error of the output with it, for every rank of a linear part beside them.

    Only that of rank 0 is known where the ranks were not measured.
    """

    kept: Tensor
    errors: Tensor  # [inputs + 1], or [1]


@dataclass(frozen=True)
class Elimination:
    """Units in the order of their removal, some of the subsets on the way, and the output's energy (`total`)."""

    order: Tensor
    subsets: list[Subset]
    total: float


def eliminate(
    scaled: ScaledMoments, root: Tensor, counts: list[int], *, with_inputs: bool, columns: int = 1
) -> Elimination:
    """Backward elimination: remove one unit after another, each time the one that costs least.

    A unit has as many `columns` of a. The cost is the rise of ‖e·root‖² after the weights of the rest (and of x,
    `with_inputs`) are fitted again. It is tr(w_uᵀ·(H_uu)⁻¹·w_u) for unit u with the weights w_u·root, where H is the
    inverse of the Gram matrix of the features that are left; ‖w_j·root‖²/H_jj where a unit is one neuron j. A subset is
    recorded at every count, and before the first removal that is not free; ranks are measured at every second count.
    """
    inputs, units = scaled.inputs, len(scaled.outer) // columns
    first = 0 if with_inputs else inputs
    inverse = invert(scaled.gram[first:, first:], SELECTION_RIDGE)
    offset = inputs - first
    start = scaled.outer @ root
    total = (start * (scaled.gram[inputs:, inputs:] @ start)).sum().item()
    weights = torch.cat([start.new_zeros(offset, start.shape[1]), start])
    alive = torch.arange(units, device=start.device)
    order: list[Tensor] = []
    subsets: list[Subset] = []
    error, free = 0.0, True
    recorded = sorted({c for c in counts if 0 <= c < units} | {0}, reverse=True)
    with_ranks = recorded[:: 2 if len(recorded) > MANY_COUNTS and columns == 1 else 1]
    while len(alive):
        most = min(STEP, len(alive) - next(c for c in recorded if c < len(alive)))
        if columns == 1:
            chosen, costs = next_removals(inverse[offset:, offset:], weights[offset:], most)
        else:
            chosen, costs = next_unit(inverse[offset:, offset:], weights[offset:], columns)
        if free:
            free_count = sum(error + so_far <= FREE_SHARE * total for so_far in accumulate(costs))
            if free_count:
                chosen, costs = chosen[:free_count], costs[:free_count]
            elif order:
                kept = spread_units(alive, columns)
                subsets.append(measure_subset(scaled, root, inverse, weights, alive, kept, error, offset))
            free = free_count > 0
        error += sum(costs)
        order.append(alive[chosen])
        removed = offset + spread_units(chosen, columns)
        across = inverse[:, removed]
        step = torch.linalg.solve(across[removed], across.T).T
        weights = weights.sub_(step @ weights[removed])
        inverse = inverse.addmm_(step, across.T, alpha=-1)
        inverse, weights, alive = drop_units(inverse, weights, alive, chosen, columns)
        if len(alive) in with_ranks:
            kept = spread_units(alive, columns)
            subsets.append(measure_subset(scaled, root, inverse, weights, alive, kept, error, offset))
        elif len(alive) in recorded and not with_inputs:
            subsets.append(Subset(alive.sort().values, torch.tensor([error], dtype=start.dtype)))
    return Elimination(torch.cat(order), subsets, total)


def spread_units(units: Tensor, columns: int) -> Tensor:
    """The columns of these units, each of which has as many, in order."""
    return (units[:, None] * columns + torch.arange(columns, device=units.device)).flatten()


def next_unit(inverse: Tensor, weights: Tensor, columns: int) -> tuple[Tensor, list[float]]:
    """The unit that costs least to remove, of those with several columns, and its cost."""
    count = len(inverse) // columns
    blocks = inverse.reshape(count, columns, count, columns).diagonal(dim1=0, dim2=2)
    rows = weights.reshape(-1, columns, weights.shape[1])
    costs = (rows * torch.linalg.solve(blocks.permute(2, 0, 1), rows)).sum((1, 2)).clamp_min(0)
    best = costs.argmin()
    return best[None], [costs[best].item()]


def drop_units(
    inverse: Tensor, weights: Tensor, alive: Tensor, chosen: Tensor, columns: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse, the weights and the list of units without those at the places `chosen`.

    What is left of a small inverse is copied, so that the units stay in order. Copies of a large one would take longer
    than all its updates and half of the memory: there the last units move to the places that fall free.
    """
    stays = torch.ones(len(alive), dtype=torch.bool, device=alive.device)
    stays[chosen] = False
    offset = len(inverse) - columns * len(alive)
    first = torch.arange(offset, device=alive.device)
    if len(inverse) <= COPIED_FEATURES:
        left = torch.cat([first, offset + spread_units(stays.nonzero()[:, 0], columns)])
        return inverse[left][:, left], weights[left], alive[stays]
    count = len(alive) - len(chosen)
    free, last = (~stays[:count]).nonzero()[:, 0], count + stays[count:].nonzero()[:, 0]
    into, out_of = (offset + spread_units(places, columns) for places in (free, last))
    inverse[into] = inverse[out_of]
    inverse[:, into] = inverse[:, out_of]
    weights[into] = weights[out_of]
    alive = alive.index_copy(0, free, alive[last])[:count]
    features = offset + columns * count
    return inverse[:features, :features], weights[:features], alive


def invert(gram: Tensor, ridge: float) -> Tensor:
    return torch.cholesky_inverse(factor_ridged(gram, ridge))


def factor_ridged(gram: Tensor, ridge: float) -> Tensor:
    """The Cholesky factor of a correlation matrix with this ridge, or the smallest larger one that rounding needs.

    Products in float32 leave collinear features with eigenvalues that may be a little below zero.
    """
    for _ in range(LARGER_RIDGES):
        ridged = gram.clone()
        ridged.diagonal().add_(ridge)
        factor: Tensor
        factor, failed = torch.linalg.cholesky_ex(ridged)
        if not failed:
            break
        ridge = 10 * ridge or SELECTION_RIDGE
    return factor


def next_removals(inverse: Tensor, weights: Tensor, most: int) -> tuple[Tensor, list[float]]:
    """The next `most` removals, one after another, and the cost of each after those before it.

    Only the `2 * most` neurons that are cheapest now are considered. Where outputs are many, their weights are turned
    into coordinates of the space that they span: lengths stay the same, and are computed from far fewer numbers.
    """
    pool = (weights.square().sum(1) / inverse.diagonal()).topk(min(2 * most, len(weights)), largest=False).indices
    local, rows = inverse[pool][:, pool].clone(), weights[pool].clone()
    if rows.shape[1] > MANY_OUTPUTS:
        rows = torch.linalg.qr(rows.T, mode="r").R.T.contiguous()
    taken = torch.zeros(len(pool), dtype=torch.bool, device=pool.device)
    chosen, costs = [], []
    for _ in range(most):
        cost = (rows.square().sum(1) / local.diagonal().clamp_min(1e-300)).masked_fill(taken, torch.inf)
        best = int(cost.argmin())
        chosen.append(best)
        costs.append(cost[best].item())
        step = local[:, best] / local[best, best]
        rows -= torch.outer(step, rows[best])
        local -= torch.outer(step, local[best].clone())
        taken[best] = True
        local.diagonal()[taken] = 1.0
    return pool[torch.tensor(chosen, device=pool.device)], costs


def measure_subset(
    scaled: ScaledMoments,
    root: Tensor,
    inverse: Tensor,
    weights: Tensor,
    alive: Tensor,
    kept: Tensor,
    error: float,
    offset: int,
) -> Subset:
    """The error of these units, whose columns are `kept`, for every rank of a linear part beside them: each direction
    of x removes one eigenvalue from it."""
    inputs = scaled.inputs
    if offset:  # the error so far is that with the full rank of x
        added = weights[:offset]
        directions = added.T @ torch.linalg.solve(inverse[:offset, :offset], added)
        base = error
    else:
        lost = scaled.outer @ root
        lost[kept] -= weights
        across = scaled.gram[:inputs, inputs + kept]
        projection = inverse @ across.T
        schur = scaled.gram[:inputs, :inputs] - across @ projection  # scatter of x that the neurons do not explain
        schur.diagonal().add_(SELECTION_RIDGE)
        missing = scaled.gram[:inputs, inputs:] @ lost
        directions = missing.T @ torch.linalg.solve(schur, missing)
        base = error - directions.trace().item()
    values = torch.linalg.eigvalsh((directions + directions.T) / 2).flip(0).clamp_min(0)
    tails = torch.cat([values.flip(0).cumsum(0).flip(0), values.new_zeros(1)])
    return Subset(alive.sort().values, (max(base, 0.0) + tails).cpu())


@dataclass(frozen=True)
class Fitted:
    """y ≈ bias + outputs·(inputsᵀ x) + outerᵀ a of the kept neurons; `inputs` is None for a dense map in `outputs`."""

    kept: Tensor
    inputs: Tensor | None  # [width, rank]
    outputs: Tensor | None  # [width, rank], or the dense [outputs, inputs]
    outer: Tensor  # [kept, outputs]
    bias: Tensor
    error: float = math.nan  # ‖e·root‖² per row, on the rows of the fit, where it was asked for


def refit(
    moments: Moments,
    scaled: ScaledMoments,
    bias: Tensor,
    outer: Tensor,
    kept: Tensor,
    rank: int | None,
    root: tuple[Tensor, Tensor],
    ridge: float,
    target: float = 0.0,
    *,
    with_error: bool = False,
) -> Fitted:
    """The least-squares weights of the kept neurons and of `rank` directions of x, shrunk to the original weights.

    They reproduce the output of the original block and, times `target`, what the residual stream lacks (moments.xy).
    """
    change, linear = solve_weights(scaled, kept, rank, root, ridge, target)
    inputs = scaled.inputs
    divisor = scaled.deviations.clamp_min(1e-300)
    new_outer = (scaled.outer[kept] + change) / divisor[inputs + kept, None]
    new_outer[scaled.deviations[inputs + kept] == 0] = 0
    mean_x, mean_a = moments.mean_x[:inputs], moments.mean_x[inputs:]
    new_bias = bias.to(mean_a) + mean_a @ outer.to(mean_a) - mean_a[kept] @ new_outer
    if target and moments.xy.shape[1]:
        new_bias = new_bias + target * moments.mean_y
    left = right = None
    if linear is not None:
        left, right = linear[0] / divisor[:inputs, None], linear[1]
        new_bias = new_bias - (mean_x @ left) @ right.T
        right, left = (right @ left.T, None) if rank is None else (right, left)
    error = weighted_error(scaled, kept, change, linear, root[0], target) if with_error else math.nan
    return Fitted(kept, left, right, new_outer, new_bias, error)


def solve_weights(
    scaled: ScaledMoments, kept: Tensor, rank: int | None, root: tuple[Tensor, Tensor], ridge: float, target: float
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """The change of the kept neurons' weights, and the linear part as (inputs, outputs).

    With a linear part, the kept neurons are eliminated by a Schur complement, and the best directions of x are those of
    a reduced-rank regression in the metric.
    """
    inputs = scaled.inputs
    columns = inputs + kept
    removed = torch.ones(len(scaled.outer), dtype=torch.bool, device=kept.device)
    removed[kept] = False
    lost = scaled.outer[removed]

    def goal_of(features: Tensor) -> Tensor:
        """The moments of these features with what is to be reproduced."""
        goal = scaled.gram[features][:, inputs:][:, removed] @ lost
        return goal + target * scaled.cross[features] if target and scaled.cross is not None else goal

    goal = goal_of(columns)
    factor = factor_ridged(scaled.gram[columns][:, columns], ridge)
    if rank == 0:
        return torch.cholesky_solve(goal, factor), None
    across = scaled.gram[columns, :inputs]
    solution = torch.cholesky_solve(torch.cat([goal, across], dim=1), factor)
    change, projection = solution[:, : goal.shape[1]], solution[:, goal.shape[1] :]
    schur = scaled.gram[:inputs, :inputs] - across.T @ projection
    missing = goal_of(torch.arange(inputs, device=kept.device)) - projection.T @ goal
    spectrum = decompose((schur + schur.T) / 2)
    vectors, values = spectrum.vectors[:, : spectrum.rank], spectrum.values[: spectrum.rank]
    full = vectors @ ((vectors.T @ missing) / (values + ridge)[:, None])
    forward, back = root
    whitened = full @ forward
    if rank is None:
        pair = full, torch.eye(full.shape[1], dtype=full.dtype, device=full.device)
    else:
        directions = torch.linalg.eigh(whitened.T @ schur @ whitened).eigenvectors.flip(1)[:, :rank]
        pair = whitened @ directions, back.T @ directions
    return change - projection @ (pair[0] @ pair[1].T), pair


def weighted_error(
    scaled: ScaledMoments,
    kept: Tensor,
    change: Tensor,
    linear: tuple[Tensor, Tensor] | None,
    root: Tensor,
    target: float,
) -> float:
    """‖e·root‖² per row of a refit. With a `target` a constant is left out, so it may be below zero."""
    inputs = scaled.inputs
    moved = -scaled.outer
    moved[kept] = change
    whole = torch.cat([linear[0] @ linear[1].T if linear else moved.new_zeros(inputs, moved.shape[1]), moved]) @ root
    error = (whole * (scaled.gram @ whole)).sum().item()
    if target and scaled.cross is not None:
        error -= 2 * target * (whole * (scaled.cross @ root)).sum().item()
    return error


def choose_shrinkage(
    scaled: ScaledMoments, held: Moments, outer: Tensor, kept: Tensor, rank: int | None, root: tuple[Tensor, Tensor]
) -> tuple[float, float]:
    """The ridge and the target of a refit that err least on the held-out rows.

    The target is 0 where the moments have no `xy`, that is, say nothing about the residual stream. A linear part is
    taken with its full rank: then the weights are linear in the target, and one solve serves all targets. Errors are
    compared in random combinations of the outputs, the same for all: a sketch costs a fraction of all outputs.
    """
    other = scale_moments(held, outer, like=scaled)
    inputs, outputs = scaled.inputs, min(SKETCHED_OUTPUTS, scaled.outer.shape[1])
    sketch = root[0] @ random_signs(scaled.outer.shape[1], outputs).to(scaled.gram)
    columns = inputs + kept if rank == 0 else torch.cat([torch.arange(inputs, device=kept.device), inputs + kept])
    lost = scaled.outer @ sketch
    lost[kept] = 0
    goals = [scaled.gram[:, inputs:] @ lost] + ([] if scaled.cross is None else [scaled.cross @ sketch])
    base = torch.cat([lost.new_zeros(inputs, outputs), -lost])
    gram = scaled.gram[columns][:, columns]
    best, least = (RIDGES[0], 0.0), torch.inf
    for ridge in RIDGES:
        solution = torch.cholesky_solve(torch.cat(goals, dim=1)[columns], factor_ridged(gram, ridge))
        parts = [base.clone(), torch.zeros_like(base)][: len(goals)]
        for k, part in enumerate(parts):
            part[columns] += solution[:, k * outputs : (k + 1) * outputs]
        products = [other.gram @ part for part in parts]
        for target in (0.0,) if scaled.cross is None else TARGETS:
            whole, product = parts[0] + target * parts[-1], products[0] + target * products[-1]
            error = (whole * product).sum().item()
            if other.cross is not None:
                error -= 2 * (whole * (other.cross @ sketch)).sum().item()
            if error < least:
                best, least = (ridge, target), error
    return best


def random_signs(rows: int, columns: int) -> Tensor:
    """A matrix of random signs, always the same; the identity where there are as many columns as rows."""
    if rows == columns:
        return torch.eye(rows)
    return torch.randint(2, (rows, columns), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
