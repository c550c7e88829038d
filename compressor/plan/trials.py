"""Plans on trial: what each form in each block costs together, measured on the selection text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from compressor.evaluate.perplexity import Evaluation, Losses, compare_parts, evaluate
from compressor.evaluate.speed import slower
from compressor.modeling_compressor import Replacement
from compressor.patch.tree import patched
from compressor.plan.calibration import Agreement, measure_agreement
from compressor.plan.fit import Fitter
from compressor.plan.frontier import Option
from compressor.plan.moments_store import Statistics
from compressor.plan.shapes import Form, Forms, name_all
from compressor.runtime import distributed
from compressor.runtime.cache import Cache
from compressor.runtime.names import UNNAMED
from compressor.runtime.progress import Progress
from compressor.text import Split, Text


@dataclass(frozen=True)
class Trial:
    """One plan that was fitted and measured on the selection text, by the text's name."""

    forms: dict[int, Form]
    predicted: float  # nats per token
    saved: int
    compensated: bool  # fitted in order, each block making up for the ones before it
    evaluations: dict[str, Evaluation]


class Bench:
    """Everything that planning needs and no budget changes: the statistics, the options, and all plans tried."""

    def __init__(
        self,
        model: Any,
        text: Text,
        *,
        confidence: float = 0.95,
        batch_size: int = 8,
        seed: int = 0,
        cache: Cache | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.model, self.text = model, text
        self.confidence, self.batch_size, self.seed = confidence, batch_size, seed
        self.progress = progress or Progress()
        self.cache = cache or Cache(None, self.progress)
        self.statistics = Statistics(model, text, cache, batch_size, self.progress)
        self.blocks = self.statistics.blocks
        self.surveys = self.statistics.surveys()
        self.damages = {index: survey.damage for index, survey in self.surveys.items()}
        self.fitter = Fitter(self.statistics, self.surveys)
        self.agreement: Agreement = measure_agreement(
            self.statistics, self.surveys, self.fitter, text, self.cache, self.progress
        )
        self.progress.say(
            f"predicted against measured Δloss of {len(self.blocks)} blocks: rank correlation "
            f"{self.agreement.correlation:.2f}"
        )
        factors = self.agreement.factors()
        self.options: dict[int, list[Option]] = {
            index: [replace(option, damage=factors[index] * option.damage) for option in survey.options]
            for index, survey in self.surveys.items()
        }
        self.before: Losses | None = None
        self.tried: dict[tuple[Any, ...], Trial] = {}
        self.slow: dict[Form, bool] = {}  # whether a form runs slower than the block it replaces
        self.compensated: dict[tuple[Any, ...], dict[int, Replacement]] = {}

    def losses(self, windows: Tensor, step: str) -> Losses:
        return evaluate(self.model, windows, batch_size=self.batch_size, progress=self.progress, step=step)

    def attempt(self, forms: Forms, predicted: float, *, compensated: bool = False) -> Trial:
        """Fit one plan and measure it on the selection text."""
        key = (compensated, *sorted(forms.items(), key=lambda item: item[0]))
        if key not in self.tried:
            self.before = self.before or self.measure({}, False, self.text.selection, "search")
            after = self.measure(forms, compensated, self.text.selection, "search")
            found = compare_parts(self.before, after, self.text.parts("selection"), self.confidence, self.seed)
            saved = sum(self.surveys[index].saved(form) for index, form in forms.items())
            self.tried[key] = Trial(dict(forms), predicted, saved, compensated, found)
            rises = ", ".join(f"{label(name)}ΔPPL {e.delta:+.3f}" for name, e in found.items())
            how = ", compensated" if compensated else ""
            self.progress.say(f"  tried {summary(forms)}{how}: {saved:,} parameters, selection {rises}")
        return self.tried[key]

    def measure(self, forms: Forms, compensated: bool, split: Split, step: str) -> Losses:
        """The losses of a plan on one of the texts; what was measured in an earlier run is not run again."""

        def run() -> dict[str, Tensor]:
            with patched(self.model, self.blocks, self.fits(forms, compensated) if forms else {}):
                return {"nats": self.losses(split.windows, step).nats}

        key = {
            **self.statistics.key(self.blocks[0]),
            "what": "trial",
            "forms": {index: str(form) for index, form in sorted(forms.items())},
            "compensated": compensated,
            "measured": split.sha256,
        }
        return Losses(self.cache.get("", key, run)["nats"])

    def fits(self, forms: Forms, compensated: bool) -> dict[int, Replacement]:
        """The modules of a plan. Those that took a pass over the text are kept."""
        if not compensated:
            return self.fitter.at_once(forms)
        key = tuple(sorted(forms.items(), key=lambda item: item[0]))
        if key not in self.compensated:
            self.compensated = {key: self.fitter.in_order(forms)}
        return self.compensated[key]

    def is_slower(self, form: Form, index: int, forms: Forms) -> bool:
        """Whether a form takes longer than the block it replaces. The clock is asked once, and its answer is kept: a
        run that goes on where it stopped must come to the same plan."""
        if form not in self.slow:
            module = self.fits(forms, False)[index]

            def run() -> dict[str, Tensor]:
                # Twice, for a form must not be refused because the machine was busy for a moment.
                return {"slower": torch.tensor(all(slower(self.model, self.blocks[index], module) for _ in range(2)))}

            key = {**self.statistics.key(self.blocks[0]), "what": "slower", "form": str(form)}
            self.slow[form] = bool(self.cache.get("", key, lambda: distributed.compute_on_first(run))["slower"])
        return self.slow[form]

    def trials(self) -> list[Trial]:
        return list(self.tried.values())


def summary(forms: Mapping[int, Form]) -> str:
    """The plan in a line: every block by name when they are few."""
    if len(forms) <= 4:
        return name_all(forms)
    kinds = [form.kind for form in forms.values()]
    return f"{len(forms)} blocks ({', '.join(f'{kinds.count(kind)} {kind}' for kind in sorted(set(kinds)))})"


def label(name: str) -> str:
    """How a text stands before its figure; the only text needs no name."""
    return "" if name == UNNAMED else f"{name} "
