"""A linearity profile in words: what can be saved at which cost, then what stands out, then a table per model."""

from __future__ import annotations

from collections.abc import Sequence

from compressor.report.formats import (
    MISSING,
    block_numbers,
    branch_numbers,
    ends,
    last_part,
    list_branches,
    name_verdict,
    num,
    percent,
    ridge_differs,
)
from compressor.report.grid import Grid
from compressor.report.record import ProfileSet, Record, by_verdict, profiles_of
from compressor.report.record_parts import ATTENTION, Block, CrossSummary, Probes, Shape, Together, present
from compressor.report.tables import notes, warning_lines
from compressor.runtime.figures import count, signed, signed_interval


def answer(record: Record) -> list[str]:
    """How many parameters can be saved at which cost, and which blocks are safe, costly and not to be touched."""
    lines = []
    together = record.swap.together if record.swap else []
    if record.swap and together:
        savings = ", ".join(
            f"{percent(trial.removed_fraction)} for {num(trial.delta, '+', '.2f')} "
            f"({list_branches(trial.blocks, trial.attention)})"
            for trial in affordable(together)
        )
        where = f"{count(record.swap.tokens, 'token')} in windows of {num(record.swap.seq_len)}"
        start = num(record.swap.baseline, form=".2f")
        lines.append(f"Parameters that linear maps save, and what they cost in perplexity (from {start}): {savings}.")
        lines.append(f"Measured with these blocks replaced together, on {where}; the whole job finds cheaper forms.")
    elif savings := predicted_savings(record):
        lines.append(f"Parameters that a linear map saves, and what it is predicted to cost: {savings}.")
    safe, costly, unsafe, undecided = (
        block_numbers(indices) or "none" for indices in by_verdict(record.blocks).values()
    )
    more = "" if undecided == "none" else f" Undecided, for too few rows were fitted: {undecided}."
    lines.append(f"Safe: {safe}. Costly: {costly}.{more}")
    if record.attention:
        of_attention = by_verdict(record.attention)
        lines.append(
            "Attention: "
            + ", ".join(
                f"{len(found)} {name_verdict(word)}" + (f" ({block_numbers(found)})" if found else "")
                for word, found in of_attention.items()
                if found or word
            )
            + "."
        )
        unsafe = branch_numbers(by_verdict(record.blocks)["unsafe"], of_attention["unsafe"]) or "none"
    return [*lines, f"Not to be touched: {unsafe}."]


def predicted_savings(record: Record) -> str:
    """What the three cheapest blocks save and are predicted to cost as linear maps; empty without predictions."""
    whole = record.parameters.before
    costs = [
        (block.predicted_dloss, block.params_before - block.linear_params, block.words)
        for block in record.branches
        if block.verdict != "unsafe" and block.predicted_dloss is not None and block.linear_params is not None
    ]
    return ", ".join(
        f"{percent(saved / whole if whole else None)} for {num(cost)} nats per token ({words})"
        for cost, saved, words in sorted(costs, key=lambda entry: entry[0])[:3]
    )


def affordable(trials: Sequence[Together]) -> Sequence[Together]:
    """The trials that a person may want: those that raise perplexity by less than a third, or the first."""
    return [trial for trial in trials if trial.delta < trial.baseline / 3] or trials[:1]


def shape_line(shape: Shape, of: str = "") -> str:
    """How R²_lin runs over depth; `of` says of what, where it is not the FFNs."""
    depth = num(shape.rank_correlation_with_depth, form=".2f")
    return (
        f"{of}R²_lin from {num(shape.lowest)} to {num(shape.highest)} (median {num(shape.median)}); it turns "
        f"{count(shape.turns, 'time')} over depth, rank correlation with depth {depth}, largest step between "
        f"neighbours {num(shape.largest_jump)} (after block {num(shape.largest_jump_after)})"
    )


def finding_lines(record: Record) -> list[str]:
    """What the profile over depth, the trials, the corpora, the probes and the second model say, a line each."""
    lines = [shape_line(record.shape)] if record.shape else []
    lines += [shape_line(record.attention_shape, "attention: ")] if record.attention_shape else []
    if record.swap:
        swapped = sum(block.swap is not None for block in record.branches)
        lines.append(
            f"replacing each block alone cost {num(record.swap.ratio, form='.2f')} of one whole evaluation per block "
            f"({num(record.swap.seconds, form='.0f')} s for {count(swapped, 'block')}); rank correlation with what "
            f"gradients predict {num(record.swap.predicted_rank_correlation, form='.2f')}"
        )
    lines += [
        f"corpora {pair.first} and {pair.second}: rank correlation of R²_lin "
        f"{num(pair.rank_correlation, form='.2f')}, largest difference {num(pair.largest_difference)}"
        for pair in record.corpus_agreement
    ]
    if record.probes:
        lines += probe_lines(record, record.probes)
    return [*lines, cross_line(record.cross)] if record.cross else lines


def probe_lines(record: Record, probes: Probes) -> list[str]:
    lines = []
    if probes.bilinear:
        stopped = [block.index for block in record.blocks if block.bilinear and not block.bilinear.converged]
        lines.append(
            f"bilinear probe of rank {probes.bilinear.rank}: mean gain {num(probes.bilinear.mean_gain, '+')} in R², "
            f"Pearson correlation with 1 − R²_lin {num(probes.bilinear.pearson, form='.2f')}"
            + (f"; not converged in {block_numbers(stopped)}" if stopped else "")
        )
    if probes.trained:
        lines.append(
            f"linear map by {probes.trained.optimiser}, {count(probes.trained.steps, 'step')}: "
            f"{num(probes.trained.mean_gap)} below the closed form on average, "
            f"{num(probes.trained.largest_gap)} at most"
        )
    if probes.sampled:
        lines.append(f"probes ran on {count(probes.rows, 'sampled row')}: memory does not hold all")
    return lines


def cross_line(cross: CrossSummary) -> str:
    """The blocks of two models, each on its own inputs, on the other's, and on white ones."""
    own, own_on_other, own_on_white, other, other_on_own, other_on_white = (
        num(cross.mean.get(name))
        for name in ("own", "own_on_other", "own_on_white", "other", "other_on_own", "other_on_white")
    )
    its_own, this = (num(cross.rank_correlation.get(f"other_on_own, {name}"), form=".2f") for name in ("other", "own"))
    return (
        f"cross {last_part(cross.source.model)}: mean R²_lin of own blocks on own inputs {own}, on the other's "
        f"{own_on_other}, on white ones {own_on_white}; of the other's blocks {other}, {other_on_own}, "
        f"{other_on_white}; the other's blocks on these inputs follow their own profile by {its_own}, this model's by "
        f"{this} (rank correlation)"
    )


def profile_lines(record: Record | ProfileSet, verbose: bool = False) -> list[str]:
    """Everything under the tables: the answer last; `verbose` adds what stands out."""
    lines = []
    profiles = profiles_of(record)
    for profile in profiles:
        rows, text = present(profile.rows), present(profile.text)
        where = (
            f"{count(rows.fitted, 'row')} fitted, {rows.held_out:,} held out; windows of {count(text.seq_len, 'token')}"
        )
        stages = ", ".join(
            f"{name} {seconds:.0f} s" for name, seconds in profile.timings.items() if name != "total" and seconds >= 0.5
        )
        lines += [
            *([f"{last_part(profile.source.model)}:"] if len(profiles) > 1 else []),
            *notes(profile),
            *warning_lines(profile),
            *(finding_lines(profile) if verbose else []),
            f"{where}; text {present(text.calibration).source}",
            f"took {profile.timings['total']:.0f} s" + (f" ({stages})" if stages and verbose else ""),
            *answer(profile),
        ]
    if record.out is not None:
        lines.append(f"written to {record.out}: report.html, figures, profile.json, profile.csv, ladder.csv")
    return lines


def profile_tables(record: Record | ProfileSet) -> list[Grid]:
    """One table per model, and one of its attention: a line per block."""
    profiles = profiles_of(record)
    tables = []
    for profile in profiles:
        name = last_part(profile.source.model) if len(profiles) > 1 else None
        tables.append(profile_table(profile.blocks, name))
        if profile.attention:
            tables.append(profile_table(profile.attention, f"{name}, {ATTENTION}" if name else ATTENTION))
    return tables


def profile_table(blocks: Sequence[Block], title: str | None) -> Grid:
    swapped = any(block.swap for block in blocks)
    cost = ["ΔPPL alone", "ΔPPL interval"] if swapped else ["predicted nats"]
    ridge = ridge_differs(blocks)
    linearity = [
        "R²_lin",
        "R² interval",
        *(["best ridge"] if ridge else []),
        "stream",
        "median",
        "eff. rank",
        "rank 99 %",
        "condition",
    ]
    narrow = ("condition", "rank 99 %", "median", "eff. rank", "ΔPPL interval", "R² interval")
    columns = ["block", *linearity, *cost, "verdict"]
    table = Grid(columns, left=["verdict"], optional=[name for name in narrow if name in columns], title=title)
    for block in blocks:
        if swap := block.swap:
            cost = [signed(swap.delta, ".2f"), signed_interval(*swap.delta_ci95, ".2f")]
        elif swapped:  # it overflowed
            cost = [MISSING, MISSING]
        else:
            cost = [num(present(block.predicted_dloss), form=".4f")]
        table.add_row(
            str(block.index),
            num(block.r2_lin, form=".3f"),
            ends(block.r2_lin_ci95),
            *([num(block.r2_ridge, form=".3f")] if ridge else []),
            num(block.r2_stream, form=".3f"),
            num(block.r2_median, form=".3f"),
            f"{block.effective_rank:.1f}",
            str(block.rank_99),
            num(block.condition_number, form=".1e"),
            *cost,
            name_verdict(block.verdict),
            style={"safe": "green", "unsafe": "yellow"}.get(block.verdict or "", ""),
        )
    return table
