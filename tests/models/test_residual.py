"""A stream carried layer by layer is the forward pass; one that was kept on the way goes on from there."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from conftest import Compress
from planted import FFNS, random_text
from zoo import COUPLED, FAMILIES, UNUSUAL, VOCAB, tiny_model, tiny_tokenizer, tokens

from compressor.measure.profile import measure
from compressor.models.blocks import Block, backbone, find_blocks, hidden_states_of
from compressor.models.load import load_model
from compressor.models.residual import open_stream, resume
from compressor.plan.moments_store import open_store
from compressor.runtime.cache import Cache, Tensors
from compressor.runtime.context import RunContext
from compressor.runtime.errors import InputError
from compressor.runtime.progress import Progress
from compressor.text.guard import draw_words


@pytest.mark.parametrize("family", FAMILIES)
def test_layer_by_layer_equals_the_forward_pass(family: str) -> None:
    model = tiny_model(family)
    blocks, windows = find_blocks(model), random_text().calibration.windows[:5]
    seen: list[Any] = []
    last = model.get_submodule(blocks[-1].layer_path)
    handle = last.register_forward_hook(lambda _m, _a, out: seen.append(hidden_states_of(out)))
    with torch.no_grad():
        backbone(model)(input_ids=windows, use_cache=False)
    handle.remove()
    stream = open_stream(model, blocks, windows, batch_size=2)  # 2 + 2 + 1: batches of two shapes
    early = stream.copy()
    stream.advance(len(blocks))
    torch.testing.assert_close(torch.cat(list(stream.states)), seen[0], rtol=1e-4, atol=1e-5)
    early.advance(1)
    early.advance(len(blocks))
    assert all(torch.equal(a, b) for a, b in zip(early.states, stream.states, strict=True))


@torch.no_grad()
def assert_streams_are_own_passes(model: Any) -> None:
    """Begun at any layer, passes over batches with other tokens and of another size end in the model's own logits."""
    blocks = find_blocks(model)
    parts = tokens(7, 16).split(2)
    expected = [model(input_ids=part, use_cache=False).logits for part in parts]
    stream = open_stream(model, blocks, tokens(7, 16), 2)
    for position in range(len(blocks) + 1):
        stream.advance(position)
        with resume(model, stream):
            for part, own in zip(parts, expected, strict=True):
                torch.testing.assert_close(model(input_ids=part, use_cache=False).logits, own, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", UNUSUAL)
def test_arguments_that_depend_on_the_tokens_are_those_of_each_batch(family: str) -> None:
    model = tiny_model(family)
    _, _, layers, ffn = UNUSUAL[family]
    assert [block.path for block in find_blocks(model)] == [f"{layers}.{i}.{ffn}" for i in range(3)]
    assert_streams_are_own_passes(model)


def plant_token_angles(model: Any) -> None:
    """The angles of the positions, an argument of every layer, now depend on the tokens."""
    angles = model.model.rotary_emb.forward

    def turned(hidden: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        cos, sin = angles(hidden, position_ids)
        return cos * (1 + hidden.mean(-1, keepdim=True)), sin * (1 - hidden.mean(-1, keepdim=True))

    model.model.rotary_emb.forward = turned


def test_a_planted_argument_that_depends_on_the_tokens() -> None:
    model = tiny_model("llama")
    plant_token_angles(model)
    assert_streams_are_own_passes(model)
    calls = open_stream(model, find_blocks(model), tokens(5, 16), 2).calls
    assert len(calls.tensors) == 2, "of the batches 2 + 2 + 1 only the second differs; its layers share two tensors"
    usual = tiny_model("llama")
    assert len(open_stream(usual, find_blocks(usual), tokens(5, 16), 2).calls.tensors) == 0


def test_with_weights_on_disk_such_arguments_are_in_files(tmp_path: Path) -> None:
    tiny_model("gemma4_text").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    model, _ = load_model(str(tmp_path), low_memory=True)
    assert_streams_are_own_passes(model)
    calls = open_stream(model, find_blocks(model), tokens(5, 16), 2).calls
    assert [file.is_file() for file, *_ in calls.tensors.items] == [True] * 3  # the inputs per layer, of three layers


@pytest.mark.parametrize("family", COUPLED)
def test_layers_that_cannot_be_run_one_at_a_time_are_refused_by_name(family: str) -> None:
    model_type, _, reason = COUPLED[family]
    model = tiny_model(family)
    with pytest.raises(InputError, match=rf"(?s)^model type '{model_type}' is not supported: .*{re.escape(reason)}"):
        open_stream(model, find_blocks(model), tokens(5, 16), 2)


class Meddling(torch.nn.Module):
    """A layer that depends on more than its arguments."""

    left: ClassVar[list[torch.Tensor]] = []

    def __init__(self, layer: Any, way: str) -> None:
        super().__init__()
        self.layer, self.way, self.runs = layer, way, 0
        self.mlp = layer.mlp
        self.attention_type = getattr(layer, "attention_type", None)

    def forward(self, hidden_states: torch.Tensor, **arguments: Any) -> torch.Tensor:
        self.runs += 1
        output: torch.Tensor = self.layer(hidden_states, **arguments)
        if self.way == "hands on":  # to the next layer, past the residual stream
            self.left.append(output)
            return output if len(self.left) % 3 == 1 else output + 0.1 * self.left[-2]
        if self.way == "counts":
            return output * (1 + 0.01 * (self.runs > 3))
        if self.way == "in place":
            hidden_states.mul_(2)
        return output


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        ("hands on", "returns something else when it is run by itself"),
        ("counts", "returns something else when it is run by itself"),
        ("in place", "changes its input in place"),
        ("between", "model.layers.1 is not the output of the layer before it"),
        ("twice", "do not run once each"),
        ("mixes", "depends on more than the row"),
    ],
)
def test_planted_couplings_are_found(way: str, reason: str) -> None:
    model = tiny_model("llama")
    layers = model.model.layers
    if way == "between":
        layers[1].register_forward_pre_hook(lambda _, args: (1.5 * args[0], *args[1:]))
    elif way == "twice":
        layers[2] = layers[1]
    elif way == "mixes":
        layers[1].mlp.register_forward_hook(lambda _m, _a, output: output + output.roll(1, dims=-2))
    else:
        Meddling.left.clear()
        model.model.layers = torch.nn.ModuleList([Meddling(layer, way) for layer in layers])
    with pytest.raises(InputError, match=rf"model type 'llama' .*{reason}"):
        open_stream(model, find_blocks(model), tokens(5, 16), 2)


def test_a_model_is_tried_once() -> None:
    model = tiny_model("llama")
    blocks = find_blocks(model)
    first, _ = runs_of(model, blocks, lambda: open_stream(model, blocks, tokens(5, 16), 2))
    again, _ = runs_of(model, blocks, lambda: open_stream(model, blocks, tokens(5, 16), 2))
    assert min(first) > 0
    assert again == [0, 0, 0], "a stream is opened without running a layer"


@pytest.mark.parametrize("family", ["gemma3n", "rwkv", "openai-gpt"])
def test_the_command_refuses_in_one_line_before_any_work(family: str, compress: Compress, tmp_path: Path) -> None:
    tiny_model(family).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "empty.txt").touch()
    outcome = compress("profile", tmp_path, "--text", tmp_path / "empty.txt")
    assert outcome.code == 2
    assert len(outcome.errors) == 1
    assert f"model type '{family.replace('gemma3n', 'gemma3n_text')}' is not supported" in outcome.errors[0]


class Killed(BaseException):
    """What ends a process ends nothing in order."""


class Dying(Cache):
    """A cache whose process is killed when it keeps one entry more than so many."""

    left = 0

    def write(self, file: Path, words: str, found: Tensors) -> None:
        if self.left == 0:
            raise Killed
        self.left -= 1
        super().write(file, words, found)


def runs_of(model: Any, blocks: list[Block], action: Callable[[], Any]) -> tuple[list[int], Any]:
    """How many batches went through each layer meanwhile, and what came out."""
    counts = [0] * len(blocks)

    def count(index: int) -> Callable[..., None]:
        def hook(layer: Any, *_: Any) -> None:
            counts[index] += "forward" not in layer.__dict__  # not when it only hands its input on

        return hook

    handles = [model.get_submodule(b.layer_path).register_forward_hook(count(b.index)) for b in blocks]
    try:
        return counts, action()
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("work", ["measure", "survey"])
def test_a_pass_that_was_killed_goes_on_at_the_layer_where_it_was_kept(
    work: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, text = tiny_model("llama", num_hidden_layers=6), random_text()
    text = replace(text, guard=draw_words(torch.arange(VOCAB), 24, text.fitting, seed=0))
    blocks = find_blocks(model)
    monkeypatch.setattr("compressor.models.residual.SAVE_SECONDS", 0.0)

    def do(cache: Cache) -> list[torch.Tensor]:
        if work == "measure":
            return [p.linear.weight for p in measure(model, text, RunContext(cache=cache), branches=("ffn",)).blocks]
        store = open_store(model, text, RunContext(cache=cache), FFNS)
        store.candidates()
        return [store.moments(block.index).xx for block in blocks]

    whole, expected = runs_of(model, blocks, lambda: do(Cache(tmp_path / "whole", Progress())))
    dying = Dying(tmp_path / "killed", Progress())
    # Per block: what is found of it and two streams; of a survey also its moments and a stream of the guard windows.
    # Its gradients come first.
    dying.left = 4 * 3 if work == "measure" else len(blocks) + 4 * 5
    with pytest.raises(Killed):
        do(dying)
    again, resumed = runs_of(model, blocks, lambda: do(Cache(tmp_path / "killed", Progress())))
    assert all(torch.equal(a, b) for a, b in zip(expected, resumed, strict=True))
    batches = len(open_stream(model, blocks, text.calibration.windows, 8).states)
    assert whole[1] >= batches
    assert max(again[1:4]) == 0, "finished layers were run again"
    assert again[5] >= batches
    assert len(list((tmp_path / "killed").iterdir())) == len(list((tmp_path / "whole").iterdir()))


def test_gradients_that_another_run_dropped_are_found_again(tmp_path: Path) -> None:
    model, text = tiny_model("llama"), random_text()
    cache = Cache(tmp_path, Progress())
    first = open_store(model, text, RunContext(cache=Cache(None, Progress()))).candidates()
    store = open_store(model, text, RunContext(cache=cache))
    store.ensure_gradients(list(store.blocks.values()))
    cache.drop(store.key("gradients", store.blocks[1]))
    again = store.candidates()
    assert all(torch.equal(first[i].metric, again[i].metric) for i in first)
    entries = {file.name for file in tmp_path.iterdir()}
    assert len(entries) == 2 * len(store.blocks)  # moments and surveys: what only an unfinished one needs is gone


def test_a_disk_that_holds_no_more_ends_the_survey_at_once(tmp_path: Path) -> None:
    class Full(Cache):
        def write(self, file: Path, words: str, found: Tensors) -> None:
            if found.keys() != {"rows", "mean", "xx"}:
                super().write(file, words, found)

    with pytest.raises(InputError, match="holds no more"):
        open_store(tiny_model("llama"), random_text(), RunContext(cache=Full(tmp_path, Progress()))).candidates()


def test_a_stream_that_was_kept_behind_a_lost_block_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, text = tiny_model("gpt2"), random_text()
    monkeypatch.setattr("compressor.models.residual.SAVE_SECONDS", 0.0)
    cache, blocks = Cache(tmp_path, Progress()), find_blocks(model)
    stream = open_stream(model, blocks, text.fitting, 8, cache, {"what": "it"})
    stream.advance(2)
    stream.save_periodically()
    assert open_stream(model, blocks, text.fitting, 8, cache, {"what": "it"}, latest=2).position == 2
    assert open_stream(model, blocks, text.fitting, 8, cache, {"what": "it"}, latest=1).position == 0
    assert open_stream(model, blocks, text.fitting, 8, cache, {"what": "other"}, latest=2).position == 0
