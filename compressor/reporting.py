"""The record of a run (compression.json), its model card, and what a person sees on the terminal."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.table import Table

import compressor
from compressor.checkpoint import count_parameters
from compressor.evaluating import Evaluation
from compressor.measuring import BlockProfile, Profile
from compressor.modeling_compressor import Replacement
from compressor.models import source_of
from compressor.patching import specs
from compressor.planning import Plan
from compressor.sensitivity import Damage
from compressor.text import SPLITS, Text
from compressor.verdicts import Verdict

SCHEMA_VERSION = 1
KEEP = {"kind": "keep", "rank": None, "neurons": None}


def describe_tool() -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "tool": {"name": "compressor", "version": compressor.__version__},
        "environment": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "safetensors": version("safetensors"),
            "threads": torch.get_num_threads(),
        },
    }


def describe_source(model: Any) -> dict[str, Any]:
    source = source_of(model)
    return {
        "model": source.model,
        "revision": source.revision,
        "model_type": source.model_type,
        "weights_sha256": source.weights_sha256,
        "dtype": str(source.dtype).removeprefix("torch."),
    }


def describe_text(text: Text) -> dict[str, Any]:
    splits = {name: getattr(text, name) for name in SPLITS}
    described = {name: {"source": s.source, "sha256": s.sha256, "tokens": s.tokens} for name, s in splits.items()}
    return {**described, "seq_len": text.seq_len}


def describe_model(model: Any) -> dict[str, Any]:
    """The record of a model that was patched through the Python API: what it is, without measurements."""
    blocks = [{"path": path, "replacement": short(spec)} for path, spec in specs(model).items()]
    return {
        **describe_tool(),
        "source": describe_source(model),
        "parameters": {"after": count_parameters(model)},
        "blocks": blocks,
    }


def short(spec: Mapping[str, Any]) -> dict[str, Any]:
    return {key: spec[key] for key in KEEP}


def describe_block(measured: BlockProfile, verdict: Verdict, damage: Damage) -> dict[str, Any]:
    return {
        "index": measured.block.index,
        "path": measured.block.path,
        "r2_lin": measured.r2_lin,
        "r2_lin_ci95": list(measured.r2_lin_ci95),
        "r2_stream": measured.r2_stream,
        "r2_median": measured.r2_median,
        "effective_rank": measured.effective_rank,
        "condition_number": measured.condition_number,
        "top_row_share": measured.top_row_share,
        "predicted_dloss": damage.linear,
        "predicted_dloss_factorised": damage.factorised,
        "params_before": measured.block.parameters,
        "params_after": measured.block.parameters,
        "verdict": verdict.word,
        "reason": verdict.reason,
        "replacement": dict(KEEP),
    }


def describe_profile(
    model: Any, text: Text, profile: Profile, verdicts: Mapping[int, Verdict], damages: Mapping[int, Damage]
) -> dict[str, Any]:
    """The record of a measurement: no budget, no replacement."""
    return {
        **describe_tool(),
        "source": describe_source(model),
        "text": describe_text(text),
        "parameters": {"before": count_parameters(model)},
        "rows": {"fitted": profile.rows_fitted, "held_out": profile.rows_held_out},
        "blocks": [describe_block(p, verdicts[p.block.index], damages[p.block.index]) for p in profile.blocks],
    }


def put_replacements(report: dict[str, Any], fits: Mapping[int, Replacement]) -> dict[str, Any]:
    """The record with these replacements in its blocks, and the parameters they leave."""
    blocks = []
    for entry in report["blocks"]:
        module = fits.get(entry["index"])
        after = entry["params_before"] if module is None else count_parameters(module)
        now = dict(KEEP) if module is None else short(module.spec())
        blocks.append({**entry, "params_after": after, "replacement": now})
    before = report["parameters"]["before"]
    removed = sum(entry["params_before"] - entry["params_after"] for entry in blocks)
    left = {"after": before - removed, "removed": removed, "removed_fraction": removed / before}
    return {**report, "blocks": blocks, "parameters": {"before": before, **left}}


def describe_plan(report: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """The record of a search: the profile, what stands where, and every plan that was tried."""
    trials = [
        {
            "replacements": {str(index): rank for index, rank in trial.ranks.items()},
            "predicted_dloss": trial.predicted,
            "perplexity": describe_perplexity(trial.evaluation),
        }
        for trial in plan.trials
    ]
    found = {"selection": describe_perplexity(plan.selection), "trials": trials, "tasks": {}}
    return {**put_replacements(report, plan.fits), **found}


def describe_perplexity(evaluation: Evaluation) -> dict[str, Any]:
    return {
        "baseline": evaluation.baseline,
        "compressed": evaluation.compressed,
        "delta": evaluation.delta,
        "delta_ci95": list(evaluation.delta_ci95),
        "delta_upper": evaluation.upper,
        "tokens": evaluation.tokens,
        "seq_len": evaluation.seq_len,
    }


def name_replacement(replacement: Mapping[str, Any]) -> str:
    kind = replacement["kind"]
    return f"lowrank {replacement['rank']}" if kind == "lowrank" else "·" if kind == "keep" else str(kind)


def block_table(report: Mapping[str, Any]) -> Table:
    """One line per block: how linear, which verdict, what stands there now."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("block", "R²_lin", "95 % interval", "stream R²", "top rows", "verdict", "replacement", "parameters"):
        table.add_column(name, justify="left" if name in ("verdict", "replacement") else "right", no_wrap=True)
    for block in report["blocks"]:
        low, high = block["r2_lin_ci95"]
        before, after = block["params_before"], block["params_after"]
        table.add_row(
            str(block["index"]),
            f"{block['r2_lin']:.3f}",
            f"{low:.3f} … {high:.3f}",
            f"{block['r2_stream']:.3f}",
            f"{block['top_row_share']:.0%}",
            block["verdict"],
            name_replacement(block["replacement"]),
            f"{before:,}" if after == before else f"{before:,} → {after:,} ({before / after:.1f}×)",
            style="green" if after != before else "yellow" if block["verdict"] == "unsafe" else "",
        )
    return table


def notes(report: Mapping[str, Any]) -> list[str]:
    """What a person should not miss: which blocks must not be touched, and why; and too few rows."""
    lines = [f"block {b['index']} is unsafe: {b['reason']}" for b in report["blocks"] if b["verdict"] == "unsafe"]
    rows = report.get("rows", {}).get("fitted", 0)
    wide = max((b["effective_rank"] for b in report["blocks"]), default=0)
    if 0 < rows < 4 * wide:
        lines.append(f"only {rows} rows were fitted: R²_lin is pessimistic; raise --calib-tokens")
    return lines


def perplexity_line(perplexity: Mapping[str, Any]) -> str:
    low, high = perplexity["delta_ci95"]
    return (
        f"perplexity {perplexity['baseline']:.3f} → {perplexity['compressed']:.3f}  (Δ {perplexity['delta']:+.3f}, "
        f"95 % interval {low:+.3f} … {high:+.3f}; {perplexity['tokens']:,} tokens, windows of {perplexity['seq_len']})"
    )


def parameters_line(parameters: Mapping[str, Any]) -> str:
    return (
        f"parameters {parameters['before']:,} → {parameters['after']:,}  (−{parameters['removed']:,}, "
        f"{parameters['removed_fraction']:.2%} of the model)"
    )


def budget_line(report: Mapping[str, Any]) -> str:
    budget, upper = report["budget"], report["perplexity"]["delta_upper"]
    held = "inside" if upper <= budget["max_dppl"] else "OUTSIDE"
    end = f"upper end at {budget['confidence']:.0%}" if budget["confidence"] else "point estimate"
    return f"budget +{budget['max_dppl']:.3f} ({budget['asked']}): {held} ({end} {upper:+.3f})"


def profile_lines(report: Mapping[str, Any]) -> list[str]:
    rows, text = report["rows"], report["text"]
    where = f"{rows['fitted']:,} rows fitted, {rows['held_out']:,} held out; windows of {text['seq_len']} tokens"
    return [*notes(report), f"{where}; text {text['calibration']['source']}"]


def plan_lines(report: Mapping[str, Any], file: Path) -> list[str]:
    selection = f"selection text: {perplexity_line(report['selection'])}"
    return [*notes(report), selection, parameters_line(report["parameters"]), f"plan: {file}"]


def result_lines(report: Mapping[str, Any]) -> list[str]:
    figures = [perplexity_line(report["perplexity"]), parameters_line(report["parameters"]), budget_line(report)]
    return [*notes(report), *replaced_lines(report), *figures, f"written to {report['out']}"]


def replaced_lines(report: Mapping[str, Any]) -> list[str]:
    return [
        f"block {b['index']}: FFN of {b['params_before']:,} parameters → {name_replacement(b['replacement'])} of "
        f"{b['params_after']:,} ({b['params_before'] / b['params_after']:.1f}× fewer)"
        for b in report["blocks"]
        if b["params_after"] != b["params_before"]
    ]


def check_lines(report: Mapping[str, Any]) -> list[str]:
    verdict = "passed" if report["passed"] else "FAILED: the budget is missed"
    warnings = [f"warning: {warning}" for warning in report["warnings"]]
    figures = [perplexity_line(report["perplexity"]), parameters_line(report["parameters"]), budget_line(report)]
    return [*warnings, *figures, verdict]


def info_lines(record: Mapping[str, Any]) -> list[str]:
    source, tool = record["source"], record["tool"]
    lines = [f"made from {source.get('model')} ({source.get('model_type')}) by compressor {tool.get('version')}"]
    if "perplexity" in record:
        figures = [perplexity_line(record["perplexity"]), parameters_line(record["parameters"]), budget_line(record)]
        return [*lines, *notes(record), *figures]
    replaced = [f"{b['path']}: {name_replacement(b['replacement'])}" for b in record["blocks"]]
    return [*lines, *replaced, "no measurements are recorded: it was saved through the Python API"]
