"""The whole flow on one screen: measure → plan → fit → patch → evaluate → save → report."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressor import recipe as recipes
from compressor.assessing import Evaluator, Measured
from compressor.blocks import find_blocks
from compressor.budget import drops_of
from compressor.cache import Cache
from compressor.checkpoint import count_parameters, refuse_foreign_code
from compressor.errors import BudgetError, InputError
from compressor.figures import draw_frontier
from compressor.generating import opening_prompts, read_prompts
from compressor.measuring import Profile, measure, unpack_profile
from compressor.modeling_compressor import Replacement
from compressor.models import context_of, identify, load, quiet, source_of
from compressor.patching import patch, patched
from compressor.planfile import read_plan
from compressor.planning import Plan, Planner, fit_forms, predict
from compressor.progress import Progress
from compressor.recipe import Recipe
from compressor.records import (
    describe_assessment,
    describe_budget,
    describe_plan,
    describe_profile,
    describe_speed,
    put_replacements,
)
from compressor.saving import check_output, save, write_json
from compressor.taskfiles import BUILT_IN_TASK
from compressor.tasks import Task, open_tasks
from compressor.text import SPLITS, Text, load_text, split_text
from compressor.timing import flops_per_token, measure_speed
from compressor.trials import Bench
from compressor.verdicts import judge
from compressor.walkback import refuse_missed, search_and_verify

DEFAULT_SEQ_LEN = 512


@dataclass(frozen=True)
class Setting:
    """What is not in a recipe: how much to trust, where to keep what was measured, and what to show."""

    progress: Progress
    trust_remote_code: bool = False
    cache: Cache | None = None


@dataclass(frozen=True)
class Job:
    """A model, its tokenizer and its text; `recipe` has every default filled in."""

    model: Any
    tokenizer: Any
    text: Text
    tasks: list[Task]
    recipe: Recipe
    setting: Setting
    began: float

    def evaluator(self) -> Evaluator:
        return make_evaluator(self.recipe, self.model, self.tokenizer, self.text, self.tasks, self.setting)

    def timings(self) -> dict[str, float]:
        return timings(self.setting.progress, self.began)


def timings(progress: Progress, began: float) -> dict[str, float]:
    steps = {step: round(seconds, 2) for step, seconds in progress.seconds.items()}
    return {**steps, "total": round(time.perf_counter() - began, 2)}


def open_job(recipe: Recipe, setting: Setting, *, with_tasks: bool = True) -> Job:
    """Load tasks, model and text, or say in one line what is wrong with any of them."""
    began = time.perf_counter()
    model_name = recipe.model
    if model_name is None:
        raise InputError("no model: give a directory, a hub id such as gpt2, or `demo`")
    tasks, recipe = name_tasks(recipe, setting.trust_remote_code) if with_tasks else ([], recipe)
    setting.progress.say(f"load {model_name}")
    model, tokenizer = load(
        model_name,
        device=recipe.device,
        dtype=recipe.dtype,
        trust_remote_code=setting.trust_remote_code,
        revision=recipe.revision,
    )
    find_blocks(model)  # an unsupported family is refused before any text is read
    refuse_foreign_code(model)
    text, recipe = open_text(recipe, model, tokenizer)
    return Job(model, tokenizer, text, tasks, recipe, setting, began)


def absolute(name: str) -> str:
    """A path that still holds from another working directory; anything else as it is."""
    return os.path.abspath(os.path.expanduser(name)) if Path(name).expanduser().exists() else name


def open_text(recipe: Recipe, model: Any, tokenizer: Any) -> tuple[Text, Recipe]:
    """The text in windows that the model can take, and the recipe with what was chosen for it."""
    context = context_of(model)
    seq_len = recipe.seq_len or min(DEFAULT_SEQ_LEN, context or DEFAULT_SEQ_LEN)
    if context is not None and seq_len > context:
        raise InputError(f"--seq-len {seq_len} is beyond the model's context of {context}; try --seq-len {context}")
    names = []
    for word in recipe.text or (["demo"] if recipe.model == "demo" else ["wikitext2"]):
        name, rest = split_text(word)
        names.append(absolute(rest) if name is None else f"{name}={absolute(rest)}")
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
    prompts = absolute(recipe.prompts) if recipe.prompts else None
    found = {"model": source_of(model).model, "text": names, "seq_len": seq_len, "prompts": prompts}
    return text, recipe.model_copy(update=found)


def name_tasks(recipe: Recipe, trust_remote_code: bool) -> tuple[list[Task], Recipe]:
    """The tasks to score, and the recipe with their names; the built-in model comes with one."""
    names = recipe.tasks if recipe.tasks is not None else [BUILT_IN_TASK] if recipe.model == "demo" else []
    paths = [absolute(path) for path in recipe.task_path or []]
    if recipe.max_task_drop and not names:
        raise InputError("--max-task-drop is given, but no --tasks; name them, such as --tasks lambada_openai,piqa")
    tasks = open_tasks(names, paths, recipe.task_limit, trust_remote_code) if names else []
    drops_of(recipe.max_task_drop or [], {task.name: task.aliases for task in tasks})  # a wrong name is refused here
    return tasks, recipe.model_copy(update={"tasks": names, "task_path": paths or None})


def make_evaluator(
    recipe: Recipe, model: Any, tokenizer: Any, text: Text, tasks: list[Task], setting: Setting
) -> Evaluator:
    """What source and compressed model are measured on, as the recipe says."""
    context, tokens = context_of(model), recipe.generate
    prompts = []
    if tokens:
        given = recipe.prompts
        prompts = read_prompts(given, tokenizer, tokens, context) if given else opening_prompts(text, tokens, context)
    return Evaluator(
        text,
        tokenizer,
        recipe.budgets(text.counts),
        tasks=tasks,
        limits=drops_of(recipe.max_task_drop or [], {task.name: task.aliases for task in tasks}),
        prompts=prompts,
        tokens=tokens,
        confidence=recipe.confidence,
        batch_size=recipe.batch_size,
        seed=recipe.seed,
        cache=setting.cache,
        progress=setting.progress,
    )


def profile(recipe: Recipe, setting: Setting) -> dict[str, Any]:
    """Measure only: the linearity of every block, and a verdict on each."""
    job = open_job(recipe, setting, with_tasks=False)
    measured = measure(job.model, job.text, batch_size=recipe.batch_size, seed=recipe.seed, progress=setting.progress)
    damages = predict(job.model, measured, job.text, setting.progress)
    verdicts = {p.block.index: judge(p, damages[p.block.index]) for p in measured.blocks}
    report = describe_profile(job.model, job.text, measured, verdicts, damages)
    return {**report, "recipe": job.recipe.settings(), "timings": job.timings()}


def prepare(job: Job, evaluator: Evaluator, *, compensate: bool = True) -> tuple[Planner, dict[str, Any]]:
    """Measure every block; a planner that is ready to search, and the record so far."""
    recipe = job.recipe
    options: dict[str, Any] = {"batch_size": recipe.batch_size, "seed": recipe.seed, "progress": job.setting.progress}
    measured = measure_once(job, options)
    verified = evaluator.losses(job.model, "verify", stored=True)
    bench = Bench(job.model, job.text, confidence=recipe.confidence, cache=job.setting.cache, **options)
    how: dict[str, Any] = {"objective": recipe.objective, "compensate": compensate}
    planner = Planner(bench, measured, evaluator.budgets, verified=verified, **how)
    report = describe_profile(job.model, job.text, measured, planner.verdicts, planner.damages)
    report["budget"] = describe_budget(planner.budgets, planner.allowed)
    return planner, {**report, "recipe": recipe.settings()}


def measure_once(job: Job, options: dict[str, Any]) -> Profile:
    """The profile, from the cache when this model was measured on this text before."""
    cache = job.setting.cache or Cache(None, job.setting.progress)
    key = {
        **identify(job.model),
        "what": "profile",
        "text": job.text.calibration.sha256,
        "seq_len": job.text.seq_len,
        "batch": job.recipe.batch_size,
        "seed": job.recipe.seed,
    }
    kept = cache.get("profile", key, lambda: measure(job.model, job.text, **options).pack())
    return unpack_profile(find_blocks(job.model), kept)


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
    out = require_out(recipe)
    job = open_job(recipe, setting)
    evaluator = job.evaluator()
    planner, report = prepare(job, evaluator)
    found, before, after, looks = search_and_verify(planner, evaluator)
    report = {**describe_plan(report, found), "verification_looks": looks}
    return finish(job, evaluator, found.fits, before, after, report, out)


def apply(recipe: Recipe, plan_file: Path, setting: Setting) -> dict[str, Any]:
    """Fit, patch and save a given plan. BudgetError, and nothing written, when it misses its budget."""
    plan, record = read_plan(plan_file)
    forms = plan.forms()
    given = recipe.model_dump(exclude_unset=True)
    recorded = {key: value for key, value in plan.recipe.items() if key not in ("out", "overwrite")}
    recipe = recipes.validate({**recorded, **given}, f"plan {plan_file}")
    recipe.require_budget()
    out = require_out(recipe)
    if not forms:
        raise InputError(f"plan {plan_file} replaces no block; there is nothing to apply")
    job = open_job(recipe, setting)
    if source_of(job.model).weights_sha256 != plan.source.weights_sha256:
        raise InputError(f"plan {plan_file} was made for other weights ({plan.source.model}) than {recipe.model}")
    evaluator = job.evaluator()
    before = evaluator.measure(job.model, "source", stored=True)
    options: dict[str, Any] = {"batch_size": recipe.batch_size, "cache": setting.cache, "progress": setting.progress}
    fits = fit_forms(job.model, forms, job.text, compensated=plan.compensated, **options)
    with patched(job.model, find_blocks(job.model), fits):
        after = evaluator.measure(job.model, "compressed", stored=False)
    refuse_missed(evaluator, before, after, forms)
    record["recipe"] = job.recipe.settings()
    record["parameters"] = {"before": count_parameters(job.model)}
    sizes = {block.index: block.parameters for block in find_blocks(job.model)}
    record["blocks"] = [{**b, "params_before": sizes[b["index"]]} for b in record["blocks"] if b["index"] in sizes]
    return finish(job, evaluator, fits, before, after, put_replacements(record, fits), out)


def require_out(recipe: Recipe) -> Path:
    if recipe.out is None:
        raise InputError("--out is missing: name the directory to write, such as --out ./smaller")
    return check_output(recipe.out, recipe.overwrite, recipe.model)


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
    speed = describe_speed(measure_speed(job.model, blocks, fits, job.text.verification.windows))
    patch(job.model, blocks, fits)
    found = evaluator.assess(before, after, job.model, stored=False)
    timings = job.timings()
    tokens = sum(getattr(job.text, name).tokens for name in SPLITS)
    timings["one_forward_pass"] = round(tokens / speed["prefill_before"], 2)  # over all the text
    report = {**report, **describe_assessment(found, evaluator), "speed": speed, "timings": timings}
    assert count_parameters(job.model) == report["parameters"]["after"]
    header = "Reproduces this checkpoint:\ncompress --recipe recipe.yaml --out NEW_DIRECTORY"
    recipe = recipes.dump(job.recipe, header)
    save(job.model, job.tokenizer, out, report=report, recipe=recipe, overwrite=job.recipe.overwrite)
    return {**report, "out": str(out)}
