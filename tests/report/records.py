"""Records made in code: an assessment, profiles, and the same with everything that a stranger could write into them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from compressor.report.record import ProfileSet, Record

SCRIPT = "<script>alert(1)</script>"
HOSTILE = f"{SCRIPT}</script>\"' onload=alert(1) &amp; datum.x {{{{ 7*7 }}}} \x00\x1b\u202e"
VERDICTS = ("safe", "costly", "unsafe")
Values = dict[str, Any]


def change(delta: float, baseline: float = 27.7301) -> Values:
    """Perplexity before and after."""
    ends = [delta - 0.15, delta + 0.165]
    figures = {"baseline": baseline, "compressed": baseline + delta, "delta": delta, "delta_ci95": ends}
    return {**figures, "delta_upper": ends[1], "tokens": 16320, "seq_len": 256}


def make_block(index: int, count: int) -> Values:
    """A block whose figures depend on its place; the third is an outlier block."""
    verdict = "unsafe" if index == 2 else ("costly", "safe")[index % 2]
    r2 = 0.9 - 0.4 * math.sin(math.pi * (index + 0.5) / count)
    row = {"window": 3, "position": 0, "share": 0.4, "token": " the\n", "before": "Once\nupon", "after": " a time"}
    keep, low = {"kind": "keep"}, {"kind": "hybrid", "rank": 48, "neurons": 384}
    return {
        **{"index": index, "path": f"transformer.h.{index}.mlp", "verdict": verdict, "reason": f"reason {index}"},
        **{"r2_lin": r2, "r2_lin_ci95": [r2 - 0.01, r2 + 0.01], "r2_stream": r2 - 0.03, "r2_median": r2 - 0.05},
        **{"effective_rank": 15.0 + index, "condition_number": 4590.6, "input_effective_rank": 9.9, "input_rank": 191},
        **{
            "top_row_share": 0.0065,
            "top_position": 0,
            "top_position_share": 0.9,
            "rank_99": 84,
            "rank_99_params": 32448,
        },
        **{"params_before": 295872, "params_after": 295872 if verdict == "unsafe" else 166464, "linear_params": 37056},
        **{"predicted_dloss": 0.02 * (index + 1), "top_rows": [row] * 2, "replacement": keep if index == 2 else low},
        "ladder": {"ranks": [0, 1, 8, 64, 192], "r2": [-0.001, 0.2 * r2, 0.6 * r2, 0.9 * r2, r2]},
        "swap": {**change(0.4 + 0.1 * index, 20.65), "nats": 0.05},
    }


def common(blocks: int) -> Values:
    """What a profile and an assessment share."""
    split = {"source": "/secret/place/book.txt", "sha256": "ab" * 32, "tokens": 24576}
    shape = {"lowest": 0.5, "median": 0.54, "highest": 0.97, "spread": 0.47, "mean_jump": 0.1, "largest_jump": 0.45}
    together = [{**change(0.458, 20.65), "nats": 0.02, "blocks": [1], "removed": 258816, "removed_fraction": 0.077}]
    together.append(
        {**change(1.577, 20.65), "nats": 0.07, "blocks": [1, 3], "removed": 517632, "removed_fraction": 0.154}
    )
    swap = {"baseline": 20.65, "tokens": 4080, "seq_len": 256, "seconds": 1.02, "whole_evaluation_seconds": 0.28}
    return {
        "schema_version": 1,
        "tool": {"name": "compressor", "version": "0.1.0"},
        "environment": {"python": "3.11.7", "torch": "2.6.0", "threads": 2},
        "source": {"model": "/secret/place/tiny-model", "model_type": "gpt2", "dtype": "float16"}
        | {"weights_sha256": "cd" * 32},
        "text": {"calibration": split, "selection": split, "verification": split, "seq_len": 256, "names": ["text"]},
        "parameters": {"before": 3360192},
        "rows": {"fitted": 19712, "held_out": 4864},
        "blocks": [make_block(index, blocks) for index in range(blocks)],
        "shape": {**shape, "largest_jump_after": 0, "turns": 1, "rank_correlation_with_depth": 0.14},
        "swap": {**swap, "ratio": 0.52, "predicted_rank_correlation": 0.54, "together": together},
        "recipe": {"seed": 7},
        "timings": {"measure": 3.78, "total": 18.27},
    }


def assessment_values(blocks: int = 7) -> Values:
    """A compressed model with everything in its record."""
    perplexity = change(0.8087)
    band = {"tokens": 4000, "baseline": 1e6, "compressed": 2674602.0, "delta": 1674602.0, "nats": 0.02, "share": 0.12}
    sample = {"prompt": "Once upon", "source": " a time there was", "compressed": " a time it rained"}
    task = {"metric": "acc", "higher_is_better": True, "source": 0.61, "compressed": 0.6, "drop": 0.01}
    task |= {"drop_ci95": [-0.01, 0.03], "drop_upper": 0.03, "documents": 500, "changed": 14}
    predictions = [(0, 0.2, 0.31), (1, 0.01, 0.008), (2, 0.002, -0.001)]
    fidelity = {"kl": 0.0123, "kl_ci95": [0.011, 0.014], "kl_upper": 0.014, "top1_agreement": 0.941}
    fidelity |= {"top1_agreement_ci95": [0.93, 0.95], "tokens": 16320, "units": 64}
    speed = {"flops_before": 7274496, "flops_after": 5881344, "flops_ratio": 1.237, "seq_len": 256}
    speed |= {f"{name}_{when}": 299.5 for name in ("prefill", "decode") for when in ("before", "after")}
    speed |= {"prefill_ratio": 1.155, "prefill_ratio_ci95": [1.12, 1.19], "prefill_pairs": 16}
    speed |= {"decode_ratio": 1.039, "decode_ratio_ci95": [0.981, 1.094], "decode_pairs": 16}
    return {
        **common(blocks),
        "parameters": {"before": 3360192, "after": 3078336, "removed": 281856, "removed_fraction": 0.08388},
        "perplexity": perplexity,
        "budget": {"max_dppl": 1.0, "asked": "1", "confidence": 0.95},
        "fidelity": fidelity,
        "texts": {"text": {**perplexity, "max_dppl": 1.0, "asked": "1", "passed": True, "fidelity": fidelity}},
        "tasks": {
            "last_word": {**task, "data": "/secret/place/last_word.jsonl"},
            "riddles": {**task, "max_drop": 0.05, "passed": True},
        },
        "generation": {
            **{"prompts": 16, "prompt_tokens": 32, "tokens": 48, "agreement": 0.93, "same_prefix": 31.25},
            "distinct": {"1": {"source": 0.5, "compressed": 0.49}},
            "repetition": {"source": 0.1, "compressed": 0.12, "rise_ci95": [-0.03, 0.07]},
            "warnings": ["it mumbles"],
            "samples": [{**sample, "agreement": 0.9, "first_difference": 2}] * 5,
        },
        "where": {
            "frequency": [
                {**band, "band": "1–10"},
                {**band, "band": "11–100", "delta": -0.05, "nats": -0.01, "share": -0.06},
            ],
            "position": [{**band, "band": "1"}],
            "windows": [
                {"text_name": "text", "window": 17, "baseline": 30.1, "compressed": 33.0, "nats": 12.1}
                | {"excerpt": "It rained.", "worst": [{"token": " house", "nats": 1.9}]}
            ],
        },
        "checks": [
            {"name": "perplexity text", "passed": True, "measured": 0.9734, "limit": 1.0, "detail": "27.730 → 28.539"},
            {"name": "baseline agreement", "passed": True, "measured": 0.93, "limit": 0.9, "detail": "as in May"},
        ],
        "warnings": ["the text is small"],
        "passed": True,
        "speed": speed,
        "agreement": {
            "rank_correlation": 0.94,
            "blocks": [
                {"index": k, "replacement": "linear", "predicted": p, "measured": m, "standard_error": 0.02}
                for k, p, m in predictions
            ],
        },
    }


def profile_values(blocks: int = 30) -> Values:
    """A profile with two corpora, both probes and a second model."""
    values = common(blocks)
    probe = {
        "rank": 8,
        "criterion": "L-BFGS gains less than 0.001",
        "pearson": 0.4,
        "mean_gain": 0.02,
        "largest_gain": 0.1,
    }
    trained = {
        "optimiser": "Adam",
        "steps": 1000,
        "batch": 256,
        "learning_rate": 0.001,
        "mean_gap": 0.1,
        "largest_gap": 0.2,
    }
    crossed = ("own", "own_on_other", "own_on_white", "other", "other_on_own", "other_on_white")
    for block in values["blocks"]:
        r2 = block["r2_lin"]
        block["bilinear"] = {"r2_lin": r2, "r2_poly": r2 + 0.02, "iterations": 40, "converged": True, "gain": 0.02 * r2}
        block["trained"] = {"r2_lin": r2, "r2": r2 - 0.1, "steps": [1000], "curve": [r2 - 0.1], "gap": 0.1}
        cross = {name: r2 - 0.05 * place for place, name in enumerate(crossed)}
        block["cross"] = {"index": block["index"], "other_index": block["index"], **cross}
    figures = [{key: value for key, value in block.items() if key in FIGURES} for block in values["blocks"]]
    other = [{**figure, "r2_lin": figure["r2_lin"] - 0.08} for figure in figures]
    text = values["text"]["calibration"]
    names = zip(("novels", "code"), (figures, other), strict=True)
    return {
        **values,
        "probes": {"rows": 19712, "sampled": True, "bilinear": probe, "trained": trained},
        "cross": {"source": values["source"] | {"model": "/secret/other"}, "mean": dict.fromkeys(crossed, 0.5)}
        | {"rank_correlation": {"other_on_own, other": 0.9, "other_on_own, own": 0.1}},
        "corpora": [{"name": n, "text": text, "blocks": blocks, "shape": values["shape"]} for n, blocks in names],
        "corpus_agreement": [
            {"first": "novels", "second": "code", "rank_correlation": 0.97, "largest_difference": 0.1}
        ],
    }


HEADS = {"units": 3, "query_heads_per_unit": 3}
REPLACED_ATTENTION: list[Values] = [
    {"kind": "keep", "rank": None, "heads": None, **HEADS},
    {"kind": "linear", "rank": None, "heads": 0, "kept_heads": [], **HEADS},
    {"kind": "hybrid", "rank": 24, "heads": 2, "kept_heads": [0, 2], **HEADS},
    {"kind": "keep", "rank": None, "heads": None, **HEADS},
    {"kind": "pruned", "rank": 0, "heads": 1, "kept_heads": [1], **HEADS},
]


def make_attention(index: int, count: int) -> Values:
    """The attention of a layer, less linear than its FFN; the first two layers' are not to be touched."""
    replacement = REPLACED_ATTENTION[index % len(REPLACED_ATTENTION)]
    verdict = "unsafe" if index < 2 else ("costly", "costly", "safe")[index % 3]
    if verdict == "unsafe":
        replacement = REPLACED_ATTENTION[0]
    r2 = 0.45 + 0.12 * math.cos(2.7 * index) - 0.1 * index / count
    sizes = {"keep": 147456, "linear": 36864, "hybrid": 107520, "pruned": 49152}
    return {
        **make_block(index, count),
        **{"path": f"transformer.h.{index}.attn", "verdict": verdict, "reason": f"attention {index}"},
        **{"r2_lin": r2, "r2_lin_ci95": [r2 - 0.02, r2 + 0.02], "r2_stream": r2 + 0.04, "r2_median": r2 - 0.1},
        **{"params_before": 147456, "params_after": sizes[replacement["kind"]], "linear_params": 36864},
        "replacement": replacement,
        "ladder": {"ranks": [0, 1, 8, 64, 192], "r2": [-0.001, 0.1 * r2, 0.5 * r2, 0.95 * r2, r2]},
        "swap": {**change((7.0 if index < 2 else 0.3) + 0.15 * (index % 5), 20.65), "nats": 0.05},
    }


def with_attention(values: Values) -> Values:
    """The same record with attention in it."""
    count = len(values["blocks"])
    attention = [make_attention(index, count) for index in range(count)]
    for trial in values["swap"]["together"]:
        trial["attention"] = [4]
    for corpus in values.get("corpora", []):
        corpus["attention"] = [{key: value for key, value in a.items() if key in FIGURES} for a in attention]
    if "agreement" in values:
        predictions = [{**p, "measured": 1.4 * p["measured"]} for p in values["agreement"]["blocks"]]
        values["agreement"]["attention"] = predictions
    cache = {"bytes_per_token_before": 23040, "bytes_per_token_after": 15360, "dtype": "float16"}
    return {**values, "attention": attention, "attention_shape": values["shape"], "kv_cache": cache}


FIGURES = {"index", "r2_lin", "r2_lin_ci95", "r2_stream", "r2_median", "effective_rank", "top_row_share"}


def assessment(blocks: int = 7, **parts: Any) -> Record:
    return Record.model_validate({**assessment_values(blocks), **parts})


def profile(blocks: int = 30, **parts: Any) -> Record:
    return Record.model_validate({**profile_values(blocks), **parts})


def attending(blocks: int = 7, **parts: Any) -> Record:
    """A compressed model whose attention was measured, and in some layers replaced."""
    return Record.model_validate({**with_attention(assessment_values(blocks)), **parts})


def attending_profile(blocks: int = 30, **parts: Any) -> Record:
    values = with_attention(profile_values(blocks))
    for entry in values["attention"]:
        entry["replacement"] = REPLACED_ATTENTION[0]
    return Record.model_validate({**values, **parts})


def profile_set() -> ProfileSet:
    second = profile_values(7)
    second["source"] = {**second["source"], "model": "/secret/place/other-model"}
    values = common(1)
    begin = {key: values[key] for key in ("schema_version", "tool", "environment")}
    return ProfileSet.model_validate({**begin, "profiles": [profile_values(12), second]})


KEPT = {"verdict", "kind"}  # words from a fixed list: a record with others is refused


def poison(value: Any, text: str = HOSTILE) -> Any:
    """The same values with every string, and every name that a user chooses, replaced."""
    if isinstance(value, dict):
        return {key: entry if key in KEPT else poison(entry, text) for key, entry in value.items()}
    if isinstance(value, list):
        return [poison(entry, text) for entry in value]
    return text if isinstance(value, str) else value


def hostile_assessment() -> Record:
    values = poison(assessment_values())
    for key in ("tasks", "texts", "environment", "timings"):
        values[key] = {HOSTILE: next(iter(values[key].values()))}
    values["generation"]["distinct"] = {HOSTILE: {"source": 0.5, "compressed": None}}
    values["checks"].append({"name": HOSTILE, "passed": False, "measured": None, "limit": 1.0, "detail": HOSTILE})
    return Record.model_validate(values)


def hostile_attention() -> Record:
    values = with_attention(assessment_values())
    return Record.model_validate({**poison(values), "kv_cache": values["kv_cache"]})


def hostile_profile() -> Record:
    return Record.model_validate(poison(profile_values(5)))


CHOSEN = {"confidence", "learning_rate"}  # figures that a user sets


def mix_figures(value: Any, figures: Iterator[float]) -> Any:
    """The same values with most measured figures replaced by those that come next; whole numbers stay."""
    if isinstance(value, dict):
        return {key: entry if key in CHOSEN else mix_figures(entry, figures) for key, entry in value.items()}
    if isinstance(value, list):
        return [mix_figures(entry, figures) for entry in value]
    return next(figures) if isinstance(value, float) else value


WIDTH, NEURONS = 576, 1536  # of a block of a model with thirty of them
REASONS = {
    "safe": "alone as a linear map it costs 0.0093 nats per token, less than a fifth of the budget",
    "costly": "alone as a linear map it raises perplexity 35.16 → 37.91 (+2.75, 95 % interval +2.31 … +3.22)",
    "unsafe": "0.1 % of the rows carry 99 % of the variance of its output, and position 0 of the windows most of them",
}


def real_block(index: int, count: int) -> Values:
    """A block as models of a hundred million parameters have them: most keep the greater part of their neurons."""
    verdict = "unsafe" if index in (0, count // 3) else "safe" if index % 7 == 4 else "costly"
    share = 0.5 + 0.5 * math.cos(2 * math.pi * (index + 0.5) / count)
    kept = min(NEURONS, 64 * round((1100 + 420 * share) / 64))
    replacement: Values = {"kind": "pruned", "rank": 0, "neurons": kept}
    if verdict == "safe":
        replacement = {"kind": "hybrid", "rank": 48, "neurons": kept - 384}
    if verdict == "unsafe" or kept == NEURONS:
        replacement = {"kind": "keep", "rank": None, "neurons": None}
    r2 = 0.62 - 0.3 * math.sin(math.pi * index / count) + 0.05 * math.cos(5.1 * index) + 0.3 * (verdict == "unsafe")
    rows = [{"window": 41, "position": 0, "share": 0.4, "token": " The", "before": "", "after": " river had risen"}] * 4
    after = 3 * WIDTH * (replacement["neurons"] or NEURONS) + 2 * WIDTH * (replacement["rank"] or 0)
    return make_block(index, count) | {
        **{"path": f"model.layers.{index}.mlp", "verdict": verdict, "reason": REASONS[verdict], "top_rows": rows},
        **{"r2_lin": r2, "r2_lin_ci95": [r2 - 0.012, r2 + 0.011], "r2_stream": r2 - 0.06, "r2_median": r2 - 0.1},
        **{"effective_rank": 88.0 + 5 * index, "condition_number": 3.1e5, "input_rank": WIDTH},
        **{"top_row_share": 0.99 if verdict == "unsafe" else 0.02, "linear_params": WIDTH * WIDTH},
        **{"params_before": 3 * WIDTH * NEURONS, "params_after": after},
        "replacement": replacement | {"units": NEURONS},
        "swap": {**change(2.2 + 1.7 * math.sin(index) + 40 * (verdict == "unsafe"), 35.161), "nats": 0.06},
    }


def real_values(blocks: int = 30) -> Values:
    """A model of thirty blocks, compressed by two texts, with a task, healed."""
    values = assessment_values(blocks)
    values["blocks"] = [real_block(index, blocks) for index in range(blocks)]
    removed = sum(block["params_before"] - block["params_after"] for block in values["blocks"])
    before = 134_515_008
    fidelity = values["fidelity"] | {"kl": 0.0211, "kl_ci95": [0.0203, 0.0219]}
    texts = {
        name: {**change(delta, baseline), "max_dppl": limit, "asked": asked, "passed": True, "fidelity": fidelity}
        for name, delta, baseline, limit, asked in (
            ("wikitext2", 0.4218, 35.161, 0.70322, "2%"),
            ("code", 0.1109, 8.412, 0.5, "0.5"),
        )
    }
    looks = [
        {"tokens": tokens, "kl": kl, "rise": rise, "dppl": {"wikitext2": 35.2 * rise, "code": 8.4 * rise}}
        for tokens, kl, rise in (
            (0, 0.061, 0.041),
            (65536, 0.034, 0.02),
            (131072, 0.0262, 0.013),
            (196608, 0.024, 0.012),
        )
    ]
    healing = {
        **{"asked_tokens": 200000, "tokens": 196608, "text": "book.txt", "text_tokens": 150000},
        **{"text_sha256": "ef" * 32, "params": "replaced", "trained_parameters": before - removed - 30_000_000},
        **{"learning_rate": 0.0005, "batch_tokens": 2048, "clip": 1.0, "seed": 0, "precision": "float32"},
        **{"seconds": 1311.0, "looks": looks, "kept": looks[-1]},
    }
    predictions = [
        {"index": k, "replacement": "keeps 768 neurons", "predicted": 0.004 * (1 + k % 9), "standard_error": 0.002}
        | {"measured": 0.004 * (1 + (k + k % 3) % 9) - 0.004, "kl": 0.003 * (1 + (k + k % 2) % 9)}
        for k in range(blocks)
    ]
    return values | {
        "source": values["source"]
        | {"model": "/secret/place/SmolLM2-135M", "model_type": "llama", "dtype": "bfloat16"},
        "parameters": {"before": before, "after": before - removed, "removed": removed}
        | {"removed_fraction": removed / before},
        **{"perplexity": change(0.4218, 35.161), "texts": texts, "fidelity": fidelity, "healing": healing},
        "budget": {"max_dppl": 0.5, "asked": "wikitext2=2%,code=0.5", "confidence": 0.95},
        "agreement": {"rank_correlation": 0.91, "kl_rank_correlation": 0.96, "blocks": predictions},
        "checks": [],
        "warnings": [],
    }


def real(blocks: int = 30, attention: bool = False, **parts: Any) -> Record:
    values = real_values(blocks)
    return Record.model_validate({**(with_attention(values) if attention else values), **parts})
