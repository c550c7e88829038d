"""Two compressed checkpoints, or one and its source, side by side from what they record. torch is not imported."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import compressor
from compressor.export.written import is_export
from compressor.report.comparison import BlockDifference, Comparison, Side
from compressor.report.formats import name_replacement
from compressor.report.record import SCHEMA_VERSION, Record, SavedRecord, read_record
from compressor.report.record_parts import Block, Replacement, SavedBlock, Tool
from compressor.runtime.errors import InputError
from compressor.runtime.names import BUILT_IN_MODELS, RECORD
from compressor.runtime.stored_weights import hash_stored, list_files

Recorded = Record | SavedRecord
UNTOUCHED = "as it was"


def run(first: str, second: str) -> Comparison:
    """Both models as they are recorded, and the blocks that differ."""
    records = {name: read_checkpoint(name) for name in (first, second)}
    found = [record for record in records.values() if record is not None]
    if not found:
        raise InputError(f"neither {first} nor {second} was written by compress; give a compressed checkpoint first")
    one, other = (describe_side(name, records[name], found[0]) for name in (first, second))
    same_source = one.source.weights_sha256 == other.source.weights_sha256
    return Comparison(
        schema_version=SCHEMA_VERSION,
        tool=Tool(name="compressor", version=compressor.__version__),
        first=one,
        second=other,
        blocks=list_differences(records[first], records[second]),
        same_source=same_source,
        same_text=is_same_text(one, other),
        notes=list_notes(one, other, same_source),
    )


def read_checkpoint(name: str) -> Recorded | None:
    """The record of a compressed checkpoint; None for a model that may be the source of the other."""
    path = Path(name)
    if is_export(path):
        raise InputError(
            f"{name} is an export; compare the checkpoints, and measure an export with compress check {name}"
        )
    return read_record(path) if (path / RECORD).is_file() else None


def describe_side(name: str, record: Recorded | None, other: Recorded) -> Side:
    """One model; without a record it must be the source of the other."""
    directory = BUILT_IN_MODELS.get(name) or Path(name)
    files = list_files(directory) if directory.is_dir() else []
    size = sum(file.stat().st_size for file in files) or None
    known = record if record is not None else other
    side = Side(
        name=name,
        kind="source" if record is None else "compressed",
        source=known.source,
        parameters=known.parameters.before if record is None else known.parameters.after,
        bytes=size,
    )
    if record is None:
        refuse_stranger(name, directory, other)
    else:
        side = side.model_copy(update={"compressed_sha256": record.compressed_sha256, "replaced": count_kinds(record)})
    if not isinstance(known, Record):
        return side
    side = side.model_copy(update={"text": known.text, "perplexity": known.perplexity, "tasks": known.tasks})
    if record is None:
        return side
    return side.model_copy(update={"budget": known.budget, "fidelity": known.fidelity, "healing": known.healing})


def refuse_stranger(name: str, directory: Path, other: Recorded) -> None:
    """Refuse a model that is neither a checkpoint of compress nor the source of the other one."""
    source = other.source
    is_source = source.model in (name, os.path.abspath(name))
    if directory.is_dir() and not is_source:
        is_source = hash_stored(directory) == source.weights_sha256
    if not is_source:
        raise InputError(
            f"{name} has no {RECORD} and is not the source of the other model, which is {source.model}; give two "
            "compressed checkpoints, or one and its source"
        )


def count_kinds(record: Recorded) -> str:
    """How many FFNs and attentions were replaced by what: `2 hybrid, 1 pruned; attention 1 linear`."""
    words = []
    for prefix, blocks in (("", record.blocks), ("attention ", record.attention)):
        kinds = Counter(block.replacement.kind for block in blocks if block.replacement.kind != "keep")
        if kinds:
            words.append(prefix + ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())))
    return "; ".join(words)


def list_differences(first: Recorded | None, second: Recorded | None) -> list[BlockDifference]:
    """The blocks in whose place the two models have something else, in order of depth."""
    tables = [list_blocks(record) for record in (first, second)]
    differences = []
    for path in dict.fromkeys(path for table in tables for path in table):
        blocks = [table.get(path) for table in tables]
        forms = [name_form(None if block is None else block.replacement) for block in blocks]
        if forms[0] != forms[1]:
            named = next((block for block in blocks if isinstance(block, Block)), None)
            before = named.params_before if named else None
            sizes = [block.params_after if isinstance(block, Block) else before for block in blocks]
            words = named.words if named else path
            differences.append(
                BlockDifference(
                    path=path,
                    words=words,
                    first=forms[0],
                    second=forms[1],
                    parameters_first=sizes[0],
                    parameters_second=sizes[1],
                )
            )
    return differences


def list_blocks(record: Recorded | None) -> dict[str, Block | SavedBlock]:
    """The blocks of a record by their path."""
    if record is None:
        return {}
    blocks = record.branches if isinstance(record, Record) else [*record.attention, *record.blocks]
    return {block.path: block for block in blocks}


def name_form(replacement: Replacement | None) -> str:
    """What stands in a block's place, with the numbers of the heads that are kept."""
    if replacement is None or replacement.kind == "keep":
        return UNTOUCHED
    numbers = f" ({', '.join(map(str, replacement.kept_heads))})" if replacement.kept_heads else ""
    return name_replacement(replacement) + numbers


def is_same_text(first: Side, second: Side) -> bool | None:
    """Whether both were verified on the same tokens in the same windows; None where one records no text."""
    if first.text is None or second.text is None:
        return None
    return (
        first.text.verification.sha256 == second.text.verification.sha256 and first.text.seq_len == second.text.seq_len
    )


def list_notes(first: Side, second: Side, same_source: bool) -> list[str]:
    notes = []
    if not same_source:
        notes.append(f"{first.name} was made from {first.source.model}, {second.name} from {second.source.model}")
    if first.compressed_sha256 is not None and first.compressed_sha256 == second.compressed_sha256:
        notes.append("their weights are the same, byte for byte")
    return notes
