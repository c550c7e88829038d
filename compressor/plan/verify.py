"""Verification: a plan must be inside its budgets on the verification text and on every task, or it is made smaller."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from compressor.evaluate.budget import compute_limits, format_budgets
from compressor.evaluate.evaluator import Evaluator, Measured
from compressor.evaluate.tasks import Scores, TaskChange, find_lost_documents, split_documents
from compressor.patch.tree import identify_patched, patched
from compressor.plan.search import Plan, Planner
from compressor.plan.shapes import Shapes, list_shapes
from compressor.plan.shares import Share, largest_share, list_shares
from compressor.runtime.errors import BudgetError

MOST_VERIFICATIONS = 5  # looks at the verification text
WELL_USED, AIMED_SHARE = 0.8, 0.93  # of the budget: a plan that uses less is made larger; what the next plan aims at
MOST_DOCUMENTS = 64  # lost documents per task that are scored again to find out which block loses them


@dataclass(frozen=True)
class VerifiedPlan:
    """A plan inside all budgets, all that was measured of it, and how often the last word was asked for.

    `looks` counts the plans that were measured on the verification text, `task_looks` those that the deciding documents
    of each task with a budget were asked about.
    """

    plan: Plan
    measured: Measured
    looks: int
    task_looks: dict[str, int]


def search_and_verify(planner: Planner, evaluator: Evaluator, source: Measured) -> VerifiedPlan:
    """The largest plan inside all budgets; `source` is what was measured of the original model.

    After a plan that breaks the budget of a text, the search runs again with a smaller budget. In a plan that breaks
    the budget of a task, the block that costs this task most is restored. Such blocks are chosen on one half of a
    task's documents, and the other half decides, more strictly each time. BudgetError when nothing is left.
    """
    model = planner.model
    plan, measured, looks = search_text(planner, evaluator, source)
    limited = [name for name, limit in evaluator.limits.items() if limit is not None]
    task_looks = 0
    while True:
        identity = identify_patched(model, plan.fits)
        with patched(model, planner.blocks, plan.fits):
            scores = evaluator.score_tasks(model, "compressed", identity)
        # The search has seen no task: the first look is at all documents. A further one is spent only on a plan that is
        # surely inside by the documents on which its blocks are chosen.
        drops = evaluator.compare_choosing(source.scores, scores, limited)
        broken = find_broken_tasks(evaluator, drops)
        suspects = broken or limited  # by the choosing documents alone, for the others must decide once more
        if not broken or not task_looks:
            task_looks += 1
            drops = evaluator.compare_tasks(source.scores, scores, dict.fromkeys(limited, task_looks))
            broken = find_broken_tasks(evaluator, drops)
            if not broken:
                with patched(model, planner.blocks, plan.fits):
                    continuations = evaluator.write_continuations(model, "compressed", identity)
                measured = replace(measured, scores=scores, continuations=continuations)
                return VerifiedPlan(plan, measured, looks, dict.fromkeys(limited, task_looks))
        missed = task_refusal(evaluator, drops, broken, plan.shapes)
        index = find_worst_block(planner, evaluator, plan, suspects, source.scores, scores)
        planner.progress.say(f"  task {', '.join(broken)} refuses it: block {index} costs most and goes back")
        while True:
            smaller = planner.without_block(plan, index)
            if smaller is None:
                raise missed
            plan, looks = smaller, looks + 1
            measured = measure_plan(planner, evaluator, plan, source)
            shares = measure_shares(evaluator, source, measured)
            if largest_share(shares).used <= 1:
                break
            # Rare: the smaller plan costs a text more. The block that costs texts most goes back too.
            missed = text_refusal(evaluator, shares, plan.shapes)
            index = max(plan.shapes, key=lambda index: planner.space.damages[index].linear)


def measure_plan(planner: Planner, evaluator: Evaluator, plan: Plan, source: Measured) -> Measured:
    """The losses of a plan on the verification text, and its fidelity to the source."""
    identity = identify_patched(planner.model, plan.fits)
    with patched(planner.model, planner.blocks, plan.fits):
        return evaluator.measure_texts(planner.model, "verify", identity, source)


def measure_shares(evaluator: Evaluator, before: Measured, after: Measured) -> list[Share]:
    """The share of every budget that the upper end of its interval uses, on the verification text."""
    texts = evaluator.compare_texts(before.losses, after.losses)
    baselines = {name: change.baseline for name, change in texts.items()}
    limits = compute_limits(evaluator.budgets, baselines, evaluator.max_kl)
    return list_shares(limits, texts, evaluator.compare_fidelity(after))


def search_text(planner: Planner, evaluator: Evaluator, source: Measured) -> tuple[Plan, Measured, int]:
    """The largest plan inside the budgets of all verification texts, what was measured of it there, and how many plans
    were tried.

    After a plan that is over the budget, the search runs again with a smaller budget; after one that leaves much of it,
    with a larger one.
    """
    say = planner.progress.say
    best: tuple[Plan, Measured] | None = None
    refusal: BudgetError | None = None
    budget_factor, refused, ceiling, looks = 1.0, math.inf, math.inf, 0
    while looks < MOST_VERIFICATIONS:
        try:
            plan = planner.search(budget_factor, ceiling)
        except BudgetError:
            if best is None and refusal is None:
                raise
            break
        if best is not None and planner.count_saved(plan) <= planner.count_saved(best[0]):
            break
        looks += 1
        measured = measure_plan(planner, evaluator, plan, source)
        shares = measure_shares(evaluator, source, measured)
        used = largest_share(shares).used
        ends = "; ".join(share.end for share in shares)
        if used > 1:
            say(f"  verification text refuses it: {ends}")
            # Refused again, the selection text is no guide: what is predicted shrinks by as much as is over the budget.
            ceiling = plan.predicted * (0.99 if refusal is None else max(0.5, AIMED_SHARE / used))
            refusal = text_refusal(evaluator, shares, plan.shapes)
            refused, budget_factor = min(refused, budget_factor), budget_factor * AIMED_SHARE / used
        else:
            say(f"  verification text holds: {ends}")
            best = (plan, measured)
            if used >= WELL_USED:
                break
            # Between what held and what was refused, and not too far ahead where a plan costs next to nothing.
            budget_factor = min(budget_factor * min(AIMED_SHARE / max(used, 0.2), 3.0), (budget_factor + refused) / 2)
    if best is None:
        assert refusal is not None
        raise refusal
    return *best, looks


def task_limit(evaluator: Evaluator, name: str) -> float:
    """The largest fall of this task's score; infinite where it is only reported."""
    limit = evaluator.limits[name]
    return math.inf if limit is None else limit


def find_broken_tasks(evaluator: Evaluator, drops: Mapping[str, TaskChange]) -> list[str]:
    """The tasks whose score may have fallen by more than their limit."""
    return [name for name, change in drops.items() if change.upper > task_limit(evaluator, name)]


def find_worst_block(
    planner: Planner,
    evaluator: Evaluator,
    plan: Plan,
    suspects: list[str],
    before: Mapping[str, Scores],
    after: Mapping[str, Scores],
) -> int:
    """The block that, restored, wins back most of the documents that these tasks lost, of those that choose."""
    if len(plan.shapes) == 1:
        return next(iter(plan.shapes))
    won_back: dict[int, float] = dict.fromkeys(plan.shapes, 0.0)
    identity = identify_patched(planner.model, plan.fits)
    others = {i: {k: v for k, v in identity["replaced"].items() if k != str(i)} for i in plan.shapes}
    identities = {index: {**identity, "replaced": replaced} for index, replaced in others.items()}
    for task in (task for task in evaluator.tasks if task.name in suspects):
        choosing, _ = split_documents(task.documents)
        lost = find_lost_documents(task, before[task.name], after[task.name], choosing, MOST_DOCUMENTS)
        for index in plan.shapes if lost else []:
            rest = {i: module for i, module in plan.fits.items() if i != index}
            with patched(planner.model, planner.blocks, rest):
                scores = evaluator.score_task(planner.model, task, f"block {index} back", identities[index], lost)
            gain = scores[task.metric] - after[task.name][task.metric][lost]
            won_back[index] += task.better * gain.sum().item()
    return max(plan.shapes, key=lambda index: (won_back[index], planner.space.damages[index].linear, -index))


def refuse_over_budget(evaluator: Evaluator, before: Measured, after: Measured, shapes: Shapes) -> None:
    """BudgetError when a given plan is not inside the budgets."""
    shares = measure_shares(evaluator, before, after)
    if largest_share(shares).used > 1:
        raise text_refusal(evaluator, shares, shapes)
    drops = evaluator.compare_tasks(before.scores, after.scores)
    broken = find_broken_tasks(evaluator, drops)
    if broken:
        raise task_refusal(evaluator, drops, broken, shapes)


def text_refusal(evaluator: Evaluator, shares: list[Share], shapes: Shapes) -> BudgetError:
    """The error for a plan that costs a text too much; it names the text and the budget that are furthest over."""
    return BudgetError(
        f"the budget {format_budgets(evaluator.budgets, evaluator.max_kl)} is missed on the verification text: closest "
        f"was block {list_shapes(shapes)} with {largest_share(shares).figure}; nothing written"
    )


def task_refusal(
    evaluator: Evaluator, drops: Mapping[str, TaskChange], broken: list[str], shapes: Shapes
) -> BudgetError:
    """The error for a plan that costs a task too much; it names the task that is furthest over its limit."""
    name = max(broken, key=lambda name: drops[name].upper - task_limit(evaluator, name))
    change, limit = drops[name], task_limit(evaluator, name)
    hint = "; more documents (--task-limit) would narrow the interval" if change.drop <= limit else ""
    return BudgetError(
        f"the budget of task {name} is missed: closest was block {list_shapes(shapes)} with a drop of "
        f"{change.drop:+.4f} (upper end {change.upper:+.4f}, allowed {limit:g}, {change.documents} documents{hint}); "
        "nothing written"
    )
