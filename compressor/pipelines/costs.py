"""What a compression costs in time: the table of its steps, and how fast this machine does their work.

Every step is so much of a few kinds of work: passes over text, Gram matrices, inverses, tokens written, bytes. How much
is counted from the job, how fast is timed on a sample. Only the table knows what the whole job does: whoever changes
that, changes a row here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from compressor.evaluate.perplexity import evaluate
from compressor.evaluate.speed import DECODED, LEAST_PAIRS, PREFILL_TOKENS, time_call
from compressor.heal.pace import seconds_per_token
from compressor.measure.gradients import GRADIENT_TOKENS
from compressor.measure.moments import ACCUMULATION_DTYPE, add_gram
from compressor.measure.swap import spread_windows
from compressor.models.blocks import Block, find_branches
from compressor.models.branches import BranchIndex
from compressor.models.offload import device_of, disk_weights_of
from compressor.models.writer import SAMPLE_DOCUMENTS, SAMPLE_TOKENS, STEP
from compressor.pipelines.job import Job
from compressor.plan.block_trials import TRIAL_TOKENS
from compressor.plan.candidates import Units
from compressor.plan.moments_store import count_features
from compressor.plan.selection import invert
from compressor.runtime import distributed
from compressor.runtime.context import RunContext
from compressor.runtime.names import SELF
from compressor.text import SPLITS, group_by_name

Kind = Literal["forward", "backward", "gram", "inverse", "decode", "seconds"]

TIMED_ROWS = 512  # of the Gram matrix that is timed
TIMED_FEATURES = 2048  # of the matrices that are timed, at most; larger ones are extrapolated
SAMPLE_SECONDS = 4.0  # that one timed pass may take
SHORT = 32  # tokens of the first pass, which warms the machine up and tells how long a larger one may be
TIMED_CALLS = 2
STORED_BYTES = 200e6  # bytes that are written, hashed and read again per second


@dataclass(frozen=True)
class Work:
    """Work of one kind: between `least` and `most` times the named quantity of the job."""

    kind: Kind
    quantity: str
    least: float
    most: float


@dataclass(frozen=True)
class Step:
    """One step of the job, what the user reads of it, and the names of its seconds in a record's `timings`."""

    name: str
    title: str
    timings: tuple[str, ...]
    work: tuple[Work, ...]
    kept: str | None = None  # what takes the step's place when it is in the cache: see `find_kept`


SPEED_CALLS = 2 * (LEAST_PAIRS + 1)  # of each model's prefill, and of its decoding, when the two are timed
STEPS = (
    Step("load", "load the model", (), (Work("seconds", "opening", 1, 1),)),
    Step("text", "let it write its text", (STEP,), (Work("seconds", "writing", 0.3, 1.2),), kept="text"),
    Step("source", "measure the original", ("source",), (Work("forward", "verification", 1, 1),), kept="source"),
    Step(
        "measure",
        "measure every block",
        ("measure", "survey"),
        (
            Work("forward", "calibration", 1, 1.2),
            Work("gram", "calibration", 1.5, 2.5),
            Work("inverse", "blocks", 11, 18),
        ),
        kept="statistics",
    ),
    Step(
        "gradients",
        "find out what errors cost",
        ("gradients",),
        (Work("backward", "gradients", 1, 1),),
        kept="statistics",
    ),
    Step(
        "agreement",
        "try blocks one at a time",
        ("agreement", "swap", "together"),
        (Work("forward", "replaced_alone", 0.6, 0.9), Work("inverse", "blocks", 1, 3)),
    ),
    Step(
        "search",
        "search for a plan",
        ("search",),
        (Work("forward", "selection", 3, 7), Work("inverse", "blocks", 1, 4)),
    ),
    Step(
        "compensate",
        "fit the plan in order",
        ("compensate",),
        (
            Work("forward", "calibration", 0.3, 1.5),
            Work("gram", "calibration", 0.2, 1),
            Work("inverse", "blocks", 1, 5),
        ),
    ),
    Step("heal", "train towards the original", ("heal", "heal trial"), (Work("seconds", "healing", 1.2, 2.6),)),
    Step("verify", "verify on text kept aside", ("verify",), (Work("forward", "verification", 1.3, 3),)),
    Step("probes", "probe the blocks", ("probe", "cross"), (Work("forward", "probed", 2, 6),)),
    Step("tasks", "score the tasks", ("source *", "compressed *", "block *"), (Work("forward", "requested", 2, 2.4),)),
    Step(
        "texts",
        "compare what both write",
        ("source writes", "compressed writes", "compressed agrees"),
        (Work("decode", "written", 2, 2.3),),
    ),
    Step(
        "write",
        "write the result",
        (),
        (
            Work("forward", "prefilled", SPEED_CALLS, 1.3 * SPEED_CALLS),
            Work("decode", "decoded", SPEED_CALLS, 1.3 * SPEED_CALLS),
            Work("seconds", "storing", 1, 3),
            Work("seconds", "report", 1, 1.5),
        ),
    ),
)
# What several processes share; the rest is done by each of them, or by the first while the others wait.
SHARED = ("calibration", "selection", "verification", "gradients", "replaced_alone", "blocks", "probed", "healing")
REPORT_SECONDS = 4.0  # page and figures


@dataclass(frozen=True)
class Rates:
    """Seconds on this machine, least and most over the timed calls: of one token of a pass, of one token's part of all
    blocks' Gram matrices, of one inverse of each of them, and of one more token for every prompt."""

    forward: tuple[float, float]
    backward: tuple[float, float]
    gram: tuple[float, float]
    inverse: tuple[float, float]
    decode: tuple[float, float]
    seconds: tuple[float, float] = (1.0, 1.0)

    def of(self, kind: Kind) -> tuple[float, float]:
        pair: tuple[float, float] = getattr(self, kind)
        return pair


@dataclass(frozen=True)
class StepCost:
    """The seconds that a step may take. One whose result is in the cache takes none."""

    name: str
    title: str
    least: float
    most: float
    kept: bool

    @property
    def seconds(self) -> float:
        return (self.least + self.most) / 2


def count_quantities(job: Job, requested: int, opening: float, stored: int) -> dict[str, float]:
    """How much there is of everything that the table names.

    `requested` are the tokens of all tasks, `opening` the seconds that loading took, `stored` the bytes of the result.
    """
    text, recipe = job.text, job.recipe
    blocks = find_branches(job.model, job.choices.searched_branches)
    alone = spread_windows(text, TRIAL_TOKENS)[0].windows.numel()
    timed = 0 if disk_weights_of(job.model) is not None else 1  # nothing is timed where weights are on disk
    return {
        "opening": opening,
        "writing": estimate_writing(job),
        "calibration": text.calibration.tokens + text.guard.numel(),
        "selection": text.selection.tokens,
        "verification": text.verification.tokens,
        "gradients": min(GRADIENT_TOKENS, text.held_out.numel()),
        "replaced_alone": len(blocks) * alone,
        "blocks": 1,
        "probed": text.calibration.tokens * (len(recipe.probe or ()) + (job.other is not None)),
        "requested": requested,
        "healing": estimate_healing(job),
        "written": recipe.generate,
        "prefilled": timed * PREFILL_TOKENS,
        "decoded": timed * DECODED,
        "storing": stored / STORED_BYTES,
        "report": REPORT_SECONDS,
    }


def estimate_healing(job: Job) -> float:
    """Seconds that all steps of one healing take, without looks, the trial, and a second plan."""
    if job.recipe.heal is None:
        return 0.0
    return job.recipe.heal * seconds_per_token(job.model, job.text.seq_len, job.context)


def estimate_writing(job: Job) -> float:
    """Seconds that the model would write its own text for, from those of the sample that it wrote for every split."""
    texts = group_by_name(job.recipe.text or [])
    written = sum(SELF in names for names in texts.values()) / max(1, len(texts))
    tokens: int = sum(getattr(job.text, split).tokens for split in SPLITS)
    sampled = len(SPLITS) * SAMPLE_DOCUMENTS * SAMPLE_TOKENS
    return written * tokens / sampled * job.context.progress.seconds.get(STEP, 0.0)


def add_up(
    quantities: Mapping[str, float], rates: Rates, kept: Sequence[str] = (), processes: int = 1
) -> list[StepCost]:
    """The cost of every step, by so many processes."""
    costs = []
    for step in STEPS:
        least = most = 0.0
        done = step.kept in kept
        for work in () if done else step.work:
            low, high = rates.of(work.kind)
            amount = quantities[work.quantity] / (processes if work.quantity in SHARED else 1)
            least, most = least + work.least * amount * low, most + work.most * amount * high
        costs.append(StepCost(step.name, step.title, least, most, done))
    return costs


def step_of(timing: str) -> str | None:
    """The step that a name in a record's `timings` belongs to; the most exact name wins."""
    names = {name: step.name for step in STEPS for name in step.timings}
    if timing in names:
        return names[timing]
    return next((step for name, step in names.items() if name.endswith("*") and timing.startswith(name[:-1])), None)


def time_calls(run: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """The least and the most seconds of a few calls, on every process as on the first; the first call, which may be
    slow, does not count."""
    first = share_time(time_call(run, device))
    times = [first] if first > SAMPLE_SECONDS else [share_time(time_call(run, device)) for _ in range(TIMED_CALLS)]
    return min(times), max(times)


def share_time(seconds: float) -> float:
    """The seconds that the first process measured: what follows from them must be the same on all."""
    return float(distributed.broadcast_value(seconds))


def time_forward(model: Any, windows: Tensor, context: RunContext) -> tuple[float, float]:
    """Seconds per token of a pass over windows of the real length, in batches of the real size if that is short."""
    device = device_of(model)
    short = windows[:1, :SHORT]
    per_token = time_calls(lambda: evaluate(model, short, context), device)[1] / short.numel()
    tokens = max(SHORT, int(SAMPLE_SECONDS / (1 + TIMED_CALLS) / per_token))
    length = min(windows.shape[1], tokens)
    batch = windows[: max(1, min(context.batch_size, tokens // length)), :length]
    if batch.numel() <= short.numel():
        return per_token, per_token
    least, most = time_calls(lambda: evaluate(model, batch, context), device)
    return least / batch.numel(), most / batch.numel()


def time_decoding(model: Any, prompts: Sequence[Tensor]) -> tuple[float, float]:
    """Seconds of one more token for every prompt, as for a single token that all of them begin with."""
    if not prompts:
        return 0.0, 0.0
    device = device_of(model)
    tokens = torch.stack([prompt[:1] for prompt in prompts]).to(device)

    def write() -> None:
        with torch.no_grad():
            model(input_ids=tokens, use_cache=False)

    return time_calls(write, device)


def time_algebra(
    blocks: Sequence[Block], units: Mapping[BranchIndex, Units | None], device: torch.device
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Seconds per token of all blocks' Gram matrices, and of one inverse of each of them."""
    sizes = [count_features(block, units[block.index]) for block in blocks]
    features = min(max(sizes), TIMED_FEATURES)
    rows = torch.randn(TIMED_ROWS, features, generator=torch.Generator().manual_seed(0)).to(device)
    gram = (rows.T @ rows).to(ACCUMULATION_DTYPE)
    gram.diagonal().add_(TIMED_ROWS)
    products = time_calls(lambda: add_gram(gram.clone(), rows), device)
    inverses = time_calls(lambda: invert(gram, 0.0), device)
    squares, cubes = (sum((size / features) ** power for size in sizes) for power in (2, 3))
    least, most = (squares * seconds / TIMED_ROWS for seconds in products)
    return (least, most), (cubes * inverses[0], cubes * inverses[1])


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self.began = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.began
