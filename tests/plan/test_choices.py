"""What may change: the words of --kinds, --blocks and --skip, plans that keep to them, and the order of the blocks."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Compress
from planted import FFNS, LinearFFN, WildFFN, planted_model, random_text
from simulated import SimulatedRunner, draw_costs, limits_of, planner_of
from torch import Tensor, nn
from zoo import tiny_model

import compressor
from compressor.evaluate.budget import Budget
from compressor.measure.profile import Profile, measure
from compressor.measure.verdicts import Verdict
from compressor.plan.api import make_planner
from compressor.plan.calibration import typical_candidates
from compressor.plan.choices import ANYTHING, BlockRange, Choices, Signal, resolve_choices
from compressor.plan.frontier import Candidate, grow_plans, weigh_blocks
from compressor.plan.search import Planner
from compressor.plan.shapes import KINDS, Shape
from compressor.plan.space import prepare_search
from compressor.runtime.context import RunContext
from compressor.runtime.errors import BudgetError, InputError

TEXT = random_text()


# The words


def test_every_shape_is_of_a_known_kind() -> None:
    shapes = (Shape(None), Shape(3), Shape(0, 4), Shape(3, 4), Shape(None, 4), Shape(0))
    assert {shape.kind for shape in shapes} == set(KINDS)


@pytest.mark.parametrize(
    ("only", "skip", "found"),
    [
        (None, None, None),
        (["0-3", "5"], None, {0, 1, 2, 3, 5}),
        (["2", "2", "1-2"], None, {1, 2}),
        (["0-6"], None, set(range(7))),
        (["0-6", "0-6.attention"], None, None),
        (None, ["6", "0-6.attention"], {0, 1, 2, 3, 4, 5}),
        (["0-3"], ["2-5"], {0, 1}),
        (["1"], ["6"], {1}),
        (["003"], None, {3}),
    ],
)
def test_blocks_are_named(only: list[str] | None, skip: list[str] | None, found: set[int] | None) -> None:
    choices = resolve_choices(7, only=only, skip=skip)
    assert choices.blocks == found
    assert [index for index in range(7) if choices.allows_block(index)] == sorted(found or range(7))


@pytest.mark.parametrize("word", ["", " ", "-1", "1-", "-", "one", "1.5", "1--2", "0x1", "1-2-3", "²", "9" * 5000])
def test_no_block(word: str) -> None:
    with pytest.raises(InputError, match="--skip takes numbers of blocks and ranges, got"):
        BlockRange.parse("--skip", word)


def test_ranges_have_a_direction() -> None:
    assert BlockRange.parse("--blocks", " 3-7 ") == BlockRange(3, 7)
    with pytest.raises(InputError, match=r"--blocks 7-3 is a range that ends before it begins; try --blocks 3-7"):
        BlockRange.parse("--blocks", "7-3")


def test_what_the_model_does_not_have() -> None:
    with pytest.raises(InputError, match=r"^--blocks 99: the model has blocks 0 to 6$"):
        resolve_choices(7, only=["0", "99"])
    with pytest.raises(InputError, match=r"^--skip 5-7: the model has blocks 0 to 6$"):
        resolve_choices(7, skip=["5-7"])
    with pytest.raises(InputError, match=r"^--blocks 999999999: the model has block 0 alone$"):
        resolve_choices(1, only=["999999999"])
    with pytest.raises(InputError, match=r"--kinds cubic is not known; use linear, lowrank, pruned, hybrid, bias"):
        resolve_choices(7, kinds=["linear", "cubic"])
    for only, skip in ((["1"], ["0-3"]), (None, ["0-6", "0-6.attention"])):
        with pytest.raises(InputError, match="leave no block to replace; the model has blocks 0 to 6"):
            resolve_choices(7, only=only, skip=skip)


@pytest.mark.parametrize(
    ("choices", "says"),
    [
        (Choices(blocks=(3,)), "block 3 is chosen, but the model has blocks 0 to 2"),
        (Choices(blocks=(-1,)), "block -1 is chosen"),
        (Choices(blocks=()), "leave nothing to replace"),
        (Choices(kinds=()), "leave nothing to replace"),
        (Choices(kinds=("cubic",)), "--kinds cubic is not known"),
    ],
)
def test_python_says_it_too(choices: Choices, says: str) -> None:
    model = tiny_model("gpt2")
    nothing: Any = None  # refused before the profile is looked at
    with pytest.raises(InputError, match=says):
        compressor.plan(model, nothing, TEXT, max_dppl=1.0, choices=choices)


# Plans


def talking_model() -> Any:
    """A tiny Llama in which every block matters a little."""
    model = tiny_model("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.mul_(4)
        model.lm_head.weight.mul_(3)
    return model


@pytest.fixture(scope="module")
def talking() -> tuple[Any, Profile]:
    model = talking_model()
    return model, measure(model, TEXT)


@pytest.mark.parametrize(
    "choices",
    [
        replace(FFNS, kinds=("linear",)),
        Choices(kinds=("lowrank",), blocks=(0, 2)),
        replace(FFNS, kinds=("hybrid",), rank_by="stream"),
        replace(FFNS, kinds=("bias",)),
        Choices(kinds=("pruned", "linear"), blocks=(1,)),
        Choices(blocks=(1, 2), rank_by="r2"),
    ],
    ids=str,
)
def test_a_plan_keeps_to_the_choices(talking: tuple[Any, Profile], choices: Choices) -> None:
    model, profile = talking
    space = prepare_search(model, TEXT, RunContext(), choices)
    assert [p.index for p in space.calibrations["text"].points] == sorted(choices.blocks or range(3))
    assert all(choices.allows(p.index, p.candidate.shape) for p in space.calibrations["text"].points)
    planner = make_planner(space, profile, {"text": Budget.parse("60%", confidence=0)}, objective="size")
    plan = planner.search()
    assert plan.shapes
    tried = [item for trial in plan.trials for item in trial.shapes.items()]
    assert all(choices.allows(index, shape) for index, shape in tried)
    smaller = planner.without_block(plan, next(iter(plan.shapes)))
    assert smaller is None or all(choices.allows(index, shape) for index, shape in smaller.shapes.items())


def test_the_milder_shape_of_an_only_block_is_of_an_allowed_kind() -> None:
    model = mixed_model()
    choices = Choices(kinds=("lowrank", "bias"), blocks=(0,))
    space = prepare_search(model, TEXT, RunContext(), choices)
    planner = make_planner(space, measure(model, TEXT), {"text": Budget.parse("1000%", confidence=0)}, objective="size")
    plan = planner.search()
    assert plan.shapes == {0: Shape(0)}
    smaller = planner.without_block(plan, 0)
    assert smaller is not None
    assert smaller.shapes[0].kind == "lowrank"


def test_single_blocks_that_are_tried_at_last_are_allowed_ones() -> None:
    """Nothing fits, so the mildest shapes of single blocks are tried: of allowed blocks only."""
    costs = dict.fromkeys(draw_costs(random.Random(0)), 10.0)
    planner = planner_of(SimulatedRunner(costs), dict.fromkeys(costs, 1e-3), limits_of("0.01"))
    space = replace(planner.space, choices=Choices(blocks=(4, 7)))
    planner = Planner(space, planner.limits, planner.verdicts, objective="size")
    with pytest.raises(BudgetError):
        planner.search()
    assert {index for trial in planner.runner.trials() for index in trial.shapes} == {4, 7}


@pytest.mark.parametrize(
    "choices",
    [replace(FFNS, kinds=("linear", "hybrid")), Choices(blocks=(1,)), replace(FFNS, rank_by="r2")],
    ids=str,
)
def test_mild_forms_of_unsafe_blocks_are_not_tried_where_they_are_not_allowed(
    talking: tuple[Any, Profile], choices: Choices
) -> None:
    model, profile = talking
    space = prepare_search(model, TEXT, RunContext(), choices)
    planner = make_planner(space, profile, {"text": Budget.parse("60%", confidence=0)}, objective="size")
    verdicts = {0: Verdict("unsafe", "outlier rows"), 1: Verdict("safe", ""), 2: Verdict("safe", "")}
    planner = Planner(space, planner.limits, verdicts, objective="size", profile=profile)
    plan = planner.search()
    assert plan.shapes
    assert not any(0 in trial.shapes for trial in plan.trials)
    assert all(choices.allows(*item) for trial in plan.trials for item in trial.shapes.items())


def test_the_trial_of_a_block_is_of_an_allowed_kind(talking: tuple[Any, Profile]) -> None:
    of_block = prepare_search(talking[0], TEXT, RunContext()).candidates[1]
    for kind in KINDS:
        (tried,) = typical_candidates(of_block, {kind})
        assert tried.shape.kind == kind
    ranks = sorted(c.shape.rank or 0 for c in of_block.candidates if c.shape.kind == "lowrank")
    (middle,) = typical_candidates(of_block, {"lowrank", "bias"})
    assert ranks[0] < (middle.shape.rank or 0) < ranks[-1]
    (usual,) = typical_candidates(of_block)
    assert usual.shape.kind == "pruned"
    assert typical_candidates(replace(of_block, candidates=[]), {"linear"}) == []


# The order of the blocks


class MixedFFN(nn.Module):
    """So much of a linear map and so much of one that no line fits: R² is their ratio, the damage the second's size."""

    def __init__(self, linear: float, wild: float, seed: int) -> None:
        super().__init__()
        self.linear, self.wild = LinearFFN(seed=seed), WildFFN(seed=seed + 10)
        self.sizes = linear, wild

    def forward(self, hidden_states: Tensor) -> Tensor:
        linear, wild = self.sizes
        mixed: Tensor = linear * self.linear(hidden_states) + wild * self.wild(hidden_states)
        return mixed


def mixed_model() -> Any:
    """By R²: block 0, 2, 1. By damage: block 1, 2, 0."""
    return planted_model(MixedFFN(3.0, 0.7, 1), MixedFFN(0.02, 0.05, 2), MixedFFN(1.0, 0.5, 3))


@pytest.mark.parametrize(("rank_by", "order"), [("r2", [0, 2, 1]), ("stream", [0, 2, 1]), ("damage", [1, 2, 0])])
def test_blocks_go_in_the_order_of_the_signal(rank_by: Signal, order: list[int]) -> None:
    model = mixed_model()
    profile = measure(model, TEXT)
    space = prepare_search(model, TEXT, RunContext(), replace(FFNS, kinds=("linear",), rank_by=rank_by))
    budgets = {"text": Budget.parse("1000%", confidence=0)}
    planner = make_planner(space, profile, budgets, objective="size")
    planner = Planner(space, planner.limits, dict.fromkeys(range(3), Verdict("safe", "")), profile=profile)
    plans = planner.growing_plans()
    assert [list(shapes) for shapes, _ in plans] == [order[:1], order[:2], order]
    if rank_by == "r2":
        r2 = {p.block.index: p.r2_lin for p in profile.blocks}
        assert sorted(r2, key=lambda index: -r2[index]) == order
    damages = {c.index: c.damage for row in planner.candidates.values() for c in row if c.shape == Shape(None)}
    totals = [sum(damages[index] for index in shapes) for shapes, _ in plans]
    assert [predicted for _, predicted in plans] == pytest.approx(totals), "what is predicted stays the damage"


def test_a_search_by_another_signal_stops_on_its_own_order() -> None:
    """Nothing is enlarged by damage: what is chosen is one of the growing plans."""
    model = mixed_model()
    profile = measure(model, TEXT)
    space = prepare_search(model, TEXT, RunContext(), replace(FFNS, rank_by="r2"))
    planner = make_planner(space, profile, {"text": Budget.parse("3%", confidence=0)}, objective="size")
    plan = planner.search()
    assert plan.shapes in [shapes for shapes, _ in planner.growing_plans()]


def test_single_blocks_too_are_tried_in_the_order_of_the_signal() -> None:
    """Every block costs far more than the budget, so blocks are tried alone at last, and again in this order."""
    damages = {(0, Shape(500)): 3e-3, (1, Shape(500)): 1e-3, (2, Shape(500)): 2e-3}
    planner = planner_of(SimulatedRunner(dict.fromkeys(damages, 10.0)), damages, limits_of("0.1"))
    space = replace(planner.space, choices=Choices(rank_by="r2"))
    blocks = [SimpleNamespace(block=SimpleNamespace(index=k), r2_lin=r2) for k, r2 in enumerate((0.9, 0.2, 0.5))]
    profile: Any = SimpleNamespace(branches=blocks)
    planner = Planner(space, planner.limits, planner.verdicts, objective="size", profile=profile)
    with pytest.raises(BudgetError):
        planner.search()
    assert [next(iter(trial.shapes)) for trial in planner.runner.trials() if len(trial.shapes) == 1] == [0, 2, 1]


def test_an_unsafe_block_stays_whatever_its_r2() -> None:
    model = planted_model(WildFFN(outliers=300.0), LinearFFN(), WildFFN(), mark_first_position=True)
    profile = measure(model, TEXT)
    assert profile.blocks[0].r2_lin > 0.9
    space = prepare_search(model, TEXT, RunContext(), replace(FFNS, kinds=("linear",), rank_by="r2"))
    planner = make_planner(space, profile, {"text": Budget.parse("20%")})
    assert planner.verdicts[0].word == "unsafe"
    assert all(0 not in shapes for shapes, _ in planner.growing_plans())


def test_within_a_block_the_order_is_that_of_damage() -> None:
    rows = {
        0: [Candidate(0, Shape(2), 10, 1.0), Candidate(0, Shape(None), 20, 4.0)],
        1: [Candidate(1, Shape(2), 10, 0.1), Candidate(1, Shape(None), 20, 0.4)],
        2: [Candidate(2, Shape(2), 10, 0.0), Candidate(2, Shape(0), 20, 0.0)],
    }
    weights = weigh_blocks({0: 0.2, 1: 0.8, 2: 1.0}, rows)
    assert weights[0] == pytest.approx(0.05)
    assert weights[1] == pytest.approx(2.0)
    plans = grow_plans([rows[0], rows[1]], weights)
    assert [list(shapes.items())[-1] for shapes, _ in plans][:2] == [(0, Shape(2)), (0, Shape(None))]
    assert plans[-1][1] == pytest.approx(4.4)
    by_damage = grow_plans([rows[0], rows[1]])
    assert [set(shapes) for shapes, _ in by_damage][:2] == [{1}, {1}]


def test_a_map_that_leaves_nothing_unexplained_comes_first() -> None:
    """R² of 1 and a damage of 0 divide nothing by nothing."""
    rows = {0: [Candidate(0, Shape(None), 10, 1.0)], 1: [Candidate(1, Shape(None), 10, 0.0)]}
    plans = grow_plans(list(rows.values()), weigh_blocks({0: 0.5, 1: 0.0}, rows))
    assert [set(shapes) for shapes, _ in plans] == [{1}, {0, 1}]
    assert ANYTHING.unexplained(None) is None


# The command


def test_a_recipe_reproduces_the_choices(compress: Compress, models: Path, options: list[str], tmp_path: Path) -> None:
    """Whole job, recipe.yaml of its result, the same weights; the plan of the same choices, applied, keeps to them."""
    asked = ["--kinds", "lowrank,bias", "--kinds", "pruned", "--blocks", "1-2", "--skip", "2", "--rank-by", "stream"]
    less = ["--no-swap", "--generate", "0"]
    arguments = [models / "gpt2", *options, "--max-dppl", "1%", "--objective", "size", *asked]
    done = compress(*arguments, *less, "--out", tmp_path / "first")
    assert done.code == 0, done.err
    record = json.loads((tmp_path / "first" / "compression.json").read_text(encoding="utf-8"))
    assert record["recipe"]["kinds"] == ["lowrank", "bias", "pruned"]
    assert record["recipe"]["blocks"] == ["1-2"]
    assert record["recipe"]["skip"] == ["2"]
    assert record["recipe"]["rank_by"] == "stream"
    kinds = {block["index"]: block["replacement"]["kind"] for block in record["blocks"]}
    assert kinds[0] == kinds[2] == "keep"
    assert kinds[1] in ("lowrank", "bias", "pruned")
    again = compress("--recipe", tmp_path / "first" / "recipe.yaml", "--out", tmp_path / "again")
    assert again.code == 0, again.err
    names = ("model.safetensors", "recipe.yaml")
    assert all((tmp_path / "first" / n).read_bytes() == (tmp_path / "again" / n).read_bytes() for n in names)
    planned = compress("plan", *arguments, "--out", tmp_path / "plan.json")
    assert planned.code == 0, planned.err
    plan = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert [b["index"] for b in plan["blocks"] if b["replacement"]["kind"] != "keep"] == [1]
    applied = compress("apply", models / "gpt2", tmp_path / "plan.json", "--out", tmp_path / "applied")
    assert applied.code == 0, applied.err
