"""Speed has a spread: a clock that stalls and jitters tells no difference where there is none, and a true one."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from records_cards import measured
from torch import nn
from zoo import random_replacement, tiny_model

from compressor.evaluate import speed as timing
from compressor.models.blocks import find_blocks
from compressor.pipelines.describe import describe_speed
from compressor.plan.shapes import Shape
from compressor.report.card import card
from compressor.report.page import page
from compressor.report.record import Record
from compressor.report.tables import speed_lines

SIMULATIONS = 400


def jitter(draw: random.Random) -> float:
    return math.exp(draw.gauss(0, 0.05))


def stalls(draw: random.Random) -> float:
    """One run in eight takes up to ten times as long."""
    return jitter(draw) * (1 + 9 * draw.random() if draw.random() < 1 / 8 else 1)


def skewed(draw: random.Random) -> float:
    return 1 + draw.expovariate(2)


def drifting() -> Callable[[random.Random], float]:
    """The machine becomes slower and slower, and jitters."""
    runs = itertools.count()
    return lambda draw: (1 + 0.02 * next(runs)) * jitter(draw)


def first_of_two() -> Callable[[random.Random], float]:
    """Every second run finds its data in the cache."""
    runs = itertools.count()
    return lambda draw: (0.7 if next(runs) % 2 else 1.0) * jitter(draw)


Noise = Callable[[], Callable[[random.Random], float]]
NOISES: dict[str, Noise] = {
    "jitter": lambda: jitter,
    "stalls": lambda: stalls,
    "skewed": lambda: skewed,
    "drifting": drifting,
    "first of two": first_of_two,
}


def simulate(noise: Noise, seed: int, factor: float) -> timing.PairedTimes:
    """Two things timed by such a clock, of which the second takes this many times as long."""
    draw, machine = random.Random(seed), noise()
    return timing.time_in_turns(lambda: machine(draw), lambda: factor * machine(draw))


@pytest.mark.parametrize("noise", NOISES)
def test_two_equal_things_are_told_apart_in_one_of_twenty_at_most(noise: str) -> None:
    held = 0
    for seed in range(SIMULATIONS):
        low, high = simulate(NOISES[noise], seed, 1.0).ci95
        held += low <= 1 <= high
    assert held >= 0.95 * SIMULATIONS


@pytest.mark.parametrize("noise", NOISES)
def test_what_is_twice_as_fast_is_told(noise: str) -> None:
    found = [simulate(NOISES[noise], seed, 0.5) for seed in range(SIMULATIONS)]
    assert sum(times.ci95[0] <= 2 <= times.ci95[1] for times in found) >= 0.95 * SIMULATIONS
    assert sum(times.ci95[0] > 1 for times in found) >= 0.9 * SIMULATIONS


@pytest.mark.parametrize("count", range(6, 41))
def test_the_interval_of_a_median_is_exact(count: int) -> None:
    """Counted over all ways in which the values can lie around the median."""
    low, high = timing.median_interval(list(range(count)))
    rank = int(low) + 1
    assert (low, high) == (rank - 1, count - rank)
    outside = [2 * sum(math.comb(count, below) for below in range(k)) / 2**count for k in (rank, rank + 1)]
    assert outside[0] <= 0.05 < outside[1]


class SimulatedClock:
    """Says how long a run took without looking at a clock: by whether the model is patched, with stalls."""

    def __init__(self, model: Any, factor: float, seed: int) -> None:
        self.model, self.factor, self.draw = model, factor, random.Random(seed)

    def __call__(self, run: Callable[[], Any], _: torch.device) -> float:
        patched = any(getattr(module, "is_compressor_replacement", False) for module in self.model.modules())
        return (self.factor if patched else 1.0) * stalls(self.draw) / 1000


def speed_of(factor: float, seed: int, monkeypatch: pytest.MonkeyPatch) -> Record:
    """A record with the speed of a model whose runs take this many times as long with a replacement."""
    model = tiny_model("llama")
    blocks = find_blocks(model)
    monkeypatch.setattr(timing, "time_call", SimulatedClock(model, factor, seed))
    windows = torch.randint(300, (4, 32), generator=torch.Generator().manual_seed(0))
    found = timing.measure_speed(model, blocks, {1: random_replacement(blocks[1], Shape(4))}, windows)
    return measured(speed=describe_speed(found).to_json_value())


def test_equal_speed_is_in_no_headline_and_no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = 0
    for seed in range(20):
        record = speed_of(1.0, seed, monkeypatch)
        words = [*speed_lines(record), *card(record).splitlines(), *page(record).splitlines()]
        shown = [line for line in words if "as fast" in line]
        speed = record.speed
        assert speed is not None
        assert speed.prefill_ratio is not None
        assert bool(shown) == any(step.differs for step in speed.steps)
        quiet += not shown
        if not shown:
            assert any("speed: no difference that this machine can tell (prefill 0." in line for line in words)
    assert quiet >= 17  # two intervals each


def test_a_faster_model_is_shown_with_its_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    record = speed_of(0.5, 0, monkeypatch)
    speed = record.speed
    assert speed is not None
    values = speed.to_json_value()
    assert values["prefill_ratio_ci95"][0] > 1
    assert values["decode_ratio_ci95"][0] > 1
    low, high = speed.steps[0].ci95
    assert f"prefill {speed.steps[0].ratio:.3f}× as fast (95 % {low:.3f}–{high:.3f}×;" in speed_lines(record)[1]
    assert f"{speed.steps[0].ratio:.3f}× as fast | {low:.3f}–{high:.3f}×" in card(record)
    assert f"{low:.3f}–{high:.3f}×" in page(record)


def test_a_record_without_intervals_shows_no_ratio() -> None:
    """As earlier versions wrote it."""
    speed = {"flops_before": 200, "flops_after": 100, "flops_ratio": 2.0, "seq_len": 32}
    speed |= {f"{name}_{when}": 1.7 for name in ("prefill", "decode") for when in ("before", "after", "ratio")}
    record = measured(speed=speed)
    assert not any("as fast" in text for text in (*speed_lines(record), card(record), page(record)))


@pytest.mark.parametrize(("factor", "slower"), [(1.0, 0), (1.02, 0), (2.0, 20), (0.5, 0)])
def test_slower_is_decided_by_the_interval(factor: float, slower: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    block = find_blocks(model)[0]
    draw = random.Random(0)
    found = 0
    for _ in range(20):
        order = itertools.chain([1.0, factor], itertools.cycle([1.0, factor, factor, 1.0]))
        calls = (each for each in order for _ in range(timing.CALLS))
        monkeypatch.setattr(timing, "time_call", lambda *_, calls=calls: next(calls) * stalls(draw) / 100)
        found += timing.is_slower(model, block, nn.Identity())  # type: ignore[arg-type]
    assert abs(found - slower) <= 1
