"""Fit replacements: at once from the statistics, or in order of depth so that each makes up for the ones before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from compressor.measure.moments import ACCUMULATION_DTYPE
from compressor.measure.profile import moments_device
from compressor.modeling_compressor import Replacement, restore, swap
from compressor.models.blocks import Block
from compressor.models.neurons import Neurons
from compressor.models.residual import Stream, calibration_streams, measure_stream_gain
from compressor.models.source import source_of
from compressor.patch.tree import as_stored
from compressor.plan.candidates import BlockCandidates, best_fit, kept_sets, outer_of
from compressor.plan.moments_store import MomentsStore, collect, own_bias
from compressor.plan.selection import Fitted, choose_strength, root_of
from compressor.plan.shapes import Shape, Shapes


class Fitter:
    """Makes the modules of any plan. Weights are rounded to the stored dtype at once, so that what is measured of them
    holds for the stored model."""

    def __init__(self, store: MomentsStore, candidates: Mapping[int, BlockCandidates]) -> None:
        self.store, self.candidates = store, candidates
        self.model: Any = store.model
        self.blocks, self.progress = store.blocks, store.progress
        self.dtype = source_of(self.model).dtype
        self.device = moments_device(self.model)
        self.start: list[Stream] | None = None
        self.made: dict[tuple[int, Shape], Replacement] = {}  # of the last plan: the next has most of them too

    def at_once(self, shapes: Shapes) -> dict[int, Replacement]:
        """Every block on the inputs that it has in the original model. No text is run."""
        found: dict[int, Replacement] = {}
        for index, shape in sorted(shapes.items()):
            known = self.made.get((index, shape))
            if known is None:
                candidates, outer, bias, root = self.open(index)
                moments = self.store.moments(index)
                known = self.module(
                    candidates, shape, best_fit(moments, bias, outer, shape, candidates.orders, root, candidates.ridges)
                )
            found[index] = known
        self.made = {(index, shapes[index]): module for index, module in found.items()}
        return found

    def in_order(self, shapes: Shapes) -> dict[int, Replacement]:
        """Every block on the inputs that it will really get, towards the stream of the original model.

        How far towards it, and how near to the original weights, is chosen on held-out rows, block by block. A block
        that was fitted before, behind the same replacements, is taken from disk. The model is left as it was.
        """
        keys = {index: self.key(shapes, index) for index in sorted(shapes)}  # while the model is whole
        done = self.fitted_before(shapes, keys)
        rest = [self.blocks[index] for index in sorted(shapes)[len(done) :]]
        if done:
            self.progress.say(f"compensate: {len(done)} of {len(shapes)} blocks fitted before")
        if not rest:
            return done
        present = self.streams_at(min(shapes))
        wanted = [stream.copy() for stream in present]
        for original in wanted:
            original.advance(rest[0].index)
        originals = swap(self.model, {self.blocks[index].path: module for index, module in done.items()})
        try:
            for block in self.progress.track("compensate", rest, len(rest), f"{len(rest)} blocks"):
                candidates, outer, bias, root = self.open(block.index)
                both = []
                gain = None
                for now, original in zip(present, wanted, strict=True):
                    now.advance(block.index)
                    original.advance(block.index + 1)  # its layers are still whole: only those before are replaced
                    gain = measure_stream_gain(self.model, block, now) if now is present[0] else gain
                    aim = original.states if gain else None
                    both.append(collect(self.model, block, candidates.neurons, now, self.device, aim, gain or 1.0))
                shape = shapes[block.index]
                kept = kept_sets(shape, candidates.orders, self.device)[0]
                strength = choose_strength(both[0], both[1], outer, kept, shape.rank, root)
                fitted = best_fit(both[0], bias, outer, shape, candidates.orders, root, candidates.ridges, strength)
                done[block.index] = self.module(candidates, shape, fitted)
                self.store.cache.keep(keys[block.index], pack(done[block.index], self.dtype))
                originals |= swap(self.model, {block.path: done[block.index]})
        finally:
            restore(self.model, originals)
        return done

    def key(self, shapes: Shapes, index: int) -> dict[str, Any]:
        """All that a block's compensated fit depends on: what stands in it and before it."""
        before = {i: str(shape) for i, shape in sorted(shapes.items()) if i <= index}
        return self.store.key("fit", self.blocks[index], shapes=before)

    def fitted_before(self, shapes: Shapes, keys: Mapping[int, Mapping[str, Any]]) -> dict[int, Replacement]:
        """The first blocks of a plan, as far as their compensated fits are on disk."""
        found: dict[int, Replacement] = {}
        for index, key in keys.items():
            kept = self.store.cache.find(key)
            if kept is None:
                break
            module = empty_replacement(self.blocks[index], self.candidates[index].neurons, shapes[index])
            module.load_state_dict(kept)
            found[index] = as_stored(module, self.model, self.blocks[index], self.dtype)
        return found

    def streams_at(self, index: int) -> list[Stream]:
        """The fitting and the held-out windows before a layer, in the original model."""
        if self.start is None or self.start[0].position > index:
            text, batch_size = self.store.text, self.store.context.batch_size
            self.start = calibration_streams(self.model, self.blocks, text, batch_size)
        for stream in self.start:
            stream.advance(index)
        return [stream.copy() for stream in self.start]

    def open(self, index: int) -> tuple[BlockCandidates, Tensor, Tensor, tuple[Tensor, Tensor]]:
        """A block's candidates, output weights, bias, and the root of its metric."""
        candidates = self.candidates[index]
        outer = outer_of(candidates.block, candidates.neurons, self.device)
        bias = own_bias(candidates.block, candidates.neurons, self.device)
        return candidates, outer, bias, root_of(candidates.metric.to(self.device))

    def module(self, candidates: BlockCandidates, shape: Shape, fitted: Fitted) -> Replacement:
        made = build_replacement(candidates.block, candidates.neurons, shape, fitted)
        return as_stored(made, self.model, candidates.block, self.dtype)


def pack(module: Replacement, stored: torch.dtype) -> dict[str, Tensor]:
    """The weights as they are kept on disk; they were rounded to this dtype before, so nothing is lost."""
    return {name: tensor.detach().to(stored).cpu() for name, tensor in module.state_dict().items()}


def empty_replacement(block: Block, neurons: Neurons | None, shape: Shape) -> Replacement:
    """A module of this shape for this block, in float64 and all zeros."""
    given: dict[str, Any] = {}
    if shape.neurons:
        assert neurons is not None
        given = {"activation": neurons.activation, "gated": neurons.gated, "inner_bias": neurons.biased}
    module = Replacement(
        block.width, shape.rank, block.residual_inside, neurons=shape.neurons, dtype=ACCUMULATION_DTYPE, **given
    )
    module.bypass = block.bypass
    return module


def build_replacement(block: Block, neurons: Neurons | None, shape: Shape, fitted: Fitted) -> Replacement:
    """The module of one fit, in float64."""
    module = empty_replacement(block, neurons, shape)
    with torch.no_grad():
        module.bias.copy_(fitted.bias)
        if shape.rank is None:
            assert fitted.outputs is not None
            module.weight.copy_(fitted.outputs)
        elif shape.rank > 0:
            assert fitted.inputs is not None
            assert fitted.outputs is not None
            # Equal sizes on both sides keep half-precision storage away from its limits.
            sizes = fitted.outputs.norm(dim=0) / fitted.inputs.norm(dim=0).clamp_min(1e-30)
            balance = sizes.sqrt().clamp(1e-6, 1e6)
            module.down.copy_((fitted.inputs * balance).T)
            module.up.copy_(fitted.outputs / balance)
        if shape.neurons:
            assert neurons is not None
            for name, own in neurons.matrices().items():
                getattr(module, name).copy_(own[fitted.kept.to(own.device)])
            module.outer.copy_(fitted.outer.T)
    return module
