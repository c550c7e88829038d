"""Export: a compressed checkpoint for runtimes that know nothing of this tool, checked before anybody can see it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor.export import gguf, llamacpp, vllm
from compressor.export.llama import LLAMA_TYPES, Llama, as_llama, block_widths
from compressor.export.onnx import require_packages, write_onnx
from compressor.export.stock import as_own, blank, stock_config
from compressor.modeling_compressor import replacements
from compressor.models.load import load_model, quiet
from compressor.models.source import context_of, source_of
from compressor.patch.checkpoint import count_parameters, write_checkpoint
from compressor.patch.verify import compare_logits, first_tokens, logits_of, verify_written
from compressor.report.leaflets import leaflet
from compressor.report.record import describe_tool, read_record
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
from compressor.runtime.resources import NotEnoughMemory, format_bytes, require_disk

FLOATS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
TOLERANCE = 2e-3  # of a log-probability in float32: llama.cpp adds up in another order
USUAL_LOGIT = 50.0  # where logits are larger than this, so is their rounding
IMPOSSIBLE = -80.0  # llama.cpp says minus infinity for a log-probability that is much lower
LONGEST = 48  # tokens of the sample
GREEDY = 24  # tokens of a continuation that are compared
SAMPLE = (
    "The harbour was quiet that morning: 12 boats, two of them newly painted, lay at the quay, and the captain's "
    'daughter counted them aloud. "It\'s early," she said; nobody answered.\n\nLater, at 7.45, the wind came up.'
)

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
        except NotEnoughMemory as error:
            raise InputError(f"{error.shortage}; export it where there is more") from error
        if not replacements(model):
            raise InputError(f"{order.model} is not a compressed checkpoint; give a directory that compress wrote")
        with quiet():
            sizes = {"source": count_parameters(blank(stock_config(model))), "compressed": count_parameters(model)}
        job = Export(order, model, tokenizer, pick_dtype(order, model, dtypes), sizes, record, progress)
        with reporting_disk_errors(target):
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


@dataclass(frozen=True)
class Order:
    """What was asked for."""

    model: str
    to: str
    out: str
    dtype: str | None = None
    overwrite: bool = False
    force: bool = False


@dataclass(frozen=True)
class Export:
    """A compressed model on its way out; `dtype` is what its weights are stored as."""

    order: Order
    model: Any
    tokenizer: Any
    dtype: str
    sizes: dict[str, int]  # parameters of the source and of the compressed model
    record: dict[str, Any] | None  # what was measured when it was compressed, where that is known
    progress: Progress


def describe(job: Export, parameters: int, **found: Any) -> dict[str, Any]:
    """The record of an export: export.json in a directory, and what `--json` prints."""
    return {
        **describe_tool(),
        "to": job.order.to,
        "family": job.model.config.model_type,
        "dtype": job.dtype,
        "parameters": {**job.sizes, "exported": parameters},
        **found,
    }


@contextmanager
def explaining(job: Export) -> Iterator[None]:
    """What cannot be written says what can."""
    try:
        yield
    except InputError as error:
        what = f"{job.order.model} cannot be written as {job.order.to}"
        raise InputError(f"{what}: {error}; {alternatives(job)}") from error


def alternatives(job: Export) -> str:
    llama = job.model.config.model_type in LLAMA_TYPES
    ways = "--to onnx" if job.order.to == "hf-dense" else "--to hf-dense or --to onnx"
    if job.order.to == "hf-dense" and llama:
        ways = "--to gguf, which keeps a width for every block, or --to onnx"
    return f"try {ways}, or load the checkpoint itself in transformers"


def announce(job: Export, form: str, parameters: int) -> int:
    """Say what is left of the saving before anything is written."""
    source, compressed = job.sizes["source"], job.sizes["compressed"]
    job.progress.say(
        f"source {source:,} parameters; compressed {compressed:,} ({compressed / source - 1:+.2%}); "
        f"{form} {parameters:,} ({parameters / source - 1:+.2%})"
    )
    if parameters >= source:
        job.progress.say("warning: nothing of the saving is left in this form")
    return parameters


def require_room(job: Export, parameters: int, target: Path) -> None:
    size = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32}[job.dtype]
    needed = int(parameters * size) + (16 << 20)  # and the tokenizer
    job.progress.say(require_disk("the export", needed, target, "name another --out"))


def windowed(job: Export, window: int | None) -> dict[str, Any]:
    """The source looks back only so far; what is written does not forget, so its context ends there."""
    if window is None:
        return {}
    job.progress.say(f"note: the source looks back {window:,} tokens; the export's context is cut to that")
    return {"window": window}


def limited(job: Export, llama: Llama) -> dict[str, Any]:
    """Where an export in Llama's terms is not all that the source is."""
    if llama.scaled and job.dtype == "bf16":
        job.progress.say("note: the source's multipliers are in the weights, which bf16 rounds again; f16 is closer")
    return windowed(job, llama.window)


def check_tokens(job: Export) -> Tensor:
    """The sample text as the model's tokens, or the first tokens where it has too few."""
    length = min(LONGEST, (context_of(job.model) or LONGEST) // 2)
    tokens = torch.tensor([job.tokenizer(SAMPLE)["input_ids"][:length]])
    return tokens if tokens.shape[1] > 1 else first_tokens(job.model)


def compare(job: Export, other: Any) -> float:
    """The folded model must compute what the compressed one computes, in float32, before it is written."""
    return compare_logits(job.model, other, check_tokens(job), torch.float32)


def check_in_llamacpp(job: Export, file: Path, notes: list[str]) -> dict[str, Any]:
    """Run the file in llama.cpp, where it is installed: the same tokens for the text, the same probabilities for them.

    Only float32 can be held to a tolerance; what the other types change is measured and said.
    """
    if not llamacpp.available():
        job.progress.say("not run in llama.cpp: pip install xllamacpp, and an export is run there before you see it")
        return {"runtime": None}
    tokens = check_tokens(job)
    ids = tokens[0].tolist()
    logits = logits_of(job.model, tokens)[0, :-1]
    expected = logits.log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
    count = min(GREEDY, len(ids))
    with quiet(), torch.no_grad():
        wanted = job.model.generate(tokens, max_new_tokens=count, min_new_tokens=count, do_sample=False)[0, len(ids) :]
    try:
        with llamacpp.Runner(file) as run:
            texts = [SAMPLE[3:], *([] if notes else [SAMPLE])]  # one begins with a space; known differences are told
            same = all(run.tokenize(t) == job.tokenizer(t, add_special_tokens=False)["input_ids"] for t in texts)
            found = torch.tensor(run.log_probabilities(ids), dtype=torch.float64)
            continued = run.greedy(ids, count)
    except InputError as error:
        raise InputError(f"{error}; where xllamacpp itself does not run, uninstall it: then nothing is run") from error
    likely = expected > IMPOSSIBLE
    expected, found = expected[likely], found[likely]
    off = (found - expected).abs().max().item() if likely.any() else 0.0
    allowed = TOLERANCE * max(1.0, logits.abs().max().item() / USUAL_LOGIT)
    if not same:
        raise InputError(
            "llama.cpp reads the sample text as other tokens than transformers; nothing was kept: report it"
        )
    if job.dtype == "f32" and not off <= allowed:
        raise InputError(
            f"in llama.cpp a log-probability is off by {off:.3g}, more than {allowed:.3g}; nothing was kept: report it"
        )
    agreeing = sum(one == other for one, other in zip(continued, wanted.tolist(), strict=False))
    return {
        "runtime": f"llama.cpp (xllamacpp {version('xllamacpp')})",
        "tokens": len(ids),
        "log_probability_off": off,
        "perplexity_ratio": (expected.mean() - found.mean()).exp().item(),
        "greedy_equal": agreeing,
        "greedy": count,
    }


def export_lines(report: dict[str, Any]) -> list[str]:
    """What a user wants to know of an export."""
    parameters = report["parameters"]
    shrunk = parameters["exported"] / parameters["source"] - 1
    lines = [
        f"{report['out']}: {format_bytes(report['bytes'])}, {report['dtype']}, {parameters['exported']:,} parameters "
        f"({shrunk:+.2%} of the source's; compressed {parameters['compressed'] / parameters['source'] - 1:+.2%})"
    ]
    checked = report["checked"]
    if "log_probability_off" in checked:
        lines.append(
            f"checked in {checked['runtime']}: {checked['greedy_equal']} of {checked['greedy']} greedy tokens equal, "
            f"log-probabilities off by at most {checked['log_probability_off']:.2g} on {checked['tokens']} tokens, "
            f"perplexity {checked['perplexity_ratio'] - 1:+.3%}"
        )
    elif checked["runtime"]:
        lines.append(f"checked in {checked['runtime']}: logits off by {checked['logits_off']:.1g} of the largest")
    if "for" in report:
        lines.append(f"for {report['for']}")
    if "context" in report:
        lines.append(f"context {report['context']:,} tokens; run it: llama-cli -m {report['out']}")
    return lines
