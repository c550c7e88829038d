"""Write everything a compressed checkpoint or a profile holds: whole or not at all."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any, TypeVar, cast

from torch import Tensor

from compressor.models.load import quiet
from compressor.models.source import stored_dtype
from compressor.patch.checkpoint import write_checkpoint
from compressor.patch.verify import first_tokens, verify_written
from compressor.pipelines.describe_profile import tables_of
from compressor.report.card import PICTURE, card
from compressor.report.charts import charts_of, draw
from compressor.report.page import page
from compressor.report.record import ProfileSet, Record, SavedRecord
from compressor.runtime import distributed
from compressor.runtime.names import PROFILE, RECORD
from compressor.runtime.outputs import reporting_disk_errors, whole_directory, write_json
from compressor.runtime.progress import Progress
from compressor.runtime.safe_files import finite
from compressor.runtime.stored_weights import hash_stored

AnyRecord = TypeVar("AnyRecord", bound=Record | SavedRecord)


def write_result(
    model: Any,
    tokenizer: Any,
    target: Path,
    record: AnyRecord,
    recipe: str | None = None,
    *,
    tokens: Tensor | None = None,
    progress: Progress,
) -> AnyRecord:
    """Everything into a directory that is reserved; it appears when what was written is found to be the model.

    Returns the record as it was written: with the hash of the weights.
    """
    if distributed.rank() > 0:
        return record
    with reporting_disk_errors(target), whole_directory(target) as partial:
        with quiet():
            write_checkpoint(model, tokenizer, partial, dtype=stored_dtype(model))
        verify_written(partial, model, first_tokens(model) if tokens is None else tokens, progress)
        record = cast(AnyRecord, record.model_copy(update={"compressed_sha256": hash_stored(partial)}))
        write_json(partial / RECORD, record.to_json_value())
        if isinstance(record, Record):
            write_report(partial, record)
        content = card(record, picture=(partial / PICTURE).is_file())
        (partial / "README.md").write_text(content, encoding="utf-8")
        if recipe is not None:
            (partial / "recipe.yaml").write_text(recipe, encoding="utf-8")
    return record


def save_profile(record: Record | ProfileSet, target: Path) -> Path:
    """The report of a profile as a directory: the page, the figures, and the numbers as JSON and CSV."""
    if distributed.rank() > 0:
        return target
    with reporting_disk_errors(target), whole_directory(target) as partial:
        write_json(partial / PROFILE, record.to_json_value())
        for name, rows in tables_of(record).items():
            write_csv(partial / f"{name}.csv", rows)
        write_report(partial, record)
    return target


def write_report(directory: Path, record: Record | ProfileSet) -> None:
    """The page, and its figures as files."""
    (directory / "report.html").write_text(page(record), encoding="utf-8")
    figures = directory / "figures"
    figures.mkdir()
    for chart in charts_of(record):
        draw(chart, figures)


def write_csv(file: Path, rows: list[dict[str, Any]]) -> None:
    """One line per row; the columns are those of all rows, a missing value is empty."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with file.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(finite(row) for row in rows)
