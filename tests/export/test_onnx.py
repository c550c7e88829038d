"""ONNX graphs of compressed models: what ONNX Runtime computes from the written files is what torch computes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from conftest import tree
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer
from zoo import LINEAR_SHAPES, TEXT, VOCAB, compressed, tiny_tokenizer, write

from compressor.export.onnx import (
    FILE,
    TRACED_SIZES,
    GraphRejected,
    OnnxGraph,
    check_graph,
    compute_cases,
    write_graph,
    write_onnx,
)
from compressor.models.load import load_model
from compressor.plan.shapes import Shape
from compressor.runtime.errors import InputError
from compressor.runtime.progress import Progress

HYBRID = {0: Shape(3, 5)}


@dataclass(frozen=True)
class Row:
    """A model, and whether its graph has a cache."""

    family: str
    shapes: dict[int, Shape]
    cached: bool
    settings: dict[str, Any] = field(default_factory=dict)


# Every shape of a replacement, with gated neurons and without; a window of the last tokens (gemma2); modules that are
# made identities (opt); a family whose cache cannot be traced (mpt). An export takes seconds, so these stand for all.
ROWS = {
    "llama": Row("llama", {0: Shape(None, 4), 1: Shape(0, 6)}, True, {"num_hidden_layers": 2}),
    "gpt2": Row("gpt2", LINEAR_SHAPES, True),
    "gemma2": Row("gemma2", HYBRID, True, {"num_hidden_layers": 2, "sliding_window": 4}),
    "opt": Row("opt", HYBRID, True, {"num_hidden_layers": 1}),
    "mpt": Row("mpt", HYBRID, False, {"n_layers": 1}),
}


@dataclass(frozen=True)
class Written:
    """A model as it was loaded from a compressed checkpoint, and the directory with its graph."""

    model: Any
    directory: Path
    graph: OnnxGraph
    before: Tensor
    messages: str


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Written]:
    done: dict[str, Written] = {}

    def of(name: str) -> Written:
        if name not in done:
            row = ROWS[name]
            root = tmp_path_factory.mktemp(name)
            source = write(compressed(row.family, row.shapes, **row.settings), root / "checkpoint")
            model, tokenizer = load_model(str(source), device="cpu", allow_compressed=True)
            before = forward(model, *batch(2, 9, 2))
            (root / "onnx").mkdir()
            progress = Progress(visible=True)
            with progress.console.capture() as captured:
                # One model's weights lie beside its graph, as those of a large model do.
                single_file = {} if name != "opt" else {"single_file": 0}
                graph = write_onnx(model, tokenizer, root / "onnx", progress, **single_file)
            done[name] = Written(model, root / "onnx", graph, before, captured.get())
        return done[name]

    return of


def batch(rows: int, length: int, padding: int) -> tuple[Tensor, Tensor]:
    """Tokens, and a mask with padding on the left of the last row."""
    ids = torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(ids)
    mask[-1, :padding] = 0
    return ids, mask


def positions(mask: Tensor) -> Tensor:
    return (mask.cumsum(-1) - 1).clamp(min=0)


@torch.no_grad()
def forward(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    counted = {} if model.config.model_type == "mpt" else {"position_ids": positions(mask)}
    logits: Tensor = model(input_ids=ids, attention_mask=mask, use_cache=False, **counted).logits
    return logits


def run(directory: Path, ids: Tensor, mask: Tensor, pieces: list[int]) -> Tensor:
    """The logits when the tokens come in these pieces, each with the cache of those before."""
    session = onnxruntime.InferenceSession(directory / FILE, providers=["CPUExecutionProvider"])
    taken = {entry.name: entry.shape for entry in session.get_inputs()}
    past = {
        name: torch.zeros(len(ids), shape[1], 0, shape[3]).numpy() for name, shape in taken.items() if "past" in name
    }
    logits, end = [], 0
    for piece in pieces:
        start, end = end, end + piece
        given = {"input_ids": ids[:, start:end], "attention_mask": mask[:, :end]}
        if "position_ids" in taken:
            given["position_ids"] = positions(mask)[:, start:end]
        names = [entry.name for entry in session.get_outputs()]
        outputs = dict(zip(names, session.run(None, {k: v.numpy() for k, v in given.items()} | past), strict=True))
        logits.append(torch.from_numpy(outputs["logits"]))
        past = {name: outputs[name.replace("past_key_values", "present")] for name in past}
    return torch.cat(logits, dim=1)


def same(logits: Tensor, expected: Tensor, mask: Tensor) -> bool:
    real = mask.bool()
    return bool((logits - expected)[real].abs().max() <= 1e-5 * expected[real].abs().max())


@pytest.mark.parametrize("name", ROWS)
def test_onnx_runtime_computes_what_torch_computes(name: str, written: Callable[[str], Written]) -> None:
    done = written(name)
    assert done.graph.cache == ROWS[name].cached
    assert done.graph.logits_off < 1e-5
    for rows, length, padding in ((1, 1, 0), (1, 23, 0), (2, 13, 5), (5, 8, 3)):
        assert (rows, length) != TRACED_SIZES[:2]
        ids, mask = batch(rows, length, padding)
        expected = forward(done.model, ids, mask)
        assert same(run(done.directory, ids, mask, [length]), expected, mask)
        if ROWS[name].cached and length > 3:
            assert same(run(done.directory, ids, mask, [length - 3, 1, 1, 1]), expected, mask)
            assert same(run(done.directory, ids, mask, [length - 4, 4]), expected, mask)


@pytest.mark.parametrize("name", ROWS)
def test_the_directory_describes_a_stock_model(name: str, written: Callable[[str], Written]) -> None:
    done = written(name)
    config = json.loads((done.directory / "config.json").read_text(encoding="utf-8"))
    assert not {"quantization_config", "auto_map"} & set(config)
    assert AutoConfig.from_pretrained(done.directory).model_type == done.model.config.model_type
    assert AutoTokenizer.from_pretrained(done.directory)(TEXT) == tiny_tokenizer()(TEXT)
    graph = onnx.load(done.directory / FILE)
    onnx.checker.check_model(graph)
    assert [entry.name for entry in graph.graph.input] == done.graph.inputs
    assert [entry.name for entry in graph.graph.output] == done.graph.outputs
    assert {entry.version for entry in graph.opset_import} == {done.graph.opset}
    assert b".py" not in graph.SerializeToString()  # no traces of the machine that exported it


def test_weights_beside_the_graph(written: Callable[[str], Written]) -> None:
    large, small = written("opt"), written("gpt2")
    assert (large.directory / f"{FILE}.data").stat().st_size > 4 * VOCAB * 32
    assert not (small.directory / f"{FILE}.data").exists()


def test_the_model_stays_as_it_was(written: Callable[[str], Written]) -> None:
    done = written("llama")
    assert torch.equal(forward(done.model, *batch(2, 9, 2)), done.before)
    assert done.model.generation_config.eos_token_id == 0
    assert "quantization_config" in done.model.config.to_dict()


def test_only_our_own_lines_are_said(written: Callable[[str], Written]) -> None:
    assert written("gpt2").messages.count("\n") == 3
    lines = written("mpt").messages.splitlines()
    assert any(line.startswith("no key-value cache for mpt, so its graph is for scoring (") for line in lines)
    assert "scoring" in written("mpt").graph.use


class Branching(nn.Module):
    """Computes otherwise beyond 20 tokens."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.inner(hidden)
        return 2 * output if hidden.shape[1] > 20 else output


def test_a_graph_that_would_be_wrong_on_long_texts_is_refused(tmp_path: Path) -> None:
    model = compressed("gpt2", HYBRID, n_layer=1)
    model.transformer.ln_f = Branching(model.transformer.ln_f)
    with pytest.raises(GraphRejected, match=r"^it computes otherwise beyond 20 tokens"):
        write_graph(model, tmp_path / FILE, cached=False, single_file=0)
    assert tree(tmp_path) == {}


def test_what_torch_cannot_trace_is_refused_in_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}  # counts tokens in Python
    model = compressed("llama", HYBRID, num_hidden_layers=1, rope_parameters=rope)
    with pytest.raises(InputError, match=r"^llama cannot be exported to ONNX .*--to hf-dense") as refusal:
        write_onnx(model, tiny_tokenizer(), tmp_path, Progress())
    assert "\n" not in str(refusal.value)
    assert tree(tmp_path) == {}
    assert capfd.readouterr() == ("", "")


def test_a_graph_of_other_weights_fails_the_check(written: Callable[[str], Written]) -> None:
    done = written("gpt2")
    changed = compressed("gpt2", LINEAR_SHAPES)
    assert check_graph(done.directory / FILE, compute_cases(changed), cached=True) < 1e-5
    with torch.no_grad():
        changed.transformer.h[1].mlp.output_bias[3] += 0.01
    with pytest.raises(GraphRejected, match="differ by"):
        check_graph(done.directory / FILE, compute_cases(changed), cached=True)


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_package_is_named_before_any_work(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError, match=rf"^--to onnx needs {package}; pip install 'compressor\[onnx\]'$"):
        write_onnx(None, None, tmp_path, Progress())
