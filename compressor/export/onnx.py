"""Write a model as an ONNX graph, and keep it only if ONNX Runtime computes what torch computes.

Every family goes through one wrapper: its cache is made of plain layers that keep every key and value, so a sliding
window is the mask's business alone. A family whose cache torch cannot trace gets a graph without one.
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

from compressor.export.stock import stock_config
from compressor.models.load import quiet
from compressor.models.source import context_length
from compressor.runtime.errors import InputError, causes, errno_of, is_out_of_memory, shorten
from compressor.runtime.progress import Progress

PACKAGES = ("onnx", "onnx_ir", "onnxscript", "onnxruntime")
FILE = "model.onnx"
OPSET = 18
SINGLE_FILE = 2**30  # bytes of weights that go into the graph's own file; protobuf ends at 2 GB
TOLERANCE = 1e-4  # of the largest logit: float32 sums in another order
UNLIMITED = 2**31  # tokens or rows: no limit
TRACED_SIZES = (3, 5, 7)  # batch, tokens, past: different numbers, so that none is taken for another
# Batch, prompt, padding on the left of the first row, and tokens after it: no combination was traced.
CASES = ((1, 1, 0, 2), (1, 11, 0, 4), (2, 9, 4, 6), (4, 6, 2, 1))
GREEDY_TOKENS = 8
USE = {
    True: "generation with a key-value cache (prompt, then token by token), and scoring",
    False: "scoring and prompts: without a cache, generation computes every token again",
}


class GraphRejected(Exception):
    """A graph that cannot be had, or that computes something else; says why in one line."""


@dataclass(frozen=True)
class OnnxGraph:
    """A graph that was written and checked."""

    opset: int
    cache: bool  # whether it takes and returns keys and values
    without_cache_because: str | None
    inputs: list[str]
    outputs: list[str]
    logits_off: float  # from torch's, as a part of the largest logit
    tolerance: float
    use: str  # what it can be used for


@dataclass(frozen=True)
class Case:
    """Tokens of a batch, which of them are real, how many come at once, and the logits that torch gives."""

    ids: Tensor
    mask: Tensor
    prompt: int
    logits: Tensor  # at every position, or those that chose the greedy tokens
    greedy: bool = False  # the tokens after the prompt are the model's own choices


class Graph(nn.Module):
    """What is traced: tensors in, tensors out."""

    def __init__(self, model: Any, *, cached: bool) -> None:
        super().__init__()
        self.model = model
        self.cached = cached

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor | None, past: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        given: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": self.cached}
        if position_ids is not None:
            given["position_ids"] = position_ids
        if not self.cached:
            return (self.model(**given).logits,)
        cache = DynamicCache(list(zip(past[::2], past[1::2], strict=True)))
        logits = self.model(**given, past_key_values=cache).logits
        return (logits, *(part for layer in cache.layers for part in (layer.keys, layer.values)))


def require_packages() -> None:
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
    progress.say(f"ONNX Runtime's logits differ from torch's by at most {difference:.1e} of the largest logit")
    return OnnxGraph(OPSET, cached, reasons.get(True), inputs, outputs, difference, TOLERANCE, USE[cached])


def write_graph(model: Any, file: Path, cached: bool, single_file: int) -> tuple[list[str], list[str]]:
    """Trace the model and write the graph; return the names of its inputs and outputs."""
    batch, length, before = TRACED_SIZES
    past = [torch.rand(batch, heads, before, width) for heads, width in cache_shapes(model)] if cached else []
    total = before + length if cached else length
    positions = torch.arange(total - length, total).repeat(batch, 1) if takes_positions(model) else None
    given = {
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
    layers = [f"{number}.{part}" for number in range(len(past) // 2) for part in ("key", "value")]
    inputs = [name for name in ("input_ids", "attention_mask", "position_ids") if given[name] is not None]
    inputs += [f"past_key_values.{layer}" for layer in layers]
    outputs = ["logits", *(f"present.{layer}" for layer in layers)]
    with rejecting_graph(), torch.no_grad():
        program = torch.onnx.export(
            Graph(model, cached=cached).eval(),
            kwargs=given,
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
    passes.ClearMetadataAndDocStringPass()(program.model)  # where in whose Python every node comes from
    size = sum(parameter.nbytes for parameter in model.parameters())
    program.save(file, external_data=size > single_file)
    return inputs, outputs


def refuse_limited_length(exported: Any, context: int | None) -> None:
    """A trace takes one side of every comparison with a length, and its graph is silently wrong on the other side."""
    for constraint in exported.range_constraints.values():
        if constraint.upper < (context or UNLIMITED):
            raise GraphRejected(
                f"it computes otherwise beyond {constraint.upper} tokens, and a graph holds one way only"
            )


def cache_shapes(model: Any) -> list[tuple[int, int]]:
    """Heads and width of every key and value that the model keeps."""
    with torch.no_grad():
        cache = model(input_ids=torch.ones(1, 2, dtype=torch.long), use_cache=True).past_key_values
    layers = getattr(cache, "layers", [])
    parts: list[Any] = [getattr(layer, name, None) for layer in layers for name in ("keys", "values")]
    if not parts or any(part is None or part.ndim != 4 for part in parts):
        raise GraphRejected(f"its {type(cache).__name__} is not one of keys and values alone")
    return [(part.shape[1], part.shape[3]) for part in parts]


@torch.no_grad()
def compute_cases(model: Any) -> list[Case]:
    """What torch computes: whole sequences without a cache, and a greedy continuation by `generate`."""
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
        counted = {"position_ids": positions_of(mask)} if takes_positions(model) else {}
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False, **counted).logits
        cases.append(Case(ids, mask, prompt, logits))
    written = min(GREEDY_TOKENS, context - cases[-1].prompt)
    return [*cases, generate_greedily(model, cases[-1], written)]


def takes_positions(model: Any) -> bool:
    return "position_ids" in inspect.signature(model.forward).parameters


def positions_of(mask: Tensor) -> Tensor:
    """As `generate` counts them: padding on the left takes no position."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


def generate_greedily(model: Any, case: Case, count: int) -> Case:
    """The greedy continuation of a case's prompt, whatever sampling the model's own generation config asks for."""
    generation_config = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        written = model.generate(
            case.ids[:, : case.prompt],
            attention_mask=case.mask[:, : case.prompt],
            max_new_tokens=count,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
    finally:
        model.generation_config = generation_config
    ids = written.sequences
    mask = torch.cat([case.mask[:, : case.prompt], torch.ones_like(ids[:, case.prompt :])], dim=1)
    return Case(ids, mask, case.prompt, torch.stack(written.logits, dim=1), greedy=True)


def check_graph(file: Path, cases: Sequence[Case], cached: bool) -> float:
    """The largest difference to torch's logits, as a part of the largest logit; too large a one is GraphRejected."""
    onnxruntime: Any = importlib.import_module("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    largest = 0.0
    with rejecting_graph():
        session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        for case in cases:
            difference = measure_difference(run_session(session, case, cached), case)
            if not difference <= TOLERANCE:
                shape = "×".join(str(size) for size in case.ids.shape)
                raise GraphRejected(
                    f"ONNX Runtime's logits differ by {difference:.1e} of the largest one on {shape} tokens"
                )
            largest = max(largest, difference)
    return largest


def run_session(session: Any, case: Case, cached: bool) -> Tensor:
    """The logits of every position: the prompt at once and the rest token by token, or all at once without a cache."""
    names = {entry.name: entry for entry in session.get_inputs()}
    batch, length = case.ids.shape
    positions = positions_of(case.mask)
    kept = {
        name: torch.zeros(batch, entry.shape[1], 0, entry.shape[3]).numpy()
        for name, entry in names.items()
        if name.startswith("past_key_values.")
    }
    ends = [case.prompt, *range(case.prompt + 1, length + 1)] if cached else [length]
    logits = []
    for start, end in zip([0, *ends], ends, strict=False):
        given = {"input_ids": case.ids[:, start:end].numpy(), "attention_mask": case.mask[:, :end].numpy(), **kept}
        if "position_ids" in names:
            given["position_ids"] = positions[:, start:end].numpy()
        first, *present = session.run(None, given)
        kept = dict(zip(kept, present, strict=True))
        logits.append(torch.from_numpy(first))
    return torch.cat(logits, dim=1)


def measure_difference(logits: Tensor, case: Case) -> float:
    """How far the logits are apart where tokens are real; a greedy choice may differ only between equal logits."""
    if case.greedy:
        logits = logits[:, case.prompt - 1 : -1]
        real = torch.ones(logits.shape[:2], dtype=torch.bool)
    else:
        real = case.mask.bool()
    scale = case.logits[real].abs().max()
    difference = ((logits - case.logits)[real].abs().max() / scale).item()
    if case.greedy:
        chosen = case.logits.gather(-1, logits.argmax(-1, keepdim=True))
        behind = case.logits.gather(-1, case.ids[:, case.prompt :, None]) - chosen
        difference = max(difference, (behind.max() / scale).item())
    return difference


def write_companions(model: Any, tokenizer: Any, directory: Path) -> None:
    """The stock architecture's config, without what makes transformers look for replacements, and the tokenizer."""
    config = stock_config(model)
    config.architectures = [type(model).__name__]
    config.save_pretrained(directory)
    model.generation_config.to_json_file(directory / "generation_config.json")
    tokenizer.save_pretrained(directory)


@contextmanager
def rejecting_graph() -> Iterator[None]:
    """Whatever the exporter or the runtime raises becomes one line, except that memory or disk ran out."""
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
    """Hide what torch's exporter warns, logs and prints."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with quiet(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)
