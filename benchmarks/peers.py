"""Training-free peers against our method: the same model, windows, tokens and parameter count, in one run.

    python benchmarks/peers.py MODEL --calibration FILE --text FILE [--methods all] [--out DIR]

Prints the table that goes to DIR/peers.md; DIR/peers.png and .svg draw it (needs matplotlib). Every point is in
DIR/peers.json as soon as it is measured and a rerun with the same settings takes it from there; delete a method's
points from that file to measure it again. "Seconds" is the time to make the changed model, without evaluating it;
statistics of the calibration text that several points share are counted where they are first needed.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import importlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers.pytorch_utils import Conv1D

import compressor
from compressor.evaluate.budget import Budget
from compressor.evaluate.perplexity import evaluate
from compressor.measure.profile import measure
from compressor.models.blocks import BRANCHES, Block, find_blocks, find_branches
from compressor.patch.checkpoint import count_parameters
from compressor.patch.tree import patch
from compressor.plan.api import make_planner
from compressor.plan.choices import Choices
from compressor.plan.search import Planner
from compressor.plan.space import prepare_search
from compressor.runtime.cache import Cache
from compressor.runtime.context import RunContext
from compressor.runtime.names import UNNAMED
from compressor.runtime.progress import Progress
from compressor.text import Split, Text

BATCH = 8
RIDGE = 1e-8  # of the mean diagonal: keeps a Gram matrix invertible
CUTS = 3  # ReplaceMe's best-ranked cuts, the best of which on CUT_TOKENS of calibration text is taken
CUT_TOKENS = 2048
LIMIT = 1.0  # the ΔPPL at which the removed parameters are compared
LIMITS = (LIMIT, 4.0)  # those at which ours is compared with ours without attention
REMOVED = (0.026, 0.053)  # the removed fractions at which the ΔPPL is compared
POST_NORMS = ("post_feedforward_layernorm", "post_mlp_layernorm")
PLOT_TOP = 12.0
Curve = list[tuple[float, float]]  # (removed fraction, ΔPPL), ascending, from the origin on
Take = Callable[[Tensor, Tensor], Any]
Method = Callable[[Any, list[Block], Tensor, float], Any]


class Inapplicable(Exception):
    """The method cannot be used on this model or at this step; the message says why."""


@dataclass(frozen=True)
class Point:
    method: str
    step: float  # layers or fraction, as the method counts
    removed: float  # fraction of all parameters, tied weights counted once
    perplexity: float
    delta: float
    seconds: float


def ffn_linears(model: nn.Module, block: Block) -> tuple[list[str], str]:
    """Paths of the linears that read the FFN's input, and of the one that writes its output."""
    roots = [block.path, f"{block.layer_path}.fc2"] if block.path.endswith(".fc1") else [block.path]
    paths = [
        f"{root}.{name}".rstrip(".")
        for root in roots
        for name, module in model.get_submodule(root).named_modules()
        if isinstance(module, (nn.Linear, Conv1D))
    ]
    return paths[:-1], paths[-1]


def weight_and_bias(model: nn.Module, path: str) -> tuple[Tensor, Tensor | None]:
    """The weight as [out, in], whichever way the module keeps it, and the bias."""
    module: Any = model.get_submodule(path)
    return (module.weight.T if isinstance(module, Conv1D) else module.weight).detach(), module.bias


def as_linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    linear.load_state_dict({"weight": weight} if bias is None else {"weight": weight, "bias": bias})
    return linear


@torch.no_grad()
def observe(model: Any, windows: Tensor, paths: Iterable[str], take: Take) -> Iterator[dict[str, Any]]:
    """Batch by batch, what `take` makes of the rows [tokens, width] into and out of every module named."""
    seen: dict[str, Any] = {}

    def see(path: str, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        pair = (args[0] if args else kwargs["hidden_states"], output if isinstance(output, Tensor) else output[0])
        seen[path] = take(*(rows.reshape(-1, rows.shape[-1]) for rows in pair))

    handles = [model.get_submodule(path).register_forward_hook(partial(see, path), with_kwargs=True) for path in paths]
    try:
        for start in range(0, len(windows), BATCH):
            model.base_model(input_ids=windows[start : start + BATCH], use_cache=False)
            yield seen
    finally:
        for handle in handles:
            handle.remove()


@cache
def similarities(model: Any, layers: tuple[str, ...], windows: Tensor) -> Tensor:
    """Mean cosine between the hidden states of every two depths: 0 enters the first layer, i leaves the i-th."""
    total = torch.zeros(())
    for seen in observe(model, windows, layers, lambda x, y: (x, y.clone())):
        states = torch.stack([seen[layers[0]][0], *(seen[path][1] for path in layers)])
        units = nn.functional.normalize(states, dim=-1).flatten(1)
        total = total + (units @ units.T).double()
    return total / windows.numel()


@cache
def input_means(model: Any, paths: tuple[str, ...], windows: Tensor, *, products: bool) -> dict[str, Tensor]:
    """E|x|, or E[x xᵀ], of what enters the modules named."""
    totals = dict.fromkeys(paths, torch.zeros(()))
    take: Take = (lambda x, _: x.double().T @ x.double()) if products else (lambda x, _: x.double().abs().sum(0))
    for seen in observe(model, windows, paths, take):
        for path in paths:
            totals[path] = totals[path] + seen.pop(path)
    return {path: total / windows.numel() for path, total in totals.items()}


def drop_layers(model: Any, blocks: list[Block], dropped: Sequence[int]) -> Any:
    """A copy of the model without these decoder layers."""
    if len(dropped) >= len(blocks):
        raise Inapplicable(f"{len(dropped)} layers cannot be dropped from {len(blocks)}")
    changed = copy.deepcopy(model)
    kept = [block.index for block in blocks if block.index not in dropped]
    path, _, _ = blocks[0].layer_path.rpartition(".")
    layers: Any = changed.get_submodule(path)
    changed.set_submodule(path, nn.ModuleList(layers[index] for index in kept))
    config = changed.config.get_text_config()
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[index] for index in kept]
    config.num_hidden_layers = len(kept)
    for position, layer in enumerate(changed.get_submodule(path)):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = position
    return changed


def shortgpt(model: Any, blocks: list[Block], windows: Tensor, step: float) -> Any:
    """TaskChange the `step` layers of the least Block Influence: 1 − mean cosine of a layer's input and output."""
    influence = 1 - similarities(model, tuple(block.layer_path for block in blocks), windows).diagonal(1)
    return drop_layers(model, blocks, influence.argsort()[: int(step)].tolist())


def replaceme(model: Any, blocks: list[Block], windows: Tensor, step: float) -> Any:
    """TaskChange the `step` layers after layer i, whose FFN output is mapped by least squares to make up for them.

    i has the least cosine distance between the hidden states after it and after the span. To be generous to the peer,
    the best on calibration text of the three best-ranked i is taken.
    """
    length, layer = int(step), model.get_submodule(blocks[0].layer_path)
    if length >= len(blocks):
        raise Inapplicable(f"a layer and {length} after it do not fit into {len(blocks)}")
    if any(hasattr(layer, name) for name in POST_NORMS) or hasattr(model.config, "residual_multiplier"):
        raise Inapplicable("the FFN output is scaled before it is added, so a map of it cannot be merged")
    cosines = similarities(model, tuple(block.layer_path for block in blocks), windows).diagonal(length)[1:]
    cuts = cosines.argsort(descending=True)[:CUTS].tolist()
    transforms = span_maps(model, blocks, windows, cuts, length)
    candidates = (merge_span(model, blocks, cut, length, transforms[cut]) for cut in cuts)
    sample = windows[:: max(1, windows.numel() // CUT_TOKENS)]
    return min(candidates, key=lambda changed: evaluate(changed, sample, RunContext(batch_size=BATCH)).perplexity)


def span_maps(model: Any, blocks: list[Block], windows: Tensor, cuts: list[int], length: int) -> dict[int, Tensor]:
    """T of every cut i, minimising ‖M T + Y − L‖² in float64: M is the output of layer i's FFN, Y what it is added to,
    L the hidden state after layer i + length."""
    ends = {cut: [blocks[cut].layer_path, blocks[cut + length].layer_path] for cut in cuts}
    downs = {cut: ffn_linears(model, blocks[cut])[1] for cut in cuts}
    grams, crosses = (dict.fromkeys(cuts, torch.zeros(())) for _ in range(2))
    paths = {*downs.values(), *(path for pair in ends.values() for path in pair)}
    for seen in observe(model, windows, paths, lambda _, y: y.double()):
        for cut in cuts:
            mapped, before, after = (seen[path] for path in (downs[cut], *ends[cut]))
            grams[cut] = grams[cut] + mapped.T @ mapped
            crosses[cut] = crosses[cut] + mapped.T @ (after - before + mapped)  # Y = before − M
    return {cut: torch.linalg.solve(ridged(grams[cut]), crosses[cut]) for cut in cuts}


def ridged(gram: Tensor) -> Tensor:
    return gram + RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)


def merge_span(model: Any, blocks: list[Block], cut: int, length: int, transform: Tensor) -> Any:
    """A copy without the layers after `cut`, whose FFN's last linear is followed by `transform` [width, width]."""
    changed = drop_layers(model, blocks, range(cut + 1, cut + 1 + length))
    down = ffn_linears(changed, blocks[cut])[1]
    weight, bias = weight_and_bias(changed, down)
    mapped = None if bias is None else bias.double() @ transform
    changed.set_submodule(down, as_linear(transform.T @ weight.double(), mapped))
    return changed


@torch.no_grad()
def width(model: Any, blocks: list[Block], windows: Tensor, step: float) -> Any:
    """Remove the fraction `step` of the neurons of every FFN, without a refit.

    The importance of neuron j is mean |a_j| on calibration rows times the norm of its column of the last linear.
    """
    sizes = input_means(model, tuple(ffn_linears(model, block)[1] for block in blocks), windows, products=False)
    changed = copy.deepcopy(model)
    for block in blocks:
        ups, down = ffn_linears(changed, block)
        weight, bias = weight_and_bias(changed, down)
        neurons = weight.shape[1]
        importance = sizes[down] * weight.norm(dim=0)
        kept = importance.argsort(descending=True)[: neurons - round(step * neurons)].sort().values
        changed.set_submodule(down, as_linear(weight[:, kept], bias))
        for up in ups:
            weight, bias = weight_and_bias(changed, up)
            rows = torch.cat([kept + start for start in range(0, len(weight), neurons)])  # gate and up may be one
            changed.set_submodule(up, as_linear(weight[rows], None if bias is None else bias[rows]))
    return changed


def optipfair(model: Any, blocks: list[Block], windows: Tensor, step: float, *, data: bool) -> Any:
    """The package as its users call it, by weights alone (MAW) or with calibration data as well."""
    logging.basicConfig(level=logging.WARNING)  # before the package sets up INFO for everyone
    try:
        package = importlib.import_module("optipfair")
    except ImportError as error:
        raise Inapplicable("not installed; pip install optipfair") from error
    ffn = model.get_submodule(blocks[0].path)
    if not all(hasattr(ffn, name) for name in ("gate_proj", "up_proj", "down_proj")):
        raise Inapplicable("it prunes gated FFNs only, and this model has none")
    loader = DataLoader(TensorDataset(windows), batch_size=BATCH) if data else None
    chosen = {"pruning_type": "MLP_GLU", "neuron_selection_method": "MAW", "pruning_percentage": 100 * step}
    try:
        return package.prune_model(model=copy.deepcopy(model), dataloader=loader, show_progress=False, **chosen)
    except ValueError as error:  # a percentage so small that no neuron goes
        raise Inapplicable(f"refused {step:.0%}: {error}") from error


@torch.no_grad()
def svd(model: Any, blocks: list[Block], windows: Tensor, step: float) -> Any:
    """Every FFN matrix as two of low rank, whitened by its input (SVD-LLM), to remove the fraction `step` of all."""
    sources: dict[str, str] = {}  # by linear, the module whose input is measured: gate and up read the same
    for ups, down in (ffn_linears(model, block) for block in blocks):
        sources |= {**dict.fromkeys(ups, ups[0]), down: down}
    grams = input_means(model, tuple(dict.fromkeys(sources.values())), windows, products=True)
    linears = {path: weight_and_bias(model, path) for path in sources}
    ratio = 1 - step * count_parameters(model) / sum([weight.numel() for weight, _ in linears.values()])
    if ratio <= 0:
        raise Inapplicable(f"the FFN matrices are fewer than {step:.1%} of the parameters")
    changed = copy.deepcopy(model)
    for path, (weight, bias) in linears.items():
        rank = max(1, int(ratio * weight.numel() / sum(weight.shape)))  # at least `step` is removed
        changed.set_submodule(path, low_rank(weight, bias, grams[sources[path]], rank))
    return changed


def low_rank(weight: Tensor, bias: Tensor | None, gram: Tensor, rank: int) -> nn.Sequential:
    """The pair of linears of this rank that is nearest to the weight W on inputs of this Gram matrix S Sᵀ.

    W S = U Σ Vᵀ is truncated, and U_r Σ_r V_rᵀ S⁻¹ = U_r U_rᵀ W, which needs no inverse.
    """
    left, _, _ = torch.linalg.svd(weight.double() @ torch.linalg.cholesky(ridged(gram)), full_matrices=False)
    kept = left[:, :rank]
    return nn.Sequential(as_linear(kept.T @ weight.double(), None), as_linear(kept, bias))


@cache
def our_planner(model: Any, windows: Tensor, directory: Path | None, branches: tuple[str, ...]) -> Planner:
    """Five sixths of the calibration windows to fit on, one to correct the predictions on; nothing else is seen."""
    cut = len(windows) * 5 // 6
    calibration, selection = (Split(part, "calibration") for part in (windows[:cut], windows[cut:]))
    text = Text(calibration, selection, selection)
    progress = Progress()
    context = RunContext(cache=Cache(directory, progress), batch_size=BATCH, progress=progress)
    space = prepare_search(model, text, context, Choices(branches=branches))
    correlation = space.calibrations[UNNAMED].correlation
    name = f"ours ({', '.join(branches)})"
    print(f"{name}: rank correlation of predicted and measured Δloss {correlation:.2f}", flush=True)
    return make_planner(space, measure(model, text, branches=branches), {UNNAMED: Budget.parse("100%")})


def ours(
    model: Any, _: list[Block], windows: Tensor, step: float, *, cache: Path | None, branches: tuple[str, ...]
) -> Any:
    """A copy of the model, compressed by this package until the fraction `step` of its parameters is removed."""
    planner = our_planner(model, windows, cache, branches)
    wanted = step * count_parameters(model)
    candidates, plans = planner.runner.candidates, planner.growing_plans()
    sizes = [sum(candidates[index].saved(shape) for index, shape in shapes.items()) for shapes, _ in plans]
    found = next((k for k, size in enumerate(sizes) if size >= wanted), None)
    if found is None:
        raise Inapplicable(f"no plan removes {step:.1%}")
    fits = planner.runner.fitter.fit_in_order(plans[found][0])
    changed = copy.deepcopy(model)
    patch(changed, find_branches(changed), fits)
    return changed


def methods(cache: Path | None) -> dict[str, tuple[Method, tuple[float, ...]]]:
    neurons, sizes = (0.01, 0.02, 0.04, 0.08), (0.026, 0.035, 0.053, 0.08, 0.11)
    return {
        "shortgpt": (shortgpt, (1, 2, 3)),
        "replaceme": (replaceme, (1, 2, 3)),
        "width": (width, neurons),
        "optipfair": (partial(optipfair, data=False), neurons),
        "optipfair-data": (partial(optipfair, data=True), neurons),
        "svd": (svd, (0.01, 0.026, 0.053)),
        "ours-ffn": (partial(ours, cache=cache, branches=("ffn",)), sizes),
        "ours": (partial(ours, cache=cache, branches=BRANCHES), sizes),
    }


def curves_of(points: list[Point]) -> dict[str, Curve]:
    names = dict.fromkeys(point.method for point in points)
    return {name: [(0.0, 0.0), *sorted((p.removed, p.delta) for p in points if p.method == name)] for name in names}


def removed_at(curve: Curve, limit: float) -> float:
    """The largest removed fraction at which the interpolated ΔPPL is within the limit."""
    best = 0.0
    for (low, before), (high, after) in pairwise(curve):
        if after <= limit:
            best = high
        elif before <= limit:
            best = low + (high - low) * (limit - before) / (after - before)
    return best


def removed_strict(curve: Curve, limit: float) -> float:
    """The same, but a method whose smallest step already exceeds the limit counts as that step."""
    return curve[1][0] if curve[1][1] > limit else removed_at(curve, limit)


def delta_at(curve: Curve, removed: float) -> float:
    """The interpolated ΔPPL at this removed fraction; not a number beyond the end of the curve."""
    for (low, before), (high, after) in pairwise(curve):
        if low < removed <= high:
            return before + (after - before) * (removed - low) / (high - low)
    return math.nan


def render(settings: dict[str, Any], baseline: float, points: list[Point]) -> str:
    """The table of all points and the summary, in Markdown; "≥" where a curve ends within the limit."""
    tokens = f"{settings['eval_tokens']} tokens in windows of {settings['seq_len']}"
    lines = [f"{settings['model']}: {settings['parameters']:,} parameters, {tokens}, perplexity {baseline:.3f}", ""]
    lines += ["| method | step | removed | PPL | ΔPPL | seconds |", "|---|---|---|---|---|---|"]
    for p in points:
        step = f"{p.step:.1%}" if p.step < 1 else f"{p.step:g} layer{'s' * (p.step > 1)}"
        lines += [f"| {p.method} | {step} | {p.removed:.2%} | {p.perplexity:.3f} | {p.delta:+.3f} | {p.seconds:.1f} |"]
    curves = curves_of(points)
    ends = " | ".join(f"ΔPPL at {removed:.1%}" for removed in REMOVED)
    lines += ["", f"| method | removed at +{LIMIT} | strict | {ends} |", "|---|---|---|" + "---|" * len(REMOVED)]
    for name, curve in curves.items():
        sign = "≥ " if curve[-1][1] <= LIMIT else ""
        cells = [f"{sign}{reading(curve, LIMIT):.2%}" for reading in (removed_at, removed_strict)]
        cells += [f"{delta_at(curve, removed):+.3f}" for removed in REMOVED]
        lines += [f"| {name} | {' | '.join(cells)} |".replace("+nan", "–")]
    mine, without_attention = curves.pop("ours", None), curves.pop("ours-ffn", None)
    if mine and curves:
        lines += [""]
        for label, reading in (("interpolated", removed_at), ("strict", removed_strict)):
            best = max(curves, key=lambda name: reading(curves[name], LIMIT))
            ratio = reading(mine, LIMIT) / max(reading(curves[best], LIMIT), 1e-9)
            lines += [f"removed at +{LIMIT}, ours / best peer ({best}), {label}: {ratio:.2f}"]
    if mine and "replaceme" in curves:
        for removed in REMOVED:
            ratio = delta_at(mine, removed) / delta_at(curves["replaceme"], removed)
            lines += [f"ΔPPL at {removed:.1%} removed, ours / replaceme: {ratio:.2f}"]
    for limit in LIMITS if mine and without_attention else ():
        most, least = (removed_at(curve, limit) for curve in (mine, without_attention))
        ended = " (a curve ends within the limit)" if min(mine[-1][1], without_attention[-1][1]) <= limit else ""
        lines += [f"removed at +{limit}, ours / ours with FFNs only: {most / max(least, 1e-9):.2f}{ended}"]
    return "\n".join(lines) + "\n"


def draw(points: list[Point], out: Path) -> None:
    plt: Any = importlib.import_module("matplotlib.pyplot")
    plt.switch_backend("Agg")
    figure, axes = plt.subplots(figsize=(7, 4.5))
    for name, curve in curves_of(points).items():
        style = {"linewidth": 3.5, "color": "black", "zorder": 3} if name == "ours" else {"linewidth": 1.5}
        axes.plot([100 * removed for removed, _ in curve], [d for _, d in curve], marker="o", label=name, **style)
    shown = [(0.0, 0.0), *((p.removed, p.delta) for p in points if p.delta <= PLOT_TOP)]
    axes.set(xlabel="parameters removed, %", ylabel="ΔPPL", xlim=(0, 105 * max(shown)[0] + 0.5))
    axes.set_ylim(min(delta for _, delta in shown) - 0.2, min(PLOT_TOP, max(p.delta for p in points) + 0.5))
    axes.axhline(LIMIT, color="grey", linewidth=0.8, linestyle=":")
    axes.legend()
    for suffix in ("png", "svg"):
        figure.savefig(out / f"peers.{suffix}", dpi=150, bbox_inches="tight")


def read_windows(file: str, tokenizer: Any, seq_len: int, tokens: int, *, spread: bool) -> Tensor:
    """Windows of the file, each beginning as the tokenizer begins a text: the first ones, or evenly spaced ones."""
    bos = tokenizer.bos_token_id
    prefix = [bos] if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else []
    ids = tokenizer(Path(file).read_text(encoding="utf-8"), add_special_tokens=False, verbose=False)["input_ids"]
    count, body = tokens // seq_len, seq_len - len(prefix)
    found = len(ids) // body
    if not 0 < count <= found:
        raise SystemExit(f"error: {tokens} tokens wanted, {file} has {found} windows of {seq_len}")
    chosen = [body * (index * found // count if spread else index) for index in range(count)]
    return torch.tensor([prefix + ids[start : start + body] for start in chosen])


def digest(tensors: Iterable[Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().numpy().tobytes())
    return found.hexdigest()


def store(file: Path, settings: dict[str, Any], baseline: float, points: list[Point]) -> None:
    content = {"settings": settings, "baseline": baseline, "points": [asdict(point) for point in points]}
    part = file.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    part.replace(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a directory, or demo")
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--calib-tokens", type=int, default=24576)
    parser.add_argument("--eval-tokens", type=int, default=16384)
    parser.add_argument("--methods", default="all", help=f"all, or some of {','.join(methods(None))}")
    parser.add_argument("--cache", type=Path, help="where our method keeps what it measured")
    parser.add_argument("--out", type=Path, default=Path("peers"))
    args = parser.parse_args()
    known = methods(args.cache)
    names = list(known) if args.methods == "all" else args.methods.split(",")
    if unknown := [name for name in names if name not in known]:
        parser.error(f"unknown methods {', '.join(unknown)}; use {', '.join(known)}")
    model: Any
    model, tokenizer = compressor.load(args.model, device="cpu")
    blocks, total = find_blocks(model), count_parameters(model)
    calibration = read_windows(args.calibration, tokenizer, args.seq_len, args.calib_tokens, spread=True)
    held_out = read_windows(args.text, tokenizer, args.seq_len, args.eval_tokens, spread=False)
    settings = {
        "model": Path(args.model).name,
        "parameters": total,
        "seq_len": args.seq_len,
        "calib_tokens": calibration.numel(),
        "eval_tokens": held_out.numel(),
        "sha256": digest([*model.parameters(), calibration, held_out]),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "peers.json"
    stored: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if stored.get("settings", settings) != settings:
        raise SystemExit(f"error: {file} holds points of other settings; name another --out")
    points = [Point(**point) for point in stored.get("points", [])]
    baseline: float = stored.get("baseline") or evaluate(model, held_out, RunContext(batch_size=BATCH)).perplexity
    for name in names:
        method, steps = known[name]
        for step in steps:
            if any((point.method, point.step) == (name, step) for point in points):
                continue
            began = time.perf_counter()
            try:
                changed = method(model, blocks, calibration, step)
            except Inapplicable as reason:
                print(f"{name} {step:g}: {reason}", flush=True)
                continue
            seconds = time.perf_counter() - began
            perplexity = evaluate(changed, held_out, RunContext(batch_size=BATCH)).perplexity
            removed = 1 - count_parameters(changed) / total
            points.append(Point(name, step, removed, perplexity, perplexity - baseline, seconds))
            store(file, settings, baseline, points)
            print(f"{name} {step:g}: {removed:.2%} removed, ΔPPL {perplexity - baseline:+.3f}", flush=True)
    points.sort(key=lambda point: ([*known].index(point.method), point.step))
    table = render(settings, baseline, points)
    (args.out / "peers.md").write_text(table, encoding="utf-8")
    print(table, end="")
    try:
        if points:
            draw(points, args.out)
    except ImportError:
        print("no figure: matplotlib is not installed; pip install matplotlib")


if __name__ == "__main__":
    main()
