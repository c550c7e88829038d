"""Is R²_lin a compression signal? Orders of the FFNs by R²_lin, by stream-weighted R² and by predicted damage.

    python benchmarks/signals.py demo
    python benchmarks/signals.py ./smollm2-135m --recipe recipes/smollm2-135m.yaml --text wiki.test.raw

Every block alone is replaced by its least-squares map and measured, as `compress profile --swap` does; the first table
has each signal of every block, the second its rank correlation with the rise in loss. Then blocks are replaced in the
order of each signal, per parameter, until perplexity on the selection text has risen by --max-dppl: the third table has
the share of the model's parameters that is gone by then, with the rise that was measured. Nothing is compensated, and
the point estimate counts, not the end of an interval.

- *linear maps, any block*: the order alone decides, as the paper has it (`--kinds linear`, no block is left out);
- *linear maps*: as in a search, unsafe blocks are left out, and those with a predicted damage far beyond the budget;
- *all kinds*: the same, with every shape that the tool knows. Within a block, shapes are ordered by predicted damage;
  between blocks, the full linear map costs 1 − R², and other shapes in proportion to their predicted damage
  (`--rank-by`).

*Damage* is the prediction from gradients alone; *damage, corrected* is what a search goes by, after it has tried one
replacement in every block. Blocks are FFNs, or what --branches says. Every measurement is kept in the cache (--cache),
so that a run goes on where it stopped.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from compressor.evaluate.budget import Budget, compute_limits
from compressor.measure.profile import Profile, measure
from compressor.measure.swap import Sweeper
from compressor.measure.verdicts import Verdict, judge_texts, rise_in_nats
from compressor.models.blocks import BRANCHES, BranchIndex
from compressor.patch.checkpoint import count_parameters
from compressor.pipelines.job import Job, open_job
from compressor.pipelines.recipe import resolve
from compressor.plan.calibration import Calibration, rank_correlation
from compressor.plan.choices import Choices, Signal
from compressor.plan.frontier import Growth, grow_plans, lower_hull
from compressor.plan.search import Planner
from compressor.plan.space import SearchSpace, prepare_search
from compressor.runtime.cache import Cache, default_directory
from compressor.runtime.context import RunContext
from compressor.runtime.progress import Progress

NAMES = {"r2": "R²_lin", "stream": "stream-weighted R²", "damage": "damage", "corrected": "damage, corrected"}


@dataclass(frozen=True)
class Bench:
    """A model that was measured: its profile, what every block costs alone, and how each search on it begins."""

    job: Job
    profile: Profile
    sweeper: Sweeper
    rises: dict[BranchIndex, float]  # nats that every block alone costs as a linear map; blocks that overflow have none
    linear: SearchSpace
    anything: SearchSpace

    def planner(self, space: SearchSpace, order: str, budget: Budget, *, guarded: bool) -> Planner:
        """A planner that orders blocks by one signal, within a budget on the selection text."""
        text = self.job.text
        losses = space.runner.measure_source()
        baselines = {name: losses.part(part).perplexity for name, part in text.parts("selection").items()}
        limits = compute_limits(dict.fromkeys(baselines, budget), baselines)
        verdicts = dict.fromkeys(space.candidates, Verdict("unsafe" if guarded else "safe", ""))
        if guarded:
            verdicts |= judge_texts(self.profile, space.damages, limits.nats, self.sweeper.by_text)
        signal: Signal = "r2" if order == "r2" else "stream" if order == "stream" else "damage"
        space = replace(space, choices=replace(space.choices, rank_by=signal))
        if order == "damage":
            space = replace(space, calibrations={name: Calibration([]) for name in space.calibrations})
        return Planner(space, limits, verdicts, objective="size", profile=self.profile)

    def grow(self, planner: Planner, *, guarded: bool) -> list[Growth]:
        """The plans of one order, from the smallest to the largest."""
        if guarded:
            return planner.growing_plans()
        return grow_plans([lower_hull(row) for row in planner.usable_candidates], planner.block_weights)

    def removed(self, space: SearchSpace, order: str, budget: Budget, *, guarded: bool) -> tuple[float, float]:
        """The share of the parameters that goes within the budget, and the rise that was measured with it."""
        planner = self.planner(space, order, budget, guarded=guarded)
        plans = self.grow(planner, guarded=guarded)
        low, high = -1, len(plans)
        while high - low > 1:
            middle = (low + high) // 2
            inside = planner.budget_share(planner.runner.attempt(*plans[middle]), 1.0) <= 1
            low, high = (middle, high) if inside else (low, middle)
        if low < 0:
            return 0.0, 0.0
        trial = planner.runner.attempt(*plans[low])
        rise = max(change.delta for change in trial.changes.values())
        return trial.saved / count_parameters(self.job.model), rise


def open_bench(options: argparse.Namespace) -> Bench:
    progress = Progress(visible=True)
    context = RunContext(progress=progress, cache=Cache(options.cache, progress))
    names = ("model", "text", "seq_len", "calib_tokens", "select_tokens", "verify_tokens")
    recipe = resolve(options.recipe, {name: getattr(options, name) for name in names})
    job = open_job(recipe, context, with_tasks=False)
    branches = tuple(options.branches)
    profile = measure(job.model, job.text, job.context, branches=branches)
    sweeper = Sweeper(job.model, profile, job.text, recipe.swap_tokens, job.context)
    rises = {index: rise_in_nats(change) for index, change in sweeper.alone()[0].items()}
    anything = prepare_search(job.model, job.text, job.context, Choices(branches=branches))
    linear = prepare_search(job.model, job.text, job.context, Choices(kinds=("linear",), branches=branches))
    return Bench(job, profile, sweeper, rises, linear, anything)


def correlation_lines(bench: Bench) -> Iterator[str]:
    """Each signal of every block against what the block costs alone, and the rank correlations."""
    damages = bench.linear.damages
    blocks = [p for p in bench.profile.branches if p.block.index in bench.rises]
    yield "| block | R²_lin | stream-weighted R² | predicted damage, nats | measured Δloss, nats |"
    yield "|---|---|---|---|---|"
    for p in blocks:
        index = p.block.index
        figures = f"{p.r2_lin:.3f} | {p.r2_stream:.3f} | {damages[index].linear:.4f} | {bench.rises[index]:.4f}"
        yield f"| {index} | {figures} |"
    yield ""
    yield "| signal | rank correlation with the Δloss of a block alone |"
    yield "|---|---|"
    measured = [bench.rises[p.block.index] for p in blocks]
    signals = {
        "r2": [1 - p.r2_lin for p in blocks],
        "stream": [1 - p.r2_stream for p in blocks],
        "damage": [damages[p.block.index].linear for p in blocks],
    }
    for order, values in signals.items():
        name = NAMES[order] if order == "damage" else f"1 − {NAMES[order]}"
        yield f"| {name} | {rank_correlation(values, measured):.2f} |"


def removal_lines(bench: Bench, budgets: list[str]) -> Iterator[str]:
    """How much each order removes at the same rise in perplexity."""
    yield "| at most | order | linear maps, any block | linear maps | all kinds |"
    yield "|---|---|---|---|---|"
    for word in budgets:
        budget = Budget.parse(word, confidence=0)
        for order, name in NAMES.items():
            cases = [
                bench.removed(bench.linear, order, budget, guarded=False),
                bench.removed(bench.linear, order, budget, guarded=True),
                bench.removed(bench.anything, order, budget, guarded=True),
            ]
            cells = [f"{share:.2%} ({rise:+.3f})" if share else "nothing" for share, rise in cases]
            yield f"| +{word} | {name} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", action="append")
    parser.add_argument("--max-dppl", nargs="+", default=["1.0"], help="rises at which the orders are compared")
    parser.add_argument("--recipe", type=Path, help="takes tokens and text from here")
    parser.add_argument("--branches", nargs="+", default=["ffn"], choices=BRANCHES)
    for name in ("--seq-len", "--calib-tokens", "--select-tokens", "--verify-tokens"):
        parser.add_argument(name, type=int)
    parser.add_argument("--cache", type=Path, default=default_directory())
    options = parser.parse_args()
    bench = open_bench(options)
    text = bench.job.text
    losses = bench.anything.runner.measure_source()
    print(
        f"{options.model}: {count_parameters(bench.job.model):,} parameters; selection text of "
        f"{text.selection.tokens:,} tokens in windows of {text.seq_len}, perplexity {losses.perplexity:.3f}\n"
    )
    for line in correlation_lines(bench):
        print(line, flush=True)
    print()
    for line in removal_lines(bench, options.max_dppl):
        print(line, flush=True)


if __name__ == "__main__":
    main()
