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

# llama.cpp's numbers for the type of a file, as far as compress or llama-quantize writes them.
FILE_TYPES = {
    **{0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 7: "q8_0", 8: "q5_0", 9: "q5_1", 10: "q2_k", 11: "q3_k_s"},
    **{12: "q3_k_m", 13: "q3_k_l", 14: "q4_k_s", 15: "q4_k_m", 16: "q5_k_s", 17: "q5_k_m", 18: "q6_k", 32: "bf16"},
}
GGUF_KEY = "compressor.record"  # of a GGUF file: its record as JSON
ROOM = 8192  # bytes that are kept free in a GGUF file for what is known only after it was written


def is_export(path: Path) -> bool:
    """Whether a path is to be read as an export: a file, or a directory with an export's record."""
    if path.is_dir():
        return (path / EXPORT).is_file() and not (path / RECORD).is_file()
    return path.is_file() or path.suffix == ".gguf"


def read_export(path: Path) -> ExportRecord:
    """The record of an export with its present size, or one line that says why it is none.

    A GGUF file that llama-quantize made of an export has that export's record, and is of another type.
    """
    now: object = None
    if path.is_dir():
        values, where = read_json(path / EXPORT, str(path)), str(path / EXPORT)
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    else:
        header = read_header(path).values
        text, now = header.get(GGUF_KEY), header.get("general.file_type")
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
    record = record.model_copy(update={"out": str(path), "bytes": size})
    dtype = FILE_TYPES.get(now, f"file type {now}") if isinstance(now, int) else record.dtype
    if dtype == record.dtype:
        return record
    note = f"it was exported as {record.dtype} and made {dtype} afterwards; what was checked is the former"
    return record.model_copy(update={"dtype": dtype, "stored": [], "notes": [*record.notes, note]})
