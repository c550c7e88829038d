"""Size against perplexity as GGUF files: what `compress frontier` says, its table and lines."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from compressor.report.grid import Grid
from compressor.report.part import Count, Figure, Part
from compressor.report.record import Versioned
from compressor.report.record_parts import PerplexityChange, Source, Texts
from compressor.runtime.figures import signed, signed_interval
from compressor.runtime.resources import format_bytes

Verdict = Literal["both", "precision", "open"]  # the better buy: both together, a smaller precision alone, not known
VERDICTS: dict[Verdict, str] = {"both": "both together", "precision": "precision alone", "open": "cannot be told"}


class Rival(Part):
    """What a compressed file is held against: the source at the same size, by a smaller precision alone.

    That is the mixture of the two of the source's files between which the size lies: of the loss of every token,
    `share` of the larger file's and the rest of the smaller one's.
    """

    smaller: str  # precisions of the source; both the same where the compressed file is as large as its best one
    larger: str
    share: Figure
    change: PerplexityChange  # the compressed file against it
    verdict: Verdict


class FrontierFile(Part):
    """One model in one precision, as it was measured in llama.cpp."""

    model: str
    compressed: bool
    dtype: str
    parameters: Count
    bytes: Count
    change: PerplexityChange  # against the reference
    on_hull: bool  # of all files
    rival: Rival | None = None  # of a compressed file; None where it is smaller than the source in any precision

    @property
    def name(self) -> str:
        return f"{self.model if self.compressed else 'source'} {self.dtype}"


class SizeFrontier(Versioned):
    """The source and models made of it, each in several precisions, on the same text in llama.cpp."""

    source: Source
    runtime: str
    text: Texts
    reference: str  # the precision of the source that all files are compared with
    files: list[FrontierFile]  # the smallest first
    warnings: list[str] = Field(default_factory=list)
    written: list[str] = Field(default_factory=list)


def size_table(record: SizeFrontier) -> Grid:
    """One line per file, the smallest first; a star marks those on the lower hull of all."""
    against = f"against source {record.reference}"
    columns = ("file", "size", "perplexity", against, "95 % interval", "against the source at that size", "better buy")
    table = Grid(columns, left=("file", "better buy"), optional=("95 % interval", against))
    for file in record.files:
        rival = file.rival
        found = "·" if rival is None else say_change(rival.change)
        alone = "smaller than any of it" if file.compressed else ""
        table.add_row(
            f"{'*' if file.on_hull else ' '} {file.name}",
            format_bytes(file.bytes),
            f"{file.change.compressed:.3f}",
            signed(file.change.delta),
            signed_interval(*file.change.delta_ci95),
            found,
            alone if rival is None else VERDICTS[rival.verdict],
        )
    return table


def say_change(change: PerplexityChange) -> str:
    return f"{signed(change.delta)} ({signed_interval(*change.delta_ci95)})"


def size_lines(record: SizeFrontier) -> list[str]:
    """For every compressed file, whether it or a smaller precision of the source is the better buy, and the hull."""
    split = record.text.verification
    lines = [
        f"measured in {record.runtime} on {split.tokens:,} tokens of {split.source}, windows of {record.text.seq_len}; "
        "the source at that size: between two of its precisions, by their losses",
        *(say_verdict(file) for file in record.files if file.compressed),
    ]
    hull = [file for file in record.files if file.on_hull]
    lines.append(f"on the lower hull of all files, by point estimates (*): {', '.join(file.name for file in hull)}")
    open_files = [file.name for file in record.files if file.rival is not None and file.rival.verdict == "open"]
    if open_files:
        lines.append("more text tells more of them apart: raise --tokens")
    lines += [f"warning: {warning}" for warning in record.warnings]
    return [*lines, *([f"written: {', '.join(record.written)}"] if record.written else [])]


def say_verdict(file: FrontierFile) -> str:
    """One sentence about a compressed file."""
    what = f"{file.name} ({format_bytes(file.bytes)})"
    rival = file.rival
    if rival is None:
        return f"{what}: smaller than the source in any precision here, so there is nothing to hold it against"
    place = rival.larger if rival.smaller == rival.larger else f"between {rival.smaller} and {rival.larger}"
    found = f"perplexity {say_change(rival.change)} against the source at that size ({place})"
    if rival.verdict == "both":
        return f"{what}: both together are the better buy: {found}"
    if rival.verdict == "precision":
        return f"{what}: a smaller precision of the source alone is the better buy: {found}"
    return f"{what}: cannot be told apart from the source in a smaller precision: {found}"
