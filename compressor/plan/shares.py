"""How much of each budget a measured plan uses: of the rise in perplexity, and of the divergence from the source."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from compressor.evaluate.budget import Limits, text_prefix
from compressor.evaluate.fidelity import FidelityChange
from compressor.evaluate.perplexity import PerplexityChange
from compressor.runtime.figures import signed


@dataclass(frozen=True)
class Share:
    """The share of one budget that the upper end of an interval uses; `figure` is what was measured, in words."""

    used: float
    budget: str  # its name
    figure: str
    end: str  # the upper end and what is allowed, in words


def list_shares(
    limits: Limits, texts: Mapping[str, PerplexityChange], fidelity: Mapping[str, FidelityChange]
) -> list[Share]:
    """The share of every budget, the perplexity of every text first, then the divergence on every text.

    What has no limit has no share; where nothing has one, the perplexities are there, and use nothing.
    """
    shares = []
    for name, change in texts.items():
        allowed = limits.allowed[name]
        if math.isfinite(allowed) or limits.kl is None:
            end = f"{text_prefix(name)}upper end {signed(change.upper)} of {allowed:.3f}"
            figure = (
                f"{text_prefix(name)}ΔPPL {signed(change.delta)} (upper end {signed(change.upper)}, "
                f"allowed {signed(allowed)}; windows of {change.seq_len} tokens)"
            )
            shares.append(Share(change.upper / allowed, "perplexity", figure, end))
    if limits.kl is None:
        return shares
    for name, found in fidelity.items():
        end = f"{text_prefix(name)}KL {found.kl_upper:.4f} of {limits.kl:g}"
        figure = (
            f"{text_prefix(name)}KL {found.kl:.4f} nats per token (upper end {found.kl_upper:.4f}, allowed "
            f"{limits.kl:g})"
        )
        shares.append(Share(found.kl_upper / limits.kl, "KL", figure, end))
    return shares


def largest_share(shares: list[Share]) -> Share:
    """The budget of which most is used."""
    return max(shares, key=lambda share: share.used)


def rise_error(change: PerplexityChange) -> float:
    """The standard error of a rise, in nats per token. One window tells nothing of it: then it is 0."""
    return change.error / change.compressed if math.isfinite(change.error) else 0.0


def relative_error(found: FidelityChange) -> float:
    """The standard error of the divergence, as a share of it. One window tells nothing of it: then it is 0."""
    return found.kl_error / found.kl if found.kl > 0 and math.isfinite(found.kl_error) else 0.0
