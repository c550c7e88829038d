"""Words for a compressed model that was searched for and saved, but not measured on the verification text."""

from __future__ import annotations

from compressor.report.record import Record

NOT_VERIFIED = "not verified: perplexity was not measured on the verification text; `compress check` does that"


def is_unverified(record: Record) -> bool:
    """Whether only the text of the search was measured."""
    return record.perplexity is None and bool(record.selection)


def selection_lines(record: Record) -> list[str]:
    """What a search measured of a model that was not verified: a line per text."""
    lines = []
    for name, change in record.selection.items():
        low, high = change.delta_ci95
        lines.append(
            f"selection {name}: perplexity {change.baseline:.3f} → {change.compressed:.3f}  (Δ {change.delta:+.3f}, "
            f"95 % interval {low:+.3f} … {high:+.3f}; {change.tokens:,} tokens, windows of {change.seq_len})"
        )
    return lines


def unverified_lines(record: Record) -> list[str]:
    """The same with a word on what is missing; nothing for a model that was verified."""
    return [*selection_lines(record), NOT_VERIFIED] if is_unverified(record) else []
