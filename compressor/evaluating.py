"""Token-exact perplexity of two models on the same windows, and the interval of their difference."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compressor.errors import InputError
from compressor.progress import Progress

LOGITS_BYTES = 512 * 2**20  # a batch shrinks until its float32 logits fit
RESAMPLES = 4000


@dataclass(frozen=True)
class Losses:
    """Summed nats per window (float64) over `predicted` tokens each."""

    nats: Tensor
    predicted: int

    @property
    def tokens(self) -> int:
        return len(self.nats) * self.predicted

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats.sum().item() / self.tokens)


@dataclass(frozen=True)
class Evaluation:
    """Perplexity before and after on the same windows, with the paired bootstrap interval of the difference."""

    baseline: float
    compressed: float
    delta: float
    delta_ci95: tuple[float, float]
    upper: float  # what the budget is held against: the upper end at the wanted confidence
    tokens: int
    seq_len: int


def batches(windows: Tensor, size: int) -> list[Tensor]:
    return [windows[start : start + size] for start in range(0, len(windows), size)]


def logits_batch(model: Any, seq_len: int, batch_size: int) -> int:
    vocabulary: int = model.get_output_embeddings().weight.shape[0]
    return max(1, min(batch_size, LOGITS_BYTES // (4 * seq_len * vocabulary)))


@torch.no_grad()
def window_losses(model: Any, windows: Tensor, batch_size: int, progress: Progress, step: str) -> Losses:
    """The loss of every window, each token predicted from the ones before it in its window."""
    parts = batches(windows, logits_batch(model, windows.shape[1], batch_size))
    nats: list[Tensor] = []
    for batch in progress.track(step, parts, len(parts)):
        batch = batch.to(model.device)
        logits = model(input_ids=batch, use_cache=False).logits
        for window, scores in zip(batch, logits, strict=True):
            loss = torch.nn.functional.cross_entropy(scores[:-1].float(), window[1:], reduction="none")
            nats.append(loss.double().sum().cpu())
    losses = Losses(torch.stack(nats), windows.shape[1] - 1)
    bad = (~losses.nats.isfinite()).nonzero()
    if len(bad):
        raise InputError(
            f"the model's loss is {losses.nats[bad[0]].item()} in window {bad[0].item()}: its activations overflow; "
            "try --dtype float32"
        )
    return losses


def compare(before: Losses, after: Losses, confidence: float = 0.95, seed: int = 0) -> Evaluation:
    """Resample windows, the same for both models: tokens of one window are not independent, windows nearly are."""
    generator = torch.Generator().manual_seed(seed)
    count = len(before.nats)
    per_window = torch.stack([before.nats, after.nats]) / before.predicted
    # A few hundred draws at a time: their indices must not outgrow the model on a long text.
    draws = (torch.randint(count, (RESAMPLES // 20, count), generator=generator) for _ in range(20))
    means = torch.cat([per_window[:, some].mean(-1) for some in draws], dim=1)
    deltas = means[1].exp() - means[0].exp()
    low, high = torch.quantile(deltas, torch.tensor([0.025, 0.975], dtype=deltas.dtype)).tolist()
    delta = after.perplexity - before.perplexity
    upper = delta if confidence == 0 else torch.quantile(deltas, (1 + confidence) / 2).item()
    return Evaluation(
        baseline=before.perplexity,
        compressed=after.perplexity,
        delta=delta,
        delta_ci95=(low, high),
        upper=upper,
        tokens=before.tokens,
        seq_len=before.predicted + 1,
    )


def evaluate(
    model: Any, windows: Tensor, *, batch_size: int = 8, progress: Progress | None = None, step: str = "evaluate"
) -> Losses:
    """The loss of a model on windows [count, seq_len]; `.perplexity` is exp(total nats / total predicted tokens)."""
    return window_losses(model, windows, batch_size, progress or Progress(), step)
