"""Plans from Python: search for one, fit the shapes of one, put one into a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from compressor.evaluate.budget import Budget, Limits, Removal, compute_limits, parse_budgets, parse_divergence
from compressor.evaluate.perplexity import evaluate
from compressor.evaluate.remembered import remember_losses
from compressor.measure.profile import Profile
from compressor.measure.study import Study
from compressor.measure.verdicts import judge_all
from compressor.models.blocks import find_blocks, find_branches
from compressor.models.branches import BranchIndex
from compressor.models.source import identify_weights
from compressor.patch.checkpoint import count_parameters
from compressor.patch.tree import patch
from compressor.plan.choices import ANYTHING, Choices
from compressor.plan.fit import Fitter, Module
from compressor.plan.moments_store import MomentsStore, open_store
from compressor.plan.removal import SizeTarget, refuse_over_selection, refuse_too_large, search_size
from compressor.plan.search import ROOM, Plan, Planner
from compressor.plan.shapes import Shape, Shapes, describe_shape
from compressor.plan.space import SearchSpace, prepare_search
from compressor.runtime.context import RunContext
from compressor.runtime.errors import InputError
from compressor.text import Text


@dataclass(frozen=True)
class SearchedPlan(Plan):
    """A plan with what it stands on: the profile and verdicts that it was searched with, on which text, for which
    limits and size, and the identity of the weights. `settings` are what was asked for, as keys of a recipe."""

    profile: Profile
    study: Study
    text: Text
    limits: Limits
    target: SizeTarget | None
    seed: int
    settings: dict[str, Any]
    identity: dict[str, Any]

    def without_modules(self) -> SearchedPlan:
        """The plan without weights and measurements in them: what may be kept beside a model that has it."""
        study, profile = Study({}, {}), replace(self.profile, blocks=[], attention=[])
        return replace(self, fits={}, trials=[], profile=profile, study=study)


def make_planner(
    space: SearchSpace,
    profile: Profile,
    budgets: Mapping[str, Budget],
    *,
    max_kl: float | None = None,
    objective: str = "speed",
    room: float = 0.0,
) -> Planner:
    """A planner for these budgets.

    Its limits follow from the source's perplexity on the verification text; blocks are judged by predictions alone.
    """
    runner = space.runner
    text = runner.text
    losses = evaluate(runner.model, text.verification.windows, runner.context, step="verify")
    remember_losses(runner.model, text.verification.windows, losses)
    baselines = {name: losses.part(part).perplexity for name, part in text.parts("verification").items()}
    limits = compute_limits(budgets, baselines, max_kl)
    verdicts = judge_all(profile, space.damages, limits.smallest, {})
    return Planner(space, limits, verdicts, objective=objective, room=room, profile=profile)


def plan(
    model: Any,
    profile: Profile,
    text: Text,
    *,
    max_dppl: str | float | Mapping[str, str | float] | None = None,
    max_kl: float | None = None,
    remove: str | float | None = None,
    objective: str = "speed",
    choices: Choices = ANYTHING,
    context: RunContext | None = None,
) -> Plan:
    """Search for the largest plan inside the budget (a rise in perplexity, a divergence from the source, or both), or
    for the cheapest that removes at least so much (`remove`: 10%, or a number of parameters), of what `choices` allow.

    Branches that the profile does not have stay as they are. The model is left as it was; BudgetError when nothing
    fits.
    """
    context = context or RunContext()
    choices.refuse_unknown(len(find_blocks(model)))
    choices = choices.within({p.block.branch for p in profile.branches})
    if not choices.searched_branches:
        raise InputError("the profile has none of the branches that the choices allow; measure those too")
    blocks = find_branches(model, choices.searched_branches)
    if max_dppl is None and max_kl is None and remove is None:
        raise InputError("plan needs max_dppl, max_kl or remove, such as max_dppl=1.0, max_kl=0.02 or remove='10%'")
    words = [f"{k}={v}" for k, v in max_dppl.items()] if isinstance(max_dppl, Mapping) else [str(max_dppl)]
    budgets = parse_budgets(None if max_dppl is None else words, text.counts, context.confidence)
    kl = None if max_kl is None else parse_divergence(max_kl)
    target = None if remove is None else SizeTarget(Removal.parse(remove), count_parameters(model))
    if target is not None:
        refuse_too_large(target, [block for block in blocks if choices.allows_block(block.index)], choices.kinds)
    space = prepare_search(model, text, context, choices, fidelity=kl is not None)
    planner = make_planner(space, profile, budgets, max_kl=kl, objective=objective, room=ROOM)
    found = planner.search() if target is None else refuse_over_selection(planner, search_size(planner, target), target)
    identity = identify_weights(model)
    if profile.weights != identity["weights"]:  # figures of other weights are not kept
        return found
    asked = {"max_dppl": None if max_dppl is None else words, "max_kl": kl, "remove": remove}
    settings = {key: value for key, value in asked.items() if value is not None}
    return SearchedPlan(
        **vars(found),
        profile=profile.of(space.damages),
        study=Study(dict(planner.verdicts), space.damages),
        text=text,
        limits=planner.limits,
        target=target,
        seed=context.seed,
        settings={"confidence": context.confidence, **settings},
        identity=identity,
    )


def fit_shapes(
    model: Any,
    shapes: Shapes,
    text: Text,
    context: RunContext,
    *,
    compensated: bool = True,
    choices: Choices = ANYTHING,
) -> dict[BranchIndex, Module]:
    """The replacements that a search with these choices would fit; the model is left as it was."""
    blocks = {block.index: block for block in find_branches(model)}
    for index in shapes:
        if index not in blocks:
            last = len(find_blocks(model)) - 1
            raise InputError(f"the plan replaces block {index}, but the model has blocks 0 to {last}")
    store = open_store(model, text, context, choices, shapes)
    for index, shape in shapes.items():
        refuse_unfit(store, index, shape)
    fitter = Fitter(store, store.candidates())
    return fitter.fit_in_order(shapes) if compensated else fitter.fit_at_once(shapes)


def refuse_unfit(store: MomentsStore, index: BranchIndex, shape: Shape) -> None:
    """Refuse a shape that a block cannot take."""
    block, units = store.blocks[index], store.units[index]
    name = "heads" if block.is_attention else "neurons"
    if shape.rank is not None and shape.rank > block.width:
        raise InputError(f"the plan wants rank {shape.rank} in block {index}, whose width is {block.width}")
    if shape.neurons > (units.count if units else 0):
        known = f"{units.count} {name}" if units else f"no {name} that are known"
        raise InputError(f"the plan keeps {shape.neurons} {name} in block {index}, which has {known}")
    if block.is_attention and shape.neurons and (shape.rank is None or shape.neurons == units.count):  # type: ignore[union-attr]
        raise InputError(f"the plan {describe_shape(index, shape)} in {index}: name fewer heads, and a low rank")
    if store.is_anchored(index) and not shape.neurons:
        raise InputError(
            f"the plan takes all heads from {index}, but caches ask this layer for their length; keep a head there"
        )


def apply(model: Any, plan: Plan | Shapes, text: Text, context: RunContext | None = None) -> Any:
    """Put the replacements of a plan into the model, for good. Given shapes alone, they are fitted first."""
    fits = plan.fits if isinstance(plan, Plan) else fit_shapes(model, plan, text, context or RunContext())
    patch(model, find_branches(model), fits)
    return model
