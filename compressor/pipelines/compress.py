"""The whole flow on one screen: measure → plan → fit → patch → evaluate → save → report."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from compressor.evaluate.evaluator import Evaluator, Measured
from compressor.evaluate.speed import flops_per_token, measure_speed
from compressor.measure.study import Study
from compressor.modeling_compressor import Replacement
from compressor.models.blocks import find_blocks
from compressor.models.source import identify, source_of
from compressor.patch.checkpoint import count_parameters
from compressor.patch.tree import identify_patched, patch, patched
from compressor.patch.verify import TOKENS
from compressor.pipelines import recipe as recipes
from compressor.pipelines.describe import (
    describe_assessment,
    describe_budget,
    describe_plan,
    describe_source,
    describe_speed,
    describe_text,
    put_replacements,
)
from compressor.pipelines.describe_profile import describe_profile
from compressor.pipelines.job import Job, Setting, measure_once, open_job, study_of
from compressor.pipelines.outputs import write_result
from compressor.pipelines.planfile import read_plan
from compressor.pipelines.recipe import Recipe
from compressor.plan.search import Plan, Planner, fit_forms
from compressor.plan.trials import Bench
from compressor.plan.verify import refuse_missed, search_and_verify
from compressor.report.charting import charts_of
from compressor.report.figures import draw_frontier
from compressor.report.page import page
from compressor.report.record import describe_tool
from compressor.report.tables import agreement_lines, block_table, notes
from compressor.runtime import distributed
from compressor.runtime.errors import BudgetError, InputError, reason_of
from compressor.runtime.names import RECORD
from compressor.runtime.outputs import reserved, write_json
from compressor.runtime.resources import require_disk
from compressor.text import SPLITS

REPORT_BYTES = 10 * 2**20


def prepare(
    job: Job, evaluator: Evaluator, *, compensate: bool = True, studied: bool = False
) -> tuple[Planner, dict[str, Any]]:
    """Measure every block; a planner that is ready to search, and the record so far."""
    recipe = job.recipe
    options: dict[str, Any] = {"batch_size": recipe.batch_size, "seed": recipe.seed, "progress": job.setting.progress}
    measured = measure_once(job, job.text)
    verified = evaluator.losses(job.model, "verify", identify(job.model))
    bench = Bench(job.model, job.text, confidence=recipe.confidence, cache=job.setting.cache, **options)
    how: dict[str, Any] = {"objective": recipe.objective, "compensate": compensate}
    planner = Planner(bench, measured, evaluator.budgets, verified=verified, **how)
    found = Study(planner.verdicts, planner.damages)
    if studied:
        found = study_of(job, measured, planner.damages, planner.limit)
        planner.adopt(found.verdicts)
    report = describe_profile(job.model, job.tokenizer, job.text, measured, found)
    report["budget"] = describe_budget(planner.budgets, planner.allowed)
    return planner, {**report, "recipe": recipe.settings()}


def plan(recipe: Recipe, out: Path, setting: Setting) -> dict[str, Any]:
    """Measure and search; write the plan, touch no weights. Several budgets give one plan each, and the frontier."""
    recipe.require_budget()
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise InputError(f"--out {out} cannot be written; name a file in an existing directory, such as plan.json")
    budgets = recipe.several_budgets()
    job = open_job(recipe.model_copy(update={"max_dppl": budgets[0]}), setting)
    planner, report = prepare(job, job.evaluator(), compensate=len(budgets) == 1)
    if len(budgets) == 1:
        report = describe_plan(report, planner.search()) | {"timings": job.timings()}
        write_json(out, report)
        return report
    points = []
    for words in budgets:
        asked = recipe.model_copy(update={"max_dppl": words}).budgets(job.text.counts)
        try:
            found = planner.with_budgets(asked).search()
        except BudgetError as error:
            points.append({"asked": words[0], "removed": 0, "removed_fraction": 0.0, "reason": str(error)})
            continue
        file = out.with_name(f"{out.stem}-{words[0].replace('%', 'pct')}{out.suffix}")
        settings = {**report["recipe"], "max_dppl": words[0]}
        whole = {**report, "recipe": settings, "budget": describe_budget(asked, planner.with_budgets(asked).allowed)}
        whole = describe_plan(whole, found)
        write_json(file, whole | {"timings": job.timings()})
        points.append({"asked": words[0], "file": str(file), **describe_point(job, found, whole)})
    frontier = {**report, "frontier": points, "timings": job.timings()}
    write_json(out, frontier)
    if distributed.rank() == 0:
        frontier["figures"] = draw_frontier(points, out, job.recipe.model or "", job.text.seq_len)
    return frontier


def describe_point(job: Job, found: Plan, whole: dict[str, Any]) -> dict[str, Any]:
    """One point of the frontier: what goes, and what it costs on the selection text."""
    before = flops_per_token(job.model, job.text.seq_len)
    with patched(job.model, find_blocks(job.model), found.fits):
        after = flops_per_token(job.model, job.text.seq_len)
    sizes = whole["parameters"]
    return {
        "removed": sizes["removed"],
        "removed_fraction": sizes["removed_fraction"],
        "flops_per_token": after,
        "flops_ratio": before / after,
        "predicted_dloss": found.predicted,
        "texts": whole["selection"],
        "blocks": len(found.forms),
    }


def compress(recipe: Recipe, setting: Setting) -> dict[str, Any]:
    """The whole job. BudgetError, and nothing written, when no plan holds on the verification text and the tasks."""
    recipe.require_budget()
    with reserved_out(recipe, setting) as out:
        job = open_job(recipe, setting)
        require_room(job, out)
        evaluator = job.evaluator()
        planner, report = prepare(job, evaluator, studied=True)
        found, before, after, looks = search_and_verify(planner, evaluator)
        report = {**describe_plan(report, found), "verification_looks": looks}
        return finish(job, evaluator, found.fits, before, after, report, out)


def apply(recipe: Recipe, plan_file: Path, setting: Setting) -> dict[str, Any]:
    """Fit, patch and save a given plan. BudgetError, and nothing written, when it misses its budget."""
    plan, record = read_plan(plan_file)
    refuse_unshowable(record, plan_file)
    forms = plan.forms()
    given = recipe.model_dump(exclude_unset=True)
    recorded = {key: value for key, value in plan.recipe.items() if key not in ("out", "overwrite")}
    recipe = recipes.validate({**recorded, **given}, f"plan {plan_file}")
    recipe.require_budget()
    if not forms:
        raise InputError(f"plan {plan_file} replaces no block; there is nothing to apply")
    with reserved_out(recipe, setting) as out:
        job = open_job(recipe, setting)
        require_room(job, out)
        if source_of(job.model).weights_sha256 != plan.source.weights_sha256:
            raise InputError(f"plan {plan_file} was made for other weights ({plan.source.model}) than {recipe.model}")
        evaluator = job.evaluator()
        before = evaluator.measure(job.model, "source", identify(job.model))
        options: dict[str, Any] = {
            "batch_size": recipe.batch_size,
            "cache": setting.cache,
            "progress": setting.progress,
        }
        fits = fit_forms(job.model, forms, job.text, compensated=plan.compensated, **options)
        identity = identify_patched(job.model, fits)
        with patched(job.model, find_blocks(job.model), fits):
            after = evaluator.measure(job.model, "compressed", identity)
        refuse_missed(evaluator, before, after, forms)
        record |= {**describe_tool(), "source": describe_source(job.model), "text": describe_text(job.text)}
        record["recipe"] = job.recipe.settings()
        record["parameters"] = {"before": count_parameters(job.model)}
        sizes = {block.index: block.parameters for block in find_blocks(job.model)}
        record["blocks"] = [{**b, "params_before": sizes[b["index"]]} for b in record["blocks"] if b["index"] in sizes]
        return finish(job, evaluator, fits, before, after, put_replacements(record, fits), out)


def refuse_unshowable(record: dict[str, Any], plan_file: Path) -> None:
    """The plan's measurements go into the report of what is made from it: say before the work that they cannot."""
    try:
        page(record)
        charts_of(record)
        notes(record), agreement_lines(record), block_table(record)
    except Exception as error:  # whatever stands in the file, in whatever place
        reason = f"its figures cannot be shown ({type(error).__name__}: {reason_of(error)})"
        raise InputError(f"plan {plan_file} is not a plan: {reason}; make it again with `compress plan`") from error


def reserved_out(recipe: Recipe, setting: Setting) -> AbstractContextManager[Path]:
    if recipe.out is None:
        raise InputError("--out is missing: name the directory to write, such as --out ./smaller")
    return reserved(recipe.out, recipe.overwrite, recipe.model, RECORD, setting.progress.say)


def require_room(job: Job, out: Path) -> None:
    """The result is at most as large as its source; the figures and the page are small."""
    weights = count_parameters(job.model) * source_of(job.model).dtype.itemsize
    job.setting.progress.say(require_disk("the result", weights + REPORT_BYTES, out, "name another --out"))


def finish(
    job: Job,
    evaluator: Evaluator,
    fits: dict[int, Replacement],
    before: Measured,
    after: Measured,
    report: dict[str, Any],
    out: Path,
) -> dict[str, Any]:
    """Measure the speed, patch for good, look at everything once more, save, and complete the record."""
    blocks = find_blocks(job.model)
    identity = identify_patched(job.model, fits)
    windows = job.text.verification.windows
    speed = distributed.broadcast_value(
        describe_speed(measure_speed(job.model, blocks, fits, windows)) if distributed.rank() == 0 else None
    )
    patch(job.model, blocks, fits)
    found = evaluator.assess(before, after, job.model, identity)
    timings = job.timings()
    tokens = sum(getattr(job.text, name).tokens for name in SPLITS)
    if speed["prefill_before"]:
        timings["one_forward_pass"] = round(tokens / speed["prefill_before"], 2)  # over all the text
    report = {**report, **describe_assessment(found, evaluator), "speed": speed, "timings": timings}
    assert count_parameters(job.model) == report["parameters"]["after"]
    header = "Reproduces this checkpoint:\ncompress --recipe recipe.yaml --out NEW_DIRECTORY"
    recipe = recipes.dump(job.recipe, header)
    few, progress = windows[:1, :TOKENS], job.setting.progress
    write_result(job.model, job.tokenizer, out, report, recipe, tokens=few, progress=progress)
    return {**report, "out": str(out)}
