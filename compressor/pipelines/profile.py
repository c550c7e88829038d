"""How linear one model or several are, on one corpus or several: `compress profile MODEL`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

from compressor.measure.gradients import predict_damages
from compressor.measure.profile import measure
from compressor.pipelines.describe_profile import describe_corpora, describe_doubts, describe_profile
from compressor.pipelines.job import Job, open_job, open_text, study_blocks
from compressor.pipelines.outputs import save_profile
from compressor.pipelines.recipe import Recipe
from compressor.pipelines.stages import list_steps, weigh_steps
from compressor.report.formats import last_part
from compressor.report.record import ProfileSet, Record, describe_tool
from compressor.runtime.context import RunContext
from compressor.runtime.names import PROFILE, UNNAMED, WRITE
from compressor.runtime.outputs import reserved
from compressor.text import Text, absolute, group_by_name


def run(recipe: Recipe, models: Sequence[str], context: RunContext, *, write: bool = True) -> Record | ProfileSet:
    """Measure every model and, unless only the numbers are wanted, write the report. Nothing is replaced for good."""
    names = list(models) or [recipe.model or ""]
    with place_of(recipe, names, context) if write or recipe.out else nullcontext() as out:
        record = profile_all(recipe, names, context)
        context.progress.enter(WRITE)
        return record.model_copy(update={"out": str(save_profile(record, out))}) if out else record


def profile_all(recipe: Recipe, names: Sequence[str], context: RunContext) -> Record | ProfileSet:
    recipes = [recipe.model_copy(update={"model": name or None}) for name in names]
    for other in recipes[1:]:  # the last model must not be refused when the first has taken an hour
        open_corpora(other, context)
    records = [profile_one(each, context) for each in recipes]
    return records[0] if len(records) == 1 else ProfileSet(**describe_tool(), profiles=records)


def profile_one(recipe: Recipe, context: RunContext) -> Record:
    """One model: everything on its first corpus, the profile alone on the others."""
    context.progress.seconds.clear()
    context.progress.follow(list_steps("profile", recipe))
    job, texts = open_corpora(recipe, context)
    context.progress.follow(weigh_steps("profile", job))
    branches = recipe.branches_or("ffn")
    profiles = {name: measure(job.model, text, job.context, branches=branches) for name, text in texts.items()}
    first = profiles[next(iter(texts))]
    damages = predict_damages(job.model, first, job.text, job.context)
    study = study_blocks(job, first, damages)
    record = describe_profile(job.model, job.tokenizer, job.text, first, study)
    if len(texts) > 1:
        corpora = describe_corpora(list(texts), list(texts.values()), list(profiles.values()))
        others = [describe_doubts(p, f"{name}: ") for name, p in profiles.items()]
        record = record.with_parts(**corpora, warnings=[doubt for doubts in others for doubt in doubts])
    return record.with_parts(recipe=job.recipe.settings(), timings=job.timings())


def place_of(recipe: Recipe, names: list[str], context: RunContext) -> AbstractContextManager[Path]:
    """Where the report goes: as the recipe says, else a place of its own, where an earlier report is replaced."""
    name = f"{last_part(names[0])}-profile" if len(names) == 1 else "profile"
    overwrite = recipe.overwrite if recipe.out is not None else True
    return reserved(recipe.out or name, overwrite, recipe.model, PROFILE, context.progress.say)


def open_corpora(recipe: Recipe, context: RunContext) -> tuple[Job, dict[str, Text]]:
    """A job on the first corpus, and the texts of all of them by name. A text without a name is a corpus by itself."""
    corpora: dict[str, list[str]] = {}
    for word in recipe.text or []:
        ((name, (rest,)),) = group_by_name([word]).items()
        name = unused(last_part(rest).removesuffix(".txt"), corpora) if name == UNNAMED else name
        corpora.setdefault(name, []).append(absolute(rest))
    first, *others = corpora or [UNNAMED]
    job = open_job(recipe.model_copy(update={"text": corpora.get(first)}), context, with_tasks=False)
    texts = {first: job.text}
    for name in others:
        asked = job.recipe.model_copy(update={"text": corpora[name], "calib_tokens": recipe.calib_tokens})
        texts[name] = open_text(asked, job.model, job.tokenizer, job.context)[0]
    if others:
        words = [f"{name}={file}" for name, files in corpora.items() for file in files]
        job = replace(job, recipe=job.recipe.model_copy(update={"text": words}))
    return job, texts


def unused(name: str, taken: dict[str, list[str]]) -> str:
    """The name, or with a number behind it when another corpus has it."""
    return next(n for n in (name, *(f"{name}-{k}" for k in range(2, len(taken) + 3))) if n not in taken)
