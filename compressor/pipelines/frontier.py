"""File size against perplexity in llama.cpp: the source and models made of it, each in several precisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressor.evaluate.evaluator import tokenizer_sha256
from compressor.evaluate.hull import find_between, lower_hull
from compressor.evaluate.perplexity import Losses, compare
from compressor.export.gguf import DTYPES, refuse_activation
from compressor.export.llama import convert_to_llama, refuse_other_types
from compressor.export.written import is_export
from compressor.models.load import load_model
from compressor.patch.checkpoint import count_parameters
from compressor.pipelines.check import recipe_of
from compressor.pipelines.check_export import FLOAT32
from compressor.pipelines.describe import change_values, describe_source
from compressor.pipelines.job import choose_seq_len, context_for, name_in_cache, open_text
from compressor.pipelines.recipe import Recipe
from compressor.pipelines.scoring import Scorer, Scores, describe_verification, require_runtime, verification_alone
from compressor.report.chart_style import draw
from compressor.report.charts import size_chart
from compressor.report.formats import last_part
from compressor.report.frontier_record import FrontierFile, Rival, SizeFrontier, Verdict
from compressor.report.record import Record, SavedRecord, describe_tool, read_record, refuse_other_weights
from compressor.report.record_parts import PerplexityChange
from compressor.runtime import distributed
from compressor.runtime.context import RunContext
from compressor.runtime.errors import InputError
from compressor.runtime.names import BUILT_IN_MODELS, FRONTIER
from compressor.runtime.outputs import reporting_disk_errors, reserved, whole_directory, write_json
from compressor.runtime.stored_weights import hash_stored

REFERENCE = "f16"  # the precision of the source that every file is compared with
USUAL_DTYPES = ("f32", "f16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")


@dataclass(frozen=True)
class FrontierRequest:
    """The arguments of one frontier."""

    directories: Sequence[Path]
    source: str | None = None  # None: as recorded
    dtypes: str | None = None  # by commas; None: all of USUAL_DTYPES
    tokens: int = 2048
    out: Path | None = None
    overwrite: bool = False


@dataclass(frozen=True)
class Candidate:
    """A model in one precision, measured."""

    model: str
    compressed: bool
    dtype: str
    parameters: int
    scores: Scores

    @property
    def bytes(self) -> int:
        assert self.scores.bytes is not None
        return self.scores.bytes

    @property
    def point(self) -> tuple[float, float]:
        return float(self.bytes), self.scores.losses.windows.mean().item()


def run(request: FrontierRequest, options: Mapping[str, Any], context: RunContext) -> SizeFrontier:
    """Measure the source and every model in every precision, and say which files are worth their size."""
    if distributed.size() > 1:
        raise InputError(f"a frontier is measured by one process, and {distributed.size()} were started; start one")
    runtime = require_runtime("gguf")
    dtypes = read_dtypes(request.dtypes)
    records = read_records(request.directories)
    if request.out is None:
        return measure(request, dtypes, records, runtime, options, context)
    with reserved(request.out, request.overwrite, None, FRONTIER, context.progress.say) as target:
        record = measure(request, dtypes, records, runtime, options, context)
        with reporting_disk_errors(target), whole_directory(target) as partial:
            write_json(partial / FRONTIER, record.to_json_value())
            names = [Path(file).name for file in draw(size_chart(record), partial)]
        return record.model_copy(update={"written": [str(target / name) for name in (FRONTIER, *names)]})


def read_dtypes(words: str | None) -> list[str]:
    """The precisions that were asked for and the reference, from many bits to few."""
    asked = [word.strip() for word in words.split(",")] if words is not None else list(USUAL_DTYPES)
    unknown = next((word for word in asked if word not in DTYPES), None)
    if unknown is not None:
        raise InputError(f"--dtypes {unknown!r} is not known; use {', '.join(DTYPES)}, several by commas")
    return [dtype for dtype in DTYPES if dtype in (*asked, REFERENCE)]


def read_records(directories: Sequence[Path]) -> list[Record | SavedRecord]:
    """The record of every directory; all of them must be checkpoints that were made from one source."""
    records: list[Record | SavedRecord] = []
    for number, directory in enumerate(directories):
        if directory in directories[:number]:
            raise InputError(f"{directory} is given twice; give each directory once")
        if is_export(directory):
            raise InputError(f"{directory} is an export; give the checkpoint that it was made from")
        record = read_record(directory)
        refuse_other_weights(directory, record, hash_stored(directory))
        if records and record.source.weights_sha256 != records[0].source.weights_sha256:
            raise InputError(
                f"{directory} was made from {record.source.model}, and {directories[0]} from "
                f"{records[0].source.model}; give models of one source"
            )
        records.append(record)
    return records


def measure(
    request: FrontierRequest,
    dtypes: Sequence[str],
    records: Sequence[Record | SavedRecord],
    runtime: str,
    options: Mapping[str, Any],
    context: RunContext,
) -> SizeFrontier:
    first, recorded = request.directories[0], records[0]
    recipe = recipe_of(first, options, recorded)
    context = context_for(recipe, context)
    source, tokenizer = load_source(request, recipe, recorded, context)
    refuse_form(source, source.name_or_path)
    for directory in request.directories:  # before anything is measured, which takes minutes
        model, other = load_compressed(directory, context)
        refuse_form(model, str(directory))
        if tokenizer_sha256(other) != tokenizer_sha256(tokenizer):
            raise InputError(f"{directory} has another tokenizer than its source, so their tokens are not the same")
        del model
    recipe = limit_text(recipe, source, request.tokens)
    text, recipe = open_text(recipe, source, tokenizer, context)
    scorer = Scorer(text.verification, context)
    candidates = measure_model(scorer, source, tokenizer, dtypes, None)
    made_from = describe_source(source)
    del source  # before the next one is loaded
    for directory, name in zip(request.directories, name_all(request.directories), strict=True):
        model, _ = load_compressed(directory, context)
        candidates += measure_model(scorer, model, tokenizer, dtypes, name)
        del model
    files = describe_files(candidates, text.verification.documents, context)
    other_source = recorded.source.weights_sha256 != made_from.weights_sha256
    return SizeFrontier(
        **describe_tool(),
        source=made_from,
        runtime=runtime,
        text=describe_verification(text),
        reference=REFERENCE,
        files=files,
        warnings=["the source's weights are not those the models were made from"] if other_source else [],
    )


def name_all(directories: Sequence[Path]) -> list[str]:
    """The last parts of the names; where two are the same, the whole names."""
    names = [last_part(str(directory)) for directory in directories]
    return names if len(set(names)) == len(names) else [str(directory) for directory in directories]


def load_source(
    request: FrontierRequest, recipe: Recipe, recorded: Record | SavedRecord, context: RunContext
) -> tuple[Any, Any]:
    """The source in float32 on the CPU, and its tokenizer."""
    name = request.source or recorded.source.model
    if recipe.text is None and name not in BUILT_IN_MODELS:
        raise InputError(f"{request.directories[0]} records no text; give one with --text FILE")
    context.progress.say(f"load {name}, the source")
    revision = None if request.source else recorded.source.revision
    try:
        source, tokenizer = load_model(name, trust_remote_code=context.trust_remote_code, revision=revision, **FLOAT32)
    except InputError as error:
        if request.source:
            raise
        raise InputError(
            f"the source of {request.directories[0]}: {error}; if it has moved, add --source DIRECTORY"
        ) from error
    name_in_cache(source, context)
    return source, tokenizer


def load_compressed(directory: Path, context: RunContext) -> tuple[Any, Any]:
    context.progress.note(f"load {directory}")
    model, tokenizer = load_model(str(directory), allow_compressed=True, **FLOAT32)
    name_in_cache(model, context)
    return model, tokenizer


def refuse_form(model: Any, name: str) -> None:
    """Refuse a model that has no form in llama.cpp with a width for every block."""
    try:
        refuse_other_types(model)
        refuse_activation(convert_to_llama(model))
    except InputError as error:
        raise InputError(f"{name} cannot be measured as GGUF: {error}") from error


def limit_text(recipe: Recipe, source: Any, tokens: int) -> Recipe:
    """The recipe with so many verification tokens, and little of the rest."""
    seq_len = choose_seq_len(recipe, source)
    if tokens < seq_len:
        raise InputError(f"--tokens {tokens} is not one window of {seq_len}; raise it, or lower --seq-len")
    # Tasks, continuations and KL are of the checkpoint alone.
    meant = {"verify_tokens": tokens, "max_kl": None, "tasks": None, "max_task_drop": None, "generate": 0}
    return recipe.model_copy(update={"model": source.name_or_path, **verification_alone(recipe, seq_len), **meant})


def measure_model(
    scorer: Scorer, model: Any, tokenizer: Any, dtypes: Sequence[str], name: str | None
) -> list[Candidate]:
    """A model in every precision; `name` is None for the source."""
    parameters, words = count_parameters(model), name or "source"
    return [
        Candidate(
            words, name is not None, dtype, parameters, scorer.as_gguf(model, tokenizer, dtype, f"{words} {dtype}")
        )
        for dtype in dtypes
    ]


def describe_files(candidates: Sequence[Candidate], documents: Any, context: RunContext) -> list[FrontierFile]:
    """Every file with its change, its rival and its place on the hull, the smallest first."""
    by_size = sorted(candidates, key=lambda each: (each.bytes, each.model, each.dtype))
    reference = next(each for each in by_size if not each.compressed and each.dtype == REFERENCE)
    sources = [each for each in by_size if not each.compressed]
    hull = {id(by_size[number]) for number in lower_hull([each.point for each in by_size])}

    def change(before: Losses, after: Losses) -> PerplexityChange:
        return PerplexityChange(**change_values(compare(before, after, context.confidence, context.seed, documents)))

    def find_rival(each: Candidate) -> Rival | None:
        between = find_between([source.point for source in sources], each.bytes) if each.compressed else None
        if between is None:
            return None
        smaller, larger, share = sources[between.smaller], sources[between.larger], between.share
        mixed = Losses((1 - share) * smaller.scores.nats.double() + share * larger.scores.nats.double())
        found = change(mixed, each.scores.losses)
        low, high = found.delta_ci95
        verdict: Verdict = "both" if high < 0 else "precision" if low > 0 else "open"
        return Rival(smaller=smaller.dtype, larger=larger.dtype, share=share, change=found, verdict=verdict)

    return [
        FrontierFile(
            model=each.model,
            compressed=each.compressed,
            dtype=each.dtype,
            parameters=each.parameters,
            bytes=each.bytes,
            change=change(reference.scores.losses, each.scores.losses),
            on_hull=id(each) in hull,
            rival=find_rival(each),
        )
        for each in by_size
    ]
