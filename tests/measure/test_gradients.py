"""Gradient rows and predicted damage against direct computation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from planted import SEQ_LEN, LinearFFN, WildFFN, planted_model, random_text
from zoo import FAMILIES, tiny_model

from compressor.evaluate.perplexity import evaluate
from compressor.measure.gradients import (
    GRADIENT_TOKENS,
    Gradients,
    predict_damages,
    predict_ladder_damage,
    visit_gradients,
)
from compressor.measure.probes import Sample, sample_rows
from compressor.measure.profile import measure
from compressor.models.blocks import find_blocks
from compressor.plan.candidates import fit_ladder
from compressor.runtime.context import RunContext
from compressor.runtime.progress import Progress


def sample_gradients(model: Any, windows: torch.Tensor, tokens: int = GRADIENT_TOKENS) -> dict[int, Gradients]:
    found: dict[int, Gradients] = {}
    visit_gradients(
        model, find_blocks(model), windows, lambda b, rows: found.update({b.index: rows}), Progress(), tokens
    )
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_predict_a_small_change_of_the_loss(family: str) -> None:
    """Add a small constant to a block's output: the loss moves by the gradient in that direction."""
    model, windows = tiny_model(family), random_text().held_out[:4]
    blocks = find_blocks(model)
    gradients = sample_gradients(model, windows)
    block = blocks[1]
    direction = torch.nn.functional.normalize(gradients[1].g.sum(0), dim=0)
    last = model.get_submodule(block.bypass[-1] if block.bypass else block.path)

    def loss(step: float) -> float:
        handle = last.register_forward_hook(lambda _m, _a, out: out + step * direction)
        total = evaluate(model, windows).nats.sum().item()
        handle.remove()
        return total

    step = 3e-3  # small enough to be linear, large enough for float32
    measured = (loss(step) - loss(-step)) / (2 * step)
    predicted = (gradients[1].g @ direction).sum().item()
    assert predicted == pytest.approx(measured, rel=0.03)
    assert len(gradients[1].x) == windows.numel()


def test_the_model_is_left_as_it_was() -> None:
    model, text = tiny_model("gpt2"), random_text()
    trainable = [p.requires_grad for p in model.parameters()]
    sample_gradients(model, text.held_out)
    assert [p.requires_grad for p in model.parameters()] == trainable
    assert all(p.grad is None for p in model.parameters())
    assert not model.transformer.h[0].mlp._forward_hooks


def test_damage_of_every_rank_equals_the_direct_computation() -> None:
    model, text = tiny_model("llama"), random_text()
    gradients = sample_gradients(model, text.held_out)
    for block, sample in sample_rows(model, find_blocks(model), text.fitting, text.held_out, batch_size=8):
        rows = gradients[block.index]
        ladder = fit_ladder(*sample.moments(), rows.metric)
        damage = predict_ladder_damage(ladder, rows)
        assert damage.by_rank is not None
        for rank in (0, 1, 7, block.width):
            predicted = ladder.at(rank)(rows.x.double())
            projected = (rows.g.double() * (predicted - rows.y.double())).sum(1)
            assert damage.by_rank[rank].item() == pytest.approx(projected.square().mean().item() / 2, rel=1e-5)
        errors = ladder.at(block.width)(rows.x.double()) - rows.y.double()
        expected = (errors @ rows.metric * errors).sum(1).mean().item() / 2
        assert damage.factorised == pytest.approx(expected, rel=1e-5)


def test_the_damage_of_a_profile_is_that_of_its_least_squares_maps() -> None:
    model, text = tiny_model("llama"), random_text()
    gradients = sample_gradients(model, text.held_out)
    found = predict_damages(model, measure(model, text), text, RunContext())
    for block, sample in sample_rows(model, find_blocks(model), text.fitting, text.held_out, batch_size=8):
        rows = gradients[block.index]
        errors = by_lstsq(sample, rows.x.double()) - rows.y.double()
        expected = (rows.g.double() * errors).sum(1).square().mean().item() / 2
        assert found[block.index].linear == pytest.approx(expected, rel=1e-3)
        factorised = (errors @ rows.metric * errors).sum(1).mean().item() / 2
        assert found[block.index].factorised == pytest.approx(factorised, rel=1e-3)


def by_lstsq(sample: Sample, x: torch.Tensor) -> torch.Tensor:
    rows = torch.cat([sample.x, torch.ones(len(sample.x), 1)], dim=1).double()
    weight = torch.linalg.lstsq(rows, sample.y.double(), driver="gelsd").solution
    return x @ weight[:-1] + weight[-1]


def test_a_linear_block_is_predicted_to_cost_nothing() -> None:
    model, text = planted_model(LinearFFN(), WildFFN(), WildFFN(seed=5)), random_text()
    linear, wild, _ = predict_damages(model, measure(model, text, branches=("ffn",)), text, RunContext()).values()
    assert linear.linear < 1e-6
    assert linear.factorised < 1e-6
    assert wild.linear > 1e-3


def test_no_more_tokens_are_used_than_asked_for() -> None:
    model, text = tiny_model("gpt2"), random_text()
    gradients = sample_gradients(model, text.held_out, tokens=3 * SEQ_LEN + 1)
    assert len(gradients[0].g) == 3 * SEQ_LEN
