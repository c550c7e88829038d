"""Trials of single attention on all of the selection text; only what was tried may be in a plan.

What attention costs the loss is a small difference of two large terms, its slope E[g·e] and its divergence, and a
thousand tokens do not tell it from noise. It also differs from document to document, more than in FFNs: some pay, some
gain, and the interval of a plan grows with it. So the attention that is predicted to cost least per parameter is tried
alone on the whole selection text, and costs what was found there, and what its scatter over documents adds to the
interval of a plan. Of many that were tried, some come out cheap by the luck of a few documents: those that look best
are tried once more, on spare windows of the documents that calibration is from, and both measurements count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from compressor.models.branches import AttentionOf, BranchIndex
from compressor.plan.frontier import LEAST_DAMAGE, Candidate, Cost, form_of

MOST_TRIALS = 16  # layers whose attention is tried
MOST_SPARE_TRIALS = 8  # of these, that are tried on the spare text too
# The standard error of a prediction: a share of it, and nats per token.
PREDICTION_DOUBT, LEAST_DOUBT = 0.5, 0.003
UNCERTAINTY_PRICE = 0.5  # of a standard error of the expected cost
LEAST_NOISE = 1e-6  # nats per token: no measurement is more certain than that
LEAST_SHARE = 0.1  # of its prediction, that attention costs at least: what measured as a gain may be luck


@dataclass(frozen=True)
class Scatter:
    """How an interval grows: its half-width in standard errors, and the standard error that plans have anyhow."""

    reach: float
    usual: float

    def widening(self, error: float) -> float:
        """What a standard error beside the usual one adds to the half-width."""
        return self.reach * (math.hypot(self.usual, error) - self.usual)


def choose_attention(rows: Mapping[BranchIndex, list[Candidate]], most: float) -> list[Candidate]:
    """The attention to try, in order of depth: of each layer the shape that costs least per parameter, of these the
    cheapest, if they are predicted to cost at most so many nats."""
    affordable = ([c for c in row if c.damage <= most] for index, row in rows.items() if isinstance(index, AttentionOf))
    best = [min(row, key=lambda c: c.damage / c.worth) for row in affordable if row]
    cheapest = sorted(best, key=lambda c: c.damage / c.worth)[:MOST_TRIALS]
    return sorted(cheapest, key=lambda c: c.index)


def choose_promising(believed: Iterable[Candidate]) -> list[BranchIndex]:
    """The layers whose attention, as tried, is believed to cost least per parameter, in order of depth."""
    cheapest = sorted(believed, key=lambda c: c.damage / c.worth)[:MOST_SPARE_TRIALS]
    return sorted(c.index for c in cheapest)


def pool(first: Cost, second: Cost) -> Cost:
    """Two measurements of the same on different documents, weighed by their certainty."""
    trust = [1 / max(cost.noise, LEAST_NOISE) ** 2 for cost in (first, second)]
    measured = (trust[0] * first.measured + trust[1] * second.measured) / sum(trust)
    return Cost(measured, measured - 1 / math.sqrt(sum(trust)))


def believe_trial(row: list[Candidate], tried: Candidate, cost: Cost, widening: float) -> list[Candidate]:
    """The candidates of a layer's attention, those of the tried form corrected in proportion; none where the trial
    overflows.

    Prediction and measurement count by their certainty, and what is left uncertain counts as a cost, for other
    documents may not be so lucky; so does the `widening` of the interval of a plan.
    """
    if not math.isfinite(cost.measured):
        return []
    noise, doubt = cost.noise, PREDICTION_DOUBT * tried.damage + LEAST_DOUBT
    weight = doubt**2 / (doubt**2 + noise**2)
    uncertain = UNCERTAINTY_PRICE * math.sqrt(weight) * noise
    expected = max(weight * cost.measured + (1 - weight) * tried.damage, 0.0) + uncertain + widening
    factor = max(expected / max(tried.damage, LEAST_DAMAGE), LEAST_SHARE)
    other = max(factor, 1.0)  # a trial of one form makes no other cheaper
    return [replace(c, damage=(factor if form_of(c) == form_of(tried) else other) * c.damage) for c in row]
