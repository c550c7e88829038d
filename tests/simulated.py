"""Searches without a model: blocks whose true costs are drawn, and predictions that err from them."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from compressor.evaluate.budget import Limits, compute_limits, parse_budgets
from compressor.evaluate.intervals import end_score
from compressor.evaluate.perplexity import PerplexityChange
from compressor.measure.gradients import Damage
from compressor.measure.verdicts import Verdict
from compressor.plan.block_trials import BlockTrial
from compressor.plan.calibration import Calibration
from compressor.plan.frontier import Candidate, grow_plans, lower_hull
from compressor.plan.search import Planner
from compressor.plan.shapes import Shape, Shapes
from compressor.plan.space import SearchSpace
from compressor.plan.trials import Trial
from compressor.runtime.progress import Progress

BASELINE = 20.0
SIZE = 1000  # parameters of a block
STEPS = (0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9)  # shares of a block that its candidates save


def change(nats: float, width: float = 0.0) -> PerplexityChange:
    """A rise by these nats, with an interval of this half-width in nats."""
    delta = BASELINE * math.expm1(nats)
    reach = (BASELINE + delta) * math.expm1(width)
    ends = (delta - reach, delta + reach)
    error = reach / end_score(16, 0.95)
    return PerplexityChange(BASELINE, BASELINE + delta, delta, ends, ends[1], error, 4096, 256, "window", 16, 1)


@dataclass
class SimulatedRunner:
    """Tries plans as the real runner does: the cost of a plan is that of its blocks, and some more for each pair."""

    costs: dict[tuple[int, Shape], float]
    interplay: float = 0.0
    compensation: float = 0.85
    width: float = 0.0  # half of the interval, as a share of the cost
    fidelity: bool = False
    spare: dict[tuple[Any, Shape], float] = field(default_factory=dict)  # what attention costs on the spare text
    tried: dict[Any, Trial] = field(default_factory=dict)
    overflowing: set[tuple[int, Shape]] = field(default_factory=set)
    overflows: set[tuple[int, Shape]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.blocks = sorted({index for index, _ in self.costs})
        self.candidates = {
            index: SimpleNamespace(saved=lambda shape: shape.rank, units=None, candidates=[]) for index in self.blocks
        }
        split = SimpleNamespace(tokens=4096)
        self.model, self.text = None, SimpleNamespace(selection=split, verification=split, spare_ratio=2.0)
        self.context = SimpleNamespace(progress=Progress())
        self.block_trials, self.tried_alone = SimpleNamespace(measure=self.measure_alone), []

    def measure_alone(self, candidate: Candidate) -> dict[str, BlockTrial]:
        """A trial of one block in 16 windows, half of which cost more and half less."""
        self.tried_alone.append(candidate)
        if (candidate.index, candidate.shape) in self.overflows:
            return {}
        cost = self.costs[candidate.index, candidate.shape]
        nats = cost * (1 + self.width * torch.tensor([-1.0, 1.0] * 8, dtype=torch.float64))
        return {"text": BlockTrial(nats, nats)}

    def true_cost(self, shapes: Shapes, compensated: bool = False) -> float:
        total = sum(self.costs[item] for item in shapes.items())
        total *= 1 + self.interplay * (len(shapes) - 1)
        return total * (self.compensation if compensated else 1.0)

    def attempt(self, shapes: Shapes, predicted: float, *, compensated: bool = False) -> Trial:
        key = (compensated, *sorted(shapes.items()))
        if key not in self.tried:
            bad = self.overflows & set(shapes.items())
            self.overflowing |= bad
            changes = (
                {}
                if bad
                else {
                    "text": change(
                        self.true_cost(shapes, compensated), self.width * abs(self.true_cost(shapes, compensated))
                    )
                }
            )
            saved = sum(shape.rank or 0 for shape in shapes.values())
            self.tried[key] = Trial(dict(shapes), predicted, saved, compensated, changes)
        return self.tried[key]

    def attempt_on_spare(self, shapes: Shapes) -> dict[str, PerplexityChange]:
        """As noisy as on the selection text, of which there is half as much."""
        (item,) = shapes.items()
        width = self.width * abs(self.costs[item]) / math.sqrt(self.text.spare_ratio)
        return {"text": change(self.spare[item], width)} if self.spare else {}

    def trials(self) -> list[Trial]:
        return list(self.tried.values())

    def fit_modules(self, shapes: Shapes, compensated: bool) -> dict[int, Any]:
        return {}


def limits_of(budget: str, confidence: float = 0.95) -> Limits:
    return compute_limits(parse_budgets([budget], ["text"], confidence), {"text": BASELINE})


def planner_of(
    runner: SimulatedRunner, predictions: dict[tuple[int, Shape], float], limits: Limits, **more: Any
) -> Planner:
    for (index, shape), damage in predictions.items():
        runner.candidates[index].candidates.append(Candidate(index, shape, shape.rank or 0, damage))
    damages = dict.fromkeys(runner.blocks, Damage(0.0, 0.0))
    calibrations = {"text": Calibration([])}
    space = SearchSpace(runner.candidates, damages, calibrations, runner)  # type: ignore[arg-type]
    verdicts = dict.fromkeys(runner.blocks, Verdict("safe", ""))
    return Planner(space, limits, verdicts, objective="size", **more)


def draw_costs(rng: random.Random, blocks: int = 12) -> dict[tuple[int, Shape], float]:
    """Convex costs of every block, of very different heights."""
    costs = {}
    for index in range(blocks):
        height, power = math.exp(rng.gauss(-3.5, 1.2)), rng.uniform(1.3, 3.0)
        costs |= {(index, Shape(round(share * SIZE))): height * share**power for share in STEPS}
    return costs


def most_saved(runner: SimulatedRunner, target: float) -> int:
    """What a search that knows the true costs saves without compensation."""
    by_block: dict[int, list[Candidate]] = {}
    for (index, shape), cost in runner.costs.items():
        by_block.setdefault(index, []).append(Candidate(index, shape, shape.rank or 0, cost))
    plans = grow_plans([lower_hull(row) for row in by_block.values()])
    fitting = [shapes for shapes, _ in plans if runner.true_cost(shapes) <= target]
    return sum(shape.rank or 0 for shape in fitting[-1].values()) if fitting else 0
