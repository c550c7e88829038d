"""What was measured, as tables and as one plot."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

OURS = ("ours-ffn", "ours", "ours-healed")
FAR_MORE = 1.1  # times what was asked for
PLOT_TOP = 0.6  # nats per token
Curve = list[tuple[float, float]]  # (removed fraction, cost), ascending, from the origin on


@dataclass(frozen=True)
class Point:
    """One method at one size: what went, and the perplexity on every text; without them, the reason."""

    method: str
    fraction: float  # of all parameters, tied weights counted once: at least so much was to go
    removed: float = 0.0
    perplexities: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    reason: str = ""
    trained: int = 0  # tokens that it was trained on

    @property
    def label(self) -> str:
        return f"{self.method} (trained)" if self.trained else self.method

    def deltas(self, baseline: Mapping[str, float]) -> dict[str, float]:
        return {name: perplexity - baseline[name] for name, perplexity in self.perplexities.items()}

    def nats(self, baseline: Mapping[str, float]) -> dict[str, float]:
        """The rise of the loss per token: texts of different perplexity are compared by it."""
        return {name: math.log(perplexity / baseline[name]) for name, perplexity in self.perplexities.items()}

    def worst(self, baseline: Mapping[str, float]) -> float:
        return max(self.nats(baseline).values())

    def mean(self, baseline: Mapping[str, float]) -> float:
        return sum(self.nats(baseline).values()) / len(self.perplexities)

    def describe(self, baseline: Mapping[str, float]) -> str:
        """One line for the terminal."""
        if not self.perplexities:
            return f"{self.method} {self.fraction:.1%}: {self.reason}"
        deltas = ", ".join(f"{name} {delta:+.3f}" for name, delta in self.deltas(baseline).items())
        return f"{self.method} {self.fraction:.1%}: {self.removed:.2%} removed, ΔPPL {deltas} ({self.seconds:.0f} s)"


def cost_at(points: Sequence[Point], removed: float, cost: Any) -> float:
    """A method's cost at exactly this removed fraction, on the line between its points; not a number beyond them."""
    curve: Curve = [(0.0, 0.0), *sorted((point.removed, cost(point)) for point in points)]
    for (low, before), (high, after) in pairwise(curve):
        if low < removed <= high:
            return before + (after - before) * (removed - low) / (high - low)
    return math.nan


def render(settings: Mapping[str, Any], baseline: Mapping[str, float], points: Sequence[Point]) -> str:
    """All tables in Markdown: the methods side by side, ours against the best peer, and every figure of every point."""
    tokens = f"{settings['eval_tokens']:,} tokens of each text in windows of {settings['seq_len']}"
    perplexities = ", ".join(f"{name} {perplexity:.3f}" for name, perplexity in baseline.items())
    lines = [
        f"{settings['model']}: {settings['parameters']:,} parameters; {tokens}; calibrated on "
        f"{settings['calib_tokens']:,} tokens; perplexity {perplexities}",
        "",
        *table_of_methods(baseline, points),
        "",
        *table_of_ratios(baseline, points),
        "",
        *table_of_points(baseline, points),
    ]
    return "\n".join(lines) + "\n"


def table_of_methods(baseline: Mapping[str, float], points: Sequence[Point]) -> Iterator[str]:
    """A row for every method: ΔPPL on the first text and the rise of the loss on the worst text, at every size."""
    first, fractions = next(iter(baseline)), sorted({point.fraction for point in points})
    yield f"ΔPPL {first}, worst Δnats of all texts; (what went, where it is far more than was asked for)"
    yield ""
    yield "| method | " + " | ".join(f"{fraction:.1%}" for fraction in fractions) + " |"
    yield "|---|" + "---|" * len(fractions)
    for label in dict.fromkeys(point.label for point in points):
        cells = []
        for fraction in fractions:
            found = next((p for p in points if (p.label, p.fraction) == (label, fraction) and p.perplexities), None)
            if found is None:
                cells.append("–")
                continue
            more = f" ({found.removed:.1%})" if found.removed > FAR_MORE * fraction else ""
            cells.append(f"{found.deltas(baseline)[first]:+.3f}, {found.worst(baseline):+.4f}{more}")
        yield f"| {label} | {' | '.join(cells)} |"


def table_of_points(baseline: Mapping[str, float], points: Sequence[Point]) -> Iterator[str]:
    texts = " | ".join(f"ΔPPL {name}" for name in baseline)
    yield f"| at least | method | removed | {texts} | mean ΔPPL | mean Δnats | worst Δnats | seconds |"
    yield "|---|---|---|" + "---|" * (len(baseline) + 4)
    for fraction in sorted({point.fraction for point in points}):
        for point in (point for point in points if point.fraction == fraction):
            if not point.perplexities:
                yield f"| {fraction:.1%} | {point.label} | {'– | ' * (len(baseline) + 4)}{point.reason} |"
                continue
            deltas = point.deltas(baseline)
            cells = [f"{delta:+.3f}" for delta in (*deltas.values(), sum(deltas.values()) / len(deltas))]
            cells += [f"{point.mean(baseline):+.4f}", f"{point.worst(baseline):+.4f}", f"{point.seconds:.0f}"]
            yield f"| {fraction:.1%} | {point.label} | {point.removed:.2%} | {' | '.join(cells)} |"


def table_of_ratios(baseline: Mapping[str, float], points: Sequence[Point]) -> Iterator[str]:
    """Ours divided by the best peer, at equal parameters (on the line between a method's points)."""
    costs: dict[str, Any] = {f"ΔPPL {name}": lambda p, n=name: p.deltas(baseline)[n] for name in baseline}
    costs |= {"mean Δnats": lambda p: p.mean(baseline), "worst Δnats": lambda p: p.worst(baseline)}
    measured: dict[str, list[Point]] = {}
    for point in (point for point in points if point.perplexities):
        measured.setdefault(point.method, []).append(point)
    peers = {name: own for name, own in measured.items() if name not in OURS}
    mine = [name for name in OURS if name in measured]
    if not (peers and mine):
        return
    yield "| removed | by | best peer | " + " | ".join(f"{name} ÷ it" for name in mine) + " |"
    yield "|---|---|---|" + "---|" * len(mine)
    for fraction in sorted({point.fraction for point in points}):
        for label, cost in costs.items():
            found = {name: cost_at(own, fraction, cost) for name, own in peers.items()}
            known = {name: value for name, value in found.items() if math.isfinite(value)}
            if not known:
                continue
            best = min(known, key=lambda name: known[name])
            cells = [ratio(cost_at(measured[name], fraction, cost), known[best]) for name in mine]
            yield f"| {fraction:.1%} | {label} | {best} {known[best]:+.4f} | {' | '.join(cells)} |"


def ratio(ours: float, peer: float) -> str:
    """Ours over the peer's; differences instead where the peer costs nothing, for a ratio would say nothing."""
    if not math.isfinite(ours):
        return "–"
    return f"{ours / peer:.2f}" if peer > 0 else f"{ours - peer:+.4f} (difference)"


def draw(baseline: Mapping[str, float], points: Sequence[Point], out: Path) -> None:
    """The mean rise of the loss over what was removed, as peers.png and peers.svg in `out`."""
    plt: Any = importlib.import_module("matplotlib.pyplot")
    plt.switch_backend("Agg")
    figure, axes = plt.subplots(figsize=(8, 5))
    colours = plt.get_cmap("tab20").colors
    measured = [point for point in points if point.perplexities]
    for number, name in enumerate(dict.fromkeys(point.method for point in measured)):
        own = sorted((p for p in measured if p.method == name), key=lambda p: p.removed)
        removed = [0.0, *(100 * p.removed for p in own)]
        style: dict[str, Any] = {"linewidth": 1.4, "color": colours[number % len(colours)]}
        if name in OURS:
            style = {"linewidth": 3.2 if name == "ours" else 2.0, "color": "black", "zorder": 3}
            style |= {"linestyle": {"ours-ffn": "--", "ours-healed": ":"}.get(name, "-")}
        axes.plot(
            removed, [0.0, *(p.mean(baseline) for p in own)], marker="o", markersize=4, label=own[0].label, **style
        )
    costs = [p.mean(baseline) for p in measured]
    axes.set(xlabel="parameters removed, %", ylabel="rise of the loss, nats per token (mean of the texts)")
    axes.set_ylim(min([0.0, *costs]) - 0.02, min(PLOT_TOP, max([0.1, *costs]) * 1.05))
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    for suffix in ("png", "svg"):
        figure.savefig(out / f"peers.{suffix}", dpi=150, bbox_inches="tight")
