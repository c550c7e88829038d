"""The whole flow on one screen: measure → plan → fit → patch → evaluate → save → report."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressor import recipe as recipes
from compressor.blocks import find_blocks
from compressor.budget import Budget
from compressor.checkpoint import count_parameters, refuse_foreign_code
from compressor.errors import BudgetError, InputError
from compressor.evaluating import Evaluation, compare, evaluate
from compressor.fitting import Ranks
from compressor.measuring import measure
from compressor.modeling_compressor import Replacement
from compressor.models import load, quiet, source_of
from compressor.patching import patch, patched
from compressor.planfile import read_plan
from compressor.planning import Planner, fit_ranks, name_all, predict
from compressor.progress import Progress
from compressor.recipe import Recipe
from compressor.reporting import describe_perplexity, describe_plan, describe_profile, put_replacements
from compressor.saving import check_output, save, write_json
from compressor.text import SPLITS, Text, load_text
from compressor.verdicts import judge

DEFAULT_SEQ_LEN = 512
MOST_VERIFICATIONS = 4  # a plan that verification text refuses is searched again with less to spend


@dataclass(frozen=True)
class Job:
    """A model, its tokenizer and its text; `recipe` has every default filled in."""

    model: Any
    tokenizer: Any
    text: Text
    recipe: Recipe
    progress: Progress
    began: float

    def timings(self) -> dict[str, float]:
        steps = {step: round(seconds, 2) for step, seconds in self.progress.seconds.items()}
        return {**steps, "total": round(time.perf_counter() - self.began, 2)}


def open_job(recipe: Recipe, trust_remote_code: bool, progress: Progress) -> Job:
    """Load the model and cut the text, or say in one line what is wrong with either."""
    began = time.perf_counter()
    if recipe.model is None:
        raise InputError("no model: give a directory, a hub id such as gpt2, or `demo`")
    progress.say(f"load {recipe.model}")
    model, tokenizer = load(
        recipe.model,
        device=recipe.device,
        dtype=recipe.dtype,
        trust_remote_code=trust_remote_code,
        revision=recipe.revision,
    )
    find_blocks(model)  # an unsupported family is refused before any text is read
    refuse_foreign_code(model)
    text, recipe = open_text(recipe, model, tokenizer)
    return Job(model, tokenizer, text, recipe, progress, began)


def open_text(recipe: Recipe, model: Any, tokenizer: Any) -> tuple[Text, Recipe]:
    """The text in windows that the model can take, and the recipe with what was chosen for it."""
    config = model.config.get_text_config()
    context = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)
    seq_len = recipe.seq_len or min(DEFAULT_SEQ_LEN, context or DEFAULT_SEQ_LEN)
    if context is not None and seq_len > context:
        raise InputError(f"--seq-len {seq_len} is beyond the model's context of {context}; try --seq-len {context}")
    names = recipe.text or (["demo"] if recipe.model == "demo" else ["wikitext2"])
    paths = {name: Path(name).expanduser() for name in names}
    names = [os.path.abspath(path) if path.exists() else name for name, path in paths.items()]
    with quiet():
        text = load_text(
            names,
            tokenizer,
            seq_len=seq_len,
            calib_tokens=recipe.calib_tokens,
            select_tokens=recipe.select_tokens,
            verify_tokens=recipe.verify_tokens,
            seed=recipe.seed,
        )
    largest = max(int(getattr(text, name).windows.max()) for name in SPLITS)
    rows = model.get_input_embeddings().weight.shape[0]
    if largest >= rows:
        raise InputError(f"the tokenizer gives token {largest}, but the model has only {rows} embeddings")
    return text, recipe.model_copy(update={"model": source_of(model).model, "text": names, "seq_len": seq_len})


def profile(recipe: Recipe, *, trust_remote_code: bool = False, progress: Progress) -> dict[str, Any]:
    """Measure only: the linearity of every block, and a verdict on each."""
    job = open_job(recipe, trust_remote_code, progress)
    measured = measure(job.model, job.text, batch_size=recipe.batch_size, seed=recipe.seed, progress=progress)
    _, damages = predict(job.model, measured, job.text, progress)
    verdicts = {p.block.index: judge(p, damages[p.block.index]) for p in measured.blocks}
    report = describe_profile(job.model, job.text, measured, verdicts, damages)
    return {**report, "recipe": job.recipe.settings(), "timings": job.timings()}


def prepare(job: Job, budget: Budget) -> tuple[Planner, dict[str, Any]]:
    """Measure every block; a planner that is ready to search, and the record so far."""
    recipe = job.recipe
    options: dict[str, Any] = {"batch_size": recipe.batch_size, "seed": recipe.seed, "progress": job.progress}
    measured = measure(job.model, job.text, **options)
    planner = Planner(job.model, measured, job.text, budget, **options)
    report = describe_profile(job.model, job.text, measured, planner.verdicts, planner.damages)
    report["budget"] = {"max_dppl": planner.allowed, "asked": str(budget), "confidence": budget.confidence}
    return planner, {**report, "recipe": recipe.settings()}


def plan(recipe: Recipe, out: Path, *, trust_remote_code: bool = False, progress: Progress) -> dict[str, Any]:
    """Measure and search; write the plan, touch no weights."""
    budget = recipe.budget()
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise InputError(f"--out {out} cannot be written; name a file in an existing directory, such as plan.json")
    job = open_job(recipe, trust_remote_code, progress)
    planner, report = prepare(job, budget)
    report = describe_plan(report, planner.search()) | {"timings": job.timings()}
    write_json(out, report)
    return report


def compress(recipe: Recipe, *, trust_remote_code: bool = False, progress: Progress) -> dict[str, Any]:
    """The whole job. BudgetError, and nothing written, when no plan holds on the verification text."""
    budget = recipe.budget()
    out = require_out(recipe)
    job = open_job(recipe, trust_remote_code, progress)
    planner, report = prepare(job, budget)
    found = planner.search()
    tighten = 1.0
    for looks in range(1, MOST_VERIFICATIONS + 1):
        evaluation = planner.verify(found)
        if evaluation.upper <= planner.allowed:
            report = {**describe_plan(report, found), "verification_looks": looks}
            return finish(job, found.fits, evaluation, report, out)
        progress.say(f"  verification text refuses it: upper end {evaluation.upper:+.3f} of {planner.allowed:.3f}")
        refusal = missed(budget, evaluation, planner.allowed, found.ranks)
        tighten *= 0.9 * planner.allowed / evaluation.upper
        try:
            found = planner.search(tighten, ceiling=0.95 * found.predicted)
        except BudgetError:
            break
    raise refusal


def apply(recipe: Recipe, plan_file: Path, *, trust_remote_code: bool = False, progress: Progress) -> dict[str, Any]:
    """Fit, patch and save a given plan. BudgetError, and nothing written, when it misses its budget."""
    plan, record = read_plan(plan_file)
    ranks = plan.ranks()
    given = recipe.model_dump(exclude_unset=True)
    recorded = {key: value for key, value in plan.recipe.items() if key not in ("out", "overwrite")}
    recipe = recipes.validate({**recorded, **given}, f"plan {plan_file}")
    budget = recipe.budget()
    out = require_out(recipe)
    if not ranks:
        raise InputError(f"plan {plan_file} replaces no block; there is nothing to apply")
    job = open_job(recipe, trust_remote_code, progress)
    if source_of(job.model).weights_sha256 != plan.source.weights_sha256:
        raise InputError(f"plan {plan_file} was made for other weights ({plan.source.model}) than {recipe.model}")
    windows = job.text.verification.windows
    before = evaluate(job.model, windows, batch_size=recipe.batch_size, progress=progress, step="verify")
    fits = fit_ranks(job.model, ranks, job.text, batch_size=recipe.batch_size, progress=progress)
    with patched(job.model, find_blocks(job.model), fits):
        after = evaluate(job.model, windows, batch_size=recipe.batch_size, progress=progress, step="verify")
    evaluation = compare(before, after, recipe.confidence, recipe.seed)
    allowed = budget.dppl(before.perplexity)
    if evaluation.upper > allowed:
        raise missed(budget, evaluation, allowed, ranks)
    record["budget"] = {"max_dppl": allowed, "asked": str(budget), "confidence": budget.confidence}
    record["recipe"] = job.recipe.settings()
    record["parameters"] = {"before": count_parameters(job.model)}
    sizes = {block.index: block.parameters for block in find_blocks(job.model)}
    record["blocks"] = [{**b, "params_before": sizes[b["index"]]} for b in record["blocks"] if b["index"] in sizes]
    return finish(job, fits, evaluation, put_replacements(record, fits), out)


def require_out(recipe: Recipe) -> Path:
    if recipe.out is None:
        raise InputError("--out is missing: name the directory to write, such as --out ./smaller")
    return check_output(recipe.out, recipe.overwrite, recipe.model)


def missed(budget: Budget, evaluation: Evaluation, allowed: float, ranks: Ranks) -> BudgetError:
    return BudgetError(
        f"the budget {budget} is missed on the verification text: closest was block {name_all(ranks)} with ΔPPL "
        f"{evaluation.delta:+.3f} (upper end {evaluation.upper:+.3f}, allowed {allowed:+.3f}; windows of "
        f"{evaluation.seq_len} tokens); nothing written"
    )


def finish(
    job: Job, fits: dict[int, Replacement], evaluation: Evaluation, report: dict[str, Any], out: Path
) -> dict[str, Any]:
    """Patch for good, save, and complete the record."""
    patch(job.model, find_blocks(job.model), fits)
    report["perplexity"] = describe_perplexity(evaluation)
    report["timings"] = job.timings()
    assert count_parameters(job.model) == report["parameters"]["after"]
    header = "Reproduces this checkpoint:\ncompress --recipe recipe.yaml --out NEW_DIRECTORY"
    recipe = recipes.dump(job.recipe, header)
    save(job.model, job.tokenizer, out, report=report, recipe=recipe, overwrite=job.recipe.overwrite)
    return {**report, "out": str(out)}
