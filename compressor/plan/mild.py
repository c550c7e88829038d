"""Mild forms of unsafe blocks: a block whose linear map must not be used may still lose a few of its neurons.

Outlier rows are made by few neurons. Where those stay, the block may be cheap to prune, but its predictions are not
trusted: a mild form is allowed only after a trial of it, in that block alone, has cost what was predicted.
"""

from __future__ import annotations

import math
from dataclasses import replace

from compressor.evaluate.budget import Limits
from compressor.measure.verdicts import EXPECTED_FACTOR
from compressor.plan.block_trials import BlockTrial
from compressor.plan.calibration import NEGLIGIBLE, standard_error
from compressor.plan.candidates import BlockCandidates
from compressor.plan.frontier import Candidate
from compressor.plan.trials import TrialRunner

MILD_SHARE = 0.8  # of its neurons, that a mild form keeps at least
MOST_MILD_TRIALS = 2  # in one block
CERTAIN = 3.0  # standard errors by which a cost must exceed its prediction to contradict it


def find_mild_candidates(of_block: BlockCandidates, runner: TrialRunner, limits: Limits) -> list[Candidate]:
    """The mild forms of an unsafe block that are allowed, with the cost that their trial gives reason to expect."""
    if of_block.units is None:
        return []
    count = of_block.units.count
    least = min(MILD_SHARE * count, count - 1)
    mild = [c for c in of_block.candidates if c.shape.kind == "pruned" and c.shape.neurons >= least and c.saved > 0]
    mild = sorted((c for c in mild if c.damage <= limits.smallest), key=lambda c: c.saved)
    for tried in [mild[-1], mild[len(mild) // 2 - 1]][: min(len(mild), MOST_MILD_TRIALS)] if mild else []:
        trial = runner.block_trials.measure(tried)
        costs = [confirmed_cost(found, tried.damage) / limits.least[name] for name, found in trial.items()]
        expected = max(costs, default=math.inf) * limits.smallest
        name = "heads" if of_block.block.is_attention else "neurons"
        kept = f"with {tried.shape.neurons} of its {count} {name}"
        if math.isfinite(expected):
            runner.context.progress.note(
                f"  block {tried.index} is unsafe as a linear map; {kept} it costs what was predicted, so a few may go"
            )
            surplus = max(expected - tried.damage, 0.0)  # for milder forms in proportion to what they save
            return [
                replace(c, damage=c.damage + surplus * c.saved / tried.saved) for c in mild if c.saved <= tried.saved
            ]
        runner.context.progress.note(f"  block {tried.index} is unsafe, and {kept} it costs more than predicted")
    return []


def confirmed_cost(trial: BlockTrial, predicted: float) -> float:
    """Nats per token to reckon with: the measured divergence, with its standard error. Infinite where the trial
    contradicts the prediction by more than its noise."""
    nats, error = trial.divergences.mean().item(), standard_error(trial.divergences)
    error = error if math.isfinite(error) else 0.0  # one window tells nothing of it
    if not nats - CERTAIN * error <= EXPECTED_FACTOR * predicted + NEGLIGIBLE:
        return math.inf
    return max(nats + error, predicted)
