"""Attention in the plan: its name, its moments, its predicted damage, its place among the fits, its limits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import Compress, Refused, sentences
from planted import random_text
from planted_attention import loud_model
from torch import Tensor
from zoo import FAMILIES, REPRESENTATIVE, logits, tiny_model, tokens

import compressor
from compressor.evaluate.budget import Budget
from compressor.measure.moments import Moments
from compressor.measure.profile import measure, row_weights
from compressor.modeling_compressor import KeptHeads, Replacement
from compressor.models.blocks import AttentionOf, Block, BranchIndex, Rows, backbone, capture_rows, find_branches
from compressor.models.heads import Heads, anchor_layers
from compressor.models.residual import FITTING, HELD_OUT, calibration_streams, measure_stream_gain, open_stream
from compressor.patch.checkpoint import count_parameters
from compressor.patch.tree import patched
from compressor.pipelines.recipe import Recipe, dump, resolve
from compressor.plan.api import fit_shapes, make_planner
from compressor.plan.candidates import (
    fit_ladder,
    fit_shape,
    kept_sets,
    linear_moments,
    moments_for,
    output_weights,
)
from compressor.plan.choices import BlockRange, Choices, resolve_choices
from compressor.plan.fit import Fitter
from compressor.plan.moments_store import collect_moments, open_store, output_bias
from compressor.plan.selection import factor_metric
from compressor.plan.shapes import Shape
from compressor.plan.space import prepare_search
from compressor.runtime.cache import Cache
from compressor.runtime.context import RunContext
from compressor.runtime.errors import InputError
from compressor.runtime.progress import Progress

TEXT = random_text()
ATTENTION = Choices(branches=("attention",))
FIRST, SECOND, THIRD = map(AttentionOf, range(3))
NORMED = ("gemma2", "gemma3", "gemma3-vision", "glm4", "olmo2", "opt-350m")


# The words


@pytest.mark.parametrize(
    ("only", "skip", "branches", "found", "searched"),
    [
        (["7.attention"], None, "all", {AttentionOf(7)}, {"attention"}),
        (["0-2.attention"], None, "all", set(map(AttentionOf, range(3))), {"attention"}),
        (["3.ffn"], None, "all", {3}, {"ffn"}),
        (["0-1", "1.attention"], None, "all", {0, 1, AttentionOf(1)}, {"ffn", "attention"}),
        (["0-3.attention"], ["1-2.attention"], "attention", {AttentionOf(0), AttentionOf(3)}, {"attention"}),
        (None, ["0-8.attention"], "all", set(range(9)), {"ffn"}),
        (None, ["0-8"], "all", set(map(AttentionOf, range(9))), {"attention"}),
        (None, ["0-8"], "attention", None, {"attention"}),
        (None, ["2.attention"], "ffn", None, {"ffn"}),
        (None, None, "all", None, {"ffn", "attention"}),
    ],
)
def test_branches_are_named(
    only: list[str] | None, skip: list[str] | None, branches: str, found: set[BranchIndex] | None, searched: set[str]
) -> None:
    words = ("ffn", "attention") if branches == "all" else (branches,)
    choices = resolve_choices(9, only=only, skip=skip, branches=words)
    assert choices.blocks == found
    assert set(choices.searched_branches) == searched
    everything: list[BranchIndex] = [*range(9), *map(AttentionOf, range(9))]
    allowed = {index for index in everything if choices.allows_block(index)}
    assert allowed == (found or {index for index in everything if branches in ("all", branch_name(index))})


def branch_name(index: BranchIndex) -> str:
    return "attention" if isinstance(index, AttentionOf) else "ffn"


@pytest.mark.parametrize(
    ("only", "skip", "branches", "says"),
    [
        (["7.attention"], None, ["ffn"], "--blocks 7.attention is attention, and --branches ffn leaves it as it is"),
        (["7"], None, ["attention"], "--blocks 7 is ffn, and --branches attention leaves it as it is"),
        (["0-9.attention"], None, ["attention"], "--blocks 0-9.attention: the model has blocks 0 to 8"),
        (None, ["9.attention"], ["ffn", "attention"], "--skip 9.attention: the model has blocks 0 to 8"),
        (None, ["0-8.attention"], ["attention"], "--blocks and --skip leave no block to replace"),
        (["1.attention"], ["1.attention"], ["attention"], "--blocks and --skip leave no block to replace"),
    ],
)
def test_contradictions_are_told(
    only: list[str] | None, skip: list[str] | None, branches: list[str], says: str
) -> None:
    with pytest.raises(InputError) as refused:
        resolve_choices(9, only=only, skip=skip, branches=branches)
    assert str(refused.value).startswith(says)


@pytest.mark.parametrize(
    "word",
    ["attention", "7.", ".attention", "7.heads", "7.Attention", "7.attention-9", "7.attention.ffn", "7 attention"],
)
def test_no_branch(word: str) -> None:
    with pytest.raises(InputError, match=r"--blocks takes numbers of blocks and ranges, got .*; try .* 7\.attention"):
        BlockRange.parse("--blocks", word)


@pytest.mark.parametrize("word", ["7.attention", "0-2.attention", "3", "1-4"])
def test_a_range_is_read_back_from_what_it_prints(word: str) -> None:
    assert str(BlockRange.parse("--blocks", word)) == word


def test_branches_of_a_recipe(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("branches: attention\nblocks: [1.attention, 3-4.attention]\nskip: 4.attention\n", encoding="utf-8")
    recipe = resolve(file, {})
    assert recipe.choices(7).blocks == {AttentionOf(1), AttentionOf(3)}
    file.write_text(dump(recipe, "header"), encoding="utf-8")
    assert resolve(file, {}) == recipe
    assert resolve(file, {"branches": ["all"], "blocks": ["2"], "skip": ["0"]}).choices(7).blocks == {2}
    for words in (["all"], ["ffn,attention"], ["attention", "ffn"], ["attention,all"]):
        assert Recipe(branches=words).choices(7) == Choices()
    assert Recipe().choices(7) == Choices(branches=("ffn",))
    file.write_text("branches: [ffn, heads]\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"--branches heads is not known; use ffn, attention or all$"):
        resolve(file, {})


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--branches", "heads"], "--branches heads is not known; use ffn, attention or all"),
        (["--branches", "ffn", "--blocks", "1.attention"], "and --branches ffn leaves it as it is"),
        (["--blocks", "3.attention"], "--blocks 3.attention: the model has blocks 0 to 2"),
        (["--branches", "attention", "--skip", "0-2.attention"], "leave no block to replace"),
        (["--blocks", "1.heads"], "--blocks takes numbers of blocks and ranges, got '1.heads'"),
    ],
)
def test_the_command_refuses_it_in_one_line(
    refused: Refused, models: Path, options: list[str], words: list[str], says: str
) -> None:
    for command in (["plan"], []):
        out = ["--out", "plan.json" if command else "out"]
        assert says in refused(*command, models / "llama", *options, "--max-dppl", "1%", *words, *out)


# What is measured


def captured(model: Any, index: BranchIndex, windows: Tensor, inner_path: str | None = None) -> Rows:
    """The rows of one branch, from one plain pass of the model."""
    block = next(block for block in find_branches(model) if block.index == index)
    rows: list[Rows] = []
    inside = {index: inner_path} if inner_path else None
    with torch.no_grad(), capture_rows(model, [block], lambda _, found: rows.append(found), inside):
        backbone(model)(input_ids=windows, use_cache=False)
    return rows[0]


def with_ones(x: Tensor) -> Tensor:
    return torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], dim=1)


def direct_r2(fit: Rows, held: Rows, weigh: bool) -> float:
    """R² on held-out rows of the least-squares map of the fitted ones."""
    roots = [
        row_weights(rows.h).sqrt()[:, None] if weigh else torch.ones(len(rows.h), 1).double() for rows in (fit, held)
    ]
    weight = torch.linalg.lstsq(roots[0] * with_ones(fit.x), roots[0] * fit.y, driver="gelsd").solution
    shares = roots[1].square() / roots[1].square().sum()
    mean = (shares * held.y).sum(0)
    errors = (shares * (with_ones(held.x) @ weight - held.y).square()).sum()
    return 1 - (errors / (shares * (held.y - mean).square()).sum()).item()


@pytest.mark.parametrize("family", [*REPRESENTATIVE, "falcon-new", "olmo2"])
def test_one_pass_measures_what_raw_rows_say(family: str) -> None:
    """R² and the moments of every branch, from the pass that serves both of them, against least squares in float64."""
    model = tiny_model(family).double()
    store = open_store(model, TEXT, RunContext())
    profile = measure(model, TEXT, beside=[store.collector()], states=store.states)
    assert [p.block.index for p in profile.branches] == [FIRST, 0, SECOND, 1, THIRD, 2]
    for p in profile.attention:
        units = store.units[p.block.index]
        path = units.outer_path if units else None
        fit, held = (captured(model, p.block.index, windows, path) for windows in (TEXT.fitting, TEXT.held_out))
        assert p.r2_lin == pytest.approx(direct_r2(fit, held, weigh=False), abs=1e-7)
        assert p.r2_stream == pytest.approx(direct_r2(fit, held, weigh=True), abs=1e-7)
        found = store.moments(p.block.index)
        whole = captured(model, p.block.index, TEXT.calibration.windows, path)
        z, weights = torch.cat([whole.x, whole.a], dim=1), row_weights(whole.h)
        mean = (weights[:, None] * z).sum(0) / weights.sum()
        assert found.rows == len(z)
        torch.testing.assert_close(found.mean_x, mean)
        torch.testing.assert_close(found.xx, (weights[:, None] * (z - mean)).T @ (z - mean), rtol=1e-6, atol=1e-6)


# What a replacement is predicted to cost


def gradients_by_autograd(model: Any, block: Block, windows: Tensor) -> Tensor:
    """The gradient of the summed loss at a branch's output, row by row, from one backward pass of the whole model."""
    seen: list[Tensor] = []

    def watch(_: Any, __: Any, output: Any) -> None:
        output[0].retain_grad()
        seen.append(output[0])

    handle = model.get_submodule(block.path).register_forward_hook(watch)
    try:
        with torch.enable_grad():
            model.requires_grad_(True)
            found = model(input_ids=windows, use_cache=False).logits[:, :-1].flatten(0, 1)
            torch.nn.functional.cross_entropy(found, windows[:, 1:].flatten(), reduction="sum").backward()
    finally:
        handle.remove()
        model.zero_grad()
    assert seen[0].grad is not None
    return seen[0].grad.reshape(-1, block.width)


@pytest.mark.parametrize("family", ["gpt2", "llama", "bloom", "falcon-new", "gemma2"])
def test_predicted_damage_is_that_of_the_rows(family: str) -> None:
    """½·E[(g·e)²] and the slope E[g·e], with g of a plain backward pass and e what the replaced attention says."""
    model = tiny_model(family).double()
    store = open_store(model, TEXT, RunContext(), ATTENTION)
    found, block = store.candidates()[THIRD], store.blocks[THIRD]
    units = found.units
    assert isinstance(units, Heads)
    g = gradients_by_autograd(model, block, TEXT.held_out)
    original = captured(model, THIRD, TEXT.held_out)
    streams = calibration_streams(model, store.layers, TEXT, 8, parts=(FITTING, HELD_OUT))
    moments = []
    for stream in streams.values():
        stream.advance(2)
        moments.append(collect_moments(model, block, units, stream, stream.states[0].device))
    outer, bias = output_weights(block, units, g.device), output_bias(block, units, g.device)
    fitter = Fitter(store, {THIRD: found})

    linear = [linear_moments(moments_for(m, block, units, Shape(None)), outer, bias) for m in moments]
    ladder = fit_ladder(linear[0], linear[1], found.metric)
    kinds = set()
    for candidate in store.find_candidates()[THIRD].candidates:  # with slopes that are not shrunk
        shape = candidate.shape
        kinds.add(shape.kind)
        if shape.kind in ("linear", "lowrank"):
            error = ladder.at(block.width if shape.rank is None else shape.rank)(original.x) - original.y
        else:
            root = factor_metric(found.metric)
            fitted = fit_shape(moments[0], bias, outer, shape, found.orders, root, found.ridges)
            module = fitter.make_module(found, shape, fitted)
            with patched(model, find_branches(model), {THIRD: module}):
                error = captured(model, THIRD, TEXT.held_out).y - original.y
        projected = (g * error).sum(1)
        assert candidate.damage == pytest.approx(projected.square().mean().item() / 2, rel=1e-4), shape
        assert candidate.slope == pytest.approx(projected.mean().item(), rel=1e-4, abs=1e-9), shape
    assert kinds == {"linear", "lowrank", "pruned", "hybrid", "bias"}


# What a replacement saves

COUNTED = ["gpt2", "llama", "opt", "bloom", "falcon-new", "phi3", "gemma2", "gpt_neox", "qwen3", "olmo2", "mpt", "gptj"]


@pytest.mark.parametrize("family", COUNTED)
def test_what_is_counted_as_saved_vanishes(family: str) -> None:
    """Of every kind, in attention and in the FFN beside it: as many parameters go as the trial says."""
    model = tiny_model(family)
    space = prepare_search(model, TEXT, RunContext())
    runner, before = space.runner, count_parameters(model)
    heads = family != "olmo2"
    for kind in ("linear", "lowrank", "bias", *(["pruned", "hybrid"] if heads else [])):
        shapes: dict[BranchIndex, Shape] = {}
        for index in (SECOND, 2, THIRD):
            of_kind = [c for c in space.candidates[index].candidates if c.shape.kind == kind]
            if of_kind:
                shapes[index] = of_kind[0].shape
        assert THIRD in shapes
        assert SECOND in shapes or SECOND.layer in anchor_layers(model)
        trial = runner.attempt(shapes, 0.0)
        fits = runner.fit_modules(shapes, False)
        with patched(model, runner.blocks, fits):
            assert before - count_parameters(model) == trial.saved
            assert logits(model).isfinite().all()
        for index in filter(fits.__contains__, (SECOND, THIRD)):
            module = fits[index]
            assert module.kind == kind
            if kind in ("linear", "lowrank"):
                assert isinstance(module, Replacement)
                has_bias = any("bias" in name for name, _ in module.named_parameters())
                assert has_bias == biased_output(model, index)


def biased_output(model: Any, index: BranchIndex) -> bool:
    """Whether the output projection of this attention has a bias; where heads are not known, a map has one anyway."""
    block = next(block for block in find_branches(model) if block.index == index)
    module = model.get_submodule(block.path)
    names = ("o_proj", "c_proj", "out_proj", "dense")
    output = next(getattr(module, name) for name in names if hasattr(module, name))
    return output.bias is not None or model.config.model_type == "olmo2"


# How a layer adds its attention


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gain_of_attention(family: str) -> None:
    """In sequence, in parallel with the FFN, with the residual inside, scaled; behind a norm there is none."""
    model = tiny_model(family, **({"residual_multiplier": 0.22} if family == "granite" else {}))
    attention = find_branches(model, ("attention",))
    stream = open_stream(model, find_branches(model, ("ffn",)), TEXT.held_out[:4], 4)
    assert attention
    for block in attention:
        stream.advance(block.layer)
        gain = measure_stream_gain(model, block, stream)
        if family in NORMED:
            assert gain is None
        else:
            assert gain == pytest.approx(0.22 if family == "granite" else 1.0, rel=1e-3)


# Fits in order


def attended_shapes(family: str) -> dict[BranchIndex, Shape]:
    return {
        FIRST: Shape(0, 1),
        0: Shape(3),
        SECOND: Shape(None),
        1: Shape(2, 20),
        THIRD: Shape(0) if family == "olmo2" else Shape(3, 1),
        2: Shape(0, 30),
    }


def fitter_of(model: Any, cache: Cache | None = None) -> Fitter:
    store = open_store(model, TEXT, RunContext(batch_size=7, cache=cache or Cache(None, Progress())))
    return Fitter(store, store.candidates())


def assert_same(fits: Mapping[BranchIndex, Any], others: Mapping[BranchIndex, Any]) -> None:
    assert fits.keys() == others.keys()
    for index, module in fits.items():
        assert others[index].spec() == module.spec()
        ours, theirs = module.state_dict(), others[index].state_dict()
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


@pytest.mark.parametrize("family", ["gpt2", "llama", "bloom", "gpt_neox", "gemma2"])
def test_a_killed_fit_goes_on_where_it_stopped(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it is killed, between the attention of a layer and its FFN too: the same bytes, in the same order."""
    model, shapes = tiny_model(family), attended_shapes(family)
    before = logits(model)
    whole = fitter_of(model).fit_in_order(shapes)
    assert list(whole) == [FIRST, 0, SECOND, 1, THIRD, 2]
    fitted: list[BranchIndex] = []

    def collect(last: int) -> Any:
        def run(model: Any, block: Block, *rest: Any, **options: Any) -> Moments:
            if block.index not in fitted:
                if len(fitted) == last:
                    raise KeyboardInterrupt
                fitted.append(block.index)
            return collect_moments(model, block, *rest, **options)

        return run

    for killed in range(1, 6):
        cache = Cache(tmp_path / str(killed), Progress())
        fitted.clear()
        monkeypatch.setattr("compressor.plan.fit.collect_moments", collect(killed))
        with pytest.raises(KeyboardInterrupt):
            fitter_of(model, cache).fit_in_order(shapes)
        assert torch.equal(logits(model), before)
        fitted.clear()
        monkeypatch.setattr("compressor.plan.fit.collect_moments", collect(-1))
        assert_same(fitter_of(model, cache).fit_in_order(shapes), whole)
        assert fitted == list(whole)[killed:]
        assert torch.equal(logits(model), before)


@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
def test_kept_states_change_no_fit(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, shapes = tiny_model(family), attended_shapes(family)
    fitters = [fitter_of(model)]
    monkeypatch.setattr("compressor.models.layer_states.ROOM_SHARE", 0.0)
    fitters.append(fitter_of(model))
    assert [fitter.store.states.keeps for fitter in fitters] == [True, False]
    assert_same(*(fitter.fit_in_order(shapes) for fitter in fitters))


@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt_neox"])
@pytest.mark.parametrize(
    ("first", "second", "shape"),
    [
        (SECOND, 1, Shape(None)),  # the FFN of the same layer
        (SECOND, 1, Shape(0, 20)),
        (0, SECOND, Shape(None)),
        (0, SECOND, Shape(0, 1)),
        (FIRST, THIRD, Shape(None)),
    ],
)
def test_each_branch_is_fitted_on_the_inputs_it_will_get(
    family: str, first: BranchIndex, second: BranchIndex, shape: Shape
) -> None:
    """The second replacement nearly has the least error that such a module can have towards the original stream, on
    rows taken from the model with the first one in place. Fitted at once it is another one."""
    model = loud_model(family).double() if family != "gpt_neox" else tiny_model(family).double()
    fitter = fitter_of(model)
    hard = Shape(0, 1) if first == FIRST else Shape(0)
    fits = fitter.fit_in_order({first: hard, second: shape})
    units = fitter.candidates[second].units
    assert units is not None
    branches, windows = find_branches(model), TEXT.fitting
    wanted = captured(model, second, windows)
    with patched(model, branches, {first: fits[first]}):
        rows = captured(model, second, windows, units.outer_path)
    target, weights = rows.y + wanted.h - rows.h, row_weights(rows.h).sqrt()[:, None]
    kept = kept_sets(shape, fitter.candidates[second].orders, rows.x.device, units.columns)[0]
    unbiased = isinstance(second, AttentionOf) and shape.rank is None and not biased_output(model, second)
    features = [rows.a[:, kept], *([rows.x] if shape.rank is None else [])]
    features += [] if unbiased else [torch.ones(len(rows.x), 1, dtype=rows.x.dtype)]
    z = torch.cat(features, dim=1)
    solution = torch.linalg.lstsq(weights * z, weights * target, driver="gelsd").solution
    least = (weights * (z @ solution - target)).square().sum()

    def error_of(module: Any) -> Tensor:
        with patched(model, branches, {first: fits[first], second: module}):
            return (weights * (captured(model, second, windows).y - target)).square().sum()

    error, at_once = error_of(fits[second]), error_of(fitter.fit_at_once({second: shape})[second])
    assert least * (1 - 1e-9) <= error <= least * 1.25  # shrinking to the original weights costs a little on these rows
    assert error < at_once


# Layers that caches ask for their length


@pytest.mark.parametrize(("family", "anchors"), [("llama", {0}), ("gpt2", {0}), ("gemma2", {0, 1}), ("olmo2", {0})])
def test_no_search_takes_the_last_head_of_an_anchor(family: str, anchors: set[int]) -> None:
    """A budget for anything: every other layer loses all of its heads."""
    model = tiny_model(family)
    assert anchor_layers(model) == anchors
    space = prepare_search(model, TEXT, RunContext(), ATTENTION)
    for layer in anchors:
        assert all(c.shape.neurons for c in space.candidates[AttentionOf(layer)].candidates)
    profile = measure(model, TEXT, branches=("attention",))
    planner = make_planner(space, profile, {"text": Budget.parse("1000%", confidence=0)}, objective="size")
    plan = planner.search()
    for trial in plan.trials:
        assert all(trial.shapes.get(AttentionOf(layer), Shape(0, 1)).neurons for layer in anchors)
    assert {index for index, shape in plan.shapes.items() if not shape.neurons} == {
        AttentionOf(layer) for layer in range(3) if layer not in anchors
    }
    compressor.apply(model, plan, TEXT)
    assert model.generate(tokens(2, 5), max_new_tokens=4, do_sample=False).shape == (2, 9)


@pytest.mark.parametrize(
    ("family", "shapes", "says"),
    [
        ("llama", {FIRST: Shape(None)}, r"takes all heads from 0\.attention, but caches ask this layer"),
        ("llama", {FIRST: Shape(0)}, r"takes all heads from 0\.attention"),
        ("gemma2", {SECOND: Shape(4)}, r"takes all heads from 1\.attention"),
        ("llama", {SECOND: Shape(0, 3)}, r"keeps 3 heads in block 1\.attention, which has 2 heads"),
        ("llama", {SECOND: Shape(0, 2)}, r"keeps 2 heads in 1\.attention: name fewer heads"),
        ("llama", {SECOND: Shape(None, 1)}, r"keeps 1 head \+ linear in 1\.attention: name .* a low rank"),
        ("llama", {SECOND: Shape(33)}, r"wants rank 33 in block 1\.attention, whose width is 32"),
        ("olmo2", {SECOND: Shape(0, 1)}, r"keeps 1 heads in block 1\.attention, which has no heads that are known"),
        ("llama", {AttentionOf(7): Shape()}, r"replaces block 7\.attention, but the model has blocks 0 to 2"),
    ],
)
def test_a_plan_that_attention_cannot_take_is_refused(family: str, shapes: dict[Any, Shape], says: str) -> None:
    model = tiny_model(family)
    before = logits(model)
    for run in (lambda: fit_shapes(model, shapes, TEXT, RunContext()), lambda: compressor.apply(model, shapes, TEXT)):
        with pytest.raises(InputError, match=says) as refused:
            run()
        assert "\n" not in str(refused.value)
    assert torch.equal(logits(model), before)


# Searches


def test_attention_whose_heads_cannot_be_told_apart_may_become_linear() -> None:
    model = tiny_model("olmo2")
    choices = Choices(kinds=("linear",), branches=("attention",))
    plan = compressor.plan(model, measure(model, TEXT), TEXT, max_dppl="1000%", objective="size", choices=choices)
    assert plan.shapes == {SECOND: Shape(None), THIRD: Shape(None)}
    before = count_parameters(model)
    compressor.apply(model, plan, TEXT)
    assert [type(layer.self_attn) for layer in model.model.layers][1:] == [Replacement, Replacement]
    assert count_parameters(model) < before
    assert logits(model).isfinite().all()


def test_a_profile_of_both_branches_serves_a_search_of_one() -> None:
    model = tiny_model("llama")
    profile = measure(model, TEXT)
    for choices in (Choices(blocks=(1,)), Choices(blocks=(SECOND,)), ATTENTION):
        plan = compressor.plan(model, profile, TEXT, max_dppl="50%", objective="size", choices=choices)
        assert plan.shapes
        assert all(choices.allows_block(index) for trial in plan.trials for index in trial.shapes)
    ffns = measure(model, TEXT, branches=("ffn",))
    plan = compressor.plan(model, ffns, TEXT, max_dppl="50%", objective="size")
    assert all(isinstance(index, int) for trial in plan.trials for index in trial.shapes)
    for choices in (ATTENTION, Choices(blocks=(SECOND,))):
        with pytest.raises(InputError, match="the profile has none of the branches that the choices allow"):
            compressor.plan(model, ffns, TEXT, max_dppl="50%", choices=choices)


def test_attention_is_planned_applied_and_loaded(
    compress: Compress, models: Path, options: list[str], tmp_path: Path
) -> None:
    plan_file, out = tmp_path / "plan.json", tmp_path / "out"
    words = ["--branches", "attention", "--max-dppl", "20%", "--objective", "size"]
    done = compress("plan", models / "llama", *options, *words, "--out", plan_file)
    assert done.code == 0, done.err
    plan = json.loads(plan_file.read_text(encoding="utf-8"))
    assert plan["blocks"] == []
    kinds = [branch["replacement"]["kind"] for branch in plan["attention"]]
    assert set(kinds) > {"keep"} or "keep" not in kinds
    done = compress("apply", models / "llama", plan_file, "--out", out)
    assert done.code == 0, done.err
    record = json.loads((out / "compression.json").read_text(encoding="utf-8"))
    assert [branch["replacement"] for branch in record["attention"]] == [b["replacement"] for b in plan["attention"]]
    assert record["parameters"] == plan["parameters"]
    assert record["recipe"]["branches"] == ["attention"]
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert count_parameters(model) == record["parameters"]["after"]
    modules = [model.get_submodule(branch["path"]) for branch in record["attention"]]
    replaced = [isinstance(module, (Replacement, KeptHeads)) for module in modules]
    assert replaced == [kind != "keep" for kind in kinds]
    assert model.generate(tokens(2, 5), max_new_tokens=4, do_sample=False).shape[0] == 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"kind": "pruned", "rank": 0, "heads": 0},
            "block 1.attention is pruned with rank 0 and 0 heads, that is bias",
        ),
        (
            {"kind": "linear", "rank": 3, "heads": 0},
            "block 1.attention is linear with rank 3 and 0 heads, that is lowrank",
        ),
        ({"kind": "pruned", "rank": 0, "heads": 9}, "the plan keeps 9 heads in block 1.attention, which has 2 heads"),
    ],
)
def test_an_edited_plan_is_refused(
    refused: Refused, attention_plan: dict[str, Any], models: Path, tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    attention_plan["attention"][1]["replacement"] |= change
    file = tmp_path / "edited.json"
    file.write_text(json.dumps(attention_plan), encoding="utf-8")
    assert says in refused("apply", models / "llama", file, "--out", "out")


def test_a_plan_that_has_attention_twice_is_refused(
    refused: Refused, attention_plan: dict[str, Any], models: Path, tmp_path: Path
) -> None:
    attention_plan["attention"].append(attention_plan["attention"][1])
    file = tmp_path / "edited.json"
    file.write_text(json.dumps(attention_plan), encoding="utf-8")
    assert "the plan has block 1.attention twice" in refused("apply", models / "llama", file, "--out", "out")


@pytest.fixture
def attention_plan(
    compress: Compress, models: Path, options: list[str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("plan") / "plan.json"
    words = ["--blocks", "1.attention", "--max-dppl", "50%", "--objective", "size"]
    done = compress("plan", models / "llama", *options, *words, "--out", file)
    assert done.code == 0, done.err
    plan: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    assert [branch["replacement"]["kind"] != "keep" for branch in plan["attention"]] == [False, True, False]
    return plan


@pytest.mark.parametrize("words", [["--branches", "attention"], ["--branches", "all"]])
def test_attention_is_profiled(
    compress: Compress, models: Path, options: list[str], tmp_path: Path, words: list[str]
) -> None:
    command = ["profile", models / "gpt2", *options, *words, "--out", tmp_path / "report", "--json"]
    done = compress(*command)
    assert done.code == 0, done.err
    record = json.loads(done.out)
    assert len(record["attention"]) == 3
    assert len(record["blocks"]) == (0 if words[1] == "attention" else 3)
    for branch in record["attention"]:
        assert branch["verdict"] in ("safe", "costly", "unsafe", None)
        assert branch["swap"]["delta_ci95"][0] <= branch["swap"]["delta"] <= branch["swap"]["delta_ci95"][1]
    assert (tmp_path / "report" / "report.html").is_file()
    other = tmp_path / "other.txt"
    other.write_text(sentences(4000, seed=5), encoding="utf-8")
    done = compress(*command[:-1], "--overwrite", "--text", other, "-v")
    assert done.code == 0, done.err
    assert "corpora corpus and other: rank correlation" in done.out


def test_probes_are_of_ffns(refused: Refused, models: Path, options: list[str]) -> None:
    words = ["--branches", "attention", "--probe", "bilinear"]
    assert "--probe is about FFNs" in refused("profile", models / "gpt2", *options, *words, "--out", "report")
