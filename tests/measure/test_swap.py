"""Blocks replaced on trial: the shortcut behind each block against a whole evaluation with the block replaced."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from planted import LinearFFN, WildFFN, planted_model, random_text
from zoo import REPRESENTATIVE, tiny_model

from compressor.evaluate.perplexity import compare, evaluate
from compressor.measure.profile import measure
from compressor.measure.swap import SingleBlockTrials, Sweeper, linear_module, spread_windows
from compressor.modeling_compressor import Replacement
from compressor.models.blocks import find_blocks, find_branches
from compressor.patch.tree import patched
from compressor.runtime.cache import Cache
from compressor.runtime.context import RunContext
from compressor.runtime.progress import Progress


@pytest.mark.parametrize("family", REPRESENTATIVE)
def test_the_shortcut_equals_a_whole_evaluation_with_the_block_replaced(family: str) -> None:
    model, text = tiny_model(family), random_text()
    profile = measure(model, text)
    found, seconds, whole = Sweeper(model, profile, text, 200, RunContext(batch_size=4)).alone()
    windows = spread_windows(text, 200)[0].windows
    before = evaluate(model, windows)
    assert len(profile.branches) == 6
    for p in profile.branches:
        with patched(model, find_branches(model), {p.block.index: linear_module(model, p)}):
            expected = compare(before, evaluate(model, windows))
        got = found[p.block.index]
        assert got.compressed == pytest.approx(expected.compressed, rel=1e-4)
        assert got.delta_ci95 == pytest.approx(expected.delta_ci95, rel=1e-2, abs=1e-3)
        assert got.tokens == 6 * 31
    assert seconds > 0
    assert whole > 0


def test_a_linear_block_changes_nothing_and_a_wild_one_does() -> None:
    """On a random model and random tokens a change may as well win as cost: it shows in the interval."""
    model, text = planted_model(LinearFFN(), WildFFN(), WildFFN(seed=5)), random_text()
    profile = measure(model, text)
    sweeper = Sweeper(model, profile, text, 4096, RunContext())
    alone, _, _ = sweeper.alone()
    assert abs(alone[0].delta) < 1e-3
    low, high = alone[1].delta_ci95
    assert high - low > 1
    assert alone[0].delta_ci95[1] - alone[0].delta_ci95[0] < 1e-3
    both = sweeper.together([profile.blocks[0], profile.blocks[1]])
    assert [found.blocks for found in both] == [(0,), (0, 1)]
    assert both[0].change.delta == pytest.approx(alone[0].delta, abs=1e-3)
    assert both[1].change.delta == pytest.approx(alone[1].delta, abs=1e-2)
    assert both[1].removed == sum(b.parameters - 32 * 33 for b in find_blocks(model)[:2])


def test_a_block_costs_only_the_layers_behind_it() -> None:
    model, text = tiny_model("llama"), random_text()
    profile = measure(model, text, branches=("ffn",))
    sweeper = Sweeper(model, profile, text, 256, RunContext())  # one batch of 8 windows
    rows: list[int] = []
    for layer in model.model.layers:  # a layer that is skipped does not run its attention
        layer.self_attn.register_forward_hook(
            lambda _m, _a, output: rows.append(output[0].shape[0] * output[0].shape[1])
        )
    sweeper.alone()
    layers, text_rows = len(profile.blocks), 256
    timed = 3 * layers  # a first pass that warms up, and two that are timed
    carried = layers  # the stream
    behind = layers * (layers - 1) // 2
    few = layers * (4 * 16 + 2 * 8)  # sixteen tokens show how each layer adds its block, eight what the head does
    assert sum(rows) <= (timed + carried + behind) * text_rows + few


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_loud_block_is_replaced_as_exactly_in_half_precision(dtype: torch.dtype) -> None:
    """What a sum of thousands was rounded to is larger than all that the replacement adds."""
    model, text = tiny_model("llama").to(dtype), random_text()
    blocks, windows = find_blocks(model), text.selection.windows[:6]
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.bias.fill_(3000.0)
    module = Replacement(blocks[0].width, 0, dtype=dtype)  # of a zero output
    trials = SingleBlockTrials(model, blocks, windows, RunContext())
    with patched(model, blocks, {0: module}):
        expected = evaluate(model, windows)
    assert trials.measure_swapped(0, module).perplexity == pytest.approx(expected.perplexity, rel=1e-3)


def test_the_model_is_left_as_it_was() -> None:
    model, text = tiny_model("gpt2"), random_text()
    before = evaluate(model, text.selection.windows).nats
    sweeper = Sweeper(model, measure(model, text), text, 200, RunContext())
    sweeper.alone()
    assert torch.equal(evaluate(model, text.selection.windows).nats, before)
    assert all("forward" not in layer.__dict__ for layer in model.transformer.h)


def test_what_was_measured_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, text = tiny_model("gpt2"), random_text()
    profile, cache = measure(model, text), Cache(tmp_path, Progress())
    first = Sweeper(model, profile, text, 200, RunContext(cache=cache)).alone()
    monkeypatch.setattr(SingleBlockTrials, "start_pass", lambda self: pytest.fail("measured again"))
    assert Sweeper(model, profile, text, 200, RunContext(cache=cache)).alone() == first
