"""The neurons of every family are found by trying, and what is found is the block itself."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from conftest import SMALL, Compress
from planted import FFNS, LinearFFN, WildFFN, planted_model, random_text
from torch import nn
from zoo import FAMILIES, WIDTH, logits, tiny_model, tiny_tokenizer

from compressor.models.blocks import Rows, capture_rows, find_blocks
from compressor.models.neurons import find_neurons
from compressor.patch.tree import patched
from compressor.plan.fit import build_replacement
from compressor.plan.moments_store import open_store, output_bias
from compressor.plan.selection import Fitted
from compressor.plan.shapes import Shape
from compressor.runtime.context import RunContext
from compressor.runtime.progress import Progress

GATED = {"gemma2", "gemma3", "glm4", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3"}
GATED |= {"stablelm", "cohere", "gemma3-vision"}


@pytest.mark.parametrize("family", FAMILIES)
def test_all_neurons_kept_is_the_model_itself(family: str) -> None:
    model = tiny_model(family)
    expected = logits(model)
    fits = {}
    for block in find_blocks(model):
        neurons = find_neurons(model, block)
        assert neurons is not None, block.path
        assert neurons.gated == (family in GATED)
        everything = Shape(0, neurons.count)
        bias = output_bias(block, neurons, torch.device("cpu"))
        whole = Fitted(torch.arange(neurons.count), None, None, neurons.outer, bias, 0.0)
        fits[block.index] = build_replacement(block, neurons, everything, whole).float()
        assert abs(block.parameters - everything.parameters(block.width, neurons.size)) <= block.width
    with patched(model, find_blocks(model), fits):
        torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_enters_the_last_matrix_is_seen(family: str) -> None:
    model = tiny_model(family)
    block = find_blocks(model)[1]
    neurons = find_neurons(model, block)
    assert neurons is not None
    seen: list[Rows] = []
    with torch.no_grad(), capture_rows(model, [block], lambda _, rows: seen.append(rows), {1: neurons.outer_path}):
        logits(model)
    torch.testing.assert_close(seen[0].a, neurons.activate(seen[0].x), rtol=1e-4, atol=1e-5)


def test_a_block_that_is_built_otherwise_has_none_and_is_surveyed_all_the_same() -> None:
    model = planted_model(LinearFFN(), WildFFN(), WildFFN(seed=5))
    assert [find_neurons(model, block) for block in find_blocks(model)] == [None] * 3
    surveys = open_store(model, random_text(), RunContext()).candidates()
    assert {candidate.shape.neurons for candidate in surveys[0].candidates} == {0}
    assert surveys[0].damage.linear < 1e-6


def test_a_model_whose_ffns_lost_all_neurons_can_still_lose_attention(
    tmp_path: Path, compress: Compress, corpus: Path
) -> None:
    model = tiny_model("llama", intermediate_size=0)
    assert all(find_neurons(model, block) is None for block in find_blocks(model))
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    options = ("--text", corpus, *SMALL, "--max-dppl", "100", "--no-cache", "--out", tmp_path / "out")
    refused = compress(tmp_path / "model", *options)
    assert refused.code == 1, refused.err
    assert "none saves parameters" in refused.err
    done = compress(tmp_path / "model", *options, "--branches", "all")
    assert done.code == 0, done.err


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_one_gelu_is_told_from_another_in_any_precision(family: str, dtype: torch.dtype) -> None:
    """The exact gelu and the one by tanh differ by less than bfloat16 rounds."""
    for activation, tanh in (("gelu", False), ("gelu_new", True)):
        model = tiny_model(family, activation_function=activation).to(dtype)
        found = [find_neurons(model, block) for block in find_blocks(model)]
        assert [neurons is not None and neurons.activation != "gelu" for neurons in found] == [tanh] * 3
        assert all(neurons is not None and neurons.inner_matrix.weight.dtype == dtype for neurons in found)


def test_an_activation_that_nobody_knows_is_not_guessed() -> None:
    class Cubed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x**3

    model = tiny_model("gpt2")
    model.transformer.h[1].mlp.act = Cubed()
    blocks = find_blocks(model)
    assert find_neurons(model, blocks[1]) is None
    assert find_neurons(model, blocks[0]) is not None
    assert blocks[0].width == WIDTH


def test_short_memory_keeps_no_neurons_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Memory:
        available = int(5 * 8 * (2 * WIDTH) ** 2 / 0.8) + 8

    monkeypatch.setattr("psutil.virtual_memory", Memory)
    store = open_store(tiny_model("gpt2"), random_text(), RunContext(progress=Progress(visible=True)), FFNS)
    assert set(store.units.values()) == {None}
    assert "memory is short" in capsys.readouterr().err


def test_a_place_without_a_cache_is_gone_with_its_owner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And what a killed run left of its own is gone with the next."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    stale = tmp_path / ".compressor-scratch-abcdefgh"
    stale.mkdir()
    (stale / "lock").touch()
    store = open_store(tiny_model("gpt2"), random_text(), RunContext())
    assert store.cache.directory is not None
    assert list(tmp_path.iterdir()) == [store.cache.directory]
    assert store.cache.directory != stale
    del store
    gc.collect()
    assert list(tmp_path.iterdir()) == []
