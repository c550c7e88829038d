"""`compress MODEL --dry-run`: what would be done, how long it would take here, and how small the model may get.

A few windows are run forwards and backwards, a Gram matrix and an inverse are timed, and the rest is counted. Nothing
is written, not even to the cache. What a real run would refuse is refused in the same words.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import psutil
from torch import Tensor

from compressor.evaluate.budget import compute_limits
from compressor.evaluate.evaluator import Evaluator
from compressor.evaluate.perplexity import LARGEST_LOSS, Losses, evaluate, limit_batch_size
from compressor.evaluate.tasks import count_request_tokens, longest_sequence
from compressor.measure.profile import moments_device
from compressor.measure.swap import spread_windows
from compressor.models.blocks import Block, find_branches
from compressor.models.branches import BranchIndex
from compressor.models.neurons import Neurons
from compressor.models.source import identify, stored_dtype
from compressor.models.writer import Writer
from compressor.patch.checkpoint import count_parameters
from compressor.pipelines.costs import (
    Rates,
    StepCost,
    Stopwatch,
    add_up,
    count_quantities,
    share_time,
    time_algebra,
    time_decoding,
    time_forward,
)
from compressor.pipelines.describe import describe_budget, describe_source, describe_text
from compressor.pipelines.job import REPORT_BYTES, Job, open_job, require_room, size_target
from compressor.pipelines.recipe import Recipe
from compressor.plan.candidates import Units
from compressor.plan.estimate import estimate_nats, estimate_size, survey_roughly
from compressor.plan.moments_store import (
    MomentsStore,
    choose_units,
    disk_bytes,
    memory_bytes,
    refuse_short_disk,
)
from compressor.report.dry_run_record import (
    BlockSizes,
    DryRunRecord,
    Resources,
    SecondsRange,
    SizeEstimate,
    StepEstimate,
)
from compressor.runtime import distributed
from compressor.runtime.cache import Cache
from compressor.runtime.context import RunContext
from compressor.runtime.names import RECORD
from compressor.runtime.outputs import refuse_output
from compressor.runtime.resources import available_memory, free_disk
from compressor.text import SPLITS

SAMPLE_TOKENS = 1024
SAMPLE_SECONDS = 15.0  # that the passes over the sample may take
PASSES = 4  # forward passes that take as long as the perplexity of the sample and its gradients
LATER_IMPORTS = 200 * 2**20  # bytes of the libraries that tasks and the report need
STATES_AT_ONCE = 4  # residual streams of the calibration text in memory


def run(recipe: Recipe, context: RunContext) -> DryRunRecord:
    """What a job would do and take. `context.cache` is one that is not touched."""
    watch = Stopwatch()
    recipe.require_budget()
    out = None if recipe.out is None else refuse_output(recipe.out, recipe.overwrite, recipe.model, RECORD)
    untouched = replace(context, cache=Cache(None, context.progress))
    job = open_job(recipe, untouched, with_choices=True, sample_only=True)
    if out is not None:
        require_room(job, out)
    opening = watch.seconds
    evaluator = job.evaluator()
    blocks = find_branches(job.model, job.choices.searched_branches)
    with_units = {block.index for block in blocks if job.choices.keeps_neurons(block.index)}
    units = choose_units(job.model, blocks, job.text, job.context.progress, with_units)
    store = MomentsStore(job.model, job.text, units, context.cache, job.context)
    refuse_short_disk(store)
    kept = find_kept(store, evaluator)
    if is_written(job, context.cache):
        kept.append("text")
    size, rates, baselines = sample(job, evaluator, blocks, units)
    stored = count_parameters(job.model) * stored_dtype(job.model).itemsize
    quantities = count_quantities(job, count_requested(job), opening, stored)
    costs = add_up(quantities, rates, kept, distributed.size())
    return DryRunRecord(
        dry_run=True,
        source=describe_source(job.model),
        parameters=count_parameters(job.model),
        blocks=describe_blocks(blocks, units),
        budget=describe_budget(
            evaluator.budgets,
            compute_limits(evaluator.budgets, baselines).allowed,
            recipe.max_kl,
            size_target(job.recipe, count_parameters(job.model)),
        ),
        objective=job.recipe.objective,
        text=describe_text(job.text),
        tasks={task.name: task.documents for task in job.tasks},
        out=None if out is None else str(out),
        processes=distributed.size(),
        seconds=total_seconds(costs),
        steps=[StepEstimate(**asdict(cost), expected=cost.seconds) for cost in costs],
        rates=asdict(rates),
        resources=describe_resources(job, store, stored, "statistics" in kept),
        size=size,
        sample_seconds=watch.seconds - opening,
    )


def find_kept(store: MomentsStore, evaluator: Evaluator) -> list[str]:
    """Which of the large measurements are in the cache: that of the source, and the statistics of all blocks."""
    text = store.text
    losses = evaluator.key("losses", identify(store.model), text.verification.sha256, seq_len=text.seq_len)
    keys = {
        "source": [losses],
        "statistics": [store.key(kind, block) for kind in ("moments", "survey") for block in store.blocks.values()],
    }
    return [name for name, of_it in keys.items() if all(store.cache.has(key) for key in of_it)]


def is_written(job: Job, cache: Cache) -> bool:
    """Whether the cache has text that this model wrote for every split, at least the first of it."""
    writer = Writer(job.model, job.tokenizer, job.context)
    return all(cache.has(writer.key(split, 0, job.recipe.seed)) for split in SPLITS)


def sample(
    job: Job, evaluator: Evaluator, blocks: list[Block], units: Mapping[BranchIndex, Units | None]
) -> tuple[SizeEstimate, Rates, dict[str, float]]:
    """The rough size, the rates of this machine, and the perplexity of each text on the sample."""
    model, context = job.model, job.context
    context.progress.say("a sample is timed")
    forward = time_forward(model, job.text.selection.windows, context)
    windows, parts = choose_sample(job, forward[0])
    losses = evaluate(model, windows, context)
    baselines = {name: losses.part(part).perplexity for name, part in parts.items()}
    watch = Stopwatch()
    rough = survey_roughly(model, blocks, units, windows)
    backward = share_time(watch.seconds) / windows.numel()
    hulls = [[c for c in hull if job.choices.allows(c.index, c.shape)] for hull in rough]
    gram, inverse = time_algebra(blocks, units, moments_device(model))
    decode = time_decoding(model, evaluator.prompts)
    rates = Rates(forward, (backward, backward), gram, inverse, decode)
    limits = compute_limits(evaluator.budgets, baselines, job.recipe.max_kl)
    removed, parameters = estimate_size(hulls, limits.smallest), count_parameters(model)
    target = size_target(job.recipe, parameters)
    nats = None if target is None else estimate_nats(hulls, target.parameters)
    size = SizeEstimate(
        least=removed.least,
        most=removed.most,
        least_fraction=removed.least / parameters,
        most_fraction=removed.most / parameters,
        tokens=windows.numel(),
        perplexity=losses.perplexity,
        dppl=None if nats is None else (rise_of(losses, nats[0]), rise_of(losses, nats[1])),
    )
    return size, rates, baselines


def rise_of(losses: Losses, nats: float) -> float:
    """The rise in perplexity when every token costs so many nats more."""
    return losses.perplexity * math.expm1(min(nats, LARGEST_LOSS))


def choose_sample(job: Job, per_token: float) -> tuple[Tensor, dict[str, slice]]:
    """Some selection windows of every text: fewer and shorter ones where a token takes long."""
    texts, seq_len = len(job.text.counts), job.text.seq_len
    affordable = int(SAMPLE_SECONDS / (PASSES * per_token))
    tokens = max(16, min(SAMPLE_TOKENS, affordable)) // texts
    split, parts = spread_windows(job.text, tokens)
    most = max(1, tokens // seq_len)
    chosen: list[int] = []
    slices: dict[str, slice] = {}
    for name, part in parts.items():
        start = len(chosen)
        chosen += list(range(part.start, min(part.start + most, part.stop)))
        slices[name] = slice(start, len(chosen))
    return split.windows[chosen, : max(2, min(seq_len, tokens))], slices


def count_requested(job: Job) -> int:
    """The tokens of all requests of all tasks."""
    most = longest_sequence(job.model)
    return sum(count_request_tokens(task, job.tokenizer, most) for task in job.tasks)


def total_seconds(costs: list[StepCost]) -> SecondsRange:
    least, most = sum(c.least for c in costs), sum(c.most for c in costs)
    return SecondsRange(expected=(least + most) / 2, least=least, most=most)


def describe_blocks(blocks: list[Block], units: Mapping[BranchIndex, Units | None]) -> list[BlockSizes]:
    """How many FFNs there are of every size, in the order of their first."""
    kinds: dict[tuple[int, int | None, int | None, int], int] = {}
    for block in (block for block in blocks if not block.is_attention):
        of_block = units[block.index]
        count = of_block.count if isinstance(of_block, Neurons) else None
        matrices = 2 + of_block.gated if isinstance(of_block, Neurons) else None
        kind = (block.width, count, matrices, block.parameters)
        kinds[kind] = kinds.get(kind, 0) + 1
    return [
        BlockSizes(count=many, width=width, neurons=count, matrices=matrices, parameters=parameters)
        for (width, count, matrices, parameters), many in kinds.items()
    ]


def describe_resources(job: Job, store: MomentsStore, stored: int, kept: bool) -> Resources:
    """Memory: what this process has, more libraries, and a block's matrices and the streams, or a batch's logits."""
    text, model = job.text, job.model
    matrices = memory_bytes(store.blocks.values(), store.units)
    width = store.layers[0].width
    streams = STATES_AT_ONCE * text.calibration.tokens * width * model.dtype.itemsize // distributed.size()
    batch = limit_batch_size(model, text.seq_len, job.context.batch_size)
    logits = 2 * 4 * batch * text.seq_len * model.get_output_embeddings().weight.shape[0]
    own = psutil.Process(os.getpid()).memory_info().rss
    directory = store.cache.directory
    assert directory is not None
    return Resources(
        memory=own + LATER_IMPORTS + max(matrices + streams, logits),
        memory_available=own + available_memory(),
        statistics=0 if kept else disk_bytes(store.blocks.values(), store.units, text),
        cache=str(directory),
        cache_free=free_disk(Path(directory).absolute()),
        result=stored + REPORT_BYTES,
    )
