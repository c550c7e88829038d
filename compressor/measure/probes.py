"""Probes on a block's rows: what its residual is not (a bilinear probe), and how far a trained linear map falls short.

Both need rows, not moments. The windows are carried through the model layer by layer, so that the rows of one block are
in memory at a time; where even those are too many, windows are drawn from them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compressor.measure.moments import ACCUMULATION_DTYPE, Moments
from compressor.measure.regression import AffineMap, decompose, feature_errors, r_squared, solve
from compressor.models.blocks import Block, Rows, capture_rows, find_blocks, placement_of, run_block
from compressor.models.residual import open_stream
from compressor.runtime import distributed
from compressor.runtime.context import RunContext
from compressor.runtime.errors import InputError
from compressor.runtime.progress import Progress
from compressor.runtime.resources import available_memory
from compressor.text import HELD_OUT_EVERY, Text

ROWS = 4096  # run through a block at a time

MEMORY_SHARE = 0.5
COPIES = 10  # of a block's rows that a probe has in memory at once, inputs and outputs, most of them float32
BILINEAR_RANK = 16
SUBSPACE = 8  # directions and rounds in which leading eigenvectors are looked for
ROUND, MOST_ROUNDS = 10, 40  # iterations between two looks at convergence
CONVERGED = (1e-5, 1e-3)  # growth in a round, of the output's variance or of what is explained: less is none
TRAINED_STEPS, TRAINED_BATCH, TRAINED_RATE = 1000, 256, 1e-3
LOOKS = 10  # how often a trained map is looked at on the way


@dataclass(frozen=True)
class Sample:
    """Rows of one block in float32: those to fit on, and those that are held out."""

    x: Tensor
    y: Tensor
    held_x: Tensor
    held_y: Tensor

    def moments(self, x: Tensor | None = None, held_x: Tensor | None = None) -> tuple[Moments, Moments]:
        """The moments of both parts, of these inputs instead of the block's own when they are given."""
        first = moments_of(self.x if x is None else x, self.y)
        return first, moments_of(self.held_x if held_x is None else held_x, self.held_y)


@dataclass(frozen=True)
class Bilinear:
    """R² of the linear map on the sampled rows, and of the linear map with the probe beside it; both held out."""

    r2_lin: float
    r2_poly: float
    iterations: int
    converged: bool

    @property
    def gain(self) -> float:
        return self.r2_poly - self.r2_lin


@dataclass(frozen=True)
class Trained:
    """Held-out R² of a linear map trained by Adam, on the way (`steps`) and at the end, and of the closed form."""

    r2_lin: float
    r2: float
    steps: tuple[int, ...]
    curve: tuple[float, ...]

    @property
    def gap(self) -> float:
        return self.r2_lin - self.r2


def moments_of(x: Tensor, y: Tensor) -> Moments:
    """Moments of many rows, a batch of them in float64 at a time."""
    moments = Moments.zeros(x.shape[1], y.shape[1], x.device, whole_yy=False)
    for some_x, some_y in zip(torch.split(x, 4096), torch.split(y, 4096), strict=True):
        moments.add(Moments.of(some_x, some_y, whole_yy=False))
    return moments


def affordable(width: int) -> int:
    """How many rows of this width a probe can have in memory."""
    return int(MEMORY_SHARE * available_memory()) // (4 * COPIES * width)


def draw_windows(text: Text, width: int, progress: Progress, seed: int = 0) -> tuple[Tensor, Tensor, bool]:
    """Fitting and held-out windows for probes, and whether they had to be drawn from more."""
    rows, most = text.calibration.tokens, distributed.broadcast_value(affordable(width))
    if rows <= most:
        return text.fitting, text.held_out, False
    count = max(HELD_OUT_EVERY, most // text.seq_len)
    generator = torch.Generator().manual_seed(seed)
    held = max(1, count // HELD_OUT_EVERY)
    parts = []
    for windows, wanted in ((text.fitting, count - held), (text.held_out, held)):
        parts.append(windows[torch.randperm(len(windows), generator=generator)[:wanted].sort().values])
    drawn = sum(part.numel() for part in parts)
    progress.say(f"probes: memory holds {most:,} of {rows:,} rows; {drawn:,} are sampled, in whole windows")
    return parts[0], parts[1], True


def sample_rows(
    model: Any, blocks: list[Block], fitting: Tensor, held_out: Tensor, batch_size: int
) -> Iterator[tuple[Block, Sample]]:
    """The rows of every block in turn, all windows carried from layer to layer."""
    streams = [open_stream(model, blocks, windows, batch_size) for windows in (fitting, held_out)]
    for block in blocks:
        parts: list[Tensor] = []
        for stream in streams:
            found: list[Rows] = []
            with capture_rows(model, [block], lambda _, rows, found=found: found.append(rows)):  # type: ignore[misc]
                stream.step()
            parts += [
                torch.cat(distributed.gather([getattr(rows, name).float() for rows in found])) for name in ("x", "y")
            ]
        yield block, Sample(*parts)


def whiten(moments: Moments, x: Tensor) -> Tensor:
    """(x − mean) in the directions in which the inputs vary, each of unit variance."""
    spectrum = decompose(moments.xx)
    scale = (spectrum.values[: spectrum.rank] / moments.weight).rsqrt()
    basis = (spectrum.vectors[:, : spectrum.rank] * scale).to(x.dtype)
    return (x - moments.mean_x.to(x.dtype)) @ basis


def held_out_r2(fit: Moments, held: Moments) -> tuple[float, AffineMap]:
    """R²_lin of these rows, and the map."""
    linear = solve(fit, decompose(fit.xx))
    return r_squared(feature_errors(linear, held), held), linear


def probe_bilinear(sample: Sample, rank: int = BILINEAR_RANK) -> Bilinear:
    """y ≈ linear + Σ cₖ·(uₖ·x)(vₖ·x), `rank` products, fitted to convergence.

    Given u and v the best linear map and the best c are closed forms, so only u and v are searched for (variable
    projection, L-BFGS on all rows, whitened inputs). The search begins at the least-squares map: its residual's own
    quadratic directions are the first u and v. It has converged when, in ten iterations, the share of the output's
    variance that the products explain grew by less than 1e-5, or than a thousandth of itself.
    """
    fit, held = sample.moments()
    r2_lin, linear = held_out_r2(fit, held)
    z = whiten(fit, sample.x)
    residual = sample.y - linear(sample.x.to(ACCUMULATION_DTYPE)).float()
    total = fit.variances.sum().float()
    if not len(z.T) or total == 0 or residual.square().sum() <= 1e-10 * total:
        return Bilinear(r2_lin, r2_lin, 0, True)  # nothing is left to explain
    residual = residual - residual.mean(0)
    u, v = (part.requires_grad_() for part in seed_directions(z, residual, rank))

    def products(rows: Tensor) -> Tensor:
        return (rows @ u) * (rows @ v)

    def explained() -> Any:
        """The share of the output's variance that the products explain beside a linear map."""
        q = products(z)
        q = q - q.mean(0)
        q = q - z @ (z.T @ q / len(z))
        scatter = q.T @ q
        jitter = 1e-6 * scatter.diagonal().mean() + torch.finfo(q.dtype).tiny
        factor = torch.linalg.cholesky(scatter + jitter * torch.eye(len(scatter), dtype=q.dtype, device=q.device))
        return torch.linalg.solve_triangular(factor, q.T @ residual, upper=False).square().sum() / total

    search = torch.optim.LBFGS(
        [u, v], max_iter=ROUND, history_size=20, tolerance_grad=0, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        search.zero_grad()
        loss = -explained()
        loss.backward()
        return loss  # type: ignore[no-any-return]

    rounds, shares = 0, [0.0]
    while rounds < MOST_ROUNDS and not settled(shares):
        shares.append(-search.step(closure).item())  # type: ignore[no-untyped-call]  # before the round
        rounds += 1
    with torch.no_grad():
        beside, held_beside = (
            torch.cat([rows, products(white)], dim=1)
            for rows, white in ((sample.x, z), (sample.held_x, whiten(fit, sample.held_x)))
        )
        r2_poly, _ = held_out_r2(*sample.moments(beside, held_beside))
    return Bilinear(r2_lin, r2_poly, rounds * ROUND, settled(shares))


def settled(shares: list[float]) -> bool:
    """Whether the last round but one changed nothing: a share is known when the round after it begins."""
    least, of_it = CONVERGED
    return len(shares) > 2 and shares[-1] - shares[-2] < max(least, of_it * shares[-1])


def seed_directions(z: Tensor, residual: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """For the largest directions p of the residual, leading eigenvectors of E[(p·r)·z·zᵀ]: where it is quadratic."""
    count = min(rank, residual.shape[1])
    directions = torch.linalg.eigh(residual.T @ residual).eigenvectors[:, -count:]
    left, right = [], []
    for direction in directions.flip(1).T:
        first, second = leading_pair(z, residual @ direction)
        # Equal factors would stay equal for ever: u and v are drawn apart a little, towards the next direction.
        left.append(first + 0.1 * second)
        right.append(first - 0.1 * second)
    while len(left) < rank:  # fewer outputs than products
        left.append(left[len(left) % count].roll(1))
        right.append(right[len(right) % count].roll(2))
    return torch.stack(left, dim=1).contiguous(), torch.stack(right, dim=1).contiguous()


def leading_pair(z: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The two eigenvectors of Σ w·z·zᵀ with the largest values of either sign, without making that matrix."""
    generator = torch.Generator().manual_seed(0)
    basis = torch.randn(z.shape[1], min(SUBSPACE, z.shape[1]), generator=generator).to(z)
    for _ in range(SUBSPACE):
        basis = torch.linalg.qr(z.T @ (weights[:, None] * (z @ basis))).Q
    inside = z @ basis
    values, vectors = torch.linalg.eigh(inside.T @ (weights[:, None] * inside))
    order = values.abs().argsort(descending=True)
    return basis @ vectors[:, order[0]], basis @ vectors[:, order[min(1, len(order) - 1)]]


def probe_trained(sample: Sample, steps: int = TRAINED_STEPS, seed: int = 0) -> Trained:
    """The same affine map by Adam from zero, on minibatches of raw rows.

    Inputs and outputs are each divided by one number, their size, so that the learning rate means the same in every
    block; their directions are left as they are, which is what makes it slow.
    """
    fit, held = sample.moments()
    r2_lin, _ = held_out_r2(fit, held)
    sizes = [max(rows.square().mean().sqrt().item(), 1e-30) for rows in (sample.x, sample.y)]
    weight = torch.zeros(sample.x.shape[1], sample.y.shape[1], device=sample.x.device, requires_grad=True)
    bias = torch.zeros(sample.y.shape[1], device=sample.x.device, requires_grad=True)
    search = torch.optim.Adam([weight, bias], lr=TRAINED_RATE)
    generator = torch.Generator().manual_seed(seed)
    looks = sorted({round(steps * (k + 1) / LOOKS) for k in range(LOOKS)} - {0})
    curve = []
    for step in range(1, steps + 1):
        rows = torch.randint(len(sample.x), (TRAINED_BATCH,), generator=generator).to(sample.x.device)
        error = (sample.x[rows] / sizes[0]) @ weight + bias - sample.y[rows] / sizes[1]
        search.zero_grad()
        error.square().mean().backward()  # type: ignore[no-untyped-call]
        search.step()
        if step in looks:
            curve.append(r2_of(weight, bias, sizes, held))
    return Trained(r2_lin, curve[-1], tuple(looks), tuple(curve))


@torch.no_grad()
def r2_of(weight: Tensor, bias: Tensor, sizes: list[float], held: Moments) -> float:
    """Held-out R² of a trained map, from the held-out moments."""
    whole = weight.to(ACCUMULATION_DTYPE) * sizes[1] / sizes[0]
    mean_x = torch.zeros_like(held.mean_x)
    return r_squared(feature_errors(AffineMap(whole, mean_x, bias.to(ACCUMULATION_DTYPE) * sizes[1]), held), held)


@dataclass(frozen=True)
class Crossing:
    """Held-out R²_lin of this model's block and of the other's, by the inputs that they were given."""

    index: int
    other_index: int
    own: float  # this model's block on its own inputs
    own_on_other: float  # on the other model's inputs
    own_on_white: float  # on its own inputs, whitened
    other: float  # the other model's block on its own inputs
    other_on_own: float  # on this model's inputs
    other_on_white: float  # on this model's inputs, whitened


def refuse_widths(model: Any, other: Any, name: str, other_name: str) -> None:
    """Rows of one width cannot enter blocks of another."""
    widths = [find_blocks(each)[0].width for each in (model, other)]
    if widths[0] != widths[1]:
        raise InputError(
            f"--cross {other_name} has blocks of width {widths[1]}, {name} of width {widths[0]}: inputs cannot be "
            f"exchanged; name a model of width {widths[0]}"
        )


def whitener(moments: Moments) -> Tensor:
    """The symmetric matrix that makes the covariance of these inputs the identity, where they vary at all."""
    spectrum = decompose(moments.xx)
    vectors = spectrum.vectors[:, : spectrum.rank]
    return vectors * (spectrum.values[: spectrum.rank] / moments.weight).rsqrt() @ vectors.T


@torch.no_grad()
def linearity_on(model: Any, block: Block, x: Tensor, held_x: Tensor) -> float:
    """R²_lin of a block on these rows."""

    def outputs(rows: Tensor) -> Tensor:
        place = placement_of(model, block)
        parts = [run_block(model, block, some.to(**place)) for some in torch.split(rows, ROWS)]
        return torch.cat(parts).to(rows)

    y = outputs(x)
    if not y.isfinite().all():
        raise InputError(f"block {block.index} ({block.path}) overflows on foreign inputs; try --dtype float32")
    return held_out_r2(moments_of(x, y), moments_of(held_x, outputs(held_x)))[0]


def cross(
    model: Any,
    text: Text,
    other: Any,
    other_text: Text,
    context: RunContext,
) -> list[Crossing]:
    """Every block of the model beside the block of the other at the same relative depth."""
    progress, seed, batch_size = context.progress, context.seed, context.batch_size
    blocks, others = find_blocks(model), find_blocks(other)
    partners = [others[round(k * (len(others) - 1) / max(1, len(blocks) - 1))] for k in range(len(blocks))]
    fitting, held_out, _ = draw_windows(text, 2 * blocks[0].width, progress, seed)  # two models' rows at once
    other_fitting, other_held_out, _ = draw_windows(other_text, 2 * blocks[0].width, Progress(), seed)
    foreign = sample_rows(other, others, other_fitting, other_held_out, batch_size)
    theirs: tuple[Block, Sample] = next(foreign)
    found = []
    rows = sample_rows(model, blocks, fitting, held_out, batch_size)
    for (block, own), partner in zip(progress.track("cross", rows, len(blocks)), partners, strict=True):
        while theirs[0].index < partner.index:
            theirs = next(foreign)
        moments = moments_of(own.x, own.x[:, :0])
        matrix = whitener(moments)
        white, held_white = (((x.to(ACCUMULATION_DTYPE) - moments.mean_x) @ matrix).to(x) for x in (own.x, own.held_x))
        sample = theirs[1]
        found.append(
            Crossing(
                index=block.index,
                other_index=partner.index,
                own=linearity_on(model, block, own.x, own.held_x),
                own_on_other=linearity_on(model, block, sample.x, sample.held_x),
                own_on_white=linearity_on(model, block, white, held_white),
                other=linearity_on(other, partner, sample.x, sample.held_x),
                other_on_own=linearity_on(other, partner, own.x, own.held_x),
                other_on_white=linearity_on(other, partner, white, held_white),
            )
        )
    return found
