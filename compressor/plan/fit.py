"""Fit replacements: all at once from the moments, or in order of depth, so that each compensates those before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from compressor.measure.moments import ACCUMULATION_DTYPE, Moments
from compressor.measure.profile import moments_device
from compressor.modeling_compressor import SCHEMA_VERSION, KeptHeads, Replacement, restore, swap
from compressor.models.blocks import ATTENTION_RETURNS, Block
from compressor.models.branches import BranchIndex, layer_of
from compressor.models.heads import Heads
from compressor.models.neurons import Neurons
from compressor.models.residual import FITTING, GUARD, HELD_OUT, measure_stream_gain
from compressor.models.source import stored_dtype
from compressor.patch.tree import as_stored
from compressor.plan.candidates import (
    BlockCandidates,
    Units,
    fit_shape,
    is_biased,
    kept_sets,
    moments_for,
    output_weights,
)
from compressor.plan.moments_store import MomentsStore, collect_moments, output_bias
from compressor.plan.selection import Fitted, choose_shrinkage, factor_metric, scale_moments
from compressor.plan.shapes import Shape, Shapes
from compressor.runtime.errors import NumericsError

# Beside a fit's weights on disk: how its layer adds it to the stream (0 where it does more), and the kept heads.
GAIN, KEPT = "stream_gain", "kept_heads"

Module = Replacement | KeptHeads


class Fitter:
    """Fits the modules of any plan.

    Weights are rounded to the dtype of the checkpoint at once, so that what is measured holds for the saved model.
    """

    def __init__(self, store: MomentsStore, candidates: Mapping[BranchIndex, BlockCandidates]) -> None:
        self.store, self.candidates = store, candidates
        self.model: Any = store.model
        self.blocks, self.progress = store.blocks, store.progress
        self.dtype = stored_dtype(self.model)
        self.device = moments_device(self.model)
        # Those of the last plan: the next one shares most of them.
        self.last_fits: dict[tuple[BranchIndex, Shape], Module] = {}
        self.not_added: set[BranchIndex] = (
            set()
        )  # blocks whose layers do more with their output than to add it to the stream

    def fit_at_once(self, shapes: Shapes) -> dict[BranchIndex, Module]:
        """Fit every block on the inputs that it has in the original model. No text is run."""
        fits: dict[BranchIndex, Module] = {}
        for index, shape in sorted(shapes.items(), key=lambda item: item[0]):
            module = self.last_fits.get((index, shape))
            if module is None:
                candidates, outer, bias, root = self.prepare_block(index)
                moments = moments_for(self.store.moments(index), candidates.block, candidates.units, shape)
                fitted = fit_shape(moments, bias, outer, shape, candidates.orders, root, candidates.ridges)
                module = self.make_module(candidates, shape, fitted)
            fits[index] = module
        self.last_fits = {(index, shapes[index]): module for index, module in fits.items()}
        return fits

    def fit_in_order(self, shapes: Shapes) -> dict[BranchIndex, Module]:
        """Fit every block on the inputs that it gets when those before it are replaced, so that it compensates them.

        The target lies between the original block's output and the residual stream of the original model. Where, and
        how far weights are shrunk to the original ones, is chosen on held-out rows, block by block. A block that was
        fitted before, after the same replacements, is taken from disk. The model is left as it was.
        """
        # Keys depend on the model, so they are made before a block is replaced.
        keys = {index: self.key(shapes, index) for index in sorted(shapes)}
        fits, not_added = self.load_fits(shapes, keys)
        rest = [self.blocks[index] for index in sorted(shapes)[len(fits) :]]
        if fits:
            self.progress.note(f"compensate: {len(fits)} of {len(shapes)} blocks fitted before")
        if not rest:
            self.say_not_added(not_added)
            return fits
        states = self.store.states
        current_streams = states.open()
        for part, current in current_streams.items():
            states.move(part, current, layer_of(min(shapes)))
        original_streams = {part: stream.copy() for part, stream in current_streams.items()}
        for part, original in original_streams.items():
            states.move(part, original, rest[0].layer + 1)  # through this layer while it is the original one
        original_modules = swap(self.model, {self.blocks[index].path: module for index, module in fits.items()})
        try:
            for block in self.progress.track("compensate", rest, len(rest), f"{len(rest)} blocks"):
                candidates, outer, bias, root = self.prepare_block(block.index)
                shape = shapes[block.index]
                moments: dict[str, Moments] = {}
                gain = None
                for part, current in current_streams.items():
                    original = original_streams[part]
                    current.advance(block.layer)
                    states.move(part, original, block.layer + 1)
                    gain = measure_stream_gain(self.model, block, current) if part == FITTING else gain
                    goal = original.states if gain else None
                    found = collect_moments(
                        self.model,
                        block,
                        candidates.units,
                        current,
                        self.device,
                        goal,
                        gain or 1.0,
                        inputs=shape.rank != 0,
                    )
                    if not all(values.isfinite().all() for values in (found.xx, found.xy)):
                        raise NumericsError(f"the activations overflow at block {block.index}; try --dtype float32")
                    moments[part] = moments_for(found, block, candidates.units, shape)
                fit = moments[FITTING]
                fit.add(moments.pop(GUARD))
                columns = candidates.units.columns if candidates.units else 1
                kept = kept_sets(shape, candidates.orders, self.device, columns)[0]
                scaled = scale_moments(fit, outer)
                shrinkage = choose_shrinkage(scaled, moments[HELD_OUT], outer, kept, shape.rank, root)
                del scaled
                fit.add(moments.pop(HELD_OUT))  # the strength is chosen: the weights are fitted on all rows
                fitted = fit_shape(fit, bias, outer, shape, candidates.orders, root, candidates.ridges, shrinkage)
                fits[block.index] = self.make_module(candidates, shape, fitted)
                weights = pack_weights(fits[block.index], self.dtype) | {GAIN: torch.tensor(gain or 0.0)}
                self.store.cache.keep(keys[block.index], weights)
                if gain is None:
                    not_added.append(block.index)
                original_modules |= swap(self.model, {block.path: fits[block.index]})
        finally:
            restore(self.model, original_modules)
        self.say_not_added(not_added)
        return fits

    def say_not_added(self, indices: Sequence[BranchIndex]) -> None:
        """Say once of each block that it was fitted to its own output only, and why."""
        new = [index for index in indices if index not in self.not_added]
        self.not_added.update(new)
        if new:
            words = "block" if len(new) == 1 else "blocks"
            self.progress.say(
                f"compensate: {words} {', '.join(map(str, new))} cannot make up for the blocks before: the layer does "
                "more with the block's output than to add it to the residual stream, such as a norm"
            )

    def key(self, shapes: Shapes, index: BranchIndex) -> dict[str, Any]:
        """All that a block's compensated fit depends on: its shape and those of the replacements before it."""
        before = {str(i): str(shapes[i]) for i in sorted(shapes) if i <= index}
        return self.store.key("compensated fit", self.blocks[index], shapes=before, layout=SCHEMA_VERSION)

    def load_fits(
        self, shapes: Shapes, keys: Mapping[BranchIndex, Mapping[str, Any]]
    ) -> tuple[dict[BranchIndex, Module], list[BranchIndex]]:
        """The compensated fits that are on disk, of the first blocks of a plan up to one whose fit is not.

        Also the blocks among them that could not compensate.
        """
        fits: dict[BranchIndex, Module] = {}
        not_added: list[BranchIndex] = []
        for index, key in keys.items():
            weights = self.store.cache.find(key)
            if weights is None:
                break
            if not weights.pop(GAIN):
                not_added.append(index)
            kept = weights.pop(KEPT, None)
            module = empty_replacement(self.blocks[index], self.candidates[index].units, shapes[index], kept)
            module.load_state_dict(weights)
            fits[index] = as_stored(module, self.model, self.blocks[index], self.dtype)
        return fits, not_added

    def prepare_block(self, index: BranchIndex) -> tuple[BlockCandidates, Tensor, Tensor, tuple[Tensor, Tensor]]:
        """A block's candidates, output weights, bias, and the root of its metric."""
        candidates = self.candidates[index]
        outer = output_weights(candidates.block, candidates.units, self.device)
        bias = output_bias(candidates.block, candidates.units, self.device)
        return candidates, outer, bias, factor_metric(candidates.metric.to(self.device))

    def make_module(self, candidates: BlockCandidates, shape: Shape, fitted: Fitted) -> Module:
        """The module of a fit, rounded. NumericsError where a weight is beyond the dtype of the checkpoint."""
        module = build_replacement(candidates.block, candidates.units, shape, fitted)
        module = as_stored(module, self.model, candidates.block, self.dtype)
        if not all(parameter.isfinite().all() for parameter in module.parameters()):
            dtype = str(self.dtype).removeprefix("torch.")
            raise NumericsError(
                f"block {candidates.block.index} ({shape}) has weights that overflow in {dtype}; make a plan with "
                "another shape"
            )
        return module


def pack_weights(module: Module, stored: torch.dtype) -> dict[str, Tensor]:
    """The weights in the dtype of the checkpoint, and the kept heads, for the cache. The weights are rounded to that
    dtype already, so nothing is lost."""
    packed = {name: tensor.detach().to(stored).cpu() for name, tensor in module.state_dict().items()}
    return packed | ({KEPT: torch.tensor(module.heads)} if isinstance(module, KeptHeads) else {})


def empty_replacement(block: Block, units: Units | None, shape: Shape, kept: Tensor | None = None) -> Module:
    """A module of this shape for this block, in float64, all that is fitted zero; `kept` are the units of a head."""
    if shape.neurons and isinstance(units, Heads):
        assert kept is not None
        assert shape.rank is not None
        return units.keep(kept, shape.rank, dtype=ACCUMULATION_DTYPE)
    options: dict[str, Any] = {}
    if shape.neurons:
        assert isinstance(units, Neurons)
        options = {"activation": units.activation, "gated": units.gated, "inner_bias": units.biased}
    if block.is_attention:
        options = {"returns": ATTENTION_RETURNS, "biased": is_biased(block, units, shape)}
    module = Replacement(
        block.width, shape.rank, block.residual_inside, neurons=shape.neurons, dtype=ACCUMULATION_DTYPE, **options
    )
    module.bypass = block.bypass
    return module


@torch.no_grad()
def build_replacement(block: Block, units: Units | None, shape: Shape, fitted: Fitted) -> Module:
    """The module of one fit, in float64."""
    kept = fitted.kept
    if isinstance(units, Heads):
        kept = kept.reshape(-1, units.columns)[:, 0] // units.columns
    module = empty_replacement(block, units, shape, kept.cpu())
    if is_biased(block, units, shape):
        module.output_bias.copy_(fitted.bias)
    if shape.rank is None:
        assert fitted.outputs is not None
        assert isinstance(module, Replacement)
        module.linear.weight.copy_(fitted.outputs)
    elif shape.rank > 0:
        assert fitted.inputs is not None
        assert fitted.outputs is not None
        # Factors of equal size stay within the range of half precision.
        sizes = fitted.outputs.norm(dim=0) / fitted.inputs.norm(dim=0).clamp_min(1e-30)
        balance = sizes.sqrt().clamp(1e-6, 1e6)
        module.down.weight.copy_((fitted.inputs * balance).T)
        module.up.weight.copy_(fitted.outputs / balance)
    if isinstance(module, KeptHeads):
        module.output_projection.weight.copy_(fitted.outer.T)
    elif isinstance(units, Neurons) and shape.neurons:
        for name, matrix in units.matrices().items():
            part, _, kind = name.partition("_")  # such as inner, or inner_bias
            module.get_parameter(f"{part}.{kind or 'weight'}").copy_(matrix[kept.to(matrix.device)])
        module.outer.weight.copy_(fitted.outer.T)
    return module
