"""The linearity report in words: the answer first, then what stands out. Terminal and page tell the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text as Styled

from compressor.report.markup import last_part, num, percent
from compressor.report.record import profiles_of, verdict_counts
from compressor.report.tables import notes

Record = Mapping[str, Any]


def listed(indices: Sequence[int]) -> str:
    """Block numbers, neighbours drawn together: 3, 7–9."""
    runs: list[list[int]] = []
    for index in sorted(indices):
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ", ".join(str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a}–{b}" for a, b in runs)


def answer(report: Record) -> list[str]:
    """How much can go at which cost, which blocks, which not to touch."""
    blocks = report["blocks"]
    words = verdict_counts(blocks)
    said = []
    offers = ((report.get("swap") or {}).get("together")) or []
    if offers:
        swap = report["swap"]
        gone = ", ".join(
            f"{percent(o['removed_fraction'])} for {num(o['delta'], '+', '.2f')} "
            f"({'block' if len(o['blocks']) == 1 else 'blocks'} {listed(o['blocks'])})"
            for o in affordable(offers)
        )
        where = f"{num(swap['tokens'])} tokens in windows of {num(swap['seq_len'])}"
        start = num(swap["baseline"], form=".2f")
        said.append(f"Parameters that linear maps save, and what they cost in perplexity (from {start}): {gone}.")
        said.append(f"Measured with these blocks replaced together, on {where}; the whole job finds cheaper forms.")
    elif any("predicted_dloss" in b for b in blocks):
        whole = report["parameters"]["before"]
        best = sorted((b for b in blocks if b["verdict"] != "unsafe"), key=lambda b: b["predicted_dloss"])[:3]
        gone = ", ".join(
            f"{percent((b['params_before'] - b['linear_params']) / whole)} for {num(b['predicted_dloss'])} nats per "
            f"token (block {b['index']})"
            for b in best
        )
        said += [f"Parameters that a linear map saves, and what it is predicted to cost: {gone}."] if best else []
    said.append(f"Safe: {listed(words['safe']) or 'none'}. Costly: {listed(words['costly']) or 'none'}.")
    said.append(f"Not to be touched: {listed(words['unsafe']) or 'none'}.")
    return said


def affordable(offers: Sequence[Record]) -> list[Record]:
    """The offers that a person may take: those that raise perplexity by less than a third, or the first."""
    return [o for o in offers if o["delta"] < o["baseline"] / 3] or list(offers[:1])


def shape_line(report: Record) -> str:
    shape = report["shape"]
    depth = num(shape["rank_correlation_with_depth"], form=".2f")
    return (
        f"R²_lin from {num(shape['lowest'])} to {num(shape['highest'])} (median {num(shape['median'])}); it turns "
        f"{shape['turns']} times over depth, rank correlation with depth {depth}, largest step between neighbours "
        f"{num(shape['largest_jump'])} (after block {num(shape['largest_jump_after'])})"
    )


def finding_lines(report: Record) -> list[str]:
    """What the sweep, the corpora, the probes and the second model say, a line each."""
    lines = [shape_line(report)]
    swap, probes, cross = (report.get(key) or {} for key in ("swap", "probes", "cross"))
    if swap:
        lines.append(
            f"replacing each block alone cost {swap['ratio']:.2f} of one whole evaluation per block "
            f"({swap['seconds']:.0f} s for {len(report['blocks'])} blocks); rank correlation with what gradients "
            f"predict {num(swap.get('predicted_rank_correlation'), form='.2f')}"
        )
    lines += [
        f"corpora {pair['first']} and {pair['second']}: rank correlation of R²_lin "
        f"{num(pair['rank_correlation'], form='.2f')}, largest difference {num(pair['largest_difference'])}"
        for pair in report.get("corpus_agreement") or []
    ]
    if "bilinear" in probes:
        found = probes["bilinear"]
        open_ended = [b["index"] for b in report["blocks"] if not b["bilinear"]["converged"]]
        lines.append(
            f"bilinear probe of rank {found['rank']}: mean gain {num(found['mean_gain'], '+')} in R², Pearson "
            f"correlation with 1 − R²_lin {num(found['pearson'], form='.2f')}"
            + (f"; not converged in {listed(open_ended)}" if open_ended else "")
        )
    if "trained" in probes:
        found = probes["trained"]
        lines.append(
            f"linear map by {found['optimiser']}, {found['steps']:,} steps: {num(found['mean_gap'])} below the "
            f"closed form on average, {num(found['largest_gap'])} at most"
        )
    if probes.get("sampled"):
        lines.append(f"probes ran on {probes['rows']:,} sampled rows: memory does not hold all")
    if cross:
        mean, follows = cross["mean"], cross["rank_correlation"]
        other = last_part((cross.get("source") or {}).get("model"))
        lines.append(
            f"cross {other}: mean R²_lin of own blocks on own inputs {num(mean['own'])}, on the other's "
            f"{num(mean['own_on_other'])}, on white ones {num(mean['own_on_white'])}; of the other's blocks "
            f"{num(mean['other'])}, {num(mean['other_on_own'])}, {num(mean['other_on_white'])}; the other's blocks on "
            f"these inputs follow their own profile by {num(follows['other_on_own, other'], form='.2f')}, this model's "
            f"by {num(follows['other_on_own, own'], form='.2f')} (rank correlation)"
        )
    return lines


def profile_lines(report: Record) -> list[str]:
    """Everything under the tables."""
    lines = []
    profiles = profiles_of(report)
    for profile in profiles:
        rows, text, timings = profile["rows"], profile["text"], profile["timings"]
        head = [f"{last_part(profile['source']['model'])}:"] if len(profiles) > 1 else []
        where = f"{rows['fitted']:,} rows fitted, {rows['held_out']:,} held out; windows of {text['seq_len']} tokens"
        stages = ", ".join(
            f"{name} {seconds:.0f} s" for name, seconds in timings.items() if name != "total" and seconds >= 0.5
        )
        lines += [
            *head,
            *notes(profile),
            *finding_lines(profile),
            *answer(profile),
            f"{where}; text {text['calibration']['source']}",
            f"took {timings['total']:.0f} s" + (f" ({stages})" if stages else ""),
        ]
    if "out" in report:
        lines.append(f"written to {report['out']}: report.html, figures, profile.json, profile.csv, ladder.csv")
    return lines


def profile_tables(report: Record) -> list[Table]:
    """One table per model: a line per block."""
    profiles = profiles_of(report)
    return [profile_table(p, last_part(p["source"]["model"]) if len(profiles) > 1 else None) for p in profiles]


def profile_table(report: Record, title: str | None) -> Table:
    swapped = any("swap" in block for block in report["blocks"])
    table = Table(box=None, pad_edge=False, header_style="bold", title=title and Styled(title), title_justify="left")
    cost = ["ΔPPL alone", "95 % interval"] if swapped else ["predicted nats"]
    names = [
        "block",
        "R²_lin",
        "95 % interval",
        "stream",
        "median",
        "eff. rank",
        "rank 99 %",
        "condition",
        *cost,
        "verdict",
    ]
    for name in names:
        table.add_column(name, justify="left" if name == "verdict" else "right", no_wrap=True)
    for block in report["blocks"]:
        low, high = block["r2_lin_ci95"]
        if swapped:
            ends = block["swap"]["delta_ci95"]
            cost = [f"{block['swap']['delta']:+.2f}", f"{ends[0]:+.2f} … {ends[1]:+.2f}"]
        else:
            cost = [f"{block['predicted_dloss']:.4f}"]
        table.add_row(
            str(block["index"]),
            f"{block['r2_lin']:.3f}",
            f"{low:.3f} … {high:.3f}",
            f"{block['r2_stream']:.3f}",
            f"{block['r2_median']:.3f}",
            f"{block['effective_rank']:.1f}",
            str(block["rank_99"]),
            f"{block['condition_number']:.1e}",
            *cost,
            block["verdict"],
            style={"safe": "green", "unsafe": "yellow"}.get(block["verdict"], ""),
        )
    return table
