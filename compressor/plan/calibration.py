"""Whether the predictions hold: the measured cost of one replacement in every block, beside what was predicted.

Each block alone gives half of its neurons away (a block without known neurons becomes linear). The forward pass begins
at the block, for nothing before it changes. Where the two differ, the block's other predictions are corrected.
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

TOKENS = 4096
LIMITS = (0.25, 4.0)  # how far a prediction is corrected
REACH = 3.0  # blocks: how fast neighbours matter less
SPREAD = 0.05  # of the logarithm: how far blocks differ that are measured without noise, at least


@dataclass(frozen=True)
class Point:
    """One replacement in one block alone: predicted and measured nats per token, with the standard error."""

    candidate: Candidate
    predicted: float
    measured: float
    error: float


@dataclass(frozen=True)
class Calibration:
    points: list[Point]

    @property
    def correlation(self) -> float:
        """Spearman's, over blocks."""
        return rank_correlation([p.predicted for p in self.points], [p.measured for p in self.points])

    def factors(self) -> dict[int, float]:
        """By how much to multiply a block's predictions: what was measured, drawn to its neighbours by its noise.

        Unshrunk, the blocks whose measurement happened to come out low would be cut most. How far a prediction is off
        changes slowly with depth, so the neighbours know best what a noisy block should have shown.
        """
        logs = [math.log(clamped(p)) for p in self.points]
        noise = [(p.error / max(p.measured, p.error, 1e-300)) ** 2 for p in self.points]
        around = []
        for i in range(len(logs)):
            near = [math.exp(-abs(i - j) / REACH) / (noise[j] + SPREAD) if j != i else 0.0 for j in range(len(logs))]
            total = sum(near)
            around.append(sum(w * log for w, log in zip(near, logs, strict=True)) / total if total else logs[i])
        trust = [1 / (n + SPREAD) ** 2 for n in noise]
        excess = [(log - mean) ** 2 - n for log, mean, n in zip(logs, around, noise, strict=True)]
        real = max(0.0, sum(t * e for t, e in zip(trust, excess, strict=True)) / max(sum(trust), 1e-300))
        found = {}
        for point, log, mean, n in zip(self.points, logs, around, noise, strict=True):
            own = real / (real + n) if real + n > 0 else 1.0
            found[point.candidate.index] = math.exp(own * log + (1 - own) * mean)
        return found


def clamped(point: Point) -> float:
    if point.predicted <= 0:
        return 1.0
    return min(max(point.measured / point.predicted, LIMITS[0]), LIMITS[1])


def rank_correlation(first: list[float], second: list[float]) -> float:
    """Spearman's rank correlation. NaN for fewer than three points, and where all values of a list are equal."""
    if len(first) < 3 or len(set(first)) == 1 or len(set(second)) == 1:
        return math.nan
    from scipy.stats import spearmanr  # takes most of a second to import

    return float(spearmanr(first, second).statistic)


def typical(of_block: BlockCandidates) -> Candidate:
    """The half of the neurons, or the linear map."""
    pruned = [o for o in of_block.candidates if o.shape.kind == "pruned"]
    if of_block.neurons is None or not pruned:
        return next(o for o in of_block.candidates if o.shape.kind == "linear")
    half = of_block.neurons.count / 2
    return min(pruned, key=lambda o: abs(o.shape.neurons - half))


def calibrate(store: MomentsStore, candidates: Mapping[int, BlockCandidates], fitter: Fitter) -> Calibration:
    """Every block's typical replacement alone, on the first windows of the selection text."""
    text, context = store.text, store.context
    windows = text.selection.windows[: max(2, TOKENS // text.seq_len)]
    chosen = {index: typical(of_block) for index, of_block in sorted(candidates.items())}
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


def corrected(candidates: Mapping[int, BlockCandidates], calibration: Calibration) -> dict[int, list[Candidate]]:
    """The candidates of every block, with their predictions corrected by what was measured."""
    factors = calibration.factors()
    return {
        index: [replace(c, damage=factors[index] * c.damage) for c in of_block.candidates]
        for index, of_block in candidates.items()
    }
