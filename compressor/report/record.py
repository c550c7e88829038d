"""The record of a run, compression.json: what it must hold to be read."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from pydantic import BaseModel, ConfigDict, Field, ValidationError

import compressor
from compressor.report.tables import info_lines
from compressor.runtime.errors import InputError, reason_of
from compressor.runtime.names import EXPORT, RECORD
from compressor.runtime.safe_files import read_json

SCHEMA_VERSION = 1


class Part(BaseModel):
    """Keys that nobody asked for are kept: the record is for people too."""

    model_config = ConfigDict(extra="allow", frozen=True)


class PlannedReplacement(Part):
    kind: str = Field(pattern="^(keep|linear|lowrank|pruned|hybrid|bias)$")
    rank: int | None = Field(default=None, ge=0, strict=True)
    neurons: int | None = Field(default=None, ge=0, strict=True)


class PlannedBlock(Part):
    index: int = Field(ge=0, strict=True)
    path: str
    r2_lin: float
    r2_lin_ci95: tuple[float, float]
    r2_stream: float
    effective_rank: float
    top_row_share: float
    params_before: int = Field(ge=1, strict=True)
    params_after: int = Field(ge=1, strict=True)
    verdict: str = Field(pattern="^(safe|costly|unsafe)$")
    reason: str
    replacement: PlannedReplacement


class PlannedSource(Part):
    model: str
    weights_sha256: str


class PlannedBudget(Part):
    asked: str
    confidence: float


def list_mistakes(error: ValidationError, most: int = 8) -> str:
    mistakes = [f"{'.'.join(map(str, m['loc'])) or 'file'}: {m['msg']}" for m in error.errors()]
    more = f"; and {len(mistakes) - most} more" if len(mistakes) > most else ""
    return "; ".join(mistakes[:most]) + more


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
        if (directory / EXPORT).is_file():
            raise InputError(f"{directory} is an export; give the compressed checkpoint that it was made from")
        raise InputError(f"{directory} has no {RECORD}: it was not written by compress")
    record = read_json(file, str(directory))
    try:
        (MeasuredRecord if "perplexity" in record else SavedRecord).model_validate(record)
        info_lines(record)  # the parts that need not be there must be sound when they are
    except ValidationError as error:
        raise InputError(f"{file} is not a compression record of schema 1: {list_mistakes(error)}") from error
    except Exception as error:
        reason = f"its figures cannot be shown ({type(error).__name__}: {reason_of(error)})"
        raise InputError(f"{file} is not a compression record of schema 1: {reason}") from error
    return record


def describe_tool() -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "tool": {"name": "compressor", "version": compressor.__version__},
        "environment": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            **{name: version(name) for name in ("safetensors", "tokenizers", "lm-eval")},
            "threads": torch.get_num_threads(),
        },
    }


def verdict_counts(blocks: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    """Block indices by verdict."""
    return {word: [b["index"] for b in blocks if b["verdict"] == word] for word in ("safe", "costly", "unsafe")}


def profiles_of(report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The single profiles in a record of one model or of several."""
    found: list[Mapping[str, Any]] = list(report.get("profiles") or [report])
    return found


def flat(block: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A block's numbers and words in one row; lists of other things than an interval's two ends are left out."""
    row: dict[str, Any] = {}
    for key, value in block.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and key not in ("replacement", "ladder"):
            row |= flat(value, f"{name}_")
        elif key.endswith("ci95"):
            row |= {f"{name}_low": value[0], f"{name}_high": value[1]}
        elif not isinstance(value, (list, tuple, Mapping)) and name != "index":
            row[name] = value
    return row
