"""How linear a model is, as parts of the record: every block's figures, trials and probes, and what sums them up."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import torch

from compressor.evaluate.perplexity import PerplexityChange
from compressor.measure.probes import BILINEAR_RANK, CONVERGED, ROUND, TRAINED_BATCH, TRAINED_RATE, Crossing
from compressor.measure.profile import FIGURES, ROWS_PER_FEATURE, BlockProfile, Profile, TopRow
from compressor.measure.r2_interval import FEW_WINDOWS
from compressor.measure.study import Study
from compressor.models.blocks import Block
from compressor.models.branches import AttentionOf
from compressor.models.heads import layout_of
from compressor.patch.checkpoint import count_parameters
from compressor.pipelines.describe import (
    change_values,
    describe_source,
    describe_split,
    describe_text,
    keep_attention,
    keep_ffn,
)
from compressor.plan.calibration import rank_correlation
from compressor.plan.shapes import Shape
from compressor.report import record_parts as parts
from compressor.report.formats import last_part, list_branches
from compressor.report.record import ProfileSet, Record, describe_tool, profiles_of
from compressor.text import HELD_OUT_EVERY, Text

AROUND = 12  # tokens on either side of a row that is told by its text
WHOLE = ("input_rank", "top_position")


def describe_profile(model: Any, tokenizer: Any, text: Text, profile: Profile, study: Study) -> Record:
    """The record of a measurement: no budget, no replacement."""
    swap: dict[str, Any] = {"swap": describe_sweep(study, count_parameters(model))} if study.sweep else {}
    attention: dict[str, Any] = {"attention": []}
    if profile.attention:
        kept = keep_attention(model)
        attention["attention"] = [
            parts.Attention(
                **block_values(p, study, name_rows(p.top_rows, text, tokenizer), has_bias(model, p.block)),
                replacement=kept,
            )
            for p in profile.attention
        ]
        attention["attention_shape"] = describe_shape([p.r2_lin for p in profile.attention])
    return Record(
        **describe_tool(),
        source=describe_source(model),
        text=describe_text(text),
        parameters=parts.Parameters(before=count_parameters(model)),
        rows=parts.Rows(fitted=profile.rows_fitted, held_out=profile.rows_held_out),
        blocks=[
            parts.Block(
                **block_values(p, study, name_rows(p.top_rows, text, tokenizer)), replacement=keep_ffn(model, p.block)
            )
            for p in profile.blocks
        ],
        shape=describe_shape([p.r2_lin for p in profile.blocks]) if profile.blocks else None,
        **attention,
        warnings=describe_doubts(profile),
        **swap,
        **describe_probes(study),
    )


def has_bias(model: Any, block: Block) -> bool:
    """Whether a linear map in place of this attention has a bias: where its output projection has one."""
    output = getattr(model.get_submodule(block.path), layout_of(model).output, None)
    return getattr(output, "bias", None) is not None


def describe_doubts(profile: Profile, prefix: str = "") -> list[str]:
    """What the calibration text is too short for, and how many tokens would do."""
    doubts = []
    everything = [*profile.blocks, *profile.attention]
    thin = [p for p in everything if not p.carried]
    if thin:
        widest = max(thin, key=lambda p: p.block.width)
        which = "" if len(thin) == len(everything) else f" of {name_branches([p.block for p in thin])}"
        doubts.append(
            f"{prefix}R²_lin{which} shows the noise of the fit: {profile.rows_fitted:,} fitted rows are "
            f"{profile.rows_fitted / widest.block.width:.1f} per input feature, and least squares needs "
            f"{ROWS_PER_FEATURE}; --calib-tokens {widest.tokens_needed} would do; meanwhile see the best ridge's R²"
        )
    windows = profile.rows_held_out // profile.seq_len
    if windows < FEW_WINDOWS:
        ends = "has no interval" if windows < 2 else "has a wide interval"
        tokens = FEW_WINDOWS * HELD_OUT_EVERY * profile.seq_len
        doubts.append(
            f"{prefix}R²_lin {ends}, for it is measured on {windows} held-out window{'s' * (windows != 1)}; "
            f"--calib-tokens {tokens} would do"
        )
    return doubts


def name_branches(blocks: Sequence[Block]) -> str:
    """Blocks in words: `blocks 3, 7–9 and attention 4`."""
    return list_branches(
        [block.layer for block in blocks if not block.is_attention],
        [block.layer for block in blocks if block.is_attention],
    )


def figure_values(p: BlockProfile) -> dict[str, Any]:
    """What one text says of one block, as fields of the record."""
    figures = {name: getattr(p, name) for name in FIGURES}
    return {
        "index": p.block.layer,
        **figures,
        **{name: int(figures[name]) for name in WHOLE},
        "r2_lin_ci95": p.r2_lin_ci95,
        "rank_99": p.sufficient_rank,
    }


def count_linear(rank: int, width: int, biased: bool) -> int:
    """The parameters of a linear map of this rank, as two matrices where these are smaller than one."""
    return Shape(rank if 2 * rank < width else None).weights(width, 0) + (width if biased else 0)


def block_values(p: BlockProfile, study: Study, top_rows: list[parts.TopRow], biased: bool = True) -> dict[str, Any]:
    """Everything measured of one block, as fields of the record; `biased`: whether its linear map has a bias."""
    index = p.block.index
    damage, verdict = study.damages[index], study.verdicts[index]
    ranks = ladder_ranks(len(p.ladder) - 1)
    optional: dict[str, Any] = {}
    if study.sweep and index in study.sweep.alone:
        optional["swap"] = parts.Trial(**trial_values(study.sweep.alone[index]))
    if index in study.bilinear:
        bilinear = study.bilinear[index]
        optional["bilinear"] = parts.Bilinear(**asdict(bilinear), gain=bilinear.gain)
    if index in study.trained:
        trained = study.trained[index]
        optional["trained"] = parts.Trained(**asdict(trained), gap=trained.gap)
    for crossing in study.crossings:
        if crossing.index == index:
            optional["cross"] = parts.Crossing(**asdict(crossing))
    return {
        **figure_values(p),
        "path": p.block.path,
        "predicted_dloss": damage.linear,
        "predicted_dloss_factorised": damage.factorised,
        "params_before": p.block.parameters,
        "params_after": p.block.parameters,
        "rank_99_params": count_linear(p.sufficient_rank, p.block.width, biased),
        "linear_params": count_linear(p.block.width, p.block.width, biased),
        "ladder": parts.Ladder(ranks=ranks, r2=p.ladder[ranks].tolist()),
        "verdict": verdict.word,
        "reason": verdict.reason,
        "top_rows": top_rows,
        **optional,
    }


def ladder_ranks(full: int) -> list[int]:
    """0, 1, 2, 3, 4, 6, 8, 12, 16, … and the full rank."""
    steps = [base << power for power in range(full.bit_length()) for base in (1, 3)]
    return sorted({0, full, *(rank for rank in steps if rank < full)})


def name_rows(top_rows: Sequence[TopRow], text: Text, tokenizer: Any) -> list[parts.TopRow]:
    """The rows that carry most variance, by token, place, and the text around them; none without a tokenizer."""
    windows = text.held_out
    rows = []
    for row in top_rows if tokenizer is not None else ():
        window = windows[row.window].tolist()
        start = max(0, row.position - AROUND)
        around = (window[start : row.position], window[row.position + 1 : row.position + 1 + AROUND])
        before, after = (tokenizer.decode(tokens) for tokens in around)
        token = tokenizer.decode([window[row.position]])
        rows.append(parts.TopRow(**asdict(row), token=token, before=before, after=after))
    return rows


def trial_values(change: PerplexityChange) -> dict[str, Any]:
    return {**change_values(change), "nats": math.log(change.compressed / change.baseline)}


def describe_sweep(study: Study, parameters: int) -> parts.Swap:
    sweep = study.sweep
    assert sweep is not None
    first = next(iter(sweep.alone.values()))
    together = [
        parts.Together(
            **trial_values(group.change),
            blocks=[index for index in group.blocks if isinstance(index, int)],
            attention=[index.layer for index in group.blocks if isinstance(index, AttentionOf)],
            removed=group.removed,
            removed_fraction=group.removed / parameters,
        )
        for group in sweep.together
    ]
    predicted = [study.damages[index].linear for index in sweep.alone]
    return parts.Swap(
        baseline=first.baseline,
        tokens=first.tokens,
        seq_len=first.seq_len,
        seconds=sweep.seconds,
        whole_evaluation_seconds=sweep.whole_seconds,
        ratio=sweep.ratio,
        predicted_rank_correlation=number(rank_correlation(predicted, [c.delta for c in sweep.alone.values()])),
        together=together,
    )


def describe_probes(study: Study) -> dict[str, Any]:
    """How the probes were made and what they say of all blocks together: fields of the record."""
    probes: dict[str, Any] = {}
    if study.bilinear:
        left = [1 - b.r2_lin for b in study.bilinear.values()]
        gains = [b.gain for b in study.bilinear.values()]
        least, of_it = CONVERGED
        probes["bilinear"] = parts.BilinearProbe(
            rank=BILINEAR_RANK,
            criterion=f"in {ROUND} iterations of L-BFGS the share of variance explained grew by less than "
            f"{least:.5f}, or than {of_it:g} of itself",
            pearson=pearson(left, gains),
            mean_gain=statistics.fmean(gains),
            largest_gain=max(gains),
        )
    if study.trained:
        gaps = [t.gap for t in study.trained.values()]
        probes["trained"] = parts.TrainedProbe(
            optimiser="Adam",
            steps=max(t.steps[-1] for t in study.trained.values()),
            batch=TRAINED_BATCH,
            learning_rate=TRAINED_RATE,
            mean_gap=statistics.fmean(gaps),
            largest_gap=max(gaps),
        )
    fields: dict[str, Any] = {}
    if probes:
        fields["probes"] = parts.Probes(rows=study.probed_rows, sampled=study.sampled, **probes)
    if study.crossings:
        fields["cross"] = describe_cross(study.crossings, study.other)
    return fields


def describe_cross(crossings: Sequence[Crossing], other: Any) -> parts.CrossSummary:
    """Means over blocks, and which profile the other model's blocks follow when they are given this model's inputs."""
    names = ("own", "own_on_other", "own_on_white", "other", "other_on_own", "other_on_white")
    columns = {name: [getattr(c, name) for c in crossings] for name in names}
    pairs = (("other_on_own", "other"), ("other_on_own", "own"), ("own_on_other", "own"), ("own_on_white", "own"))
    return parts.CrossSummary(
        source=describe_source(other),
        mean={name: statistics.fmean(column) for name, column in columns.items()},
        rank_correlation={f"{a}, {b}": number(rank_correlation(columns[a], columns[b])) for a, b in pairs},
    )


def describe_shape(profile: Sequence[float]) -> parts.Shape:
    """How heterogeneous a profile is: its spread, its jumps between neighbours, and whether it follows depth."""
    steps = [b - a for a, b in pairwise(profile)]
    jumps = [abs(step) for step in steps]
    depth = list(map(float, range(len(profile))))
    return parts.Shape(
        lowest=min(profile),
        median=statistics.median(profile),
        highest=max(profile),
        spread=max(profile) - min(profile),
        mean_jump=statistics.fmean(jumps) if jumps else 0.0,
        largest_jump=max(jumps, default=0.0),
        largest_jump_after=jumps.index(max(jumps)) if jumps else None,
        turns=sum(a * b < 0 for a, b in pairwise(steps)),  # how often it changes between rising and falling
        rank_correlation_with_depth=number(rank_correlation(depth, list(profile))),
    )


def describe_corpora(names: Sequence[str], texts: Sequence[Text], profiles: Sequence[Profile]) -> dict[str, Any]:
    """Every corpus's own profile, and how far they agree on the order of the blocks: fields of the record."""
    corpora = [
        parts.Corpus(
            name=name,
            text=describe_split(text.calibration),
            blocks=[
                parts.BlockFigures(
                    **figure_values(p), rank_99_params=count_linear(p.sufficient_rank, p.block.width, biased=True)
                )
                for p in profile.blocks
            ],
            attention=[parts.BlockFigures(**figure_values(p)) for p in profile.attention],
            shape=describe_shape([p.r2_lin for p in profile.blocks]) if profile.blocks else None,
        )
        for name, text, profile in zip(names, texts, profiles, strict=True)
    ]
    pairs = []
    for k, first in enumerate(corpora):
        for second in corpora[k + 1 :]:
            columns = [[b.r2_lin for b in corpus.blocks or corpus.attention] for corpus in (first, second)]
            pairs.append(
                parts.CorpusPair(
                    first=first.name,
                    second=second.name,
                    rank_correlation=number(rank_correlation(columns[0], columns[1])),
                    largest_difference=max(abs(a - b) for a, b in zip(*columns, strict=True)),
                )
            )
    return {"corpora": corpora, "corpus_agreement": pairs}


def pearson(first: Sequence[float], second: Sequence[float]) -> float | None:
    if len(first) < 3:
        return None
    return number(torch.corrcoef(torch.tensor([list(first), list(second)], dtype=torch.float64))[0, 1].item())


def number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def tables_of(record: Record | ProfileSet) -> dict[str, list[dict[str, Any]]]:
    """The record's numbers as tables for CSV files: one line per block (of every model and corpus), and one per block
    and rank."""
    blocks, ladders = [], []
    for profile in profiles_of(record):
        model = last_part(profile.source.model)
        first_corpus = profile.corpora[0].name if profile.corpora else ""
        for branch, measured in (("ffn", profile.blocks), ("attention", profile.attention)):
            for block in measured:
                first = {"model": model, "corpus": first_corpus, "block": block.index, "branch": branch}
                blocks.append({**first, **flat(block.model_dump(exclude_unset=True))})
                assert block.ladder is not None
                width = block.ladder.ranks[-1]
                biased = block.linear_params != width * width
                for rank, r2 in zip(block.ladder.ranks, block.ladder.r2, strict=True):
                    size = count_linear(rank, width, biased)
                    ladders.append({**first, "rank": rank, "r2": r2, "parameters": size})
        for corpus in profile.corpora[1:]:
            for branch, figures in (("ffn", corpus.blocks), ("attention", corpus.attention)):
                blocks += [
                    {"model": model, "corpus": corpus.name, "block": b.index, "branch": branch}
                    | flat(b.model_dump(exclude_unset=True))
                    for b in figures
                ]
    return {"profile": blocks, "ladder": ladders}


def flat(block: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A block's numbers and words in one row; lists of other things than an interval's two ends are left out."""
    row: dict[str, Any] = {}
    for key, value in block.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and key not in ("replacement", "ladder"):
            row |= flat(value, f"{name}_")
        elif key.endswith("ci95"):
            row |= {f"{name}_low": value[0], f"{name}_high": value[1]}
        elif not isinstance(value, (list, tuple, Mapping)) and name != "index":
            row[name] = value
    return row
