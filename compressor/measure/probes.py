"""Probes on a block's rows: how much of what a linear map misses is bilinear, and how far a trained linear map falls
short of the closed form. Also blocks on the inputs of another model.

Probes need the rows themselves, not only their moments. The windows are carried through the model layer by layer, so
that the rows of only one block are in memory; where even those are too many, some of the windows are sampled.
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

ROWS_AT_A_TIME = 4096  # summed, or run through a block, at a time
MEMORY_SHARE = 0.5  # of the free memory that a probe may use
COPIES = 10  # of a block's rows, in float32, that a probe has in memory at once
BILINEAR_RANK = 16
SUBSPACE = 8  # size and iterations of the subspace iteration for leading eigenvectors
ROUND, MOST_ROUNDS = 10, 40  # L-BFGS iterations between two checks of convergence, and how many such rounds
CONVERGED = (1e-5, 1e-3)  # a round that gains less, of the output's variance or of what is explained, is the last
TRAINED_STEPS, TRAINED_BATCH, TRAINED_RATE = 1000, 256, 1e-3
CURVE_POINTS = 10  # how often the R² of a trained map is recorded


@dataclass(frozen=True)
class Sample:
    """Rows of one block in float32: those to fit on, and those that are held out."""

    x: Tensor
    y: Tensor
    held_x: Tensor
    held_y: Tensor

    def moments(self, x: Tensor | None = None, held_x: Tensor | None = None) -> tuple[Moments, Moments]:
        """The moments of both parts, with other inputs than the block's where they are given."""
        fit = moments_of(self.x if x is None else x, self.y)
        return fit, moments_of(self.held_x if held_x is None else held_x, self.held_y)


@dataclass(frozen=True)
class Bilinear:
    """Held-out R² of the linear map on the sampled rows, and of the linear map with bilinear products added."""

    r2_lin: float
    r2_poly: float
    iterations: int
    converged: bool

    @property
    def gain(self) -> float:
        return self.r2_poly - self.r2_lin


@dataclass(frozen=True)
class Trained:
    """Held-out R² of the closed form (`r2_lin`) and of a linear map trained by Adam (`r2`; `curve` after `steps`)."""

    r2_lin: float
    r2: float
    steps: tuple[int, ...]
    curve: tuple[float, ...]

    @property
    def gap(self) -> float:
        return self.r2_lin - self.r2


def moments_of(x: Tensor, y: Tensor) -> Moments:
    """Moments of many rows. Only some of them are in float64 at a time."""
    moments = Moments.zeros(x.shape[1], y.shape[1], x.device, whole_yy=False)
    for chunk_x, chunk_y in zip(torch.split(x, ROWS_AT_A_TIME), torch.split(y, ROWS_AT_A_TIME), strict=True):
        moments.add(Moments.of(chunk_x, chunk_y, whole_yy=False))
    return moments


def rows_in_memory(width: int) -> int:
    """How many rows of this width a probe can hold in memory."""
    return int(MEMORY_SHARE * available_memory()) // (4 * COPIES * width)


def draw_windows(text: Text, width: int, progress: Progress, seed: int = 0) -> tuple[Tensor, Tensor, bool]:
    """Fitting and held-out windows for probes, and whether they are only a sample, for lack of memory."""
    rows, most = text.calibration.tokens, distributed.broadcast_value(rows_in_memory(width))
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
            batches: list[Rows] = []
            with capture_rows(model, [block], lambda _, rows, batches=batches: batches.append(rows)):  # type: ignore[misc]
                stream.step()
            parts += [
                torch.cat(distributed.gather([getattr(rows, name).float() for rows in batches])) for name in ("x", "y")
            ]
        yield block, Sample(*parts)


def whiten(moments: Moments, x: Tensor) -> Tensor:
    """(x − mean) in the directions in which the inputs vary, each of unit variance."""
    spectrum = decompose(moments.xx)
    scale = (spectrum.values[: spectrum.rank] / moments.weight).rsqrt()
    basis = (spectrum.vectors[:, : spectrum.rank] * scale).to(x.dtype)
    return (x - moments.mean_x.to(x.dtype)) @ basis


def held_out_r2(fit: Moments, held: Moments) -> tuple[float, AffineMap]:
    """The held-out R² of the least-squares map of these moments, and the map."""
    linear = solve(fit, decompose(fit.xx))
    return r_squared(feature_errors(linear, held), held), linear


def probe_bilinear(sample: Sample, rank: int = BILINEAR_RANK) -> Bilinear:
    """y ≈ linear + Σ cₖ·(uₖ·x)(vₖ·x), `rank` products, fitted to convergence.

    Given u and v the best linear map and the best c are closed forms, so only u and v are searched for (variable
    projection, L-BFGS on all rows, whitened inputs). The first u and v are the directions in which the residual of the
    least-squares map is quadratic. The search has converged when, in ten iterations, the share of the output's variance
    that the products explain grew by less than 1e-5, or than a thousandth of itself.
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
        """The share of the output's variance that the products explain in addition to a linear map."""
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
    while rounds < MOST_ROUNDS and not has_converged(shares):
        shares.append(-search.step(closure).item())  # type: ignore[no-untyped-call]  # its value before the round
        rounds += 1
    with torch.no_grad():
        extended, held_extended = (
            torch.cat([rows, products(white)], dim=1)
            for rows, white in ((sample.x, z), (sample.held_x, whiten(fit, sample.held_x)))
        )
        r2_poly, _ = held_out_r2(*sample.moments(extended, held_extended))
    return Bilinear(r2_lin, r2_poly, rounds * ROUND, has_converged(shares))


def has_converged(shares: list[float]) -> bool:
    """Whether the last round but one gained almost nothing: what a round reached is known when the next one begins."""
    least, relative = CONVERGED
    return len(shares) > 2 and shares[-1] - shares[-2] < max(least, relative * shares[-1])


def seed_directions(z: Tensor, residual: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """For the largest directions p of the residual, leading eigenvectors of E[(p·r)·z·zᵀ]: where it is quadratic."""
    count = min(rank, residual.shape[1])
    directions = torch.linalg.eigh(residual.T @ residual).eigenvectors[:, -count:]
    left, right = [], []
    for direction in directions.flip(1).T:
        first, second = leading_pair(z, residual @ direction)
        # Equal u and v would get equal gradients and stay equal, so they start a little apart.
        left.append(first + 0.1 * second)
        right.append(first - 0.1 * second)
    while len(left) < rank:  # fewer outputs than products
        left.append(left[len(left) % count].roll(1))
        right.append(right[len(right) % count].roll(2))
    return torch.stack(left, dim=1).contiguous(), torch.stack(right, dim=1).contiguous()


def leading_pair(z: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The two eigenvectors of Σ w·z·zᵀ whose eigenvalues are largest in size, without forming that matrix."""
    generator = torch.Generator().manual_seed(0)
    basis = torch.randn(z.shape[1], min(SUBSPACE, z.shape[1]), generator=generator).to(z)
    for _ in range(SUBSPACE):
        basis = torch.linalg.qr(z.T @ (weights[:, None] * (z @ basis))).Q
    inside = z @ basis
    values, vectors = torch.linalg.eigh(inside.T @ (weights[:, None] * inside))
    order = values.abs().argsort(descending=True)
    return basis @ vectors[:, order[0]], basis @ vectors[:, order[min(1, len(order) - 1)]]


def probe_trained(sample: Sample, steps: int = TRAINED_STEPS, seed: int = 0) -> Trained:
    """The same affine map trained from zero by Adam, on minibatches of rows.

    Inputs and outputs are each divided by their root mean square, so that the learning rate means the same in every
    block. They are not whitened: that is why training is slow.
    """
    fit, held = sample.moments()
    r2_lin, _ = held_out_r2(fit, held)
    sizes = [max(rows.square().mean().sqrt().item(), 1e-30) for rows in (sample.x, sample.y)]
    weight = torch.zeros(sample.x.shape[1], sample.y.shape[1], device=sample.x.device, requires_grad=True)
    bias = torch.zeros(sample.y.shape[1], device=sample.x.device, requires_grad=True)
    search = torch.optim.Adam([weight, bias], lr=TRAINED_RATE)
    generator = torch.Generator().manual_seed(seed)
    curve_steps = sorted({round(steps * (k + 1) / CURVE_POINTS) for k in range(CURVE_POINTS)} - {0})
    curve = []
    for step in range(1, steps + 1):
        rows = torch.randint(len(sample.x), (TRAINED_BATCH,), generator=generator).to(sample.x.device)
        error = (sample.x[rows] / sizes[0]) @ weight + bias - sample.y[rows] / sizes[1]
        search.zero_grad()
        error.square().mean().backward()  # type: ignore[no-untyped-call]
        search.step()
        if step in curve_steps:
            curve.append(trained_r2(weight, bias, sizes, held))
    return Trained(r2_lin, curve[-1], tuple(curve_steps), tuple(curve))


@torch.no_grad()
def trained_r2(weight: Tensor, bias: Tensor, sizes: list[float], held: Moments) -> float:
    """Held-out R² of a trained map, from the held-out moments."""
    unscaled = weight.to(ACCUMULATION_DTYPE) * sizes[1] / sizes[0]
    mean_x = torch.zeros_like(held.mean_x)
    return r_squared(feature_errors(AffineMap(unscaled, mean_x, bias.to(ACCUMULATION_DTYPE) * sizes[1]), held), held)


@dataclass(frozen=True)
class Crossing:
    """Held-out R²_lin of a block of this model (`own`) and of another model, each on its own and on other inputs."""

    index: int
    other_index: int
    own: float  # this model's block on its own inputs
    own_on_other: float  # on the other model's inputs
    own_on_white: float  # on its own inputs, whitened
    other: float  # the other model's block on its own inputs
    other_on_own: float  # on this model's inputs
    other_on_white: float  # on this model's inputs, whitened


def refuse_different_widths(model: Any, other: Any, name: str, other_name: str) -> None:
    """Refuse two models whose blocks have different widths: their inputs cannot be exchanged."""
    widths = [find_blocks(m)[0].width for m in (model, other)]
    if widths[0] != widths[1]:
        raise InputError(
            f"--cross {other_name} has blocks of width {widths[1]}, {name} of width {widths[0]}: inputs cannot be "
            f"exchanged; name a model of width {widths[0]}"
        )


def whitening_matrix(moments: Moments) -> Tensor:
    """The symmetric matrix that whitens these inputs: it turns their covariance into the identity where they vary."""
    spectrum = decompose(moments.xx)
    vectors = spectrum.vectors[:, : spectrum.rank]
    return vectors * (spectrum.values[: spectrum.rank] / moments.weight).rsqrt() @ vectors.T


@torch.no_grad()
def linearity_on(model: Any, block: Block, x: Tensor, held_x: Tensor) -> float:
    """R²_lin of a block on these rows."""

    def outputs(rows: Tensor) -> Tensor:
        dtype_and_device = placement_of(model, block)
        chunks = [run_block(model, block, chunk.to(**dtype_and_device)) for chunk in torch.split(rows, ROWS_AT_A_TIME)]
        return torch.cat(chunks).to(rows)

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
    """Exchange the inputs of every block of a model and of the block at the same relative depth in another model."""
    progress, seed, batch_size = context.progress, context.seed, context.batch_size
    blocks, others = find_blocks(model), find_blocks(other)
    partners = [others[round(k * (len(others) - 1) / max(1, len(blocks) - 1))] for k in range(len(blocks))]
    fitting, held_out, _ = draw_windows(text, 2 * blocks[0].width, progress, seed)  # two models' rows at once
    other_fitting, other_held_out, _ = draw_windows(other_text, 2 * blocks[0].width, Progress(), seed)
    other_samples = sample_rows(other, others, other_fitting, other_held_out, batch_size)
    other_block, other_rows = next(other_samples)
    crossings = []
    samples = sample_rows(model, blocks, fitting, held_out, batch_size)
    for (block, rows), partner in zip(progress.track("cross", samples, len(blocks)), partners, strict=True):
        while other_block.index < partner.index:
            other_block, other_rows = next(other_samples)
        moments = moments_of(rows.x, rows.x[:, :0])
        matrix = whitening_matrix(moments)
        white, held_white = (
            ((x.to(ACCUMULATION_DTYPE) - moments.mean_x) @ matrix).to(x) for x in (rows.x, rows.held_x)
        )
        crossings.append(
            Crossing(
                index=block.layer,
                other_index=partner.layer,
                own=linearity_on(model, block, rows.x, rows.held_x),
                own_on_other=linearity_on(model, block, other_rows.x, other_rows.held_x),
                own_on_white=linearity_on(model, block, white, held_white),
                other=linearity_on(other, partner, other_rows.x, other_rows.held_x),
                other_on_own=linearity_on(other, partner, rows.x, rows.held_x),
                other_on_white=linearity_on(other, partner, white, held_white),
            )
        )
    return crossings
