"""The gate: measure a compressed checkpoint against its source again, on the text it was verified on."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compressor.evaluate.budget import parse_divergence
from compressor.evaluate.evaluator import tokenizer_sha256
from compressor.evaluate.kv_cache import kv_cache_bytes
from compressor.models.load import load_model
from compressor.models.source import identify, source_of
from compressor.patch.checkpoint import count_parameters
from compressor.pipelines import recipe as recipes
from compressor.pipelines.baseline import BaselineFile, baseline_of, compare_with, read_baseline, refuse_other_model
from compressor.pipelines.describe import (
    describe_assessment,
    describe_kv_cache,
    describe_sizes,
    describe_source,
    describe_text,
    list_replaced,
)
from compressor.pipelines.job import (
    context_for,
    make_evaluator,
    name_in_cache,
    name_tasks,
    open_text,
    placing,
    size_target,
    timings,
)
from compressor.pipelines.recipe import Recipe
from compressor.pipelines.stages import list_steps
from compressor.report.ci import append_summary, junit, refuse_unwritable
from compressor.report.formats import name_replacement
from compressor.report.page import page
from compressor.report.record import Record, SavedRecord, describe_tool, read_record, weights_match
from compressor.report.record_parts import Check, Replacement
from compressor.runtime import distributed
from compressor.runtime.context import RunContext
from compressor.runtime.errors import InputError
from compressor.runtime.names import LOAD, NO_LIMIT, split_name
from compressor.runtime.outputs import write_json
from compressor.runtime.progress import Progress
from compressor.text import group_by_name


@dataclass(frozen=True)
class Gate:
    """What a check is held against and where its verdict goes, besides the terminal."""

    source: str | None = None
    baseline: Path | None = None
    update_baseline: bool = False
    tolerance: float = 0.005
    junit: Path | None = None
    page: Path | None = None

    def refuse_mistakes(self) -> BaselineFile | None:
        """Say what is wrong before the work; the baseline, when there is one to compare with."""
        if self.update_baseline and self.baseline is None:
            raise InputError("--update-baseline needs a file: add --baseline baseline.json")
        if not 0 <= self.tolerance < 1:
            raise InputError(f"--tolerance must be at least 0 and below 1, got {self.tolerance}; try 0.005")
        written = {"--baseline": self.baseline if self.update_baseline else None, "--junit": self.junit}
        for option, file in {**written, "--report": self.page}.items():
            refuse_unwritable(option, file)
        if self.baseline is None or (self.update_baseline and not self.baseline.exists()):
            return None
        return read_baseline(self.baseline)


def run(directory: Path, options: Mapping[str, Any], gate: Gate, context: RunContext) -> Record:
    """Both models on the same texts, tasks and prompts; `passed` says whether every promise holds."""
    began = time.perf_counter()
    recorded = read_record(directory)
    baseline = gate.refuse_mistakes()
    recipe = recipe_of(directory, options, recorded)
    if recipe.max_dppl is None and recipe.max_kl is None and gate.baseline is None:
        raise InputError(
            f"{directory} was made for a size ({recorded_size(recorded)}), with no limit on perplexity to check; give "
            "one with --max-dppl 1.0, or compare with --baseline FILE"
        )
    context = context_for(recipe, context)
    context.progress.follow(list_steps("check", recipe))
    context.progress.enter(LOAD)
    # Recorded budgets of tasks that are not looked at this time mean nothing here.
    recorded_drops = [] if options.get("max_task_drop") else recipe.max_task_drop or []
    if recorded_drops:
        recipe = recipe.model_copy(update={"max_task_drop": None})
    tasks, recipe = name_tasks(recipe, context.trust_remote_code)
    drops = of_names(recorded_drops, [name for task in tasks for name in (task.name, *task.aliases)])
    if drops:
        recipe = recipe.model_copy(update={"max_task_drop": drops})
    origin = gate.source or str(recipe.model or recorded.source.model)
    compressed, original, tokenizer = load_both(directory, origin, recipe, recorded, gate, context)
    text, recipe = open_text(recipe.model_copy(update={"model": origin}), original, tokenizer, context)
    source = describe_source(original)
    sizes = describe_sizes(count_parameters(original), count_parameters(compressed))
    if baseline is not None and gate.baseline is not None:
        refuse_other_model(baseline, source, sizes.before or 0, gate.baseline)

    evaluator = make_evaluator(recipe, original, tokenizer, text, tasks, context)
    before = evaluator.measure(original, "source", identify(original))
    after = evaluator.measure(compressed, "compressed", identify(compressed), before)
    assessment = evaluator.assess(before, after, compressed, identify(compressed), searched_tasks(recorded))
    replaced, replaced_attention = list_replaced(compressed, original)
    record = Record(
        **describe_tool(),
        directory=str(directory),
        replaced=replaced,
        replaced_attention=replaced_attention,
        source=source,
        compressed_sha256=source_of(compressed).weights_sha256,
        tokenizer_sha256=tokenizer_sha256(tokenizer),
        text=describe_text(text),
        parameters=sizes,
        kv_cache=describe_kv_cache(compressed, kv_cache_bytes(original), kv_cache_bytes(compressed)),
        recipe=recipe.settings(),
        **describe_assessment(assessment, evaluator, sizes, size_target(recipe, count_parameters(original))),
    )
    record = record.with_parts(warnings=[*record.warnings, *differences(recorded, record)])
    now = baseline_of(record)
    if baseline is not None and not gate.update_baseline:
        checks, moved = compare_with(baseline, now, gate.tolerance)
        checks_of_both = [*record.checks, *(Check(**asdict(check)) for check in checks)]
        record = record.with_parts(checks=checks_of_both, warnings=[*record.warnings, *moved])
    passed = all(check.passed for check in record.checks)
    record = record.with_parts(passed=passed, timings=timings(context.progress, began))
    return announce(record, now, gate, context.progress)


def searched_tasks(recorded: Record | SavedRecord) -> dict[str, int]:
    """The tasks by which the checkpoint's blocks were chosen, and the looks that their deciding documents have had."""
    tasks = recorded.tasks if isinstance(recorded, Record) else {}
    return {name: task.looks for name, task in tasks.items() if task.chosen_on}


def recipe_of(directory: Path, options: Mapping[str, Any], recorded: Record | SavedRecord) -> Recipe:
    """The checkpoint's own recipe with the options of this check. Recorded budgets of texts that are not looked at this
    time mean nothing here."""
    file = directory / "recipe.yaml"
    recipe = recipes.resolve(file if file.is_file() else None, dict(options))
    max_kl = recipe.max_kl or recorded_divergence(recorded)
    budget = recipe.max_dppl or recorded_budget(recorded)
    if budget and options.get("text") and not options.get("max_dppl"):
        budget = of_names(budget, group_by_name(recipe.text or []))
    return recipe.model_copy(update={"max_dppl": budget, "max_kl": max_kl})


def load_both(
    directory: Path, origin: str, recipe: Recipe, recorded: Record | SavedRecord, gate: Gate, context: RunContext
) -> tuple[Any, Any, Any]:
    """The compressed model, its source, and the tokenizer."""
    revision = None if gate.source else recorded.source.revision
    context.progress.note(f"load {directory} and its source {origin}")
    place = placing(recipe, context)
    compressed, tokenizer = load_model(str(directory), allow_compressed=True, **place)
    try:
        original, _ = load_model(origin, trust_remote_code=context.trust_remote_code, revision=revision, **place)
    except InputError as error:
        if gate.source:
            raise
        raise InputError(f"the source of {directory}: {error}; if it has moved, add --source DIRECTORY") from error
    for model in (compressed, original):
        name_in_cache(model, context)
    return compressed, original, tokenizer


def announce(record: Record, now: BaselineFile | None, gate: Gate, progress: Progress) -> Record:
    """Write what was asked for. A baseline, which an export has none of, is kept only when the budget holds."""
    if distributed.rank() > 0:
        return record
    try:
        if now is not None and gate.baseline is not None and gate.update_baseline and record.passed:
            write_json(gate.baseline, now.to_json_value())
            record = record.with_parts(baseline_written=str(gate.baseline))
        if gate.junit is not None:
            gate.junit.write_text(junit(record), encoding="utf-8")
        if gate.page is not None:
            gate.page.write_text(page(record), encoding="utf-8")
    except OSError as error:
        raise InputError(f"{error.filename or 'a file'} cannot be written: {error.strerror}") from error
    steps = os.environ.get("GITHUB_STEP_SUMMARY")
    if steps:
        append_summary(steps, record, progress)
    return record


def of_names(words: Iterable[str], names: Iterable[str]) -> list[str]:
    """The words without a name, and those for one of these names."""
    known = {None, *names}
    return [word for word in words if split_name(word)[0] in known]


def recorded_budget(recorded: Record | SavedRecord) -> list[str] | None:
    """The budget that the checkpoint was made with, as words of the command line; None: perplexity had no limit."""
    if not isinstance(recorded, Record) or recorded.budget is None:
        raise InputError("the checkpoint records no budget; give one with --max-dppl 1.0")
    return None if recorded.budget.asked == NO_LIMIT else recorded.budget.asked.split(",")


def recorded_divergence(recorded: Record | SavedRecord) -> float | None:
    """The largest divergence from the source that the checkpoint was made with, if it had a limit."""
    limit = recorded.budget.max_kl if isinstance(recorded, Record) and recorded.budget else None
    return None if limit is None else parse_divergence(limit)


def recorded_size(recorded: Record | SavedRecord) -> str:
    """The size that the checkpoint was made for, as words of the command line."""
    budget = recorded.budget if isinstance(recorded, Record) else None
    return f"--remove {budget.remove.asked}" if budget and budget.remove else "none is recorded"


def differences(recorded: Record | SavedRecord, now: Record) -> list[str]:
    """What is not as it was when the checkpoint was made."""
    warnings = []
    if recorded.source.weights_sha256 != now.source.weights_sha256:
        warnings.append("the source's weights are not those the checkpoint was made from")
    if weights_match(recorded, now.compressed_sha256) is False:
        warnings.append("the checkpoint's weights are not those of its record: its recorded figures are of others")
    warnings += list_other_replacements(recorded, now)
    if not isinstance(recorded, Record):
        return warnings
    if recorded.text and now.text and recorded.text.verification.sha256 != now.text.verification.sha256:
        warnings.append("the verification tokens are not those of the record (another text, tokenizer or setting)")
    unchecked = [name for name in recorded.tasks if name not in now.tasks]
    if unchecked:
        warnings.append(f"not looked at this time, but recorded: {', '.join(unchecked)}")
    return warnings


def list_other_replacements(recorded: Record | SavedRecord, now: Record) -> list[str]:
    """The blocks and attention in whose place something else stands than the record says."""
    entries = {b.path: b.replacement for b in (*recorded.blocks, *recorded.attention) if b.replacement.kind != "keep"}
    found = {b.path: b.replacement for b in (*now.replaced, *now.replaced_attention)}
    words = {path: [name_kept(of.get(path)) for of in (found, entries)] for path in (*entries, *found)}
    return [
        f"{path}: {is_now} in the checkpoint, {then} in its record"
        for path, (is_now, then) in words.items()
        if is_now != then
    ]


def name_kept(replacement: Replacement | None) -> str:
    """A replacement in words, with the numbers of the heads that it keeps."""
    if replacement is None:
        return "as it was"
    if replacement.neurons:  # of how many is not told by every record
        replacement = replacement.model_copy(update={"units": None})
    numbers = f" ({', '.join(map(str, replacement.kept_heads))})" if replacement.kept_heads else ""
    return name_replacement(replacement) + numbers
