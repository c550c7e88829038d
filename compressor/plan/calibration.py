"""Calibration of the predictions: in every block, the measured cost of one replacement compared with the predicted one.

One block at a time is replaced by half of its neurons, or by a linear map where its neurons are not known. The forward
pass begins at the block, since nothing before it changes. Where measurement and prediction differ, the block's other
predictions are corrected.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from compressor.measure.swap import SingleBlockTrials
from compressor.plan.candidates import BlockCandidates
from compressor.plan.fit import Fitter
from compressor.plan.frontier import Candidate
from compressor.plan.moments_store import MomentsStore
from compressor.runtime.cache import Tensors

TRIAL_TOKENS = 4096
FACTOR_LIMITS = (0.25, 4.0)  # the smallest and the largest ratio of measured and predicted cost that is believed
NEIGHBOUR_DISTANCE = 3.0  # blocks over which the weight of a neighbour falls by a factor of e
LEAST_VARIANCE = 0.05  # of a log ratio: added to the noise, so that no block counts as measured exactly


@dataclass(frozen=True)
class Point:
    """One replacement in one block alone: predicted and measured nats per token, with the standard error."""

    candidate: Candidate
    predicted: float
    measured: float
    error: float


@dataclass(frozen=True)
class Calibration:
    """One trial in every block, in order of depth."""

    points: list[Point]

    @property
    def correlation(self) -> float:
        """Spearman's rank correlation of predicted and measured costs, over blocks."""
        return rank_correlation([p.predicted for p in self.points], [p.measured for p in self.points])

    def factors(self) -> dict[int, float]:
        """What to multiply each block's predictions by: its measured ratio, shrunk towards those of its neighbours.

        The noisier a measurement, the more it is shrunk: otherwise blocks that happened to measure low would be cut
        most. The ratio changes slowly with depth, so that of the neighbours is the best guess for a noisy block.
        """
        logs = [math.log(clamped_ratio(p)) for p in self.points]
        noise = [(p.error / max(p.measured, p.error, 1e-300)) ** 2 for p in self.points]
        neighbours = []  # weighted means of the log ratios around each block
        for i in range(len(logs)):
            weights = [
                math.exp(-abs(i - j) / NEIGHBOUR_DISTANCE) / (noise[j] + LEAST_VARIANCE) if j != i else 0.0
                for j in range(len(logs))
            ]
            total = sum(weights)
            neighbours.append(sum(w * log for w, log in zip(weights, logs, strict=True)) / total if total else logs[i])
        trust = [1 / (n + LEAST_VARIANCE) ** 2 for n in noise]
        excess = [(log - mean) ** 2 - n for log, mean, n in zip(logs, neighbours, noise, strict=True)]
        # The variance between blocks that noise does not explain.
        variance = max(0.0, sum(t * e for t, e in zip(trust, excess, strict=True)) / max(sum(trust), 1e-300))
        factors = {}
        for point, log, mean, n in zip(self.points, logs, neighbours, noise, strict=True):
            weight = variance / (variance + n) if variance + n > 0 else 1.0
            factors[point.candidate.index] = math.exp(weight * log + (1 - weight) * mean)
        return factors


def clamped_ratio(point: Point) -> float:
    """Measured over predicted cost, within `FACTOR_LIMITS`."""
    if point.predicted <= 0:
        return 1.0
    return min(max(point.measured / point.predicted, FACTOR_LIMITS[0]), FACTOR_LIMITS[1])


def rank_correlation(first: list[float], second: list[float]) -> float:
    """Spearman's rank correlation. NaN for fewer than three points, and where all values of a list are equal."""
    if len(first) < 3 or len(set(first)) == 1 or len(set(second)) == 1:
        return math.nan
    from scipy.stats import spearmanr  # takes most of a second to import

    return float(spearmanr(first, second).statistic)


def typical_candidate(of_block: BlockCandidates) -> Candidate:
    """The candidate that a block is tried with: the one nearest to half of its neurons, or the linear map."""
    pruned = [c for c in of_block.candidates if c.shape.kind == "pruned"]
    if of_block.neurons is None or not pruned:
        return next(c for c in of_block.candidates if c.shape.kind == "linear")
    half = of_block.neurons.count / 2
    return min(pruned, key=lambda c: abs(c.shape.neurons - half))


def calibrate(store: MomentsStore, candidates: Mapping[int, BlockCandidates], fitter: Fitter) -> Calibration:
    """Measure a typical replacement in every block alone, on the first windows of the selection text."""
    text, context = store.text, store.context
    windows = text.selection.windows[: max(2, TRIAL_TOKENS // text.seq_len)]
    chosen = {index: typical_candidate(of_block) for index, of_block in sorted(candidates.items())}
    trials = SingleBlockTrials(store.model, store.blocks, windows, context)
    before: list[Tensor] = []  # the windows' losses in the source, measured when the first block needs them

    def measure(index: int, candidate: Candidate) -> Tensors:
        if not before:
            before.append(trials.measure_losses().windows)
        module = fitter.fit_at_once({index: candidate.shape})[index]
        rise = trials.measure_replaced(index, module).windows - before[0]
        return {"rise": torch.stack([rise.mean(), rise.std() / len(rise) ** 0.5])}

    selection = text.selection.sha256
    keys = {
        index: store.key("agreement", store.blocks[index], selection=selection, shape=str(candidate.shape))
        for index, candidate in chosen.items()
    }
    if all(store.cache.has(key) for key in keys.values()):
        context.progress.say("agreement: measured before")
    points = []
    for index, key in context.progress.track("agreement", keys.items(), len(keys)):
        candidate = chosen[index]
        measured, error = store.cache.get("", key, partial(measure, index, candidate))["rise"].tolist()
        points.append(Point(candidate, candidate.damage, measured, error))
    calibration = Calibration(points)
    context.progress.say(
        f"predicted against measured Δloss of {len(points)} blocks: rank correlation {calibration.correlation:.2f}"
    )
    return calibration


def correct_predictions(
    candidates: Mapping[int, BlockCandidates], calibration: Calibration
) -> dict[int, list[Candidate]]:
    """The candidates of every block, with their predictions corrected by what was measured."""
    factors = calibration.factors()
    return {
        index: [replace(c, damage=factors[index] * c.damage) for c in of_block.candidates]
        for index, of_block in candidates.items()
    }
