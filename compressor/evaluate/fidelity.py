"""How near a compressed model's predictions are to its source's, token by token.

The Kullback-Leibler divergence KL(source ‖ compressed) says how many nats per token the source's own predictions lose
when the compressed model stands in for it; top-1 agreement is the share of tokens where both find the same one most
likely. Perplexity looks at one token of the vocabulary, the one that came next, so that a changed model can be lucky;
these look at all of them, and only a model that predicts as its source does can do well.

The source is not run again: its hidden states after the last layer are kept from the pass that measured its losses, and
only its final norm and head turn them into logits while the compressed model passes over the same batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from compressor.evaluate import perplexity
from compressor.evaluate.intervals import divergence_interval, share_interval
from compressor.evaluate.perplexity import Losses, evaluate, limit_batch_size, resampled_documents
from compressor.models.blocks import find_blocks, hidden_states_of
from compressor.models.calls import passing_through
from compressor.models.layer_check import check_layers
from compressor.models.offload import device_of, disk_weights_of
from compressor.models.residual import Stream, process_key
from compressor.models.spool import TensorSpool
from compressor.runtime import distributed
from compressor.runtime.context import RunContext
from compressor.text import Split, batches

TUPLE_LENGTH = "tuple_length"  # beside the states in the cache


@dataclass(frozen=True)
class Fidelity:
    """The divergence from the source in nats, and whether both models find the same token most likely, of every
    predicted token [windows, seq_len − 1]."""

    kl: Tensor
    agrees: Tensor

    def part(self, windows: slice) -> Fidelity:
        return Fidelity(self.kl[windows], self.agrees[windows])


@dataclass(frozen=True)
class FidelityChange:
    """The mean divergence and the share of tokens that agree, on some windows, with their intervals.

    `unit` and `units` are what was resampled, as in `PerplexityChange`.
    """

    kl: float
    kl_ci95: tuple[float, float]
    kl_upper: float  # upper end of the interval at the wanted confidence: this must be inside the budget
    kl_error: float  # standard error
    top1_agreement: float
    top1_agreement_ci95: tuple[float, float]
    tokens: int
    unit: Literal["window", "document"]
    units: int

    def __str__(self) -> str:
        return f"KL {self.kl:.4f} nats per token, {self.top1_agreement:.1%} of the most likely tokens agree"


@dataclass(frozen=True, eq=False)
class Reference:
    """The source as compressed models are compared with it: its hidden states after the last layer, in the batches of
    this process, and the model whose final norm and head turn them into logits.

    That model may since have been patched: its layers are passed through, and norm and head are never replaced.
    """

    model: Any
    identity: Mapping[str, Any]  # what the source's outputs depend on
    layers: list[nn.Module]
    tuple_length: int  # how many values a layer returns in a tuple; 0: a bare tensor
    states: Sequence[Tensor]
    logits: Sequence[Tensor] = ()  # of all batches, where they are kept

    def with_logits(self, windows: Tensor, batch_size: int) -> Reference:
        """The same with the logits of all windows in memory, if they are few: many models are compared with them."""
        own = distributed.own_share(batches(windows, limit_batch_size(self.model, windows.shape[1], batch_size)))
        vocabulary = self.model.get_output_embeddings().weight.shape[0]
        if 4 * windows.numel() * vocabulary > perplexity.LOGITS_BYTES:
            return self
        with torch.no_grad():
            return replace(self, logits=[self.compute_logits(number, batch) for number, batch in enumerate(own)])

    def compute_logits(self, number: int, batch: Tensor) -> Tensor:
        """The source's logits of a batch; `number` is its place among those of this process."""
        if self.logits:
            return self.logits[number]
        state = self.states[number]
        assert state.shape[:2] == batch.shape, "the compressed model is measured in other batches than its source"
        device = device_of(self.model)
        with passing_through(self.layers, self.tuple_length, iter([state.to(device)])):
            logits: Tensor = self.model(input_ids=batch.to(device), use_cache=False).logits
        return logits


def measure_source(
    model: Any,
    windows: Tensor,
    losses_key: Mapping[str, Any],
    context: RunContext,
    *,
    identity: Mapping[str, Any],
    step: str | None = None,
    named: str = "",
) -> tuple[Losses, Reference]:
    """The losses of the source, and what compressed models are compared with, in one pass; both are cached.

    The losses are cached under their key, the states beside them, by each process for its own batches. If either is
    missing, the pass is made again. `named` is said where both were there: then the model is not run at all.
    """
    cache, states_key = context.cache, process_key({**losses_key, "kind": f"states of {losses_key['kind']}"})
    losses, states = cache.find(losses_key), cache.read_own(states_key)
    found = all(bool(flag) for flag in distributed.gather([torch.tensor([TUPLE_LENGTH in (states or {})])]))
    blocks = find_blocks(model)
    layers = [model.get_submodule(block.layer_path) for block in blocks]
    weights = disk_weights_of(model)
    spool = TensorSpool((), weights.scratch if weights else None)
    if losses is not None and found and states is not None:
        tuple_length = int(states.pop(TUPLE_LENGTH))
        for name in sorted(states):
            spool.append(states[name])
        if named:
            context.progress.note(f"{named}: measured before")
    else:
        tuple_length = check_layers(model, blocks)
        with watching_last_layer(layers[-1]) as outputs:
            passed = evaluate(
                model, windows, context, step=step, watch=lambda _number, _batch, _logits: spool.append(outputs[-1])
            )
        kept = {f"{number:08d}": state for number, state in enumerate(spool)}
        cache.write_own(states_key, {TUPLE_LENGTH: torch.tensor(tuple_length), **kept})
        if losses is None:
            losses = {"nats": passed.nats}
            cache.keep(losses_key, losses)
    return Losses(losses["nats"]), Reference(model, identity, layers, tuple_length, spool)


@contextmanager
def watching_last_layer(layer: nn.Module) -> Iterator[list[Tensor]]:
    """While open, a list holds the layer's last output, copied: the model may go on to change it in place."""
    outputs: list[Tensor] = []

    def watch(_layer: nn.Module, _args: Any, output: Any) -> None:
        outputs[:] = [hidden_states_of(output).to("cpu", copy=True)]

    handle = layer.register_forward_hook(watch)
    try:
        yield outputs
    finally:
        handle.remove()


def evaluate_against(
    model: Any,
    reference: Reference,
    windows: Tensor,
    context: RunContext,
    *,
    step: str | None = None,
    start: Stream | None = None,
) -> tuple[Losses, Fidelity]:
    """The losses of a compressed model, as `evaluate` gives them, and its fidelity to the source, in one pass."""
    divergences: list[Tensor] = []
    agreements: list[Tensor] = []

    def watch(number: int, batch: Tensor, logits: Tensor) -> None:
        kl, agrees = compare_logits(reference.compute_logits(number, batch).to(logits.device), logits)
        divergences.append(kl)
        agreements.append(agrees)

    losses = evaluate(model, windows, context, step=step, start=start, watch=watch)
    return losses, Fidelity(torch.cat(distributed.gather(divergences)), torch.cat(distributed.gather(agreements)))


def compare_logits(source: Tensor, compressed: Tensor) -> tuple[Tensor, Tensor]:
    """The divergence in nats, and whether the most likely token is the same, of all but the last token of each window
    [windows, seq_len − 1]; logits are [windows, seq_len, vocabulary].

    Some rows are handled at a time, in float32; what is small against the logits themselves is summed in float64.
    """
    shape = source.shape[0], source.shape[1] - 1
    rows = max(1, perplexity.CHUNK_LOGITS // source.shape[2])
    divergences, agreements = [], []
    for ours, theirs in zip(source, compressed, strict=True):
        for a, b in zip(torch.split(ours[:-1], rows), torch.split(theirs[:-1], rows), strict=True):
            kl, agrees = compare_rows(a.float(), b.float())
            divergences.append(kl)
            agreements.append(agrees)
    return torch.cat(divergences).reshape(shape), torch.cat(agreements).reshape(shape)


def compare_rows(source: Tensor, compressed: Tensor) -> tuple[Tensor, Tensor]:
    """The same of single rows of float32 logits [rows, vocabulary], on the processor.

    KL = Σ p (a − b) − log Σ exp a + log Σ exp b with p the softmax of the source's logits a. Both rows are counted from
    their largest logit, because one that all have in common would only add its rounding. KL is never negative; what
    rounding makes so is 0.
    """
    top, other_top = source.amax(1, keepdim=True), compressed.amax(1, keepdim=True)
    weights = (source - top).exp_()
    total, other_total = (part.sum(1).cpu().double() for part in (weights, (compressed - other_top).exp_()))
    lost = (source - compressed).sub_(top - other_top).masked_fill_(weights == 0, 0.0).mul_(weights)
    kl = lost.sum(1).cpu().double() / total - (total / other_total).log()
    agrees = source.argmax(1) == compressed.argmax(1)
    return kl.clamp_min(0.0).float(), agrees.cpu()


def compare_fidelity(
    fidelity: Fidelity, confidence: float = 0.95, seed: int = 0, documents: Tensor | None = None
) -> FidelityChange:
    """The mean divergence and the agreement with their intervals; `documents` are as in `perplexity.compare`."""
    units = resampled_documents(documents)
    kl, agreement = fidelity.kl.double().mean(1), fidelity.agrees.double().mean(1)
    divergence = divergence_interval(kl, units, confidence, seed)
    share = share_interval(agreement, units, confidence, seed)
    return FidelityChange(
        kl=kl.mean().item(),
        kl_ci95=(divergence.low, divergence.high),
        kl_upper=divergence.upper,
        kl_error=divergence.error,
        top1_agreement=agreement.mean().item(),
        top1_agreement_ci95=(share.low, share.high),
        tokens=fidelity.kl.numel(),
        unit="window" if units is None else "document",
        units=len(kl) if units is None else len(torch.unique(units)),
    )


def compare_fidelity_parts(
    fidelity: Fidelity, split: Split, parts: Mapping[str, slice], confidence: float = 0.95, seed: int = 0
) -> dict[str, FidelityChange]:
    """The fidelity on every text; `parts` are the windows of each in the split that was measured."""
    documents = split.documents
    return {
        name: compare_fidelity(fidelity.part(p), confidence, seed, None if documents is None else documents[p])
        for name, p in parts.items()
    }
