"""What searches on a model and a text have in common: the candidates of every block, and how well predictions hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from compressor.measure.gradients import Damage
from compressor.models.branches import BranchIndex
from compressor.plan.block_trials import BlockTrials
from compressor.plan.calibration import Calibration, calibrate
from compressor.plan.candidates import BlockCandidates
from compressor.plan.choices import ANYTHING, Choices
from compressor.plan.fit import Fitter
from compressor.plan.moments_store import MomentsStore, open_store
from compressor.plan.trials import TrialRunner
from compressor.runtime.context import RunContext
from compressor.text import Text


@dataclass(frozen=True)
class SearchSpace:
    """What searches on a model and a text have in common, whatever their budget: the candidates of every block, how
    well their predictions hold on each text, the runner that tries plans, and what may change."""

    candidates: Mapping[BranchIndex, BlockCandidates]
    damages: dict[BranchIndex, Damage]  # of every block's linear map
    calibrations: dict[str, Calibration]
    runner: TrialRunner
    choices: Choices = ANYTHING


def prepare_search(
    model: Any,
    text: Text,
    context: RunContext,
    choices: Choices = ANYTHING,
    *,
    store: MomentsStore | None = None,
    fidelity: bool = False,
) -> SearchSpace:
    """Survey the candidates of every block, then check their predictions by trials of single blocks.

    A `store` that is given has surveyed the blocks already, in the pass that measured them. `fidelity`: whether plans
    are to be tried for their fidelity to the source too, because it has a limit.
    """
    store = store or open_store(model, text, context, choices)
    candidates = store.candidates()
    fitter = Fitter(store, candidates)
    block_trials = BlockTrials(store, fitter)
    calibrations, overflowing = calibrate(block_trials, candidates, choices)
    damages = {index: of_block.damage for index, of_block in candidates.items()}
    runner = TrialRunner(store, candidates, fitter, block_trials, fidelity=fidelity)
    runner.leave_out((candidate.index, candidate.shape) for candidate in overflowing)
    return SearchSpace(candidates, damages, calibrations, runner, choices)
