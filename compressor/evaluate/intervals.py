"""Intervals that hold their level when there are few windows or documents, or few documents that changed.

A *unit* is what was drawn at random, so what is resampled: a document where a text tells enough of them apart, else a
window. The interval of a change in perplexity is studentised: how far estimates lie from the truth, in standard errors,
is learnt from resampled units, and is never taken to be less than Student's distribution says. It is found on the scale
of log-perplexity, where the noise is nearly symmetric. A percentile bootstrap is too narrow with few units. Fidelity
has the same interval, of KL on the scale of its logarithm and of a share on that of its log-odds. The interval of a
task's score inverts a score test for pairs of right and wrong answers. `benchmarks/promise.py` measures
how often each misses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

RESAMPLES = 4000
LEAST_UNITS = 16  # with fewer windows, or documents, an interval does not hold its level
RESAMPLED_UNITS = 8  # with fewer units, resampling cannot tell the tails: Student's distribution alone is used
SPENT_ERROR = (
    0.6  # of the error that a level allows: with 16 to 64 real windows, tails that were not drawn take the rest
)
ITERATIONS = 50


@dataclass(frozen=True)
class Interval:
    """The 95 % interval of an estimate, its upper end at the wanted confidence, and the standard error."""

    low: float
    high: float
    upper: float
    error: float


class Figure(Protocol):
    """A figure that depends on means over units, as an equation: `gap(means, figure)` = 0.

    The gap is a smooth function of the means [..., k] whose noise is nearly symmetric, `slopes` are its derivatives
    [..., k], and `solve` gives the figure at which the gap has a given size.
    """

    def gap(self, means: Tensor, figure: Tensor) -> Tensor: ...
    def slopes(self, means: Tensor, figure: Tensor) -> Tensor: ...
    def solve(self, means: Tensor, gap: Tensor) -> Tensor: ...


class PerplexityRise:
    """exp(after) − exp(before), from the means of the nats before and after."""

    def gap(self, means: Tensor, figure: Tensor) -> Tensor:
        return means[..., 1] - self.after(means, figure).log()

    def slopes(self, means: Tensor, figure: Tensor) -> Tensor:
        before = means[..., 0].exp()
        return torch.stack([-before / self.after(means, figure), torch.ones_like(before)], dim=-1)

    def after(self, means: Tensor, figure: Tensor) -> Tensor:
        """The perplexity after such a rise; no fall is taken to be by more than nine tenths."""
        before = means[..., 0].exp()
        return torch.maximum(figure + before, 0.1 * before)

    def solve(self, means: Tensor, gap: Tensor) -> Tensor:
        return (means[..., 1] - gap).exp() - means[..., 0].exp()


class Mean:
    """The mean itself."""

    def gap(self, means: Tensor, figure: Tensor) -> Tensor:
        return means[..., 0] - figure

    def slopes(self, means: Tensor, figure: Tensor) -> Tensor:
        return torch.ones_like(means)

    def solve(self, means: Tensor, gap: Tensor) -> Tensor:
        return means[..., 0] - gap


class LogMean:
    """The mean of figures that are at least 0, on the scale of its logarithm: no end is below 0."""

    def gap(self, means: Tensor, figure: Tensor) -> Tensor:
        return (self.positive(means[..., 0]) / self.positive(figure)).log()

    def slopes(self, means: Tensor, figure: Tensor) -> Tensor:
        return 1 / self.positive(means)

    def solve(self, means: Tensor, gap: Tensor) -> Tensor:
        return means[..., 0] * (-gap).exp()

    def positive(self, values: Tensor) -> Tensor:
        return values.clamp_min(torch.finfo(values.dtype).tiny)


class LogitMean:
    """A share, on the scale of its log-odds: no end is below 0 or above 1."""

    def gap(self, means: Tensor, figure: Tensor) -> Tensor:
        return self.log_odds(means[..., 0]) - self.log_odds(figure)

    def slopes(self, means: Tensor, figure: Tensor) -> Tensor:
        inside = self.inside(means)
        return 1 / (inside * (1 - inside))

    def solve(self, means: Tensor, gap: Tensor) -> Tensor:
        return (self.log_odds(means[..., 0]) - gap).sigmoid()

    def log_odds(self, shares: Tensor) -> Tensor:
        return torch.logit(self.inside(shares))

    def inside(self, shares: Tensor) -> Tensor:
        return shares.clamp(1e-12, 1 - 1e-12)


def studentised_interval(sums: Tensor, sizes: Tensor, figure: Figure, confidence: float, seed: int) -> Interval:
    """The interval of a figure of the means Σ sums ÷ Σ sizes over all units; sums [units, k], sizes [units].

    With one unit nothing is known of the spread, and the ends are infinite. At a confidence of 0 the upper end is the
    estimate.
    """
    units = len(sizes)
    means = sums.sum(0) / sizes.sum()
    point = figure.solve(means, means.new_zeros(()))
    if units < 2:
        return Interval(-math.inf, math.inf, point.item() if confidence == 0 else math.inf, math.inf)
    deviations = sums - means * sizes[:, None]
    once = torch.ones(1, units, dtype=sums.dtype)

    def error_at(value: Tensor) -> Tensor:
        return standard_errors(once, deviations, sizes, means[None], means, figure.slopes(means[None], value))[0]

    error = error_at(point)
    errors = [0.05 * SPENT_ERROR, 0.05 * SPENT_ERROR, (1 - confidence) * SPENT_ERROR]
    levels = [1 - errors[0] / 2, errors[1] / 2, errors[2] / 2]  # of gap ÷ error: high ones give low ends
    scores = [student_quantile(level, units - 1) for level in levels]
    if units >= RESAMPLED_UNITS and error > 0:
        draws = resample_scores(deviations, sizes, means, figure, point, seed)
        resampled = torch.quantile(draws, torch.tensor(levels, dtype=draws.dtype)).tolist()
        scores = [max(s, r) if s > 0 else min(s, r) for s, r in zip(scores, resampled, strict=True)]
    ends = []
    for score in scores:
        end = point
        for _ in range(ITERATIONS):  # the error depends on the end a little
            before, end = end, figure.solve(means, score * error_at(end))
            if torch.isclose(before, end, rtol=1e-9, atol=1e-12):
                break
        ends.append(end.item())
    slope = figure.solve(means, -error) - point
    return Interval(ends[0], ends[1], point.item() if confidence == 0 else ends[2], slope.item())


def standard_errors(
    counts: Tensor, deviations: Tensor, sizes: Tensor, drawn: Tensor, means: Tensor, slopes: Tensor
) -> Tensor:
    """The standard error of the gap in every resample, by linearisation: the spread of what each unit adds to it.

    `counts` [resamples, units] says how often each unit is in a resample; `deviations` of the units' sums are about
    `means`; `drawn` [resamples, k] are the means of each resample, and `slopes` the derivatives there.
    """
    units = len(sizes)
    columns = torch.cat([deviations, sizes[:, None]], dim=1)
    factors = torch.cat([slopes, -(slopes * (drawn - means)).sum(-1, keepdim=True)], dim=-1)
    products = torch.einsum("ui,uj->uij", columns, columns).flatten(1)
    squares = (counts @ products).reshape(-1, columns.shape[1], columns.shape[1])
    spread = torch.einsum("ri,rij,rj->r", factors, squares, factors).clamp_min(0)
    return (spread * units / (units - 1)).sqrt() / (counts @ sizes)


def resample_scores(
    deviations: Tensor, sizes: Tensor, means: Tensor, figure: Figure, point: Tensor, seed: int
) -> Tensor:
    """The gap at the estimate ÷ its standard error, in RESAMPLES draws of the units. [RESAMPLES]"""
    generator = torch.Generator().manual_seed(seed)
    units = len(sizes)
    scores = []
    for _ in range(20):  # some hundred draws at a time: on a long text all of them would take too much memory
        draws = torch.randint(units, (RESAMPLES // 20, units), generator=generator)
        counts = torch.zeros(len(draws), units, dtype=sizes.dtype)
        counts.scatter_add_(1, draws, torch.ones_like(draws, dtype=sizes.dtype))
        drawn = means + (counts @ deviations) / (counts @ sizes)[:, None]
        errors = standard_errors(counts, deviations, sizes, drawn, means, figure.slopes(drawn, point))
        # A resample of equal units has no error of its own: infinitely many errors away, unless it is no way away.
        scores.append((figure.gap(drawn, point) / errors).nan_to_num(nan=0.0))
    return torch.cat(scores)


def end_score(units: int, confidence: float) -> float:
    """Standard errors from an estimate to the upper end of its interval, before resampling widens it."""
    return student_quantile(1 - (1 - confidence) * SPENT_ERROR / 2, units - 1)


def student_quantile(level: float, freedom: float) -> float:
    """The quantile of Student's distribution."""
    from scipy.special import stdtrit  # scipy is imported only where it is needed

    return float(stdtrit(freedom, level))


def perplexity_interval(
    before: Tensor, after: Tensor, documents: Tensor | None, confidence: float, seed: int
) -> Interval:
    """The interval of exp(mean after) − exp(mean before), from the mean nats of every window [windows].

    With `documents`, the number of the document of every window, whole documents are the units.
    """
    sums, sizes = sum_units(torch.stack([before, after], dim=1), documents)
    return studentised_interval(sums, sizes, PerplexityRise(), confidence, seed)


def sum_units(windows: Tensor, documents: Tensor | None) -> tuple[Tensor, Tensor]:
    """The sums over the windows [windows, k] of every unit, and how many windows each unit has."""
    windows = torch.cat([windows, torch.ones_like(windows[:, :1])], dim=1)
    if documents is not None:
        owners = torch.unique(documents, return_inverse=True)[1]
        windows = windows.new_zeros(int(owners.max()) + 1, windows.shape[1]).index_add_(0, owners, windows)
    return windows[:, :-1], windows[:, -1]


def divergence_interval(windows: Tensor, documents: Tensor | None, confidence: float, seed: int) -> Interval:
    """The interval of a mean that cannot be negative, from its mean in every window [windows].

    Where it is 0 in every window there is nothing to be unsure of.
    """
    if not windows.any():
        return Interval(0.0, 0.0, 0.0, 0.0)
    found = studentised_interval(*sum_units(windows[:, None], documents), LogMean(), confidence, seed)
    return replace(found, low=max(found.low, 0.0))


def share_interval(windows: Tensor, documents: Tensor | None, confidence: float, seed: int) -> Interval:
    """The interval of a share, from its mean in every window [windows]. Where all are 0, or all 1, it is one point."""
    if bool((windows == windows[0]).all()) and windows[0] in (0, 1):
        share = windows[0].item()
        return Interval(share, share, share, 0.0)
    found = studentised_interval(*sum_units(windows[:, None], documents), LogitMean(), confidence, seed)
    return replace(found, low=max(found.low, 0.0), high=min(found.high, 1.0), upper=min(found.upper, 1.0))


def mean_interval(values: Tensor, confidence: float, seed: int) -> Interval:
    """The studentised interval of a mean; every value is a unit."""
    return studentised_interval(values[:, None], torch.ones_like(values), Mean(), confidence, seed)


def fall_interval(falls: Tensor, confidence: float, seed: int) -> Interval:
    """The interval of the mean fall in score over documents; a fall is the score before less the score after.

    Falls of −1, 0 and 1 (answers that are right or wrong) get an interval for such pairs. Others get the studentised
    one, and where few of them changed, one that counts every change at its worst.
    """
    count, point = len(falls), falls.mean().item()
    lost, won = int((falls > 0).sum()), int((falls < 0).sum())
    error = falls.std().item() / math.sqrt(count) if count > 1 else math.inf
    largest = falls.abs().max().item()
    pairs = partial(paired_end, documents=count)
    if bool(((falls == 0) | (falls.abs() == 1)).all()):
        level = (1 + confidence) / 2
        upper = point if confidence == 0 else pairs(lost, won, level)
        return Interval(-pairs(won, lost, 0.975), pairs(lost, won, 0.975), upper, error)
    studentised = mean_interval(falls, confidence, seed)
    if lost + won >= LEAST_UNITS:
        return studentised
    scale = max(1.0, largest)
    ends = (-scale * pairs(won, 0, 0.975), scale * pairs(lost, 0, 0.975), scale * pairs(lost, 0, (1 + confidence) / 2))
    upper = point if confidence == 0 else max(studentised.upper, ends[2])
    return Interval(min(studentised.low, ends[0]), max(studentised.high, ends[1]), upper, error)


def paired_end(lost: int, won: int, level: float, documents: int) -> float:
    """The upper end, at this one-sided level, of the share lost less the share won among these documents.

    The largest difference that Tango's score test for pairs does not reject, with a correction for continuity: counted
    out over all outcomes, its true level is at most the nominal one from 25 documents on.
    """
    from scipy.stats import norm  # takes most of a second to import

    limit, n = float(norm.ppf(level)), documents
    low, high = max(-1.0, (lost - won) / n), 1.0
    for _ in range(ITERATIONS):
        difference = (low + high) / 2
        slope = (2 * n - lost + won) * difference - lost - won
        root = math.sqrt(max(0.0, slope**2 + 8 * n * won * difference * (1 - difference)))
        share_won = max(0.0, (root - slope) / (4 * n))  # the likeliest share won, given the difference
        spread = math.sqrt(max(1e-300, n * (2 * share_won + difference * (1 - difference))))
        if lost - won + 0.5 - n * difference >= -limit * spread:
            low = difference
        else:
            high = difference
    return low
