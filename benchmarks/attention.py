"""What attention adds: parameters removed with FFNs only, attention only and all branches, at the same budgets.

    python benchmarks/attention.py demo --out DIR
    python benchmarks/attention.py ./smollm2-135m --recipe recipes/smollm2-135m.yaml --text wiki.test.raw --out DIR

For every budget (--max-dppl) and every choice of branches, the search of `compress plan` runs on the same text with the
same statistics; with --verify it is the search of `compress`, which makes the plan smaller until it holds on the
verification text. Every plan is then measured on the verification text. The tables have what goes, what it costs on
both texts, the ratio to FFNs only, the key-value cache, and which attention became what.

Then ReplaceMe (`peer_methods`) drops 1, 2 and 3 layers (--layers), fitted on the same calibration windows, and plans of
at least that size are searched for (`compress plan --remove`): ΔPPL of both on the same verification windows.

Every measurement is in DIR/attention.json as soon as it is made, and statistics and trials are in the cache (--cache):
a run with the same settings goes on where it stopped. The tables go to DIR/attention.md too.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from peer_methods.common import Inapplicable
from peer_methods.layers import replaceme

from compressor.evaluate.budget import Removal, compute_limits
from compressor.evaluate.evaluator import Evaluator, Measured
from compressor.evaluate.kv_cache import kv_cache_bytes
from compressor.evaluate.perplexity import PerplexityChange, compare, evaluate
from compressor.measure.profile import Profile, measure
from compressor.measure.verdicts import judge_all
from compressor.models.blocks import AttentionOf, find_blocks, find_branches, layer_of
from compressor.models.source import identify
from compressor.patch.checkpoint import count_parameters
from compressor.patch.tree import patched
from compressor.pipelines.job import Job, make_evaluator, open_job
from compressor.pipelines.recipe import Recipe, resolve
from compressor.plan.moments_store import open_store
from compressor.plan.removal import SizeTarget, search_size
from compressor.plan.search import ROOM, Plan, Planner
from compressor.plan.shapes import describe_shape
from compressor.plan.space import SearchSpace, prepare_search
from compressor.plan.verify import search_and_verify
from compressor.runtime.cache import Cache, default_directory
from compressor.runtime.context import RunContext
from compressor.runtime.errors import BudgetError
from compressor.runtime.progress import Progress

FFN, ATTENTION, ALL, PEER = "ffn", "attention", "all", "replaceme"


@dataclass(frozen=True)
class Point:
    """One plan, or one model of the peer: what was asked for, what went, and what that costs."""

    branches: str  # ffn, attention, all, or replaceme
    asked: str  # a budget such as +1.0, or "2 layers"
    removed: int = 0
    selection: float | None = None  # ΔPPL; the peer has no selection text
    verification: float = 0.0
    interval: tuple[float, float] = (0.0, 0.0)  # of the verification's ΔPPL, 95 %
    kv_cache: int | None = None  # bytes per token
    replaced: dict[str, str] = field(default_factory=dict)  # by block: its shape
    layers: list[int] = field(default_factory=list)  # whose attention and FFN both went, with no unit left
    nothing: str = ""  # why nothing went


@dataclass(frozen=True)
class Bench:
    """A model with its text, and what was measured of the source on the verification text."""

    job: Job
    evaluator: Evaluator
    source: Measured
    spaces: dict[str, tuple[SearchSpace, Profile]] = field(default_factory=dict)

    def space(self, branches: str) -> tuple[SearchSpace, Profile]:
        """What every search over these branches stands on: one pass over the calibration text, and single trials."""
        if branches not in self.spaces:
            self.spaces[branches] = self.prepare(branches)
        return self.spaces[branches]

    def prepare(self, branches: str) -> tuple[SearchSpace, Profile]:
        job = self.job
        recipe = job.recipe.model_copy(update={"branches": [branches]})
        choices = recipe.choices(len(find_blocks(job.model)))
        store = open_store(job.model, job.text, job.context, choices)
        searched, beside = choices.searched_branches, [store.collector()]
        profile = measure(job.model, job.text, job.context, branches=searched, beside=beside, states=store.states)
        return prepare_search(job.model, job.text, job.context, choices, store=store), profile

    def search(self, branches: str, budget: str, *, verify: bool) -> Point:
        """The largest plan of these branches within a budget."""
        recipe = self.job.recipe.model_copy(update={"max_dppl": [budget]})
        evaluator = evaluator_for(self.job, recipe)
        planner = self.planner(branches, evaluator, room=0.0 if verify else ROOM)
        try:
            plan = search_and_verify(planner, evaluator, self.source).plan if verify else planner.search()
        except BudgetError as error:
            return Point(branches, f"+{budget}", nothing=str(error))
        return self.describe(branches, f"+{budget}", plan)

    def search_size(self, branches: str, parameters: int, asked: str) -> Point:
        """The cheapest plan of these branches that removes at least so many parameters."""
        evaluator = evaluator_for(self.job, self.job.recipe.model_copy(update={"max_dppl": None}))
        planner = self.planner(branches, evaluator)
        try:
            target = SizeTarget(Removal.parse(parameters), count_parameters(self.job.model))
            return self.describe(branches, asked, search_size(planner, target))
        except BudgetError as error:
            return Point(branches, asked, nothing=str(error))

    def planner(self, branches: str, evaluator: Evaluator, room: float = 0.0) -> Planner:
        space, profile = self.space(branches)
        limits = compute_limits(evaluator.budgets, evaluator.perplexities(self.source.losses))
        verdicts = judge_all(profile, space.damages, limits.smallest, {})
        return Planner(space, limits, verdicts, objective=self.job.recipe.objective, room=room, profile=profile)

    def describe(self, branches: str, asked: str, plan: Plan) -> Point:
        """What a plan removes, and what it costs on the verification text."""
        model, before = self.job.model, count_parameters(self.job.model)
        with patched(model, find_branches(model), plan.fits):
            change, removed, kv_cache = self.compare(model), before - count_parameters(model), kv_cache_bytes(model)
        gone = {index for index, shape in plan.shapes.items() if not shape.neurons}
        return Point(
            branches,
            asked,
            removed,
            max(text.delta for text in plan.selection.values()),
            change.delta,
            change.delta_ci95,
            kv_cache,
            {str(index): describe_shape(index, plan.shapes[index]) for index in sorted(plan.shapes)},
            sorted(layer_of(index) for index in gone if isinstance(index, AttentionOf) and index.layer in gone),
        )

    def drop_layers(self, layers: int) -> Point:
        """The peer's model without so many layers."""
        model, windows = self.job.model, self.job.text.calibration.windows
        asked = f"{layers} layer{'s' * (layers > 1)}"
        try:
            changed = replaceme(model, find_blocks(model), windows, layers)
        except Inapplicable as reason:
            return Point(PEER, asked, nothing=str(reason))
        change, removed = self.compare(changed), count_parameters(model) - count_parameters(changed)
        interval, kv_cache = change.delta_ci95, kv_cache_bytes(changed)
        return Point(PEER, asked, removed, None, change.delta, interval, kv_cache)

    def compare(self, changed: Any) -> PerplexityChange:
        """The changed model against the source, on all windows of the verification text."""
        split = self.job.text.verification
        losses = evaluate(changed, split.windows, self.job.context, step="verify")
        return compare(self.source.losses, losses, documents=split.documents)


class Points:
    """The points that were measured, in a file; a run with the same settings takes them from there."""

    def __init__(self, file: Path, settings: dict[str, Any]) -> None:
        self.file, self.settings = file, settings
        stored: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        if stored.get("settings", settings) != settings:
            raise SystemExit(f"error: {file} has points of other settings; name another --out")
        points = (Point(**{**point, "interval": tuple(point["interval"])}) for point in stored.get("points", []))
        self.points = {(point.branches, point.asked): point for point in points}

    def find(self, branches: str, asked: str) -> Point | None:
        return self.points.get((branches, asked))

    def keep(self, point: Point) -> Point:
        self.points[point.branches, point.asked] = point
        content = {"settings": self.settings, "points": [asdict(each) for each in self.points.values()]}
        part = self.file.with_suffix(".part")
        part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        part.replace(self.file)
        return point


def evaluator_for(job: Job, recipe: Recipe) -> Evaluator:
    return make_evaluator(recipe, job.model, job.tokenizer, job.text, [], job.context)


def open_bench(options: argparse.Namespace) -> Bench:
    progress = Progress(visible=True)
    context = RunContext(progress=progress, cache=Cache(options.cache, progress))
    names = ("model", "text", "seq_len", "calib_tokens", "select_tokens", "verify_tokens", "objective")
    given = {name: getattr(options, name) for name in names}
    recipe = resolve(options.recipe, {**given, "generate": 0, "tasks": None})
    job = open_job(recipe, context, with_tasks=False)
    if len(job.text.counts) > 1:
        raise SystemExit("error: several texts are given; this benchmark takes one")
    evaluator = evaluator_for(job, job.recipe)
    return Bench(job, evaluator, evaluator.measure_texts(job.model, "source", identify(job.model)))


def measure_points(bench: Bench, points: Points, options: argparse.Namespace) -> None:
    """Everything that is not in the file yet."""
    for budget in options.max_dppl:
        for branches in options.branches:
            if points.find(branches, f"+{budget}") is None:
                points.keep(bench.search(branches, budget, verify=options.verify))
    for layers in options.layers:
        asked = f"{layers} layer{'s' * (layers > 1)}"
        peer = points.find(PEER, asked) or points.keep(bench.drop_layers(layers))
        for branches in (b for b in (FFN, ALL) if b in options.branches and not peer.nothing):
            if points.find(branches, asked) is None:
                points.keep(bench.search_size(branches, peer.removed, asked))


def write_tables(points: Points, options: argparse.Namespace) -> Iterator[str]:
    """All tables, in Markdown."""
    settings = points.settings
    total, cache_before = settings["parameters"], settings["kv_cache"]
    text = f"{settings['tokens']:,} verification tokens in windows of {settings['seq_len']}"
    cached = "" if cache_before is None else f"; key-value cache: {cache_before:,} bytes per token"
    yield f"{settings['model']}: {total:,} parameters, perplexity {settings['perplexity']:.3f} on {text}{cached}"
    yield ""
    yield "| at most | branches | removed | ÷ FFNs only | selection ΔPPL | verification ΔPPL | 95 % | cache |"
    yield "|---|---|---|---|---|---|---|---|"
    for budget in options.max_dppl:
        ffn = points.find(FFN, f"+{budget}")
        for branches in options.branches:
            point = points.find(branches, f"+{budget}")
            if point is not None:
                yield f"| +{budget} | {branches} | {describe_costs(point, total, ffn, cache_before)} |"
    yield from compare_branches(points, options)
    yield ""
    yield "| at most | branches | attention that went |"
    yield "|---|---|---|"
    for budget in options.max_dppl:
        for branches in (b for b in options.branches if b != FFN):
            point = points.find(branches, f"+{budget}")
            if point is not None:
                yield f"| +{budget} | {branches} | {describe_attention(point)} |"
    peers = [(layers, points.find(PEER, f"{layers} layer{'s' * (layers > 1)}")) for layers in options.layers]
    if peers:
        yield ""
        yield "| ReplaceMe drops | method | removed | verification ΔPPL | 95 % | ÷ ReplaceMe | cache | whole layers |"
        yield "|---|---|---|---|---|---|---|---|"
    for layers, peer in peers:
        if peer is not None:
            found = (points.find(branches, peer.asked) for branches in (PEER, FFN, ALL))
            yield from describe_sizes(layers, peer, (point for point in found if point is not None), settings)


def compare_branches(points: Points, options: argparse.Namespace) -> Iterator[str]:
    """Whether all branches together ever remove less than FFNs only."""
    pairs = [(budget, points.find(FFN, f"+{budget}"), points.find(ALL, f"+{budget}")) for budget in options.max_dppl]
    compared = [(budget, ffn.removed, both.removed) for budget, ffn, both in pairs if ffn and both]
    if compared:
        less = [f"+{budget}" for budget, ffn, both in compared if both < ffn]
        yield ""
        yield f"All branches remove less than FFNs only at: {', '.join(less) or 'no budget'}"


def describe_costs(point: Point, total: int, ffn: Point | None, cache_before: int | None) -> str:
    """The cells of a plan within a budget."""
    if point.nothing:
        return f"nothing: {point.nothing} | – | – | – | – | –"
    ratio = f"{point.removed / ffn.removed:.2f}" if ffn and ffn.removed else "–"
    low, high = point.interval
    costs = f"{point.selection:+.3f} | {point.verification:+.3f} | {low:+.3f} … {high:+.3f}"
    return f"{point.removed:,} ({point.removed / total:.2%}) | {ratio} | {costs} | {cache_change(point, cache_before)}"


def cache_change(point: Point, before: int | None) -> str:
    return f"{point.kv_cache / before - 1:+.1%}" if before and point.kv_cache is not None else "–"


def describe_attention(point: Point) -> str:
    """Which attention became what, by layer."""
    found = {name.partition(".")[0]: shape for name, shape in point.replaced.items() if name.endswith(".attention")}
    whole = f"; whole layers: {', '.join(map(str, point.layers))}" if point.layers else ""
    return (", ".join(f"{layer} ({shape})" for layer, shape in found.items()) or "none") + whole


def describe_sizes(layers: int, peer: Point, found: Iterable[Point], settings: dict[str, Any]) -> Iterator[str]:
    """The peer and our plans of at least its size."""
    for point in found:
        if point.nothing:
            yield f"| {layers} | {point.branches} | nothing: {point.nothing} | – | – | – | – | – |"
            continue
        low, high = point.interval
        ratio = f"{point.verification / peer.verification:.2f}" if peer.verification > 0 else "–"
        whole = str(layers) if point.branches == PEER else ", ".join(map(str, point.layers)) or "none"
        size = f"{point.removed:,} ({point.removed / settings['parameters']:.2%})"
        costs = f"{point.verification:+.3f} | {low:+.3f} … {high:+.3f} | {ratio}"
        cells = f"{size} | {costs} | {cache_change(point, settings['kv_cache'])} | {whole}"
        yield f"| {layers} | {point.branches} | {cells} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a directory, or demo")
    parser.add_argument("--text", action="append")
    parser.add_argument("--recipe", type=Path, help="takes tokens and text from here")
    parser.add_argument("--max-dppl", nargs="*", default=["0.5", "1.0", "2.0", "4.0"])
    parser.add_argument("--branches", nargs="+", default=[FFN, ATTENTION, ALL], choices=[FFN, ATTENTION, ALL])
    parser.add_argument("--layers", nargs="*", type=int, default=[1, 2, 3], help="that ReplaceMe drops")
    parser.add_argument("--verify", action="store_true", help="search as `compress` does, until verification holds")
    parser.add_argument("--objective", choices=["speed", "size"], help="[that of the recipe]")
    for name in ("--seq-len", "--calib-tokens", "--select-tokens", "--verify-tokens"):
        parser.add_argument(name, type=int)
    parser.add_argument("--cache", type=Path, default=default_directory())
    parser.add_argument("--out", type=Path, default=Path("attention"))
    options = parser.parse_args()
    bench = open_bench(options)
    job, text = bench.job, bench.job.text
    settings = {
        "model": Path(options.model).name,
        "parameters": count_parameters(job.model),
        "kv_cache": kv_cache_bytes(job.model),
        "perplexity": bench.source.losses.perplexity,
        "tokens": text.verification.tokens,
        "seq_len": text.seq_len,
        "verify": options.verify,
        "objective": job.recipe.objective,
        "sha256": [text.calibration_sha256, text.selection.sha256, text.verification.sha256],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    points = Points(options.out / "attention.json", settings)
    measure_points(bench, points, options)
    tables = "\n".join(write_tables(points, options)) + "\n"
    (options.out / "attention.md").write_text(tables, encoding="utf-8")
    print(tables, end="")


if __name__ == "__main__":
    main()
