"""Corrections of predictions: a measurement is believed as far as its noise allows, on every text."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Compress
from planted import FFNS, SEQ_LEN, LinearFFN, WildFFN, planted_model, random_text
from torch import nn
from zoo import VOCAB, WIDTH, tiny_model

from compressor.evaluate.budget import Budget
from compressor.measure.gradients import Damage
from compressor.measure.profile import measure
from compressor.measure.study import StudyOptions, study
from compressor.measure.swap import spread_windows
from compressor.plan import block_trials
from compressor.plan.api import make_planner
from compressor.plan.calibration import Calibration, Point, binding_calibration, correct_predictions
from compressor.plan.candidates import BlockCandidates
from compressor.plan.frontier import Candidate
from compressor.plan.moments_store import MomentsStore
from compressor.plan.shapes import Shape
from compressor.plan.space import prepare_search
from compressor.runtime.context import RunContext
from compressor.text import Split, Text


def point(index: int, predicted: float, measured: float, error: float, windows: int = 16) -> Point:
    return Point(Candidate(index, Shape(0, 4), 1, predicted), predicted, measured, error, windows)


def test_a_measurement_beyond_its_noise_is_believed_and_drags_no_neighbour() -> None:
    usual = [point(k, 0.01, 0.011, 0.001) for k in range(8)]
    wild = [*usual[:4], point(4, 0.01, 1.0, 0.01), *usual[5:]]
    factors = Calibration(wild).factors()
    assert 90 < factors[4] <= 100
    for index in (3, 5, 7):
        assert factors[index] == pytest.approx(Calibration(usual).factors()[index], rel=0.15)
    noisy = Calibration([*usual[:4], point(4, 0.01, 1.0, 0.5), *usual[5:]]).factors()
    assert noisy[4] < 5, "two standard errors prove nothing"
    cheap = Calibration([*usual[:4], point(4, 1.0, 0.02, 0.002), *usual[5:]]).factors()
    assert 0.02 <= cheap[4] < 0.04


def test_few_windows_leave_more_doubt() -> None:
    usual = [point(k, 0.01, 0.01, 0.001) for k in range(8)]
    factors = [
        Calibration([*usual[:4], point(4, 0.01, 0.2, 0.03, windows), *usual[5:]]).factors()[4] for windows in (2, 8, 64)
    ]
    assert factors == sorted(factors)
    assert factors[0] < 5
    assert factors[2] > 8


def test_without_noise_that_is_known_the_prediction_stays() -> None:
    alone = [point(k, 0.01, 0.001 * 10**k, math.inf, windows=1) for k in range(4)]
    assert Calibration(alone).factors() == pytest.approx(dict.fromkeys(range(4), 1.0))
    assert Calibration(alone[:1]).factors() == {0: 1.0}
    assert Calibration([]).factors([0, 1]) == {0: 1.0, 1: 1.0}
    mixed = Calibration([point(0, 1.0, 2.0, 0.01), alone[1], point(2, 1.0, 2.0, 0.01)]).factors([0, 1, 2, 3])
    assert mixed == pytest.approx(dict.fromkeys(range(4), 2.0), rel=0.02)


def test_nothing_against_nothing_says_nothing() -> None:
    """A block without output is predicted and measured to cost 0; its ratio is 1 and no other's."""
    usual = [point(k, 0.01, 0.02, 0.001) for k in range(4)]
    factors = Calibration([*usual, point(4, 0.0, 0.0, 0.0), point(5, 0.0, 1e-9, 1e-9)]).factors()
    assert all(math.isfinite(factor) and factor > 0 for factor in factors.values())
    assert factors[3] == pytest.approx(2.0, rel=0.1)


def test_divergence_tells_of_its_block_what_a_noisy_loss_cannot() -> None:
    """The loss of every block is known to within itself only; KL says that block 4 costs three times its prediction."""
    usual = [replace(point(k, 0.01, 0.005, 0.005), kl=0.01, kl_error=0.0003) for k in range(8)]
    wild = [*usual[:4], replace(usual[4], kl=0.03, kl_error=0.001), *usual[5:]]
    factors = Calibration(wild).factors([*range(8), 9])
    assert factors[4] == pytest.approx(3 * factors[2], rel=0.3)
    assert 0.3 < factors[2] < 0.8, "the loss rises by about half of the divergence"
    assert factors[9] == pytest.approx(factors[7], rel=0.2)
    alone = [replace(p, kl=math.nan) for p in wild]
    assert Calibration(alone).factors()[4] == pytest.approx(Calibration(alone).factors()[2], rel=0.1)


def of_block(index: int, *damages: float) -> BlockCandidates:
    candidates = [Candidate(index, Shape(k), k, damage) for k, damage in enumerate(damages, start=1)]
    found: Any = type("OfBlock", (), {"candidates": candidates})
    return found


def test_the_text_that_a_block_costs_most_decides() -> None:
    """By its own limit: a block that is cheap on prose and dear on code is as dear as the code says."""
    prose = Calibration([point(0, 1.0, 1.0, 0.01), point(1, 1.0, 1.0, 0.01)])
    code = Calibration([point(0, 1.0, 1.0, 0.01), point(1, 1.0, 30.0, 0.01)])
    blocks = {0: of_block(0, 1.0), 1: of_block(1, 1.0, math.nan)}

    def damages(limits: dict[str, float]) -> list[list[float]]:
        corrected = correct_predictions(blocks, {"prose": prose, "code": code}, limits)
        return [[c.damage for c in row] for row in corrected.values()]

    assert damages({"prose": 0.1, "code": 0.1}) == [[pytest.approx(1, rel=0.05)], [pytest.approx(30, rel=0.05)]]
    assert damages({"prose": 0.1, "code": 1.0}) == [[pytest.approx(1, rel=0.05)], [pytest.approx(3, rel=0.05)]]
    binding = binding_calibration({"prose": prose, "code": code}, {"prose": 0.1, "code": 0.1})
    assert [p.measured for p in binding.points] == [1.0, 30.0]


def test_windows_come_from_every_text_and_all_of_it() -> None:
    windows = torch.arange(40).repeat_interleave(SEQ_LEN).reshape(40, SEQ_LEN)
    text = Text(*(Split(windows, "") for _ in range(3)), {"a": (30, 1), "b": (10, 1)})
    found, parts = spread_windows(text, 4 * SEQ_LEN)
    assert found.windows[:, 0].tolist() == [3, 11, 18, 26, 31, 33, 36, 38]
    assert parts == {"a": slice(0, 4), "b": slice(4, 8)}
    found, parts = spread_windows(text, 20 * SEQ_LEN)
    assert parts == {"a": slice(0, 20), "b": slice(20, 30)}
    assert found.windows[20:, 0].tolist() == list(range(30, 40))


class CodeFFN(nn.Module):
    """Linear for the tokens of prose; for those of code, which are marked in feature 0, nothing like it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.wild = LinearFFN(), WildFFN()

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        marked: torch.Tensor = 3 * torch.relu(hidden_states[..., :1] - 1)
        result: torch.Tensor = self.linear(hidden_states) + marked * self.wild(hidden_states)
        return result


def prose_and_code() -> tuple[Any, Text]:
    """Code has the second half of the vocabulary, and block 1 is linear on prose alone. The model writes both texts
    itself, so that a change of its outputs costs."""
    model = planted_model(LinearFFN(), CodeFFN(), LinearFFN(seed=4))
    with torch.no_grad():
        model.transformer.wte.weight[:, 0] = 0.0
        model.transformer.wte.weight[VOCAB // 2 :, 0] = 4.0
        model.transformer.h[1].ln_2.weight.fill_(1.0)
        model.transformer.h[1].ln_2.bias.zero_()
        model.lm_head.weight = nn.Parameter(torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(5)))
    half, generator = VOCAB // 2, torch.Generator().manual_seed(3)

    @torch.no_grad()
    def draw(count: int, start: int) -> torch.Tensor:
        words = start + torch.randint(half, (count, 1), generator=generator)
        while words.shape[1] < SEQ_LEN:
            chances = model(input_ids=words).logits[:, -1, start : start + half].softmax(-1)
            words = torch.cat([words, start + torch.multinomial(chances, 1, generator=generator)], dim=1)
        return words

    calibration = torch.stack([draw(30, 0), draw(30, half)], dim=1).flatten(0, 1)
    others = [torch.cat([draw(16, 0), draw(16, half)]) for _ in range(2)]
    return model, Text(Split(calibration, ""), *(Split(w, "") for w in others), {"prose": (16, 16), "code": (16, 16)})


def test_agreement_and_sweep_see_every_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_trials, "TRIAL_TOKENS", 4 * SEQ_LEN)
    model, text = prose_and_code()
    space = prepare_search(model, text, RunContext(), FFNS)
    prose, code = (space.calibrations[name].points[1] for name in ("prose", "code"))
    assert code.measured > 10 * abs(prose.measured)
    profile = measure(model, text, branches=("ffn",))
    options = StudyOptions(swap=True, swap_tokens=4 * SEQ_LEN)
    damages = {index: Damage(linear=damage.linear, factorised=0.0) for index, damage in space.damages.items()}
    strict = study(model, profile, damages, text, options, RunContext(), {"prose": 1.0, "code": 0.05})
    assert strict.verdicts[1].word == "costly"
    assert strict.verdicts[1].reason.endswith("(on text code)")
    assert strict.verdicts[0].word == "safe"
    loose = study(model, profile, damages, text, options, RunContext(), {"prose": 1.0, "code": 1000.0})
    assert loose.verdicts[1].word == "safe", "the limit is each text's own"


def test_one_selection_window_is_enough_for_a_plan() -> None:
    text = random_text(selection=1)
    model = planted_model(WildFFN(), LinearFFN(rank=5), WildFFN(seed=5))
    space = prepare_search(model, text, RunContext(), FFNS)
    assert all(math.isinf(p.error) for p in space.calibrations["text"].points)
    planner = make_planner(space, measure(model, text), {"text": Budget.parse("0.5%", confidence=0)})
    damages = [c.damage for row in planner.candidates.values() for c in row]
    assert damages
    assert all(math.isfinite(damage) for damage in damages)
    assert 1 in planner.search().shapes


def test_one_selection_window_through_the_command(
    compress: Compress, models: Path, options: list[str], tmp_path: Path
) -> None:
    command = ["plan", models / "gpt2", *options, "--select-tokens", "32", "--max-dppl", "5%", "--json"]
    done = compress(*command, "--out", tmp_path / "plan.json")
    assert "unsafe" not in done.err
    assert done.code == 0, done.err
    blocks = json.loads((tmp_path / "plan.json").read_text())["agreement"]["blocks"]
    assert [block["standard_error"] for block in blocks] == [None] * len(blocks)
    assert "NaN" not in (tmp_path / "plan.json").read_text()


def test_a_block_planted_too_cheap_does_not_starve_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its candidates are predicted at a hundredth of their damage: the plan is the same as with true predictions."""
    model, text = tiny_model("llama"), random_text()
    with torch.no_grad():  # make it sure of what it says, so that every block matters
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.mul_(30)
        model.lm_head.weight.mul_(20)
    profile, budgets = measure(model, text), {"text": Budget.parse("20%", confidence=0)}

    def saved() -> int:
        planner = make_planner(prepare_search(model, text, RunContext(), FFNS), profile, budgets, objective="size")
        return sum(planner.space.candidates[i].saved(shape) for i, shape in planner.search().shapes.items())

    honest, find_candidates = saved(), MomentsStore.candidates

    def planted(store: MomentsStore) -> dict[int, BlockCandidates]:
        found = find_candidates(store)
        found[1].candidates[:] = [Candidate(1, c.shape, c.saved, 0.01 * c.damage) for c in found[1].candidates]
        return found

    monkeypatch.setattr(MomentsStore, "candidates", planted)
    assert saved() >= 0.8 * honest
