"""The gate: measure a compressed checkpoint against its source again, on the text it was verified on."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compressor.evaluate.evaluator import tokenizer_sha256
from compressor.models.load import load_model
from compressor.models.source import identify, source_of
from compressor.patch.checkpoint import count_parameters
from compressor.pipelines import recipe as recipes
from compressor.pipelines.baseline import BaselineFile, baseline_of, compare_with, read_baseline, refuse_other_model
from compressor.pipelines.describe import describe_assessment, describe_source, describe_text
from compressor.pipelines.job import Setting, make_evaluator, name_tasks, open_text, placing, timings
from compressor.report.ci import append_summary, junit, refuse_unwritable
from compressor.report.page import page
from compressor.report.record import (
    describe_tool,
    read_record,
)
from compressor.runtime import distributed
from compressor.runtime.errors import InputError
from compressor.runtime.names import split_name
from compressor.runtime.outputs import write_json
from compressor.text import group


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


def check(directory: Path, options: dict[str, Any], gate: Gate, setting: Setting) -> dict[str, Any]:
    """Both models on the same texts, tasks and prompts; `passed` says whether every promise holds."""
    began = time.perf_counter()
    record = read_record(directory)
    baseline = gate.refuse_mistakes()
    file = directory / "recipe.yaml"
    recipe = recipes.resolve(file if file.is_file() else None, options)
    budget = recipe.max_dppl or recorded_budget(record)
    # Recorded words for texts and tasks that are not looked at this time mean nothing here.
    if options.get("text") and not options.get("max_dppl"):
        budget = of_names(budget, group(recipe.text or []))
    drops = recipe.max_task_drop
    recorded = not options.get("max_task_drop")
    recipe = recipe.model_copy(update={"max_dppl": budget, "max_task_drop": None if recorded else drops})
    tasks, recipe = name_tasks(recipe, setting.trust_remote_code)
    if recorded:
        drops = of_names(drops or [], [name for task in tasks for name in (task.name, *task.aliases)]) or None
        recipe = recipe.model_copy(update={"max_task_drop": drops})
    origin = gate.source or str(recipe.model or record["source"].get("model"))
    revision = None if gate.source else record["source"].get("revision")
    setting.progress.say(f"load {directory} and its source {origin}")
    place = placing(recipe, setting)
    compressed, tokenizer = load_model(str(directory), allow_compressed=True, **place)
    try:
        original, _ = load_model(origin, trust_remote_code=setting.trust_remote_code, revision=revision, **place)
    except InputError as error:
        if gate.source:
            raise
        raise InputError(f"the source of {directory}: {error}; if it has moved, add --source DIRECTORY") from error
    text, recipe = open_text(recipe.model_copy(update={"model": origin}), original, tokenizer)
    counts = count_parameters(original), count_parameters(compressed)
    source = describe_source(original)
    if baseline is not None and gate.baseline is not None:
        refuse_other_model(baseline, source, counts[0], gate.baseline)
    evaluator = make_evaluator(recipe, original, tokenizer, text, tasks, setting)
    before = evaluator.measure(original, "source", identify(original))
    after = evaluator.measure(compressed, "compressed", identify(compressed))
    found = evaluator.assess(before, after, compressed, identify(compressed))
    report = {
        **describe_tool(),
        "directory": str(directory),
        "source": source,
        "compressed_sha256": source_of(compressed).weights_sha256,
        "tokenizer_sha256": tokenizer_sha256(tokenizer),
        "text": describe_text(text),
        "parameters": {
            "before": counts[0],
            "after": counts[1],
            "removed": counts[0] - counts[1],
            "removed_fraction": (counts[0] - counts[1]) / counts[0],
        },
        "recipe": recipe.settings(),
        **describe_assessment(found, evaluator),
    }
    report["warnings"] += differences(record, source["weights_sha256"], report["text"])
    unchecked = [name for name in record.get("tasks") or {} if name not in report["tasks"]]
    if unchecked:
        report["warnings"].append(f"not looked at this time, but recorded: {', '.join(unchecked)}")
    now = baseline_of(report)
    if baseline is not None and not gate.update_baseline:
        checks, warnings = compare_with(baseline, now, gate.tolerance)
        report["checks"] += [asdict(check) for check in checks]
        report["warnings"] += warnings
    report["passed"] = all(check["passed"] for check in report["checks"])
    report["timings"] = timings(setting.progress, began)
    announce(report, now, gate, setting)
    return report


def announce(report: dict[str, Any], now: dict[str, Any], gate: Gate, setting: Setting) -> None:
    """Write what was asked for. A baseline is kept only when the budget holds."""
    if distributed.rank() > 0:
        return
    try:
        if gate.baseline is not None and gate.update_baseline and report["passed"]:
            write_json(gate.baseline, now)
            report["baseline_written"] = str(gate.baseline)
        if gate.junit is not None:
            gate.junit.write_text(junit(report), encoding="utf-8")
        if gate.page is not None:
            gate.page.write_text(page(report), encoding="utf-8")
    except OSError as error:
        raise InputError(f"{error.filename or 'what was found'} cannot be written: {error.strerror}") from error
    steps = os.environ.get("GITHUB_STEP_SUMMARY")
    if steps:
        append_summary(steps, report, setting.progress)


def of_names(words: Iterable[str], names: Iterable[str]) -> list[str]:
    """The words without a name, and those for one of these names."""
    known = {None, *names}
    return [word for word in words if split_name(word)[0] in known]


def recorded_budget(record: dict[str, Any]) -> list[str]:
    """The budget that the checkpoint was made with, as words of the command line."""
    recorded = record.get("budget") or {}
    if "asked" not in recorded:
        raise InputError("the checkpoint records no budget; give one with --max-dppl 1.0")
    return str(recorded["asked"]).split(",")


def differences(record: dict[str, Any], weights_sha256: str, text: dict[str, Any]) -> list[str]:
    """What is not as it was when the checkpoint was made."""
    found = []
    if record["source"].get("weights_sha256") != weights_sha256:
        found.append("the source's weights are not those the checkpoint was made from")
    recorded = (record.get("text") or {}).get("verification") or {}
    if recorded and recorded.get("sha256") != text["verification"]["sha256"]:
        found.append("the verification tokens are not those of the record (another text, tokenizer or setting)")
    return found
