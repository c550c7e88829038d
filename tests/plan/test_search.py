"""The planner on planted models: it finds what costs nothing, leaves alone what must not be touched, and stops."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from planted import FFNS, LinearFFN, WildFFN, planted_model, random_text
from torch import Tensor, nn
from zoo import WIDTH, logits, tiny_model

import compressor
from compressor.evaluate.budget import Budget
from compressor.evaluate.fidelity import evaluate_against, measure_source
from compressor.evaluate.perplexity import Losses, evaluate
from compressor.measure.moments import Moments
from compressor.measure.profile import measure, row_weights
from compressor.measure.verdicts import Verdict
from compressor.modeling_compressor import Replacement
from compressor.models.blocks import Block, Rows, backbone, capture_rows, find_blocks, find_branches
from compressor.models.residual import FITTING, calibration_streams
from compressor.patch.tree import patched
from compressor.plan import fit
from compressor.plan.api import fit_shapes, make_planner
from compressor.plan.candidates import kept_sets
from compressor.plan.fit import Fitter
from compressor.plan.frontier import Candidate, find_largest_plan, grow_plans, list_ranks, lower_hull
from compressor.plan.moments_store import collect_moments, open_store
from compressor.plan.search import Planner
from compressor.plan.shapes import Shape
from compressor.plan.space import prepare_search
from compressor.runtime.cache import Cache
from compressor.runtime.context import RunContext
from compressor.runtime.errors import BudgetError, InputError, NumericsError
from compressor.runtime.progress import Progress
from compressor.text import Text

TEXT = random_text()


def option(index: int, saved: int, damage: float) -> Candidate:
    return Candidate(index, Shape(saved), saved, damage)


@pytest.mark.parametrize("gated", [True, False])
def test_a_form_counts_what_its_module_has(gated: bool) -> None:
    for shape in (Shape(None), Shape(0), Shape(5), Shape(0, 7), Shape(5, 7), Shape(None, 7)):
        given = {"neurons": shape.neurons, "activation": "silu", "gated": gated} if shape.neurons else {}
        module = Replacement(WIDTH, shape.rank, **given)
        assert shape.parameters(WIDTH, (2 + gated) * WIDTH) == sum(p.numel() for p in module.parameters())
        assert shape.kind == module.kind


@pytest.mark.parametrize("width", [2, 32, 576, 768])
def test_every_rung_of_the_ladder_is_smaller_than_the_one_before(width: int) -> None:
    sizes = [Shape(rank).parameters(width, 0) for rank in list_ranks(width)]
    assert sizes == sorted(set(sizes), reverse=True)
    assert sizes[-1] == width


def test_the_frontier_is_convex_and_without_waste() -> None:
    options = [option(0, 10, 1.0), option(0, 20, 4.0), option(0, 30, 4.5), option(0, 40, 9.0), option(0, 35, 9.5)]
    assert [o.saved for o in lower_hull(options)] == [10, 30, 40]
    assert lower_hull([option(0, 10, 5.0), option(0, 20, 1.0)]) == [option(0, 20, 1.0)]
    assert lower_hull([option(0, -5, 0.0), option(0, 0, 0.0)]) == []


def test_plans_grow_by_the_cheapest_step() -> None:
    hulls = [[option(0, 10, 1.0), option(0, 20, 3.0)], [option(1, 10, 0.5), option(1, 30, 6.5)]]
    plans = grow_plans(hulls)
    chosen = [{index: shape.rank for index, shape in shapes.items()} for shapes, _ in plans]
    assert chosen == [{1: 10}, {0: 10, 1: 10}, {0: 20, 1: 10}, {0: 20, 1: 30}]
    assert [p[1] for p in plans] == pytest.approx([0.5, 1.5, 3.5, 9.5])


@pytest.mark.parametrize("last", [-1, 0, 1, 17, 39])
@pytest.mark.parametrize("error", [0.3, 1.0, 4.0])
def test_the_bracket_finds_the_last_plan_that_fits(last: int, error: float) -> None:
    """Whatever the predictions are worth: `error` times too small or too large."""
    plans = [({k: Shape(0)}, error * (k + 1)) for k in range(40)]
    asked: list[int] = []

    def measure_share(k: int) -> float:
        asked.append(k)
        return 0.5 + 0.5 * (k + 1) / (last + 1.5) if k <= last else 1.0 + (k - last) / 40

    found = find_largest_plan(plans, target=float(last + 1), measure_share=measure_share)
    assert (-1 if found is None else found) in range(max(-1, last - 8), last + 1)
    assert len(asked) == len(set(asked)) <= 7


def test_a_linear_block_is_replaced_for_nothing_and_the_others_are_left() -> None:
    """With a budget of next to nothing only the loss-free replacement happens."""
    model = planted_model(WildFFN(), LinearFFN(rank=5), WildFFN(seed=5))
    expected = logits(model)
    plan = compressor.plan(model, measure(model, TEXT), TEXT, max_dppl="0.01%", choices=FFNS)
    assert set(plan.shapes) == {1}
    assert plan.shapes[1].neurons == 0
    assert plan.shapes[1].rank is not None
    assert 5 <= plan.shapes[1].rank < WIDTH // 2
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
    planner = make_planner(prepare_search(model, TEXT, RunContext(), FFNS), profile, {"text": Budget.parse("20%")})
    assert planner.verdicts[0].word == "unsafe"
    assert "outlier rows" in planner.verdicts[0].reason
    assert planner.verdicts[1].word == "safe"
    plan = planner.search()
    assert 1 in plan.shapes
    assert 0 not in plan.shapes


def test_a_plan_that_verification_refused_does_not_come_back() -> None:
    model = tiny_model("llama")
    space = prepare_search(model, TEXT, RunContext())
    planner = make_planner(space, measure(model, TEXT), {"text": Budget.parse("4%", confidence=0)})
    found = planner.search()
    while True:
        try:
            smaller = planner.search(ceiling=0.8 * found.predicted)
        except BudgetError:
            break
        assert smaller.predicted < found.predicted
        assert smaller.shapes != found.shapes
        found = smaller


def test_a_block_without_output_is_free() -> None:
    model = tiny_model("gpt2")
    with torch.no_grad():
        model.transformer.h[1].mlp.c_proj.weight.zero_()
        model.transformer.h[1].mlp.c_proj.bias.zero_()
        model.lm_head.weight.mul_(30)
    space = prepare_search(model, TEXT, RunContext(), FFNS)
    assert min(c.damage for c in space.candidates[1].candidates) <= 1e-12
    profile = measure(model, TEXT)
    planner = make_planner(space, profile, {"text": Budget.parse("0.02%")}, objective="size")
    planner = Planner(space, planner.limits, {k: Verdict("safe", "") for k in range(3)}, objective="size")
    plan = planner.search()
    assert plan.shapes[1].kind == "bias"
    assert plan.selection["text"].delta == pytest.approx(0, abs=1e-4 * plan.selection["text"].baseline)


def test_weights_that_overflow_cost_the_candidate_and_not_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Block 1 is linear with a weight beyond half precision: as a linear map it cannot be stored."""
    model = planted_model(WildFFN(), LinearFFN(rank=5), LinearFFN(rank=4, seed=3))
    with torch.no_grad():
        model.transformer.h[1].mlp.weight.mul_(1e6)
    monkeypatch.setattr("compressor.plan.fit.stored_dtype", lambda _: torch.float16)
    said: list[str] = []
    progress = Progress(verbose=True)
    monkeypatch.setattr(progress, "say", said.append)
    context = RunContext(cache=Cache(None, progress), progress=progress)
    space = prepare_search(model, TEXT, context, FFNS)
    assert (1, Shape(None)) in space.runner.overflowing
    assert [p.index for p in space.calibrations["text"].points] == [0, 2]
    planner = make_planner(space, measure(model, TEXT), {"text": Budget.parse("0.5%")}, objective="size")
    plan = planner.search()
    assert 2 in plan.shapes
    assert all(p.isfinite().all() for module in plan.fits.values() for p in module.parameters())
    assert "  block 1 (linear) overflows, so it is left out" in said
    with pytest.raises(InputError, match=r"block 1 \(linear\) has weights that overflow in float16"):
        fit_shapes(model, {1: Shape(None)}, TEXT, RunContext())


def test_activations_that_overflow_cost_the_candidate_and_not_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    model = planted_model(WildFFN(), LinearFFN(rank=5), LinearFFN(rank=4, seed=3))

    def overflow(measured: Any, *rest: Any, **more: Any) -> Losses:
        block = measured.transformer.h[1].mlp
        if isinstance(block, Replacement) and block.kind == "lowrank":
            raise NumericsError("the model's loss is nan in window 0")
        return evaluate(measured, *rest, **more)

    monkeypatch.setattr("compressor.plan.trials.evaluate", overflow)
    space = prepare_search(model, TEXT, RunContext(), FFNS)
    planner = make_planner(space, measure(model, TEXT), {"text": Budget.parse("0.5%")}, objective="size")
    plan = planner.search()
    assert 2 in plan.shapes
    assert 1 not in plan.shapes or plan.shapes[1].kind != "lowrank"
    assert space.runner.overflowing
    assert all(index == 1 for index, _ in space.runner.overflowing)
    assert any(trial.overflows for trial in plan.trials)


def test_a_source_that_overflows_stays_an_error() -> None:
    model = tiny_model("gpt2")
    space = prepare_search(model, TEXT, RunContext())
    planner = make_planner(space, measure(model, TEXT), {"text": Budget.parse("5%")})
    with torch.no_grad():
        model.transformer.ln_f.weight.fill_(math.inf)
    with pytest.raises(InputError, match="overflow"):
        planner.search()


def test_nothing_fits() -> None:
    model = tiny_model("gpt2")
    with torch.no_grad():  # make every block matter
        for block in find_blocks(model):
            model.get_submodule(block.path).c_proj.weight.mul_(20)
    with pytest.raises(BudgetError, match=r"closest was block \d(\.attention)? \(.*\) with ΔPPL [+−]\d"):
        compressor.plan(model, measure(model, TEXT), TEXT, max_dppl=1e-6)


def test_a_larger_budget_saves_at_least_as_much() -> None:
    model = tiny_model("llama")
    with torch.no_grad():  # make it sure of what it says, so that every block matters
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.mul_(30)
        model.lm_head.weight.mul_(20)
    profile = measure(model, TEXT)
    space = prepare_search(model, TEXT, RunContext())
    saved = []
    for budget in ("1%", "4%", "30%"):
        plan = make_planner(space, profile, {"text": Budget.parse(budget, confidence=0)}).search()
        found = plan.selection["text"]
        assert found.delta <= Budget.parse(budget).allowed_rise(found.baseline) * 1.01
        saved.append(sum(space.runner.candidates[index].saved(shape) for index, shape in plan.shapes.items()))
    assert saved == sorted(saved)
    assert saved[-1] > saved[0]


@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_trial_that_begins_at_its_first_block_gives_the_whole_losses(first: int) -> None:
    model = sure_llama()
    runner = prepare_search(model, TEXT, RunContext()).runner
    shapes = {index: Shape(0, 20) for index in range(first, 3)}
    found = runner.measure(shapes, False, runner.text.selection)[0]
    assert runner.starts[TEXT.selection.sha256].position == first
    with patched(model, runner.blocks, runner.fit_modules(shapes, False)):
        assert torch.equal(found.nats, evaluate(model, TEXT.selection.windows).nats)


def sure_llama() -> Any:
    """A tiny model that is sure of what it says, so that every block matters."""
    model = tiny_model("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.mul_(30)
        model.lm_head.weight.mul_(20)
    return model


def test_a_limit_of_kl_gives_a_smaller_plan_that_holds() -> None:
    """On random tokens a changed model may be lucky: perplexity allows far more than fidelity does."""
    model = sure_llama()
    profile, context = measure(model, TEXT), RunContext()
    space = prepare_search(model, TEXT, context, fidelity=True)
    loose, none = {"text": Budget.parse("30%", confidence=0)}, {"text": Budget(math.inf, confidence=0)}
    plans = [
        make_planner(space, profile, loose).search(),
        make_planner(space, profile, loose, max_kl=0.5).search(),
        make_planner(space, profile, none, max_kl=0.5).search(),
        make_planner(space, profile, none, max_kl=0.05).search(),
    ]
    saved = [sum(space.runner.candidates[i].saved(shape) for i, shape in plan.shapes.items()) for plan in plans]
    assert saved[0] > saved[1]
    assert saved[2] >= saved[1] > 0
    assert saved[2] > saved[3] > 0
    assert [plan.fidelity["text"].kl <= limit for plan, limit in zip(plans[1:], (0.5, 0.5, 0.05), strict=True)] == [
        True
    ] * 3
    assert plans[0].fidelity["text"].kl > 0.5
    windows = TEXT.verification.windows
    _, reference = measure_source(model, windows, {"kind": "losses"}, context, identity={}, step="source")
    for plan, limit in zip(plans[1:], (0.5, 0.5, 0.05), strict=True):
        with patched(model, find_branches(model), plan.fits):
            _, found = evaluate_against(model, reference, windows, context)
        assert found.kl.mean() <= 1.15 * limit  # other windows of the same kind


def test_without_a_limit_of_kl_no_trial_measures_it() -> None:
    model = sure_llama()
    space = prepare_search(model, TEXT, RunContext())
    plan = make_planner(space, measure(model, TEXT), {"text": Budget.parse("30%", confidence=0)}).search()
    assert space.runner.reference is None
    assert plan.fidelity == {}
    with pytest.raises(AssertionError, match="trials for a limit of KL"):
        make_planner(space, measure(model, TEXT), {"text": Budget.parse("30%")}, max_kl=0.1)


def test_the_budget_that_is_missed_is_named() -> None:
    with pytest.raises(BudgetError, match=r"the budget KL 1e-09: closest was block \d(\.attention)? \(.*\) with KL \d"):
        compressor.plan(sure_llama(), measure(sure_llama(), TEXT), TEXT, max_kl=1e-9)
    with pytest.raises(InputError, match="plan needs max_dppl, max_kl or remove"):
        compressor.plan(tiny_model("gpt2"), measure(tiny_model("gpt2"), TEXT), TEXT)


def fitter_of(model: Any, text: Text = TEXT, cache: Cache | None = None) -> Fitter:
    store = open_store(model, text, RunContext(batch_size=7, cache=cache or Cache(None, Progress())), FFNS)
    return Fitter(store, store.candidates())


@pytest.mark.parametrize("shape", [Shape(None), Shape(0, 20), Shape(None, 20)])
def test_each_block_is_fitted_on_the_inputs_it_will_get(shape: Shape) -> None:
    """The second replacement nearly has the least error that such a module can have towards the original stream, on
    rows taken from the model with the first one in place. Fitted at once it is another one."""
    model = tiny_model("gpt2").double()
    blocks = find_blocks(model)
    fitter = fitter_of(model)
    fits = fitter.fit_in_order({0: Shape(0), 2: shape})
    wanted: list[Rows] = []
    rows: list[Rows] = []
    with torch.no_grad():
        with capture_rows(model, [blocks[2]], lambda _, r: wanted.append(r)):
            backbone(model)(input_ids=TEXT.fitting, use_cache=False)
        inside = {2: "transformer.h.2.mlp.c_proj"}
        with (
            patched(model, blocks, {0: fits[0]}),
            capture_rows(model, [blocks[2]], lambda _, r: rows.append(r), inside),
        ):
            backbone(model)(input_ids=TEXT.fitting, use_cache=False)
        x, a, y = rows[0].x, rows[0].a, rows[0].y + wanted[0].h - rows[0].h
        kept = kept_sets(shape, fitter.candidates[2].orders, x.device)[0]
        features = [torch.ones(len(x), 1, dtype=x.dtype), a[:, kept], *([x] if shape.rank is None else [])]
        weights = (1 / rows[0].h.square().mean(-1))[:, None].sqrt()
        least_squares = torch.linalg.lstsq(weights * torch.cat(features, 1), weights * y).solution
        least = (weights * (torch.cat(features, 1) @ least_squares - y)).square().sum()
        error = (weights * (fits[2](x) - y)).square().sum()
        at_once = (weights * (fitter.fit_at_once({2: shape})[2](x) - y)).square().sum()
    assert least <= error <= least * 1.1  # shrinking to the original weights costs a little on these rows
    assert error < at_once


def test_weights_are_rounded_to_the_storage_dtype_before_they_are_measured() -> None:
    model = tiny_model("gpt2")
    fitter = fitter_of(model)
    fitter.dtype = torch.bfloat16
    fits = fitter.fit_at_once({1: Shape(4, 9)})
    for parameter in fits[1].parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, parameter.bfloat16().float())


def test_fitting_again_gives_the_same_bytes() -> None:
    model = tiny_model("llama")
    first, second = (
        fit_shapes(model, {0: Shape(3), 1: Shape(2, 20), 2: Shape(0, 30)}, TEXT, RunContext()) for _ in range(2)
    )
    for index, module in first.items():
        for a, b in zip(module.parameters(), second[index].parameters(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("family", ["gpt2", "llama", "opt", "bloom"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_fits_go_on_where_they_stopped(
    family: str, stored: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many blocks were done: the same bytes, and only the others are fitted."""
    model, shapes = tiny_model(family), {0: Shape(3), 1: Shape(2, 20), 2: Shape(0, 30)}
    before = logits(model)
    fitter = fitter_of(model, cache=Cache(tmp_path / "cache", Progress()))
    fitter.dtype = stored
    whole = fitter.fit_in_order(shapes)
    keys = [fitter.key(shapes, index) for index in shapes]
    fitted: list[int] = []

    def count(model: Any, block: Block, *rest: Any, **options: Any) -> Moments:
        fitted.append(block.index)
        return collect_moments(model, block, *rest, **options)

    monkeypatch.setattr("compressor.plan.fit.collect_moments", count)
    for done in (3, 2, 1, 0):
        for key in keys[done:]:
            fitter.store.cache.place(key)[0].unlink()
        fitted.clear()
        again = fitter.fit_in_order(shapes)
        assert sorted(set(fitted)) == list(range(done, 3))
        for index, module in whole.items():
            assert again[index].spec() == module.spec()
            assert all(torch.equal(a, b) for a, b in zip(module.parameters(), again[index].parameters(), strict=True))
    other = fitter.fit_in_order({**shapes, 2: Shape(None)})  # another plan that begins in the same way
    assert set(fitted) == {0, 1, 2}
    assert torch.equal(other[1].output_bias, whole[1].output_bias)
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({7: Shape()}, "blocks 0 to 2"),
        ({1: Shape(WIDTH + 1)}, "whose width is 32"),
        ({1: Shape(0, 49)}, "which has 48 neurons"),
    ],
)
def test_a_plan_for_another_model_is_refused(shapes: dict[int, Shape], message: str) -> None:
    with pytest.raises(InputError, match=message):
        fit_shapes(tiny_model("gpt2"), shapes, TEXT, RunContext())


def test_a_failed_fit_leaves_the_model_alone() -> None:
    class Broken(nn.Module):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("broken")

    model = tiny_model("gpt2")
    fitter = fitter_of(model)
    model.transformer.h[2].mlp.act = Broken()
    with pytest.raises(RuntimeError, match="broken"):
        fitter.fit_in_order({0: Shape(1), 2: Shape(1)})
    assert not any(isinstance(module, Replacement) for module in model.modules())


def fresh_error(model: Any, module: Replacement, index: int, windows: Tensor) -> float:
    """The squared error of a replacement on rows that nothing was fitted on, with rows weighted as in the fit."""
    errors: list[Tensor] = []

    def add(_: Block, rows: Rows) -> None:
        error = (module(rows.x) - rows.y).double().square().sum(-1)
        errors.append(error * row_weights(rows.h))

    with torch.no_grad(), capture_rows(model, [find_blocks(model)[index]], add):
        model(input_ids=windows, use_cache=False)
    return torch.cat(errors).mean().item()


@pytest.mark.parametrize("compensated", [False, True])
def test_replacements_are_fitted_on_all_rows_once_their_strength_is_chosen(
    compensated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The held-out rows choose ridges; after that they are rows like others, and few rows gain by them."""
    model, text = tiny_model("llama"), random_text(20)
    store = open_store(model, text, RunContext(), FFNS)
    candidates = store.candidates()
    rows = text.calibration.windows.numel()
    assert [store.moments(index).rows for index in candidates] == [rows] * len(candidates)
    fitter = Fitter(store, candidates)
    seen: list[int] = []
    fit_shape = fit.fit_shape

    def watch(moments: Moments, *args: Any) -> Any:
        seen.append(moments.rows)
        return fit_shape(moments, *args)

    monkeypatch.setattr(fit, "fit_shape", watch)
    shape = Shape(0, 40)
    module = (fitter.fit_in_order if compensated else fitter.fit_at_once)({0: shape})[0]
    assert seen == [rows]
    if compensated:
        return
    block = find_blocks(model)[0]
    fitting = calibration_streams(model, store.layers, text, 8)[FITTING]
    some = collect_moments(model, block, store.units[0], fitting, fitter.device)
    assert some.rows == text.fitting.numel()
    chosen, outer, bias, root = fitter.prepare_block(0)
    fitted = fit_shape(some, bias, outer, shape, chosen.orders, root, chosen.ridges)
    windows = random_text(60, seed=9).calibration.windows
    before = fitter.make_module(chosen, shape, fitted)
    assert fresh_error(model, module, 0, windows) < fresh_error(model, before, 0, windows)
