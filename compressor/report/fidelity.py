"""How near a compressed model's predictions are to its source's: the part of a record, and its words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from compressor.report.part import Count, Figure, Interval, Part
from compressor.runtime.figures import MINUS


class Fidelity(Part):
    """The KL divergence from the source in nats per token, and the share of tokens where both models find the same one
    most likely, with their 95 % intervals."""

    kl: Figure
    kl_ci95: Interval
    top1_agreement: Figure
    top1_agreement_ci95: Interval
    tokens: Count
    unit: Literal["window", "document"] = "window"  # what was resampled
    units: Count | None = None
    kl_upper: Figure = math.nan  # the end that a budget is held against
    kl_error: Figure | None = None  # standard error
    max_kl: Figure | None = None  # None: only reported
    passed: bool | None = None

    def __str__(self) -> str:
        """`KL from the source 0.0123 nats per token (0.0110 … 0.0140); 94.1 % of the most likely tokens agree (…)`."""
        return (
            f"KL from the source {format_nats(self.kl)} nats per token ({format_ends(self.kl_ci95)}); "
            f"{say_agreement(self)}"
        )


def say_agreement(found: Fidelity) -> str:
    return (
        f"{format_share(found.top1_agreement)} % of the most likely tokens agree "
        f"({format_shares(found.top1_agreement_ci95)})"
    )


def format_nats(value: float) -> str:
    """Nats per token with three digits or more; whole differences between models are in the thousandths."""
    if not math.isfinite(value):
        return "∞" if value == math.inf else "–"
    if value == 0:
        return "0"
    return f"{value:.1e}".replace("-", MINUS) if value < 0.0005 else f"{value:.4f}" if value < 1 else f"{value:.3f}"


def format_ends(ends: Sequence[float]) -> str:
    return " … ".join(map(format_nats, ends))


def format_share(value: float) -> str:
    """A share in per cent. Only what is whole is said to be 100."""
    if not math.isfinite(value):
        return "–"
    return "100" if value == 1 else f"{min(100 * value, 99.99):.2f}" if value > 0.995 else f"{100 * value:.1f}"


def format_shares(ends: Sequence[float]) -> str:
    return f"{' … '.join(map(format_share, ends))} %"
