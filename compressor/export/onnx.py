"""Write a model as an ONNX graph, and keep it only if ONNX Runtime computes what torch computes.

All families are traced through one wrapper. Its key-value cache keeps every key and value, so a sliding window is a
matter of the attention mask alone. A family whose cache torch cannot trace gets a graph without a cache.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import io
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationConfig

from compressor.export.attention import find_compressed_attention
from compressor.export.stock import stock_config
from compressor.models.load import quiet
from compressor.models.source import context_length
from compressor.runtime.errors import InputError, causes, errno_of, is_out_of_memory, shorten
from compressor.runtime.figures import figure
from compressor.runtime.progress import Progress

PACKAGES = ("onnx", "onnx_ir", "onnxscript", "onnxruntime")
FILE = "model.onnx"
OPSET = 18
SINGLE_FILE = 2**30  # more bytes of weights go into a second file, because protobuf cannot exceed 2 GB
TOLERANCE = 1e-4  # relative to the largest logit: ONNX Runtime adds up in another order
UNLIMITED = 2**31  # a dimension that may be as large as this has no limit
TRACED_SIZES = (3, 5, 7)  # batch, tokens, past tokens: different, so that the tracer confuses none with another
# What is checked: batch, prompt tokens, padding before the first row's prompt, tokens after the prompt. None of these
# combinations is the one that was traced.
CASES = ((1, 1, 0, 2), (1, 11, 0, 4), (2, 9, 4, 6), (4, 6, 2, 1))
GREEDY_TOKENS = 8
USE = {
    True: "generation with a key-value cache (prompt, then token by token), and scoring",
    False: "scoring and prompts: without a cache, generation computes every token again",
}


class GraphRejected(Exception):
    """The graph cannot be made, or computes something else; the message is one line."""


@dataclass(frozen=True)
class OnnxGraph:
    """A graph that was written and checked."""

    opset: int
    cache: bool  # whether it takes and returns keys and values
    without_cache_because: str | None
    inputs: list[str]
    outputs: list[str]
    logits_off: float  # the largest difference from torch's, relative to the largest logit
    tolerance: float
    use: str  # what it can be used for


@dataclass(frozen=True)
class Case:
    """A batch to check: its tokens, which of them are not padding, the length of the prompt, and torch's logits."""

    ids: Tensor
    mask: Tensor
    prompt: int
    logits: Tensor  # at every position; with `greedy`, at those that chose the tokens after the prompt
    greedy: bool = False  # whether the tokens after the prompt are the model's own choices


class TracedModel(nn.Module):
    """The module that is traced: it takes and returns tensors only, where the model takes a cache object.

    `cached_layers` are the layers that keep keys and values; None is a graph without a cache.
    """

    def __init__(self, model: Any, cached_layers: Sequence[int] | None) -> None:
        super().__init__()
        self.model = model
        self.cached_layers = cached_layers

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor | None, past: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        arguments: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask}
        if position_ids is not None:
            arguments["position_ids"] = position_ids
        if self.cached_layers is None:
            return (self.model(**arguments, use_cache=False).logits,)
        cache = DynamicCache()
        for layer, keys, values in zip(self.cached_layers, past[::2], past[1::2], strict=True):
            cache.update(keys, values, layer)
        logits = self.model(**arguments, use_cache=True, past_key_values=cache).logits
        layers: list[Any] = [cache.layers[layer] for layer in self.cached_layers]
        return (logits, *(part for layer in layers for part in (layer.keys, layer.values)))


def require_packages() -> None:
    """Refuse the export if one of the ONNX packages is not installed."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(f"--to onnx needs {', '.join(missing)}; pip install 'compressor[onnx]'")


def write_onnx(
    model: Any, tokenizer: Any, directory: Path, progress: Progress, *, single_file: int = SINGLE_FILE
) -> OnnxGraph:
    """Write the graph, the stock config and the tokenizer of a float32 model on the CPU.

    The graph computes in float32, whatever precision the checkpoint stores.
    """
    require_packages()
    with silence():
        cases = compute_cases(model)
    family = model.config.model_type
    reasons: dict[bool, str] = {}
    for cached in (True, False):
        try:
            with progress.bar("export to ONNX", 1, "with a cache" if cached else "without a cache"), silence():
                inputs, outputs = write_graph(model, directory / FILE, cached, single_file)
            with progress.bar("check in ONNX Runtime", 1), silence():
                difference = check_graph(directory / FILE, cases, cached)
            break
        except GraphRejected as reason:
            reasons[cached] = str(reason)
            for file in directory.glob(f"{FILE}*"):
                file.unlink()
        if cached:
            progress.say(f"no key-value cache for {family}, so its graph is for scoring ({reasons[True]})")
    else:
        raise InputError(
            f"{family} cannot be exported to ONNX ({reasons[False]}); use --to hf-dense, or the checkpoint itself in "
            "transformers"
        )
    write_companions(model, tokenizer, directory)
    progress.say(
        f"ONNX Runtime's logits differ from torch's by at most {figure(difference, '.1e')} of the largest logit"
    )
    return OnnxGraph(OPSET, cached, reasons.get(True), inputs, outputs, difference, TOLERANCE, USE[cached])


def write_graph(model: Any, file: Path, cached: bool, single_file: int) -> tuple[list[str], list[str]]:
    """Trace the model and write the graph; return the names of its inputs and outputs."""
    batch, length, past_length = TRACED_SIZES
    shapes = cache_shapes(model) if cached else {}
    past = [torch.rand(batch, heads, past_length, width) for parts in shapes.values() for heads, width in parts]
    total = past_length + length if cached else length
    positions = torch.arange(total - length, total).repeat(batch, 1) if takes_positions(model) else None
    arguments = {
        "input_ids": torch.ones(batch, length, dtype=torch.long),
        "attention_mask": torch.ones(batch, total, dtype=torch.long),
        "position_ids": positions,
        "past": past,
    }
    tokens = {0: "batch_size", 1: "sequence_length"}
    axes = {
        "input_ids": tokens,
        "attention_mask": {0: "batch_size", 1: "total_sequence_length"} if cached else tokens,
        "position_ids": tokens if takes_positions(model) else None,
        "past": [{0: "batch_size", 2: "past_sequence_length"} for _ in past],
    }
    layers = [f"{number}.{part}" for number in shapes for part in ("key", "value")]
    inputs = [name for name in ("input_ids", "attention_mask", "position_ids") if arguments[name] is not None]
    inputs += [f"past_key_values.{layer}" for layer in layers]
    outputs = ["logits", *(f"present.{layer}" for layer in layers)]
    with rejecting_graph(), torch.no_grad():
        program = torch.onnx.export(
            TracedModel(model, list(shapes) if cached else None).eval(),
            kwargs=arguments,
            dynamic_shapes=axes,
            input_names=inputs,
            output_names=outputs,
            opset_version=OPSET,
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    refuse_limited_length(program.exported_program, context_length(model))
    passes: Any = importlib.import_module("onnx_ir.passes.common")
    passes.ClearMetadataAndDocStringPass()(program.model)  # it names the Python file that each node comes from
    size = sum(parameter.nbytes for parameter in model.parameters())
    program.save(file, external_data=size > single_file)
    return inputs, outputs


def refuse_limited_length(exported: Any, context: int | None) -> None:
    """Reject a graph that holds only up to some length.

    A trace follows one branch of every comparison with a length, so its graph is silently wrong where the other
    branch would be taken.
    """
    for constraint in exported.range_constraints.values():
        if constraint.upper < (context or UNLIMITED):
            raise GraphRejected(
                f"it computes otherwise beyond {constraint.upper} tokens, and a graph holds one way only"
            )


def cache_shapes(model: Any) -> dict[int, list[tuple[int, int]]]:
    """For every layer that keeps keys and values: the number of heads and the head width of either tensor.

    Layers whose attention has no heads left keep none.
    """
    with torch.no_grad():
        cache = model(input_ids=torch.ones(1, 2, dtype=torch.long), use_cache=True).past_key_values
    without_heads = {each.layer for each in find_compressed_attention(model) if not each.units}
    parts: dict[int, list[Any]] = {
        number: [getattr(layer, name, None) for name in ("keys", "values")]
        for number, layer in enumerate(getattr(cache, "layers", []))
        if number not in without_heads
    }
    if not parts or any(part is None or part.ndim != 4 for layer in parts.values() for part in layer):
        raise GraphRejected(f"its {type(cache).__name__} is not one of keys and values alone")
    return {number: [(part.shape[1], part.shape[3]) for part in layer] for number, layer in parts.items()}


@torch.no_grad()
def compute_cases(model: Any) -> list[Case]:
    """The batches to check with torch's logits: whole sequences without a cache, and one greedy continuation."""
    rows = model.get_input_embeddings().weight.shape[0]
    context = context_length(model) or max(prompt + after for _, prompt, _, after in CASES)
    generator = torch.Generator().manual_seed(0)
    cases = []
    for batch, prompt, padding, after in CASES:
        if prompt + after > context:
            continue
        ids = torch.randint(rows, (batch, prompt + after), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, :padding] = 0
        positions = {"position_ids": positions_of(mask)} if takes_positions(model) else {}
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False, **positions).logits
        cases.append(Case(ids, mask, prompt, logits))
    count = min(GREEDY_TOKENS, context - cases[-1].prompt)
    return [*cases, generate_greedily(model, cases[-1], count)]


def takes_positions(model: Any) -> bool:
    """Whether the model's forward has an argument for positions."""
    return "position_ids" in inspect.signature(model.forward).parameters


def positions_of(mask: Tensor) -> Tensor:
    """The positions as `generate` counts them: padding on the left is not counted."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


def generate_greedily(model: Any, case: Case, count: int) -> Case:
    """The greedy continuation of a case's prompt; the model's own generation config, which may sample, is not used."""
    generation_config = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        generated = model.generate(
            case.ids[:, : case.prompt],
            attention_mask=case.mask[:, : case.prompt],
            max_new_tokens=count,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
    finally:
        model.generation_config = generation_config
    ids = generated.sequences
    mask = torch.cat([case.mask[:, : case.prompt], torch.ones_like(ids[:, case.prompt :])], dim=1)
    return Case(ids, mask, case.prompt, torch.stack(generated.logits, dim=1), greedy=True)


def check_graph(file: Path, cases: Sequence[Case], cached: bool) -> float:
    """The largest difference from torch's logits, relative to the largest logit; GraphRejected beyond TOLERANCE."""
    largest = 0.0
    with rejecting_graph():
        session = make_session(file)
        for case in cases:
            difference = measure_difference(run_session(session, case, cached), case)
            if not difference <= TOLERANCE:
                shape = "×".join(str(size) for size in case.ids.shape)
                raise GraphRejected(
                    f"ONNX Runtime's logits differ by {figure(difference, '.1e')} of the largest one on {shape} tokens"
                )
            largest = max(largest, difference)
    return largest


def make_session(file: Path, threads: int = 0) -> Any:
    """ONNX Runtime with this graph, on the CPU; 0 threads are as many as it likes."""
    onnxruntime: Any = importlib.import_module("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])


def open_session(file: Path) -> Any:
    """The same for a graph that was written earlier; one that cannot be run is refused."""
    try:
        with rejecting_graph():
            return make_session(file, torch.get_num_threads())
    except GraphRejected as error:
        raise InputError(f"ONNX Runtime cannot run {file}: {error}; copy it again, or export it again") from error


def session_logits(session: Any, ids: Tensor) -> Tensor:
    """ONNX Runtime's logits for whole windows of tokens."""
    whole = Case(ids, torch.ones_like(ids), ids.shape[1], torch.empty(0))
    return run_session(session, whole, cached=True)


def run_session(session: Any, case: Case, cached: bool) -> Tensor:
    """ONNX Runtime's logits: with a cache the prompt at once and then token by token, else all at once."""
    inputs = {entry.name: entry for entry in session.get_inputs()}
    batch, length = case.ids.shape
    positions = positions_of(case.mask)
    cache = {
        name: torch.zeros(batch, entry.shape[1], 0, entry.shape[3]).numpy()
        for name, entry in inputs.items()
        if name.startswith("past_key_values.")
    }
    ends = [case.prompt, *range(case.prompt + 1, length + 1)] if cached else [length]
    logits = []
    for start, end in zip([0, *ends], ends, strict=False):
        feeds = {"input_ids": case.ids[:, start:end].numpy(), "attention_mask": case.mask[:, :end].numpy(), **cache}
        if "position_ids" in inputs:
            feeds["position_ids"] = positions[:, start:end].numpy()
        first, *present = session.run(None, feeds)
        cache = dict(zip(cache, present, strict=True))
        logits.append(torch.from_numpy(first))
    return torch.cat(logits, dim=1)


def measure_difference(logits: Tensor, case: Case) -> float:
    """The largest difference of the logits at real tokens, relative to the largest logit.

    For a greedy case, it is at least the amount by which torch's logits prefer torch's choice to the graph's: the two
    may choose differently only between equal logits.
    """
    if case.greedy:
        logits = logits[:, case.prompt - 1 : -1]
        real = torch.ones(logits.shape[:2], dtype=torch.bool)
    else:
        real = case.mask.bool()
    scale = case.logits[real].abs().max()
    difference = ((logits - case.logits)[real].abs().max() / scale).item()
    if case.greedy:
        chosen_by_graph = case.logits.gather(-1, logits.argmax(-1, keepdim=True))
        preference = case.logits.gather(-1, case.ids[:, case.prompt :, None]) - chosen_by_graph
        difference = max(difference, (preference.max() / scale).item())
    return difference


def write_companions(model: Any, tokenizer: Any, directory: Path) -> None:
    """Write the config of the stock architecture, without replacements, and generation config and tokenizer."""
    config = stock_config(model)
    config.architectures = [type(model).__name__]
    config.save_pretrained(directory)
    model.generation_config.to_json_file(directory / "generation_config.json")
    tokenizer.save_pretrained(directory)


@contextmanager
def rejecting_graph() -> Iterator[None]:
    """Turn any exception into GraphRejected with one line, unless memory or disk ran out."""
    try:
        yield
    except GraphRejected:
        raise
    except Exception as error:
        chain = list(causes(error))
        if any(is_out_of_memory(cause) or errno_of(cause) is not None for cause in chain):
            raise
        reason = " ".join(str(chain[-1]).split()) or type(chain[-1]).__name__
        raise GraphRejected(shorten(reason)) from error


@contextmanager
def silence() -> Iterator[None]:
    """Hide the warnings, log lines and prints of torch's exporter."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with quiet(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)
