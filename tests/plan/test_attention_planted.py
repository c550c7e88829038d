"""Attention whose answer is known: closed forms against brute force on raw rows, and the planner on planted models."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import pytest
import torch
from planted import LinearFFN
from planted_attention import (
    EVERY,
    TRIGGERS,
    attend_to_itself,
    induction_model,
    loud_model,
    repetitive_text,
    sampled_text,
    unit_views,
)
from torch import Tensor

import compressor
from compressor.evaluate.perplexity import evaluate
from compressor.measure.moments import Moments
from compressor.measure.profile import measure
from compressor.modeling_compressor import KeptHeads
from compressor.models.blocks import AttentionOf
from compressor.patch.tree import patched
from compressor.plan.choices import Choices
from compressor.plan.search import Plan
from compressor.plan.selection import Elimination, ScaledMoments, eliminate, refit, scale_moments, spread_units
from compressor.plan.shapes import Shape
from compressor.plan.space import prepare_search
from compressor.runtime.context import RunContext
from compressor.text import Text

UNITS, COLUMNS, WIDTH, ROWS = 5, 3, 6, 700


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class UnitRows:
    """Rows of x and of a, whose units are correlated with each other and with x, and the weights of the output."""

    def __init__(self, seed: int = 0) -> None:
        self.x = random(ROWS, WIDTH, seed=10 * seed + 1) + 2
        mixed = torch.cat([self.x, random(ROWS, UNITS * COLUMNS, seed=10 * seed + 2)], 1)
        self.a = torch.tanh(mixed @ random(mixed.shape[1], UNITS * COLUMNS, seed=10 * seed + 3) / 3) + 1
        self.outer = random(UNITS * COLUMNS, WIDTH, seed=10 * seed + 4)
        self.root = random(WIDTH, WIDTH, seed=10 * seed + 5)
        self.bias = random(WIDTH, seed=10 * seed + 6)

    @property
    def y(self) -> Tensor:
        return self.a @ self.outer + self.bias

    def moments(self) -> Moments:
        return Moments.of(torch.cat([self.x, self.a], 1), self.x[:, :0], None, whole_yy=False)

    def scaled(self) -> ScaledMoments:
        return scale_moments(self.moments(), self.outer)

    def eliminate(self, *, with_inputs: bool) -> Elimination:
        counts = list(range(UNITS))
        return eliminate(self.scaled(), self.root, counts, with_inputs=with_inputs, columns=COLUMNS)

    def columns(self, kept: Any) -> Tensor:
        return spread_units(torch.tensor(sorted(kept), dtype=torch.long), COLUMNS)

    def refit_error(self, kept: Any, *, with_inputs: bool) -> float:
        """‖e·root‖² per row of least squares on the raw rows of these units, a constant, and x."""
        parts = [torch.ones(ROWS, 1, dtype=torch.float64), self.a[:, self.columns(kept)]]
        features = torch.cat([*parts, *([self.x] if with_inputs else [])], 1)
        solution = torch.linalg.lstsq(
            features, self.y, driver="gelsd"
        ).solution  # of the least norm: units may be copies
        return ((features @ solution - self.y) @ self.root).square().sum().item() / ROWS


@pytest.mark.parametrize("with_inputs", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_the_error_of_kept_units_is_that_of_least_squares_on_the_rows(seed: int, with_inputs: bool) -> None:
    rows = UnitRows(seed)
    run = rows.eliminate(with_inputs=with_inputs)
    assert {len(subset.kept) for subset in run.subsets} == set(range(UNITS))
    for subset in run.subsets:
        for rank, inputs in ((0, False), (WIDTH, True)):
            expected = rows.refit_error(subset.kept.tolist(), with_inputs=inputs)
            assert subset.errors[rank].item() == pytest.approx(expected, rel=1e-5, abs=1e-7 * run.total)


@pytest.mark.parametrize("with_inputs", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_every_removal_is_the_best_single_one(seed: int, with_inputs: bool) -> None:
    """The first unit to go is exactly the one that brute force over all sets of one fewer names; so is every next."""
    rows = UnitRows(seed)
    order = rows.eliminate(with_inputs=with_inputs).order.tolist()
    assert sorted(order) == list(range(UNITS))
    alive = set(range(UNITS))
    for unit in order:
        errors = {gone: rows.refit_error(alive - {gone}, with_inputs=with_inputs) for gone in alive}
        assert unit == min(errors, key=errors.__getitem__)
        alive.remove(unit)


@pytest.mark.parametrize("with_inputs", [False, True])
def test_the_cost_of_a_unit_is_the_rise_of_the_error_after_a_refit(with_inputs: bool) -> None:
    """tr(W_gᵀ([H⁻¹]_gg)⁻¹W_g), of raw rows with their means taken away, for every unit and not the cheapest alone."""
    rows = UnitRows()
    features = torch.cat([rows.x, rows.a], 1) if with_inputs else rows.a
    features = features - features.mean(0)
    inverse = torch.linalg.inv(features.T @ features / ROWS)
    offset = features.shape[1] - UNITS * COLUMNS
    costs = {}
    for unit in range(UNITS):
        group = rows.columns([unit])
        weights = (rows.outer @ rows.root)[group]
        inner = inverse[offset + group][:, offset + group]
        costs[unit] = (weights * torch.linalg.solve(inner, weights)).sum().item()
        rise = rows.refit_error(set(range(UNITS)) - {unit}, with_inputs=with_inputs)
        assert costs[unit] == pytest.approx(rise, rel=1e-9)
    run = rows.eliminate(with_inputs=with_inputs)
    assert int(run.order[0]) == min(costs, key=costs.__getitem__)
    (first,) = (subset for subset in run.subsets if len(subset.kept) == UNITS - 1)
    rank = WIDTH if with_inputs else 0
    assert first.errors[rank].item() == pytest.approx(costs[int(run.order[0])], rel=1e-5)


@pytest.mark.parametrize("kept_count", range(1, UNITS))
def test_no_set_of_units_is_better_where_truth_is_planted(kept_count: int) -> None:
    """A copy, a dead unit and a constant one beside two that matter: backward elimination is as good as all sets."""
    rows = planted_rows()
    found = next(s for s in rows.eliminate(with_inputs=False).subsets if len(s.kept) == kept_count)
    sets = combinations(range(UNITS), kept_count)
    best = min(rows.refit_error(kept, with_inputs=False) for kept in sets)
    total = (rows.a @ rows.outer @ rows.root).var(0, correction=0).sum().item()
    assert found.errors[0].item() == pytest.approx(best, rel=1e-4, abs=1e-6 * total)


def planted_rows() -> UnitRows:
    """Unit 1 computes what unit 0 does, unit 2 is dead, unit 3 constant; 0 (or 1) and 4 matter."""
    rows = UnitRows()
    rows.a = rows.a.unflatten(1, (UNITS, COLUMNS)).clone()
    rows.a[:, 1] = rows.a[:, 0]
    rows.a[:, 3] = rows.a[:1, 3]
    rows.a = rows.a.flatten(1)
    rows.outer[rows.columns([2])] = 0.0
    return rows


@pytest.mark.parametrize("with_inputs", [False, True])
def test_copies_and_dead_and_constant_units_go_first_and_for_nothing(with_inputs: bool) -> None:
    rows = planted_rows()
    run = rows.eliminate(with_inputs=with_inputs)
    gone = run.order[:3].tolist()
    assert {2, 3} < set(gone)
    assert len({0, 1} & set(gone)) == 1
    free = next(subset for subset in run.subsets if len(subset.kept) == 2)
    assert free.errors[-1 if with_inputs else 0].item() <= 1e-7 * run.total
    fewer = next(subset for subset in run.subsets if len(subset.kept) == 1)
    assert fewer.errors[-1].item() > 1e-3 * run.total


def test_what_a_removed_copy_wrote_is_written_by_its_twin_and_a_constant_by_the_bias() -> None:
    rows = planted_rows()
    kept = rows.columns([0, 4])
    eye = torch.eye(WIDTH, dtype=torch.float64)
    fitted = refit(rows.moments(), rows.scaled(), rows.bias, rows.outer, kept, 0, (eye, eye), 1e-12)
    together = rows.outer[rows.columns([0])] + rows.outer[rows.columns([1])]
    torch.testing.assert_close(fitted.outer[:COLUMNS], together, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(fitted.outer[COLUMNS:], rows.outer[rows.columns([4])], rtol=1e-6, atol=1e-6)
    moved = rows.bias + rows.a[0, rows.columns([3])] @ rows.outer[rows.columns([3])]
    torch.testing.assert_close(fitted.bias, moved, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(rows.a[:, kept] @ fitted.outer + fitted.bias, rows.y, rtol=1e-6, atol=1e-6)


def test_a_unit_that_is_linear_in_x_costs_nothing_beside_x_and_only_there() -> None:
    rows = UnitRows()
    linear = rows.x @ random(WIDTH, COLUMNS, seed=8) + 1
    rows.a[:, rows.columns([2])] = linear
    beside = rows.eliminate(with_inputs=True)
    assert int(beside.order[0]) == 2
    fewer = next(subset for subset in beside.subsets if len(subset.kept) == UNITS - 1)
    assert fewer.errors[COLUMNS].item() <= 1e-7 * beside.total < 1e-3 * beside.total < fewer.errors[COLUMNS - 1].item()


ATTENTION = Choices(branches=("attention",))
GROUPED = {"num_attention_heads": 8, "num_key_value_heads": 4}  # four units of two query heads


def find_plan(model: Any, text: Text, max_dppl: str, choices: Choices = ATTENTION, confidence: float = 0.95) -> Plan:
    profile = measure(model, text, branches=choices.branches)
    context = RunContext(confidence=confidence)
    return compressor.plan(model, profile, text, max_dppl=max_dppl, choices=choices, context=context)


def kept_units(plan: Plan, layer: int) -> set[int]:
    module = plan.fits[AttentionOf(layer)]
    return set(module.heads) if isinstance(module, KeptHeads) else set()


def verification_perplexity(model: Any, text: Text) -> float:
    return evaluate(model, text.verification.windows).perplexity


def assert_applies_for_nothing(model: Any, plan: Plan, text: Text) -> None:
    """The plan costs next to nothing on the selection text, and in the patched model on the verification text."""
    change = plan.selection["text"]
    assert change.delta == pytest.approx(0, abs=1e-5 * change.baseline)
    before = verification_perplexity(model, text)
    compressor.apply(model, plan, text)
    assert verification_perplexity(model, text) == pytest.approx(before, rel=1e-5)


@pytest.mark.parametrize(("family", "settings"), [("gpt2", {}), ("llama-bias", GROUPED), ("llama", GROUPED)])
def test_a_copy_a_dead_and_a_constant_unit_are_removed_for_nothing(family: str, settings: dict[str, Any]) -> None:
    """In Llamas without biases a constant is nothing at all. No other unit goes, in this layer or another."""
    model = loud_model(family, **settings)
    views = unit_views(model, 1)
    views.copy(0, 1)
    views.silence(2)
    views.empty(3)
    text = sampled_text(model)
    plan = find_plan(model, text, "0.01%")
    assert plan.shapes == {AttentionOf(1): Shape(0, 1)}
    assert kept_units(plan, 1) < {0, 1}
    assert_applies_for_nothing(model, plan, text)


@pytest.mark.parametrize("unit", [1, 2, 3])
def test_a_unit_whose_values_are_nothing_goes_alone(unit: int) -> None:
    model = loud_model("gpt2")
    unit_views(model, 2).silence(unit)
    plan = find_plan(model, sampled_text(model), "0.01%")
    assert plan.shapes == {AttentionOf(2): Shape(0, 3)}
    assert kept_units(plan, 2) == {0, 1, 2, 3} - {unit}


@pytest.mark.parametrize("rank", [32, 3])
@pytest.mark.parametrize("family", ["llama-bias", "gpt_neo"])
def test_attention_that_is_linear_becomes_a_map_of_its_rank_for_nothing(family: str, rank: int) -> None:
    """Every token attends to itself alone: through its rotations in a Llama, by a window of one token in a GPT-Neo."""
    model = loud_model(family) if family == "llama-bias" else loud_model(family, window_size=1)
    if family == "llama-bias":
        attend_to_itself(model, 1)
    if rank < 32:
        unit_views(model, 1).limit_rank(rank)
    text = sampled_text(model)
    r2 = {p.block.index: p.r2_lin for p in measure(model, text, branches=("attention",)).branches}
    assert r2.pop(AttentionOf(1)) == pytest.approx(1.0, abs=1e-6)
    assert max(r2.values()) < 0.9
    plan = find_plan(model, text, "0.01%")
    assert set(plan.shapes) == {AttentionOf(1)}
    shape = plan.shapes[AttentionOf(1)]
    assert shape.neurons == 0
    assert shape.rank is None if rank == 32 else shape.rank is not None and rank <= shape.rank < 8
    assert_applies_for_nothing(model, plan, text)


def test_where_all_attention_is_linear_the_first_layer_keeps_a_unit() -> None:
    """For a cache asks its first layer for the length."""
    model = loud_model("mistral", sliding_window=1)
    text = sampled_text(model)
    plan = find_plan(model, text, "0.01%")
    assert {index for index, shape in plan.shapes.items() if not shape.neurons} == {AttentionOf(1), AttentionOf(2)}
    assert AttentionOf(0) not in plan.shapes or plan.shapes[AttentionOf(0)].neurons
    assert_applies_for_nothing(model, plan, text)


def event_losses(model: Any, text: Text) -> Tensor:
    """Nats of the verification tokens that only the induction head can predict."""
    windows = text.verification.windows[EVERY // 2 :: EVERY]
    triggered = (windows[:, :-1] >= 1) & (windows[:, :-1] <= TRIGGERS)
    assert triggered.sum(1).unique().tolist() == [2]
    return evaluate(model, windows).nats[triggered].reshape(-1, 2)[:, 1]


def test_an_induction_head_is_kept_by_a_budget_that_its_loss_would_break() -> None:
    """It matters for one token in a thousand, and no gradient says so: the model is sure of that token with it. Dead,
    constant and copied heads beside it, and in the layer that it relies on, go for nothing."""
    model, text, budget = induction_model(), repetitive_text(), 0.2
    before = verification_perplexity(model, text)
    assert event_losses(model, text).max() < 0.01
    space = prepare_search(model, text, RunContext(), ATTENTION)
    gone = next(c for c in space.candidates[AttentionOf(2)].candidates if c.shape == Shape(0))
    assert gone.damage < 0.01 * math.log1p(budget / before)  # so nothing but a trial can tell
    with patched(model, space.runner.blocks, space.runner.fitter.fit_at_once({AttentionOf(2): Shape(0)})):
        assert verification_perplexity(model, text) - before > budget
        assert event_losses(model, text).min() > 5

    plan = find_plan(model, text, str(budget))
    assert plan.shapes == {AttentionOf(layer): Shape(0, 1) for layer in range(3)}
    assert kept_units(plan, 1) < {0, 1}
    assert kept_units(plan, 2) == {0}
    assert_applies_for_nothing(model, plan, text)
    assert event_losses(model, text).max() < 0.01


def test_an_induction_head_goes_where_the_text_does_not_need_it() -> None:
    plan = find_plan(induction_model(), repetitive_text(events=False), "0.2")
    assert kept_units(plan, 2) == set()


def test_an_induction_head_goes_where_the_budget_allows_its_loss() -> None:
    """By the point estimate: the interval of a loss that three windows carry is wide."""
    plan = find_plan(induction_model(), repetitive_text(), "2.0", confidence=0)
    assert kept_units(plan, 2) == set()
    assert plan.selection["text"].delta > 0.2


def test_attention_and_ffns_are_searched_together() -> None:
    """A dead unit and an FFN that is linear: each is found in its own branch, in one plan."""
    model = loud_model("gpt2")
    unit_views(model, 1).silence(2)
    model.transformer.h[2].mlp = LinearFFN(rank=5)
    text = sampled_text(model)
    plan = find_plan(model, text, "0.01%", Choices())
    assert set(plan.shapes) == {AttentionOf(1), 2}
    assert kept_units(plan, 1) == {0, 1, 3}
    assert plan.shapes[2].neurons == 0
    assert_applies_for_nothing(model, plan, text)
