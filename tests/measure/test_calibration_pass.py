"""One pass over the calibration text for all who need its rows, and the moments of many neurons."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from planted import SEQ_LEN, random_text
from zoo import REPRESENTATIVE, tiny_model

from compressor.measure.moments import Moments
from compressor.measure.profile import measure
from compressor.models.blocks import find_blocks
from compressor.models.layer_states import LayerStates
from compressor.plan.fit import Fitter
from compressor.plan.moments_store import open_store
from compressor.plan.shapes import Shape
from compressor.runtime.context import RunContext


def count_rows(model: Any) -> tuple[dict[int, int], list[Any]]:
    """How many rows each layer has seen, from now on; the handles of the hooks that count."""
    seen = {block.index: 0 for block in find_blocks(model)}

    def count(index: int) -> Any:
        def hook(_: Any, args: Any, kwargs: Any) -> None:
            state = args[0] if args else kwargs["hidden_states"]
            seen[index] += state.shape[0] * state.shape[1]

        return hook

    layers = [(block.index, model.get_submodule(block.layer_path)) for block in find_blocks(model)]
    return seen, [layer.register_forward_pre_hook(count(index), with_kwargs=True) for index, layer in layers]


@pytest.mark.parametrize("family", REPRESENTATIVE)
def test_one_pass_gives_what_two_give(family: str) -> None:
    model, text = tiny_model(family), random_text()
    apart, store = measure(model, text), open_store(model, text, RunContext())
    candidates = store.candidates()
    together = open_store(model, text, RunContext())
    profile = measure(model, text, beside=[together.collector()], states=together.states)
    for one, other in zip(apart.branches, profile.branches, strict=True):
        assert one.r2_lin == other.r2_lin
        assert torch.equal(one.linear.weight, other.linear.weight)
    for index, of_block in together.candidates().items():
        assert of_block.candidates == candidates[index].candidates
        assert torch.equal(together.moments(index).xx, store.moments(index).xx)


def test_the_text_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, text = tiny_model("llama"), random_text()
    store = open_store(model, text, RunContext())
    collector = store.collector()
    store.ensure_gradients(list(store.blocks.values()))
    monkeypatch.setattr(store, "ensure_gradients", lambda _: None)
    seen, handles = count_rows(model)
    measure(model, text, beside=[collector], states=store.states)
    store.candidates()
    for handle in handles:
        handle.remove()
    few = 64 * SEQ_LEN  # some tokens show that layers can be run one by one
    assert all(text.calibration.tokens <= rows <= text.calibration.tokens + few for rows in seen.values())


@pytest.mark.parametrize("keeps", [True, False])
def test_kept_states_change_no_fit_and_save_the_original_pass(keeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, text, shapes = tiny_model("gpt2"), random_text(), {1: Shape(0, 30), 2: Shape(2, 20)}
    reference = open_store(model, text, RunContext())
    expected = Fitter(reference, reference.candidates()).fit_in_order(shapes)
    store = open_store(model, text, RunContext())
    store.states.keeps = keeps
    candidates = store.candidates()
    ran: list[int] = []
    move = LayerStates.move

    def watch(states: LayerStates, part: int, stream: Any, to: int) -> None:
        before, kept = stream.position, to in states.kept[part]
        move(states, part, stream, to)
        ran.append(0 if kept else to - before)

    monkeypatch.setattr(LayerStates, "move", watch)
    fits = Fitter(store, candidates).fit_in_order(shapes)
    for index, module in expected.items():
        assert all(torch.equal(a, b) for a, b in zip(module.parameters(), fits[index].parameters(), strict=True))
    assert (sum(ran) == 0) == keeps


@pytest.mark.parametrize("mean", [0.0, 1e3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_moments_of_neurons_are_those_of_float64_up_to_the_rounding_of_their_rows(
    dtype: torch.dtype, mean: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(600, width, generator=generator, dtype=torch.float64) + mean for width in (5, 3))
    a = (torch.randn(600, 40, generator=generator, dtype=torch.float64) + mean / 100).to(dtype)
    weights = torch.rand(600, generator=generator, dtype=torch.float64) + 0.1
    sums = Moments.zeros(45, 3, whole_yy=False)
    for start, stop in ((0, 100), (100, 101), (101, 600)):
        rows = slice(start, stop)
        sums.add_neurons(x[rows], a[rows], y[rows], weights[rows])
    expected = Moments.of(torch.cat([x, a.double()], dim=1), y, weights, whole_yy=False)
    scale = torch.outer(expected.xx.diagonal().sqrt(), expected.xx.diagonal().sqrt())
    assert ((sums.xx - expected.xx).abs() / scale).max() < (1e-12 if dtype == torch.float64 else 1e-5)
    inputs = slice(0, 5)
    torch.testing.assert_close(sums.xx[inputs, inputs], expected.xx[inputs, inputs], rtol=1e-9, atol=1e-6)
    torch.testing.assert_close(sums.xy, expected.xy, rtol=1e-3, atol=1e-2)
    torch.testing.assert_close(sums.mean_x, expected.mean_x, rtol=1e-5, atol=1e-5)
    assert sums.rows == 600
    torch.testing.assert_close(sums.xx, sums.xx.T, rtol=1e-5, atol=1e-4)
