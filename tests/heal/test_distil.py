"""Healing: what was broken on purpose comes back, the source does not move, and a stopped run comes to the same end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from planted import random_text
from torch import Tensor
from zoo import REPRESENTATIVE, logits, random_replacement, tiny_model

from compressor.evaluate.fidelity import compare_logits
from compressor.heal import memory, precision
from compressor.heal.distil import Distiller, Healing, WindowOrder, heal
from compressor.heal.settings import HealParams, HealSettings, parse_tokens
from compressor.heal.student import find_beside, is_leaf, make_student, trained_parameters
from compressor.models.blocks import find_blocks, find_branches
from compressor.models.branches import AttentionOf
from compressor.patch.tree import HealedReplacements, identify_patched, patched
from compressor.plan.shapes import Shape
from compressor.runtime.cache import Cache
from compressor.runtime.context import RunContext
from compressor.runtime.errors import InputError
from compressor.runtime.progress import Progress

TEXT = random_text()
SETTINGS = HealSettings(12_000, 5e-3, batch_tokens=128, looks=4)


def broken(family: str = "llama", layer: int = 1) -> tuple[Any, dict[Any, Any]]:
    """A tiny model, and a replacement of one block with all of its neurons and random weights."""
    model = tiny_model(family)
    block = find_blocks(model)[layer]
    return model, {block.index: random_replacement(block, Shape(0, 16), model)}


def run(model: Any, fits: Any, settings: HealSettings = SETTINGS, context: RunContext | None = None) -> Healing:
    return heal(model, find_branches(model), fits, TEXT, settings, context or RunContext())


@torch.no_grad()
def divergence(model: Any, fits: Any) -> float:
    """KL from the source on the verification text, by another path than healing's own."""
    windows = TEXT.verification.windows
    before = model(input_ids=windows).logits
    with patched(model, find_branches(model), fits):
        return compare_logits(before, model(input_ids=windows).logits)[0].mean().item()


@pytest.mark.parametrize("family", REPRESENTATIVE)
def test_healing_brings_every_family_nearer_to_its_source(family: str) -> None:
    model, fits = broken(family)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = run(model, fits)
    assert divergence(model, found.fits) < 0.75 * divergence(model, fits)
    assert found.after.kl < 0.75 * found.before.kl
    assert found.before.tokens == 0
    assert found.tokens == SETTINGS.tokens
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(p.requires_grad for p in model.parameters())


def test_the_source_healed_towards_itself_does_not_move() -> None:
    model = tiny_model("llama")
    names = [name for name, module in model.named_modules() if is_leaf(module) and ".mlp." in name]
    beside = {name: model.get_submodule(name) for name in names}
    found = run(model, HealedReplacements({}, beside))
    assert found.before.kl == 0
    assert found.after.kl == 0
    for name in names:
        for now, then in zip(found.fits.beside[name].parameters(), beside[name].parameters(), strict=True):
            assert torch.equal(now, then)


@pytest.mark.parametrize("params", ["replaced", "norms", "all"])
def test_only_what_was_asked_for_is_trained(params: HealParams) -> None:
    model, fits = broken("llama", layer=1)
    beside = find_beside(model, find_branches(model), fits, params)
    kinds = {name.split(".")[-1] for name in beside}
    if params == "replaced":
        assert not beside
    if params == "norms":
        assert kinds == {"input_layernorm", "post_attention_layernorm", "norm"}
    if params == "all":
        assert {"q_proj", "o_proj", "down_proj", "norm"} <= kinds
    assert not any(name.startswith("model.layers.0.") for name in beside)  # before the first replaced block
    assert not any(name.startswith("model.layers.1.mlp") for name in beside)  # replaced
    assert not any("embed" in name or "head" in name for name in beside)
    names = trained_parameters(make_student(model, find_branches(model), fits, params))
    assert sum(name.startswith("1/") for name in names) == len(list(fits[1].parameters()))


def test_weights_are_rounded_to_the_dtype_of_the_checkpoint() -> None:
    model, fits = broken()
    model.config.dtype = torch.bfloat16
    from compressor.models.source import stored_dtype

    stored = stored_dtype(model)
    found = run(model, fits, HealSettings(2000, 3e-3, batch_tokens=128, looks=1)).fits
    for module in (*found.values(), *found.beside.values()):
        for parameter in module.parameters():
            assert torch.equal(parameter, parameter.to(stored).to(parameter.dtype))


def test_attention_is_healed_too() -> None:
    model = tiny_model("llama")
    branches = {block.index: block for block in find_branches(model)}
    index = AttentionOf(1)
    fits = {index: random_replacement(branches[index], Shape(4, 0), model)}
    found = run(model, fits)
    assert divergence(model, found.fits) < 0.7 * divergence(model, fits)


def test_a_run_that_was_stopped_comes_to_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, fits = broken()

    def context(name: str) -> RunContext:
        return RunContext(cache=Cache(tmp_path / name, Progress()))

    whole = run(model, fits, context=context("whole"))
    take_step, taken = Distiller.take_step, []

    def stop(self: Distiller, optimizer: Any, batch: Tensor) -> float:
        taken.append(1)
        if len(taken) == self.steps // 2 + 5:
            raise KeyboardInterrupt
        return take_step(self, optimizer, batch)

    monkeypatch.setattr(Distiller, "take_step", stop)
    with pytest.raises(KeyboardInterrupt):
        run(model, fits, context=context("stopped"))
    done = len(taken)
    resumed = run(model, fits, context=context("stopped"))
    assert len(taken) - done <= whole.tokens // SETTINGS.batch_tokens // 2 + 1  # the first half was not trained again
    assert identify_patched(model, resumed.fits) == identify_patched(model, whole.fits)
    assert [look.kl for look in resumed.looks] == [look.kl for look in whole.looks]
    count = len(taken)
    again = run(model, fits, context=context("stopped"))  # a finished one is not trained again
    assert len(taken) == count
    assert identify_patched(model, again.fits) == identify_patched(model, whole.fits)


def test_a_loss_that_is_not_a_number_ends_with_the_best_state(monkeypatch: pytest.MonkeyPatch) -> None:
    model, fits = broken()
    take_step, taken = Distiller.take_step, []

    def spoil(self: Distiller, optimizer: Any, batch: Tensor) -> float:
        taken.append(1)
        if len(taken) > self.steps // 2 + 2:
            for parameter in self.parameters.values():
                parameter.data.fill_(float("nan"))
            return float("nan")
        return take_step(self, optimizer, batch)

    monkeypatch.setattr(Distiller, "take_step", spoil)
    found = run(model, fits)
    assert found.stopped is not None
    assert "nan" in found.stopped
    assert divergence(model, found.fits) < divergence(model, fits)


def test_a_rising_divergence_ends_with_the_state_before(monkeypatch: pytest.MonkeyPatch) -> None:
    model, fits = broken()
    good = run(model, fits).fits
    generator = torch.Generator().manual_seed(0)

    def shake(self: Distiller, _optimizer: Any, _batch: Tensor) -> float:
        for parameter in self.parameters.values():
            parameter.data.add_(torch.randn(parameter.shape, generator=generator))
        return 1.0

    monkeypatch.setattr(Distiller, "take_step", shake)
    found = run(model, good)
    assert found.stopped is not None
    assert "rose from" in found.stopped
    assert found.after.tokens == 0
    assert len(found.looks) == 2  # it stopped at the first look that showed it
    assert divergence(model, found.fits) == pytest.approx(divergence(model, good), rel=1e-4)


def test_layers_before_the_first_replaced_one_run_once() -> None:
    """A student that begins in the middle has the same loss and gradients as one that runs whole."""
    model, fits = broken(layer=2)
    distances = []
    for first in (2, 0):
        distiller = Distiller(model, find_branches(model), fits, TEXT, SETTINGS, RunContext(), "heal")
        distiller.first = first
        distiller.prepare()
        loss = distiller.backpropagate(TEXT.calibration.windows[:4], 1.0)
        distances.append((loss, [p.grad.clone() for p in distiller.parameters.values() if p.grad is not None]))
    assert distances[0][0] == pytest.approx(distances[1][0], rel=1e-5)
    assert len(distances[0][1]) > 3
    for one, other in zip(distances[0][1], distances[1][1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom"])
def test_layers_that_run_again_give_the_same_gradients(family: str) -> None:
    model, fits = broken(family)
    gradients = []
    for again in (False, True):
        distiller = Distiller(model, find_branches(model), fits, TEXT, SETTINGS, RunContext(), "heal")
        distiller.prepare()
        if again:
            with memory.checkpointed(distiller.layers):
                distiller.backpropagate(TEXT.calibration.windows[:4], 1.0)
        else:
            distiller.backpropagate(TEXT.calibration.windows[:4], 1.0)
        gradients.append([p.grad for p in distiller.parameters.values()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
    assert not any("forward" in layer.__dict__ for layer in distiller.layers)
    logits(model)


def test_memory_is_estimated_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, fits = broken()
    monkeypatch.setattr(memory, "free_memory", lambda _model: 1000)
    with pytest.raises(InputError, match=r"healing takes .* of memory .* leave --heal out"):
        run(model, fits)


def test_all_windows_come_before_one_comes_again() -> None:
    order = WindowOrder(10, 3, seed=1)
    seen = torch.cat([order.at(step) for step in range(10)]).tolist()
    assert all(sorted(seen[k : k + 10]) == list(range(10)) for k in (0, 10, 20))
    assert seen[:10] != seen[10:20]
    assert seen == torch.cat([WindowOrder(10, 3, seed=1).at(step) for step in range(10)]).tolist()


def test_bfloat16_is_used_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    model, fits = broken()
    monkeypatch.setattr(precision, "best_time", lambda dtype: 1.0 if dtype == torch.float32 else 0.2)
    assert precision.choose_precision(model, RunContext()) is torch.bfloat16
    short = run(model, fits)
    assert short.precision == "bfloat16"
    assert divergence(model, short.fits) < 0.5 * divergence(model, fits)
    monkeypatch.setattr(precision, "best_time", lambda dtype: 1.0 if dtype == torch.float32 else 200.0)
    assert precision.choose_precision(model, RunContext()) is None


@pytest.mark.parametrize(("word", "tokens"), [("200k", 200_000), ("1.5m", 1_500_000), (4096, 4096), ("2K", 2000)])
def test_tokens_are_read(word: Any, tokens: int) -> None:
    assert parse_tokens(word) == tokens


@pytest.mark.parametrize("word", ["", "0", "-5", "many", "5g", "k", "1e3"])
def test_what_is_no_number_of_tokens_is_refused(word: str) -> None:
    with pytest.raises(InputError, match="try --heal 200k"):
        parse_tokens(word)


def test_the_learning_rate_warms_up_and_falls_to_zero() -> None:
    model, fits = broken()
    distiller = Distiller(model, find_branches(model), fits, TEXT, SETTINGS, RunContext(), "heal")
    rates = [distiller.rate_at(step) for step in range(distiller.steps)]
    assert rates.index(max(rates)) <= round(0.05 * distiller.steps) + 1
    assert rates[-1] < 0.01
