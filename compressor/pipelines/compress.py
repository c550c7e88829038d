"""The whole job, `compress MODEL --max-dppl 1.0 --out DIR`: measure, search, heal, verify, patch, assess, write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from compressor.evaluate.budget import compute_limits
from compressor.evaluate.evaluator import Evaluator, Measured
from compressor.evaluate.kv_cache import kv_cache_bytes
from compressor.evaluate.speed import measure_speed
from compressor.measure.profile import measure
from compressor.models.blocks import find_branches
from compressor.models.source import identify
from compressor.patch.checkpoint import count_parameters
from compressor.patch.tree import Replacements, identify_patched, patch
from compressor.patch.verify import TOKENS
from compressor.pipelines import recipe as recipes
from compressor.pipelines.describe import (
    describe_assessment,
    describe_healing,
    describe_kv_cache,
    describe_plan,
    describe_speed,
)
from compressor.pipelines.describe_profile import describe_profile
from compressor.pipelines.job import Job, open_job, require_room, reserved_out, size_target, study_blocks
from compressor.pipelines.outputs import write_result
from compressor.pipelines.recipe import Recipe
from compressor.pipelines.stages import list_steps, weigh_steps
from compressor.plan.healing import Healer
from compressor.plan.moments_store import open_store
from compressor.plan.search import Planner
from compressor.plan.space import prepare_search
from compressor.plan.verify import VerifiedPlan, heal_and_verify, search_and_verify, verify_size
from compressor.plan.worth import advising_budget, refuse_worthless
from compressor.report.record import Record
from compressor.report.record_parts import present
from compressor.runtime import distributed
from compressor.runtime.context import RunContext
from compressor.runtime.names import WRITE
from compressor.runtime.progress import Progress
from compressor.text import SPLITS


@dataclass(frozen=True)
class CompressedModel:
    """A patched model that was held against its budget, with the record of everything that was measured; not written
    yet."""

    model: Any
    tokenizer: Any
    record: Record
    recipe: str
    tokens: Tensor  # that the written checkpoint is run on

    def write(self, out: Path, progress: Progress) -> Record:
        """Write everything into a directory that is reserved."""
        written = write_result(
            self.model, self.tokenizer, out, self.record, self.recipe, tokens=self.tokens, progress=progress
        )
        return written.with_parts(out=str(out))


def run(recipe: Recipe, context: RunContext) -> Record:
    """The whole job. BudgetError, and nothing written, when no plan holds on the verification text and the tasks."""
    refuse_early(recipe)
    with reserved_out(recipe, context) as out:
        return compress(recipe, context, out).write(out, context.progress)


def refuse_early(recipe: Recipe) -> None:
    """Refuse a recipe that asks for nothing, or for several sizes."""
    recipe.require_budget()
    recipe.removal()


def compress(recipe: Recipe, context: RunContext, out: Path | None = None) -> CompressedModel:
    """Everything but the writing; `out` is where that will go, if it is known. BudgetError when nothing holds."""
    context.progress.follow(list_steps("compress", recipe))
    job = open_job(recipe, context, with_choices=True)
    if out is not None:
        require_room(job, out)
    evaluator = job.evaluator()

    store = open_store(job.model, job.text, job.context, job.choices)
    context.progress.follow(weigh_steps("compress", job, store))
    branches, beside = job.choices.searched_branches, [store.collector()]
    profile = measure(job.model, job.text, job.context, branches=branches, beside=beside, states=store.states)
    source = evaluator.measure(job.model, "source", identify(job.model))
    limits = compute_limits(evaluator.budgets, evaluator.perplexities(source.losses), recipe.max_kl)
    with_kl = recipe.max_kl is not None
    space = prepare_search(job.model, job.text, job.context, job.choices, store=store, fidelity=with_kl)
    study = study_blocks(job, profile, space.damages, limits.least, swap=False)  # planning needs no sweep
    how: dict[str, Any] = {"objective": job.recipe.objective, "profile": profile}
    healer = job.healer()
    planner = Planner(space, limits, study.verdicts, compensate=healer is None, **how)
    verified = find_plan(job, planner, evaluator, source, healer)

    record = describe_profile(job.model, job.tokenizer, job.text, profile, study)
    record = record.with_parts(recipe=job.recipe.settings(), verification_looks=verified.looks)
    record = describe_plan(record, verified.plan, describe_healing(verified.healing, job.text))
    looks = verified.task_looks
    return finish(job, evaluator, verified.plan.fits, source, verified.measured, record, looks)


def find_plan(
    job: Job, planner: Planner, evaluator: Evaluator, source: Measured, healer: Healer | None
) -> VerifiedPlan:
    """The plan that holds: the cheapest of a size, or the largest inside the budgets, if it is worth having."""
    parameters = count_parameters(job.model)
    target = size_target(job.recipe, parameters)
    if target is not None:
        return verify_size(planner, evaluator, source, target, healer)
    with advising_budget(planner, job.recipe.min_saving, parameters):
        if healer is not None:
            verified = heal_and_verify(planner, evaluator, source, healer)
        else:
            verified = search_and_verify(planner, evaluator, source)
    refuse_worthless(planner, verified.plan, job.recipe.min_saving, parameters)
    return verified


def finish(
    job: Job,
    evaluator: Evaluator,
    fits: Replacements,
    source: Measured,
    compressed: Measured,
    record: Record,
    task_looks: Mapping[str, int] | None = None,
) -> CompressedModel:
    """Measure the speed, patch for good, assess the patched model against its source, and complete the record."""
    blocks, windows = find_branches(job.model), job.text.verification.windows
    identity = identify_patched(job.model, fits)
    first = distributed.rank() == 0
    speed = describe_speed(
        distributed.broadcast_value(measure_speed(job.model, blocks, fits, windows) if first else None)
    )
    cache_before = kv_cache_bytes(job.model)
    patch(job.model, blocks, fits)
    kv_cache = describe_kv_cache(job.model, cache_before, kv_cache_bytes(job.model))
    assessment = evaluator.assess(source, compressed, job.model, identity, task_looks)
    assert count_parameters(job.model) == record.parameters.after

    job.context.progress.enter(WRITE)
    timings = job.timings()
    if speed.prefill_before:
        tokens = sum(getattr(job.text, name).tokens for name in SPLITS)
        timings["one_forward_pass"] = round(tokens / speed.prefill_before, 2)  # over all the text
    target = size_target(job.recipe, present(record.parameters.before))
    assessed = describe_assessment(assessment, evaluator, record.parameters, target)
    assessed["warnings"] = [*record.warnings, *assessed["warnings"]]
    record = record.with_parts(**assessed, speed=speed, kv_cache=kv_cache, timings=timings)
    recipe = recipes.dump(job.recipe, "Reproduces this checkpoint:\ncompress --recipe recipe.yaml --out NEW_DIRECTORY")
    return CompressedModel(job.model, job.tokenizer, record, recipe, windows[:1, :TOKENS])
