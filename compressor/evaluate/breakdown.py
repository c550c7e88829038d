"""The rise in loss, broken down: which tokens, which positions and which windows the compression costs most."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from compressor.evaluate.perplexity import Losses
from compressor.text import Text

FREQUENCY_RANKS = (10, 100, 1000)  # edges of the frequency bands: the ten most frequent tokens, the next ninety, …
WORST_WINDOWS = 10
WORST_TOKENS = 3


@dataclass(frozen=True)
class Band:
    """The perplexity of one group of tokens before and after, and its share of the total rise in nats."""

    band: str
    tokens: int
    baseline: float
    compressed: float
    share: float


@dataclass(frozen=True)
class Window:
    """A window whose loss rose much: its text, and the tokens whose loss rose most (`worst`)."""

    text_name: str
    window: int
    baseline: float
    compressed: float
    nats: float
    excerpt: str
    worst: list[tuple[str, float]]


@dataclass(frozen=True)
class LossBreakdown:
    frequency: list[Band]
    position: list[Band]
    windows: list[Window]


def break_down(text: Text, before: Losses, after: Losses, tokenizer: Any) -> LossBreakdown:
    """Cut the rise in loss on the verification text by token frequency, by position, and by window."""
    windows = text.verification.windows
    return LossBreakdown(
        frequency=measure_bands(frequency_masks(text), before, after),
        position=measure_bands(position_masks(windows), before, after),
        windows=find_worst_windows(text, before, after, tokenizer),
    )


def frequency_masks(text: Text) -> list[tuple[str, Tensor]]:
    """Masks over predicted tokens, by the rank of their frequency in the calibration and selection text."""
    targets = text.verification.windows[:, 1:]
    seen = torch.cat([text.calibration.windows.flatten(), text.selection.windows.flatten()])
    counts = torch.bincount(seen, minlength=int(targets.max()) + 1)
    ranks = torch.empty_like(counts)
    ranks[counts.argsort(descending=True, stable=True)] = torch.arange(1, len(counts) + 1)
    rank, count = ranks[targets], counts[targets]
    edges = [0, *FREQUENCY_RANKS, len(counts)]
    names = [f"rank {low + 1:,}–{high:,}" for low, high in pairwise(edges[:-1])]
    names.append(f"rank beyond {FREQUENCY_RANKS[-1]:,}")
    masks = [
        (name, (rank > low) & (rank <= high) & (count > 0))
        for name, (low, high) in zip(names, pairwise(edges), strict=True)
    ]
    return [*masks, ("not in the calibration text", count == 0)]


def position_masks(windows: Tensor) -> list[tuple[str, Tensor]]:
    """Masks over predicted tokens, by how many tokens stand before them: 1, 2–3, 4–7, 8–15, …"""
    predicted = windows.shape[1] - 1
    before = torch.arange(1, predicted + 1).expand(len(windows), -1)
    masks, low = [], 1
    while low <= predicted:
        high = min(2 * low - 1, predicted)
        masks.append((f"{low}" if low == high else f"{low}–{high}", (before >= low) & (before <= high)))
        low = 2 * low
    return masks


def measure_bands(masks: list[tuple[str, Tensor]], before: Losses, after: Losses) -> list[Band]:
    """What each group of tokens costs; a group without tokens is left out."""
    old, new = before.nats.double(), after.nats.double()
    total = (new - old).sum().item()
    return [
        Band(
            band=name,
            tokens=int(mask.sum()),
            baseline=old[mask].mean().exp().item(),
            compressed=new[mask].mean().exp().item(),
            share=(new[mask] - old[mask]).sum().item() / total if total else 0.0,
        )
        for name, mask in masks
        if mask.any()
    ]


def find_worst_windows(text: Text, before: Losses, after: Losses, tokenizer: Any) -> list[Window]:
    """The windows whose loss rose most, the worst first."""
    windows = text.verification.windows
    rise = (after.nats - before.nats).double()
    worst = []
    for i in rise.sum(1).argsort(descending=True, stable=True)[:WORST_WINDOWS].tolist():
        top = rise[i].argsort(descending=True, stable=True)[:WORST_TOKENS].tolist()
        name, part = next((n, p) for n, p in text.parts("verification").items() if p.start <= i < p.stop)
        worst.append(
            Window(
                text_name=name,
                window=i - part.start,
                baseline=before.windows[i].exp().item(),
                compressed=after.windows[i].exp().item(),
                nats=rise[i].sum().item(),
                excerpt=tokenizer.decode(windows[i], skip_special_tokens=True),
                worst=[(tokenizer.decode(windows[i, k + 1 : k + 2]), rise[i, k].item()) for k in top],
            )
        )
    return worst
