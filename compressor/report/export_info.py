"""What `compress info` says of an export: what it is, what it was made from, and how it was checked."""

from __future__ import annotations

from compressor.report.export_record import VECTORS, ExportRecord, RuntimeCheck
from compressor.report.formats import as_float, block_numbers
from compressor.report.record_parts import present
from compressor.runtime.figures import count, signed
from compressor.runtime.resources import format_bytes

FORMS = {
    "gguf": "a GGUF file for llama.cpp",
    "hf-dense": "a stock checkpoint for transformers",
    "onnx": "an ONNX graph for ONNX Runtime",
    "vllm": "a DeciLM checkpoint for vLLM, which was never run",
}


def export_info_lines(record: ExportRecord) -> list[str]:
    """The form and size of an export, its origin, and what was compared when it was written."""
    sizes = record.parameters
    architecture = f", architecture {record.architecture}" if record.architecture else ""
    kept = [
        number
        for number, (wide, needed) in enumerate(zip(record.neurons, record.needed, strict=False))
        if wide > needed
    ]
    lines = [
        f"{present(record.out)}: {FORMS.get(record.to, record.to)}, written by compressor {record.tool.version}",
        f"{record.family}{architecture}, {record.dtype}, {format_bytes(present(record.bytes))}",
        f"parameters {sizes.source:,} in the source, {sizes.compressed:,} in the checkpoint, {sizes.exported:,} here "
        f"({signed(as_float(sizes.exported) / max(1.0, as_float(sizes.source)) - 1, '.2%')} of the source's)",
        *origin_lines(record),
        *([f"filled up to a width that the form has: blocks {block_numbers(kept)}"] if kept else []),
        *([f"context {record.context:,} tokens"] if record.context else []),
        *([f"the source looks back {record.window:,} tokens; the context is cut to that"] if record.window else []),
        *([f"for {record.use}"] if record.use else []),
        *stored_lines(record),
        *(f"note: {note}" for note in record.notes),
        say_check(record.checked),
    ]
    return lines


def stored_lines(record: ExportRecord) -> list[str]:
    """Which matrices of a GGUF file are not of its own type, and why. That vectors are float32 is not said."""
    others = [
        f"{count(group.tensors, 'tensor')} as {group.type} ({count(group.parameters, 'parameter')}): {group.why}"
        for group in record.stored
        if group.why is not None and group.why != VECTORS
    ]
    return [f"not stored as {record.dtype}: {'; '.join(others)}"] if others else []


def origin_lines(record: ExportRecord) -> list[str]:
    """The checkpoint and the source that it was made from, and what the checkpoint promised."""
    origin = record.origin
    if origin is None:
        return ["made from: not recorded, an earlier version wrote it"]
    lines = [f"made from the checkpoint {origin.checkpoint}"]
    if origin.source is not None:
        where = f", revision {origin.source.revision}" if origin.source.revision else ""
        local = ", a local directory" if "source" in origin.local else ""
        lines = [f"{lines[0]} of {origin.source.model} ({origin.source.model_type}{where}{local})"]
    if origin.perplexity is not None:
        change, texts = origin.perplexity, origin.recipe.get("text")
        of = f" on {', '.join(map(str, texts))}" if isinstance(texts, list) else ""
        budget = origin.recipe.get("max_dppl")
        asked = f", budget {', '.join(map(str, budget))}" if isinstance(budget, list) else ", no limit on perplexity"
        lines.append(
            f"the checkpoint's perplexity, as recorded{of}: {change.baseline:.3f} → {change.compressed:.3f} "
            f"({signed(change.delta)}{asked})"
        )
    return lines


def say_check(check: RuntimeCheck) -> str:
    """What was compared with the checkpoint when the export was written."""
    if check.runtime is None:
        return "when it was written it was not run: its runtime was not installed"
    if check.log_probability_off is not None:
        return (
            f"when it was written, in {check.runtime}: {check.greedy_equal} of {check.greedy} greedy tokens as in the "
            f"checkpoint, log-probabilities off by at most {check.log_probability_off:.2g} on {check.tokens} tokens"
        )
    off = f": logits off by {check.logits_off:.1g} of the largest" if check.logits_off is not None else ""
    return f"when it was written, in {check.runtime}{off}"
