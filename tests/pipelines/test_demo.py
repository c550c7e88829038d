"""The built-in models are language models, and the README's main command does on it what the README says."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from conftest import Compress
from transformers import AutoModelForCausalLM

import compressor
from compressor.runtime.names import BUILT_IN_MODELS
from compressor.text import DEMO_TEXT

BOTH = pytest.mark.parametrize("name", BUILT_IN_MODELS)


@BOTH
def test_it_is_small_and_its_text_is_large_enough(name: str) -> None:
    assert (BUILT_IN_MODELS[name] / "model.safetensors").stat().st_size <= 8 * 10**6
    assert sum(file.stat().st_size for file in DEMO_TEXT.glob("*.txt")) >= 400_000
    assert (BUILT_IN_MODELS[name] / "LICENSE.md").is_file()


def test_both_have_the_same_tokenizer() -> None:
    first, second = ((folder / "tokenizer.json").read_bytes() for folder in BUILT_IN_MODELS.values())
    assert first == second


@BOTH
def test_it_predicts_text_it_never_saw(name: str) -> None:
    """At most 2.2 bits per byte; the script that trained `demo` measured 1.92 on all of the held-out text."""
    model, tokenizer = compressor.load(name)
    text = compressor.load_text("demo", tokenizer, seq_len=256)
    windows = text.verification.windows[::2]
    losses = compressor.evaluate(model, windows)
    size = sum(len(tokenizer.decode(window[1:]).encode()) for window in windows)
    bits = losses.nats.sum().item() / math.log(2) / size
    assert bits <= 2.2
    recorded = json.loads((BUILT_IN_MODELS[name] / "training.json").read_text())["bits_per_byte"]
    assert bits == pytest.approx(recorded, rel=0.1)


# A third of the command's time: the promise, the fits and the search are the same, on less text.
LESS = ["--calib-tokens", "8192", "--select-tokens", "4096", "--verify-tokens", "8192", "--task-limit", "60"]
LESS += ["--generate", "8"]


def test_the_main_command(compress: Compress, tmp_path: Path) -> None:
    out = tmp_path / "demo-lin"
    done = compress("demo", "--max-dppl", "1.0", "--out", out, *LESS)
    assert done.code == 0, done.err
    assert "% smaller: 3,360,192 → " in done.out
    record = json.loads((out / "compression.json").read_text())
    assert record["parameters"]["removed_fraction"] > 0.15
    assert 0 < record["perplexity"]["delta"] < record["perplexity"]["delta_upper"] <= 1.0
    assert record["perplexity"]["delta_upper"] >= 0.8, "the budget is to be used"
    assert record["agreement"]["kl_rank_correlation"] > 0.5
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.num_parameters() == record["parameters"]["after"] < record["parameters"]["before"]
    checked = compress("check", out, "--json")
    assert checked.code == 0, checked.err
    again = json.loads(checked.out)["perplexity"]
    assert again["delta"] == pytest.approx(record["perplexity"]["delta"], rel=1e-3)


@pytest.mark.parametrize("objective", ["speed", "size"])
def test_a_block_becomes_an_eighth_of_itself_without_neurons(
    compress: Compress, tmp_path: Path, objective: str
) -> None:
    """A full linear map is 7.97 times as small, for its bias, so that a low rank must be chosen."""
    out = tmp_path / "demo-lin"
    asked = ["--kinds", "linear,lowrank", "--branches", "ffn", "--max-dppl", "1.0", "--objective", objective]
    done = compress("demo", *asked, "--out", out, *LESS, "--no-swap")
    assert done.code == 0, done.err
    record = json.loads((out / "compression.json").read_text())
    replaced = [block for block in record["blocks"] if block["replacement"]["kind"] != "keep"]
    assert {block["replacement"]["kind"] for block in replaced} <= {"linear", "lowrank"}
    assert max(block["params_before"] / block["params_after"] for block in replaced) >= 8
    assert record["perplexity"]["delta_upper"] <= 1.0


def test_two_commands_make_a_file_for_llama_cpp(compress: Compress, tmp_path: Path) -> None:
    """The second built-in model is a Llama: without the Hub, a user sees the whole way to llama.cpp."""
    made, file = tmp_path / "demo-llama-lin", tmp_path / "demo-llama.gguf"
    done = compress("demo-llama", "--max-dppl", "1.0", "--out", made, *LESS)
    assert done.code == 0, done.err
    record = json.loads((made / "compression.json").read_text())
    assert record["source"]["model"] == "demo-llama"
    assert record["recipe"]["text"] == ["demo"]
    assert list(record["tasks"]) == ["demo_last_word"]
    assert record["parameters"]["removed_fraction"] > 0.1
    assert record["perplexity"]["delta_upper"] <= 1.0
    exported = compress("export", made, "--to", "gguf", "--out", file, "--json")
    assert exported.code == 0, exported.err
    assert json.loads(exported.out)["checked"]["runtime"].startswith("llama.cpp")
    assert file.read_bytes()[:4] == b"GGUF"
    checked = compress("check", file, "--verify-tokens", "2048", "--max-dppl", "5", "--json")  # its source is built in
    assert checked.code == 0, checked.err
    assert json.loads(checked.out)["source"]["model"] == "demo-llama"
