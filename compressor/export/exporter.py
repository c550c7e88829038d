"""Export a compressed checkpoint for runtimes that know nothing of this tool; it is checked before it appears."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from compressor.export import gguf, vllm
from compressor.export.check import check_in_llamacpp, sample_tokens
from compressor.export.llama import LLAMA_TYPES, Llama, block_widths, convert_to_llama
from compressor.export.onnx import require_packages, write_onnx
from compressor.export.stock import build_empty, convert_to_stock, stock_config
from compressor.modeling_compressor import replacements
from compressor.models.load import load_model, quiet
from compressor.models.source import source_of
from compressor.patch.checkpoint import count_parameters, write_checkpoint
from compressor.patch.verify import compare_logits, verify_written
from compressor.report.card import export_card
from compressor.report.export_record import ExportRecord, ExportSizes, RuntimeCheck
from compressor.report.record import Record, SavedRecord, describe_tool, read_record
from compressor.runtime.errors import InputError
from compressor.runtime.names import EXPORT, RECORD
from compressor.runtime.outputs import (
    reporting_disk_errors,
    reserved,
    reserved_file,
    whole_directory,
    whole_file,
    write_json,
)
from compressor.runtime.progress import Progress
from compressor.runtime.resources import NotEnoughMemory, require_disk

FLOATS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
NAMES = {dtype: name for name, dtype in FLOATS.items()}
BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32}  # of one parameter


@dataclass(frozen=True)
class ExportRequest:
    """What the user asked for."""

    model: str
    to: str
    out: str
    dtype: str | None = None
    overwrite: bool = False
    force: bool = False


@dataclass(frozen=True)
class ExportJob:
    """A compressed model that is being exported; `dtype` is what its weights are stored as."""

    request: ExportRequest
    model: Any
    tokenizer: Any
    dtype: str
    source_parameters: int
    compressed_parameters: int
    record: Record | SavedRecord | None  # of the compressed checkpoint, where it has one
    progress: Progress

    @property
    def family(self) -> str:
        return str(self.model.config.model_type)


def export(
    model: str | Path,
    to: str,
    out: str | Path,
    *,
    dtype: str | None = None,
    overwrite: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> ExportRecord:
    """Write a compressed checkpoint for another runtime (gguf, hf-dense, onnx or vllm), and return what was written."""
    request = ExportRequest(str(model), to, str(out), dtype, overwrite, force)
    if to not in TARGETS:
        raise InputError(f"--to {to} is not known; use {', '.join(TARGETS)}")
    return run_export(request, progress or Progress())


def run_export(request: ExportRequest, progress: Progress) -> ExportRecord:
    """Refuse what cannot be done before any work; then load the model, and write it in the form asked for."""
    began = time.perf_counter()
    write, dtypes = TARGETS[request.to]
    if request.dtype not in (None, *dtypes):
        raise InputError(f"--dtype {request.dtype} is not for --to {request.to}; use {', '.join(dtypes)}")
    if request.to == "onnx":
        require_packages()
    checkpoint = Path(request.model)
    record = read_record(checkpoint) if (checkpoint / RECORD).is_file() else None
    with reserve_output(request, progress) as target:
        job = open_job(request, dtypes, record, progress)
        with reporting_disk_errors(target):
            written = write(job, target)
    size = sum(file.stat().st_size for file in [target, *target.rglob("*")] if file.is_file())
    return written.model_copy(update={"out": str(target), "bytes": size, "seconds": time.perf_counter() - began})


@contextmanager
def reserve_output(request: ExportRequest, progress: Progress) -> Iterator[Path]:
    """The path of the output, for this process alone; one that cannot be had is refused."""
    if request.to == "gguf":
        with reserved_file(request.out, request.overwrite, b"GGUF", progress.say) as file:
            yield file
    else:
        with reserved(request.out, request.overwrite, request.model, EXPORT, progress.say) as directory:
            yield directory


def open_job(
    request: ExportRequest, dtypes: tuple[str, ...], record: Record | SavedRecord | None, progress: Progress
) -> ExportJob:
    """Load the model, which must be a compressed one."""
    try:
        with quiet():
            model, tokenizer = load_model(request.model, device="cpu", dtype="float32", allow_compressed=True)
    except NotEnoughMemory as error:
        raise InputError(f"{error.shortage}; export it where there is more") from error
    if not replacements(model):
        raise InputError(f"{request.model} is not a compressed checkpoint; give a directory that compress wrote")
    with quiet():
        source_parameters = count_parameters(build_empty(stock_config(model)))
    dtype = pick_dtype(request, model, dtypes)
    return ExportJob(request, model, tokenizer, dtype, source_parameters, count_parameters(model), record, progress)


def pick_dtype(request: ExportRequest, model: Any, dtypes: tuple[str, ...]) -> str:
    """The dtype asked for, or else the checkpoint's; blocks without a gate need float32 to be exact linear maps."""
    if request.dtype is not None:
        return request.dtype
    if request.to == "hf-dense" and model.config.model_type not in LLAMA_TYPES:
        return "f32"
    stored = NAMES.get(source_of(model).dtype, "f32")
    return stored if stored in dtypes else dtypes[0]


def export_gguf(job: ExportJob, target: Path) -> ExportRecord:
    with naming_alternatives(job):
        llama = convert_to_llama(job.model, multiple=gguf.MULTIPLE, kept=True)
        gguf.refuse_activation(llama)
    require_same_logits(job, llama.model)
    parameters = announce_size(job, "as GGUF", count_parameters(llama.model))
    require_room(job, parameters, target)
    limits = note_limits(job, llama)
    with whole_file(target) as file:
        with naming_alternatives(job):
            notes = gguf.write_gguf(llama, job.tokenizer, file, job.dtype, Path(job.request.model).name)
        for note in notes:
            job.progress.say(f"note: {note}")
        checked = check_in_llamacpp(job.model, job.tokenizer, file, job.dtype, notes, job.progress)
    return make_record(
        job,
        parameters,
        checked,
        architecture="deci",
        neurons=block_widths(llama.model),
        needed=llama.widths,
        notes=notes,
        **limits,
        context=gguf.exact_context_length(llama.model.config),
    )


def export_dense(job: ExportJob, target: Path) -> ExportRecord:
    with naming_alternatives(job):
        stock, needed, window = convert_to_dense(job)
    width, family = max(needed), stock.config.model_type
    parameters = announce_size(job, f"as a stock {family}", count_parameters(stock))
    source, saving = job.source_parameters, job.source_parameters - job.compressed_parameters
    padding = (parameters - job.compressed_parameters) / max(1, saving)
    widest = f"block {needed.index(width)} needs {width:,} neurons"
    job.progress.say(f"one width for all blocks costs {padding:.0%} of the saving: {widest}")
    if parameters >= source and not job.request.force:
        raise InputError(
            f"as a stock {family} nothing of the saving is left ({parameters:,} parameters, the source {source:,}): "
            f"all blocks have one width, and {widest}; {alternatives(job)}, or add --force"
        )
    require_same_logits(job, stock)
    require_room(job, parameters, target)
    with whole_directory(target) as partial:
        with quiet():
            write_checkpoint(stock, job.tokenizer, partial, dtype=FLOATS[job.dtype])
        tokens = sample_tokens(job.model, job.tokenizer)
        off = verify_written(partial, job.model, tokens, job.progress, FLOATS[job.dtype])
        record = make_record(
            job,
            parameters,
            RuntimeCheck(runtime="transformers", logits_off=off),
            architecture=family,
            neurons=[width] * len(needed),
            needed=needed,
            padding_cost=padding,
            **note_window(job, window),
        )
        write_record(partial, job, record)
    return record


def convert_to_dense(job: ExportJob) -> tuple[Any, list[int], int | None]:
    """The model in its own stock architecture, or else as a Llama; the widths that its blocks need; and how far back
    it may look, where that is less than its context."""
    try:
        return *convert_to_stock(job.model), None
    except InputError:
        if job.family not in LLAMA_TYPES:
            raise
    llama = convert_to_llama(job.model, uniform=True)
    return llama.model, llama.widths, llama.window


def export_vllm(job: ExportJob, target: Path) -> ExportRecord:
    with naming_alternatives(job):
        llama = convert_to_llama(job.model, multiple=vllm.MULTIPLE)
    off = require_same_logits(job, llama.model)
    parameters = announce_size(job, "with widths in steps of 256", count_parameters(llama.model))
    require_room(job, parameters, target)
    job.progress.say("note: this was written after vLLM's source and has not been run in vLLM")
    with whole_directory(target) as partial:
        with quiet():
            vllm.write_decilm(llama, job.tokenizer, partial, FLOATS[job.dtype])
        record = make_record(
            job,
            parameters,
            RuntimeCheck(runtime="torch, before writing", logits_off=off),
            architecture="DeciLMForCausalLM",
            neurons=block_widths(llama.model),
            needed=llama.widths,
            **note_limits(job, llama),
        )
        write_record(partial, job, record)
    return record


def export_onnx(job: ExportJob, target: Path) -> ExportRecord:
    parameters = announce_size(job, "as ONNX", job.compressed_parameters)
    require_room(job, parameters, target)
    with whole_directory(target) as partial:
        graph = write_onnx(job.model, job.tokenizer, partial, job.progress)
        record = make_record(
            job,
            parameters,
            RuntimeCheck(runtime=f"ONNX Runtime {version('onnxruntime')}", logits_off=graph.logits_off),
            opset=graph.opset,
            cache=graph.cache,
            without_cache_because=graph.without_cache_because,
            inputs=graph.inputs,
            outputs=graph.outputs,
            tolerance=graph.tolerance,
            use=graph.use,
        )
        write_record(partial, job, record)
    return record


TARGETS: dict[str, tuple[Callable[[ExportJob, Path], ExportRecord], tuple[str, ...]]] = {
    "gguf": (export_gguf, gguf.DTYPES),
    "hf-dense": (export_dense, tuple(FLOATS)),
    "onnx": (export_onnx, ("f32",)),
    "vllm": (export_vllm, tuple(FLOATS)),
}


def make_record(job: ExportJob, parameters: int, checked: RuntimeCheck, **parts: Any) -> ExportRecord:
    """The record of an export; `parts` are the fields that this form of export has beside those of all."""
    return ExportRecord(
        **describe_tool(),
        to=job.request.to,
        family=job.family,
        dtype=job.dtype,
        parameters=ExportSizes(source=job.source_parameters, compressed=job.compressed_parameters, exported=parameters),
        checked=checked,
        **parts,
    )


def write_record(directory: Path, job: ExportJob, record: ExportRecord) -> None:
    """Write export.json and the card; what was measured before comes from the compressed checkpoint."""
    write_json(directory / EXPORT, record.to_json_value())
    (directory / "README.md").write_text(export_card(record, job.record), encoding="utf-8")


@contextmanager
def naming_alternatives(job: ExportJob) -> Iterator[None]:
    """The error of a model that cannot be written in this form says in which it can."""
    try:
        yield
    except InputError as error:
        what = f"{job.request.model} cannot be written as {job.request.to}"
        raise InputError(f"{what}: {error}; {alternatives(job)}") from error


def alternatives(job: ExportJob) -> str:
    ways = "--to onnx" if job.request.to == "hf-dense" else "--to hf-dense or --to onnx"
    if job.request.to == "hf-dense" and job.family in LLAMA_TYPES:
        ways = "--to gguf, which keeps a width for every block, or --to onnx"
    return f"try {ways}, or load the checkpoint itself in transformers"


def announce_size(job: ExportJob, form: str, parameters: int) -> int:
    """Say what is left of the saving before anything is written; return the parameters."""
    source, compressed = job.source_parameters, job.compressed_parameters
    job.progress.say(
        f"source {source:,} parameters; compressed {compressed:,} ({compressed / source - 1:+.2%}); "
        f"{form} {parameters:,} ({parameters / source - 1:+.2%})"
    )
    if parameters >= source:
        job.progress.say("warning: nothing of the saving is left in this form")
    return parameters


def require_room(job: ExportJob, parameters: int, target: Path) -> None:
    needed = int(parameters * BYTES[job.dtype]) + (16 << 20)  # and the tokenizer
    job.progress.say(require_disk("the export", needed, target, "name another --out"))


def require_same_logits(job: ExportJob, other: Any) -> float:
    """The model to be written must compute what the compressed one computes, in float32; return how far it is off."""
    return compare_logits(job.model, other, sample_tokens(job.model, job.tokenizer), torch.float32)


def note_limits(job: ExportJob, llama: Llama) -> dict[str, int]:
    """Say where a model in Llama's terms is not all that its source is; return what of it is recorded."""
    if llama.scaled and job.dtype == "bf16":
        job.progress.say("note: the source's multipliers are in the weights, which bf16 rounds again; f16 is closer")
    return note_window(job, llama.window)


def note_window(job: ExportJob, window: int | None) -> dict[str, int]:
    """A source with a sliding window looks back only so far; the export looks back to the start of its context, so
    that context ends where the window does."""
    if window is None:
        return {}
    job.progress.say(f"note: the source looks back {window:,} tokens; the export's context is cut to that")
    return {"window": window}
