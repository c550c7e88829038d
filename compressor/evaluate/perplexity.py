"""Token-exact perplexity of two models on the same windows, and the interval of their difference."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from compressor.evaluate.intervals import LEAST_UNITS, RESAMPLED_UNITS, perplexity_interval
from compressor.models.blocks import backbone, find_blocks
from compressor.models.offload import device_of, disk_weights_of, fetch_weights
from compressor.models.residual import Stream, open_stream, resume
from compressor.runtime import distributed
from compressor.runtime.context import RunContext
from compressor.runtime.errors import NumericsError
from compressor.runtime.progress import Progress
from compressor.text import Split, batches

LOGITS_BYTES = 512 * 2**20  # a batch shrinks until its float32 logits fit
CHUNK_LOGITS = 4 * 2**20  # logits handled at a time, few enough to stay in the processor's cache
LARGEST_LOSS = 700.0  # nats: the perplexity of more is beyond float64
Watch = Callable[[int, Tensor, Tensor], None]  # the number of a batch in this process, its tokens, and their logits


@dataclass(frozen=True)
class Losses:
    """The loss in nats of every predicted token [windows, seq_len − 1]."""

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
    """Perplexity before and after on the same windows, with the interval of the difference.

    Whole documents are resampled where the windows come from enough of them, else windows: `unit` says which, `units`
    how many there are. With documents the interval is about other documents of this kind, with windows about other
    windows of these very documents.
    """

    baseline: float
    compressed: float
    delta: float
    delta_ci95: tuple[float, float]
    upper: float  # upper end of the interval at the wanted confidence: this must be inside the budget
    error: float  # standard error of the difference
    tokens: int
    seq_len: int
    unit: Literal["window", "document"]
    units: int
    documents: int

    @property
    def scope(self) -> str:
        """Which text the interval is about, in words."""
        if self.unit == "document":
            return f"documents of the same kind as the {self.documents} that were measured"
        these = "this one document" if self.documents == 1 else f"these {self.documents} documents"
        return f"other windows of {these}: what holds there was not shown for other documents"

    @property
    def weakness(self) -> str | None:
        """Why the interval may not hold its level, in words; None where it holds."""
        if self.units >= LEAST_UNITS:
            return None
        return (
            f"{self.units} {self.unit}s are fewer than the {LEAST_UNITS} from which an interval holds its level: raise "
            f"--verify-tokens{'' if self.unit == 'window' else ', or give a text of more documents'}"
        )


def limit_batch_size(model: Any, seq_len: int, batch_size: int) -> int:
    """At most `batch_size` windows, and fewer where their logits would take too much memory."""
    vocabulary: int = model.get_output_embeddings().weight.shape[0]
    return max(1, min(batch_size, LOGITS_BYTES // (4 * seq_len * vocabulary)))


@torch.no_grad()
def has_plain_head(model: Any, windows: Tensor) -> bool:
    """Whether the logits are just the output embeddings times the last hidden states: tried on a few tokens.

    Some families cap or scale their logits; for those this is false.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        return False
    outputs: list[Any] = []
    handle = backbone(model).register_forward_hook(lambda _module, _args, output: outputs.append(output))
    try:
        logits = model(input_ids=windows[:1, :8].to(device_of(model)), use_cache=False).logits
    finally:
        handle.remove()
    hidden = getattr(outputs[0], "last_hidden_state", None) if outputs else None
    if hidden is None:
        return False
    fetch_weights(head)
    plain = head(hidden.to(head.weight.device)).to(logits)
    return bool((plain - logits).abs().max() <= 1e-5 * logits.abs().max())


def plain_head_losses(model: Any, batch: Tensor) -> Tensor:
    """The loss of every token under a plain head. Only the logits of a part of the vocabulary exist at a time."""
    head = model.get_output_embeddings()
    hidden = backbone(model)(input_ids=batch, use_cache=False).last_hidden_state
    fetch_weights(head)
    rows, targets = (part.flatten(0, 1).to(head.weight.device) for part in (hidden[:, :-1], batch[:, 1:]))
    total = rows.new_full((len(rows),), -math.inf, dtype=torch.float32)  # log Σ exp of the logits so far
    target_logits = torch.empty_like(total)
    step = max(1, CHUNK_LOGITS // len(rows))
    for start in range(0, len(head.weight), step):
        bias = None if head.bias is None else head.bias[start : start + step]
        scores = nn.functional.linear(rows, head.weight[start : start + step], bias).float()
        inside = (targets >= start) & (targets < start + step)
        target_logits[inside] = scores[inside, targets[inside] - start]
        largest = scores.amax(1, keepdim=True)
        total = torch.logaddexp(total, scores.sub_(largest).exp_().sum(1).log_().add_(largest[:, 0]))
    return (total - target_logits).reshape(batch.shape[0], -1)


def logits_losses(logits: Tensor, batch: Tensor) -> Tensor:
    """The loss of every token from the model's own logits.

    Some rows are handled at a time: a float32 copy of all logits would take longer than the loss itself.
    """
    losses = []
    for window, scores in zip(batch, logits, strict=True):
        rows = max(1, CHUNK_LOGITS // scores.shape[1])
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
    watch: Watch | None = None,
) -> Losses:
    """The loss of every token of windows [count, seq_len], predicted from the ones before it in its window.

    `.perplexity` is exp(total nats / total predicted tokens). With `plain`, allowed where `has_plain_head`, the logits
    are computed in parts, which is faster: for the many trials of a search, not for a final measurement. `start` is a
    stream of these windows, in batches of this size, to begin from. A named `step` is shown as progress. `watch` sees
    the logits of every batch; a plain head has none.
    """
    context = context or RunContext()
    progress = context.progress if step else Progress()
    size = limit_batch_size(model, windows.shape[1], context.batch_size)
    parts = distributed.own_share(batches(windows, size))
    nats: list[Tensor] = []
    with progress.bar(step or "evaluate", len(parts)) as advance:
        if disk_weights_of(model) is not None:  # every layer is read once, not once a batch
            blocks = find_blocks(model)
            start = start.copy() if start is not None else open_stream(model, blocks, windows, size)
            start.advance(len(blocks))
        elif start is not None and start.position == 0:
            start = None  # there is nothing to skip
        with resume(model, start) if start is not None else nullcontext():
            for number, batch in enumerate(parts):
                batch = batch.to(device_of(model))
                if plain:
                    nats.append(plain_head_losses(model, batch).cpu())
                else:
                    logits = model(input_ids=batch, use_cache=False).logits
                    nats.append(logits_losses(logits, batch.to(logits.device)).cpu())
                    if watch is not None:
                        watch(number, batch, logits)
                advance(1)
    losses = Losses(torch.cat(distributed.gather(nats)))
    means = losses.windows
    bad = (~means.isfinite()).nonzero()
    if not len(bad) and means.mean() > LARGEST_LOSS:
        bad = means.argmax()[None, None]
    if len(bad):
        raise NumericsError(
            f"the model's loss is {means[bad[0]].item()} in window {bad[0].item()}: its activations overflow; "
            "try --dtype float32"
        )
    return losses


def compare(
    before: Losses,
    after: Losses,
    confidence: float = 0.95,
    seed: int = 0,
    documents: Tensor | None = None,
) -> PerplexityChange:
    """The change in perplexity with its interval: the same units are drawn for both models.

    `documents` is the number of the document of every window, where the text tells documents apart. Windows are drawn
    at least, and not tokens, for the tokens of one window are not independent.
    """
    count = 1 if documents is None else len(torch.unique(documents))
    units = resampled_documents(documents)
    delta = after.perplexity - before.perplexity
    interval = perplexity_interval(before.windows, after.windows, units, confidence, seed)
    return PerplexityChange(
        baseline=before.perplexity,
        compressed=after.perplexity,
        delta=delta,
        delta_ci95=(interval.low, interval.high),
        upper=interval.upper if confidence else delta,
        error=interval.error,
        tokens=before.nats.numel(),
        seq_len=before.nats.shape[1] + 1,
        unit="window" if units is None else "document",
        units=len(before.nats) if units is None else count,
        documents=count,
    )


def resampled_documents(documents: Tensor | None) -> Tensor | None:
    """The documents of all windows where there are enough of them to be resampled; None where windows are."""
    return None if documents is None or len(torch.unique(documents)) < RESAMPLED_UNITS else documents


def compare_parts(
    before: Losses, after: Losses, split: Split, parts: Mapping[str, slice], confidence: float = 0.95, seed: int = 0
) -> dict[str, PerplexityChange]:
    """The change in perplexity of every text; `parts` are the windows of each in the split that was measured."""
    return {
        name: compare(
            before.part(p),
            after.part(p),
            confidence,
            seed,
            None if split.documents is None else split.documents[p],
        )
        for name, p in parts.items()
    }
