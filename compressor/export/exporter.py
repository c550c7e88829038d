"""Export a compressed checkpoint for runtimes that do not know this tool; every export is checked before it appears."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from compressor.export import gguf, vllm
from compressor.export.attention import find_compressed_attention, has_attention_of, most_units
from compressor.export.check import check_in_llamacpp, sample_tokens
from compressor.export.gguf_metadata import replace_string
from compressor.export.llama import LLAMA_TYPES, Llama, block_widths, convert_to_llama, head_counts
from compressor.export.onnx import require_packages, write_onnx
from compressor.export.origin import describe_origin
from compressor.export.stock import build_empty, convert_to_stock, describe_stock_heads, stock_config
from compressor.export.written import GGUF_KEY, ROOM
from compressor.modeling_compressor import replacements
from compressor.models.blocks import find_blocks
from compressor.models.deferred import defer_weights
from compressor.models.load import load_model, quiet
from compressor.models.source import source_of, stored_dtype
from compressor.patch.checkpoint import count_parameters, write_checkpoint
from compressor.patch.verify import compare_logits, verify_written
from compressor.report.card import export_card
from compressor.report.export_record import ExportRecord, ExportSizes, RuntimeCheck
from compressor.report.record import Record, SavedRecord, describe_tool, read_record, refuse_other_weights
from compressor.runtime.errors import InputError
from compressor.runtime.figures import signed
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
from compressor.runtime.safe_files import finite

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
TOKENIZER_BYTES = 16 * 10**6  # a large one; the config and the card are small beside it


@dataclass(frozen=True)
class ExportRequest:
    """The arguments of one export."""

    model: str
    to: str
    out: str
    dtype: str | None = None
    overwrite: bool = False
    force: bool = False
    low_memory: bool = False


@dataclass(frozen=True)
class ExportJob:
    """A compressed model that is being exported; its weights are stored as `dtype`."""

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
    low_memory: bool = False,
    progress: Progress | None = None,
) -> ExportRecord:
    """Write a compressed checkpoint for another runtime (gguf, hf-dense, onnx or vllm), and return its record.

    `low_memory` reads every tensor from disk when it is needed and keeps none; what is written is the same.
    """
    request = ExportRequest(str(model), to, str(out), dtype, overwrite, force, low_memory)
    if to not in TARGETS:
        raise InputError(f"--to {to} is not known; use {', '.join(TARGETS)}")
    return run_export(request, progress or Progress())


def run_export(request: ExportRequest, progress: Progress) -> ExportRecord:
    """Check the request before any work, load the model, and write it in the form that was asked for."""
    began = time.perf_counter()
    write, dtypes = TARGETS[request.to]
    if request.dtype not in (None, *dtypes):
        raise InputError(f"--dtype {request.dtype} is not for --to {request.to}; use {', '.join(dtypes)}")
    if request.to == "onnx":
        if request.low_memory:
            raise InputError(
                "--low-memory is not for --to onnx, whose exporter traces the whole model; leave it out, or use "
                "--to hf-dense or --to gguf"
            )
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
    """The path of the output, locked for this process while open; a path that cannot be written is refused."""
    if request.to == "gguf":
        with reserved_file(request.out, request.overwrite, b"GGUF", progress.say) as file:
            yield file
    else:
        with reserved(request.out, request.overwrite, request.model, EXPORT, progress.say) as directory:
            yield directory


def open_job(
    request: ExportRequest, dtypes: tuple[str, ...], record: Record | SavedRecord | None, progress: Progress
) -> ExportJob:
    """Load the model, and refuse one that is not compressed."""
    try:
        with quiet():
            model, tokenizer = load_model(
                request.model, device="cpu", dtype="float32", allow_compressed=True, low_memory=request.low_memory
            )
    except NotEnoughMemory as error:
        remedy = "export it where there is more"
        if request.to != "onnx":
            remedy = "add --low-memory, which reads each tensor from disk when it is written"
        raise InputError(f"{error.shortage}; {remedy}") from error
    if request.low_memory:
        defer_weights(model)
    if not replacements(model):
        raise InputError(f"{request.model} is not a compressed checkpoint; give a directory that compress wrote")
    if record is not None:
        refuse_other_weights(request.model, record, source_of(model).weights_sha256)
    with quiet():
        source_parameters = count_parameters(build_empty(stock_config(model)))
    dtype = pick_dtype(request, model, dtypes)
    return ExportJob(request, model, tokenizer, dtype, source_parameters, count_parameters(model), record, progress)


def pick_dtype(request: ExportRequest, model: Any, dtypes: tuple[str, ...]) -> str:
    """The dtype that was asked for, or else the checkpoint's; blocks without a gate are exact only in float32."""
    if request.dtype is not None:
        return request.dtype
    if request.to == "hf-dense" and model.config.model_type not in LLAMA_TYPES:
        return "f32"
    stored = DTYPE_NAMES.get(stored_dtype(model), "f32")
    return stored if stored in dtypes else dtypes[0]


def export_gguf(job: ExportJob, target: Path) -> ExportRecord:
    with naming_alternatives(job):
        llama = convert_to_llama(job.model, multiple=gguf.MULTIPLE, keep_original_widths=True)
        gguf.refuse_activation(llama)
    require_same_logits(job, llama.model)
    parameters = announce_size(job, "as GGUF", count_parameters(llama.model))
    require_disk_space(job, sum(each.bytes for each in gguf.list_stored(llama.model, job.dtype)), target)
    limits = note_limits(job, llama)
    record = make_record(
        job,
        parameters,
        RuntimeCheck(runtime=None),
        architecture="deci",
        neurons=block_widths(llama.model),
        needed=llama.widths,
        **list_heads(job, llama.model),
        **limits,
        context=gguf.exact_context_length(llama.model.config),
    )
    with whole_file(target) as file:
        room = {GGUF_KEY: json.dumps(record.to_json_value()) + " " * ROOM}
        with naming_alternatives(job):
            notes, stored = gguf.write_gguf(llama, job.tokenizer, file, job.dtype, Path(job.request.model).name, room)
        for note in notes:
            job.progress.say(f"note: {note}")
        checked = check_in_llamacpp(job.model, job.tokenizer, file, job.dtype, notes, job.progress)
        record = record.model_copy(update={"notes": notes, "stored": stored, "checked": checked})
        replace_string(file, GGUF_KEY, json.dumps(finite(record.to_json_value())))
    return record


def export_dense(job: ExportJob, target: Path) -> ExportRecord:
    with naming_alternatives(job):
        stock, needed, window = convert_to_dense(job)
    width, family = max(needed), stock.config.model_type
    parameters = announce_size(job, f"as a stock {family}", count_parameters(stock))
    source, saving = job.source_parameters, job.source_parameters - job.compressed_parameters
    padding = (parameters - job.compressed_parameters) / max(1, saving)
    what, why = "one width for all blocks", f"block {needed.index(width)} needs {width:,} neurons"
    heads = list_stock_heads(job, stock)
    if heads:
        most, given = most_units(job.model, heads["key_value_heads"][0]), heads["key_value_heads"][0]
        what = "one width for all blocks and as many heads in all layers"
        why = f"{why}, and all layers get {given} key-value heads: a layer has {most} left"
    job.progress.say(f"{what} costs {padding:.0%} of the saving: {why}")
    if parameters >= source and not job.request.force:
        raise InputError(
            f"as a stock {family} nothing of the saving is left ({parameters:,} parameters, the source {source:,}): "
            f"{what}, and {why}; {list_alternatives(job)}, or add --force"
        )
    require_same_logits(job, stock)
    require_disk_space(job, parameters * DTYPES[job.dtype].itemsize, target)
    with whole_directory(target) as partial:
        with quiet():
            write_checkpoint(stock, job.tokenizer, partial, dtype=DTYPES[job.dtype])
        tokens = sample_tokens(job.model, job.tokenizer)
        off = verify_written(partial, job.model, tokens, job.progress, DTYPES[job.dtype])
        record = make_record(
            job,
            parameters,
            RuntimeCheck(runtime="transformers", logits_off=off),
            architecture=family,
            neurons=[width] * len(needed),
            needed=needed,
            padding_cost=padding,
            **heads,
            **note_window(job, window),
        )
        write_record(partial, job, record)
    return record


def convert_to_dense(job: ExportJob) -> tuple[Any, list[int], int | None]:
    """The model in its own stock architecture or, if that is not possible, as a Llama; the widths that its blocks need;
    and its attention window, where that is shorter than its context."""
    try:
        return *convert_to_stock(job.model), None
    except InputError:
        if job.family not in LLAMA_TYPES:
            raise
    llama = convert_to_llama(job.model, uniform=True)
    return llama.model, llama.widths, llama.window


def export_vllm(job: ExportJob, target: Path) -> ExportRecord:
    with naming_alternatives(job):
        llama = convert_to_llama(job.model, multiple=vllm.MULTIPLE, heads="grouped")
    off = require_same_logits(job, llama.model)
    parameters = announce_size(job, "with widths in steps of 256", count_parameters(llama.model))
    require_disk_space(job, parameters * DTYPES[job.dtype].itemsize, target)
    job.progress.say("note: this was written after vLLM's source and has not been run in vLLM")
    with whole_directory(target) as partial:
        with quiet():
            vllm.write_decilm(llama, job.tokenizer, partial, DTYPES[job.dtype])
        record = make_record(
            job,
            parameters,
            RuntimeCheck(runtime="torch, before writing", logits_off=off),
            architecture="DeciLMForCausalLM",
            neurons=block_widths(llama.model),
            needed=llama.widths,
            **list_heads(job, llama.model),
            **note_limits(job, llama),
        )
        write_record(partial, job, record)
    return record


def export_onnx(job: ExportJob, target: Path) -> ExportRecord:
    parameters = announce_size(job, "as ONNX", job.compressed_parameters)
    require_disk_space(job, parameters * DTYPES[job.dtype].itemsize, target)
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
    "hf-dense": (export_dense, tuple(DTYPES)),
    "onnx": (export_onnx, ("f32",)),
    "vllm": (export_vllm, tuple(DTYPES)),
}


def list_heads(job: ExportJob, llama: Any) -> dict[str, list[int]]:
    """The heads of every layer as they were written, for the record; nothing where no attention was compressed."""
    if not find_compressed_attention(job.model):
        return {}
    counts = head_counts(llama)
    return {"heads": [queries for queries, _ in counts], "key_value_heads": [keys for _, keys in counts]}


def list_stock_heads(job: ExportJob, stock: Any) -> dict[str, list[int]]:
    """The same for a stock model, all of whose layers have as many heads."""
    compressed = find_compressed_attention(job.model)
    if not compressed:
        return {}
    _, heads = describe_stock_heads(stock.config, compressed[0].block)
    layers = len(find_blocks(stock))
    return {"heads": [heads.count * heads.queries] * layers, "key_value_heads": [heads.count] * layers}


def make_record(job: ExportJob, parameters: int, checked: RuntimeCheck, **fields: Any) -> ExportRecord:
    """The record of an export; `fields` are those that only this form of export has."""
    return ExportRecord(
        **describe_tool(),
        to=job.request.to,
        family=job.family,
        dtype=job.dtype,
        parameters=ExportSizes(source=job.source_parameters, compressed=job.compressed_parameters, exported=parameters),
        checked=checked,
        origin=describe_origin(job.request.model, source_of(job.model).weights_sha256, job.record),
        **fields,
    )


def write_record(directory: Path, job: ExportJob, record: ExportRecord) -> None:
    """Write export.json and the card, which quotes what the compressed checkpoint's record says of its quality."""
    write_json(directory / EXPORT, record.to_json_value())
    (directory / "README.md").write_text(export_card(record, job.record), encoding="utf-8")


@contextmanager
def naming_alternatives(job: ExportJob) -> Iterator[None]:
    """Add to an InputError which model cannot be written in this form, and in which forms it can."""
    try:
        yield
    except InputError as error:
        problem = f"{job.request.model} cannot be written as {job.request.to}"
        raise InputError(f"{problem}: {error}; {list_alternatives(job)}") from error


def list_alternatives(job: ExportJob) -> str:
    """The other forms that the model can probably be written in, for an error message."""
    maps = has_attention_of(job.model, ("linear", "lowrank", "hybrid"))
    targets = []
    if job.request.to != "hf-dense" and not maps:
        targets.append("--to hf-dense")
    gguf_says_more = job.request.to == "hf-dense" or (job.request.to == "vllm" and maps)
    if gguf_says_more and job.family in LLAMA_TYPES and not has_attention_of(job.model, ("hybrid",)):
        targets.append("--to gguf, which keeps a width for every block,")
    return f"try {' or '.join([*targets, '--to onnx'])}, or load the checkpoint itself in transformers"


def announce_size(job: ExportJob, form: str, parameters: int) -> int:
    """Tell the user, before anything is written, how much of the saving is left; return the parameters."""
    source, compressed = job.source_parameters, job.compressed_parameters
    job.progress.say(
        f"source {source:,} parameters; compressed {compressed:,} ({signed(compressed / source - 1, '.2%')}); "
        f"{form} {parameters:,} ({signed(parameters / source - 1, '.2%')})"
    )
    if parameters >= source:
        job.progress.say("warning: nothing of the saving is left in this form")
    return parameters


def require_disk_space(job: ExportJob, weights: int, target: Path) -> None:
    """Refuse the export if the disk has no room for so many bytes of weights."""
    job.progress.say(require_disk("the export", weights, target, "name another --out", spare=TOKENIZER_BYTES))


def require_same_logits(job: ExportJob, other: Any) -> float:
    """Refuse a model whose float32 logits are not those of the compressed one; return the largest difference."""
    return compare_logits(job.model, other, sample_tokens(job.model, job.tokenizer), torch.float32)


def note_limits(job: ExportJob, llama: Llama) -> dict[str, int]:
    """Tell the user where a model converted to a Llama falls short of its source; return the fields for the record."""
    if llama.scaled and job.dtype == "bf16":
        job.progress.say("note: the source's multipliers are in the weights, which bf16 rounds again; f16 is closer")
    return note_window(job, llama.window)


def note_window(job: ExportJob, window: int | None) -> dict[str, int]:
    """Tell the user that the context is cut to the source's sliding window; return the field for the record.

    The export attends to its whole context, so beyond the window it would compute something else than the source.
    """
    if window is None:
        return {}
    job.progress.say(f"note: the source looks back {window:,} tokens; the export's context is cut to that")
    return {"window": window}
