"""An export as it lies on disk: which paths are one, and its record. Neither numpy nor torch is imported."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from compressor.export.gguf_metadata import read_header
from compressor.report.export_record import ExportRecord
from compressor.report.record import list_mistakes
from compressor.runtime.errors import InputError, reason_of
from compressor.runtime.names import EXPORT, RECORD
from compressor.runtime.safe_files import check_values, read_json, refuse_constant, unique_keys

GGUF_KEY = "compressor.record"  # of a GGUF file: its record as JSON
ROOM = 8192  # bytes that are kept free in a GGUF file for what is known only after it was written


def is_export(path: Path) -> bool:
    """Whether a path is to be read as an export: a file, or a directory with an export's record."""
    if path.is_dir():
        return (path / EXPORT).is_file() and not (path / RECORD).is_file()
    return path.is_file() or path.suffix == ".gguf"


def read_export(path: Path) -> ExportRecord:
    """The record of an export with its present size, or one line that says why it is none."""
    if path.is_dir():
        values, where = read_json(path / EXPORT, str(path)), str(path / EXPORT)
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    else:
        text = read_header(path).values.get(GGUF_KEY)
        if not isinstance(text, str):
            raise InputError(
                f"{path} has no {GGUF_KEY} in its metadata: it was not written by compress, or by an earlier version; "
                "give a file that compress export --to gguf wrote"
            )
        where, size = f"{GGUF_KEY} of {path}", path.stat().st_size
        try:
            values = json.loads(text, object_pairs_hook=unique_keys, parse_constant=refuse_constant)
            check_values(values)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where} cannot be read: {reason_of(error)}; export it again") from error
    try:
        record = ExportRecord.model_validate(values)
    except ValidationError as error:
        raise InputError(f"{where} is not the record of an export: {list_mistakes(error)}") from error
    return record.model_copy(update={"out": str(path), "bytes": size})
