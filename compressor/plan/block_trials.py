"""Trials of single blocks: one block is replaced alone, and measured on a few selection windows of every text.

What is measured is the rise of the loss, which budgets are about, and the divergence from the source (KL), which a
thousand tokens tell far more surely: the loss looks at one token of the vocabulary, the divergence at all of them.
Replacing a block changes nothing before it, so each trial runs only the layers from that block on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from compressor.evaluate.fidelity import Reference, evaluate_against, measure_source
from compressor.evaluate.perplexity import limit_batch_size
from compressor.measure.swap import spread_windows
from compressor.models.branches import layer_of
from compressor.models.residual import Stream, open_stream
from compressor.patch.tree import patched
from compressor.plan.fit import Fitter
from compressor.plan.frontier import Candidate
from compressor.plan.moments_store import MomentsStore
from compressor.runtime.cache import Tensors
from compressor.runtime.errors import NumericsError

TRIAL_TOKENS = 1024  # of every text


@dataclass(frozen=True)
class BlockTrial:
    """What one replacement in one block alone costs each window of one text, in nats per token."""

    rises: Tensor  # of the loss
    divergences: Tensor  # from the source

    @property
    def windows(self) -> int:
        return len(self.rises)


class BlockTrials:
    """Replaces blocks alone, one after another; in order of depth the text is carried through the model only once."""

    def __init__(self, store: MomentsStore, fitter: Fitter) -> None:
        self.store, self.fitter = store, fitter
        self.split, self.parts = spread_windows(store.text, TRIAL_TOKENS)
        self.stream: Stream | None = None  # the windows at the layer of the last block that was tried
        self.source: tuple[Tensor, Reference] | None = None  # the source's loss in every window, and its logits

    def key(self, candidate: Candidate) -> dict[str, object]:
        block, shape = self.store.blocks[candidate.index], str(candidate.shape)
        return self.store.key("agreement", block, measured=self.split.sha256, shape=shape)

    def was_measured(self, candidate: Candidate) -> bool:
        return self.store.cache.has(self.key(candidate))

    def measure(self, candidate: Candidate) -> dict[str, BlockTrial]:
        """The trial of one candidate by text. It has no texts where activations or weights overflow."""
        found = self.store.cache.get("", self.key(candidate), lambda: self.run(candidate))
        if not all(values.isfinite().all() for values in found.values()):
            return {}
        return {name: BlockTrial(found["rises"][p], found["divergences"][p]) for name, p in self.parts.items()}

    def run(self, candidate: Candidate) -> Tensors:
        """Fit the candidate, put it into its block, and run the windows from there on."""
        store, windows, context = self.store, self.split.windows, self.store.context
        before, reference = self.measure_source()
        layer = layer_of(candidate.index)
        if self.stream is None or self.stream.position > layer:
            size = limit_batch_size(store.model, windows.shape[1], context.batch_size)
            self.stream = open_stream(store.model, store.layers, windows, size)
        self.stream.advance(layer)
        try:
            fits = self.fitter.fit_at_once({candidate.index: candidate.shape})
            with patched(store.model, list(store.blocks.values()), fits):
                losses, fidelity = evaluate_against(store.model, reference, windows, context, start=self.stream)
        except NumericsError:
            overflow = torch.full_like(before, math.inf)
            return {"rises": overflow, "divergences": overflow.clone()}
        return {"rises": losses.windows - before, "divergences": fidelity.kl.double().mean(1)}

    def measure_source(self) -> tuple[Tensor, Reference]:
        """The source's loss in every window, and its logits, to compare with."""
        if self.source is None:
            store, windows = self.store, self.split.windows
            key = store.key("agreement source", store.layers[0], measured=self.split.sha256)
            losses, reference = measure_source(store.model, windows, key, store.context, identity=store.identity)
            self.source = losses.windows, reference.with_logits(windows, store.context.batch_size)
        return self.source
