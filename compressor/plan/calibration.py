"""Whether the predictions hold: the measured cost of one replacement in every block, beside what was predicted.

Each block alone gives half of its neurons away (a block without known neurons becomes linear). The forward pass begins
at the block, for nothing before it changes. Where the two differ, the block's other predictions are corrected.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from compressor.evaluate.perplexity import evaluate, has_plain_head, logits_batch
from compressor.models.residual import Stream
from compressor.patch.tree import patched
from compressor.plan.candidates import Survey
from compressor.plan.fit import Fitter
from compressor.plan.frontier import Option
from compressor.plan.moments_store import Statistics
from compressor.runtime.cache import Cache
from compressor.runtime.progress import Progress
from compressor.text import Text

TOKENS = 4096
LIMITS = (0.25, 4.0)  # how far a prediction is corrected
REACH = 3.0  # blocks: how fast neighbours matter less
SPREAD = 0.05  # of the logarithm: how far blocks differ that are measured without noise, at least


@dataclass(frozen=True)
class Point:
    """One replacement in one block alone: predicted and measured nats per token, with the standard error."""

    option: Option
    predicted: float
    measured: float
    error: float


@dataclass(frozen=True)
class Agreement:
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
            found[point.option.index] = math.exp(own * log + (1 - own) * mean)
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


def typical(survey: Survey) -> Option:
    """The half of the neurons, or the linear map."""
    pruned = [o for o in survey.options if o.form.kind == "pruned"]
    if survey.neurons is None or not pruned:
        return next(o for o in survey.options if o.form.kind == "linear")
    half = survey.neurons.count / 2
    return min(pruned, key=lambda o: abs(o.form.neurons - half))


def measure_agreement(
    statistics: Statistics, surveys: Mapping[int, Survey], fitter: Fitter, text: Text, cache: Cache, progress: Progress
) -> Agreement:
    """Every block's typical replacement alone, on the first windows of the selection text."""
    model: Any = statistics.model
    windows = text.selection.windows[: max(2, TOKENS // text.seq_len)]
    options = {index: typical(survey) for index, survey in surveys.items()}
    key = {**statistics.key(statistics.blocks[0]), "what": "agreement", "selection": text.selection.sha256}
    size = logits_batch(model, text.seq_len, statistics.batch_size)
    begun: list[tuple[Stream, bool, torch.Tensor]] = []  # the pass over the windows, when the first block needs it

    def begin() -> tuple[Stream, bool, torch.Tensor]:
        if not begun:
            plain = has_plain_head(model, windows)
            before = evaluate(model, windows, batch_size=size, plain=plain).windows
            begun.append((Stream(model, statistics.blocks, windows, size), plain, before))
        return begun[0]

    def measure(index: int, option: Option) -> dict[str, torch.Tensor]:
        stream, plain, before = begin()
        fits = fitter.at_once({index: option.form})
        stream.advance(index)
        with patched(model, statistics.blocks, fits):
            rise = evaluate(model, windows, batch_size=size, plain=plain, start=stream).windows - before
        return {"rise": torch.stack([rise.mean(), rise.std() / len(rise) ** 0.5])}

    places = {i: {**key, "block": i, "form": str(option.form)} for i, option in sorted(options.items())}
    if all(cache.has(place) for place in places.values()):
        progress.say("agreement: measured before")
    points = []
    for index, place in progress.track("agreement", places.items(), len(places)):
        option = options[index]
        measured, error = cache.get("", place, partial(measure, index, option))["rise"].tolist()
        points.append(Point(option, option.damage, measured, error))
    return Agreement(points)
