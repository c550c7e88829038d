"""All that the linearity report tells of a model beyond its profile: trials, probes, a second model; and verdicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from compressor.measure.profile import BlockProfile, Profile
from compressor.measure.swap import MODEST, Sweep, Sweeper
from compressor.measure.verdicts import SAFE_NATS, Verdict, judge
from compressor.models.blocks import Block
from compressor.runtime.cache import Cache
from compressor.runtime.progress import Progress
from compressor.text import Text


@dataclass(frozen=True)
class Wanted:
    """What to measure beside the profile. `swap` None: when the model is of modest size."""

    swap: bool | None = None
    swap_tokens: int = 4096
    probes: Sequence[str] = ()
    probe_steps: int = 1000
    other: tuple[Any, Text] | None = None  # another model of the same width, and its text


@dataclass(frozen=True)
class Study:
    """What was found, by block. What was not asked for is empty."""

    verdicts: dict[int, Verdict]
    damages: dict[int, Damage]
    sweep: Sweep | None = None
    bilinear: dict[int, Bilinear] = field(default_factory=dict)
    trained: dict[int, Trained] = field(default_factory=dict)
    probed_rows: int = 0
    sampled: bool = False  # there were more rows than memory for them
    crossings: list[Crossing] = field(default_factory=list)
    other: Any = None  # the model that it was crossed with


def study(
    model: Any,
    profile: Profile,
    damages: Mapping[int, Damage],
    text: Text,
    wanted: Wanted,
    *,
    key: Mapping[str, Any],
    limit: float = SAFE_NATS,
    batch_size: int = 8,
    seed: int = 0,
    cache: Cache,
    progress: Progress,
) -> Study:
    """Measure what is wanted; `key` is what measurements on the calibration windows depend on."""
    how: dict[str, Any] = {"batch_size": batch_size, "seed": seed, "progress": progress}
    sweep, verdicts = None, {p.block.index: judge(p, damages[p.block.index], limit) for p in profile.blocks}
    if wanted.swap if wanted.swap is not None else sum(p.numel() for p in model.parameters()) < MODEST:
        sweeper = Sweeper(model, profile, text, tokens=wanted.swap_tokens, cache=cache, **how)
        alone, seconds, whole = sweeper.alone()
        verdicts = {i: judge(p, damages[i], limit, alone[i]) for p in profile.blocks for i in [p.block.index]}
        touchable = [p for p in profile.blocks if verdicts[p.block.index].word != "unsafe"]
        touchable.sort(key=lambda p: alone[p.block.index].delta)
        sweep = Sweep(alone, sweeper.together(touchable), seconds, whole)
    probes = run_probes(model, profile.blocks, text, wanted, key, batch_size, seed, cache, progress)
    crossings = cross(model, text, *wanted.other, **how) if wanted.other else []
    other = wanted.other[0] if wanted.other else None
    return Study(verdicts, dict(damages), sweep, crossings=crossings, other=other, **probes)


def run_probes(
    model: Any,
    profiles: list[BlockProfile],
    text: Text,
    wanted: Wanted,
    key: Mapping[str, Any],
    batch_size: int,
    seed: int,
    cache: Cache,
    progress: Progress,
) -> dict[str, Any]:
    """The wanted probes of every block, each kept as soon as it is done; one pass over the rows for all of them."""
    if not wanted.probes:
        return {}
    blocks = [p.block for p in profiles]
    fitting, held_out, sampled = draw_windows(text, blocks[0].width, progress, seed)
    rows = fitting.numel() + held_out.numel()
    kinds: dict[str, Callable[[Sample], Bilinear | Trained]] = {
        "bilinear": probe_bilinear,
        "trained": partial(probe_trained, steps=wanted.probe_steps, seed=seed),
    }

    def place(kind: str, block: Block) -> dict[str, Any]:
        steps = wanted.probe_steps if kind == "trained" else None
        return {**key, "probe": kind, "rows": rows, "steps": steps, "block": block.path}

    found: dict[str, dict[int, Any]] = {kind: {} for kind in wanted.probes}
    samples = iter(sample_rows(model, blocks, fitting, held_out, batch_size))
    known = all(cache.has(place(kind, block)) for kind in wanted.probes for block in blocks)
    if known:
        progress.say("probes: measured before")
    for block in progress.track("probe", blocks, len(blocks)):
        sample = None if known else next(samples)[1]
        for kind in wanted.probes:

            def measure(kind: str = kind, sample: Sample | None = sample, block: Block = block) -> dict[str, Tensor]:
                rows = sample or next(
                    s for b, s in sample_rows(model, blocks, fitting, held_out, batch_size) if b is block
                )
                return {"found": pack(kinds[kind](rows))}

            found[kind][block.index] = unpack(kind, cache.get("", place(kind, block), measure)["found"])
    return {**found, "probed_rows": rows, "sampled": sampled}


def pack(found: Bilinear | Trained) -> Tensor:
    flat = [x for value in astuple(found) for x in (value if isinstance(value, tuple) else (value,))]
    return torch.tensor(flat, dtype=torch.float64)


def unpack(kind: str, kept: Tensor) -> Bilinear | Trained:
    if kind == "bilinear":
        r2_lin, r2_poly, iterations, converged = kept.tolist()
        return Bilinear(r2_lin, r2_poly, int(iterations), bool(converged))
    r2_lin, r2, *rest = kept.tolist()
    half = len(rest) // 2
    return Trained(r2_lin, r2, tuple(map(int, rest[:half])), tuple(rest[half:]))
