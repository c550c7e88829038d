"""An export on its way out: what was asked for, what it costs, how it is checked, and what is said of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor.export import llamacpp
from compressor.export.llama import LLAMA_TYPES, Llama
from compressor.models.load import quiet
from compressor.models.source import context_of
from compressor.patch.verify import compare_logits, first_tokens, logits_of
from compressor.report.record import describe_tool
from compressor.runtime.errors import InputError
from compressor.runtime.progress import Progress
from compressor.runtime.resources import amount, require_disk

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
        f"{report['out']}: {amount(report['bytes'])}, {report['dtype']}, {parameters['exported']:,} parameters "
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
