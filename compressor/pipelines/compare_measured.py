"""Two models measured on the same verification text, with the paired interval of their difference."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compressor.evaluate.evaluator import tokenizer_sha256
from compressor.models.load import load_model
from compressor.models.writer import Writer
from compressor.pipelines import recipe as recipes
from compressor.pipelines.job import choose_seq_len, context_for, name_in_cache, open_text, placing
from compressor.pipelines.recipe import Recipe
from compressor.pipelines.scoring import Scorer, contrast, describe_verification, verification_alone
from compressor.report.comparison import Comparison, Measured, Side
from compressor.report.record_parts import Source
from compressor.runtime import distributed
from compressor.runtime.context import RunContext
from compressor.runtime.errors import InputError
from compressor.runtime.names import BUILT_IN_MODELS, SELF
from compressor.text import group_by_name


def run(comparison: Comparison, options: Mapping[str, Any], context: RunContext) -> Comparison:
    """The comparison with what was measured. The text is that of the first compressed model, or of the options."""
    if distributed.size() > 1:
        raise InputError(f"--measure is done by one process, and {distributed.size()} were started; start one")
    first, second = comparison.first, comparison.second
    measured_on = first if first.kind == "compressed" else second
    file = Path(measured_on.name) / "recipe.yaml"
    recipe = recipes.resolve(file if file.is_file() else None, dict(options))
    if recipe.text is None and measured_on.source.model not in BUILT_IN_MODELS:
        raise InputError(f"{measured_on.name} records no text; give one with --text FILE")
    context = context_for(recipe, context)
    model, tokenizer = load(first, recipe, context)
    recipe = recipe.model_copy(update={"model": measured_on.source.model})
    recipe = recipe.model_copy(update=verification_alone(recipe, choose_seq_len(recipe, model)))
    writer = find_writer(recipe, measured_on.source, context)
    text, recipe = open_text(recipe, model, tokenizer, context, writer=writer)
    scorer = Scorer(text.verification, context)
    before = scorer.in_transformers(model, f"measure {first.name}")
    del model  # before the second one is loaded
    model, other_tokenizer = load(second, recipe, context)
    if tokenizer_sha256(other_tokenizer) != tokenizer_sha256(tokenizer):
        raise InputError(
            f"{first.name} and {second.name} have different tokenizers, so their perplexities are of different tokens; "
            "compare each with its source: compress check"
        )
    after = scorer.in_transformers(model, f"measure {second.name}")
    words = f"{second.name} against {first.name}"
    found = contrast("second", words, after, before, text.verification, context)
    return comparison.model_copy(update={"measured": Measured(text=describe_verification(text), contrast=found)})


def load(side: Side, recipe: Recipe, context: RunContext) -> tuple[Any, Any]:
    context.progress.say(f"load {side.name}")
    revision = side.source.revision if side.kind == "source" and not Path(side.name).is_dir() else None
    model, tokenizer = load_model(
        side.name,
        allow_compressed=True,
        trust_remote_code=context.trust_remote_code,
        revision=revision,
        **placing(recipe, context),
    )
    name_in_cache(model, context)
    return model, tokenizer


def find_writer(recipe: Recipe, source: Source, context: RunContext) -> Writer | None:
    """The source, where the text is what it writes itself; else nobody."""
    if not any(SELF in names for names in group_by_name(recipe.text or []).values()):
        return None
    context.progress.say(f"load {source.model}, which writes the text")
    trust = context.trust_remote_code
    model, tokenizer = load_model(
        source.model, trust_remote_code=trust, revision=source.revision, **placing(recipe, context)
    )
    return Writer(model, tokenizer, context)
