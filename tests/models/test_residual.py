"""A stream carried layer by layer is the forward pass; one that was kept on the way goes on from there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from planted import random_text
from zoo import FAMILIES, tiny_model

from compressor.measure.profile import measure
from compressor.models.blocks import Block, backbone, find_blocks, hidden_states_of
from compressor.models.residual import open_stream
from compressor.plan.moments_store import open_store
from compressor.runtime.cache import Cache, Tensors
from compressor.runtime.context import RunContext
from compressor.runtime.errors import InputError
from compressor.runtime.progress import Progress


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
    blocks = find_blocks(model)
    monkeypatch.setattr("compressor.models.residual.SAVE_SECONDS", 0.0)

    def do(cache: Cache) -> list[torch.Tensor]:
        if work == "measure":
            return [p.linear.weight for p in measure(model, text, RunContext(cache=cache)).blocks]
        store = open_store(model, text, RunContext(cache=cache))
        store.candidates()
        return [store.moments(block.index).xx for block in blocks]

    whole, expected = runs_of(model, blocks, lambda: do(Cache(tmp_path / "whole", Progress())))
    dying = Dying(tmp_path / "killed", Progress())
    # Per block: what is found of it (of a survey also its moments) and two streams; a survey's gradients come first.
    dying.left = 4 * 3 if work == "measure" else len(blocks) + 4 * 4
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
    store.ensure_gradients(store.blocks)
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
