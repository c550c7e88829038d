"""Trials of single attention on all of the selection text, before plans have it in them.

What attention costs the loss is often a small difference of two large terms: its slope, E[g·e], and its divergence. A
thousand tokens do not tell it from noise. So the attention that is predicted to cost least per parameter is tried alone
on the whole selection text, and the other shapes of its form in that layer are corrected by what was found.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from compressor.models.blocks import AttentionOf, BranchIndex
from compressor.plan.frontier import LEAST_DAMAGE, Candidate, Cost, form_of

MOST_TRIALS = 10
# The standard error of a prediction: a share of it, and nats per token.
PREDICTION_DOUBT, LEAST_DOUBT = 0.5, 0.003
NOISE_PRICE = 0.5  # what a standard error of the cost is worth: by as much the interval of a plan grows
LEAST_SHARE = 0.1  # of its prediction, that attention costs at least: what measured as a gain may be luck


def choose_attention(rows: Mapping[BranchIndex, list[Candidate]], most: float) -> list[Candidate]:
    """The attention to try, in order of depth: of each form the shape that costs least per parameter, the cheapest of
    those that are predicted to cost at most so many nats."""
    best: list[Candidate] = []
    for index, row in rows.items():
        for form in ("heads", "map") if isinstance(index, AttentionOf) else ():
            of_form = [c for c in row if form_of(c) == form and c.damage <= most]
            best += [min(of_form, key=lambda c: c.damage / c.worth)] if of_form else []
    cheapest = sorted(best, key=lambda c: c.damage / c.worth)[:MOST_TRIALS]
    return sorted(cheapest, key=lambda c: c.index)


def believe_trial(row: list[Candidate], tried: Candidate, cost: Cost) -> list[Candidate]:
    """The candidates of a layer's attention, those of the tried form corrected in proportion to their damage.

    Prediction and measurement count by their certainty. A trial that overflows has an infinite cost, and so has then
    whatever is as large.
    """
    noise, doubt = cost.measured - cost.least, PREDICTION_DOUBT * tried.damage + LEAST_DOUBT
    if not cost.measured < float("inf"):
        return [c for c in row if form_of(c) != form_of(tried) or c.saved < tried.saved]
    measured = max(cost.measured, 0.0) + NOISE_PRICE * noise
    weight = doubt**2 / (doubt**2 + noise**2)
    factor = 1 + weight * (measured - tried.damage) / max(tried.damage, LEAST_DAMAGE)
    return [replace(c, damage=max(factor, LEAST_SHARE) * c.damage) if form_of(c) == form_of(tried) else c for c in row]
