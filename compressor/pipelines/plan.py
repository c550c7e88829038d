"""Measure and search, touch no weights: `compress plan MODEL --max-dppl 1.0` or `--remove 10%`, or several budgets or
sizes for the frontier."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressor.evaluate.budget import Limits, compute_limits
from compressor.evaluate.speed import flops_per_token
from compressor.measure.profile import Profile, measure
from compressor.measure.study import Study
from compressor.measure.verdicts import Verdict, judge_all
from compressor.models.blocks import find_branches
from compressor.models.branches import BranchIndex
from compressor.models.source import identify
from compressor.patch.checkpoint import count_parameters
from compressor.patch.tree import patched
from compressor.pipelines.describe import describe_budget, describe_plan
from compressor.pipelines.describe_profile import describe_profile
from compressor.pipelines.job import Job, open_job, size_target
from compressor.pipelines.recipe import Recipe
from compressor.pipelines.stages import list_steps, weigh_steps
from compressor.plan.moments_store import open_store
from compressor.plan.removal import SizeTarget, refuse_over_selection, search_size
from compressor.plan.search import ROOM, Plan, Planner
from compressor.plan.space import SearchSpace, prepare_search
from compressor.plan.worth import advising_budget, refuse_worthless
from compressor.report.charts import draw_frontier
from compressor.report.record import Record
from compressor.report.record_parts import Budget, present
from compressor.report.search_parts import FrontierPoint
from compressor.runtime import distributed
from compressor.runtime.context import RunContext
from compressor.runtime.errors import BudgetError, InputError
from compressor.runtime.outputs import write_json


def run(recipe: Recipe, out: Path, context: RunContext) -> Record:
    """Measure and search; write the plan. Several budgets give one plan each, and the frontier; so does healing:
    with and without it."""
    recipe.require_budget()
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise InputError(f"--out {out} cannot be written; name a file in an existing directory, such as plan.json")
    recipes = recipe.searches()
    context.progress.follow(list_steps("plan", recipe))
    job = open_job(recipe.model_copy(update={"max_dppl": recipes[0].max_dppl}), context, with_choices=True)
    evaluator = job.evaluator()

    store = open_store(job.model, job.text, job.context, job.choices)
    context.progress.follow(weigh_steps("plan", job, store))
    branches, beside = job.choices.searched_branches, [store.collector()]
    profile = measure(job.model, job.text, job.context, branches=branches, beside=beside, states=store.states)
    perplexities = evaluator.perplexities(evaluator.measure_losses(job.model, "verify", identify(job.model)))
    with_kl = recipe.max_kl is not None
    space = prepare_search(job.model, job.text, job.context, job.choices, store=store, fidelity=with_kl)
    searches = []
    for each in recipes:
        limits = compute_limits(each.budgets(job.text.counts), perplexities, recipe.max_kl)
        verdicts = judge_all(profile, space.damages, limits.smallest, {})
        asked = job.recipe.model_copy(update={"max_dppl": each.max_dppl, "remove": each.remove})
        searches.append(Search(job, profile, space, limits, verdicts, asked.model_copy(update={"heal": None})))
        if asked.heal is not None:
            searches.append(Search(job, profile, space, limits, verdicts, asked))
    if len(searches) == 1:
        record = searches[0].describe_result(searches[0].find())
        write_json(out, record.to_json_value())
        return record
    by_size = len(recipe.remove or []) > 1
    points = [find_point(search, out, by_size) for search in searches]
    record = searches[0].describe().with_parts(frontier=points, timings=job.timings())
    write_json(out, record.to_json_value())
    if distributed.rank() > 0:
        return record
    return record.with_parts(figures=draw_frontier(points, out, job.recipe.model or "", job.text.seq_len))


@dataclass(frozen=True)
class Search:
    """The search for one budget or size: its limits, the blocks as these judge them, and the recipe that asks."""

    job: Job
    profile: Profile
    space: SearchSpace
    limits: Limits
    verdicts: dict[BranchIndex, Verdict]
    recipe: Recipe

    @property
    def target(self) -> SizeTarget | None:
        return size_target(self.recipe, count_parameters(self.job.model))

    def find(self) -> Plan:
        """The largest plan that leaves room for the verification's noise, or the cheapest of the size that is asked
        for; BudgetError when nothing fits. Where it is to be healed, the plan aims past the budget by what that is
        expected to win."""
        healer = self.job.healer() if self.recipe.heal else None
        how: dict[str, Any] = {"objective": self.recipe.objective, "room": ROOM, "profile": self.profile}
        planner = Planner(self.space, self.limits, self.verdicts, compensate=healer is None, **how)
        if self.target is None:
            parameters = count_parameters(self.job.model)
            with advising_budget(planner, self.recipe.min_saving, parameters):
                plan = planner.search(healer.expected_room(planner) if healer else 1.0)
            refuse_worthless(planner, plan, self.recipe.min_saving, parameters)
            return plan
        return refuse_over_selection(planner, search_size(planner, self.target), self.target)

    def describe(self) -> Record:
        """The record before the search."""
        job = self.job
        study = Study(self.verdicts, self.space.damages)
        record = describe_profile(job.model, job.tokenizer, job.text, self.profile, study)
        return record.with_parts(budget=self.describe_budget(), recipe=self.recipe.settings())

    def describe_budget(self) -> Budget:
        """What is asked for, as a part of the record."""
        return describe_budget(self.limits.budgets, self.limits.allowed, self.limits.kl, self.target)

    def describe_result(self, plan: Plan) -> Record:
        return describe_plan(self.describe(), plan).with_parts(timings=self.job.timings())


def find_point(search: Search, out: Path, by_size: bool) -> FrontierPoint:
    """One point of the frontier, for one size or budget: its plan in a file of its own, what goes, and what it costs on
    the selection text."""
    job, size = search.job, search.describe_budget().remove if by_size else None
    asked = str(present(search.recipe.remove if by_size else search.recipe.max_dppl)[0])
    try:
        plan = search.find()
    except BudgetError as error:
        return FrontierPoint(
            asked=asked, removed=0, removed_fraction=0.0, reason=str(error), remove=size, heal=search.recipe.heal
        )
    healed = "-healed" if search.recipe.heal else ""
    file = out.with_name(f"{out.stem}-{asked.replace('%', 'pct')}{healed}{out.suffix}")
    record = search.describe_result(plan)
    write_json(file, record.to_json_value())
    before = flops_per_token(job.model, job.text.seq_len)
    with patched(job.model, find_branches(job.model), plan.fits):
        after = flops_per_token(job.model, job.text.seq_len)
    return FrontierPoint(
        asked=asked,
        remove=size,
        heal=search.recipe.heal,
        removed=record.parameters.removed or 0,
        removed_fraction=record.parameters.removed_fraction or 0.0,
        file=str(file),
        flops_per_token=after,
        flops_ratio=before / after,
        predicted_dloss=plan.predicted,
        texts=record.selection,
        blocks=len(plan.shapes),
    )
