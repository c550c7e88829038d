"""The record of a run: everything that was measured, as one typed value. Written out, it is compression.json.

Computing rooms fill a record, this room renders it, and reading a stranger's file is validating it. A part that was not
measured is None; keys that this version does not know are kept, for the record is for people too.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator

import compressor
from compressor.report.export_check import ExportCheck
from compressor.report.fidelity import Fidelity
from compressor.report.record_parts import (
    FFN,
    Attention,
    Block,
    Breakdown,
    Budget,
    Check,
    Corpus,
    CorpusPair,
    CrossSummary,
    Generation,
    Parameters,
    Part,
    PerplexityChange,
    Probes,
    Rows,
    SavedBlock,
    Shape,
    Source,
    Swap,
    TaskResult,
    TextResult,
    Texts,
    Tool,
    Verdict,
)
from compressor.report.search_parts import Agreement, FrontierPoint, Healing, TriedPlan
from compressor.report.speed_parts import KVCache, Speed
from compressor.runtime.errors import InputError
from compressor.runtime.names import EXPORT, RECORD, UNNAMED
from compressor.runtime.safe_files import read_json

SCHEMA_VERSION = 1


class Versioned(Part):
    """What every file of this tool begins with."""

    schema_version: Annotated[int, Field(ge=SCHEMA_VERSION, le=SCHEMA_VERSION)]
    tool: Tool
    environment: dict[str, Any] = Field(default_factory=dict)


class SavedRecord(Versioned):
    """A model that was saved through the Python API: what stands where, and no measurements."""

    source: Source
    parameters: Parameters
    blocks: list[SavedBlock]
    attention: list[SavedBlock] = Field(default_factory=list)
    kv_cache: KVCache | None = None
    compressed_sha256: str | None = None
    weights_match: bool | None = None


class Record(Versioned):
    """A profile, a plan, a compressed model or a check of one: the further a run came, the more parts are there."""

    source: Source
    parameters: Parameters
    blocks: list[Block] = Field(default_factory=list)  # the FFNs
    attention: list[Attention] = Field(default_factory=list)  # empty where attention was not measured
    kv_cache: KVCache | None = None
    # how linear the model is
    text: Texts | None = None
    rows: Rows | None = None
    shape: Shape | None = None
    attention_shape: Shape | None = None
    swap: Swap | None = None
    probes: Probes | None = None
    cross: CrossSummary | None = None
    corpora: list[Corpus] = Field(default_factory=list)
    corpus_agreement: list[CorpusPair] = Field(default_factory=list)
    # what the search found
    recipe: dict[str, Any] = Field(default_factory=dict)
    budget: Budget | None = None
    selection: dict[str, PerplexityChange] = Field(default_factory=dict)
    trials: list[TriedPlan] = Field(default_factory=list)
    compensated: bool = False
    in_steps: bool = False  # made step by step in Python, so that no command makes it again
    healing: Healing | None = None
    agreement: Agreement | None = None
    frontier: list[FrontierPoint] = Field(default_factory=list)
    figures: list[str] = Field(default_factory=list)
    # the compressed model against its source
    perplexity: PerplexityChange | None = None
    fidelity: Fidelity | None = None
    texts: dict[str, TextResult] = Field(default_factory=dict)
    tasks: dict[str, TaskResult] = Field(default_factory=dict)
    generation: Generation | None = None
    where: Breakdown | None = None
    checks: list[Check] = Field(default_factory=list)
    warnings: list[str] = Field(default_factory=list)
    passed: bool | None = None
    speed: Speed | None = None
    verification_looks: int | None = None
    timings: dict[str, float] = Field(default_factory=dict)
    out: str | None = None
    compressed_sha256: str | None = None  # of the weights that were written or checked, as `hash_stored` computes it
    # of `compress info` alone
    weights_match: bool | None = None
    # of a check alone
    directory: str | None = None
    replaced: list[SavedBlock] = Field(default_factory=list)
    replaced_attention: list[SavedBlock] = Field(default_factory=list)
    tokenizer_sha256: str | None = None
    baseline_written: str | None = None
    export: ExportCheck | None = None  # of a check of an export

    @model_validator(mode="after")
    def figures_of_a_compressed_model_are_whole(self) -> Record:
        """Perplexity without its budget, its text and the sizes could not be shown."""
        if self.perplexity is not None:
            missing = [name for name in ("budget", "text") if getattr(self, name) is None]
            missing += [f"parameters.{key}" for key, value in self.parameters if value is None]
            if missing:
                raise ValueError(f"there is perplexity, but no {', '.join(missing)}")
        return self

    def text_results(self) -> dict[str, TextResult]:
        """Every text against its budget; an older record of one text has its figures at the top alone."""
        if self.texts or self.perplexity is None or self.budget is None:
            return self.texts
        limit = self.budget.max_dppl
        passed = None if limit is None else self.perplexity.delta_upper <= limit
        budget = self.budget.model_dump(include={"max_dppl", "asked"})
        return {UNNAMED: TextResult(**self.perplexity.model_dump(), **budget, passed=passed)}

    @property
    def branches(self) -> list[Block]:
        """FFNs and attention together in order of depth, the attention of a layer before its FFN."""
        return sorted([*self.attention, *self.blocks], key=lambda block: block.index)

    @property
    def listed(self) -> list[Block]:
        """What a table of results lists: every FFN, and the attention that was replaced, in order of depth."""
        return [b for b in self.branches if b.branch == FFN or b.replacement.kind != "keep"]

    def with_parts(self, **parts: Any) -> Record:
        """The record with these parts set or replaced."""
        return self.model_copy(update=parts)


class ProfileSet(Versioned):
    """The linearity of several models."""

    profiles: list[Record]
    out: str | None = None


def describe_tool() -> dict[str, Any]:
    """The fields of `Versioned`: this tool, and what it runs on."""
    from compressor.runtime.environment import describe_environment  # it imports torch, which reading needs not

    tool = Tool(name="compressor", version=compressor.__version__)
    return {"schema_version": SCHEMA_VERSION, "tool": tool, "environment": describe_environment()}


def read_record(directory: Path) -> Record | SavedRecord:
    """compression.json of a checkpoint, or one line that says why it is none."""
    if not directory.is_dir():
        raise InputError(f"directory {directory} does not exist; give one that compress wrote")
    file = directory / RECORD
    if not file.is_file():
        if (directory / EXPORT).is_file():
            raise InputError(f"{directory} is an export; give the compressed checkpoint that it was made from")
        raise InputError(f"{directory} has no {RECORD}: it was not written by compress")
    values = read_json(file, str(directory))
    try:
        return (Record if is_measured(values) else SavedRecord).model_validate(values)
    except ValidationError as error:
        raise InputError(f"{file} is not a compression record of schema 1: {list_mistakes(error)}") from error


def is_measured(values: dict[str, Any]) -> bool:
    """Whether a file has the figures of a compressed model: its perplexity, or what its search measured."""
    sizes = values.get("parameters")
    whole = isinstance(sizes, dict) and all(sizes.get(name) is not None for name in Parameters.model_fields)
    searched = whole and all(values.get(name) for name in ("selection", "budget", "text", "blocks"))
    return searched or values.get("perplexity") is not None


def by_verdict(blocks: Iterable[Block]) -> dict[Verdict | None, list[int]]:
    """Block indices by verdict; None are the undecided ones."""
    found: dict[Verdict | None, list[int]] = {"safe": [], "costly": [], "unsafe": [], None: []}
    for block in blocks:
        found[block.verdict].append(block.index)
    return found


def weights_match(record: Record | SavedRecord, sha256: str | None) -> bool | None:
    """Whether weights of this hash are those that the record describes; None where either hash is not known."""
    return None if None in (record.compressed_sha256, sha256) else record.compressed_sha256 == sha256


def refuse_other_weights(directory: str | Path, record: Record | SavedRecord, sha256: str | None) -> None:
    """Refuse a checkpoint whose weights, of this hash, were changed after the record was written."""
    if weights_match(record, sha256) is False:
        hashes = f"sha256 {str(sha256)[:12]}…, recorded {str(record.compressed_sha256)[:12]}…"
        raise InputError(
            f"the weights of {directory} are not those of its {RECORD} ({hashes}): its figures are of other weights; "
            "copy or make the checkpoint again, or write changed weights with compressor.save"
        )


def list_mistakes(error: ValidationError, most: int = 8) -> str:
    """What is wrong with a file, by the place in it."""
    mistakes = [f"{'.'.join(map(str, m['loc'])) or 'file'}: {m['msg']}" for m in error.errors()]
    more = f"; and {len(mistakes) - most} more" if len(mistakes) > most else ""
    return "; ".join(mistakes[:most]) + more


def profiles_of(record: Record | ProfileSet) -> list[Record]:
    """The profiles in a record of one model or of several."""
    return record.profiles if isinstance(record, ProfileSet) else [record]
