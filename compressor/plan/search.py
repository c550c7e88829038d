"""Which blocks to replace by what: the cheapest predicted damage per parameter first, as far as the budget goes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from compressor.evaluate.budget import Budget, budgets_of
from compressor.evaluate.perplexity import Evaluation, Losses
from compressor.measure.gradients import Damage
from compressor.measure.profile import Profile
from compressor.measure.verdicts import Verdict, judge
from compressor.modeling_compressor import Replacement
from compressor.models.blocks import find_blocks
from compressor.patch.tree import patch
from compressor.plan.calibration import Agreement
from compressor.plan.fit import Fitter
from compressor.plan.frontier import CLOSE_ENOUGH, Option, bracket, efficient, sequence
from compressor.plan.moments_store import Statistics
from compressor.plan.shapes import Form, Forms, name_all
from compressor.plan.trials import Bench, Trial, label
from compressor.runtime.cache import Cache
from compressor.runtime.errors import BudgetError, InputError
from compressor.runtime.progress import Progress
from compressor.text import Text

MOST_FILLS = 4
MOST_COMPENSATIONS = 3
USUAL_GAIN = 0.85  # what compensation leaves of a plan's cost, until it was measured


@dataclass(frozen=True)
class Plan:
    """What to put where, why, and what it measured on the selection text. `fits` are the modules themselves."""

    forms: dict[int, Form]
    compensated: bool
    predicted: float  # nats per token
    verdicts: dict[int, Verdict]
    damages: dict[int, Damage]
    agreement: Agreement
    selection: dict[str, Evaluation]
    trials: list[Trial]
    fits: dict[int, Replacement]


class Planner:
    """Search for the plan that saves most within a budget; another search on the same bench reuses its trials."""

    def __init__(
        self,
        bench: Bench,
        profile: Profile,
        budgets: Mapping[str, Budget],
        *,
        verified: Losses | None = None,
        objective: str = "speed",
        compensate: bool = True,
    ) -> None:
        self.bench, self.budgets, self.objective, self.compensate = bench, budgets, objective, compensate
        self.profile = profile
        self.model, self.text, self.progress = bench.model, bench.text, bench.progress
        self.blocks, self.damages = bench.blocks, bench.damages
        self.confidence = next(iter(budgets.values())).confidence
        self.verified = verified or bench.losses(self.text.verification.windows, "verify")
        parts = self.text.parts("verification")
        baselines = {name: self.verified.part(part).perplexity for name, part in parts.items()}
        self.allowed = {name: budgets[name].dppl(baseline) for name, baseline in baselines.items()}
        # Perplexities of two texts differ; what a budget means on one is carried to the other in nats per token.
        self.limits = {name: math.log1p(self.allowed[name] / baseline) for name, baseline in baselines.items()}
        self.limit = min(self.limits.values())
        self.verdicts = {p.block.index: judge(p, self.damages[p.block.index], self.limit) for p in profile.blocks}
        self.gain = USUAL_GAIN if compensate else 1.0
        self.scale = 1.0  # measured over predicted, of the last plan tried
        self.banned: set[Form] = set()
        self.lay_out()

    def with_budgets(self, budgets: Mapping[str, Budget]) -> Planner:
        """A planner for another budget on the same bench."""
        how: dict[str, Any] = {"objective": self.objective, "compensate": self.compensate}
        return Planner(self.bench, self.profile, budgets, verified=self.verified, **how)

    def adopt(self, verdicts: Mapping[int, Verdict]) -> None:
        """Take verdicts that know more than predictions do: those of blocks that were replaced on trial."""
        self.verdicts = dict(verdicts)
        self.lay_out()

    def lay_out(self) -> None:
        """The options of every block that may be touched, and the plans from the smallest to the largest."""
        usable = {i: row for i, row in self.bench.options.items() if self.verdicts[i].word != "unsafe"}
        allowed = [[o for o in row if o.saved > 0 and o.form not in self.banned] for row in usable.values()]
        rows = [[o for o in row if o.damage <= 4 * self.limit] for row in allowed]
        self.options = [row for row in rows if row]
        self.plans = sequence([efficient(row) for row in self.options])
        self.singles = sorted((min(row, key=lambda o: o.damage) for row in allowed if row), key=lambda o: o.damage)

    def spend(self, trial: Trial, tighten: float) -> float:
        """The share of the budget used, of the text that uses most.

        That is the point estimate plus the half-width to be expected on the verification text.
        """
        widths = self.text.selection.tokens / self.text.verification.tokens
        shares = []
        for name, found in trial.evaluations.items():
            nats = math.log1p(found.delta / found.baseline)
            if self.confidence > 0:
                nats += math.log1p(max(0.0, found.upper - found.delta) / found.compressed) * widths**0.5
            shares.append(nats / (self.limits[name] * tighten))
        return max(shares)

    def search(self, tighten: float = 1.0, ceiling: float = math.inf) -> Plan:
        """The largest plan whose measured cost fits `tighten` times the budget, or a BudgetError that says how near.

        `ceiling` bounds the predicted damage: a plan that verification text refused must not come back.
        """
        return self.plan_of(self.find(tighten, ceiling))

    def find(self, tighten: float, ceiling: float) -> Trial:
        """Plans are tried with the fits that cost nothing, then the one that fits is compensated, and made larger when
        that leaves room."""
        fitting: list[Trial] = []
        for _ in range(MOST_COMPENSATIONS):
            found = self.nearest(tighten, ceiling)
            if found is None:
                break
            forms, predicted = found
            plain = self.bench.attempt(forms, predicted)
            if not self.compensate:
                fitting += [plain] if self.spend(plain, tighten) <= 1 else []
                break
            trial = self.bench.attempt(forms, predicted, compensated=True)
            used, without = self.spend(trial, tighten), self.spend(plain, tighten)
            fitting += [t for t in (trial, plain) if self.spend(t, tighten) <= 1]
            gain = min(max(used / without, 0.5), 1.0) if without > 0 else self.gain
            settled = CLOSE_ENOUGH <= used <= 1 or abs(gain - self.gain) < 0.01
            self.gain = gain
            if settled:
                break
        if not fitting:
            for option in [o for o in self.singles if o.damage < ceiling][:3]:
                trial = self.bench.attempt({option.index: option.form}, option.damage)
                if self.spend(trial, tighten) <= 1:
                    fitting.append(trial)
                    break
        if not fitting:
            raise BudgetError(self.explain_failure())
        return max(fitting, key=lambda t: (t.saved, -self.spend(t, tighten)))

    def nearest(self, tighten: float, ceiling: float) -> tuple[Forms, float] | None:
        """The largest plan that is expected to fit, without forms that are slower than what they replace."""
        while True:
            plans = [plan for plan in self.plans if plan[1] < ceiling]
            costs = partial(self.cost_of, plans, tighten)
            best = bracket(plans, self.limit * tighten / self.gain, costs, self.scale)
            if best is None:
                return None
            forms, predicted = self.fill(*plans[best], tighten, ceiling)
            slow = self.slow_forms(forms) if self.objective == "speed" else set()
            if not slow:
                return forms, predicted
            self.progress.say(f"  smaller but slower, so not chosen: {', '.join(sorted(map(str, slow)))}")
            self.banned |= slow
            self.lay_out()

    def cost_of(self, plans: list[tuple[dict[int, Form], float]], tighten: float, which: int) -> float:
        return self.cost(*plans[which], tighten)

    def cost(self, forms: Forms, predicted: float, tighten: float) -> float:
        """What a plan is expected to spend once it is compensated."""
        spent = self.spend(self.bench.attempt(forms, predicted), tighten)
        self.scale = min(max(spent * self.limit * tighten / predicted, 0.2), 20.0) if predicted else 1.0
        return self.gain * spent

    def fill(self, forms: Forms, predicted: float, tighten: float, ceiling: float) -> tuple[Forms, float]:
        """Spend what a plan leaves over: go further in the block that saves most and is predicted to fit."""
        target = self.limit * tighten
        refused: dict[int, int] = {}  # block → parameters saved by an option that did not fit
        for _ in range(MOST_FILLS):
            used = self.cost(forms, predicted, tighten)
            if used >= CLOSE_ENOUGH:
                break
            left = min((1 - used) * target / max(1.0, used * target / predicted), ceiling - predicted)
            moves = []
            for row in self.options:
                nothing = Option(row[0].index, Form(), 0, 0.0)
                now = next((o for o in row if forms.get(o.index) == o.form), nothing)
                most = refused.get(now.index, math.inf)
                further = [o for o in row if now.saved < o.saved < most and o.damage - now.damage <= left]
                moves += [(o.saved - now.saved, o, o.damage - now.damage) for o in further]
            if not moves:
                break
            _, option, more = max(moves, key=lambda move: (move[0], -move[1].index))
            larger = {**forms, option.index: option.form}
            if self.cost(larger, predicted + more, tighten) <= 1:
                forms, predicted = larger, predicted + more
            else:
                refused[option.index] = option.saved
        return forms, predicted

    def slow_forms(self, forms: Forms) -> set[Form]:
        """Forms that run slower than the block they would replace. Fewer neurons alone never do."""
        timed = {index: form for index, form in forms.items() if form.rank != 0}
        return {form for index, form in timed.items() if self.bench.is_slower(form, index, forms)}

    def verify(self, plan: Plan) -> Losses:
        """The plan's losses on the verification text, which no search has seen."""
        return self.bench.measure(plan.forms, plan.compensated, self.text.verification, "verify")

    def without(self, plan: Plan, index: int) -> Plan | None:
        """The plan with one block restored and the rest fitted again; a block that stands alone gets a milder form."""
        damages = {o.index: o.damage for row in self.options for o in row if plan.forms.get(o.index) == o.form}
        forms = {i: form for i, form in plan.forms.items() if i != index}
        predicted = max(0.0, plan.predicted - damages.get(index, 0.0))
        if not forms:
            milder = [o for row in self.options for o in row if o.index == index and o.damage < 0.8 * plan.predicted]
            if not milder:
                return None
            option = max(milder, key=lambda o: o.saved)
            forms, predicted = {index: option.form}, option.damage
        return self.plan_of(self.bench.attempt(forms, predicted, compensated=plan.compensated))

    def plan_of(self, trial: Trial) -> Plan:
        return Plan(
            forms=trial.forms,
            compensated=trial.compensated,
            predicted=trial.predicted,
            verdicts=self.verdicts,
            damages=self.damages,
            agreement=self.bench.agreement,
            selection=trial.evaluations,
            trials=self.bench.trials(),
            fits=self.bench.fits(trial.forms, trial.compensated),
        )

    def explain_failure(self) -> str:
        asked = ask_all(self.budgets)
        if not self.bench.tried:
            return f"no replacement fits the budget {asked}: every block is unsafe to touch; nothing written"
        nearest = min(self.bench.trials(), key=lambda trial: self.spend(trial, 1.0))
        shares = {name: e.upper / self.allowed[name] for name, e in nearest.evaluations.items()}
        name = max(shares, key=lambda name: shares[name])
        found = nearest.evaluations[name]
        return (
            f"no replacement fits the budget {asked}: closest was block {name_all(nearest.forms)} with "
            f"{label(name)}ΔPPL {found.delta:+.3f} (upper end {found.upper:+.3f}) on the selection text, windows of "
            f"{found.seq_len} tokens; nothing written"
        )


def ask_all(budgets: Mapping[str, Budget]) -> str:
    return ", ".join(f"{label(name)}{budget}" for name, budget in budgets.items())


def plan(
    model: Any,
    profile: Profile,
    text: Text,
    *,
    max_dppl: str | float | Mapping[str, str | float],
    confidence: float = 0.95,
    objective: str = "speed",
    batch_size: int = 8,
    seed: int = 0,
    cache: Cache | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Search for the largest plan inside the budget. The model is left as it was; BudgetError when nothing fits."""
    words = [f"{k}={v}" for k, v in max_dppl.items()] if isinstance(max_dppl, Mapping) else [str(max_dppl)]
    budgets = budgets_of(words, text.counts, confidence)
    bench = Bench(model, text, confidence=confidence, batch_size=batch_size, seed=seed, cache=cache, progress=progress)
    return Planner(bench, profile, budgets, objective=objective).search()


def fit_forms(
    model: Any,
    forms: Forms,
    text: Text,
    *,
    compensated: bool = True,
    batch_size: int = 8,
    cache: Cache | None = None,
    progress: Progress | None = None,
) -> dict[int, Replacement]:
    """The replacements that a search would fit for these forms; the model is left as it was."""
    blocks = find_blocks(model)
    for index in forms:
        if not 0 <= index < len(blocks):
            raise InputError(f"the plan replaces block {index}, but the model has blocks 0 to {len(blocks) - 1}")
    statistics = Statistics(model, text, cache, batch_size, progress or Progress())
    for index, form in forms.items():
        width, neurons = blocks[index].width, statistics.neurons[index]
        if form.rank is not None and form.rank > width:
            raise InputError(f"the plan wants rank {form.rank} in block {index}, whose width is {width}")
        if form.neurons > (neurons.count if neurons else 0):
            known = f"{neurons.count} neurons" if neurons else "no neurons that are known"
            raise InputError(f"the plan keeps {form.neurons} neurons in block {index}, which has {known}")
    fitter = Fitter(statistics, statistics.surveys())
    return fitter.in_order(forms) if compensated else fitter.at_once(forms)


def apply(
    model: Any,
    plan: Plan | Forms,
    text: Text,
    *,
    batch_size: int = 8,
    cache: Cache | None = None,
    progress: Progress | None = None,
) -> Any:
    """Put the replacements of a plan into the model, for good. Given forms alone, they are fitted first."""
    options: dict[str, Any] = {"batch_size": batch_size, "cache": cache, "progress": progress}
    fits = plan.fits if isinstance(plan, Plan) else fit_forms(model, plan, text, **options)
    patch(model, find_blocks(model), fits)
    return model
