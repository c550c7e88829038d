"""The gate: measure a compressed checkpoint against its source again, on the text it was verified on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from compressor import recipe as recipes
from compressor.budget import Budget
from compressor.checkpoint import count_parameters
from compressor.errors import InputError
from compressor.evaluating import compare, evaluate
from compressor.models import load, source_of
from compressor.pipeline import open_text
from compressor.planfile import Part, PlannedBlock, PlannedBudget, PlannedReplacement, PlannedSource, list_mistakes
from compressor.progress import Progress
from compressor.recipe import Recipe
from compressor.reporting import describe_perplexity, describe_source, describe_text, describe_tool
from compressor.saving import RECORD
from compressor.weights import read_json


class RecordedReplacement(Part):
    path: str
    replacement: PlannedReplacement


class RecordedPerplexity(Part):
    baseline: float
    compressed: float
    delta: float
    delta_ci95: tuple[float, float]
    delta_upper: float
    tokens: int
    seq_len: int


class RecordedParameters(Part):
    before: int
    after: int
    removed: int
    removed_fraction: float


class RecordedBudget(PlannedBudget):
    max_dppl: float


class RecordedText(Part):
    verification: dict[str, Any]


class SavedRecord(Part):
    """What `compressor.save` writes: no measurements."""

    schema_version: int = Field(ge=1, le=1, strict=True)
    tool: dict[str, Any]
    source: PlannedSource
    parameters: dict[str, Any]
    blocks: list[RecordedReplacement]


class MeasuredRecord(Part):
    """What the whole job and `apply` write."""

    schema_version: int = Field(ge=1, le=1, strict=True)
    tool: dict[str, Any]
    source: PlannedSource
    parameters: RecordedParameters
    blocks: list[PlannedBlock]
    perplexity: RecordedPerplexity
    budget: RecordedBudget
    text: RecordedText
    rows: dict[str, int] = Field(default_factory=dict)


def read_record(directory: Path) -> dict[str, Any]:
    """compression.json of a checkpoint, with the parts that every reader needs."""
    if not directory.is_dir():
        raise InputError(f"directory {directory} does not exist; give one that compress wrote")
    file = directory / RECORD
    if not file.is_file():
        raise InputError(f"{directory} has no {RECORD}: it was not written by compress")
    record = read_json(file, str(directory))
    try:
        (MeasuredRecord if "perplexity" in record else SavedRecord).model_validate(record)
    except ValidationError as error:
        raise InputError(f"{file} is not a compression record of schema 1: {list_mistakes(error)}") from error
    return record


def check(
    directory: Path, options: dict[str, Any], *, source: str | None, trust_remote_code: bool, progress: Progress
) -> dict[str, Any]:
    """Perplexity of both on the same windows; `passed` says whether the budget holds."""
    record = read_record(directory)
    file = directory / "recipe.yaml"
    recipe = recipes.resolve(file if file.is_file() else None, options)
    budget = recorded_budget(record, recipe)
    origin = source or str(recipe.model or record["source"].get("model"))
    revision = None if source else record["source"].get("revision")
    progress.say(f"load {directory} and its source {origin}")
    placing: dict[str, Any] = {"device": recipe.device, "dtype": recipe.dtype}
    compressed, tokenizer = load(str(directory), allow_compressed=True, **placing)
    try:
        original, _ = load(origin, trust_remote_code=trust_remote_code, revision=revision, **placing)
    except InputError as error:
        if source:
            raise
        raise InputError(f"the source of {directory}: {error}; if it has moved, add --source DIRECTORY") from error
    text, recipe = open_text(recipe.model_copy(update={"model": origin}), original, tokenizer)
    windows = text.verification.windows
    before, after = (
        evaluate(model, windows, batch_size=recipe.batch_size, progress=progress, step=step)
        for model, step in ((original, "source"), (compressed, "compressed"))
    )
    evaluation = compare(before, after, recipe.confidence, recipe.seed)
    allowed = budget.dppl(before.perplexity)
    counts = count_parameters(original), count_parameters(compressed)
    return {
        **describe_tool(),
        "directory": str(directory),
        "source": describe_source(original),
        "text": describe_text(text),
        "budget": {"max_dppl": allowed, "asked": str(budget), "confidence": budget.confidence},
        "perplexity": describe_perplexity(evaluation),
        "parameters": {
            "before": counts[0],
            "after": counts[1],
            "removed": counts[0] - counts[1],
            "removed_fraction": (counts[0] - counts[1]) / counts[0],
        },
        "warnings": differences(record, source_of(original).weights_sha256, describe_text(text)),
        "passed": evaluation.upper <= allowed,
    }


def recorded_budget(record: dict[str, Any], recipe: Recipe) -> Budget:
    """The budget given now, else the recorded one."""
    if recipe.max_dppl is not None:
        return recipe.budget()
    recorded = record.get("budget") or {}
    if "asked" not in recorded:
        raise InputError("the checkpoint records no budget; give one with --max-dppl 1.0")
    return Budget.parse(recorded["asked"], recipe.confidence)


def differences(record: dict[str, Any], weights_sha256: str, text: dict[str, Any]) -> list[str]:
    """What is not as it was when the checkpoint was made."""
    found = []
    if record["source"].get("weights_sha256") != weights_sha256:
        found.append("the source's weights are not those the checkpoint was made from")
    recorded = (record.get("text") or {}).get("verification") or {}
    if recorded and recorded.get("sha256") != text["verification"]["sha256"]:
        found.append("the verification tokens are not those of the record (another text, tokenizer or setting)")
    return found
