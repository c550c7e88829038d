"""Which neurons to keep, and the least-squares weights of those kept, from the moments of z = [x, a] alone.

x is a block's input, a its neurons' activations, and its output is linear in a: nothing else need be seen of the text.
Features are scaled to unit variance, so that one small ridge means the same for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from compressor.measure.moments import Moments
from compressor.measure.regression import decompose

SELECTION_RIDGE = 1e-9
FREE = 1e-7  # of the output's energy: what rounding loses, so that removing it costs nothing
STEP = 32  # neurons per update of the whole inverse; inside a step every removal sees the ones before it
RIDGES = (1e-6, 1e-3, 1e-2, 1e-1, 1.0)  # shrink to the original weights, times the variance of the feature
TARGETS = (0.0, 0.5, 1.0)  # from the original block on the present inputs to the original residual stream


@dataclass(frozen=True)
class Scaled:
    """The moments of z with unit variances, and the output weights that belong to them."""

    scale: Tensor  # [inputs + neurons]
    gram: Tensor
    outer: Tensor  # [neurons, outputs]
    cross: Tensor | None  # with what is missing in the stream [inputs + neurons, outputs]

    @property
    def inputs(self) -> int:
        return len(self.gram) - len(self.outer)


def scale(moments: Moments, outer: Tensor, like: Scaled | None = None) -> Scaled:
    """Unit variances, or the scale of other rows. A dead neuron gets weight zero: its mean is in the bias."""
    deviations = (moments.xx.diagonal() / moments.weight).sqrt() if like is None else like.scale
    divisor = deviations.clone()
    divisor[deviations <= 1e-12 * deviations.max()] = torch.inf
    gram = moments.xx / moments.weight / divisor / divisor[:, None]
    live = divisor[-len(outer) :].isfinite()
    weights = outer.to(gram) * torch.where(live, deviations[-len(outer) :], 0.0)[:, None]
    cross = moments.xy / moments.weight / divisor[:, None] if moments.xy.shape[1] else None
    return Scaled(deviations, gram, weights, cross)


def root_of(metric: Tensor) -> tuple[Tensor, Tensor]:
    """M with M·Mᵀ = metric, and its inverse. A direction that no gradient touched still has a small cost."""
    values, vectors = torch.linalg.eigh(metric)
    values = values.clamp_min(0)
    roots = (values + 1e-2 * values.mean() + torch.finfo(values.dtype).tiny).sqrt()
    return vectors * roots, vectors.T / roots[:, None]


@dataclass(frozen=True)
class Mark:
    """A set of neurons, and the output's error with it for every rank of the linear part."""

    kept: Tensor
    errors: Tensor  # [inputs + 1]


@dataclass(frozen=True)
class Elimination:
    """Neurons in the order of their removal, and what was looked at on the way. `total` is the output's energy."""

    order: Tensor
    marks: list[Mark]
    total: float


def eliminate(scaled: Scaled, root: Tensor, counts: list[int], *, with_inputs: bool) -> Elimination:
    """Remove one neuron after another, each time the one whose loss the others (and x) make up for best.

    The error is ‖e·root‖² after the rest is fitted again. This is greedy column subset selection from behind: removing
    neuron j costs ‖w_j·root‖²/H_jj, where H is the inverse of the Gram matrix of what is left. A mark is made at every
    count, and where the last neuron went that cost nothing.
    """
    inputs, neurons = scaled.inputs, len(scaled.outer)
    first = 0 if with_inputs else inputs
    inverse = invert(scaled.gram[first:, first:], SELECTION_RIDGE)
    offset = inputs - first
    start = scaled.outer @ root
    total = (start * (scaled.gram[inputs:, inputs:] @ start)).sum().item()
    weights = torch.cat([start.new_zeros(offset, start.shape[1]), start])
    alive = torch.arange(neurons, device=start.device)
    order: list[Tensor] = []
    marks: list[Mark] = []
    error, free = 0.0, True
    wanted = sorted({c for c in counts if 0 <= c < neurons} | {0}, reverse=True)
    while len(alive):
        most = min(STEP, len(alive) - next(c for c in wanted if c < len(alive)))
        chosen, costs = next_removals(inverse[offset:, offset:], weights[offset:], most)
        if free:
            affordable = sum(error + so_far <= FREE * total for so_far in accumulate(costs))
            if affordable:
                chosen, costs = chosen[:affordable], costs[:affordable]
            elif order:
                marks.append(mark(scaled, root, inverse, weights, alive, error, offset))
            free = affordable > 0
        error += sum(costs)
        order.append(alive[chosen])
        gone = chosen + offset
        columns = inverse[:, gone]
        step = torch.linalg.solve(columns[gone], columns.T).T
        weights = weights - step @ weights[gone]
        inverse = inverse.addmm_(step, columns.T, alpha=-1)
        stay = torch.ones(len(inverse), dtype=torch.bool, device=inverse.device)
        stay[gone] = False
        inverse, weights, alive = inverse[stay][:, stay], weights[stay], alive[stay[offset:]]
        if len(alive) in wanted:
            marks.append(mark(scaled, root, inverse, weights, alive, error, offset))
    return Elimination(torch.cat(order), marks, total)


def invert(gram: Tensor, ridge: float) -> Tensor:
    lifted = gram.clone()
    lifted.diagonal().add_(ridge)
    return torch.cholesky_inverse(torch.linalg.cholesky(lifted))


def next_removals(inverse: Tensor, weights: Tensor, most: int) -> tuple[Tensor, list[float]]:
    """Up to `most` removals among the cheapest, and their costs, each given the ones before it."""
    pool = (weights.square().sum(1) / inverse.diagonal()).topk(min(2 * most, len(weights)), largest=False).indices
    local, rows = inverse[pool][:, pool].clone(), weights[pool].clone()
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


def mark(
    scaled: Scaled, root: Tensor, inverse: Tensor, weights: Tensor, alive: Tensor, error: float, offset: int
) -> Mark:
    """The error of this set for every rank: what each direction of x adds is an eigenvalue."""
    inputs = scaled.inputs
    if offset:  # the error was counted with all of x
        added = weights[:offset]
        directions = added.T @ torch.linalg.solve(inverse[:offset, :offset], added)
        base = error
    else:
        lost = scaled.outer @ root
        lost[alive] -= weights
        across = scaled.gram[:inputs, inputs + alive]
        made_up = inverse @ across.T
        left = scaled.gram[:inputs, :inputs] - across @ made_up
        left.diagonal().add_(SELECTION_RIDGE)
        missing = scaled.gram[:inputs, inputs:] @ lost
        directions = missing.T @ torch.linalg.solve(left, missing)
        base = error - directions.trace().item()
    values = torch.linalg.eigvalsh((directions + directions.T) / 2).flip(0).clamp_min(0)
    tails = torch.cat([values.flip(0).cumsum(0).flip(0), values.new_zeros(1)])
    return Mark(alive.sort().values, (max(base, 0.0) + tails).cpu())


@dataclass(frozen=True)
class Fitted:
    """y ≈ bias + outputs·(inputsᵀ x) + outerᵀ a of the kept neurons; `inputs` is None for a dense map in `outputs`."""

    kept: Tensor
    inputs: Tensor | None  # [width, rank]
    outputs: Tensor | None  # [width, rank], or the dense [outputs, inputs]
    outer: Tensor  # [kept, outputs]
    bias: Tensor
    error: float  # ‖e·root‖² per row on the rows that it was fitted on


def refit(
    moments: Moments,
    bias: Tensor,
    outer: Tensor,
    kept: Tensor,
    rank: int | None,
    root: tuple[Tensor, Tensor],
    ridge: float,
    target: float = 0.0,
) -> Fitted:
    """The least-squares weights of some neurons and `rank` directions of x, shrunk to the original weights.

    What the removed neurons gave is made up for; with `target` 1 so is all that the stream lacks there (moments.xy).
    """
    scaled = scale(moments, outer)
    change, linear = solve(scaled, kept, rank, root, ridge, target)
    inputs = scaled.inputs
    divisor = scaled.scale.clamp_min(1e-300)
    alive = scaled.outer[kept] + change
    new_outer = alive / divisor[inputs + kept, None]
    new_outer[scaled.scale[inputs + kept] == 0] = 0
    mean_x, mean_a = moments.mean_x[:inputs], moments.mean_x[inputs:]
    new_bias = bias.to(mean_a) + mean_a @ outer.to(mean_a) - mean_a[kept] @ new_outer
    if target and moments.xy.shape[1]:
        new_bias = new_bias + target * moments.mean_y
    left = right = None
    if linear is not None:
        left, right = linear[0] / divisor[:inputs, None], linear[1]
        new_bias = new_bias - (mean_x @ left) @ right.T
        right, left = (right @ left.T, None) if rank is None else (right, left)
    error = error_of(scaled, kept, change, linear, root[0], target)
    return Fitted(kept, left, right, new_outer, new_bias, error)


def solve(
    scaled: Scaled, kept: Tensor, rank: int | None, root: tuple[Tensor, Tensor], ridge: float, target: float
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """The change of the kept neurons' weights, and the linear part as (inputs, outputs)."""
    inputs = scaled.inputs
    lost = scaled.outer.clone()
    lost[kept] = 0
    wanted = scaled.gram[:, inputs:] @ lost
    if target and scaled.cross is not None:
        wanted = wanted + target * scaled.cross
    places = inputs + kept
    block = scaled.gram[places][:, places]
    block.diagonal().add_(ridge)
    factor = torch.linalg.cholesky(block)
    if rank == 0:
        return torch.cholesky_solve(wanted[places], factor), None
    across = scaled.gram[places, :inputs]
    made_up = torch.cholesky_solve(torch.cat([wanted[places], across], dim=1), factor)
    change, through = made_up[:, : wanted.shape[1]], made_up[:, wanted.shape[1] :]
    left = scaled.gram[:inputs, :inputs] - across.T @ through
    missing = wanted[:inputs] - through.T @ wanted[places]
    spectrum = decompose((left + left.T) / 2)
    vectors, values = spectrum.vectors[:, : spectrum.rank], spectrum.values[: spectrum.rank]
    full = vectors @ ((vectors.T @ missing) / (values + ridge)[:, None])
    metric, back = root
    seen = full @ metric
    if rank is None:
        pair = full, torch.eye(full.shape[1], dtype=full.dtype, device=full.device)
    else:
        directions = torch.linalg.eigh(seen.T @ left @ seen).eigenvectors.flip(1)[:, :rank]
        pair = seen @ directions, back.T @ directions
    return change - through @ (pair[0] @ pair[1].T), pair


def error_of(
    scaled: Scaled,
    kept: Tensor,
    change: Tensor,
    linear: tuple[Tensor, Tensor] | None,
    root: Tensor,
    target: float,
) -> float:
    """‖e·root‖² per row: what is lost, less what the change makes up for. With `target` it may be below zero."""
    inputs = scaled.inputs
    moved = -scaled.outer
    moved[kept] = change
    whole = torch.cat([linear[0] @ linear[1].T if linear else moved.new_zeros(inputs, moved.shape[1]), moved]) @ root
    found = (whole * (scaled.gram @ whole)).sum().item()
    if target and scaled.cross is not None:
        found -= 2 * target * (whole * (scaled.cross @ root)).sum().item()
    return found


def choose_strength(
    fit: Moments, held: Moments, outer: Tensor, kept: Tensor, rank: int | None, root: tuple[Tensor, Tensor]
) -> tuple[float, float]:
    """The ridge, and the target when the moments know the stream, that err least on the held-out rows.

    A linear part takes part with all its ranks: the weights are then linear in the target, and one solve gives all.
    """
    scaled = scale(fit, outer)
    other = scale(held, outer, like=scaled)
    inputs, outputs = scaled.inputs, scaled.outer.shape[1]
    places = inputs + kept if rank == 0 else torch.cat([torch.arange(inputs, device=kept.device), inputs + kept])
    start = scaled.outer.clone()
    start[kept] = 0
    wanted = [scaled.gram[:, inputs:] @ start] + ([] if scaled.cross is None else [scaled.cross])
    base = torch.cat([start.new_zeros(inputs, outputs), -start]) @ root[0]
    best, least = (RIDGES[0], 0.0), torch.inf
    for ridge in RIDGES:
        block = scaled.gram[places][:, places]
        block.diagonal().add_(ridge)
        found = torch.cholesky_solve(torch.cat(wanted, dim=1)[places], torch.linalg.cholesky(block))
        parts = [base.clone(), torch.zeros_like(base)][: len(wanted)]
        for k, part in enumerate(parts):
            part[places] += found[:, k * outputs : (k + 1) * outputs] @ root[0]
        seen = [other.gram @ part for part in parts]
        for target in (0.0,) if scaled.cross is None else TARGETS:
            whole, through = parts[0] + target * parts[-1], seen[0] + target * seen[-1]
            error = (whole * through).sum().item()
            if other.cross is not None:
                error -= 2 * (whole * (other.cross @ root[0])).sum().item()
            if error < least:
                best, least = (ridge, target), error
    return best
