"""Export: a compressed checkpoint for runtimes that know nothing of this tool, checked before anybody can see it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from compressor.export import gguf, vllm
from compressor.export.llama import LLAMA_TYPES, as_llama, block_widths
from compressor.export.onnx import require_packages, write_onnx
from compressor.export.request import (
    FLOATS,
    Export,
    Order,
    alternatives,
    announce,
    check_in_llamacpp,
    check_tokens,
    compare,
    describe,
    explaining,
    limited,
    require_room,
    windowed,
)
from compressor.export.stock import as_own, blank, stock_config
from compressor.modeling_compressor import replacements
from compressor.models.load import load_model, quiet
from compressor.models.source import source_of
from compressor.patch.checkpoint import count_parameters, write_checkpoint
from compressor.patch.verify import verify_written
from compressor.report.leaflets import leaflet
from compressor.report.record import read_record
from compressor.runtime.errors import InputError
from compressor.runtime.names import EXPORT, RECORD
from compressor.runtime.outputs import refusing_disk, reserved, reserved_file, whole_directory, whole_file, write_json
from compressor.runtime.progress import Progress
from compressor.runtime.resources import ShortMemory

NAMES = {dtype: name for name, dtype in FLOATS.items()}


def export(
    model: str | Path,
    to: str,
    out: str | Path,
    *,
    dtype: str | None = None,
    overwrite: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write a compressed checkpoint for another runtime (gguf, hf-dense, onnx or vllm), and return what was written."""
    order = Order(str(model), to, str(out), dtype, overwrite, force)
    if to not in TARGETS:
        raise InputError(f"--to {to} is not known; use {', '.join(TARGETS)}")
    return carry_out(order, progress or Progress())


def carry_out(order: Order, progress: Progress) -> dict[str, Any]:
    began = time.perf_counter()
    write, dtypes = TARGETS[order.to]
    if order.dtype not in (None, *dtypes):
        raise InputError(f"--dtype {order.dtype} is not for --to {order.to}; use {', '.join(dtypes)}")
    if order.to == "onnx":
        require_packages()
    own = Path(order.model)
    record = read_record(own) if (own / RECORD).is_file() else None  # refused before any work if it is not sound
    with reserve(order, progress) as target:
        try:
            with quiet():
                model, tokenizer = load_model(order.model, device="cpu", dtype="float32", allow_compressed=True)
        except ShortMemory as error:
            raise InputError(f"{error.shortage}; export it where there is more") from error
        if not replacements(model):
            raise InputError(f"{order.model} is not a compressed checkpoint; give a directory that compress wrote")
        with quiet():
            sizes = {"source": count_parameters(blank(stock_config(model))), "compressed": count_parameters(model)}
        job = Export(order, model, tokenizer, pick_dtype(order, model, dtypes), sizes, record, progress)
        with refusing_disk(target):
            report = write(job, target)
    size = sum(file.stat().st_size for file in [target, *target.rglob("*")] if file.is_file())
    return {**report, "out": str(target), "bytes": size, "seconds": time.perf_counter() - began}


@contextmanager
def reserve(order: Order, progress: Progress) -> Iterator[Path]:
    """The output is ours, or refused before any work."""
    if order.to == "gguf":
        with reserved_file(order.out, order.overwrite, b"GGUF", progress.say) as file:
            yield file
    else:
        with reserved(order.out, order.overwrite, order.model, EXPORT, progress.say) as directory:
            yield directory


def pick_dtype(order: Order, model: Any, dtypes: tuple[str, ...]) -> str:
    """The checkpoint's own precision, if it is not said; plain blocks as linear maps need float32 to be exact."""
    own = NAMES.get(source_of(model).dtype, "f32")
    if order.dtype is None and order.to == "hf-dense" and model.config.model_type not in LLAMA_TYPES:
        own = "f32"
    return order.dtype or (own if own in dtypes else dtypes[0])


def to_gguf(job: Export, target: Path) -> dict[str, Any]:
    with explaining(job):
        llama = as_llama(job.model, multiple=gguf.MULTIPLE, kept=True)
        gguf.refuse_activation(llama)
    compare(job, llama.model)
    parameters = announce(job, "as GGUF", count_parameters(llama.model))
    require_room(job, parameters, target)
    limits = limited(job, llama) | {"context": gguf.context_of(llama.model.config)}
    with whole_file(target) as file:
        with explaining(job):
            notes = gguf.write_gguf(llama, job.tokenizer, file, job.dtype, Path(job.order.model).name)
        for note in notes:
            job.progress.say(f"note: {note}")
        checked = check_in_llamacpp(job, file, notes)
    found = {"architecture": "deci", "neurons": block_widths(llama.model), "needed": llama.widths, "notes": notes}
    return describe(job, parameters, **found, **limits, checked=checked)


def to_dense(job: Export, target: Path) -> dict[str, Any]:
    with explaining(job):
        stock, needed, window = as_dense(job)
    width, family = max(needed), stock.config.model_type
    parameters = announce(job, f"as a stock {family}", count_parameters(stock))
    source, saving = job.sizes["source"], job.sizes["source"] - job.sizes["compressed"]
    padding = (parameters - job.sizes["compressed"]) / max(1, saving)
    widest = f"block {needed.index(width)} needs {width:,} neurons"
    job.progress.say(f"one width for all blocks costs {padding:.0%} of the saving: {widest}")
    if parameters >= source and not job.order.force:
        raise InputError(
            f"as a stock {family} nothing of the saving is left ({parameters:,} parameters, the source {source:,}): "
            f"all blocks have one width, and {widest}; {alternatives(job)}, or add --force"
        )
    compare(job, stock)
    require_room(job, parameters, target)
    with whole_directory(target) as partial:
        with quiet():
            write_checkpoint(stock, job.tokenizer, partial, dtype=FLOATS[job.dtype])
        off = verify_written(partial, job.model, check_tokens(job), job.progress, FLOATS[job.dtype])
        found = {"architecture": family, "neurons": [width] * len(needed), "needed": needed, "padding_cost": padding}
        checked = {"runtime": "transformers", "logits_off": off}
        report = describe(job, parameters, **found, **windowed(job, window), checked=checked)
        describe_in(partial, job, report)
    return report


def as_dense(job: Export) -> tuple[Any, list[int], int | None]:
    """The stock model, what its blocks need, and how far back it may look. Its own architecture, or else a Llama."""
    try:
        return *as_own(job.model), None
    except InputError:
        if job.model.config.model_type not in LLAMA_TYPES:
            raise
    llama = as_llama(job.model, uniform=True)
    return llama.model, llama.widths, llama.window


def to_vllm(job: Export, target: Path) -> dict[str, Any]:
    with explaining(job):
        llama = as_llama(job.model, multiple=vllm.MULTIPLE)
    off = compare(job, llama.model)
    parameters = announce(job, "with widths in steps of 256", count_parameters(llama.model))
    require_room(job, parameters, target)
    job.progress.say("note: this was written after vLLM's source and has not been run in vLLM")
    with whole_directory(target) as partial:
        with quiet():
            vllm.write_decilm(llama, job.tokenizer, partial, FLOATS[job.dtype])
        found = {"architecture": "DeciLMForCausalLM", "neurons": block_widths(llama.model), "needed": llama.widths}
        checked = {"runtime": "torch, before writing", "logits_off": off}
        report = describe(job, parameters, **found, **limited(job, llama), checked=checked)
        describe_in(partial, job, report)
    return report


def to_onnx(job: Export, target: Path) -> dict[str, Any]:
    parameters = announce(job, "as ONNX", job.sizes["compressed"])
    require_room(job, parameters, target)
    with whole_directory(target) as partial:
        found = write_onnx(job.model, job.tokenizer, partial, job.progress)
        checked = {"runtime": f"ONNX Runtime {version('onnxruntime')}", "logits_off": found.pop("logits_off")}
        report = describe(job, parameters, **found, checked=checked)
        describe_in(partial, job, report)
    return report


def describe_in(directory: Path, job: Export, report: dict[str, Any]) -> None:
    """The record and the card of what was written; what was measured before comes from the compressed checkpoint."""
    write_json(directory / EXPORT, report)
    (directory / "README.md").write_text(leaflet(report, job.record), encoding="utf-8")


TARGETS: dict[str, tuple[Callable[[Export, Path], dict[str, Any]], tuple[str, ...]]] = {
    "gguf": (to_gguf, gguf.DTYPES),
    "hf-dense": (to_dense, tuple(FLOATS)),
    "onnx": (to_onnx, ("f32",)),
    "vllm": (to_vllm, tuple(FLOATS)),
}
