"""Figures as files: PNG and SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def draw_frontier(points: Sequence[Mapping[str, Any]], beside: Path, model: str, seq_len: int) -> list[str]:
    """Parameters and FLOPs removed against ΔPPL, next to the file of the plan. Returns the names of the files."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = [point for point in points if point["removed"]]
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    rises = [max(text["delta"] for text in point["texts"].values()) for point in found]
    ends = [max(text["delta_ci95"][1] for text in point["texts"].values()) for point in found]
    lows = [min(text["delta_ci95"][0] for text in point["texts"].values()) for point in found]
    removed = [100 * point["removed_fraction"] for point in found]
    flops = [100 * (1 - 1 / point["flops_ratio"]) for point in found]
    bars = [
        [rise - low for rise, low in zip(rises, lows, strict=True)],
        [e - r for r, e in zip(rises, ends, strict=True)],
    ]
    axes.errorbar(removed, rises, yerr=bars, marker="o", capsize=3, label="parameters", color="#0b6e99")
    axes.plot(flops, rises, marker="s", linestyle="--", label="FLOPs per token", color="#d9730d")
    for point, x, y in zip(found, removed, rises, strict=True):
        axes.annotate(f"budget {point['asked']}", (x, y), textcoords="offset points", xytext=(6, -10), fontsize=8)
    axes.set(xlabel="removed, %", ylabel=f"ΔPPL, windows of {seq_len} tokens", xlim=(0, None))
    axes.set_title(Path(model).name or "model", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    files = [beside.with_suffix(suffix) for suffix in (".png", ".svg")]
    for file in files:
        figure.savefig(file, dpi=150)
    return [str(file) for file in files]
