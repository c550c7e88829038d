"""The gate for what is deployed: an export, run in its own runtime, against the source.

An export differs from its source for two reasons: the model was compressed, and the form has a precision and an
arithmetic of its own. To tell the two apart, the source is measured in the same form beside it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compressor.evaluate.breakdown import LossBreakdown
from compressor.evaluate.budget import Budget
from compressor.evaluate.evaluator import Assessment, tokenizer_sha256
from compressor.evaluate.perplexity import compare, compare_parts
from compressor.export.gguf import DTYPES
from compressor.export.origin import VERIFICATION_KEYS
from compressor.export.upload import list_strings
from compressor.models.load import load_model, quiet
from compressor.patch.checkpoint import count_parameters
from compressor.pipelines import recipe as recipes
from compressor.pipelines.check import Gate, announce, of_names, recipe_of
from compressor.pipelines.describe import (
    describe_assessment,
    describe_sizes,
    describe_source,
)
from compressor.pipelines.job import choose_seq_len, context_for, make_evaluator, name_in_cache, open_text, timings
from compressor.pipelines.recipe import Recipe
from compressor.pipelines.scoring import (
    Scorer,
    Scores,
    contrast,
    describe_verification,
    require_runtime,
    verification_alone,
)
from compressor.report.ci import refuse_unwritable
from compressor.report.export_check import Contrast, ExportCheck
from compressor.report.export_record import ExportRecord
from compressor.report.record import Record, describe_tool, read_record, refuse_other_weights
from compressor.runtime import distributed
from compressor.runtime.context import RunContext
from compressor.runtime.errors import InputError
from compressor.runtime.figures import signed
from compressor.runtime.names import BUILT_IN_MODELS, VERIFICATION_TOKENS
from compressor.runtime.stored_weights import hash_stored
from compressor.text import Text, group_by_name

# Options of `compress check` that mean nothing for an export, and why.
ONLY_TEXT = "an export is measured on text alone"
ONE_PLACE = "the source of an export is computed in float32 on the CPU, where the export runs too"
REFUSED = {
    **dict.fromkeys(("tasks", "max_task_drop", "task_path", "task_limit", "generate", "prompts"), ONLY_TEXT),
    "max_kl": "other runtimes do not give all probabilities, so there is no KL divergence to hold against it",
    **dict.fromkeys(("device", "dtype", "low_memory"), ONE_PLACE),
}
MEANT = ("model", "max_dppl", *VERIFICATION_KEYS)  # of a recipe, for an export
FLOAT32: dict[str, Any] = {"device": "cpu", "dtype": "float32"}


def run(
    path: Path,
    export: ExportRecord,
    options: Mapping[str, Any],
    gate: Gate,
    checkpoint: Path | None,
    context: RunContext,
) -> Record:
    """The export against its source on the verification text; `passed` says whether the budget holds."""
    began = time.perf_counter()
    refuse_options(options, gate)
    runtime = require_runtime(export.to)
    recipe, source_name, revision = find_source(path, export, options, gate, checkpoint)
    context = context_for(recipe, context)
    source, tokenizer = load_source(path, source_name, revision, gate, context)
    name_in_cache(source, context)
    recipe = limit_text(recipe, export, source, options)
    text, recipe = open_text(recipe.model_copy(update={"model": source_name}), source, tokenizer, context)

    scorer = Scorer(text.verification, context)
    if export.to == "gguf":
        scores = {"export": scorer.in_llamacpp(path, "export")}
    else:
        scores = {"export": scorer.in_onnxruntime(path, source, "export")}
    scores["source"] = scorer.in_transformers(source, "source")
    without_control = None
    if export.to == "gguf" and export.dtype not in DTYPES:
        without_control = f"the source cannot be written as {export.dtype} here"
    elif export.to == "gguf":
        try:
            scores["control"] = scorer.as_gguf(source, tokenizer, export.dtype, f"source as {export.dtype}")
        except InputError as error:
            without_control = str(error)
    else:
        without_control = "the graph computes in float32, as the source does here; --checkpoint DIR shows what it adds"
    if checkpoint is not None:
        with quiet():
            compressed, _ = load_model(str(checkpoint), allow_compressed=True, **FLOAT32)
        scores["checkpoint"] = scorer.in_transformers(compressed, "checkpoint")

    evaluator = make_evaluator(recipe, source, tokenizer, text, [], context)
    assessment = assess(text, scores, evaluator.budgets, context)
    made_from = describe_source(source)
    sizes = describe_sizes(count_parameters(source), export.parameters.exported)
    record = Record(
        **describe_tool(),
        directory=str(path),
        source=made_from,
        tokenizer_sha256=tokenizer_sha256(tokenizer),
        text=describe_verification(text),
        parameters=sizes,
        recipe={key: value for key, value in recipe.settings().items() if key in MEANT},
        export=ExportCheck(
            to=export.to,
            dtype=export.dtype,
            runtime=runtime,
            bytes=export.bytes or 0,
            origin=export.origin,
            contrasts=list_contrasts(export, scores, text, context),
            without_control=without_control,
        ),
        **describe_assessment(assessment, evaluator, sizes),
    )
    record = record.with_parts(
        warnings=[*record.warnings, *list_warnings(export, record)], timings=timings(context.progress, began)
    )
    return announce(record, None, gate, context.progress)


def refuse_options(options: Mapping[str, Any], gate: Gate) -> None:
    """Say which option is not for an export, and why."""
    if distributed.size() > 1:
        raise InputError(f"an export is checked by one process, and {distributed.size()} were started; start one")
    if gate.baseline is not None or gate.update_baseline:
        raise InputError(
            "--baseline is not for an export: its figures are those of a checkpoint; give --max-dppl alone, and "
            "compare the checkpoint with its baseline"
        )
    if gate.page is not None:
        raise InputError("--report is not for an export; use --json or --junit, or check the checkpoint with --report")
    for name, reason in REFUSED.items():
        if options.get(name) not in (None, False):
            raise InputError(f"--{name.replace('_', '-')} is not for an export: {reason}; leave it out")
    refuse_unwritable("--junit", gate.junit)


def find_source(
    path: Path, export: ExportRecord, options: Mapping[str, Any], gate: Gate, checkpoint: Path | None
) -> tuple[Recipe, str, str | None]:
    """The recipe of the check, and the source with its revision: from the checkpoint, where it is named, else from what
    the export records, else from the options."""
    origin = export.origin
    if checkpoint is not None:
        recorded = read_record(checkpoint)
        refuse_other_weights(checkpoint, recorded, hash_stored(checkpoint))
        if origin is not None and None is not recorded.compressed_sha256 != origin.checkpoint_sha256:
            raise InputError(
                f"{path} was not made from {checkpoint}: it records a checkpoint {origin.checkpoint} of other weights; "
                "name that one with --checkpoint, or export this one"
            )
        recipe = recipe_of(checkpoint, options, recorded)
        require_budget(path, recipe)
        revision = None if gate.source else recorded.source.revision
        return recipe, gate.source or str(recipe.model or recorded.source.model), revision
    local = origin.local if origin else []
    values = dict(origin.recipe) if origin else {}
    if "text" in local and not options.get("text"):
        raise InputError(
            f"{path} was verified on {', '.join(list_strings(values.get('text')))}, and an export names no folders; "
            "give the text with --text FILE, or the checkpoint with --checkpoint DIR"
        )
    given = {key: value for key, value in options.items() if value is not None}
    recipe = recipes.validate({**values, **given}, f"the record of {path}", given)
    made_from = origin.source if origin else None
    if gate.source is None and (made_from is None or "source" in local):
        what = f"was made from a local model called {made_from.model}" if made_from else "records no source"
        raise InputError(f"{path} {what}; give it with --source DIRECTORY, or the checkpoint with --checkpoint DIR")
    name = gate.source or str(made_from and made_from.model)
    if recipe.text is None and name not in BUILT_IN_MODELS:
        raise InputError(f"{path} records no text; give one with --text FILE")
    if recipe.max_dppl and options.get("text") and not options.get("max_dppl"):
        budget = of_names(recipe.max_dppl, group_by_name(recipe.text or []))
        recipe = recipe.model_copy(update={"max_dppl": budget or None})
    require_budget(path, recipe)
    return recipe, name, None if gate.source or made_from is None else made_from.revision


def require_budget(path: Path, recipe: Recipe) -> None:
    if recipe.max_dppl is None:
        raise InputError(f"{path} records no limit on perplexity to check; give one with --max-dppl 1.0")


def load_source(path: Path, name: str, revision: str | None, gate: Gate, context: RunContext) -> tuple[Any, Any]:
    """The source in float32 on the CPU, and its tokenizer."""
    context.progress.say(f"load {name}, the source of {path}")
    try:
        return load_model(name, trust_remote_code=context.trust_remote_code, revision=revision, **FLOAT32)
    except InputError as error:
        if gate.source:
            raise
        raise InputError(f"the source of {path}: {error}; if it has moved, add --source DIRECTORY") from error


def limit_text(recipe: Recipe, export: ExportRecord, source: Any, options: Mapping[str, Any]) -> Recipe:
    """The recipe with as much text as a check needs.

    That is as much as the checkpoint was verified on: an interval of fewer windows is wider, and a budget that the
    checkpoint has spent would be missed for that alone. llama.cpp takes as long as if it wrote all of the text, so
    there it is at most the usual number of tokens, unless --verify-tokens says otherwise.
    """
    seq_len = choose_seq_len(recipe, source)
    if export.context is not None and seq_len > export.context:
        raise InputError(f"windows of {seq_len} tokens are beyond the export's context; add --seq-len {export.context}")
    tokens = recipe.verify_tokens
    if export.to == "gguf" and not options.get("verify_tokens"):
        tokens = min(tokens, VERIFICATION_TOKENS)
    # Tasks, continuations and KL are of the checkpoint alone.
    meant = {"verify_tokens": tokens, "max_kl": None, "tasks": None, "max_task_drop": None, "generate": 0}
    return recipe.model_copy(update={**verification_alone(recipe, seq_len), **meant})


def list_warnings(export: ExportRecord, record: Record) -> list[str]:
    """What somebody should know who reads the verdict."""
    recorded = export.origin.source.weights_sha256 if export.origin and export.origin.source else None
    other = recorded is not None and recorded != record.source.weights_sha256
    warnings = ["the source's weights are not those the export was made from"] if other else []
    for name, text in record.texts.items():
        if text.max_dppl is not None and text.delta <= text.max_dppl < text.delta_upper:
            warnings.append(
                f"perplexity {name}: the change of {signed(text.delta)} is inside the limit, its interval is not; more "
                "text narrows it: raise --verify-tokens"
            )
    return warnings


def assess(text: Text, scores: Mapping[str, Scores], budgets: Mapping[str, Budget], context: RunContext) -> Assessment:
    """The export against its source, on every text and on all together."""
    split, parts = text.verification, text.parts("verification")
    before, after = scores["source"].losses, scores["export"].losses
    texts = compare_parts(before, after, split, parts, context.confidence, context.seed)
    return Assessment(
        whole=compare(before, after, context.confidence, context.seed, split.documents),
        texts=texts,
        allowed={name: budgets[name].allowed_rise(change.baseline) for name, change in texts.items()},
        tasks={},
        limits={},
        generation=None,
        breakdown=LossBreakdown([], [], []),  # it is by frequency in the calibration text, which is not read here
    )


def list_contrasts(
    export: ExportRecord, scores: Mapping[str, Scores], text: Text, context: RunContext
) -> list[Contrast]:
    """Every comparison that the models allow which were measured."""
    form = export.dtype
    pairs = {
        "export": ("the export against its source", "export", "source"),
        "format": (f"the format alone: the source as {form} against itself", "control", "source"),
        "compression": (f"the compression alone: the export against the source as {form}", "export", "control"),
        "checkpoint": ("the checkpoint in transformers against its source", "checkpoint", "source"),
        "conversion": ("the export against the checkpoint", "export", "checkpoint"),
    }
    return [
        contrast(name, words, scores[of], scores[against], text.verification, context)
        for name, (words, of, against) in pairs.items()
        if of in scores and against in scores
    ]
