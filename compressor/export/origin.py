"""What an export records of the checkpoint that it is made from, without local directories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compressor.export.upload import list_strings, local_paths, shorten_paths
from compressor.report.export_origin import ExportOrigin
from compressor.report.formats import last_part
from compressor.report.record import Record, SavedRecord
from compressor.report.record_parts import Source
from compressor.runtime.names import BUILT_IN_MODELS, NO_LIMIT, split_name
from compressor.runtime.network import is_hub_id

# The keys of a recipe by which the checkpoint was verified.
VERIFICATION_KEYS = ("text", "document_separator", "seq_len", "verify_tokens", "seed", "confidence")


def describe_origin(checkpoint: str, sha256: str | None, record: Record | SavedRecord | None) -> ExportOrigin:
    """The origin of an export, from the record of the checkpoint, where it has one."""
    name = last_part(checkpoint) if Path(checkpoint).exists() else checkpoint
    if record is None:
        return ExportOrigin(checkpoint=name, checkpoint_sha256=sha256)
    made_from = record.source
    is_local = made_from.model not in BUILT_IN_MODELS and not is_hub_id(made_from.model, made_from.revision)
    source = Source(
        model=last_part(made_from.model) if is_local else made_from.model,
        **made_from.model_dump(include={"revision", "model_type", "weights_sha256", "dtype", "card"}),
    )
    if not isinstance(record, Record):
        return ExportOrigin(
            checkpoint=name, checkpoint_sha256=sha256, source=source, local=["source"] if is_local else []
        )
    recipe: dict[str, Any] = {key: record.recipe[key] for key in VERIFICATION_KEYS if key in record.recipe}
    if record.budget is not None and record.budget.asked != NO_LIMIT:
        recipe["max_dppl"] = record.budget.asked.split(",")
    paths = local_paths(split_name(word)[1] for word in list_strings(recipe.get("text")))
    return ExportOrigin(
        checkpoint=name,
        checkpoint_sha256=sha256,
        source=source,
        recipe=shorten_paths(recipe, paths),
        perplexity=record.perplexity,
        local=[*(["source"] if is_local else []), *(["text"] if paths else [])],
    )
