"""Fit, patch and save a given plan: `compress apply MODEL plan.json --out DIR`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from compressor.models.blocks import find_branches
from compressor.models.branches import AttentionOf, BranchIndex
from compressor.models.source import identify, source_of
from compressor.patch.checkpoint import count_parameters
from compressor.patch.tree import Replacements, identify_patched, patched
from compressor.pipelines import recipe as recipes
from compressor.pipelines.compress import finish
from compressor.pipelines.describe import describe_healing, describe_source, describe_text, put_replacements
from compressor.pipelines.job import open_job, require_room, reserved_out, size_target
from compressor.pipelines.recipe import Recipe
from compressor.pipelines.stages import list_steps
from compressor.plan.api import fit_shapes
from compressor.plan.shapes import Shape
from compressor.plan.verify import refuse_over_budget
from compressor.report.record import Record, describe_tool, list_mistakes
from compressor.report.record_parts import Attention, Block, Budget, Parameters, Replacement
from compressor.runtime.context import RunContext
from compressor.runtime.errors import BudgetError, InputError
from compressor.runtime.safe_files import parse_json, read_named


class PlanRecord(Record):
    """A record that holds a plan: what `compress plan` writes and `compress apply` reads."""

    budget: Budget
    recipe: dict[str, Any]
    blocks: list[Block]


def run(recipe: Recipe, plan_file: Path, context: RunContext) -> Record:
    """Fit, patch and save a given plan. BudgetError, and nothing written, when it misses its budget."""
    plan = read_plan(plan_file)
    shapes = shapes_of(plan)
    given = recipe.model_dump(exclude_unset=True)
    recorded = {key: value for key, value in plan.recipe.items() if key not in ("out", "overwrite")}
    recipe = recipes.validate({**recorded, **given}, f"plan {plan_file}")
    recipe.require_budget()
    if not shapes:
        raise InputError(f"plan {plan_file} {why_nothing_to_apply(plan)}")
    context.progress.follow(list_steps("apply", recipe))
    with reserved_out(recipe, context) as out:
        job = open_job(recipe, context, with_choices=True)
        require_room(job, out)
        if source_of(job.model).weights_sha256 != plan.source.weights_sha256:
            raise InputError(f"plan {plan_file} was made for other weights ({plan.source.model}) than {recipe.model}")
        evaluator = job.evaluator()

        source = evaluator.measure(job.model, "source", identify(job.model))
        how: dict[str, Any] = {"compensated": plan.compensated, "choices": job.choices}
        fits: Replacements = fit_shapes(job.model, shapes, job.text, job.context, **how)
        healer, healing = job.healer(), None
        if healer is not None:
            healing = healer.heal(job.model, fits)
            fits = healing.fits
        identity = identify_patched(job.model, fits)
        with patched(job.model, find_branches(job.model), fits):
            compressed = evaluator.measure(job.model, "compressed", identity, source)
        refuse_over_budget(evaluator, source, compressed, shapes)
        refuse_short(job.recipe, plan_file, job.model, fits)

        sizes = {block.index: block.parameters for block in find_branches(job.model)}
        branches = branches_of(plan)
        known = {
            index: branch.model_copy(update={"params_before": sizes[index]})
            for index, branch in branches
            if index in sizes
        }
        record = plan.with_parts(
            **describe_tool(),
            source=describe_source(job.model),
            text=describe_text(job.text),
            recipe=job.recipe.settings(),
            healing=describe_healing(healing, job.text),
            parameters=Parameters(before=count_parameters(job.model)),
            blocks=[branch for index, branch in known.items() if not isinstance(index, AttentionOf)],
            attention=[branch for index, branch in known.items() if isinstance(index, AttentionOf)],
        )
        record = put_replacements(record, fits)
        return finish(job, evaluator, fits, source, compressed, record).write(out, context.progress)


def refuse_short(recipe: Recipe, plan_file: Path, model: Any, fits: Replacements) -> None:
    """BudgetError when a plan, perhaps edited, removes less than its recipe asks for."""
    target = size_target(recipe, count_parameters(model))
    sizes = {block.index: block.parameters for block in find_branches(model)}
    removed = sum(sizes[index] - count_parameters(module) for index, module in fits.items())
    if target is not None and removed < target.parameters:
        raise BudgetError(
            f"plan {plan_file} removes {target.share(removed)}, less than its --remove {target.asked}: "
            f"{target.share(target.parameters)}; nothing written"
        )


def read_plan(file: Path) -> PlanRecord:
    """The plan in a file, or one line that says why it is none."""
    missing = f"plan {file} does not exist; make one with `compress plan MODEL --max-dppl 1.0`"
    values = read_named("plan", file, parse_json, missing)
    try:
        return PlanRecord.model_validate(values)
    except ValidationError as error:
        raise InputError(f"plan {file} is not a plan: {list_mistakes(error)}") from error


def why_nothing_to_apply(plan: PlanRecord) -> str:
    """Why a plan without replacements has none; that of several budgets only names the files of its plans."""
    files = [point.file for point in plan.frontier if point.file]
    if not files:
        return "replaces no block; there is nothing to apply"
    plans = "1 plan" if len(files) == 1 else f"{len(files)} plans"
    return (
        f"is the frontier of several budgets and holds {plans}, each in a file of its own: apply {' or '.join(files)}"
    )


def shapes_of(plan: Record) -> dict[BranchIndex, Shape]:
    """What stands in every block that the plan replaces."""
    branches = branches_of(plan)
    indices = [index for index, _ in branches]
    twice = next((index for index in indices if indices.count(index) > 1), None)
    if twice is not None:
        raise InputError(f"the plan has block {twice} twice; every block stands in it once")
    chosen = {index: branch.replacement for index, branch in branches if branch.replacement.kind != "keep"}
    return {index: shape_of(index, replacement) for index, replacement in chosen.items()}


def branches_of(plan: Record) -> list[tuple[BranchIndex, Block | Attention]]:
    """The FFNs and the attention that the plan lists."""
    attention = [(AttentionOf(branch.index), branch) for branch in plan.attention]
    return [*((block.index, block) for block in plan.blocks), *attention]


def shape_of(index: BranchIndex, replacement: Replacement) -> Shape:
    kept, units = replacement.neurons, "neurons"
    if isinstance(index, AttentionOf):
        kept, units = replacement.heads, "heads"
    shape = Shape(replacement.rank, kept or 0)
    if shape.kind != replacement.kind:
        raise InputError(
            f"the plan's block {index} is {replacement.kind} with rank {shape.rank} and {shape.neurons} {units}, that "
            f"is {shape.kind}: linear has rank null, lowrank 1 or more, pruned 0 with {units}, hybrid both, bias "
            "neither"
        )
    return shape
