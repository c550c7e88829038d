"""The last word: a plan must hold on the verification text and on every task, or it is walked back until it does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from compressor.assessing import Evaluator, Measured
from compressor.errors import BudgetError
from compressor.evaluating import Evaluation
from compressor.fitting import Ranks
from compressor.patching import patched
from compressor.planning import Plan, Planner, ask_all, label, name_all
from compressor.tasks import Drop, Scores, lost_documents, score

MOST_VERIFICATIONS = 4  # a plan that verification text refuses is searched again with less to spend
MOST_DOCUMENTS = 64  # per task, to find out which block loses them


def search_and_verify(planner: Planner, evaluator: Evaluator) -> tuple[Plan, Measured, Measured, int]:
    """The largest plan that holds everywhere, what was measured of source and plan, and how often was looked.

    A plan that the text refuses is searched again with less to spend. A plan that a task refuses gives back the block
    that costs this task most. BudgetError when nothing is left.
    """
    model, say = planner.model, planner.progress.say
    # All of the source is measured while it is whole; from here on only patched models are.
    before = replace(evaluator.measure(model, "source", stored=True), losses=planner.verified)
    found = planner.search()
    tighten, refusals, looks = 1.0, 0, 0
    while True:
        looks += 1
        losses = planner.verify(found)
        texts = evaluator.compare_texts(before.losses, losses)
        over = max(evaluation.upper / planner.allowed[name] for name, evaluation in texts.items())
        if over > 1:
            refusals += 1
            refusal = missed_text(evaluator, texts, found.ranks)
            ends = (f"{label(n)}upper end {e.upper:+.3f} of {planner.allowed[n]:.3f}" for n, e in texts.items())
            say(f"  verification text refuses it: {'; '.join(ends)}")
            tighten *= 0.9 / over
            if refusals == MOST_VERIFICATIONS:
                raise refusal
            try:
                found = planner.search(tighten, ceiling=0.95 * found.predicted)
            except BudgetError:
                raise refusal from None
            continue
        with patched(model, planner.blocks, found.fits):
            scores = evaluator.scores(model, "compressed", stored=False)
            drops = evaluator.compare_tasks(before.scores, scores)
            broken = broken_tasks(evaluator, drops)
            if not broken:
                written = evaluator.written(model, "compressed", stored=False)
                return found, before, Measured(losses, scores, written), looks
        refusal = missed_task(evaluator, drops, broken, found.ranks)
        index = worst_block(planner, evaluator, found, broken, before.scores, scores)
        say(f"  task {', '.join(broken)} refuses it: block {index} costs most and goes back")
        smaller = planner.without(found, index)
        if smaller is None:
            raise refusal
        found = smaller


def broken_tasks(evaluator: Evaluator, drops: Mapping[str, Drop]) -> list[str]:
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
    if len(plan.ranks) == 1:
        return next(iter(plan.ranks))
    won: dict[int, float] = dict.fromkeys(plan.ranks, 0.0)
    for task in (task for task in evaluator.tasks if task.name in broken):
        lost = lost_documents(task, before[task.name], after[task.name], MOST_DOCUMENTS)
        for index in plan.ranks if lost else []:
            rest = {i: module for i, module in plan.fits.items() if i != index}
            with patched(planner.model, planner.blocks, rest):
                found = score(
                    planner.model,
                    evaluator.tokenizer,
                    task,
                    batch_size=evaluator.batch_size,
                    progress=planner.progress,
                    step=f"block {index} back",
                    only=lost,
                )
            gain = found[task.metric] - after[task.name][task.metric][lost]
            won[index] += task.better * gain.sum().item()
    return max(plan.ranks, key=lambda index: (won[index], planner.damages[index].linear, -index))


def refuse_missed(evaluator: Evaluator, before: Measured, after: Measured, ranks: Ranks) -> None:
    """BudgetError when a given plan does not hold."""
    texts = evaluator.compare_texts(before.losses, after.losses)
    if any(e.upper > evaluator.budgets[name].dppl(e.baseline) for name, e in texts.items()):
        raise missed_text(evaluator, texts, ranks)
    drops = evaluator.compare_tasks(before.scores, after.scores)
    broken = broken_tasks(evaluator, drops)
    if broken:
        raise missed_task(evaluator, drops, broken, ranks)


def missed_text(evaluator: Evaluator, texts: Mapping[str, Evaluation], ranks: Ranks) -> BudgetError:
    allowed = {name: evaluator.budgets[name].dppl(e.baseline) for name, e in texts.items()}
    name = max(texts, key=lambda name: texts[name].upper / allowed[name])
    found = texts[name]
    return BudgetError(
        f"the budget {ask_all(evaluator.budgets)} is missed on the verification text: closest was block "
        f"{name_all(ranks)} with {label(name)}ΔPPL {found.delta:+.3f} (upper end {found.upper:+.3f}, allowed "
        f"{allowed[name]:+.3f}; windows of {found.seq_len} tokens); nothing written"
    )


def missed_task(evaluator: Evaluator, drops: Mapping[str, Drop], broken: list[str], ranks: Ranks) -> BudgetError:
    name = max(broken, key=lambda name: drops[name].upper - (evaluator.limits[name] or 0.0))
    found, limit = drops[name], evaluator.limits[name] or 0.0
    hint = "; more documents (--task-limit) would narrow the interval" if found.drop <= limit else ""
    return BudgetError(
        f"the budget of task {name} is missed: closest was block {name_all(ranks)} with a drop of {found.drop:+.4f} "
        f"(upper end {found.upper:+.4f}, allowed {limit:g}, {found.documents} documents{hint}); nothing written"
    )
