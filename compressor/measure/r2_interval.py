"""The 95 % interval of R²_lin, the R² on held-out windows of a least-squares map that other windows were fitted by.

It is about the R² that a map fitted on as many windows of this text has on other windows of it. Two things make one
measurement differ from that: the held-out windows that were drawn, and the fitting windows that were drawn. The first
is seen in how the held-out windows differ; the second by fitting again without one group of fitting windows at a time,
in closed form, because moments of groups add up. Tokens of a window are not independent, so windows are counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from compressor.evaluate.intervals import student_quantile
from compressor.measure.moments import Moments
from compressor.measure.regression import Spectrum, feature_errors, solve_part
from compressor.runtime import distributed

FIT_GROUPS = 5  # groups of fitting windows whose moments are kept apart
FEW_WINDOWS = 4  # held-out windows: with fewer, the interval is very wide
ENDS = 0.975  # the quantile at either end of a 95 % interval


@dataclass
class WindowSums:
    """Sums over the rows of each held-out window, about the fitted mean of y."""

    errors: list[Tensor] = field(default_factory=list)  # squared error of the map, per window
    energies: list[Tensor] = field(default_factory=list)  # |y|² per row, not summed
    sums: list[Tensor] = field(default_factory=list)  # Σ y per window

    def gather(self) -> None:
        """Collect the sums of all processes."""
        self.errors, self.energies, self.sums = map(distributed.gather, (self.errors, self.energies, self.sums))

    def spreads(self, seq_len: int) -> Tensor:
        """Each window's part of SST: its rows' squared distance from the mean of all held-out rows."""
        energies, sums = torch.cat(self.energies).reshape(-1, seq_len).sum(-1), torch.cat(self.sums)
        mean = sums.sum(0) / (len(sums) * seq_len)
        return (energies - 2 * sums @ mean + seq_len * mean.square().sum()).clamp_min(0)

    def lack(self, seq_len: int) -> float:
        """Σ over rows of the squared distance between the held-out mean and that of the whole text, as expected.

        SST about the held-out mean lacks it. It is estimated from how the means of windows differ.
        """
        means = torch.cat(self.sums) / seq_len
        return seq_len * (means - means.mean(0)).square().sum().item() / max(1, len(means) - 1)


def group_of(window: int, windows: int) -> int:
    """The group of a fitting window: neighbours are together, whichever process and batch they are in."""
    return window * group_count(windows) // windows


def group_count(windows: int) -> int:
    return min(FIT_GROUPS, windows)


def merge(groups: Sequence[Moments]) -> Moments:
    """The moments of the rows of all groups."""
    first = groups[0]
    total = Moments.zeros(len(first.mean_x), len(first.mean_y), first.xx.device, whole_yy=first.whole_yy)
    for group in groups:
        total.add(group)
    return total


def fit_variance(groups: Sequence[Moments], spectrum: Spectrum, held: Moments) -> float:
    """The variance of log SSE on the held-out rows that comes of the choice of the fitting windows.

    A jackknife: the map is fitted without each group in turn.
    """
    if len(groups) < 2:
        return math.nan
    logs = []
    for left_out in range(len(groups)):
        rest = merge([group for k, group in enumerate(groups) if k != left_out])
        logs.append(log_error(feature_errors(solve_part(rest, spectrum), held).sum().item(), held))
    mean = sum(logs) / len(logs)
    return (len(logs) - 1) / len(logs) * sum((log - mean) ** 2 for log in logs)


def log_error(error: float, held: Moments) -> float:
    """log SSE, no lower than what float64 sums resolve of SST."""
    return math.log(max(error, 1e-14 * held.variances.sum().item(), 1e-300))


def interval(r2: float, errors: Tensor, spreads: Tensor, lack: float, fit: float, groups: int) -> tuple[float, float]:
    """The interval of an R² from the errors and spreads of the held-out windows and the variance of `fit_variance`.

    It is a t interval of log(1 − R²), which keeps both ends below 1, about the R² with what SST lacks. The degrees of
    freedom are those of Welch and Satterthwaite, but no more than the held-out windows have: more noise must not make
    it narrower. One held-out window, or one group, says nothing about the noise: then there is no interval (NaN).
    """
    windows = len(errors)
    if windows < 2 or groups < 2 or not math.isfinite(r2):
        return math.nan, math.nan
    if r2 >= 1 or errors.sum() == 0 or spreads.sum() == 0:
        return r2, r2
    influence = errors / errors.mean() - spreads / spreads.mean()
    drawn = influence.square().sum().item() / (windows * (windows - 1))
    variance = drawn + fit
    if variance == 0:
        return r2, r2
    freedom = min(variance**2 / (drawn**2 / (windows - 1) + fit**2 / (groups - 1)), windows - 1)
    half = student_quantile(ENDS, freedom) * math.sqrt(variance)
    share = math.log(1 - r2) - math.log1p(lack / spreads.sum().item())
    low, high = 1 - math.exp(min(share + half, 700.0)), 1 - math.exp(share - half)
    return min(low, r2), max(high, r2)
