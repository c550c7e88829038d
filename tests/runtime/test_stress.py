"""Honest numbers under stress: what cannot be computed is refused by name, what is merely odd is handled."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
import torch
from conftest import SMALL, Compress
from planted import LinearFFN, WildFFN, planted_model, random_text
from preloaded import Server
from torch import Tensor, nn
from zoo import save_tiny, tiny_model, tiny_tokenizer

from compressor.evaluate.perplexity import evaluate
from compressor.measure.profile import measure
from compressor.runtime.context import RunContext
from compressor.runtime.errors import InputError
from compressor.text import Split, Text

MARK = 7  # the token at which a planted block fails


class FailingFFN(LinearFFN):
    """A linear block that gives a value of its own wherever the marked token stands."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self, hidden_states: Tensor) -> Tensor:
        marked = hidden_states[..., :1] > 5
        return torch.where(marked, torch.tensor(self.value), super().forward(hidden_states))


def marked_text(window: int, token: int) -> Text:
    """Random text in which the marked token stands once, in this calibration window."""
    text = random_text()
    splits = [split.windows.where(split.windows != MARK, MARK + 1) for split in (text.calibration, text.selection)]
    splits[0][window, token] = MARK
    return Text(Split(splits[0], "marked"), Split(splits[1], "marked"), Split(splits[1], "marked"))


def failing_model(block: int, value: float) -> nn.Module:
    blocks: list[nn.Module] = [LinearFFN(), WildFFN(), LinearFFN(seed=4)]
    blocks[block] = FailingFFN(value)
    model = planted_model(*blocks)
    with torch.no_grad():
        model.transformer.wte.weight[MARK] = 0
        model.transformer.wte.weight[MARK, 0] = 1e4
        model.transformer.h[block].ln_2.weight.fill_(1.0)
        model.transformer.h[block].ln_2.bias.zero_()
    return model  # type: ignore[no-any-return]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(("block", "window", "token"), [(0, 0, 3), (1, 13, 0), (2, 14, 31), (1, 59, 5)])
def test_the_block_and_the_window_are_named(block: int, window: int, token: int, value: float) -> None:
    """Fitting windows and held-out ones (every fifth), in the first batch and in later ones."""
    where = rf"block {block} .* in its output, in calibration window {window} at token {token}:"
    with pytest.raises(InputError, match=where):
        measure(failing_model(block, value), marked_text(window, token), RunContext(batch_size=4))


def test_an_evaluation_names_its_window() -> None:
    windows = marked_text(9, 2).calibration.windows
    with pytest.raises(InputError, match="in window 9"):
        evaluate(failing_model(1, math.nan), windows, RunContext(batch_size=4))


def test_float16_that_overflows_is_told_and_float32_is_not_troubled(
    compress: Compress, options: list[str], tmp_path: Path
) -> None:
    model = tiny_model("gpt2")
    with torch.no_grad():
        model.transformer.h[1].mlp.c_proj.weight.mul_(1e5)
    model.save_pretrained(tmp_path / "hot")
    tiny_tokenizer().save_pretrained(tmp_path / "hot")
    words = ["profile", tmp_path / "hot", *options, "--no-swap", "--json"]
    done = compress(*words, "--dtype", "float16")
    assert (done.code, len(done.errors)) == (2, 1)
    assert "block 1 (transformer.h.1.mlp) has NaN or Inf in its output, in calibration window 0" in done.err
    assert "overflow in float16; try --dtype float32" in done.err
    assert compress(*words).code == 0


def test_one_token_over_and_over(compress: Compress, models: Path, tmp_path: Path) -> None:
    """Every Gram matrix is singular but for the positions: figures are finite, or missing, and never made up."""
    text = tmp_path / "same.txt"
    text.write_text("a" * 40_000)
    done = compress("profile", models / "gpt2", "--text", text, *SMALL, "--json")
    assert done.code == 0, done.err
    for block in json.loads(done.out)["blocks"]:
        for name in ("r2_lin", "r2_stream", "effective_rank", "condition_number"):
            assert block[name] is None or math.isfinite(block[name])


def test_a_block_that_gives_nothing_but_its_bias_has_a_finite_map() -> None:
    class Constant(LinearFFN):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return super().forward(hidden_states) * 0 + self.bias

    constant = measure(planted_model(Constant(), LinearFFN(), WildFFN()), random_text()).blocks[0]
    assert torch.isfinite(constant.linear.weight).all()
    torch.testing.assert_close(constant.linear.bias.float(), Constant().bias.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="tried in a child process")
def test_a_processor_that_stops_is_noticed(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine's bfloat16 does: a result or one line, never a process that just ends."""
    save_tiny("gpt2", tmp_path / "model")
    (tmp_path / "text.txt").write_text("Call me Ishmael. " * 4000)
    words = ["profile", tmp_path / "model", "--text", tmp_path / "text.txt", *SMALL, "--no-swap", "--json"]
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    process = server.start(*words, "--dtype", "bfloat16", COMPRESSOR_CACHE=str(tmp_path / "cache"))
    _, err = process.communicate(timeout=240)
    assert process.returncode in (0, 2), process.returncode
    if process.returncode == 2:
        assert "processor stops at its first bfloat16 product; use --dtype float32" in err
