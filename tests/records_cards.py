"""Small records for the tests of cards, tables and CI files, made without running anything."""

from __future__ import annotations

from typing import Any

from compressor.report.record import Record, SavedRecord

HEAD: dict[str, Any] = {"schema_version": 1, "tool": {"name": "compressor", "version": "0.1.0"}}
SOURCE = {"model": "/home/me/gpt2", "revision": None, "model_type": "gpt2", "weights_sha256": "0123456789abcdef" * 4}
PERPLEXITY = {
    "baseline": 20.0,
    "compressed": 20.5,
    "delta": 0.5,
    "delta_ci95": [0.25, 0.75],
    "delta_upper": 0.75,
    "tokens": 2000,
    "seq_len": 32,
}
TEXT = {**PERPLEXITY, "max_dppl": 1.0, "asked": "5%", "passed": True}
FIDELITY = {
    "kl": 0.0123,
    "kl_ci95": [0.011, 0.014],
    "kl_upper": 0.014,
    "top1_agreement": 0.941,
    "top1_agreement_ci95": [0.93, 0.9512],
    "tokens": 2000,
    "unit": "window",
    "units": 64,
}
TASK = {
    "metric": "acc",
    "higher_is_better": True,
    "source": 0.5,
    "compressed": 0.4,
    "drop": 0.1,
    "drop_ci95": [0.0, 0.2],
    "drop_upper": 0.2,
    "documents": 9,
    "changed": 1,
    "metrics": {"acc": {"source": 0.5, "compressed": 0.4}},
}


def block(index: int, kind: str, after: int, **values: Any) -> dict[str, Any]:
    return {
        "index": index,
        "path": f"transformer.h.{index}.mlp",
        "r2_lin": 0.9,
        "r2_lin_ci95": [0.85, 0.95],
        "r2_stream": 0.8,
        "effective_rank": 4.0,
        "top_row_share": 0.01,
        "params_before": 1000,
        "params_after": after,
        "verdict": "safe",
        "reason": "measured alone",
        "replacement": {"kind": kind, "rank": None, "neurons": None},
        **values,
    }


def measured(**parts: Any) -> Record:
    """The record of a compressed model; `parts` are set or replaced."""
    values = {
        **HEAD,
        "source": SOURCE,
        "parameters": {"before": 10_000, "after": 9_100, "removed": 900, "removed_fraction": 0.09},
        "blocks": [
            block(0, "linear", 100),
            block(1, "keep", 1000, verdict="unsafe", reason="one row carries it"),
        ],
        "text": {"verification": {"source": "/home/me/corpus.txt", "sha256": "fedcba9876543210" * 4, "tokens": 2000}},
        "budget": {"max_dppl": 1.0, "asked": "5%", "confidence": 0.95},
        "perplexity": PERPLEXITY,
        "texts": {"text": TEXT},
        **parts,
    }
    return Record.model_validate(values)


def with_source(**values: Any) -> Record:
    """The record of a compressed model with these values in its source."""
    return measured(source={**SOURCE, **values})


def saved() -> SavedRecord:
    """The record of a model that was saved through the Python API."""
    blocks = [{"path": "transformer.h.0.mlp", "replacement": {"kind": "hybrid", "rank": 3, "neurons": 5}}]
    return SavedRecord.model_validate({**HEAD, "source": SOURCE, "parameters": {"after": 9_100}, "blocks": blocks})
