"""What a person sees on the terminal: tables and lines made from a record."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text as Styled

from compressor.runtime.names import UNNAMED


def name_replacement(replacement: Mapping[str, Any]) -> str:
    kind, rank, neurons = (replacement.get(key) for key in ("kind", "rank", "neurons"))
    if kind == "keep":
        return "·"
    words = [str(kind), str(neurons) if neurons else "", f"rank {rank}" if rank and neurons else str(rank or "")]
    return " ".join(word for word in words if word)


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


def text_lines(report: Mapping[str, Any]) -> list[str]:
    """Two lines per text: its perplexity and its budget."""
    confidence = report["budget"]["confidence"]
    lines = []
    texts = report.get("texts") or {UNNAMED: {**report["perplexity"], **report["budget"]}}
    for name, found in texts.items():
        held = "inside" if found["delta_upper"] <= found["max_dppl"] else "OUTSIDE"
        end = f"upper end at {confidence:.0%}" if confidence else "point estimate"
        budget = f"budget +{found['max_dppl']:.3f} ({found['asked']}): {held} ({end} {found['delta_upper']:+.3f})"
        prefix = "" if name == UNNAMED else f"{name}: "
        lines += [prefix + perplexity_line(found), prefix + budget]
    return lines


def task_lines(report: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, found in report.get("tasks", {}).items():
        low, high = found["drop_ci95"]
        limit = found["max_drop"]
        held = "no budget" if limit is None else f"budget {limit:g}: {'inside' if found['passed'] else 'OUTSIDE'}"
        lines.append(
            f"task {name} ({found['metric']}) {found['source']:.4f} → {found['compressed']:.4f}  (drop "
            f"{found['drop']:+.4f}, 95 % interval {low:+.4f} … {high:+.4f}; {found['documents']:,} documents, "
            f"{found['changed']} changed; {held})"
        )
    return lines


def talk_lines(report: Mapping[str, Any]) -> list[str]:
    found = report.get("generation")
    if not found:
        return []
    repeated, pairs = found["repetition"], found["distinct"]["2"]
    return [
        f"writes as its source in {found['agreement']:.1%} of places ({found['prompts']} prompts, {found['tokens']} "
        f"tokens each); repetition {repeated['source']:.2f} → {repeated['compressed']:.2f}, distinct pairs "
        f"{pairs['source']:.2f} → {pairs['compressed']:.2f}"
    ]


def hurt_line(report: Mapping[str, Any]) -> list[str]:
    """The kind of token that pays most, in one line; the page has the rest."""
    bands = (report.get("where") or {}).get("frequency") or []
    rises = {n: band["nats"] * band["tokens"] for n, band in enumerate(bands) if band["nats"] > 0}
    if not rises:
        return []
    most = max(rises, key=lambda n: rises[n])
    worst, share = bands[most], rises[most] / sum(rises.values())  # bands that gained do not count against it
    return [
        f"hurts most: tokens by frequency {worst['band']}, {share:.0%} of the rise (perplexity "
        f"{worst['baseline']:.2f} → {worst['compressed']:.2f})"
    ]


def check_table(report: Mapping[str, Any]) -> Table:
    """One line per text, task and figure of the baseline: what was measured, and what was promised."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("check", "source", "compressed", "change", "95 % interval", "limit", "verdict"):
        table.add_column(name, justify="left" if name in ("check", "verdict") else "right", overflow="fold")
    rows = [*map(text_row, report["texts"].items()), *map(task_row, report["tasks"].items())]
    earlier = (check for check in report["checks"] if check["name"].startswith("baseline "))
    for row in [*rows, *map(baseline_row, earlier)]:
        table.add_row(*map(Styled, row), style={"FAILED": "bold red", "passed": "green"}.get(row[-1], ""))
    return table


def verdict(passed: bool | None) -> str:
    return "no budget" if passed is None else "passed" if passed else "FAILED"


def text_row(item: tuple[str, Mapping[str, Any]]) -> list[str]:
    name, found = item
    low, high = found["delta_ci95"]
    figures = f"{found['baseline']:.3f}", f"{found['compressed']:.3f}", f"{found['delta']:+.3f}"
    limit = f"{found['max_dppl']:+.3f}"
    return [f"perplexity {name}", *figures, f"{low:+.3f} … {high:+.3f}", limit, verdict(found["passed"])]


def task_row(item: tuple[str, Mapping[str, Any]]) -> list[str]:
    """The change has the sign of the metric; a drop is a change for the worse."""
    name, found = item
    sign = -1 if found["higher_is_better"] else 1
    low, high = sorted(sign * end + 0.0 for end in found["drop_ci95"])  # no minus before a zero
    limit = "–" if found["max_drop"] is None else f"{sign * found['max_drop']:+.4f}"
    figures = f"{found['source']:.4f}", f"{found['compressed']:.4f}", f"{sign * found['drop'] + 0.0:+.4f}"
    label = f"task {name} ({found['metric']}, {found['documents']} documents)"
    return [label, *figures, f"{low:+.4f} … {high:+.4f}", limit, verdict(found["passed"])]


def baseline_row(check: Mapping[str, Any]) -> list[str]:
    measured, limit = ("–" if check[key] is None else f"{check[key]:.4f}" for key in ("measured", "limit"))
    here = ["", measured] if check["name"].endswith("compressed") else [measured, ""]
    return [check["name"], *here, "", "", limit, verdict(check["passed"])]


def plan_lines(report: Mapping[str, Any], file: Path) -> list[str]:
    selection = [f"selection {name}: {perplexity_line(found)}" for name, found in report["selection"].items()]
    size = parameters_line(report["parameters"])
    return [*notes(report), *agreement_lines(report), *selection, size, f"plan: {file}"]


def frontier_table(report: Mapping[str, Any]) -> Table:
    """One line per budget: what goes, and what it costs on the selection text."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("budget", "removed", "parameters", "FLOPs per token", "ΔPPL", "95 % interval", "blocks", "plan"):
        table.add_column(name, justify="left" if name == "plan" else "right")
    for point in report["frontier"]:
        if not point["removed"]:
            table.add_row(point["asked"], "0", "·", "·", "·", "·", "0", "nothing fits")
            continue
        worst = max(point["texts"].values(), key=lambda text: text["delta"] / text["baseline"])
        low, high = worst["delta_ci95"]
        table.add_row(
            point["asked"],
            f"{point['removed_fraction']:.2%}",
            f"−{point['removed']:,}",
            f"{point['flops_ratio']:.3f}× fewer",
            f"{worst['delta']:+.3f}",
            f"{low:+.3f} … {high:+.3f}",
            str(point["blocks"]),
            Path(point["file"]).name,
        )
    return table


def frontier_lines(report: Mapping[str, Any], file: Path) -> list[str]:
    text = report["text"]
    where = f"ΔPPL on the selection text, {text['selection']['tokens']:,} tokens, windows of {text['seq_len']}"
    note = "before compensation, which `compress MODEL --max-dppl …` adds"
    return [*agreement_lines(report), f"{where}; {note}", f"written: {', '.join([str(file), *report['figures']])}"]


def result_lines(report: Mapping[str, Any]) -> list[str]:
    warnings = [f"warning: {warning}" for warning in report["warnings"]]
    figures = [*text_lines(report), *task_lines(report), *talk_lines(report), *hurt_line(report)]
    size = [parameters_line(report["parameters"]), *speed_lines(report)]
    done = [time_line(report["timings"]), f"written to {report['out']}"]
    return [*notes(report), *agreement_lines(report), *warnings, *figures, *size, *done]


def time_line(timings: Mapping[str, float]) -> str:
    """The whole run in forward passes over its text, and the steps that took longest."""
    total, forward = timings["total"], timings.get("one_forward_pass")
    steps = sorted(
        ((s, name) for name, s in timings.items() if name not in ("total", "one_forward_pass")), reverse=True
    )
    longest = ", ".join(f"{name} {seconds:.0f} s" for seconds, name in steps[:6])
    passes = f", {total / forward:.1f}× one forward pass over its text" if forward else ""
    return f"took {total:.0f} s{passes} ({longest})"


def speed_lines(report: Mapping[str, Any]) -> list[str]:
    found = report.get("speed")
    if not found:
        return []
    flops = f"FLOPs per token {found['flops_before']:,} → {found['flops_after']:,}  ({found['flops_ratio']:.3f}× fewer)"
    if not found["prefill_ratio"] or not found["decode_ratio"]:
        return [f"{flops}; speed not measured, for the weights were on disk"]
    return [
        f"{flops}; measured in turns: prefill {found['prefill_ratio']:.3f}× as fast ({found['prefill_after']:.0f} "
        f"tokens/s), decoding {found['decode_ratio']:.3f}× ({found['decode_after']:.0f} tokens/s)"
    ]


def agreement_lines(report: Mapping[str, Any]) -> list[str]:
    found = report.get("agreement") or {}
    correlation = found.get("rank_correlation")
    if correlation is None:
        return []
    blocks = len(found["blocks"])
    return [f"predicted against measured Δloss over {blocks} blocks: rank correlation {correlation:.2f}"]


def check_lines(report: Mapping[str, Any]) -> list[str]:
    failed = [check for check in report["checks"] if not check["passed"]]
    reasons = [f"FAILED {check['name']}: {check['detail']}" for check in failed]
    warnings = [f"warning: {warning}" for warning in report["warnings"]]
    text = next(iter(report["texts"].values()))
    where = f"windows of {text['seq_len']} tokens, {report['perplexity']['tokens']:,} predicted"
    held = f"the upper end at {report['budget']['confidence']:.0%}" if report["budget"]["confidence"] else "the change"
    written = [f"baseline written to {report['baseline_written']}"] if "baseline_written" in report else []
    return [
        f"{where}; {held} must be inside the limit",
        *talk_lines(report),
        *hurt_line(report),
        parameters_line(report["parameters"]),
        *warnings,
        *reasons,
        *written,
        f"FAILED: {', '.join(check['name'] for check in failed)}" if failed else "passed",
    ]


def info_lines(record: Mapping[str, Any]) -> list[str]:
    source, tool = record["source"], record["tool"]
    lines = [f"made from {source.get('model')} ({source.get('model_type')}) by compressor {tool.get('version')}"]
    if "perplexity" in record:
        figures = [*text_lines(record), *task_lines(record), *talk_lines(record)]
        return [*lines, *notes(record), *figures, parameters_line(record["parameters"])]
    replaced = [f"{b['path']}: {name_replacement(b['replacement'])}" for b in record["blocks"]]
    return [*lines, *replaced, "no measurements are recorded: it was saved through the Python API"]
