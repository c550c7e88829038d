"""This package: the cheapest plan of a size by its own search, and the same plan healed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from compressor.evaluate.budget import Removal, parse_budgets
from compressor.heal.distil import heal
from compressor.heal.settings import HealSettings
from compressor.measure.profile import Profile, measure
from compressor.models.blocks import find_branches
from compressor.patch.checkpoint import count_parameters
from compressor.patch.tree import Replacements, patch
from compressor.plan.api import make_planner
from compressor.plan.choices import Choices
from compressor.plan.removal import SizeTarget, search_size
from compressor.plan.space import SearchSpace, prepare_search
from compressor.runtime.cache import Cache
from compressor.runtime.context import RunContext
from compressor.runtime.errors import BudgetError
from compressor.runtime.names import GUARD
from compressor.runtime.progress import Progress
from compressor.text import Split, Text
from compressor.text.guard import draw_words
from peer_methods.common import BATCH, Inapplicable, Subject, share_copy

WORDS = GUARD / 2  # windows of random words for each fitted one, as many as `compress` has


@dataclass(frozen=True)
class Ours:
    """The package on these branches; with `heal_tokens` its plan is trained towards the source afterwards."""

    branches: tuple[str, ...]
    cache: Path | None = None
    heal_tokens: int = 0

    def __call__(self, subject: Subject, parameters: int) -> Any:
        fits = find_plan(subject, parameters, self.branches, self.cache)
        if self.heal_tokens:
            fits = self.train(subject, fits)
        changed = share_copy(subject.model)
        patch(changed, find_branches(changed), fits)
        return changed

    def train(self, subject: Subject, fits: Replacements) -> Replacements:
        assert subject.healing is not None
        text = replace(split_calibration(subject), healing=Split(subject.healing, "healing"))
        branches = find_branches(subject.model)
        settings = HealSettings.for_width(self.heal_tokens, branches[0].width)
        return heal(subject.model, branches, fits, text, settings, make_context(self.cache)).fits


@cache
def make_context(directory: Path | None) -> RunContext:
    progress = Progress()
    return RunContext(cache=Cache(directory, progress), batch_size=BATCH, progress=progress)


def split_calibration(subject: Subject) -> Text:
    """Five of six calibration windows to fit on, every sixth to try plans on; no other text is seen.

    Guard windows are of random words alone, which need no text.
    """
    sixth = torch.arange(len(subject.windows)) % 6 == 5
    parts = (Split(subject.windows[part], "calibration") for part in (~sixth, sixth))
    calibration, selection = parts
    text = Text(calibration, selection, selection)
    vocabulary = torch.arange(len(subject.model.get_input_embeddings().weight))
    return replace(text, guard=draw_words(vocabulary, round(WORDS * len(text.fitting)), text.fitting, seed=0))


@cache
def survey(subject: Subject, branches: tuple[str, ...], directory: Path | None) -> tuple[SearchSpace, Profile]:
    """What the searches for all sizes stand on."""
    text, context = split_calibration(subject), make_context(directory)
    space = prepare_search(subject.model, text, context, Choices(branches=branches))
    return space, measure(subject.model, text, context, branches=branches)


@cache
def find_plan(subject: Subject, parameters: int, branches: tuple[str, ...], directory: Path | None) -> Replacements:
    """The replacements of the cheapest plan that removes so many parameters."""
    space, profile = survey(subject, branches, directory)
    budgets = parse_budgets(None, split_calibration(subject).counts, make_context(directory).confidence)
    planner = make_planner(space, profile, budgets, objective="size")
    target = SizeTarget(Removal.parse(parameters), count_parameters(subject.model))
    try:
        return search_size(planner, target).fits
    except BudgetError as error:
        raise Inapplicable(str(error)) from error
