"""Fit replacements in order of depth, each on the inputs it will really get: everything before it already replaced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from compressor.blocks import Block, Rows, watch
from compressor.measuring import moments_device, stream_weights
from compressor.modeling_compressor import Replacement, restore, swap
from compressor.moments import ACCUMULATION_DTYPE, Moments
from compressor.progress import Progress
from compressor.regression import RankLadder, choose_ridge, decompose, reduce_rank
from compressor.stream import Stream
from compressor.text import Text

Ranks = Mapping[int, int | None]  # block index → rank of its replacement; None is a full linear map, 0 the bias alone


def replacement_parameters(width: int, rank: int | None) -> int:
    return width + (width * width if rank is None else 2 * width * rank)


class Calibration:
    """The calibration text inside the unmodified model, kept where the last fit began, so that fits share a prefix."""

    def __init__(self, model: Any, blocks: list[Block], text: Text, batch_size: int) -> None:
        self.model = model
        self.blocks = blocks
        self.start = [Stream(model, blocks, w, batch_size) for w in (text.fitting, text.held_out)]
        self.cached = [stream.copy() for stream in self.start]

    def at(self, index: int) -> tuple[Stream, Stream]:
        """The fitting and the held-out stream before layer `index`; the model must be unmodified up to there."""
        if self.cached[0].position > index:
            self.cached = [stream.copy() for stream in self.start]
        for stream in self.cached:
            stream.advance(index)
        fitting, held_out = (stream.copy() for stream in self.cached)
        return fitting, held_out


def fit_ladder(fit: Moments, held: Moments, metric: Tensor | None) -> RankLadder:
    """All ranks of a block's map, its ridge chosen on the held-out rows."""
    spectrum = decompose(fit.xx)
    _, full = choose_ridge(fit, spectrum, held)
    return reduce_rank(full, spectrum, metric)


def build_replacement(ladder: RankLadder, rank: int | None, block: Block) -> Replacement:
    """The module of one rank, in float64."""
    module = Replacement(block.width, rank, block.residual_inside, dtype=ACCUMULATION_DTYPE)
    module.bypass = block.bypass
    chosen = ladder.at(ladder.inputs.shape[1] if rank is None else rank)
    with torch.no_grad():
        module.bias.copy_(chosen.bias)
        if rank is None:
            module.weight.copy_(chosen.weight.T)
        elif rank > 0:
            inputs, outputs = ladder.inputs[:, :rank], ladder.outputs[:, :rank]
            # Equal sizes on both sides keep half-precision storage away from its limits.
            balance = (outputs.norm(dim=0) / inputs.norm(dim=0).clamp_min(1e-30)).sqrt().clamp(1e-6, 1e6)
            module.down.copy_((inputs * balance).T)
            module.up.copy_(outputs / balance)
    return module


def fit(
    calibration: Calibration,
    ranks: Ranks,
    metrics: Mapping[int, Tensor],
    dtype: torch.dtype,
    progress: Progress,
) -> dict[int, Replacement]:
    """Fit the replacement of every block in `ranks`; the model is left as it was.

    `metrics` weighs the output directions of low-rank maps. Weights are rounded to the storage `dtype` at once, so that
    everything measured later holds for the stored model.
    """
    model = calibration.model
    device = moments_device(model)
    chosen = [block for block in calibration.blocks if block.index in ranks]
    done: dict[int, Replacement] = {}
    originals: dict[str, torch.nn.Module] = {}
    streams = calibration.at(chosen[0].index) if chosen else ()
    try:
        for block in progress.track("fit", chosen, len(chosen), f"{len(chosen)} blocks"):
            both = []
            for stream in streams:
                stream.advance(block.index)
                moments = Moments.zeros(block.width, block.width, device, whole_yy=False)

                def add(_: Block, rows: Rows, moments: Moments = moments) -> None:
                    weights = stream_weights(rows.h).to(device)
                    moments.add(Moments.of(rows.x.to(device), rows.y.to(device), weights, whole_yy=False))

                with watch(model, [block], add):
                    stream.run()
                both.append(moments)
            ladder = fit_ladder(both[0], both[1], metrics.get(block.index))
            module = build_replacement(ladder, ranks[block.index], block).to(dtype)
            reference = next(model.get_submodule(block.path).parameters())
            done[block.index] = module.to(device=reference.device, dtype=reference.dtype)
            originals |= swap(model, {block.path: done[block.index]})
    finally:
        restore(model, originals)
    return done
