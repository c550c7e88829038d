"""The figures of an earlier check, as a file in the repository: CI compares with it and catches what moved.

A rise of the compressed model's perplexity inside its budget passes the budget; the baseline catches it all the same,
and also a source, a tokenizer, a library or a text that is no longer what it was.
"""

from __future__ import annotations

from pathlib import Path, PurePath

from pydantic import Field, ValidationError

from compressor.evaluate.evaluator import Check
from compressor.report.record import Record, Versioned, list_mistakes
from compressor.report.record_parts import Part, Source
from compressor.runtime.errors import InputError, reason_of
from compressor.runtime.safe_files import parse_json

LOOSE_WORDS = 0.02  # of agreement: one word that flips can change the rest of a continuation
ROUNDING_NATS = 1e-5  # of KL: what another machine or library may add, however small it is


class BaselineSource(Part):
    model: str
    model_type: str
    weights_sha256: str


class BaselineFigure(Part):
    value: float = Field(allow_inf_nan=False)
    better: int = Field(ge=-1, le=1)  # −1: less is better, and the tolerance is a share of the value
    of: str  # hash of the text or task that it was measured on
    rounding: float = Field(default=0.0, ge=0)  # allowed beside the tolerance's share
    slack: float = Field(default=0.0, ge=0)  # what one flipped document or word may cost, however small the tolerance


class BaselineFile(Versioned):
    source: BaselineSource
    compressed_sha256: str
    tokenizer_sha256: str
    parameters_before: int
    figures: dict[str, BaselineFigure]


def baseline_of(record: Record) -> BaselineFile:
    """What is kept of a check: the figures, and what they depend on."""
    figures: dict[str, BaselineFigure] = {}
    for name, text in record.texts.items():
        of = f"{text.sha256} in windows of {text.seq_len}"
        for model, value in (("source", text.baseline), ("compressed", text.compressed)):
            figures[f"perplexity {name} {model}"] = BaselineFigure(value=value, better=-1, of=of)
        if text.fidelity is not None:
            figures[f"kl {name} compressed"] = BaselineFigure(
                value=text.fidelity.kl, better=-1, of=of, rounding=ROUNDING_NATS
            )
    for name, task in record.tasks.items():
        better = 1 if task.higher_is_better else -1
        for model, value in (("source", task.source), ("compressed", task.compressed)):
            figures[f"task {name} {task.metric} {model}"] = BaselineFigure(
                value=value, better=better, of=task.sha256, slack=1 / task.documents
            )
    if record.generation:
        agreement, sha256 = record.generation.agreement, record.generation.sha256
        figures["generation agreement"] = BaselineFigure(value=agreement, better=1, of=sha256, slack=LOOSE_WORDS)
    if record.kv_cache and record.kv_cache.shrinks:
        size, of = float(record.kv_cache.bytes_per_token_after or 0), record.kv_cache.dtype
        figures["key-value cache bytes per token compressed"] = BaselineFigure(value=size, better=-1, of=of)
    source = BaselineSource.model_validate(record.source.to_json_value())
    return BaselineFile(
        schema_version=record.schema_version,
        tool=record.tool,
        environment=record.environment,
        source=source,
        compressed_sha256=record.compressed_sha256 or "",
        tokenizer_sha256=record.tokenizer_sha256 or "",
        parameters_before=record.parameters.before or 0,
        figures=figures,
    )


def read_baseline(file: Path) -> BaselineFile:
    if not file.is_file():
        raise InputError(f"baseline {file} does not exist; write it with --baseline {file} --update-baseline")
    try:
        return BaselineFile.model_validate(parse_json(file))
    except ValidationError as error:
        reason = list_mistakes(error)
    except (OSError, ValueError) as error:
        reason = reason_of(error)
    raise InputError(f"{file} is not a baseline: {reason}; remove it and write it anew with --update-baseline")


def refuse_other_model(baseline: BaselineFile, source: Source, parameters: int, file: Path) -> None:
    """The same model with other weights is compared; another model cannot be."""
    then, same_weights = baseline.source, baseline.source.weights_sha256 == source.weights_sha256
    same_name = PurePath(then.model).name == PurePath(source.model).name
    same_shape = (then.model_type, baseline.parameters_before) == (source.model_type, parameters)
    if not same_shape or not (same_weights or same_name):
        raise InputError(
            f"baseline {file} is of another model: {then.model} ({then.model_type}, {baseline.parameters_before:,} "
            f"parameters), but the source is {source.model} ({source.model_type}, {parameters:,}); name another "
            "file, or remove it"
        )


def compare_with(baseline: BaselineFile, now: BaselineFile, tolerance: float) -> tuple[list[Check], list[str]]:
    """A check for every figure of the baseline, and what else is not as it was."""
    checks: list[Check] = []
    if baseline.tokenizer_sha256 != now.tokenizer_sha256:
        checks.append(Check("baseline tokenizer", False, None, None, "the tokenizer is not the one of the baseline"))
    for name, then in baseline.figures.items():
        figure = now.figures.get(name)
        if figure is None:
            checks.append(Check(f"baseline {name}", False, None, then.value, "measured in the baseline, but not now"))
            continue
        if figure.of != then.of:
            what = "the documents or the task" if name.startswith("task") else "the tokens (text, tokenizer or windows)"
            checks.append(Check(f"baseline {name}", False, figure.value, then.value, f"{what} changed"))
            continue
        limit = limit_of(then, tolerance)
        passed = figure.value <= limit if then.better < 0 else figure.value >= limit
        detail = f"was {then.value:.6g}, is {figure.value:.6g}"
        checks.append(Check(f"baseline {name}", passed, figure.value, limit, detail))
    return checks, moved(baseline, now)


def limit_of(then: BaselineFigure, tolerance: float) -> float:
    """Perplexities and divergences move by a share, scores by a difference."""
    if then.slack == 0:
        return then.value * (1 - then.better * tolerance) - then.better * then.rounding
    return then.value - then.better * max(tolerance, 1.001 * then.slack)


def moved(baseline: BaselineFile, now: BaselineFile) -> list[str]:
    """What changed without being a regression by itself."""
    warnings = []
    if baseline.source.weights_sha256 != now.source.weights_sha256:
        warnings.append("the source's weights are not those of the baseline")
    if baseline.compressed_sha256 != now.compressed_sha256:
        warnings.append("the compressed weights are not those of the baseline")
    for name in sorted({*baseline.environment, *now.environment} - {"threads"}):
        then, is_now = baseline.environment.get(name), now.environment.get(name)
        if then != is_now:
            warnings.append(f"{name} was {then} in the baseline, is {is_now}")
    new = [name for name in now.figures if name not in baseline.figures]
    if new:
        warnings.append(f"not in the baseline: {', '.join(new)}; add it with --update-baseline")
    return warnings
