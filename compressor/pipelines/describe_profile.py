"""The record of a linearity report: every block's figures, trials and probes as plain values, and what sums them up."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import torch

from compressor.evaluate.perplexity import Evaluation
from compressor.measure.probes import BILINEAR_RANK, CONVERGED, ROUND, TRAINED_BATCH, TRAINED_RATE, Crossing
from compressor.measure.profile import FIGURES, BlockProfile, Profile
from compressor.measure.study import Study
from compressor.patch.checkpoint import count_parameters
from compressor.pipelines.describe import KEEP, describe_perplexity, describe_source, describe_text
from compressor.plan.calibration import rank_correlation
from compressor.plan.shapes import Form
from compressor.report.markup import last_part
from compressor.report.record import describe_tool, flat, profiles_of
from compressor.text import Text

AROUND = 12  # tokens on either side of a row that is told by its text
WHOLE = ("input_rank", "top_position")


def describe_profile(model: Any, tokenizer: Any, text: Text, profile: Profile, study: Study) -> dict[str, Any]:
    """The record of a measurement: no budget, no replacement."""
    blocks = [describe_block(p, study) | {"top_rows": name_rows(p, text, tokenizer)} for p in profile.blocks]
    return {
        **describe_tool(),
        "source": describe_source(model),
        "text": describe_text(text),
        "parameters": {"before": count_parameters(model)},
        "rows": {"fitted": profile.rows_fitted, "held_out": profile.rows_held_out},
        "blocks": blocks,
        "shape": describe_shape([p.r2_lin for p in profile.blocks]),
        **describe_sweep(study, count_parameters(model)),
        **describe_probes(study),
    }


def describe_figures(p: BlockProfile) -> dict[str, Any]:
    """What one text says of one block."""
    figures = {name: getattr(p, name) for name in FIGURES}
    return {
        "index": p.block.index,
        **figures,
        **{name: int(figures[name]) for name in WHOLE},
        "r2_lin_ci95": list(p.r2_lin_ci95),
        "rank_99": p.enough_rank,
        "rank_99_params": Form(p.enough_rank if 2 * p.enough_rank < p.block.width else None).parameters(
            p.block.width, 0
        ),
    }


def describe_block(p: BlockProfile, study: Study) -> dict[str, Any]:
    index = p.block.index
    damage, verdict = study.damages[index], study.verdicts[index]
    ranks = ladder_ranks(len(p.ladder) - 1)
    entry: dict[str, Any] = {
        **describe_figures(p),
        "path": p.block.path,
        "predicted_dloss": damage.linear,
        "predicted_dloss_factorised": damage.factorised,
        "params_before": p.block.parameters,
        "params_after": p.block.parameters,
        "linear_params": Form(None).parameters(p.block.width, 0),
        "ladder": {"ranks": ranks, "r2": p.ladder[ranks].tolist()},
        "verdict": verdict.word,
        "reason": verdict.reason,
        "replacement": dict(KEEP),
    }
    if study.sweep:
        entry["swap"] = describe_swap(study.sweep.alone[index])
    if index in study.bilinear:
        entry["bilinear"] = {**asdict(study.bilinear[index]), "gain": study.bilinear[index].gain}
    if index in study.trained:
        entry["trained"] = {**asdict(study.trained[index]), "gap": study.trained[index].gap}
    for crossing in study.crossings:
        if crossing.index == index:
            entry["cross"] = asdict(crossing)
    return entry


def ladder_ranks(full: int) -> list[int]:
    """0, 1, 2, 3, 4, 6, 8, 12, 16, … and the full rank."""
    steps = [base << power for power in range(full.bit_length()) for base in (1, 3)]
    return sorted({0, full, *(rank for rank in steps if rank < full)})


def name_rows(p: BlockProfile, text: Text, tokenizer: Any) -> list[dict[str, Any]]:
    """The rows that carry most variance, by token, place, and the text around them."""
    windows = text.held_out
    found = []
    for row in p.top_rows:
        window = windows[row.window].tolist()
        start = max(0, row.position - AROUND)
        around = (window[start : row.position], window[row.position + 1 : row.position + 1 + AROUND])
        before, after = (tokenizer.decode(tokens) for tokens in around)
        token = tokenizer.decode([window[row.position]])
        found.append({**asdict(row), "token": token, "before": before, "after": after})
    return found


def describe_swap(evaluation: Evaluation) -> dict[str, Any]:
    found = describe_perplexity(evaluation)
    return {**found, "nats": math.log(evaluation.compressed / evaluation.baseline)}


def describe_sweep(study: Study, parameters: int) -> dict[str, Any]:
    sweep = study.sweep
    if sweep is None:
        return {}
    first = next(iter(sweep.alone.values()))
    together = [
        {
            **describe_swap(found.evaluation),
            "blocks": list(found.blocks),
            "removed": found.removed,
            "removed_fraction": found.removed / parameters,
        }
        for found in sweep.together
    ]
    return {
        "swap": {
            "baseline": first.baseline,
            "tokens": first.tokens,
            "seq_len": first.seq_len,
            "seconds": sweep.seconds,
            "whole_evaluation_seconds": sweep.whole_seconds,
            "ratio": sweep.ratio,
            "predicted_rank_correlation": number(
                rank_correlation(
                    [study.damages[index].linear for index in sweep.alone], [e.delta for e in sweep.alone.values()]
                )
            ),
            "together": together,
        }
    }


def describe_probes(study: Study) -> dict[str, Any]:
    """How the probes were made, and what they say of all blocks together."""
    found: dict[str, Any] = {}
    if study.bilinear:
        left = [1 - b.r2_lin for b in study.bilinear.values()]
        gains = [b.gain for b in study.bilinear.values()]
        least, of_it = CONVERGED
        found["bilinear"] = {
            "rank": BILINEAR_RANK,
            "criterion": f"in {ROUND} iterations of L-BFGS the share of variance explained grew by less than "
            f"{least:g}, or than {of_it:g} of itself",
            "pearson": pearson(left, gains),
            "mean_gain": statistics.fmean(gains),
            "largest_gain": max(gains),
        }
    if study.trained:
        gaps = [t.gap for t in study.trained.values()]
        steps = max(t.steps[-1] for t in study.trained.values())
        found["trained"] = {
            **{"optimiser": "Adam", "steps": steps, "batch": TRAINED_BATCH, "learning_rate": TRAINED_RATE},
            "mean_gap": statistics.fmean(gaps),
            "largest_gap": max(gaps),
        }
    if found:
        found = {"probes": {"rows": study.probed_rows, "sampled": study.sampled, **found}}
    if study.crossings:
        found["cross"] = {"source": describe_source(study.other), **describe_cross(study.crossings)}
    return found


def describe_cross(crossings: Sequence[Crossing]) -> dict[str, Any]:
    """Means over blocks, and which profile the other model's blocks follow when they are given this model's inputs."""
    names = ("own", "own_on_other", "own_on_white", "other", "other_on_own", "other_on_white")
    columns = {name: [getattr(c, name) for c in crossings] for name in names}

    def follows(name: str, of: str) -> float | None:
        return number(rank_correlation(columns[name], columns[of]))

    return {
        "mean": {name: statistics.fmean(column) for name, column in columns.items()},
        "rank_correlation": {
            "other_on_own, other": follows("other_on_own", "other"),
            "other_on_own, own": follows("other_on_own", "own"),
            "own_on_other, own": follows("own_on_other", "own"),
            "own_on_white, own": follows("own_on_white", "own"),
        },
    }


def describe_shape(profile: Sequence[float]) -> dict[str, Any]:
    """How heterogeneous a profile is: its spread, its jumps between neighbours, and whether it follows depth."""
    steps = [b - a for a, b in pairwise(profile)]
    jumps = [abs(step) for step in steps]
    return {
        "lowest": min(profile),
        "median": statistics.median(profile),
        "highest": max(profile),
        "spread": max(profile) - min(profile),
        "mean_jump": statistics.fmean(jumps) if jumps else 0.0,
        "largest_jump": max(jumps, default=0.0),
        "largest_jump_after": jumps.index(max(jumps)) if jumps else None,
        "turns": sum(a * b < 0 for a, b in pairwise(steps)),  # how often it changes between rising and falling
        "rank_correlation_with_depth": number(rank_correlation(list(map(float, range(len(profile)))), list(profile))),
    }


def describe_corpora(names: Sequence[str], texts: Sequence[Text], profiles: Sequence[Profile]) -> dict[str, Any]:
    """Every corpus's own profile, and how far they agree on the order of the blocks."""
    corpora = [
        {
            "name": name,
            "text": describe_text(text)["calibration"],
            "blocks": [describe_figures(p) for p in profile.blocks],
            "shape": describe_shape([p.r2_lin for p in profile.blocks]),
        }
        for name, text, profile in zip(names, texts, profiles, strict=True)
    ]
    pairs = []
    for k, first in enumerate(corpora):
        for second in corpora[k + 1 :]:
            columns = [[b["r2_lin"] for b in corpus["blocks"]] for corpus in (first, second)]
            apart = max(abs(a - b) for a, b in zip(*columns, strict=True))
            agreed = number(rank_correlation(columns[0], columns[1]))
            pairs.append(
                {
                    "first": first["name"],
                    "second": second["name"],
                    "rank_correlation": agreed,
                    "largest_difference": apart,
                }
            )
    return {"corpora": corpora, "corpus_agreement": pairs}


def pearson(first: Sequence[float], second: Sequence[float]) -> float | None:
    if len(first) < 3:
        return None
    return number(torch.corrcoef(torch.tensor([list(first), list(second)], dtype=torch.float64))[0, 1].item())


def number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def tables_of(report: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The record's numbers as tables: one line per block (of every model and corpus), and one per block and rank."""
    blocks, ladders = [], []
    for profile in profiles_of(report):
        model = last_part(profile["source"]["model"])
        corpora = profile.get("corpora") or [{"name": "", "blocks": []}]
        for block in profile["blocks"]:
            first = {"model": model, "corpus": corpora[0]["name"], "block": block["index"]}
            blocks.append({**first, **flat(block)})
            for rank, r2 in zip(block["ladder"]["ranks"], block["ladder"]["r2"], strict=True):
                size = Form(rank if 2 * rank < block["ladder"]["ranks"][-1] else None)
                ladders.append(
                    {**first, "rank": rank, "r2": r2, "parameters": size.parameters(block["ladder"]["ranks"][-1], 0)}
                )
        for corpus in corpora[1:]:
            blocks += [
                {"model": model, "corpus": corpus["name"], "block": b["index"], **flat(b)} for b in corpus["blocks"]
            ]
    return {"profile": blocks, "ladder": ladders}
