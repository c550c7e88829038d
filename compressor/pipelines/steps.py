"""Steps of the Python API that keep what was measured: `apply` notes it on the model, `save` writes it.

Every figure stands for the weights that it was measured of. A model that was changed since is saved without figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressor.evaluate.evaluator import Evaluator, Measured
from compressor.evaluate.kv_cache import kv_cache_bytes
from compressor.evaluate.remembered import recall_losses
from compressor.measure.profile import TopRow
from compressor.models.branches import AttentionOf, BranchIndex
from compressor.models.source import identify_weights, source_of
from compressor.pipelines import recipe as recipes
from compressor.pipelines.describe import (
    describe_assessment,
    describe_budget,
    describe_kv_cache,
    describe_model,
    describe_plan,
)
from compressor.pipelines.describe_profile import describe_profile, name_rows
from compressor.pipelines.outputs import write_result
from compressor.plan import api
from compressor.plan.api import SearchedPlan
from compressor.plan.search import Plan
from compressor.plan.shapes import Shapes
from compressor.report.record import Record, SavedRecord
from compressor.runtime.context import RunContext
from compressor.runtime.errors import InputError
from compressor.runtime.names import RECORD
from compressor.runtime.outputs import reserved
from compressor.runtime.progress import Progress
from compressor.text import Text

APPLIED_ATTRIBUTE = "compressor_applied"  # of a model: the plan that was applied to it, and what was measured for that
HEADER = (
    "What this checkpoint was measured on and held against, for `compress check`. It was made step by step in Python:\n"
    "compress --recipe recipe.yaml may find another plan."
)
NO_FIDELITY = "the KL divergence, which has a limit, was not measured; `compress check` measures it"


@dataclass(frozen=True)
class Applied:
    """What is known of a model since a plan was applied to it. `source` and `identity` are of its weights before and
    after; the record was described before, when the blocks were there."""

    searched: SearchedPlan
    record: Record
    top_rows: Mapping[BranchIndex, tuple[TopRow, ...]]
    source: Mapping[str, Any]
    identity: Mapping[str, Any]


def apply(model: Any, plan: Plan | Shapes, text: Text, context: RunContext | None = None) -> Any:
    """Put the replacements of a plan into the model, for good. Given shapes alone, they are fitted first.

    What was measured for a plan that `compressor.plan` found is saved with the model.
    """
    if not isinstance(plan, SearchedPlan) or plan.identity != identify_weights(model):
        return api.apply(model, plan, text, context)
    cache_before = kv_cache_bytes(model)
    record = describe_plan(describe_profile(model, None, plan.text, plan.profile, plan.study), plan)
    budget = describe_budget(plan.limits.budgets, plan.limits.allowed, plan.limits.kl, plan.target)
    api.apply(model, plan, text, context)
    kv_cache = describe_kv_cache(model, cache_before, kv_cache_bytes(model))
    recipe = {"model": source_of(model).model, **plan.text.settings, **plan.settings}
    record = record.with_parts(budget=budget, kv_cache=kv_cache, recipe=recipe, in_steps=True)
    top_rows = {p.block.index: p.top_rows for p in plan.profile.branches}
    applied = Applied(plan.without_modules(), record, top_rows, plan.identity, identify_weights(model))
    setattr(model, APPLIED_ATTRIBUTE, applied)
    return model


def save(
    model: Any,
    tokenizer: Any,
    out: str | Path,
    *,
    record: Record | None = None,
    recipe: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Save a model (with the replacements that are in it) in its source's dtype, with its card and with the record of
    what was measured of these very weights."""
    progress = Progress()
    with reserved(out, overwrite, source_of(model).model, RECORD, progress.say) as target:
        known = record or describe_measured(model, tokenizer)
        if recipe is None and record is None and isinstance(known, Record):
            recipe = write_recipe(known)
        write_result(model, tokenizer, target, known, recipe, progress=progress)
    return target


def write_recipe(record: Record) -> str | None:
    """The recipe of a check of this model; None where its text has no name by which it could be read again."""
    if not record.recipe.get("text"):
        return None
    try:
        return recipes.dump(recipes.validate(record.recipe, "record"), HEADER)
    except InputError:
        return None


def describe_measured(model: Any, tokenizer: Any) -> Record | SavedRecord:
    """Everything that was measured of the present weights: the profile and the plan, and perplexity where `evaluate`
    measured it on the verification windows."""
    applied = getattr(model, APPLIED_ATTRIBUTE, None)
    if not isinstance(applied, Applied) or applied.identity != identify_weights(model):
        return describe_model(model)
    searched, text = applied.searched, applied.searched.text
    named = {index: name_rows(rows, text, tokenizer) for index, rows in applied.top_rows.items()}
    record = applied.record.with_parts(
        blocks=[b.model_copy(update={"top_rows": named[b.index]}) for b in applied.record.blocks],
        attention=[b.model_copy(update={"top_rows": named[AttentionOf(b.index)]}) for b in applied.record.attention],
    )
    before, after = (
        recall_losses(model, identity, text.verification.windows) for identity in (applied.source, applied.identity)
    )
    if before is None or after is None:
        return record
    context = RunContext(seed=searched.seed, confidence=searched.limits.confidence)
    evaluator = Evaluator(text, tokenizer, searched.limits.budgets, max_kl=searched.limits.kl, context=context)
    assessment = evaluator.assess(Measured(before, {}, None), Measured(after, {}, None), model, applied.identity)
    found = describe_assessment(assessment, evaluator, record.parameters, searched.target)
    found["warnings"] = [*record.warnings, *found["warnings"]]
    if searched.limits.kl is not None:
        found |= {"passed": None, "warnings": [*found["warnings"], NO_FIDELITY]}
    return record.with_parts(**found)
