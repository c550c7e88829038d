"""Guard windows: neurons that answer to words which the calibration text does not have are kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from planted import FFNS, SEQ_LEN, random_text
from torch import Tensor
from zoo import VOCAB, tiny_model

from compressor.measure.profile import measure
from compressor.models.blocks import Rows, capture_rows, find_blocks
from compressor.plan.fit import Fitter
from compressor.plan.moments_store import open_store
from compressor.plan.shapes import Shape
from compressor.runtime.context import RunContext
from compressor.text import Split, Text
from compressor.text.guard import draw_words

RARE = 8  # neurons that only unseen words excite
SEEN = VOCAB // 2  # words from here on are not in the text


def model_with_rare_neurons() -> Any:
    """A tiny Llama whose unseen words share a direction that the first neurons of layer 0 alone read."""
    model = tiny_model("llama")
    layer = model.model.layers[0]
    with torch.no_grad():
        layer.self_attn.o_proj.weight.zero_()  # nothing but the word reaches the first FFN
        layer.mlp.gate_proj.weight[:, 0] = 0.0
        layer.mlp.gate_proj.weight[:RARE] = 0.0
        layer.mlp.gate_proj.weight[:RARE, 0] = 1.0
        layer.mlp.up_proj.weight[:, 0] = 0.0
        layer.mlp.down_proj.weight[:, :RARE] *= 3.0
        words = model.model.embed_tokens.weight
        words[:, 0] = 0.0
        words[SEEN:, 0] = words.std() * 4
    return model.eval()


def text_of_seen_words(guard: float) -> Text:
    text = random_text()
    few = [Split(split.windows % SEEN, "seen words") for split in (text.calibration, text.selection, text.verification)]
    whole = Text(*few)
    return replace(
        whole, guard=draw_words(torch.arange(VOCAB), round(guard * len(whole.fitting)), whole.fitting, seed=0)
    )


def first_rows(model: Any, windows: Tensor) -> Rows:
    found: list[Rows] = []
    with capture_rows(model, find_blocks(model)[:1], lambda _, rows: found.append(rows)), torch.no_grad():
        model(input_ids=windows, use_cache=False)
    return found[0]


@pytest.mark.parametrize("compensated", [False, True])
def test_neurons_that_only_unseen_words_excite_are_kept(compensated: bool) -> None:
    model = model_with_rare_neurons()
    unseen = torch.randint(SEEN, VOCAB, (8, SEQ_LEN), generator=torch.Generator().manual_seed(5))
    rows = first_rows(model, unseen)
    neurons = model.config.intermediate_size
    errors = {}
    for guard in (0.0, 0.125):
        store = open_store(model, text_of_seen_words(guard), RunContext(), FFNS)
        fitter = Fitter(store, store.candidates())
        fit = fitter.fit_in_order if compensated else fitter.fit_at_once
        module = fit({0: Shape(0, neurons - RARE)})[0]
        with torch.no_grad():
            errors[guard] = ((module(rows.x) - rows.y).square().sum() / rows.y.square().sum()).item()
    assert errors[0.0] > 0.3
    assert errors[0.125] < 0.1 * errors[0.0]


def test_the_profile_does_not_see_guard_windows() -> None:
    model, text = tiny_model("gpt2"), text_of_seen_words(0.0)
    guarded = replace(text, guard=draw_words(torch.arange(VOCAB), 48, text.fitting, seed=0))
    seen: list[int] = []
    handle = model.transformer.h[1].register_forward_hook(lambda _, args, __: seen.append(len(args[0])))
    profiles, windows = [], []
    for each in (text, guarded):
        profiles.append(measure(model, each))
        windows.append(sum(seen))
        seen.clear()
    handle.remove()
    assert [p.r2_lin for p in profiles[0].blocks] == [p.r2_lin for p in profiles[1].blocks]
    assert windows[1] <= windows[0]


def test_fits_on_other_guard_windows_are_not_taken_from_the_cache() -> None:
    text = text_of_seen_words(0.25)
    other = replace(text, guard=draw_words(torch.arange(VOCAB), 12, text.fitting, seed=1))
    model = tiny_model("llama")
    keys = [open_store(model, each, RunContext(), FFNS).text_sha256 for each in (text, other, text_of_seen_words(0.0))]
    assert len(set(keys)) == 3
    assert text.calibration_sha256 == other.calibration_sha256 == keys[2]


def test_windows_of_random_words_begin_as_the_text_does() -> None:
    words = torch.tensor([3, 5, 9])
    windows = torch.tensor([[1, 20, 21, 22]] * 10)
    drawn = draw_words(words, 5, windows, seed=0)
    assert drawn.shape == (5, 4)
    assert (drawn[:, 0] == 1).all()
    assert set(drawn[:, 1:].unique().tolist()) == {3, 5, 9}
    assert torch.equal(drawn, draw_words(words, 5, windows, seed=0))
    assert not torch.equal(drawn, draw_words(words, 5, windows, seed=1))
    windows[0, 0] = 2
    assert set(draw_words(words, 5, windows, seed=0)[:, 0].tolist()) <= {3, 5, 9}
    assert len(draw_words(words, 0, windows, seed=0)) == 0
