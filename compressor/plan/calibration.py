"""Calibration of the predictions: in every block, the measured cost of one replacement compared with the predicted one.

One block at a time is replaced by half of its neurons, or by a linear map where its neurons are not known or may not be
kept. Attention is tried twice: with half of its heads, and as a linear map, for the errors of the two have little in
common. The forward pass begins at the block, since nothing before it changes. Where measurement and prediction differ,
the block's other predictions of that form are corrected. Every text is measured by itself.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from compressor.evaluate.intervals import student_quantile
from compressor.models.branches import BranchIndex, layer_of
from compressor.plan.block_trials import BlockTrial, BlockTrials
from compressor.plan.candidates import BlockCandidates
from compressor.plan.choices import ANYTHING, Choices
from compressor.plan.frontier import FORMS, Candidate, form_of
from compressor.plan.shapes import KINDS
from compressor.runtime.figures import figure

USUAL_FACTORS = (0.25, 4.0)  # the smallest and the largest ratio of measured and predicted cost that neighbours show
LEAST_FACTOR = 0.01  # a block that measured as free still costs something
DOUBT = 0.00135  # probability that a measurement lies this far off by chance: three standard errors of many windows
NEGLIGIBLE = 1e-5  # nats per token: added to both sides of a ratio, since a ratio of two nothings says nothing
NEIGHBOUR_DISTANCE = 3.0  # blocks over which the weight of a neighbour falls by a factor of e
WORTH_TRYING = 0.2  # nats per token: attention that is predicted to cost more is not tried
LEAST_VARIANCE = 0.05  # of a log ratio: added to the noise, so that no block counts as measured exactly


@dataclass(frozen=True)
class Point:
    """One replacement in one block alone, on one text: predicted and measured nats per token, with the standard error.

    `kl` is the divergence from the source. The error of a single window is not known: it is infinite.
    """

    candidate: Candidate
    predicted: float
    measured: float
    error: float
    windows: int
    kl: float = math.nan
    kl_error: float = math.nan

    @property
    def index(self) -> BranchIndex:
        return self.candidate.index

    @property
    def rest(self) -> float:
        """What was measured, without the predicted slope."""
        return self.measured - self.candidate.slope

    @property
    def form(self) -> str:
        return form_of(self.candidate)

    @property
    def noise(self) -> float:
        """The variance of the log ratio."""
        if not math.isfinite(self.error):
            return math.inf
        return ((self.error + NEGLIGIBLE) / max(self.measured, self.error, NEGLIGIBLE)) ** 2

    @property
    def usual_log(self) -> float:
        """The logarithm of measured over predicted cost, within what neighbours show: no outlier may drag others."""
        return math.log(min(max(self.ratio(self.measured), USUAL_FACTORS[0]), USUAL_FACTORS[1]))

    @property
    def bounds(self) -> tuple[float, float]:
        """The ratios that the measurement's own noise leaves possible."""
        if self.windows < 2 or not math.isfinite(self.error):
            return -math.inf, math.inf
        reach = self.error * student_quantile(1 - DOUBT, self.windows - 1)
        return self.ratio(self.measured - reach), self.ratio(self.measured + reach)

    def ratio(self, nats: float) -> float:
        return (nats + NEGLIGIBLE) / (max(self.predicted, 0.0) + NEGLIGIBLE)


@dataclass(frozen=True)
class Calibration:
    """One trial in every block on one text, in order of depth. A block whose trial overflowed has none."""

    points: list[Point]

    @property
    def correlation(self) -> float:
        """Spearman's rank correlation of predicted and measured costs, over blocks."""
        return rank_correlation([p.predicted for p in self.points], [p.measured for p in self.points])

    @property
    def kl_correlation(self) -> float:
        """The same of predicted costs and measured divergences."""
        return rank_correlation([p.predicted for p in self.points], [p.kl for p in self.points])

    def of_form(self, form: str) -> Calibration:
        """The trials of one form."""
        return Calibration([p for p in self.points if p.form == form])

    def factors(self, blocks: Iterable[BranchIndex] = ()) -> dict[BranchIndex, float]:
        """What to multiply each block's predictions by; also for those of `blocks` that were not measured.

        Where the divergence was measured, the factor has two parts: divergence over prediction, which is measured well
        in every block, and the rise of the loss (without its slope) over divergence, which is noisy and mostly that of
        the neighbours.
        """
        blocks = list(blocks)
        divergences = self.divergence_factors(blocks)
        if divergences is None:
            return shrink_ratios(self.points, blocks)
        rises = shrink_ratios([replace(p, predicted=p.kl, measured=p.rest) for p in self.points], blocks)
        return {index: max(factor * rises[index], LEAST_FACTOR) for index, factor in divergences.items()}

    def divergence_factors(self, blocks: Iterable[BranchIndex] = ()) -> dict[BranchIndex, float] | None:
        """The divergence of each block over its prediction, by which predictions are multiplied to be divergences; None
        where it was not measured."""
        if not all(math.isfinite(p.kl) for p in self.points):
            return None
        return shrink_ratios([replace(p, measured=p.kl, error=p.kl_error) for p in self.points], blocks)


def shrink_ratios(points: Sequence[Point], blocks: Iterable[BranchIndex] = ()) -> dict[BranchIndex, float]:
    """The measured over the predicted cost of every block, shrunk towards those of its neighbours.

    The noisier a measurement, the more it is shrunk: otherwise blocks that happened to measure low would be cut most.
    The ratio changes slowly with depth, so that of the neighbours is the best guess for a noisy block, and for those of
    `blocks` that were not measured. But a measurement that contradicts this guess by more than its noise is believed,
    however large the ratio.
    """
    means = {p.index: mean_around(points, p.index) for p in points}
    variance = excess_variance(points, means)
    factors = {}
    for p in points:
        weight = variance / (variance + p.noise) if variance + p.noise > 0 else 1.0
        factor = math.exp(weight * p.usual_log + (1 - weight) * means[p.index])
        low, high = p.bounds
        factors[p.index] = max(min(max(factor, low), high), LEAST_FACTOR)
    return {index: math.exp(mean_around(points, index)) for index in blocks} | factors


def mean_around(points: Sequence[Point], index: BranchIndex) -> float:
    """The weighted mean of the log ratios around a block: near blocks and those measured well count most.

    It is 0 where nothing is known, and that of a model's only block is its own.
    """
    total = mean = 0.0
    for p in points:
        if p.index != index or len(points) == 1:
            distance = abs(layer_of(p.index) - layer_of(index))
            weight = math.exp(-distance / NEIGHBOUR_DISTANCE) / (p.noise + LEAST_VARIANCE)
            total, mean = total + weight, mean + weight * p.usual_log
    return mean / total if total > 0 else 0.0


def excess_variance(points: Sequence[Point], means: Mapping[BranchIndex, float]) -> float:
    """The variance between blocks that noise does not explain."""
    known = [p for p in points if math.isfinite(p.noise)]
    trust = [1 / (p.noise + LEAST_VARIANCE) ** 2 for p in known]
    excess = [(p.usual_log - means[p.index]) ** 2 - p.noise for p in known]
    return max(0.0, sum(t * e for t, e in zip(trust, excess, strict=True)) / max(sum(trust), 1e-300))


def rank_correlation(first: list[float], second: list[float]) -> float:
    """Spearman's rank correlation. NaN for fewer than three points, and where all values of a list are equal."""
    if len(first) < 3 or len(set(first)) == 1 or len(set(second)) == 1:
        return math.nan
    from scipy.stats import spearmanr  # takes most of a second to import

    return float(spearmanr(first, second).statistic)


def typical_candidates(of_block: BlockCandidates, kinds: Collection[str] = KINDS) -> list[Candidate]:
    """The candidates of these kinds that a block is tried with: one of an FFN, and of attention one of each form.

    An FFN is tried with the shape nearest to half of its neurons, as a linear map or with the middle one of the low
    ranks, else with neurons and a linear part, else as a bias; attention with the shape nearest to half of its heads,
    and as the map that is predicted to cost least per parameter.
    """
    row = sorted((c for c in of_block.candidates if c.shape.kind in kinds), key=lambda c: c.saved)
    half = of_block.units.count / 2 if of_block.units else 0
    if of_block.block.is_attention:
        heads = [c for c in row if form_of(c) == "heads" and c.shape.rank == 0] or [c for c in row if c.shape.neurons]
        maps = [c for c in row if form_of(c) == "map" and c.saved > 0]
        chosen = [min(heads, key=lambda c: abs(c.shape.neurons - half))] if heads else []
        chosen += [min(maps, key=lambda c: c.damage / c.saved)] if maps else []
        return [c for c in chosen if c.damage <= WORTH_TRYING]
    for kind in ("pruned", "linear", "lowrank", "hybrid", "bias"):
        found = [c for c in row if c.shape.kind == kind]
        if found and kind in ("pruned", "hybrid"):
            return [min(found, key=lambda c: abs(c.shape.neurons - half))]
        if found:
            return [found[len(found) // 2]]
    return []


def calibrate(
    trials: BlockTrials, candidates: Mapping[BranchIndex, BlockCandidates], choices: Choices = ANYTHING
) -> tuple[dict[str, Calibration], list[Candidate]]:
    """Measure a typical replacement in every block that may change alone, on some selection windows of every text.

    Also returned are the candidates whose activations or weights overflowed.
    """
    progress = trials.store.context.progress
    allowed = [candidates[index] for index in sorted(candidates) if choices.allows_block(index)]
    chosen = [
        candidate
        for of_block in allowed
        for candidate in typical_candidates(of_block, choices.kinds_of(of_block.block.index))
    ]
    if all(trials.was_measured(candidate) for candidate in chosen):
        progress.note("agreement: measured before")
    points: dict[str, list[Point]] = {name: [] for name in trials.parts}
    overflowing = []
    for candidate in progress.track("agreement", chosen, len(chosen)):
        found = trials.measure(candidate)
        if not found:
            overflowing.append(candidate)
        for name, trial in found.items():
            points[name].append(measure_point(candidate, trial))
    calibrations = {name: Calibration(of_text) for name, of_text in points.items()}
    for name, calibration in calibrations.items():
        if math.isnan(calibration.correlation):
            continue
        where = f" on text {name}" if len(points) > 1 else ""
        progress.note(
            f"predicted against measured cost of {len(calibration.points)} blocks{where}: rank correlation "
            f"{figure(calibration.kl_correlation, '.2f')} with the divergence, "
            f"{figure(calibration.correlation, '.2f')} with Δloss"
        )
    return calibrations, overflowing


def measure_point(candidate: Candidate, trial: BlockTrial) -> Point:
    """The point of one trial from what every window of a text lost."""
    estimates = [(values.mean().item(), standard_error(values)) for values in (trial.rises, trial.divergences)]
    (measured, error), (kl, kl_error) = estimates
    return Point(candidate, candidate.damage, measured, error, trial.windows, kl, kl_error)


def standard_error(values: Tensor) -> float:
    """Of the mean; a single value tells nothing of it: then it is infinite."""
    return (values.std() / len(values) ** 0.5).item() if len(values) > 1 else math.inf


def correct_predictions(
    candidates: Mapping[BranchIndex, BlockCandidates],
    calibrations: Mapping[str, Calibration],
    limits: Mapping[str, float],
    divergence_price: float = 0.0,
) -> dict[BranchIndex, list[Candidate]]:
    """The candidates of every block, with their predictions corrected by what was measured.

    `limits` are the nats that each text may lose. The text on which a block uses most of its limit decides; predictions
    are those of a text that has the smallest limit. In attention, where a slope may make up for a large divergence,
    each nat of divergence costs `divergence_price` beside the loss: the interval of a plan grows with it.
    """
    factors = {
        (name, form): calibration.of_form(form).factors(candidates)
        for name, calibration in calibrations.items()
        for form in FORMS
    }
    smallest = min(limits.values())

    prices = {
        (name, form): calibration.of_form(form).divergence_factors(candidates) or {}
        for name, calibration in calibrations.items()
        for form in ("heads", "map")
    }

    def correct(c: Candidate) -> float:
        found = []
        for name, form in ((name, form_of(c)) for name in calibrations):
            damage = factors[name, form][c.index] * c.damage
            divergence = prices.get((name, form), {}).get(c.index, 0.0) * c.damage
            found.append((max(damage + c.slope, 0.0) + divergence_price * divergence) * smallest / limits[name])
        return max(found)

    return {
        index: [replace(c, damage=correct(c)) for c in of_block.candidates if math.isfinite(c.damage)]
        for index, of_block in candidates.items()
    }


def binding_calibration(calibrations: Mapping[str, Calibration], limits: Mapping[str, float]) -> Calibration:
    """Of every block, the point of the text on which it uses most of its limit."""
    shares = [(p.measured / limits[name], p) for name, found in calibrations.items() for p in found.points]
    worst: dict[tuple[BranchIndex, str], tuple[float, Point]] = {}
    for share, p in shares:
        if (p.index, p.form) not in worst or share > worst[p.index, p.form][0]:
            worst[p.index, p.form] = (share, p)
    return Calibration([p for _, (_, p) in sorted(worst.items(), key=lambda item: item[0])])
