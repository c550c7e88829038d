"""The built-in model is a language model, and the README's main command does on it what the README says."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from conftest import Compress
from transformers import AutoModelForCausalLM

import compressor
from compressor.runtime.names import DEMO
from compressor.text import DEMO_TEXT


def test_it_is_small_and_its_text_is_large_enough() -> None:
    assert (DEMO / "model.safetensors").stat().st_size <= 8 * 10**6
    assert sum(file.stat().st_size for file in DEMO_TEXT.glob("*.txt")) >= 400_000
    assert (DEMO / "LICENSE.md").is_file()


def test_it_predicts_text_it_never_saw() -> None:
    """At most 2.2 bits per byte; the script that trained it measured 1.92 on all of the held-out text."""
    model, tokenizer = compressor.load("demo")
    text = compressor.load_text("demo", tokenizer, seq_len=256)
    windows = text.verification.windows[::2]
    losses = compressor.evaluate(model, windows)
    size = sum(len(tokenizer.decode(window[1:]).encode()) for window in windows)
    bits = losses.nats.sum().item() / math.log(2) / size
    assert bits <= 2.2
    recorded = json.loads((DEMO / "training.json").read_text())["bits_per_byte"]
    assert bits == pytest.approx(recorded, rel=0.1)


# A third of the command's time: the promise, the fits and the search are the same, on less text.
LESS = ["--calib-tokens", "8192", "--select-tokens", "4096", "--verify-tokens", "8192", "--task-limit", "60"]
LESS += ["--generate", "8"]


def test_the_main_command(compress: Compress, tmp_path: Path) -> None:
    out = tmp_path / "demo-lin"
    done = compress("demo", "--max-dppl", "1.0", "--out", out, *LESS)
    assert done.code == 0, done.err
    assert "× fewer" in done.out
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
