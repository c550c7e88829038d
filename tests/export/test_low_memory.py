"""`compress export --low-memory`: the same bytes, and no more memory than a layer, for models larger than memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from attended import compressed_attention
from conftest import Compress, Refused, tree
from torch import nn
from zoo import LINEAR_SHAPES, logits, save_compressed, write

from compressor.models.deferred import DeferredTensor, defer, defer_weights, is_deferred, realize
from compressor.models.load import load_model
from compressor.plan.shapes import Shape

# Exports a small model, then a large one, and prints the peak memory in bytes after each. (ru_maxrss would be that of
# the process which started this one, if that is larger.)
PROGRAM = """
import re, sys
from pathlib import Path
import compressor
def peak():
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
from compressor.export import llamacpp
llamacpp.is_installed = lambda: False
one, many, out, mode = sys.argv[1:]
for model in (one, many):
    for to in ("gguf", "hf-dense"):
        words = {"dtype": "f32", "force": True, "overwrite": True, "low_memory": mode == "low"}
        compressor.export(model, to, f"{out}-{mode}-{to}", **words)
    print(peak())
"""
PRUNED_HEADS: Any = {0: [1], 1: [0], 3: "bias"}


def export_both_ways(compress: Compress, small: Path, to: str, *options: str) -> list[dict[str, bytes | None]]:
    """What is written with and without --low-memory."""
    found = []
    for name, more in (("normal", []), ("low", ["--low-memory"])):
        out = small.parent / f"{to}-{name}"
        out.mkdir()
        done = compress("export", small, "--to", to, "--out", out / "model", *options, *more)
        assert done.code == 0, done.err
        found.append(tree(out))
    return found


@pytest.mark.parametrize(
    ("family", "to"),
    [*((family, "gguf") for family in ("llama", "qwen2", "phi3", "ernie4_5-bias")), ("granite-scaled", "vllm")],
)
def test_llamas_are_written_byte_for_byte(compress: Compress, family: str, to: str, tmp_path: Path) -> None:
    save_compressed(tmp_path / "small", family, dtype=torch.float16)
    normal, low = export_both_ways(compress, tmp_path / "small", to)
    assert normal == low


@pytest.mark.parametrize("family", ["gpt2", "opt", "phi", "falcon", "llama", "phi3"])
def test_stock_checkpoints_are_written_byte_for_byte(compress: Compress, family: str, tmp_path: Path) -> None:
    save_compressed(tmp_path / "small", family)
    normal, low = export_both_ways(compress, tmp_path / "small", "hf-dense", "--force")
    assert normal == low


@pytest.mark.parametrize(
    ("to", "family", "kept"),
    [
        ("gguf", "llama", {0: [1], 1: "linear", 2: "lowrank", 3: "bias"}),
        ("vllm", "qwen2", PRUNED_HEADS),
        *[("hf-dense", family, PRUNED_HEADS) for family in ("gpt2", "mistral")],
    ],
)
def test_compressed_attention_is_written_byte_for_byte(
    compress: Compress, to: str, family: str, kept: Any, tmp_path: Path
) -> None:
    write(compressed_attention(family, kept), tmp_path / "small")
    normal, low = export_both_ways(compress, tmp_path / "small", to, *(["--force"] if to == "hf-dense" else []))
    assert normal == low


@pytest.mark.parametrize("dtype", ["q8_0", "q4_1"])
def test_quantised_files_too(compress: Compress, dtype: str, tmp_path: Path) -> None:
    save_compressed(tmp_path / "small", "llama")
    normal, low = export_both_ways(compress, tmp_path / "small", "gguf", "--dtype", dtype)
    assert normal == low


def build_large(directory: Path, layers: int) -> int:
    """A random Llama of 13 MB a layer, with a block that became a low-rank map; returns its bytes."""
    from zoo import compressed

    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": layers, "num_attention_heads": 8}
    model = compressed("llama-plain", {0: Shape(8)}, **sizes, num_key_value_heads=8, max_position_embeddings=64)
    write(model, directory)
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory is read from /proc")
def test_the_peak_is_a_layer_and_not_the_model(tmp_path: Path) -> None:
    """The same process has exported a model of one layer before, so what is counted is the large one's own."""
    build_large(tmp_path / "one", 1)
    size = build_large(tmp_path / "many", 10)
    peaks: dict[str, float] = {}
    for mode in ("low", "normal"):
        words = [str(tmp_path / "one"), str(tmp_path / "many"), str(tmp_path / "out"), mode]
        done = subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        first, second = map(int, done.stdout.split())
        peaks[mode] = (second - first) / size
    assert peaks["low"] < 0.3, peaks
    assert peaks["normal"] > 0.9, peaks  # or the figure above says nothing
    assert (tmp_path / "out-low-gguf").read_bytes() == (tmp_path / "out-normal-gguf").read_bytes()


def test_what_cannot_be_written_so_is_refused_by_name(refused: Refused, tmp_path: Path) -> None:
    save_compressed(tmp_path / "small", "llama")
    line = refused("export", tmp_path / "small", "--to", "onnx", "--out", tmp_path / "graph", "--low-memory")
    assert "--low-memory is not for --to onnx" in line


def test_a_model_larger_than_memory_is_told_the_option(
    refused: Refused, compress: Compress, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    save_compressed(tmp_path / "small", "llama", LINEAR_SHAPES)
    monkeypatch.setattr("compressor.runtime.resources.available_memory", lambda: 1000)
    command = ["export", tmp_path / "small", "--to", "gguf", "--out", tmp_path / "m.gguf"]
    assert "add --low-memory" in refused(*command)
    done = compress(*command, "--low-memory")
    assert done.code == 0, done.err


def test_a_deferred_model_computes_the_same_and_keeps_nothing(tmp_path: Path) -> None:
    save_compressed(tmp_path / "small", "qwen2")
    model, _ = load_model(str(tmp_path / "small"), allow_compressed=True)
    deferred, _ = load_model(str(tmp_path / "small"), allow_compressed=True, low_memory=True)
    defer_weights(deferred)
    assert is_deferred(deferred)
    assert not is_deferred(model)
    expected = logits(model)
    assert torch.equal(logits(deferred), expected)
    assert torch.equal(logits(deferred), expected)
    assert all(isinstance(parameter, DeferredTensor) for parameter in deferred.parameters())
    assert all(isinstance(parameter, nn.Parameter) for parameter in deferred.parameters())


def test_operations_wait_until_they_are_needed() -> None:
    reads: list[int] = []

    def read() -> torch.Tensor:
        reads.append(1)
        return torch.arange(12.0).reshape(3, 4)

    tensor = DeferredTensor(torch.empty(3, 4, device="meta"), read)
    made = torch.cat([(tensor * 2).T.contiguous(), tensor.new_zeros(4, 1)], dim=1)
    first, _ = torch.split(made, [2, 2])
    assert (reads, first.shape) == ([], (2, 4))
    expected = torch.cat([(read() * 2).T, torch.zeros(4, 1)], dim=1)[:2]
    reads.clear()
    assert torch.equal(realize(first), expected)
    assert torch.equal(realize(first), expected)
    assert len(reads) == 2 * 2  # the zeros are as wide as it is, and of its dtype
    assert bool(tensor.any())
    assert torch.equal(torch.ones(2, 3) @ tensor, torch.ones(2, 3) @ read())  # with an ordinary tensor: at once
    doubled = defer(torch.empty(3, 4), lambda other: other.add_(other), tensor)
    assert isinstance(doubled, DeferredTensor)
    assert torch.equal(realize(doubled), 2 * read())
    with pytest.raises(NotImplementedError, match="on disk"):
        tensor.add_(1)
