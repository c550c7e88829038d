"""The search for a size: never less than was asked, what is free first, one line that says which budget gave way."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from planted import FFNS, LinearFFN, WildFFN, planted_model, random_text
from simulated import SimulatedRunner, draw_costs, limits_of, planner_of
from zoo import tiny_model

import compressor
from compressor.evaluate.budget import Budget, Removal, compute_limits, parse_budgets
from compressor.evaluate.evaluator import Evaluator
from compressor.measure.profile import measure
from compressor.models.blocks import find_blocks, find_branches
from compressor.models.source import identify
from compressor.patch.checkpoint import count_parameters
from compressor.plan.api import make_planner
from compressor.plan.frontier import Candidate
from compressor.plan.removal import (
    SizeSearch,
    SizeTarget,
    cheapest_combination,
    largest_removal,
    refuse_too_large,
    search_size,
)
from compressor.plan.shapes import Shape
from compressor.plan.space import prepare_search
from compressor.plan.verify import verify_size
from compressor.runtime.context import RunContext
from compressor.runtime.errors import BudgetError, InputError

TEXT = random_text()
UNLIMITED = parse_budgets(None, ["text"], 0.95)


def target_of(asked: str | float, model: Any) -> SizeTarget:
    return SizeTarget(Removal.parse(asked), count_parameters(model))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999, 1.0])
def test_the_cheapest_combination_is_that_of_all_combinations(seed: int, share: float) -> None:
    rng = random.Random(seed)
    rows = [[Candidate(i, Shape(0, s), s, rng.random()) for s in rng.sample(range(1, 200), 4)] for i in range(5)]
    least = round(share * sum(max(c.saved for c in row) for row in rows))
    found = cheapest_combination(rows, least)
    assert found is not None
    shapes, damage = found
    assert sum(shape.neurons for shape in shapes.values()) >= least
    choices = itertools.product(*([None, *row] for row in rows))
    sums = [(sum(c.saved for c in chosen if c), sum(c.damage for c in chosen if c)) for chosen in choices]
    assert damage == pytest.approx(min(cost for saved, cost in sums if saved >= least))
    assert cheapest_combination(rows, sum(max(c.saved for c in row) for row in rows) + 1) is None


def test_rounding_never_misses_the_size() -> None:
    """Parameters are counted in steps: with many of them, what is rounded down must not be missing in the end."""
    rng = random.Random(0)
    sizes = (1_234_567, 2_345_678, 9_876_543)
    rows = [[Candidate(i, Shape(0, s), s, s * rng.random()) for s in sizes] for i in range(24)]
    most = 24 * sizes[-1]
    for least in (*(round(most * k / 50) for k in range(1, 51)), most - 1):
        found = cheapest_combination(rows, least)
        assert found is not None
        assert sum(shape.neurons for shape in found[0].values()) >= least


def test_a_percentage_is_of_all_parameters_and_rounded_up() -> None:
    assert Removal.parse("10%").parameters(134_515_008) == 13_451_501
    assert Removal.parse("10 %").parameters(1000) == 100
    assert Removal.parse(" 0.1%").parameters(999) == 1
    assert Removal.parse(10_000).parameters(7) == Removal.parse("1e4").parameters(7) == 10_000
    for word in ("10%", "12.5%", "1000000"):
        assert str(Removal.parse(word)) == word


@pytest.mark.parametrize("word", ["0", "0%", "100%", "-5%", "-1", "nan", "inf", "nan%", "250%", "1e999"])
def test_no_such_size(word: str) -> None:
    with pytest.raises(InputError, match="--remove must be above 0 and below 100 % of the parameters"):
        Removal.parse(word)


@pytest.mark.parametrize("word", ["", "%", "much", "10%%", "1,000", "ten percent", "text=10%", None, True])
def test_not_a_size(word: Any) -> None:
    with pytest.raises(InputError, match="--remove must be a percentage or a number of parameters"):
        Removal.parse(word)


def test_a_fraction_is_told_to_be_a_percentage() -> None:
    with pytest.raises(InputError, match=r"--remove 0\.1 is no whole number of parameters; a share is written"):
        Removal.parse("0.1")


def test_what_is_free_is_chosen_and_costs_nothing() -> None:
    model = planted_model(WildFFN(), LinearFFN(rank=5), WildFFN(seed=5))
    free = find_blocks(model)[1].parameters - Shape(6).parameters(32, 0)
    plan = compressor.plan(model, measure(model, TEXT), TEXT, remove=free, objective="size", choices=FFNS)
    assert list(plan.shapes) == [1]
    assert plan.shapes[1] == Shape(6)  # the smallest form that holds a map of rank 5
    assert plan.selection["text"].delta == pytest.approx(0, abs=1e-3 * plan.selection["text"].baseline)
    before = count_parameters(model)
    compressor.apply(model, plan, TEXT)
    assert before - count_parameters(model) >= free


def test_all_that_is_free_is_chosen_before_anything_that_costs() -> None:
    model = planted_model(LinearFFN(rank=4, seed=3), WildFFN(), LinearFFN(rank=5))
    blocks = find_blocks(model)
    free = sum(blocks[index].parameters - Shape(6).parameters(32, 0) for index in (0, 2))
    plan = compressor.plan(model, measure(model, TEXT), TEXT, remove=str(free), objective="size", choices=FFNS)
    assert sorted(plan.shapes) == [0, 2]
    assert plan.selection["text"].delta == pytest.approx(0, abs=1e-3 * plan.selection["text"].baseline)


@pytest.mark.parametrize("family", ["gpt2", "llama", "opt", "bloom", "gemma2", "gpt_neox"])
def test_at_least_as_much_goes_as_was_asked(family: str) -> None:
    model = tiny_model(family)
    space = prepare_search(model, TEXT, RunContext())
    planner = make_planner(space, measure(model, TEXT), UNLIMITED, objective="size")
    most = sum(max(c.saved for c in row) for row in planner.usable_candidates)
    for asked in (1, most // 10, most // 3, most - 7, most):
        target = target_of(asked, model)
        plan = search_size(planner, target)
        modules = sum(count_parameters(module) for module in plan.fits.values())
        blocks = {block.index: block for block in find_branches(model)}
        assert sum(blocks[index].parameters for index in plan.shapes) - modules == planner.count_saved(plan) >= asked
    with pytest.raises(BudgetError, match=rf"at most {most:,} parameters .* can: .*; nothing written"):
        search_size(planner, target_of(most + 1, model))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_size_costs_no_more_where_attention_may_go_too(family: str) -> None:
    """The plan of FFNs alone is tried as well, so on the selection text the cheaper one is never missed."""
    model = tiny_model(family)
    profile = measure(model, TEXT)
    both, ffns = prepare_search(model, TEXT, RunContext()), prepare_search(model, TEXT, RunContext(), FFNS)
    for share in (0.05, 0.15):
        target = target_of(str(round(share * count_parameters(model))), model)
        costs = [
            search_size(make_planner(space, profile, UNLIMITED, objective="size"), target).selection["text"].delta
            for space in (both, ffns)
        ]
        assert costs[0] <= costs[1] + 1e-9


def test_the_bound_is_arithmetic() -> None:
    model = tiny_model("gpt2")
    blocks = find_blocks(model)
    most = sum(block.parameters - block.width for block in blocks)
    assert largest_removal(blocks) == most
    assert largest_removal(blocks[:1]) == most // 3
    linear = sum(block.parameters - Shape(None).parameters(block.width, 0) for block in blocks)
    assert largest_removal(blocks, ["linear"]) == linear < most
    assert linear < largest_removal(blocks, ["linear", "lowrank"]) < most
    refuse_too_large(target_of(most, model), blocks)
    with pytest.raises(
        InputError, match=rf"could free at most {most:,} parameters \({most / count_parameters(model):.2%}"
    ):
        refuse_too_large(target_of(most + 1, model), blocks)


def test_an_unsafe_block_is_touched_only_for_its_mild_forms_and_the_error_names_it() -> None:
    model = planted_model(WildFFN(outliers=300.0), LinearFFN(), WildFFN(), mark_first_position=True)
    space = prepare_search(model, TEXT, RunContext(), FFNS)
    planner = make_planner(space, measure(model, TEXT), UNLIMITED, objective="size")
    most = sum(planner.blocks[index].parameters - 32 for index in (1, 2))
    assert 0 not in search_size(planner, target_of(most, model)).shapes
    with pytest.raises(BudgetError, match=rf"at most {most:,} parameters .* can: block 0 is unsafe to touch"):
        search_size(planner, target_of(most + 1, model))


def evaluator_of(model: Any, budgets: dict[str, Budget], space: Any) -> tuple[Evaluator, Any]:
    evaluator = Evaluator(TEXT, None, budgets, context=RunContext())
    return evaluator, evaluator.measure(model, "source", identify(model))


def sure_model() -> Any:
    """A model in which every block matters."""
    model = tiny_model("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.mul_(30)
        model.lm_head.weight.mul_(3)
    return model


def test_both_budgets_must_hold_and_the_one_that_gives_way_is_named() -> None:
    model = sure_model()
    profile, space = measure(model, TEXT), prepare_search(model, TEXT, RunContext(), FFNS)
    strict, loose = ({"text": Budget.parse(word)} for word in ("0.001", "90%"))
    target = target_of("12%", model)
    planner = make_planner(space, profile, strict, objective="size")
    evaluator, source = evaluator_of(model, strict, space)
    with pytest.raises(BudgetError) as refused:
        verify_size(planner, evaluator, source, target)
    message = str(refused.value)
    assert message.startswith("--remove 12% is more than the budgets allow; the cheapest plan found removes ")
    assert "perplexity gave way, ΔPPL " in message
    assert "allowed +0.001" in message
    assert "as far as this search knows, --max-dppl 0.001 allows " in message
    assert message.endswith("; nothing written")
    with pytest.raises(BudgetError, match=r"perplexity gave way, .* on the selection text, where"):
        compressor.plan(model, profile, TEXT, max_dppl=0.001, remove="12%", objective="size", choices=FFNS)
    planner = make_planner(space, profile, loose, objective="size")
    evaluator, source = evaluator_of(model, loose, space)
    verified = verify_size(planner, evaluator, source, target)
    assert (verified.looks, verified.task_looks) == (1, {})
    assert planner.count_saved(verified.plan) >= target.parameters


def test_neither_a_budget_nor_a_size() -> None:
    model = tiny_model("gpt2")
    with pytest.raises(InputError, match="plan needs max_dppl, max_kl or remove"):
        compressor.plan(model, measure(model, TEXT), TEXT)
    with pytest.raises(InputError, match="could free at most"):
        compressor.plan(model, measure(model, TEXT), TEXT, remove="99%")


def test_without_a_limit_nothing_is_infinite_that_is_divided_by() -> None:
    limits = compute_limits(parse_budgets(None, ["a", "b"], 0.95), {"a": 20.0, "b": 30.0})
    assert not limits.limited
    assert str(limits) == "a no limit, b no limit"
    assert limits.nats["a"] / limits.nats["b"] == 1.0
    assert set(limits.allowed.values()) == {float("inf")}


# Searches without a model


@pytest.mark.parametrize("seed", range(12))
def test_few_trials_find_nearly_the_cheapest_plan(seed: int) -> None:
    """Predictions err by up to a half; what was found costs little more than what the true costs would give."""
    rng = random.Random(seed)
    runner = SimulatedRunner(draw_costs(rng))
    planner = planner_of(runner, {k: c * rng.uniform(0.67, 1.5) for k, c in runner.costs.items()}, limits_of("5%"))
    target = SizeTarget(Removal.parse("20%"), 12_000)
    trial = SizeSearch(planner, target).find_trial()
    assert trial.saved >= target.parameters
    assert trial.compensated
    assert len(runner.trials()) <= 5
    by_block: dict[int, list[Candidate]] = {}
    for (index, shape), cost in runner.costs.items():
        by_block.setdefault(index, []).append(Candidate(index, shape, shape.rank or 0, cost))
    best = cheapest_combination(list(by_block.values()), target.parameters)
    assert best is not None
    assert runner.true_cost(trial.shapes) <= 1.25 * best[1]


def test_a_block_that_costs_far_more_than_predicted_is_found_and_replaced_by_others() -> None:
    runner = SimulatedRunner(draw_costs(random.Random(3)))
    predictions = dict(runner.costs)
    for shape in [shape for index, shape in runner.costs if index == 5]:
        predictions[5, shape] = 1e-6
        runner.costs[5, shape] = 3.0
    planner = planner_of(runner, predictions, limits_of("5%"))
    target = SizeTarget(Removal.parse("30%"), 12_000)
    trial = SizeSearch(planner, target).find_trial()
    assert 5 not in trial.shapes
    assert trial.saved >= target.parameters
    assert len(runner.trials()) <= 10


def test_a_plan_that_overflows_is_not_returned() -> None:
    runner = SimulatedRunner(draw_costs(random.Random(1)))
    runner.overflows = {(4, Shape(shape.rank)) for index, shape in runner.costs if index == 4}
    predictions = {**runner.costs, **dict.fromkeys(runner.overflows, 0.0)}
    planner = planner_of(runner, predictions, limits_of("5%"))
    trial = SizeSearch(planner, SizeTarget(Removal.parse("40%"), 12_000)).find_trial()
    assert 4 not in trial.shapes
    assert trial.saved >= 4800
    with pytest.raises(BudgetError, match=r"at most 9,900 parameters .* can: .*4 \(.*overflow"):
        SizeSearch(planner, SizeTarget(Removal.parse("85%"), 12_000)).find_trial()
