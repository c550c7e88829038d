"""The last word: a plan must hold on the verification text and on every task, or it is walked back until it does."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from compressor.evaluate.budget import Limits, format_budgets, text_prefix
from compressor.evaluate.evaluator import Evaluator, Measured
from compressor.evaluate.perplexity import Losses, PerplexityChange
from compressor.evaluate.tasks import Scores, TaskChange, find_lost_documents
from compressor.patch.tree import identify_patched, patched
from compressor.plan.search import Plan, Planner
from compressor.plan.shapes import Shapes, list_shapes
from compressor.runtime.errors import BudgetError

MOST_VERIFICATIONS = 5  # looks at the verification text
ENOUGH, AIM = 0.8, 0.93  # of the budget: a plan that uses less is made larger, and this much is aimed at
MOST_DOCUMENTS = 64  # per task, to find out which block loses them


@dataclass(frozen=True)
class VerifiedPlan:
    """A plan that holds everywhere, all that was measured of it, and how often the verification text was looked at."""

    plan: Plan
    measured: Measured
    looks: int


def search_and_verify(planner: Planner, evaluator: Evaluator, source: Measured) -> VerifiedPlan:
    """The largest plan that holds everywhere; `source` is what was measured of the model as it is.

    A plan that the text refuses is searched again with less to spend. A plan that a task refuses gives back the block
    that costs this task most. BudgetError when nothing is left.
    """
    model = planner.model
    plan, losses, looks = search_text(planner, evaluator, source.losses)
    while True:
        identity = identify_patched(model, plan.fits)
        with patched(model, planner.blocks, plan.fits):
            scores = evaluator.score_tasks(model, "compressed", identity)
            drops = evaluator.compare_tasks(source.scores, scores)
            broken = broken_tasks(evaluator, drops)
            if not broken:
                continuations = evaluator.write_continuations(model, "compressed", identity)
                return VerifiedPlan(plan, Measured(losses, scores, continuations), looks)
        refusal = missed_task(evaluator, drops, broken, plan.shapes)
        index = worst_block(planner, evaluator, plan, broken, source.scores, scores)
        planner.progress.say(f"  task {', '.join(broken)} refuses it: block {index} costs most and goes back")
        smaller = planner.without(plan, index)
        if smaller is None:
            raise refusal
        plan, looks = smaller, looks + 1
        losses = losses_of(planner, evaluator, plan)
        texts = evaluator.compare_texts(source.losses, losses)
        if share_used(planner.limits, texts) > 1:  # a text that a smaller plan hurts more: rare, and no plan to write
            raise missed_text(evaluator, texts, plan.shapes)


def losses_of(planner: Planner, evaluator: Evaluator, plan: Plan) -> Losses:
    """The losses of a plan on the verification text."""
    with patched(planner.model, planner.blocks, plan.fits):
        return evaluator.measure_losses(planner.model, "verify", identify_patched(planner.model, plan.fits))


def share_used(limits: Limits, texts: Mapping[str, PerplexityChange]) -> float:
    """The share of the budget that the upper end uses, of the text that uses most."""
    return max(change.upper / limits.allowed[name] for name, change in texts.items())


def search_text(planner: Planner, evaluator: Evaluator, source: Losses) -> tuple[Plan, Losses, int]:
    """The largest plan that holds on the verification text, its losses there, and how often was looked.

    A plan that is refused there is searched again with less to spend; one that leaves much of the budget, with more.
    """
    say, limits = planner.progress.say, planner.limits
    best: tuple[Plan, Losses] | None = None
    refusal: BudgetError | None = None
    tighten, refused, ceiling, looks = 1.0, math.inf, math.inf, 0
    while looks < MOST_VERIFICATIONS:
        try:
            plan = planner.search(tighten, ceiling)
        except BudgetError:
            if best is None and refusal is None:
                raise
            break
        if best is not None and plan.shapes == best[0].shapes:
            break
        looks += 1
        losses = losses_of(planner, evaluator, plan)
        texts = evaluator.compare_texts(source, losses)
        used = share_used(limits, texts)
        ends = "; ".join(
            f"{text_prefix(n)}upper end {c.upper:+.3f} of {limits.allowed[n]:.3f}" for n, c in texts.items()
        )
        if used > 1:
            say(f"  verification text refuses it: {ends}")
            refusal = missed_text(evaluator, texts, plan.shapes)
            refused, ceiling = min(refused, tighten), 0.99 * plan.predicted
            tighten *= AIM / used
        else:
            say(f"  verification text holds: {ends}")
            best = (plan, losses)
            if used >= ENOUGH:
                break
            # Between what held and what was refused; a text that costs nothing must not send the next step too far.
            tighten = min(tighten * min(AIM / max(used, 0.2), 3.0), (tighten + refused) / 2)
    if best is None:
        assert refusal is not None
        raise refusal
    return *best, looks


def broken_tasks(evaluator: Evaluator, drops: Mapping[str, TaskChange]) -> list[str]:
    limits = {name: limit for name, limit in evaluator.limits.items() if limit is not None}
    return [name for name, limit in limits.items() if drops[name].upper > limit]


def worst_block(
    planner: Planner,
    evaluator: Evaluator,
    plan: Plan,
    broken: list[str],
    before: Mapping[str, Scores],
    after: Mapping[str, Scores],
) -> int:
    """The block whose return wins back most of the documents that the broken tasks lost."""
    if len(plan.shapes) == 1:
        return next(iter(plan.shapes))
    won: dict[int, float] = dict.fromkeys(plan.shapes, 0.0)
    whole = identify_patched(planner.model, plan.fits)
    others = {i: {k: v for k, v in whole["replaced"].items() if k != str(i)} for i in plan.shapes}
    identities = {index: {**whole, "replaced": replaced} for index, replaced in others.items()}
    for task in (task for task in evaluator.tasks if task.name in broken):
        lost = find_lost_documents(task, before[task.name], after[task.name], MOST_DOCUMENTS)
        for index in plan.shapes if lost else []:
            rest = {i: module for i, module in plan.fits.items() if i != index}
            with patched(planner.model, planner.blocks, rest):
                found = evaluator.score_task(planner.model, task, f"block {index} back", identities[index], lost)
            gain = found[task.metric] - after[task.name][task.metric][lost]
            won[index] += task.better * gain.sum().item()
    return max(plan.shapes, key=lambda index: (won[index], planner.ground.damages[index].linear, -index))


def refuse_missed(evaluator: Evaluator, before: Measured, after: Measured, shapes: Shapes) -> None:
    """BudgetError when a given plan does not hold."""
    texts = evaluator.compare_texts(before.losses, after.losses)
    if any(e.upper > evaluator.budgets[name].allowed_rise(e.baseline) for name, e in texts.items()):
        raise missed_text(evaluator, texts, shapes)
    drops = evaluator.compare_tasks(before.scores, after.scores)
    broken = broken_tasks(evaluator, drops)
    if broken:
        raise missed_task(evaluator, drops, broken, shapes)


def missed_text(evaluator: Evaluator, texts: Mapping[str, PerplexityChange], shapes: Shapes) -> BudgetError:
    allowed = {name: evaluator.budgets[name].allowed_rise(e.baseline) for name, e in texts.items()}
    name = max(texts, key=lambda name: texts[name].upper / allowed[name])
    found = texts[name]
    return BudgetError(
        f"the budget {format_budgets(evaluator.budgets)} is missed on the verification text: closest was block "
        f"{list_shapes(shapes)} with {text_prefix(name)}ΔPPL {found.delta:+.3f} (upper end {found.upper:+.3f}, allowed "
        f"{allowed[name]:+.3f}; windows of {found.seq_len} tokens); nothing written"
    )


def missed_task(
    evaluator: Evaluator, drops: Mapping[str, TaskChange], broken: list[str], shapes: Shapes
) -> BudgetError:
    name = max(broken, key=lambda name: drops[name].upper - (evaluator.limits[name] or 0.0))
    found, limit = drops[name], evaluator.limits[name] or 0.0
    hint = "; more documents (--task-limit) would narrow the interval" if found.drop <= limit else ""
    return BudgetError(
        f"the budget of task {name} is missed: closest was block {list_shapes(shapes)} with a drop of "
        f"{found.drop:+.4f} (upper end {found.upper:+.4f}, allowed {limit:g}, {found.documents} documents{hint}); "
        "nothing written"
    )
