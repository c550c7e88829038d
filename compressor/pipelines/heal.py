"""Distil a compressed checkpoint towards its source: `compress heal DIR --heal 200k --out NEW`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compressor.heal.student import find_changed
from compressor.modeling_compressor import replacements
from compressor.models.blocks import find_branches
from compressor.models.load import load_model
from compressor.models.source import identify, source_of
from compressor.patch.tree import HealedReplacements, Replacements, identify_patched, patched
from compressor.pipelines.apply import shapes_of
from compressor.pipelines.check import recipe_of
from compressor.pipelines.compress import finish
from compressor.pipelines.describe import describe_healing, describe_source, describe_text
from compressor.pipelines.job import open_job, placing, require_room, reserved_out
from compressor.pipelines.stages import list_steps
from compressor.plan.verify import refuse_over_budget
from compressor.report.record import Record, describe_tool, read_record
from compressor.runtime.context import RunContext
from compressor.runtime.errors import InputError
from compressor.runtime.names import RECORD


def run(directory: Path, options: Mapping[str, Any], source: str | None, context: RunContext) -> Record:
    """Train the checkpoint's replacements, measure the result on its own texts and tasks, and write it.

    BudgetError, and nothing written, when it misses the recorded budget or the one that is given.
    """
    recorded = read_record(directory)
    if not isinstance(recorded, Record):
        raise InputError(f"{directory} has a {RECORD} without measurements; compress it again to heal it")
    if options.get("heal") is None and options.get("heal_minutes") is None:
        raise InputError("say how long to heal: --heal 200k (tokens) or --heal-minutes 10")
    recipe = recipe_of(directory, options, recorded)
    forgotten = [key for key in ("heal", "heal_minutes") if options.get(key) is None]  # of an earlier healing
    recipe = recipe.model_copy(update={**dict.fromkeys(forgotten), "model": source or recipe.model})
    context.progress.follow(list_steps("heal", recipe))
    with reserved_out(recipe, context) as out:
        job = open_job(recipe, context)
        require_room(job, out)
        if source_of(job.model).weights_sha256 != recorded.source.weights_sha256:
            raise InputError(
                f"{directory} was made from other weights than {recipe.model}; name its source with --source"
            )
        fits = read_replacements(directory, job.model, placing(job.recipe, job.context))
        evaluator, healer = job.evaluator(), job.healer()
        assert healer is not None
        before = evaluator.measure(job.model, "source", identify(job.model))
        healing = healer.heal(job.model, fits)
        with patched(job.model, find_branches(job.model), healing.fits):
            after = evaluator.measure(job.model, "compressed", identify_patched(job.model, healing.fits), before)
        refuse_over_budget(evaluator, before, after, shapes_of(recorded))
        record = recorded.with_parts(
            **describe_tool(),
            source=describe_source(job.model),
            text=describe_text(job.text),
            recipe=job.recipe.settings(),
            healing=describe_healing(healing, job.text),
            warnings=[],
        )
        return finish(job, evaluator, healing.fits, before, after, record).write(out, context.progress)


def read_replacements(directory: Path, model: Any, place: Mapping[str, Any]) -> Replacements:
    """The replacements of a checkpoint, and what was trained beside them, for its source."""
    compressed, _ = load_model(str(directory), allow_compressed=True, **place)
    indices = {block.path: block.index for block in find_branches(model)}
    modules = replacements(compressed)
    missing = [path for path in modules if path not in indices]
    if missing or not modules:
        raise InputError(f"{directory} does not fit its source: {', '.join(missing) or 'nothing in it is replaced'}")
    fits = {indices[path]: module for path, module in modules.items()}
    return HealedReplacements(fits, find_changed(compressed, model))
