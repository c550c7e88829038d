"""Intervals that hold their level when there are few windows or documents, or few documents that changed.

A *unit* is what was drawn at random, so what is resampled: a document where a text tells enough of them apart, else a
window. The interval of a change in perplexity is studentised: how far estimates lie from the truth, in standard errors,
is learnt from resampled units, and is never taken to be less than Student's distribution says. A percentile bootstrap
is too narrow with few units. The interval of a task's score inverts a score test for pairs of right and wrong answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

RESAMPLES = 4000
LEAST_UNITS = 16  # with fewer windows, or documents, an interval does not hold its level
RESAMPLED_UNITS = 8  # with fewer units, resampling cannot tell the tails: Student's distribution alone is used
BISECTIONS = 50

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Interval:
    """The 95 % interval of an estimate, its upper end at the wanted confidence, and the standard error."""

    low: float
    high: float
    upper: float
    error: float


def studentised_interval(
    sums: Tensor, sizes: Tensor, value: Function, gradient: Function, confidence: float, seed: int
) -> Interval:
    """The interval of `value(means)`, where means = Σ sums ÷ Σ sizes over all units; sums [units, k], sizes [units].

    `value` takes means [..., k] to figures [...], and `gradient` to their derivatives [..., k]. With one unit nothing
    is known of the spread, and the ends are infinite. At a confidence of 0 the upper end is the estimate.
    """
    units = len(sizes)
    means = sums.sum(0) / sizes.sum()
    point = value(means).item()
    if units < 2:
        return Interval(-math.inf, math.inf, point if confidence == 0 else math.inf, math.inf)
    deviations = sums - means * sizes[:, None]
    once = torch.ones(1, units, dtype=sums.dtype)
    error = standard_errors(once, deviations, sizes, means[None], means, gradient).item()
    levels = [0.975, 0.025, (1 - confidence) / 2]  # of (estimate − truth) ÷ error: high ones give low ends
    scores = [student_quantile(level, units - 1) for level in levels]
    if units >= RESAMPLED_UNITS and error > 0:
        draws = resample_scores(deviations, sizes, means, value, gradient, seed)
        resampled = torch.quantile(draws, torch.tensor(levels, dtype=draws.dtype)).tolist()
        scores = [max(s, r) if s > 0 else min(s, r) for s, r in zip(scores, resampled, strict=True)]
    low, high, upper = (point - score * error for score in scores)
    return Interval(low, high, point if confidence == 0 else upper, error)


def standard_errors(
    counts: Tensor, deviations: Tensor, sizes: Tensor, drawn: Tensor, means: Tensor, gradient: Function
) -> Tensor:
    """The standard error of every resample by linearisation: the spread of what each unit adds to the estimate.

    `counts` [resamples, units] says how often each unit is in a resample; `deviations` of the units' sums are about
    `means`, and `drawn` [resamples, k] are the means of each resample.
    """
    units = len(sizes)
    columns = torch.cat([deviations, sizes[:, None]], dim=1)
    slopes = gradient(drawn)
    factors = torch.cat([slopes, -(slopes * (drawn - means)).sum(-1, keepdim=True)], dim=-1)
    products = torch.einsum("ui,uj->uij", columns, columns).flatten(1)
    squares = (counts @ products).reshape(-1, columns.shape[1], columns.shape[1])
    spread = torch.einsum("ri,rij,rj->r", factors, squares, factors).clamp_min(0)
    return (spread * units / (units - 1)).sqrt() / (counts @ sizes)


def resample_scores(
    deviations: Tensor, sizes: Tensor, means: Tensor, value: Function, gradient: Function, seed: int
) -> Tensor:
    """(Resampled estimate − estimate) ÷ its own standard error, for RESAMPLES draws of the units. [RESAMPLES]"""
    generator = torch.Generator().manual_seed(seed)
    units, point = len(sizes), value(means)
    scores = []
    for _ in range(20):  # some hundred draws at a time: on a long text all of them would take too much memory
        draws = torch.randint(units, (RESAMPLES // 20, units), generator=generator)
        counts = torch.zeros(len(draws), units, dtype=sizes.dtype)
        counts.scatter_add_(1, draws, torch.ones_like(draws, dtype=sizes.dtype))
        drawn = means + (counts @ deviations) / (counts @ sizes)[:, None]
        errors = standard_errors(counts, deviations, sizes, drawn, means, gradient)
        # A resample of equal units has no error of its own: infinitely many errors away, unless it is no way away.
        scores.append(((value(drawn) - point) / errors).nan_to_num(nan=0.0))
    return torch.cat(scores)


def student_quantile(level: float, freedom: int) -> float:
    from scipy.stats import t  # takes most of a second to import

    return float(t.ppf(level, freedom))


def perplexity_interval(
    before: Tensor, after: Tensor, documents: Tensor | None, confidence: float, seed: int
) -> Interval:
    """The interval of exp(mean after) − exp(mean before), from the mean nats of every window [windows].

    With `documents`, the number of the document of every window, whole documents are the units.
    """
    windows = torch.stack([before, after, torch.ones_like(before)], dim=1)
    if documents is not None:
        owners = torch.unique(documents, return_inverse=True)[1]
        windows = windows.new_zeros(int(owners.max()) + 1, 3).index_add_(0, owners, windows)
    signs = torch.tensor([-1.0, 1.0], dtype=before.dtype)
    return studentised_interval(
        windows[:, :2],
        windows[:, 2],
        value=lambda means: (signs * means.exp()).sum(-1),
        gradient=lambda means: signs * means.exp(),
        confidence=confidence,
        seed=seed,
    )


def mean_interval(values: Tensor, confidence: float, seed: int) -> Interval:
    """The studentised interval of a mean; every value is a unit."""
    return studentised_interval(
        values[:, None], torch.ones_like(values), lambda means: means[..., 0], torch.ones_like, confidence, seed
    )


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
    for _ in range(BISECTIONS):
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
