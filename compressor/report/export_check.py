"""An export measured in its own runtime: the part of a record, its table and its lines."""

from __future__ import annotations

from pydantic import Field

from compressor.report.export_origin import ExportOrigin
from compressor.report.fidelity import format_share
from compressor.report.grid import Grid
from compressor.report.part import Count, Figure, Part
from compressor.report.record_parts import PerplexityChange
from compressor.runtime.figures import signed, signed_interval


class Contrast(PerplexityChange):
    """Two models on the same tokens: `baseline` is the perplexity of the one that it is held against, `compressed` that
    of the other."""

    name: str  # export, format, compression, checkpoint, conversion
    words: str  # what is compared with what
    log_probability_off: Figure  # the largest difference of a token's log-probability
    log_probability_off_mean: Figure  # the mean absolute one
    greedy_equal: Count  # of `tokens`: places of the text where both find the same token most likely


class ExportCheck(Part):
    """What an export is, where it ran, and all comparisons that were made; the first of them is the gate."""

    to: str
    dtype: str
    runtime: str
    bytes: Count
    origin: ExportOrigin | None = None
    contrasts: list[Contrast] = Field(default_factory=list)
    without_control: str | None = None  # why the source in the same form is not among them


def contrast_table(check: ExportCheck) -> Grid:
    """One line per comparison."""
    columns = (
        "compared",
        "perplexity",
        "change",
        "95 % interval",
        "log-prob. off: mean",
        "largest",
        "same greedy token",
    )
    table = Grid(columns, left=("compared",), optional=("largest", "log-prob. off: mean", "95 % interval"))
    for found in check.contrasts:
        low, high = found.delta_ci95
        table.add_row(
            found.words,
            f"{found.baseline:.3f} → {found.compressed:.3f}",
            signed(found.delta),
            signed_interval(low, high),
            f"{found.log_probability_off_mean:.2g}",
            f"{found.log_probability_off:.2g}",
            f"{format_share(found.greedy_equal / max(1, found.tokens))} %",
        )
    return table


def export_check_lines(check: ExportCheck) -> list[str]:
    """Where it ran, and how much of the change is the format's own."""
    found = {contrast.name: contrast for contrast in check.contrasts}
    lines = [f"measured in {check.runtime}, against the source in transformers (float32)"]
    if "format" in found:
        whole, alone = found["export"].delta, found["format"].delta
        lines.append(
            f"of the change of {signed(whole)}, {signed(alone)} is what {check.dtype} costs the source itself there, "
            f"and {signed(found['compression'].delta)} what the compression adds to that"
        )
    if "conversion" in found:
        lines.append(
            f"of the change of {signed(found['export'].delta)}, {signed(found['checkpoint'].delta)} is the "
            f"checkpoint's own, in transformers, and {signed(found['conversion'].delta)} came with the export"
        )
    if check.without_control:
        lines.append(f"without the source in the same form: {check.without_control}")
    return lines
