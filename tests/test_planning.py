"""The planner on planted models: it finds what costs nothing, leaves alone what must not be touched, and stops."""

from __future__ import annotations

import pytest
import torch
from planted import LinearFFN, WildFFN, planted_model, random_text
from torch import nn
from zoo import WIDTH, logits, tiny_model

import compressor
from compressor.blocks import Block, Rows, find_blocks, watch
from compressor.budget import Budget
from compressor.errors import BudgetError, InputError
from compressor.evaluating import evaluate
from compressor.fitting import Calibration, fit, replacement_parameters
from compressor.frontier import Option, bracket, efficient, ladder_of, sequence
from compressor.measuring import body, measure
from compressor.modeling_compressor import Replacement
from compressor.patching import patched
from compressor.planning import Planner, fit_ranks
from compressor.progress import Progress

TEXT = random_text()


def option(index: int, saved: int, damage: float) -> Option:
    return Option(index, saved, saved, damage)


def test_replacement_parameters_are_what_the_module_has() -> None:
    for rank in (None, 0, 5):
        module = Replacement(WIDTH, rank)
        assert replacement_parameters(WIDTH, rank) == sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("width", [2, 32, 576, 768])
def test_every_rung_of_the_ladder_is_smaller_than_the_one_before(width: int) -> None:
    sizes = [replacement_parameters(width, rank) for rank in ladder_of(width)]
    assert sizes == sorted(set(sizes), reverse=True)
    assert sizes[-1] == width


def test_the_frontier_is_convex_and_without_waste() -> None:
    options = [option(0, 10, 1.0), option(0, 20, 4.0), option(0, 30, 4.5), option(0, 40, 9.0), option(0, 35, 9.5)]
    assert [o.saved for o in efficient(options)] == [10, 30, 40]
    assert efficient([option(0, 10, 5.0), option(0, 20, 1.0)]) == [option(0, 20, 1.0)]
    assert efficient([option(0, -5, 0.0), option(0, 0, 0.0)]) == []


def test_plans_grow_by_the_cheapest_step() -> None:
    hulls = [[option(0, 10, 1.0), option(0, 20, 3.0)], [option(1, 10, 0.5), option(1, 30, 6.5)]]
    plans = sequence(hulls)
    assert [p[0] for p in plans] == [{1: 10}, {0: 10, 1: 10}, {0: 20, 1: 10}, {0: 20, 1: 30}]
    assert [p[1] for p in plans] == pytest.approx([0.5, 1.5, 3.5, 9.5])


@pytest.mark.parametrize("last", [-1, 0, 1, 17, 39])
@pytest.mark.parametrize("error", [0.3, 1.0, 4.0])
def test_the_bracket_finds_the_last_plan_that_fits(last: int, error: float) -> None:
    """Whatever the predictions are worth: `error` times too small or too large."""
    plans = [({k: 0}, error * (k + 1)) for k in range(40)]
    asked: list[int] = []

    def spend(k: int) -> float:
        asked.append(k)
        return 0.5 + 0.5 * (k + 1) / (last + 1.5) if k <= last else 1.0 + (k - last) / 40

    found = bracket(plans, target=float(last + 1), spend=spend)
    assert (-1 if found is None else found) in range(max(-1, last - 8), last + 1)
    assert len(asked) == len(set(asked)) <= 7


def test_a_linear_block_is_replaced_for_nothing_and_the_others_are_left() -> None:
    """With a budget of next to nothing only the loss-free replacement happens."""
    model = planted_model(WildFFN(), LinearFFN(rank=5), WildFFN(seed=5))
    expected = logits(model)
    plan = compressor.plan(model, measure(model, TEXT), TEXT, max_dppl="0.01%")
    assert set(plan.ranks) == {1}
    assert plan.ranks[1] is not None
    assert 5 <= plan.ranks[1] < WIDTH // 2
    assert plan.selection["text"].delta == pytest.approx(0, abs=1e-3 * plan.selection["text"].baseline)
    assert torch.equal(logits(model), expected), "searching must not change the model"
    before = evaluate(model, TEXT.verification.windows).perplexity
    compressor.apply(model, plan, TEXT)
    assert isinstance(model.transformer.h[1].mlp, Replacement)
    assert evaluate(model, TEXT.verification.windows).perplexity == pytest.approx(before, rel=1e-4)


def test_a_block_that_is_linear_by_its_outlier_rows_is_not_touched() -> None:
    model = planted_model(WildFFN(outliers=300.0), LinearFFN(), WildFFN(), mark_first_position=True)
    profile = measure(model, TEXT)
    assert profile.blocks[0].r2_lin > 0.9
    planner = Planner(model, profile, TEXT, {"text": Budget.parse("20%")})
    assert planner.verdicts[0].word == "unsafe"
    assert "outlier rows" in planner.verdicts[0].reason
    assert planner.verdicts[1].word == "safe"
    plan = planner.search()
    assert 1 in plan.ranks
    assert 0 not in plan.ranks


def test_a_plan_that_verification_refused_does_not_come_back() -> None:
    model = tiny_model("llama")
    planner = Planner(model, measure(model, TEXT), TEXT, {"text": Budget.parse("4%", confidence=0)})
    found = planner.search()
    while True:
        try:
            smaller = planner.search(ceiling=0.95 * found.predicted)
        except BudgetError:
            break
        assert smaller.predicted < found.predicted
        assert smaller.ranks != found.ranks
        found = smaller


def test_nothing_fits() -> None:
    model = tiny_model("gpt2")
    with torch.no_grad():  # make every block matter
        for block in find_blocks(model):
            model.get_submodule(block.path).c_proj.weight.mul_(20)
    with pytest.raises(BudgetError, match=r"closest was block \d \(.*\) with ΔPPL [+-]\d"):
        compressor.plan(model, measure(model, TEXT), TEXT, max_dppl=1e-6)


def test_a_larger_budget_saves_at_least_as_much() -> None:
    model = tiny_model("llama")
    profile = measure(model, TEXT)
    blocks = {p.block.index: p.block for p in profile.blocks}
    saved = []
    for budget in ("1%", "4%", "30%"):
        plan = compressor.plan(model, profile, TEXT, max_dppl=budget, confidence=0)
        found = plan.selection["text"]
        assert found.delta <= Budget.parse(budget).dppl(found.baseline) * 1.01
        sizes = (blocks[i].parameters - replacement_parameters(blocks[i].width, r) for i, r in plan.ranks.items())
        saved.append(sum(sizes))
    assert saved == sorted(saved)
    assert saved[-1] > saved[0]


def test_each_block_is_fitted_on_the_inputs_it_will_get() -> None:
    """The second replacement equals a fit on rows taken from the model with the first one in place."""
    model = tiny_model("gpt2").double()
    blocks = find_blocks(model)
    calibration = Calibration(model, blocks, TEXT, 7)
    fits = fit(calibration, {0: 0, 2: None}, {}, torch.float64, Progress())
    rows: list[Rows] = []
    with torch.no_grad(), patched(model, blocks, {0: fits[0]}):
        with watch(model, [blocks[2]], lambda _, r: rows.append(r)):
            body(model)(input_ids=TEXT.fitting, use_cache=False)
        weights = (1 / rows[0].h.square().mean(-1))[:, None].sqrt()
        x = torch.cat([rows[0].x, torch.ones(len(rows[0].x), 1)], dim=1)
        best = torch.linalg.lstsq(weights * x, weights * rows[0].y).solution
        error = (weights * (fits[2](rows[0].x) - rows[0].y)).square().sum()
        least = (weights * (x @ best - rows[0].y)).square().sum()
    assert error <= least * 1.02  # the ridge may cost a little on the rows it was fitted on
    one_shot = fit(calibration, {2: None}, {}, torch.float64, Progress())
    assert (one_shot[2].weight - fits[2].weight).abs().max() > 1e-3


def test_weights_are_rounded_to_the_storage_dtype_before_they_are_measured() -> None:
    model = tiny_model("gpt2")
    fits = fit(Calibration(model, find_blocks(model), TEXT, 8), {1: 4}, {}, torch.bfloat16, Progress())
    for parameter in fits[1].parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, parameter.bfloat16().float())


def test_fitting_again_gives_the_same_bytes() -> None:
    model = tiny_model("llama")
    first, second = (fit_ranks(model, {0: 3, 1: None, 2: 0}, TEXT) for _ in range(2))
    for index, module in first.items():
        for a, b in zip(module.parameters(), second[index].parameters(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(("ranks", "message"), [({7: None}, "blocks 0 to 2"), ({1: WIDTH + 1}, "whose width is 32")])
def test_a_plan_for_another_model_is_refused(ranks: dict[int, int | None], message: str) -> None:
    with pytest.raises(InputError, match=message):
        fit_ranks(tiny_model("gpt2"), ranks, TEXT)


def test_a_failed_fit_leaves_the_model_alone() -> None:
    class Broken(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("broken")

    model = tiny_model("gpt2")
    blocks: list[Block] = find_blocks(model)
    calibration = Calibration(model, blocks, TEXT, 8)
    model.transformer.h[2].mlp = Broken(model.transformer.h[2].mlp)
    with pytest.raises(RuntimeError, match="broken"):
        fit(calibration, {0: 1, 2: 1}, {}, torch.float32, Progress())
    assert not any(isinstance(module, Replacement) for module in model.modules())
