"""Verification: a plan must be inside its budgets on the verification text and on every task, or it is made smaller."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from compressor.evaluate.budget import compute_limits, format_budgets
from compressor.evaluate.evaluator import Evaluator, Measured
from compressor.evaluate.tasks import Scores, TaskChange, find_lost_documents, split_documents
from compressor.heal.distil import Healing
from compressor.models.branches import BranchIndex, layer_of
from compressor.patch.tree import identify_patched, patched
from compressor.plan.healing import Healer
from compressor.plan.removal import SizeTarget, explain_conflict, say_affordable, search_size
from compressor.plan.search import Plan, Planner
from compressor.plan.shapes import Shape, Shapes, list_shapes
from compressor.plan.shares import Share, largest_share, list_shares
from compressor.plan.trials import Trial
from compressor.runtime.errors import BudgetError
from compressor.runtime.figures import count, signed

MOST_VERIFICATIONS = 5  # looks at the verification text
WELL_USED, AIMED_SHARE = 0.8, 0.93  # of the budget: a plan that uses less is made larger; what the next plan aims at
MOST_HEALINGS = 3  # plans that are healed for one budget
WORTH_VERIFYING = 1.3  # of the budget: a healed plan that uses more on the selection text is not verified
MOST_REFILLS = 3  # larger plans that are tried after tasks refused blocks, with what those free of the budget
MOST_DOCUMENTS = 64  # lost documents per task that are scored again to find out which block loses them


@dataclass(frozen=True)
class VerifiedPlan:
    """A plan inside all budgets, all that was measured of it, and how often the last word was asked for.

    `looks` counts the plans that were measured on the verification text, `task_looks` those that the deciding documents
    of each task with a budget were asked about, up to this one: what was refused after it takes nothing from it.
    """

    plan: Plan
    measured: Measured
    looks: int
    task_looks: dict[str, int]
    healing: Healing | None = None  # how the plan's replacements were trained, if they were


@dataclass(frozen=True)
class HeldPlan:
    """A plan inside the budgets of all texts, what was measured of it there, the looks so far, and the share of the
    budget that the search aimed at on the selection text."""

    plan: Plan
    measured: Measured
    looks: int
    budget_factor: float


@dataclass(frozen=True)
class TaskRefusal:
    """Which tasks refuse a plan, the falls in score that say so, and the tasks by which a block to restore is chosen:
    those that are broken by the choosing documents alone, for the others must decide once more."""

    drops: dict[str, TaskChange]
    broken: list[str]
    suspects: list[str]


class TaskJudge:
    """Asks the tasks about one plan after another, more strictly each time."""

    def __init__(self, planner: Planner, evaluator: Evaluator, source: Measured) -> None:
        self.planner, self.evaluator, self.source = planner, evaluator, source
        self.limited = limited_tasks(evaluator)
        self.looks = 0

    def judge(self, plan: Plan) -> tuple[dict[str, Scores], TaskRefusal | None]:
        """The scores of a plan, and why the tasks refuse it, if they do.

        The search has seen no task: the first look is at all documents. A further one is spent only on a plan that is
        surely inside by the documents on which its blocks are chosen.
        """
        scores = score_plan(self.planner, self.evaluator, plan)
        drops = self.evaluator.compare_choosing(self.source.scores, scores, self.limited)
        broken = find_broken_tasks(self.evaluator, drops)
        suspects = broken or self.limited
        if not broken or not self.looks:
            self.looks += 1
            drops = self.evaluator.compare_tasks(self.source.scores, scores, self.task_looks)
            broken = find_broken_tasks(self.evaluator, drops)
        return scores, TaskRefusal(drops, broken, suspects) if broken else None

    @property
    def task_looks(self) -> dict[str, int]:
        return dict.fromkeys(self.limited, self.looks)

    def find_worst_block(self, plan: Plan, scores: Mapping[str, Scores], refusal: TaskRefusal) -> BranchIndex:
        return find_worst_block(self.planner, self.evaluator, plan, refusal.suspects, self.source.scores, scores)


def search_and_verify(
    planner: Planner, evaluator: Evaluator, source: Measured, judge: TaskJudge | None = None, looks: int = 0
) -> VerifiedPlan:
    """The largest plan inside all budgets; `source` is what was measured of the original model.

    After a plan that breaks the budget of a text, the search runs again with a smaller budget. In a plan that breaks
    the budget of a task, the block that costs this task most is restored. Such blocks are chosen on one half of a
    task's documents, and the other half decides, more strictly each time. What restored blocks free of the text's
    budget is spent again on others. BudgetError when nothing is left. `judge` and `looks` carry on what was
    asked of the tasks and the verification text before, about other plans.
    """
    found = search_text(planner, evaluator, source, looks)
    plan, measured, looks = found.plan, found.measured, found.looks
    judge = judge or TaskJudge(planner, evaluator, source)
    scores, refusal = judge.judge(plan)
    freed = refusal is not None
    while refusal is not None:
        index = judge.find_worst_block(plan, scores, refusal)
        planner.progress.note(f"  task {', '.join(refusal.broken)} refuses it: block {index} costs most and goes back")
        missed = task_refusal(evaluator, refusal.drops, refusal.broken, plan.shapes)
        plan, measured, looks = walk_back(planner, evaluator, source, plan, index, looks, missed)
        scores, refusal = judge.judge(plan)
    held = VerifiedPlan(plan, replace(measured, scores=scores), looks, judge.task_looks)
    if freed:
        held = spend_freed_budget(planner, evaluator, judge, held, found.budget_factor)
    return write_continuations(planner, evaluator, held)


def heal_and_verify(planner: Planner, evaluator: Evaluator, source: Measured, healer: Healer) -> VerifiedPlan:
    """The largest plan that is inside all budgets once it is healed, or the largest without healing, if that is larger.

    The search aims past the budget by what healing is expected to win. A healed plan that is over the budget is
    followed by a smaller one, one that leaves much of it by a larger one. Where all of them leave much, or none holds,
    the search without healing has its turn.
    """
    say, looks = planner.progress.note, 0
    judge = TaskJudge(planner, evaluator, source)
    held: VerifiedPlan | None = None
    held_factor = 0.0
    factor, refused = healer.expected_room(planner) * AIMED_SHARE, math.inf
    for _ in range(MOST_HEALINGS):
        try:
            plan = planner.search(factor)
        except BudgetError:
            break
        if held is not None and planner.count_saved(plan) <= planner.count_saved(held.plan):
            break
        plan, healing = healer.heal_plan(planner, plan)
        used = planner.budget_share(healed_trial(plan), 1.0)
        if used <= WORTH_VERIFYING:
            looks += 1
            measured = measure_plan(planner, evaluator, plan, source)
            shares = measure_shares(evaluator, source, measured)
            used, ends = largest_share(shares).used, "; ".join(share.end for share in shares)
            say(f"  verification text {'holds' if used <= 1 else 'refuses it'}, healed: {ends}")
        else:
            say(f"  healed, it still uses {used:.2f} of the budget on the selection text")
        if used <= 1:
            scores, refusal = judge.judge(plan)
            if refusal is not None:
                say(f"  task {', '.join(refusal.broken)} refuses it, healed")
                break
            held = VerifiedPlan(plan, replace(measured, scores=scores), looks, judge.task_looks, healing)
            held_factor = factor
            if used >= WELL_USED:
                return write_continuations(planner, evaluator, held)
            next_factor = min(factor * AIMED_SHARE / max(used, 0.2), 2 * factor, (factor + refused) / 2)
        else:
            refused, next_factor = factor, factor * AIMED_SHARE / used
            if held is not None:
                next_factor = (held_factor + refused) / 2
        factor = next_factor
    say("  the largest plan without healing is looked for")
    try:
        plain = search_and_verify(planner.with_compensation(), evaluator, source, judge, looks)
    except BudgetError:
        if held is None:
            raise
        return write_continuations(planner, evaluator, held)
    if held is None or planner.count_saved(plain.plan) > planner.count_saved(held.plan):
        return plain
    return write_continuations(planner, evaluator, held)


def healed_trial(plan: Plan) -> Trial:
    """What a healed plan costs on the selection text, as a trial."""
    return Trial(plan.shapes, plan.predicted, 0, plan.compensated, plan.selection, plan.fidelity)


def walk_back(
    planner: Planner,
    evaluator: Evaluator,
    source: Measured,
    plan: Plan,
    index: BranchIndex,
    looks: int,
    missed: BudgetError,
) -> tuple[Plan, Measured, int]:
    """The plan without a block that a task refuses, if the texts hold, what was measured of it, and the looks so far.

    From here on no plan has more of this block. `missed` is raised when nothing is left.
    """
    refused = index
    while True:
        smaller = planner.without_block(plan, index)
        if smaller is None:
            raise missed
        plan, looks = smaller, looks + 1
        measured = measure_plan(planner, evaluator, plan, source)
        shares = measure_shares(evaluator, source, measured)
        if largest_share(shares).used <= 1:
            planner.hold(refused, plan.shapes.get(refused))
            return plan, measured, looks
        # Rare: the smaller plan costs a text more. The block that costs texts most goes back too.
        missed = text_refusal(evaluator, shares, plan.shapes)
        index = max(plan.shapes, key=lambda index: planner.space.damages[index].linear)


def spend_freed_budget(
    planner: Planner, evaluator: Evaluator, judge: TaskJudge, held: VerifiedPlan, budget_factor: float
) -> VerifiedPlan:
    """A larger plan without what the tasks refused, where the texts' budget, of which restored blocks free a part,
    allows one; else the plan that holds.

    The larger plan must hold on the verification text by one more look, then on the tasks by the same rule as any other
    plan. After a refusal by a task, the block that costs it most gets no more than it has, or is left alone.
    """
    source, looks = judge.source, held.looks
    used = largest_share(measure_shares(evaluator, source, held.measured)).used
    for _ in range(MOST_REFILLS if used < AIMED_SHARE else 0):
        try:
            plan = planner.search(AIMED_SHARE * budget_factor, math.inf)  # it has one look
        except BudgetError:
            break
        if planner.count_saved(plan) <= planner.count_saved(held.plan):
            break
        measured, looks = measure_plan(planner, evaluator, plan, source), looks + 1
        if largest_share(measure_shares(evaluator, source, measured)).used > 1:
            planner.progress.note("  verification text refuses what the freed budget would buy")
            break
        scores, refusal = judge.judge(plan)
        if refusal is None:
            planner.progress.note("  the freed budget is spent on other blocks, and the tasks hold")
            return VerifiedPlan(plan, replace(measured, scores=scores), looks, judge.task_looks)
        index = judge.find_worst_block(plan, scores, refusal)
        shape = accepted_shape(planner, held.plan, plan, index)
        kept = f"keeps {shape}" if shape else "is left alone"
        planner.progress.note(f"  task {', '.join(refusal.broken)} refuses the larger plan: block {index} {kept}")
        planner.hold(index, shape)
    return replace(held, looks=looks)


def accepted_shape(planner: Planner, held: Plan, refused: Plan, index: BranchIndex) -> Shape | None:
    """The shape that a block has in a plan that held, if it is milder than that in a plan that was refused."""
    saved, shape = planner.space.candidates[index].saved, held.shapes.get(index)
    return shape if shape is not None and saved(shape) < saved(refused.shapes[index]) else None


def verify_size(
    planner: Planner, evaluator: Evaluator, source: Measured, target: SizeTarget, healer: Healer | None = None
) -> VerifiedPlan:
    """The cheapest plan of a size, healed where there is a healer, measured once on the verification text and once on
    the tasks.

    BudgetError says which budget gave way: a plan that was made smaller would no longer have the size.
    """
    plan, healing = search_size(planner, target), None
    if healer is not None:
        plan, healing = healer.heal_plan(planner, plan)
    measured = measure_plan(planner, evaluator, plan, source)
    dearest = largest_share(measure_shares(evaluator, source, measured))
    if dearest.used > 1:
        cost, affordable = f"{dearest.budget} gave way, {dearest.figure}", say_affordable(planner, plan, target)
        raise BudgetError(f"{explain_conflict(planner, plan, target)}: {cost}; {affordable}; nothing written")
    scores = score_plan(planner, evaluator, plan)
    limited = limited_tasks(evaluator)
    drops = evaluator.compare_tasks(source.scores, scores, dict.fromkeys(limited, 1))
    broken = find_broken_tasks(evaluator, drops)
    if broken:
        cost = task_cost(evaluator, drops, broken)
        raise BudgetError(f"{explain_conflict(planner, plan, target)}: {cost}; nothing written")
    verified = VerifiedPlan(plan, replace(measured, scores=scores), 1, dict.fromkeys(limited, 1), healing)
    return write_continuations(planner, evaluator, verified)


def limited_tasks(evaluator: Evaluator) -> list[str]:
    """The tasks with a budget."""
    return [name for name, limit in evaluator.limits.items() if limit is not None]


def write_continuations(planner: Planner, evaluator: Evaluator, verified: VerifiedPlan) -> VerifiedPlan:
    """The verified plan with what the compressed model writes after each prompt."""
    fits, measured = verified.plan.fits, verified.measured
    identity = identify_patched(planner.model, fits)
    with patched(planner.model, planner.blocks, fits):
        continuations = evaluator.write_continuations(planner.model, "compressed", identity)
    return replace(verified, measured=replace(measured, continuations=continuations))


def score_plan(planner: Planner, evaluator: Evaluator, plan: Plan) -> dict[str, Scores]:
    """The scores of a plan on all tasks."""
    identity = identify_patched(planner.model, plan.fits)
    with patched(planner.model, planner.blocks, plan.fits):
        return evaluator.score_tasks(planner.model, "compressed", identity)


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


def search_text(planner: Planner, evaluator: Evaluator, source: Measured, looks: int = 0) -> HeldPlan:
    """The largest plan inside the budgets of all verification texts.

    Where attention may go as well, plans of FFNs alone are asked about first: what holds then is kept until a larger
    plan with attention holds too. Tests in an order that stops at the first refusal spend no more than one of them.
    """
    search = TextSearch(planner, evaluator, source, looks)
    for only_ffns in planner.turns:
        planner.take_turn(only_ffns)
        search.run()
    return search.result()


class TextSearch:
    """Searches for the largest plan that the verification texts let pass, with few looks at them."""

    def __init__(self, planner: Planner, evaluator: Evaluator, source: Measured, looks: int) -> None:
        self.planner, self.evaluator, self.source, self.looks = planner, evaluator, source, looks
        self.best: HeldPlan | None = None
        self.refusal: BudgetError | None = None  # the last one, by the texts or by the search itself
        self.budget_factor = AIMED_SHARE

    def result(self) -> HeldPlan:
        """The largest plan that held. BudgetError when none did."""
        if self.best is not None:
            return replace(self.best, looks=self.looks)
        assert self.refusal is not None
        raise self.refusal

    def run(self) -> None:
        """Look for a plan that is larger than the best so far.

        After a plan that is over the budget, the search runs again with a smaller budget; after one that leaves much of
        it, with a larger one.
        """
        planner, say = self.planner, self.planner.progress.note
        refused = ceiling = math.inf
        refusals = 0
        while self.looks < MOST_VERIFICATIONS:
            factor = self.budget_factor
            try:
                plan = planner.search(factor, ceiling)
            except BudgetError as error:
                self.refusal = self.refusal or error
                break
            if self.best is not None and planner.count_saved(plan) <= planner.count_saved(self.best.plan):
                break
            self.looks += 1
            measured = measure_plan(planner, self.evaluator, plan, self.source)
            shares = measure_shares(self.evaluator, self.source, measured)
            used = largest_share(shares).used
            ends = "; ".join(share.end for share in shares)
            if used > 1:
                say(f"  verification text refuses it: {ends}")
                # Refused again, the selection text is no guide: what is predicted shrinks by as much as it is over.
                ceiling = plan.predicted * (0.99 if not refusals else max(0.5, AIMED_SHARE / used))
                self.refusal, refusals = text_refusal(self.evaluator, shares, plan.shapes), refusals + 1
                refused, self.budget_factor = min(refused, factor), factor * AIMED_SHARE / used
            else:
                say(f"  verification text holds: {ends}")
                self.best = HeldPlan(plan, measured, self.looks, factor)
                # Between what held and what was refused, and not too far ahead where a plan costs next to nothing.
                self.budget_factor = min(factor * min(AIMED_SHARE / max(used, 0.2), 3.0), (factor + refused) / 2)
                if used >= WELL_USED:
                    break


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
) -> BranchIndex:
    """The block that, restored, wins back most of the documents that these tasks lost, of those that choose."""
    if len(plan.shapes) == 1:
        return next(iter(plan.shapes))
    won_back: dict[BranchIndex, float] = dict.fromkeys(plan.shapes, 0.0)
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
    return max(plan.shapes, key=lambda index: (won_back[index], planner.space.damages[index].linear, -layer_of(index)))


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
    name, drop = worst_task(evaluator, drops, broken)
    return BudgetError(
        f"the budget of task {name} is missed: closest was block {list_shapes(shapes)} with {drop}; nothing written"
    )


def task_cost(evaluator: Evaluator, drops: Mapping[str, TaskChange], broken: list[str]) -> str:
    """That a task gave way, and by how much."""
    name, drop = worst_task(evaluator, drops, broken)
    return f"task {name} gave way, with {drop}"


def worst_task(evaluator: Evaluator, drops: Mapping[str, TaskChange], broken: list[str]) -> tuple[str, str]:
    """The task that is furthest over its limit, and its drop in words."""
    name = max(broken, key=lambda name: drops[name].upper - task_limit(evaluator, name))
    change, limit = drops[name], task_limit(evaluator, name)
    hint = "; more documents (--task-limit) would narrow the interval" if change.drop <= limit else ""
    return name, (
        f"a drop of {signed(change.drop, '.4f')} (upper end {signed(change.upper, '.4f')}, allowed {limit:g}, "
        f"{count(change.documents, 'document')}{hint})"
    )
