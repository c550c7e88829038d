"""Measure and search, touch no weights: `compress plan MODEL --max-dppl 1.0`, or several budgets for the frontier."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from compressor.evaluate.budget import Limits, compute_limits, parse_budgets
from compressor.evaluate.speed import flops_per_token
from compressor.measure.profile import Profile, measure
from compressor.measure.study import Study
from compressor.measure.verdicts import Verdict, judge_all
from compressor.models.blocks import find_blocks
from compressor.models.source import identify
from compressor.patch.tree import patched
from compressor.pipelines.describe import describe_budget, describe_plan
from compressor.pipelines.describe_profile import describe_profile
from compressor.pipelines.job import Job, open_job
from compressor.pipelines.recipe import Recipe
from compressor.plan.moments_store import open_store
from compressor.plan.search import ROOM, Plan, Planner, SearchSpace, prepare_search
from compressor.report.charts import draw_frontier
from compressor.report.record import Record
from compressor.report.record_parts import FrontierPoint
from compressor.runtime import distributed
from compressor.runtime.context import RunContext
from compressor.runtime.errors import BudgetError, InputError
from compressor.runtime.outputs import write_json


def run(recipe: Recipe, out: Path, context: RunContext) -> Record:
    """Measure and search; write the plan. Several budgets give one plan each, and the frontier."""
    recipe.require_budget()
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise InputError(f"--out {out} cannot be written; name a file in an existing directory, such as plan.json")
    budgets = recipe.several_budgets()
    job = open_job(recipe.model_copy(update={"max_dppl": budgets[0] or None}), context, with_choices=True)
    evaluator = job.evaluator()

    store = open_store(job.model, job.text, job.context, job.choices)
    profile = measure(job.model, job.text, job.context, beside=[store.collector()], states=store.states)
    perplexities = evaluator.perplexities(evaluator.measure_losses(job.model, "verify", identify(job.model)))
    with_kl = recipe.max_kl is not None
    space = prepare_search(job.model, job.text, job.context, job.choices, store=store, fidelity=with_kl)
    searches = []
    for words in budgets:
        asked = parse_budgets(words or None, job.text.counts, job.recipe.confidence)
        limits = compute_limits(asked, perplexities, recipe.max_kl)
        verdicts = judge_all(profile, space.damages, limits.smallest, {})
        searches.append(Search(job, profile, space, limits, verdicts, words))
    if len(searches) == 1:
        record = searches[0].describe_result(searches[0].find())
        write_json(out, record.to_json_value())
        return record
    points = [find_point(search, out) for search in searches]
    record = searches[0].describe().with_parts(frontier=points, timings=job.timings())
    write_json(out, record.to_json_value())
    if distributed.rank() > 0:
        return record
    return record.with_parts(figures=draw_frontier(points, out, job.recipe.model or "", job.text.seq_len))


@dataclass(frozen=True)
class Search:
    """The search for one budget: its limits, the blocks as these judge them, and its words on the command line."""

    job: Job
    profile: Profile
    space: SearchSpace
    limits: Limits
    verdicts: dict[int, Verdict]
    words: list[str]

    def find(self) -> Plan:
        """The largest plan that leaves room for the verification's noise; BudgetError when nothing fits."""
        objective = self.job.recipe.objective
        planner = Planner(self.space, self.limits, self.verdicts, objective=objective, room=ROOM, profile=self.profile)
        return planner.search()

    def describe(self) -> Record:
        """The record before the search."""
        job = self.job
        study = Study(self.verdicts, self.space.damages)
        record = describe_profile(job.model, job.tokenizer, job.text, self.profile, study)
        budget = describe_budget(self.limits.budgets, self.limits.allowed, self.limits.kl)
        recipe = job.recipe.model_copy(update={"max_dppl": self.words or None})
        return record.with_parts(budget=budget, recipe=recipe.settings())

    def describe_result(self, plan: Plan) -> Record:
        return describe_plan(self.describe(), plan).with_parts(timings=self.job.timings())


def find_point(search: Search, out: Path) -> FrontierPoint:
    """One point of the frontier: its plan in a file of its own, what goes, and what it costs on the selection text."""
    asked, job = search.words[0], search.job
    try:
        plan = search.find()
    except BudgetError as error:
        return FrontierPoint(asked=asked, removed=0, removed_fraction=0.0, reason=str(error))
    file = out.with_name(f"{out.stem}-{asked.replace('%', 'pct')}{out.suffix}")
    record = search.describe_result(plan)
    write_json(file, record.to_json_value())
    before = flops_per_token(job.model, job.text.seq_len)
    with patched(job.model, find_blocks(job.model), plan.fits):
        after = flops_per_token(job.model, job.text.seq_len)
    return FrontierPoint(
        asked=asked,
        removed=record.parameters.removed or 0,
        removed_fraction=record.parameters.removed_fraction or 0.0,
        file=str(file),
        flops_per_token=after,
        flops_ratio=before / after,
        predicted_dloss=plan.predicted,
        texts=record.selection,
        blocks=len(plan.shapes),
    )
