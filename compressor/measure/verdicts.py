"""Whether a block may be touched. Never on R²_lin alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from compressor.evaluate.perplexity import PerplexityChange
from compressor.measure.gradients import Damage
from compressor.measure.profile import BlockProfile, Profile

SAFE_NATS = 0.02  # without a budget, a block is safe when its linear map costs less than this
EXPECTED = 2.0  # times its prediction: a cost up to this is what gradients led to expect
OUTLIER_GAP = 0.2  # R²_lin above the stream-weighted one by this much rests on a few rows


@dataclass(frozen=True)
class Verdict:
    """Whether a block may be touched (safe, costly, unsafe), and why, in one line."""

    word: Literal["safe", "costly", "unsafe"]
    reason: str


def judge(
    profile: BlockProfile, damage: Damage, limit: float = SAFE_NATS, measured: PerplexityChange | None = None
) -> Verdict:
    """Outlier rows, and an error far outside the quadratic regime, forbid a block. The rest is what its linear map
    costs: as measured, upper end of the interval, where the block was replaced on trial; else as predicted.

    That two estimates disagree is an alarm, not a proof: a trial that cost what was predicted calls it off.
    """
    alone = f"; alone as a linear map: {change_in_words(measured)}" if measured else ""
    if profile.r2_stream < profile.r2_lin - OUTLIER_GAP:
        return Verdict(
            "unsafe",
            f"outlier rows: R²_lin {profile.r2_lin:.2f} falls to {profile.r2_stream:.2f} when rows count as the next "
            f"norm sees them ({place(profile)}, effective rank {profile.effective_rank:.1f}){alone}",
        )
    as_predicted = measured is not None and nats_of(measured) <= EXPECTED * damage.linear
    if damage.factorised > 1 and damage.factorised > 10 * damage.linear and not as_predicted:
        return Verdict(
            "unsafe",
            f"outlier errors: the two damage estimates disagree ({damage.linear:.3f} and {damage.factorised:.1f} nats)"
            f"{alone}",
        )
    if measured is None:
        cost = f"its linear map is predicted to cost {damage.linear:.4f} nats per token"
        return Verdict("safe" if damage.linear <= limit else "costly", f"{cost}, {against(damage.linear, limit)}")
    worst = math.log(max(measured.baseline + measured.delta_ci95[1], 1e-300) / measured.baseline)
    return Verdict("safe" if worst <= limit else "costly", f"alone as a linear map: {change_in_words(measured)}")


def judge_all(
    profile: Profile, damages: Mapping[int, Damage], limit: float, alone: Mapping[int, PerplexityChange]
) -> dict[int, Verdict]:
    """The verdict on every block; `alone` has what those cost that were replaced on trial."""
    indices = {p.block.index: p for p in profile.blocks}
    return {index: judge(p, damages[index], limit, alone.get(index)) for index, p in indices.items()}


def nats_of(measured: PerplexityChange) -> float:
    return math.log(measured.compressed / measured.baseline)


def change_in_words(measured: PerplexityChange) -> str:
    low, high = measured.delta_ci95
    return (
        f"perplexity {measured.baseline:.2f} → {measured.compressed:.2f} ({measured.delta:+.2f}, 95 % interval "
        f"{low:+.2f} … {high:+.2f})"
    )


def against(nats: float, limit: float) -> str:
    return f"{'within' if nats <= limit else 'above'} the {limit:.4f} that a safe block may cost"


def place(profile: BlockProfile) -> str:
    """Where the variance is: at one place of every window, or in a few rows."""
    if profile.top_position_share > 0.5:
        where = f"position {profile.top_position:.0f} of the windows"
        return f"{where} carries {profile.top_position_share:.0%} of the variance"
    return f"0.1 % of the rows carry {profile.top_row_share:.0%} of the variance"
