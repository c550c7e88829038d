"""`compress profile`: the linearity of one model or several, on one corpus or several, as a directory of its own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from compressor.pipelines.describe_profile import describe_corpora, describe_profile
from compressor.pipelines.job import Job, Setting, absolute, measure_once, open_job, open_text, predict_once, study_of
from compressor.pipelines.outputs import save_profile
from compressor.pipelines.recipe import Recipe
from compressor.report.markup import last_part
from compressor.report.record import describe_tool
from compressor.runtime.names import PROFILE, UNNAMED
from compressor.runtime.outputs import reserved
from compressor.text import Text, group


def profile(recipe: Recipe, models: Sequence[str], setting: Setting, *, write: bool = True) -> dict[str, Any]:
    """Measure every model and, unless only the numbers are wanted, write the report. Nothing is replaced for good."""
    names = list(models) or [recipe.model or ""]
    with place_of(recipe, names, setting) if write or recipe.out else nullcontext() as out:
        report = profile_all(recipe, names, setting)
        return {**report, "out": str(save_profile(report, out))} if out else report


def profile_all(recipe: Recipe, names: Sequence[str], setting: Setting) -> dict[str, Any]:
    wanted = [recipe.model_copy(update={"model": name or None}) for name in names]
    for other in wanted[1:]:  # the last model must not be refused when the first has taken an hour
        open_corpora(other, setting)
    found = [profile_one(one, setting) for one in wanted]
    return found[0] if len(found) == 1 else {**describe_tool(), "profiles": found}


def place_of(recipe: Recipe, names: list[str], setting: Setting) -> AbstractContextManager[Path]:
    """Where the report goes: as the recipe says, else a place of its own, where an earlier report is replaced."""
    name = f"{last_part(names[0])}-profile" if len(names) == 1 else "profile"
    overwrite = recipe.overwrite if recipe.out is not None else True
    return reserved(recipe.out or name, overwrite, recipe.model, PROFILE, setting.progress.say)


def open_corpora(recipe: Recipe, setting: Setting) -> tuple[Job, dict[str, Text]]:
    """A job on the first corpus, and the texts of all of them by name. A text without a name is a corpus by itself."""
    corpora: dict[str, list[str]] = {}
    for word in recipe.text or []:
        ((name, (rest,)),) = group([word]).items()
        name = unused(last_part(rest).removesuffix(".txt"), corpora) if name == UNNAMED else name
        corpora.setdefault(name, []).append(absolute(rest))
    first, *others = corpora or [UNNAMED]
    job = open_job(recipe.model_copy(update={"text": corpora.get(first)}), setting, with_tasks=False)
    texts = {first: job.text}
    for name in others:
        asked = job.recipe.model_copy(update={"text": corpora[name]})
        texts[name] = open_text(asked, job.model, job.tokenizer)[0]
    if others:
        words = [f"{name}={file}" for name, files in corpora.items() for file in files]
        job = replace(job, recipe=job.recipe.model_copy(update={"text": words}))
    return job, texts


def unused(name: str, taken: dict[str, Any]) -> str:
    """The name, or with a number behind it when another corpus has it."""
    return next(n for n in (name, *(f"{name}-{k}" for k in range(2, len(taken) + 3))) if n not in taken)


def profile_one(recipe: Recipe, setting: Setting) -> dict[str, Any]:
    """One model: everything on its first corpus, the profile alone on the others."""
    setting.progress.seconds.clear()
    job, texts = open_corpora(recipe, setting)
    measured = {name: measure_once(job, text) for name, text in texts.items()}
    first = measured[next(iter(texts))]
    study = study_of(job, first, predict_once(job, first))
    report = describe_profile(job.model, job.tokenizer, job.text, first, study)
    if len(texts) > 1:
        report |= describe_corpora(list(texts), list(texts.values()), list(measured.values()))
    return {**report, "recipe": job.recipe.settings(), "timings": job.timings()}
