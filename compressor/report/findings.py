"""The linearity of a model in words: the answer first, then what stands out. Terminal and page say the same."""

from __future__ import annotations

from collections.abc import Sequence

from compressor.report.formats import MISSING, as_float, block_numbers, last_part, num, percent
from compressor.report.record import Record
from compressor.report.record_parts import CrossSummary, Probes, Shape, Swap, Together


def answer(record: Record) -> list[str]:
    """How much can go at which cost, which blocks, which not to touch."""
    words = record.blocks_by_verdict()
    safe, costly, unsafe = (block_numbers(words[word]) or "none" for word in ("safe", "costly", "unsafe"))
    return [*say_savings(record), f"Safe: {safe}. Costly: {costly}.", f"Not to be touched: {unsafe}."]


def say_savings(record: Record) -> list[str]:
    """What linear maps save at which cost: as measured, else as predicted."""
    swap, whole = record.swap, record.parameters.before
    if swap and swap.together:
        gone = ", ".join(
            f"{percent(offer.removed_fraction)} for {num(offer.delta, '+', '.2f')} "
            f"({'block' if len(offer.blocks) == 1 else 'blocks'} {block_numbers(offer.blocks)})"
            for offer in affordable(swap.together)
        )
        where = f"{num(swap.tokens)} tokens in windows of {num(swap.seq_len)}"
        start = num(swap.baseline, form=".2f")
        return [
            f"Parameters that linear maps save, and what they cost in perplexity (from {start}): {gone}.",
            f"Measured with these blocks replaced together, on {where}; the whole job finds cheaper forms.",
        ]
    known = [
        (block.predicted_dloss, block.params_before - block.linear_params, block.index)
        for block in record.blocks
        if block.predicted_dloss is not None and block.linear_params is not None and block.verdict != "unsafe"
    ]
    if not known or not whole:
        return []
    gone = ", ".join(
        f"{percent(as_float(saved) / as_float(whole))} for {num(loss)} nats per token (block {index})"
        for loss, saved, index in sorted(known)[:3]
    )
    return [f"Parameters that a linear map saves, and what it is predicted to cost: {gone}."]


def affordable(offers: Sequence[Together]) -> list[Together]:
    """The offers that a person may take: those that raise perplexity by less than a third, or the first."""
    return [offer for offer in offers if offer.delta < offer.baseline / 3] or list(offers[:1])


def list_findings(record: Record) -> list[str]:
    """What the sweep, the corpora, the probes and the second model say, a line each."""
    lines = [say_shape(record.shape)] if record.shape else []
    lines += [say_swap(record.swap, len(record.blocks))] if record.swap else []
    lines += [
        f"corpora {pair.first} and {pair.second}: rank correlation of R²_lin "
        f"{num(pair.rank_correlation, form='.2f')}, largest difference {num(pair.largest_difference)}"
        for pair in record.corpus_agreement
    ]
    lines += say_probes(record.probes, record) if record.probes else []
    return [*lines, *([say_cross(record.cross)] if record.cross else [])]


def say_shape(shape: Shape) -> str:
    return (
        f"R²_lin from {num(shape.lowest)} to {num(shape.highest)} (median {num(shape.median)}); it turns "
        f"{num(shape.turns)} times over depth, rank correlation with depth "
        f"{num(shape.rank_correlation_with_depth, form='.2f')}, largest step between neighbours "
        f"{num(shape.largest_jump)} (after block {num(shape.largest_jump_after)})"
    )


def say_swap(swap: Swap, blocks: int) -> str:
    return (
        f"replacing each block alone cost {num(swap.ratio, form='.2f')} of one whole evaluation per block "
        f"({num(swap.seconds, form='.0f')} s for {blocks} blocks); rank correlation with what gradients predict "
        f"{num(swap.predicted_rank_correlation, form='.2f')}"
    )


def say_probes(probes: Probes, record: Record) -> list[str]:
    lines = []
    if bilinear := probes.bilinear:
        unfinished = [block.index for block in record.blocks if block.bilinear and not block.bilinear.converged]
        lines.append(
            f"bilinear probe of rank {num(bilinear.rank)}: mean gain {num(bilinear.mean_gain, '+')} in R², Pearson "
            f"correlation with 1 − R²_lin {num(bilinear.pearson, form='.2f')}"
            + (f"; not converged in {block_numbers(unfinished)}" if unfinished else "")
        )
    if trained := probes.trained:
        lines.append(
            f"linear map by {trained.optimiser}, {num(trained.steps)} steps: {num(trained.mean_gap)} below the closed "
            f"form on average, {num(trained.largest_gap)} at most"
        )
    if probes.sampled:
        lines.append(f"probes ran on {num(probes.rows)} sampled rows: memory does not hold all")
    return lines


def say_cross(cross: CrossSummary) -> str:
    mean = {key: num(value) for key, value in cross.mean.items()}
    own, own_on_other, own_on_white = (mean.get(key, MISSING) for key in ("own", "own_on_other", "own_on_white"))
    other = ", ".join(mean.get(key, MISSING) for key in ("other", "other_on_own", "other_on_white"))
    follows = {key: num(value, form=".2f") for key, value in cross.rank_correlation.items()}
    return (
        f"cross {last_part(cross.source.model)}: mean R²_lin of own blocks on own inputs {own}, on the other's "
        f"{own_on_other}, on white ones {own_on_white}; of the other's blocks {other}; the other's blocks on these "
        f"inputs follow their own profile by {follows.get('other_on_own, other', MISSING)}, this model's by "
        f"{follows.get('other_on_own, own', MISSING)} (rank correlation)"
    )
