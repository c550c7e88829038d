"""How often is a promise broken? Simulated searches on resampled real losses and on task outcomes, by the real code.

    python benchmarks/promise.py demo ./demo-lin --text wiki=wiki.test.raw --text austen=austen_novels.txt

Takes a model and a compressed checkpoint of it, and measures both on windows of every text (kept in --keep). Each
simulated run then draws selection and verification windows from these, searches plans whose losses lie between those
of the model and beyond those of the checkpoint, and asks the verification text as `compressor.plan.verify` does, up to
five times. A *false acceptance* is a plan whose rise over all windows of the text is above the budget: at most 2.5 %
of runs is promised. `old` is the percentile bootstrap over windows that was used until November 2026.

The same for task budgets, with equally bad blocks: every lost document is lost by one block, and the walk back gives
blocks back until the deciding documents agree. And by document: windows of some documents, all documents as the truth.
Prints tables in Markdown. The coverage of R²_lin's interval is measured by benchmarks/promise_r2.py.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from compressor.evaluate import intervals
from compressor.evaluate.budget import Budget, Limits, compute_limits
from compressor.evaluate.evaluator import Evaluator, Measured
from compressor.evaluate.intervals import end_score
from compressor.evaluate.perplexity import Losses, PerplexityChange, compare, evaluate
from compressor.evaluate.tasks import Task
from compressor.models.load import load_model
from compressor.plan import verify
from compressor.plan.shares import Share
from compressor.runtime.context import RunContext
from compressor.runtime.errors import BudgetError
from compressor.runtime.progress import Progress
from compressor.text import Document, bos_prefix, cut_windows, divide, read_text_file

SIZES = (16, 32, 64)  # verification windows; a search has half as many selection windows
DOCUMENTS = (50, 100, 200, 500, 1000)  # of a task
BLOCKS = 8
STEPS = torch.linspace(0.05, 2.0, 40, dtype=torch.float64)  # plans, as multiples of what the checkpoint costs
STRETCH = 20_000  # characters: a text without documents is cut into stretches of this size, to stand for documents


@dataclass(frozen=True)
class Pool:
    """Mean nats of every window of a text in the model and in the checkpoint, and the window's document."""

    before: Tensor
    after: Tensor
    documents: Tensor

    def drawn(self, windows: Tensor) -> Pool:
        return Pool(self.before[windows], self.after[windows], self.documents[windows])

    def losses(self, step: float) -> tuple[Losses, Losses]:
        """Before and after a plan that costs `step` times what the checkpoint costs."""
        return Losses(self.before[:, None]), Losses((self.before + step * (self.after - self.before))[:, None])

    def rise(self, step: float) -> float:
        before, after = self.losses(step)
        return after.perplexity - before.perplexity


def measure_pool(models: list[Any], tokenizer: Any, file: Path, seq_len: int, windows: int) -> Pool:
    content = read_text_file(file)
    documents = divide(content)
    if len(documents) < 2:
        documents = [content[start : start + STRETCH] for start in range(0, len(content), STRETCH)]
    all_windows, owners = cut_windows(
        [Document(i, d) for i, d in enumerate(documents)], tokenizer, seq_len, bos_prefix(tokenizer)
    )
    chosen = torch.randperm(len(all_windows), generator=torch.Generator().manual_seed(0))[:windows].sort().values
    means = [evaluate(model, all_windows[chosen]).windows for model in models]
    return Pool(means[0], means[1], owners[chosen])


def percentile_change(before: Losses, after: Losses, seed: int) -> PerplexityChange:
    """The old rule: the 97.5 % percentile of resampled windows."""
    change = compare(before, after, 0.0, seed)
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randint(len(before.nats), (intervals.RESAMPLES, len(before.nats)), generator=generator)
    rises = after.windows[draws].mean(1).exp() - before.windows[draws].mean(1).exp()
    return replace(change, upper=torch.quantile(rises, 0.975).item())


Draw = Callable[[torch.Generator, int], Tensor]  # the windows of one run
Rule = Callable[[Losses, Losses, Tensor, int], PerplexityChange]
RULES: dict[str, Rule] = {
    "now": lambda before, after, _, seed: compare(before, after, 0.95, seed),
    "old": lambda before, after, _, seed: percentile_change(before, after, seed),
    "now, by document": lambda before, after, documents, seed: compare(before, after, 0.95, seed, documents),
}


class SimulatedSearch:
    """Stands in for the planner: the largest step that the selection windows expect to fit."""

    def __init__(self, selection: Pool, limits: Limits, verification: int) -> None:
        self.limits, self.progress = limits, Progress()
        self.turns = (False,)
        windows = len(selection.before)
        before, after = selection.before, selection.before + STEPS[:, None] * (selection.after - selection.before)
        ends = [side.mean(-1, keepdim=True).exp() for side in (before, after)]
        parts = ends[1] * (after - after.mean(-1, keepdim=True)) - ends[0] * (before - before.mean())
        errors = parts.std(-1) / math.sqrt(windows) / ends[1][:, 0]
        width = end_score(verification, 0.95) * math.sqrt(windows / verification)
        self.shares = (((after.mean(-1) - before.mean()) + width * errors) / limits.smallest).tolist()

    def take_turn(self, only_ffns: bool) -> None:
        """There is one kind of plan."""

    def search(self, budget_factor: float = 1.0, ceiling: float = math.inf) -> Any:
        fitting = [
            step
            for step, share in zip(STEPS.tolist(), self.shares, strict=True)
            if share <= budget_factor and step < ceiling
        ]
        if not fitting:
            raise BudgetError("nothing fits")
        return SimpleNamespace(step=max(fitting), predicted=max(fitting), shapes={0: max(fitting)})

    def count_saved(self, plan: Any) -> float:
        return float(plan.step)


def simulate_text(
    pool: Pool, draw: Callable[[torch.Generator, int], Tensor], rule: Rule, size: int, seed: int
) -> float:
    """The step that one simulated run accepts; 0 where it accepts none. The budget is what step 1 truly costs."""
    generator = torch.Generator().manual_seed(seed)
    selection, verification = pool.drawn(draw(generator, size // 2)), pool.drawn(draw(generator, size))
    limits = compute_limits({"text": Budget(pool.rise(1.0))}, {"text": math.exp(verification.before.mean().item())})
    planner = SimulatedSearch(selection, limits, len(verification.before))
    evaluator: Any = SimpleNamespace(
        compare_texts=lambda before, after: {"text": rule(before, after, verification.documents, seed)},
        compare_fidelity=lambda _: {},
        budgets=limits.budgets,
        max_kl=None,
    )
    source: Any = SimpleNamespace(losses=verification.losses(0.0)[0])

    def measure_plan(_: Any, __: Any, plan: Any, ___: Any) -> Any:
        return SimpleNamespace(losses=verification.losses(plan.step)[1])

    with mock.patch.object(verify, "measure_plan", measure_plan):
        try:
            plan: Any = verify.search_text(planner, evaluator, source).plan  # type: ignore[arg-type]
        except BudgetError:
            return 0.0
    return float(plan.step)


def draw_windows(pool: Pool) -> Draw:
    return lambda generator, size: torch.randint(len(pool.before), (size,), generator=generator)


def draw_documents(pool: Pool) -> Draw:
    """All windows of some documents: `size` counts documents."""
    groups = [(pool.documents == number).nonzero()[:, 0] for number in torch.unique(pool.documents).tolist()]

    def draw(generator: torch.Generator, size: int) -> Tensor:
        chosen = torch.randperm(len(groups), generator=generator)[: min(size, len(groups))]
        return torch.cat([groups[k] for k in chosen.tolist()])

    return draw


def report_texts(pools: dict[str, Pool], runs: int, sizes: tuple[int, ...]) -> None:
    print("\n| text | verification | rule | false acceptances | mean size of what is accepted | nothing accepted |")
    print("|---|---|---|---|---|---|")
    for name, pool in pools.items():
        documents = len(torch.unique(pool.documents))
        cases = [(f"{size} windows", draw_windows(pool), size, ("now", "old")) for size in sizes]
        cases += [
            (f"{size} documents", draw_documents(pool), size, ("now, by document", "now", "old"))
            for size in sizes[:2]
            if 2 * size <= documents
        ]
        for case, draw, size, rules in cases:
            for rule in rules:
                steps = [simulate_text(pool, draw, RULES[rule], size, seed) for seed in range(runs)]
                false = sum(pool.rise(step) > pool.rise(1.0) * (1 + 1e-9) for step in steps) / runs
                none = sum(step == 0 for step in steps) / runs
                print(f"| {name} | {case} | {rule} | {false:.1%} | {sum(steps) / runs:.2f} | {none:.1%} |", flush=True)


class SimulatedTask(Evaluator):
    """Stands in for the models on one task: a lost document is lost while its block is replaced."""

    def __init__(self, lost_by: Tensor, won: Tensor, limit: float) -> None:
        body = SimpleNamespace(aggregation=lambda: {"acc": lambda values: sum(values) / len(values)})
        task = Task("task", (), "acc", ("acc",), 1, len(lost_by), "", "", body)
        text: Any = None
        super().__init__(text, None, {}, tasks=[task], limits={"task": limit}, context=RunContext())
        self.lost_by, self.won = lost_by, won

    def scores(self, replaced: set[int]) -> Tensor:
        lost = torch.tensor([block in replaced for block in self.lost_by.tolist()])
        return torch.where(lost, 0.0, torch.where(self.won & (self.lost_by < 0), 1.0, self.source)).double()

    @property
    def source(self) -> Tensor:
        return (~self.won).double()

    def score_tasks(self, model: Any, step: str, identity: Any) -> Any:
        return {"task": {"acc": self.scores({int(k) for k in identity["replaced"]})}}

    def score_task(self, model: Any, task: Any, step: str, identity: Any, only: Any = None) -> Any:
        return {"acc": self.scores({int(k) for k in identity["replaced"]})[list(only)]}

    def write_continuations(self, model: Any, step: str, identity: Any) -> None:
        return None

    def compare_texts(self, before: Any, after: Any) -> Any:
        return {}


class SimulatedBlocks:
    """Stands in for the planner of a task simulation: plans are sets of blocks, all of the same size and cost."""

    def __init__(self) -> None:
        self.model = self.blocks = None
        self.progress, self.limits = Progress(), None
        self.space = SimpleNamespace(damages={i: SimpleNamespace(linear=1.0) for i in range(BLOCKS)})

    def without_block(self, plan: Any, index: int) -> Any:
        rest = {i: shape for i, shape in plan.shapes.items() if i != index}
        return SimpleNamespace(shapes=rest, fits=rest) if rest else None

    def hold(self, index: int, shape: Any) -> None:
        """Nothing is searched again, so there is nothing to keep from coming back."""

    def search(self, budget_factor: float, ceiling: float) -> Any:
        raise BudgetError("no other block would use what is freed")


@contextmanager
def no_models() -> Iterator[None]:
    """Inside the context, the verification of plans touches no model."""

    @contextmanager
    def nothing(*_: Any) -> Iterator[None]:
        yield

    whole = dict.fromkeys(range(BLOCKS), "bias")
    plan = SimpleNamespace(shapes=whole, fits=whole)
    measured = Measured(None, {}, None)  # type: ignore[arg-type]
    with (
        mock.patch.object(verify, "patched", nothing),
        mock.patch.object(verify, "identify_patched", lambda _, fits: {"replaced": {str(i): 1 for i in fits}}),
        mock.patch.object(
            verify,
            "search_text",
            return_value=verify.HeldPlan(plan, measured, 1, 1.0),  # type: ignore[arg-type]
        ),
        mock.patch.object(verify, "measure_plan", return_value=measured),
        mock.patch.object(verify, "measure_shares", return_value=[Share(0.0, "", "", "")]),
    ):
        yield


def simulate_task(documents: int, lost: float, won: float, limit: float, seed: int) -> int:
    """How many blocks stay replaced in one simulated run; 0 where nothing is accepted."""
    generator = torch.Generator().manual_seed(seed)
    draws = torch.rand(documents, generator=generator)
    owners = torch.randint(BLOCKS, (documents,), generator=generator)
    lost_by = torch.where(draws < lost, owners, -1)
    task = SimulatedTask(lost_by, (draws >= lost) & (draws < lost + won), limit)
    source: Any = Measured(None, {"task": {"acc": task.source}}, None)  # type: ignore[arg-type]
    try:
        return len(verify.search_and_verify(SimulatedBlocks(), task, source).plan.shapes)  # type: ignore[arg-type]
    except BudgetError:
        return 0


def simulate_old_task(documents: int, lost: float, won: float, limit: float, seed: int) -> int:
    """The old rule: all documents choose and decide, as often as need be, by a percentile bootstrap."""
    generator = torch.Generator().manual_seed(seed)
    draws = torch.rand(documents, generator=generator)
    owners = torch.randint(BLOCKS, (documents,), generator=generator)
    losses = [int(((draws < lost) & (owners == block)).sum()) for block in range(BLOCKS)]
    gained = int(((draws >= lost) & (draws < lost + won)).sum())
    rng = np.random.default_rng(seed)
    while losses:
        shares = np.array([sum(losses), gained, documents - sum(losses) - gained]) / documents
        resampled = rng.multinomial(documents, shares, size=intervals.RESAMPLES)
        if np.quantile((resampled[:, 0] - resampled[:, 1]) / documents, 0.975) <= limit:
            return len(losses)
        losses.remove(max(losses))
    return 0


def report_tasks(runs: int) -> None:
    """Lost and won are the shares of documents that all blocks together change; the limit lies between two plans."""
    print("\n| documents | lost, won | limit | rule | false acceptances | blocks replaced, of 8 | nothing accepted |")
    print("|---|---|---|---|---|---|---|")
    cases = ((0.04, 0.01, 5.5), (0.08, 0.02, 4.5), (0.10, 0.05, 6.5), (0.16, 0.04, 4.5), (0.30, 0.05, 4.5))
    for documents in DOCUMENTS:
        for lost, won, allowed in cases:
            limit = lost * allowed / BLOCKS - won
            for name, simulate in (("now", simulate_task), ("old", simulate_old_task)):
                with no_models():
                    kept = [simulate(documents, lost, won, limit, seed) for seed in range(runs)]
                false = sum(lost * k / BLOCKS - won > limit for k in kept) / runs
                none = sum(k == 0 for k in kept) / runs
                print(
                    f"| {documents} | {lost:.0%}, {won:.0%} | {limit:.4f} | {name} | {false:.1%} | "
                    f"{sum(kept) / runs:.2f} | {none:.0%} |",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("checkpoint")
    parser.add_argument("--text", action="append", required=True, metavar="NAME=FILE")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--windows", type=int, default=400, help="of every text")
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--keep", type=Path, help="file for the measured losses, read when it is there")
    parser.add_argument("--only", choices=("texts", "tasks"))
    options = parser.parse_args()
    intervals.RESAMPLES = 1000  # of 4,000: the tables need many runs more than exact ends
    pools: dict[str, Pool] = {}
    if options.keep and options.keep.is_file():
        pools = {name: Pool(*tensors) for name, tensors in torch.load(options.keep, weights_only=True).items()}
    missing = [word.split("=", 1) for word in options.text if word.split("=", 1)[0] not in pools]
    if missing:
        source, tokenizer = load_model(options.model)
        models = [source, load_model(options.checkpoint, allow_compressed=True)[0]]
        for name, file in missing:
            pools[name] = measure_pool(models, tokenizer, Path(file), options.seq_len, options.windows)
        if options.keep:
            torch.save({name: (p.before, p.after, p.documents) for name, p in pools.items()}, options.keep)
    for name, pool in pools.items():
        print(
            f"{name}: {len(pool.before)} windows of {len(torch.unique(pool.documents))} documents, perplexity "
            f"{pool.before.mean().exp():.2f}, the checkpoint {pool.rise(1.0):+.3f}"
        )
    if options.only != "tasks":
        report_texts(pools, options.runs, tuple(options.sizes))
    if options.only != "texts":
        report_tasks(options.runs)


if __name__ == "__main__":
    main()
