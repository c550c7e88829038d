"""What the linearity report says of a model beyond its profile: trials of blocks, probes, a second model, verdicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compressor.measure.gradients import Damage
from compressor.measure.probes import (
    Bilinear,
    Crossing,
    Sample,
    Trained,
    cross,
    draw_windows,
    probe_bilinear,
    probe_trained,
    sample_rows,
)
from compressor.measure.profile import Profile
from compressor.measure.swap import SWAPPED_BELOW, Sweep, Sweeper
from compressor.measure.verdicts import SAFE_NATS, Verdict, judge_all, judge_texts
from compressor.models.blocks import Block
from compressor.models.branches import BranchIndex
from compressor.models.source import identify
from compressor.runtime.cache import Tensors, cache_key
from compressor.runtime.context import RunContext
from compressor.text import Text


@dataclass(frozen=True)
class StudyOptions:
    """What to measure in addition to the profile. With `swap` None, blocks are swapped in small models."""

    swap: bool | None = None
    swap_tokens: int = 4096
    probes: Sequence[str] = ()
    probe_steps: int = 1000
    other: tuple[Any, Text] | None = None  # another model of the same width, and its text


@dataclass(frozen=True)
class Study:
    """What was measured of every block in addition to its profile, and its verdict. What was not asked for is empty."""

    verdicts: dict[BranchIndex, Verdict]
    damages: dict[BranchIndex, Damage]
    sweep: Sweep | None = None
    bilinear: dict[BranchIndex, Bilinear] = field(default_factory=dict)
    trained: dict[BranchIndex, Trained] = field(default_factory=dict)
    probed_rows: int = 0
    sampled: bool = False  # whether probes ran on a sample of the rows, for lack of memory
    crossings: list[Crossing] = field(default_factory=list)
    other: Any = None  # the second model, with which inputs were exchanged


def study(
    model: Any,
    profile: Profile,
    damages: Mapping[BranchIndex, Damage],
    text: Text,
    options: StudyOptions,
    context: RunContext,
    limits: Mapping[str, float] | None = None,
) -> Study:
    """Replace every block on trial (if asked for), judge the blocks, and run the probes that are asked for.

    `limits` are the nats that a safe block may cost each text.
    """
    limits = limits or dict.fromkeys(text.counts, SAFE_NATS)
    swap = options.swap
    if swap is None:
        swap = sum(p.numel() for p in model.parameters()) < SWAPPED_BELOW
    sweeper = Sweeper(model, profile, text, options.swap_tokens, context) if swap else None
    alone, seconds, whole_seconds = sweeper.alone() if sweeper else ({}, 0.0, 0.0)
    verdicts = judge_all(profile, damages, min(limits.values()), {})
    sweep = None
    if sweeper:
        verdicts |= judge_texts(profile, damages, limits, sweeper.by_text)
        overflow = Verdict("unsafe", "its linear map overflows in the dtype that the model computes in")
        verdicts |= dict.fromkeys(sweeper.overflowing, overflow)
    if sweeper and alone:
        usable = [p for p in profile.branches if verdicts[p.block.index].word != "unsafe"]
        usable.sort(key=lambda p: alone[p.block.index].delta)
        sweep = Sweep(alone, sweeper.together(usable), seconds, whole_seconds)
    crossings = cross(model, text, *options.other, context) if options.other else []
    other = options.other[0] if options.other else None
    ffns = [p.block for p in profile.blocks]
    probed = run_probes(model, ffns, text, options, context) if options.probes and ffns else {}
    return Study(verdicts, dict(damages), sweep, crossings=crossings, other=other, **probed)


def run_probes(
    model: Any, blocks: list[Block], text: Text, options: StudyOptions, context: RunContext
) -> dict[str, Any]:
    """The probes of every block, each cached as soon as it is done; one pass over the rows serves all of them."""
    cache, progress = context.cache, context.progress
    fitting, held_out, sampled = draw_windows(text, blocks[0].width, progress, context.seed)
    rows = fitting.numel() + held_out.numel()
    kinds: dict[str, Callable[[Sample], Bilinear | Trained]] = {
        "bilinear": probe_bilinear,
        "trained": partial(probe_trained, steps=options.probe_steps, seed=context.seed),
    }
    more = {"seq_len": text.seq_len, "batch": context.batch_size, "seed": context.seed, "rows": rows}
    key = cache_key("probe", identify(model), text.calibration_sha256, **more)

    def probe_key(kind: str, block: Block) -> dict[str, Any]:
        steps = options.probe_steps if kind == "trained" else None
        return {**key, "probe": kind, "steps": steps, "block": block.path}

    def samples_of() -> Iterator[tuple[Block, Sample]]:
        return sample_rows(model, blocks, fitting, held_out, context.batch_size)

    measured: dict[str, dict[BranchIndex, Any]] = {kind: {} for kind in options.probes}
    samples = samples_of()
    known = all(cache.has(probe_key(kind, block)) for kind in options.probes for block in blocks)
    if known:
        progress.note("probes: measured before")
    for block in progress.track("probe", blocks, len(blocks)):
        sample = None if known else next(samples)[1]
        for kind in options.probes:

            def measure(kind: str = kind, sample: Sample | None = sample, block: Block = block) -> Tensors:
                block_sample = sample or next(s for b, s in samples_of() if b is block)
                return {"probe": pack_probe(kinds[kind](block_sample))}

            measured[kind][block.index] = unpack_probe(kind, cache.get("", probe_key(kind, block), measure)["probe"])
    return {**measured, "probed_rows": rows, "sampled": sampled}


def pack_probe(probe: Bilinear | Trained) -> Tensor:
    """The figures of a probe as one row for the cache."""
    flat = [x for value in astuple(probe) for x in (value if isinstance(value, tuple) else (value,))]
    return torch.tensor(flat, dtype=torch.float64)


def unpack_probe(kind: str, figures: Tensor) -> Bilinear | Trained:
    if kind == "bilinear":
        r2_lin, r2_poly, iterations, converged = figures.tolist()
        return Bilinear(r2_lin, r2_poly, int(iterations), bool(converged))
    r2_lin, r2, *rest = figures.tolist()
    half = len(rest) // 2
    return Trained(r2_lin, r2, tuple(map(int, rest[:half])), tuple(rest[half:]))
