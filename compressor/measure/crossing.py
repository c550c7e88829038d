"""Learned or architectural? Blocks of two models of the same width, each on its own inputs, on the other's, and on
inputs whitened to unit covariance.

If a block is as linear on foreign and on white inputs as on its own, linearity is in its weights or its architecture;
an untrained model of the same configuration tells those two apart. If it is not, its inputs bring it about.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compressor.measure.moments import ACCUMULATION_DTYPE, Moments
from compressor.measure.probes import Sample, draw_windows, held_out_r2, moments_of, sample_rows
from compressor.measure.regression import decompose
from compressor.models.blocks import Block, find_blocks, placing, run_block
from compressor.runtime.errors import InputError
from compressor.runtime.progress import Progress
from compressor.text import Text

ROWS = 4096  # run through a block at a time


@dataclass(frozen=True)
class Crossing:
    """Held-out R²_lin of this model's block and of the other's, by the inputs that they were given."""

    index: int
    other_index: int
    own: float  # this model's block on its own inputs
    own_on_other: float  # on the other model's inputs
    own_on_white: float  # on its own inputs, whitened
    other: float  # the other model's block on its own inputs
    other_on_own: float  # on this model's inputs
    other_on_white: float  # on this model's inputs, whitened


def refuse_widths(model: Any, other: Any, name: str, other_name: str) -> None:
    """Rows of one width cannot enter blocks of another."""
    widths = [find_blocks(each)[0].width for each in (model, other)]
    if widths[0] != widths[1]:
        raise InputError(
            f"--cross {other_name} has blocks of width {widths[1]}, {name} of width {widths[0]}: inputs cannot be "
            f"exchanged; name a model of width {widths[0]}"
        )


def whitener(moments: Moments) -> Tensor:
    """The symmetric matrix that makes the covariance of these inputs the identity, where they vary at all."""
    spectrum = decompose(moments.xx)
    vectors = spectrum.vectors[:, : spectrum.rank]
    return vectors * (spectrum.values[: spectrum.rank] / moments.weight).rsqrt() @ vectors.T


@torch.no_grad()
def linearity_on(model: Any, block: Block, x: Tensor, held_x: Tensor) -> float:
    """R²_lin of a block on these rows."""

    def outputs(rows: Tensor) -> Tensor:
        place = placing(model, block)
        parts = [run_block(model, block, some.to(**place)) for some in torch.split(rows, ROWS)]
        return torch.cat(parts).to(rows)

    y = outputs(x)
    if not y.isfinite().all():
        raise InputError(f"block {block.index} ({block.path}) overflows on foreign inputs; try --dtype float32")
    return held_out_r2(moments_of(x, y), moments_of(held_x, outputs(held_x)))[0]


def cross(
    model: Any,
    text: Text,
    other: Any,
    other_text: Text,
    *,
    batch_size: int = 8,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[Crossing]:
    """Every block of the model beside the block of the other at the same relative depth."""
    progress = progress or Progress()
    blocks, others = find_blocks(model), find_blocks(other)
    partners = [others[round(k * (len(others) - 1) / max(1, len(blocks) - 1))] for k in range(len(blocks))]
    fitting, held_out, _ = draw_windows(text, 2 * blocks[0].width, progress, seed)  # two models' rows at once
    other_fitting, other_held_out, _ = draw_windows(other_text, 2 * blocks[0].width, Progress(), seed)
    foreign = sample_rows(other, others, other_fitting, other_held_out, batch_size)
    theirs: tuple[Block, Sample] = next(foreign)
    found = []
    rows = sample_rows(model, blocks, fitting, held_out, batch_size)
    for (block, own), partner in zip(progress.track("cross", rows, len(blocks)), partners, strict=True):
        while theirs[0].index < partner.index:
            theirs = next(foreign)
        moments = moments_of(own.x, own.x[:, :0])
        matrix = whitener(moments)
        white, held_white = (((x.to(ACCUMULATION_DTYPE) - moments.mean_x) @ matrix).to(x) for x in (own.x, own.held_x))
        sample = theirs[1]
        found.append(
            Crossing(
                index=block.index,
                other_index=partner.index,
                own=linearity_on(model, block, own.x, own.held_x),
                own_on_other=linearity_on(model, block, sample.x, sample.held_x),
                own_on_white=linearity_on(model, block, white, held_white),
                other=linearity_on(other, partner, sample.x, sample.held_x),
                other_on_own=linearity_on(other, partner, own.x, own.held_x),
                other_on_white=linearity_on(other, partner, white, held_white),
            )
        )
    return found
