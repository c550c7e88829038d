"""Token-exact perplexity of two models on the same windows, and the interval of their difference."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compressor.models.blocks import backbone, find_blocks
from compressor.models.offload import device_of, disk_weights_of, fetch_weights
from compressor.models.residual import Stream, open_stream, resume
from compressor.runtime import distributed
from compressor.runtime.context import RunContext
from compressor.runtime.errors import InputError
from compressor.runtime.progress import Progress
from compressor.text import batches

LOGITS_BYTES = 512 * 2**20  # a batch shrinks until its float32 logits fit
CHUNK = 4 * 2**20  # logits that are looked at together: they stay in the processor's cache
RESAMPLES = 4000


@dataclass(frozen=True)
class Losses:
    """Nats of every predicted token [windows, seq_len − 1]."""

    nats: Tensor

    @property
    def windows(self) -> Tensor:
        """Mean nats of every window (float64)."""
        return self.nats.double().mean(1)

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats.double().sum().item() / self.nats.numel())

    def part(self, windows: slice) -> Losses:
        return Losses(self.nats[windows])


@dataclass(frozen=True)
class PerplexityChange:
    """Perplexity before and after on the same windows, with the paired bootstrap interval of the difference."""

    baseline: float
    compressed: float
    delta: float
    delta_ci95: tuple[float, float]
    upper: float  # what the budget is held against: the upper end at the wanted confidence
    tokens: int
    seq_len: int


def logits_batch(model: Any, seq_len: int, batch_size: int) -> int:
    vocabulary: int = model.get_output_embeddings().weight.shape[0]
    return max(1, min(batch_size, LOGITS_BYTES // (4 * seq_len * vocabulary)))


@torch.no_grad()
def has_plain_head(model: Any, windows: Tensor) -> bool:
    """Whether the logits are the output embeddings on the body's last hidden states and nothing else: found by trying.

    Families cap or scale their logits; those are left to the model itself.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        return False
    seen: list[Any] = []
    handle = backbone(model).register_forward_hook(lambda _module, _args, output: seen.append(output))
    try:
        logits = model(input_ids=windows[:1, :8].to(device_of(model)), use_cache=False).logits
    finally:
        handle.remove()
    hidden = getattr(seen[0], "last_hidden_state", None) if seen else None
    if hidden is None:
        return False
    fetch_weights(head)
    own = head(hidden.to(head.weight.device)).to(logits)
    return bool((own - logits).abs().max() <= 1e-5 * logits.abs().max())


def plain_losses(model: Any, batch: Tensor) -> Tensor:
    """The loss of every token under a plain head, without the whole logits: a part of the vocabulary at a time."""
    head = model.get_output_embeddings()
    hidden = backbone(model)(input_ids=batch, use_cache=False).last_hidden_state
    fetch_weights(head)
    rows, targets = (part.flatten(0, 1).to(head.weight.device) for part in (hidden[:, :-1], batch[:, 1:]))
    total = rows.new_full((len(rows),), -math.inf, dtype=torch.float32)
    wanted = torch.empty_like(total)
    step = max(1, CHUNK // len(rows))
    for start in range(0, len(head.weight), step):
        bias = None if head.bias is None else head.bias[start : start + step]
        scores = nn.functional.linear(rows, head.weight[start : start + step], bias).float()
        inside = (targets >= start) & (targets < start + step)
        wanted[inside] = scores[inside, targets[inside] - start]
        largest = scores.amax(1, keepdim=True)
        total = torch.logaddexp(total, scores.sub_(largest).exp_().sum(1).log_().add_(largest[:, 0]))
    return (total - wanted).reshape(batch.shape[0], -1)


def own_losses(logits: Tensor, batch: Tensor) -> Tensor:
    """The loss of every token from the model's own logits, some rows at a time: a copy of them all costs more than the
    loss itself."""
    losses = []
    for window, scores in zip(batch, logits, strict=True):
        rows = max(1, CHUNK // scores.shape[1])
        parts = zip(torch.split(scores[:-1], rows), torch.split(window[1:], rows), strict=True)
        losses.append(torch.cat([nn.functional.cross_entropy(s.float(), w, reduction="none") for s, w in parts]))
    return torch.stack(losses)


@torch.no_grad()
def evaluate(
    model: Any,
    windows: Tensor,
    context: RunContext | None = None,
    *,
    plain: bool = False,
    start: Stream | None = None,
    step: str | None = None,
) -> Losses:
    """The loss of every token of windows [count, seq_len], predicted from the ones before it in its window.

    `.perplexity` is exp(total nats / total predicted tokens). What is promised is measured on the model's own logits;
    trials of which there are many may take the shorter way where `has_plain_head` allows it (`plain`). `start` is a
    stream of these windows, in batches of this size, to begin from. A named `step` is shown as progress.
    """
    context = context or RunContext()
    progress = context.progress if step else Progress()
    size = logits_batch(model, windows.shape[1], context.batch_size)
    parts = distributed.own_share(batches(windows, size))
    found: list[Tensor] = []
    with progress.bar(step or "evaluate", len(parts)) as advance:
        if disk_weights_of(model) is not None:  # every layer is read once, not once a batch
            blocks = find_blocks(model)
            start = start.copy() if start is not None else open_stream(model, blocks, windows, size)
            start.advance(len(blocks))
        with resume(model, start) if start is not None else nullcontext():
            for batch in parts:
                batch = batch.to(device_of(model))
                if plain:
                    found.append(plain_losses(model, batch).cpu())
                else:
                    logits = model(input_ids=batch, use_cache=False).logits
                    found.append(own_losses(logits, batch.to(logits.device)).cpu())
                advance(1)
    losses = Losses(torch.cat(distributed.gather(found)))
    means = losses.windows
    bad = (~means.isfinite()).nonzero()
    if len(bad):
        raise InputError(
            f"the model's loss is {means[bad[0]].item()} in window {bad[0].item()}: its activations overflow; "
            "try --dtype float32"
        )
    return losses


def compare(before: Losses, after: Losses, confidence: float = 0.95, seed: int = 0) -> PerplexityChange:
    """Resample windows, the same for both models: tokens of one window are not independent, windows nearly are."""
    means = resampled_means(torch.stack([before.windows, after.windows]), seed)
    deltas = means[1].exp() - means[0].exp()
    delta = after.perplexity - before.perplexity
    interval, upper = interval_of(deltas, delta, confidence)
    return PerplexityChange(
        baseline=before.perplexity,
        compressed=after.perplexity,
        delta=delta,
        delta_ci95=interval,
        upper=upper,
        tokens=before.nats.numel(),
        seq_len=before.nats.shape[1] + 1,
    )


def compare_parts(
    before: Losses, after: Losses, parts: Mapping[str, slice], confidence: float = 0.95, seed: int = 0
) -> dict[str, PerplexityChange]:
    """The same for every text of its own."""
    return {name: compare(before.part(p), after.part(p), confidence, seed) for name, p in parts.items()}


def resampled_means(values: Tensor, seed: int) -> Tensor:
    """Means of `values` [rows, items] over items drawn again, the same for every row: [rows, RESAMPLES]."""
    generator = torch.Generator().manual_seed(seed)
    count = values.shape[1]
    # A few hundred draws at a time: their indices must not outgrow the model on a long text.
    draws = (torch.randint(count, (RESAMPLES // 20, count), generator=generator) for _ in range(20))
    return torch.cat([values[:, some].mean(-1) for some in draws], dim=1)


def interval_of(draws: Tensor, point: float, confidence: float) -> tuple[tuple[float, float], float]:
    """The 95 % interval of resampled values, and the end that a budget is held against."""
    low, high = torch.quantile(draws, torch.tensor([0.025, 0.975], dtype=draws.dtype)).tolist()
    return (low, high), point if confidence == 0 else torch.quantile(draws, (1 + confidence) / 2).item()
