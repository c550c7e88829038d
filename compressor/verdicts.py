"""Whether a block may be touched. Never on R²_lin alone."""

from __future__ import annotations

from dataclasses import dataclass

from compressor.measuring import BlockProfile
from compressor.sensitivity import Damage

SAFE_NATS = 0.02  # without a budget, a block is safe when its linear map is predicted to cost less than this
OUTLIER_GAP = 0.2  # R²_lin above the stream-weighted one by this much rests on a few rows


@dataclass(frozen=True)
class Verdict:
    """Whether a block may be touched (safe, costly, unsafe), and why, in one line."""

    word: str
    reason: str


def judge(profile: BlockProfile, damage: Damage, limit: float = SAFE_NATS) -> Verdict:
    """Never on R²_lin alone: outlier rows, and an error far outside the quadratic regime, forbid a block."""
    if profile.r2_stream < profile.r2_lin - OUTLIER_GAP:
        return Verdict(
            "unsafe",
            f"outlier rows: R²_lin {profile.r2_lin:.2f} falls to {profile.r2_stream:.2f} when rows count as the next "
            f"norm sees them (0.1 % of the rows carry {profile.top_row_share:.0%} of the variance, effective rank "
            f"{profile.effective_rank:.1f})",
        )
    if damage.factorised > 1 and damage.factorised > 10 * damage.linear:
        return Verdict(
            "unsafe",
            f"outlier errors: the two damage estimates disagree ({damage.linear:.3f} and {damage.factorised:.1f} nats)",
        )
    cost = f"its linear map is predicted to cost {damage.linear:.4f} nats per token"
    return Verdict("safe" if damage.linear <= limit else "costly", cost)
