"""Closed-form least squares from moments: every ridge from one eigendecomposition, every rank from one SVD."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from compressor.measure.moments import Moments

ROUNDING_ULPS = 8  # a direction that spreads less than this many float32 roundings of a typical one is noise
# Times the mean input variance. The largest serve fits on few rows.
RIDGES = (0.0, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0, 3.0, 10.0)


@dataclass(frozen=True)
class AffineMap:
    """y ≈ mean_y + (x − mean_x)·weight, kept centred so that a large mean costs no digits."""

    weight: Tensor  # [inputs, outputs]
    mean_x: Tensor
    mean_y: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return self.mean_y + (x - self.mean_x) @ self.weight

    @property
    def bias(self) -> Tensor:
        return self.mean_y - self.mean_x @ self.weight


@dataclass(frozen=True)
class Spectrum:
    """The eigendecomposition of the input's scatter matrix, largest value first, with its numerical rank."""

    values: Tensor
    vectors: Tensor
    rank: int

    @property
    def condition_number(self) -> float:
        """Largest over smallest eigenvalue of the input covariance, among the directions that carry information."""
        return (self.values[0] / self.values[self.rank - 1]).item() if self.rank else float("inf")


def decompose(scatter: Tensor) -> Spectrum:
    """Eigenvalues and the rank above two floors: what float64 sums resolve, and the rounding of float32 rows.

    A LayerNorm's output has one direction of no variance but its rounding: a map must not be fitted to that noise.
    """
    values, vectors = torch.linalg.eigh(scatter)
    values, vectors = values.flip(0).clamp_min(0), vectors.flip(1)
    resolved = values[0] * len(values) * torch.finfo(values.dtype).eps
    rounding = values.mean() * (ROUNDING_ULPS * torch.finfo(torch.float32).eps) ** 2
    return Spectrum(values, vectors, int((values > torch.maximum(resolved, rounding)).sum()))


def mean_eigenvalue(spectrum: Spectrum) -> Tensor:
    """The mean eigenvalue, which is the mean input variance times the rows' weight: the unit of a ridge."""
    return spectrum.values.sum() / len(spectrum.values)


def solve(moments: Moments, spectrum: Spectrum, ridge: float = 0.0) -> AffineMap:
    """The least-squares map, with `ridge` times the mean input variance on the diagonal.

    Where inputs are collinear it is the map of minimum norm.
    """
    vectors, values = spectrum.vectors[:, : spectrum.rank], spectrum.values[: spectrum.rank]
    scaled = (vectors.T @ moments.xy) / (values + ridge * mean_eigenvalue(spectrum))[:, None]
    return AffineMap(vectors @ scaled, moments.mean_x, moments.mean_y)


def feature_errors(fit: AffineMap, held: Moments) -> Tensor:
    """The summed squared error of a map on other rows, per output feature, from their moments alone."""
    xx, xy, yy = held.about(fit.mean_x, fit.mean_y)
    explained = 2 * (fit.weight * xy).sum(0) - (fit.weight * (xx @ fit.weight)).sum(0)
    return ((yy.diagonal() if held.whole_yy else yy) - explained).clamp_min(0)


def r_squared(errors: Tensor, held: Moments) -> float:
    """1 − SSE/SST over all output features, SST about the held-out mean. Constant outputs count as explained."""
    total, error = held.variances.sum().item(), errors.sum().item()
    if total == 0:
        return 1.0 if error == 0 else float("-inf")
    return 1.0 - error / total


def choose_ridge(moments: Moments, spectrum: Spectrum, held: Moments) -> tuple[float, AffineMap]:
    """The ridge whose map errs least on the held-out rows, and that map.

    In the eigenbasis of the inputs the map of every ridge is a rescaling of the same rows, so its error is a quadratic
    form in the scales: the grid costs no new decomposition, and no new product of matrices.
    """
    vectors = spectrum.vectors[:, : spectrum.rank]
    values = spectrum.values[: spectrum.rank]
    xx, xy, _ = held.about(moments.mean_x, moments.mean_y)
    target = vectors.T @ moments.xy
    gains = (target * (vectors.T @ xy)).sum(1)
    losses = (vectors.T @ xx @ vectors).mul_(target @ target.T)
    best, best_gain = 0.0, -torch.inf
    for ridge in RIDGES:
        scales = 1 / (values + ridge * mean_eigenvalue(spectrum))
        gain = (2 * scales @ gains - scales @ losses @ scales).item()
        if gain > best_gain:
            best, best_gain = ridge, gain
    return best, solve(moments, spectrum, best)


def solve_part(part: Moments, spectrum: Spectrum) -> AffineMap:
    """The least-squares map on some of the rows of a fit whose decomposition is known.

    In the coordinates that the whole fit whitens, the scatter of most of its rows is near the identity, so a Cholesky
    factor will do. Where the rows are too few for one, they are decomposed themselves.
    """
    basis = spectrum.vectors[:, : spectrum.rank] / spectrum.values[: spectrum.rank].sqrt()
    factor, failed = torch.linalg.cholesky_ex(basis.T @ part.xx @ basis)
    if failed.item():
        return solve(part, decompose(part.xx))
    return AffineMap(basis @ torch.cholesky_solve(basis.T @ part.xy, factor), part.mean_x, part.mean_y)


@dataclass(frozen=True)
class RankLadder:
    """Reduced-rank regression: the first r columns of `outputs` and `inputs` are the best map of rank r, for every r.

    Best means the least error on rows with the inputs' covariance, measured in `metric` on the outputs. The SVD of the
    full map would not give it.
    """

    inputs: Tensor  # [inputs, k]: coordinates (x − mean_x)·inputs
    outputs: Tensor  # [outputs, k]: directions that the coordinates are sent to
    mean_x: Tensor
    mean_y: Tensor

    def at(self, rank: int) -> AffineMap:
        weight = self.inputs[:, :rank] @ self.outputs[:, :rank].T
        return AffineMap(weight, self.mean_x, self.mean_y)


def reduce_rank(fit: AffineMap, spectrum: Spectrum, metric: Tensor | None = None) -> RankLadder:
    """All ranks of a fitted map at once: whiten the inputs (and the outputs by `metric`), take one SVD there."""
    root = spectrum.vectors * spectrum.values.sqrt() @ spectrum.vectors.T
    weight = fit.weight
    if metric is None:
        whitened, unwhiten = root @ weight, torch.eye(weight.shape[1], dtype=weight.dtype, device=weight.device)
    else:
        values, vectors = torch.linalg.eigh(metric)
        # A direction without any gradient still gets a small cost, or its error would be free.
        values = values.clamp_min(0) + 1e-3 * values.clamp_min(0).mean() + torch.finfo(values.dtype).tiny
        whitened = root @ weight @ (vectors * values.sqrt() @ vectors.T)
        unwhiten = vectors / values.sqrt() @ vectors.T
    right = torch.linalg.svd(whitened, full_matrices=False).Vh
    # The rank-r map is weight·M^½·V_r·V_rᵀ·M^-½: the inputs' root drops out, so a singular covariance does no harm.
    half = weight if metric is None else weight @ (vectors * values.sqrt() @ vectors.T)
    return RankLadder(half @ right.T, unwhiten @ right.T, fit.mean_x, fit.mean_y)


def rank_r2(fit: AffineMap, spectrum: Spectrum, held: Moments) -> Tensor:
    """R² on other rows of the best map of rank 0, 1, …, full, from their moments alone.

    The ladder's output directions are orthonormal, so every rank adds its own gain to the ones before it.
    """
    ladder = reduce_rank(fit, spectrum)
    xx, xy, yy = held.about(fit.mean_x, fit.mean_y)
    inputs, outputs = ladder.inputs, ladder.outputs
    gains = 2 * (inputs * (xy @ outputs)).sum(0) - (inputs * (xx @ inputs)).sum(0)
    start = (yy.diagonal() if held.whole_yy else yy).sum()
    errors = torch.cat([start[None], start - gains.cumsum(0)])
    total = held.variances.sum()
    return 1 - errors / total if total > 0 else torch.ones_like(errors)


def effective_rank(scatter: Tensor) -> float:
    """How many directions carry the variance of rows with this scatter matrix."""
    return effective_count(torch.linalg.eigvalsh(scatter))


def effective_count(values: Tensor) -> float:
    """How many values carry their sum: exp of the entropy of their shares."""
    values = values.clamp_min(0)
    total = values.sum()
    if total == 0:
        return 0.0
    shares = values / total
    return torch.exp(-(shares * shares.clamp_min(torch.finfo(shares.dtype).tiny).log()).sum()).item()
