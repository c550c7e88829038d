"""Verdicts: whether a block may be replaced. A high R²_lin alone is never enough."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from compressor.evaluate.budget import USUAL_NATS
from compressor.evaluate.perplexity import PerplexityChange
from compressor.measure.gradients import Damage
from compressor.measure.profile import BlockProfile, Profile
from compressor.models.branches import BranchIndex
from compressor.runtime.figures import figure, signed, signed_interval

SAFE_NATS = USUAL_NATS  # without a budget, a block is safe when its linear map costs less than this
EXPECTED_FACTOR = 2.0  # a measured cost of up to this many times the prediction confirms the prediction
OUTLIER_GAP = 0.2  # where R²_lin is above the stream-weighted R² by more than this, it rests on a few rows


@dataclass(frozen=True)
class Verdict:
    """Whether a block may be replaced (safe, costly, unsafe, or None: undecided), and why, in one line."""

    word: Literal["safe", "costly", "unsafe"] | None
    reason: str


def judge(
    profile: BlockProfile, damage: Damage, limit: float = SAFE_NATS, measured: PerplexityChange | None = None
) -> Verdict:
    """Judge one block by its linear map. `measured` is what a trial of that map cost, where there was one.

    A block is unsafe when a few outlier rows carry its R²_lin, or when the two predictions of the damage differ by far
    and no trial confirms the smaller one. Otherwise it is safe or costly by the cost of the map: the upper end of the
    measured interval, or the prediction where there was no trial. Where the fitted rows are too few for the map, the
    outlier rows are looked for with the ridge that held-out rows chose, and the block is undecided unless it was tried
    and is safe: that it costs much may be the fit's fault.
    """
    alone = f"; alone as a linear map: {describe_change(measured)}" if measured else ""
    name, whole, stream = "R²_lin", profile.r2_lin, profile.r2_stream
    if not profile.carried:
        name, whole, stream = "R²_lin of the best ridge", profile.r2_ridge, profile.r2_ridge_stream
    if stream < whole - OUTLIER_GAP:
        return Verdict(
            "unsafe",
            f"outlier rows: {name} {figure(whole, '.2f')} falls to {figure(stream, '.2f')} when rows count as the "
            f"next norm sees them ({locate_variance(profile)}, effective rank {profile.effective_rank:.1f}){alone}",
        )
    confirmed = measured is not None and rise_in_nats(measured) <= EXPECTED_FACTOR * damage.linear
    if damage.factorised > 1 and damage.factorised > 10 * damage.linear and not confirmed:
        return Verdict(
            "unsafe",
            f"outlier errors: the two damage estimates disagree ({damage.linear:.3f} and {damage.factorised:.1f} nats)"
            f"{alone}",
        )
    if measured is not None and upper_nats(measured) <= limit:
        return Verdict("safe", f"alone as a linear map: {describe_change(measured)}")
    if not profile.carried:
        return Verdict(None, f"undecided: {describe_few_rows(profile)}{alone}")
    if measured is not None:
        return Verdict("costly", f"alone as a linear map: {describe_change(measured)}")
    cost = f"its linear map is predicted to cost {damage.linear:.4f} nats per token"
    return Verdict("safe" if damage.linear <= limit else "costly", f"{cost}, {compare_to_limit(damage.linear, limit)}")


def describe_few_rows(profile: BlockProfile) -> str:
    rows, width = profile.rows_fitted, profile.block.width
    return (
        f"{rows:,} fitted rows are {rows / width:.1f} per input feature, too few for a least-squares map; "
        f"--calib-tokens {profile.tokens_needed} would do"
    )


def judge_all(
    profile: Profile, damages: Mapping[BranchIndex, Damage], limit: float, alone: Mapping[BranchIndex, PerplexityChange]
) -> dict[BranchIndex, Verdict]:
    """The verdict on every block whose damage is predicted; `alone` are the measured costs of the blocks that were
    replaced on trial."""
    profiles = {p.block.index: p for p in profile.branches if p.block.index in damages}
    return {index: judge(p, damages[index], limit, alone.get(index)) for index, p in profiles.items()}


def judge_texts(
    profile: Profile,
    damages: Mapping[BranchIndex, Damage],
    limits: Mapping[str, float],
    alone: Mapping[BranchIndex, Mapping[str, PerplexityChange]],
) -> dict[BranchIndex, Verdict]:
    """The verdict on every block that was replaced on trial, by the text on which it uses most of that text's limit."""
    verdicts = {}
    for p in (p for p in profile.branches if p.block.index in alone):
        changes = alone[p.block.index]
        name = max(changes, key=lambda name: upper_nats(changes[name]) / limits[name])
        verdict = judge(p, damages[p.block.index], limits[name], changes[name])
        where = f" (on text {name})" if len(changes) > 1 else ""
        verdicts[p.block.index] = Verdict(verdict.word, verdict.reason + where)
    return verdicts


def rise_in_nats(measured: PerplexityChange) -> float:
    return math.log(measured.compressed / measured.baseline)


def upper_nats(measured: PerplexityChange) -> float:
    """The upper end of a trial's interval, in nats per token."""
    return math.log(max(measured.baseline + measured.delta_ci95[1], 1e-300) / measured.baseline)


def describe_change(measured: PerplexityChange) -> str:
    low, high = measured.delta_ci95
    return (
        f"perplexity {measured.baseline:.2f} → {measured.compressed:.2f} ({signed(measured.delta, '.2f')}, "
        f"95 % interval {signed_interval(low, high, '.2f')})"
    )


def compare_to_limit(nats: float, limit: float) -> str:
    return f"{'within' if nats <= limit else 'above'} the {limit:.4f} that a safe block may cost"


def locate_variance(profile: BlockProfile) -> str:
    """Where the variance is, in words: at one position of every window, or in a few rows."""
    if profile.top_position_share > 0.5:
        position = f"position {profile.top_position:.0f} of the windows"
        return f"{position} carries {profile.top_position_share:.0%} of the variance"
    return f"0.1 % of the rows carry {profile.top_row_share:.0%} of the variance"
