"""The record of a run, compression.json: every measurement as plain values."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor

from compressor.evaluate.breakdown import Band, Hurt
from compressor.evaluate.budget import Budget
from compressor.evaluate.evaluator import Assessment, Evaluator
from compressor.evaluate.generation import Talk
from compressor.evaluate.perplexity import Evaluation
from compressor.evaluate.speed import Speed
from compressor.evaluate.tasks import Drop, Task
from compressor.export.llama import LLAMA_TYPES
from compressor.modeling_compressor import Replacement
from compressor.models.source import describe_origin, source_of
from compressor.patch.checkpoint import count_parameters
from compressor.patch.tree import specs
from compressor.plan.calibration import Agreement
from compressor.plan.search import Plan
from compressor.report.record import describe_tool
from compressor.runtime.names import UNNAMED
from compressor.text import SPLITS, Split, Text

KEEP = {"kind": "keep", "rank": None, "neurons": None}


def describe_source(model: Any) -> dict[str, Any]:
    source = source_of(model)
    return {
        "model": source.model,
        "revision": source.revision,
        "model_type": source.model_type,
        "weights_sha256": source.weights_sha256,
        "dtype": str(source.dtype).removeprefix("torch."),
        "exports": [*(["gguf", "vllm"] if source.model_type in LLAMA_TYPES else []), "hf-dense", "onnx"],
        "card": describe_origin(source),
    }


def describe_text(text: Text) -> dict[str, Any]:
    splits = {name: getattr(text, name) for name in SPLITS}
    described = {name: {"source": s.source, "sha256": s.sha256, "tokens": s.tokens} for name, s in splits.items()}
    return {**described, "seq_len": text.seq_len, "names": list(text.counts)}


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
            "replacements": {str(index): asdict(form) for index, form in trial.forms.items()},
            "compensated": trial.compensated,
            "removed": trial.saved,
            "predicted_dloss": trial.predicted,
            "texts": describe_texts(trial.evaluations),
        }
        for trial in plan.trials
    ]
    found = {"selection": describe_texts(plan.selection), "trials": trials, "tasks": {}}
    how = {"compensated": plan.compensated, "agreement": describe_agreement(plan.agreement)}
    return {**put_replacements(report, plan.fits), **found, **how}


def describe_agreement(agreement: Agreement) -> dict[str, Any]:
    """Predicted against measured nats per token, one replacement in every block alone."""
    points = [
        {
            "index": point.option.index,
            "replacement": str(point.option.form),
            "predicted": point.predicted,
            "measured": point.measured,
            "standard_error": point.error,
        }
        for point in agreement.points
    ]
    correlation = agreement.correlation
    return {"rank_correlation": None if math.isnan(correlation) else correlation, "blocks": points}


def describe_speed(speed: Speed) -> dict[str, Any]:
    return {
        **asdict(speed),
        "flops_ratio": speed.flops_ratio,
        "prefill_ratio": speed.prefill_ratio,
        "decode_ratio": speed.decode_ratio,
    }


def describe_texts(evaluations: Mapping[str, Evaluation]) -> dict[str, Any]:
    return {name: describe_perplexity(evaluation) for name, evaluation in evaluations.items()}


def describe_budget(budgets: Mapping[str, Budget], allowed: Mapping[str, float]) -> dict[str, Any]:
    """What was asked for, word for word, and the rise it allows; of several texts the smallest."""
    only = list(budgets) == [UNNAMED]
    asked = ",".join(str(budget) if only else f"{name}={budget}" for name, budget in budgets.items())
    confidence = next(iter(budgets.values())).confidence
    return {"max_dppl": min(allowed.values()), "asked": asked, "confidence": confidence}


def describe_assessment(found: Assessment, evaluator: Evaluator) -> dict[str, Any]:
    """Everything measured of a compressed model against its source."""
    parts = evaluator.text.parts("verification")
    windows = evaluator.text.verification.windows
    texts = {
        name: {
            **describe_perplexity(e),
            "max_dppl": found.allowed[name],
            "asked": str(evaluator.budgets[name]),
            "passed": e.upper <= found.allowed[name],
            "sha256": Split(windows[parts[name]], name).sha256,
        }
        for name, e in found.texts.items()
    }
    tasks = {
        task.name: describe_task(task, found.drops[task.name], found.limits[task.name]) for task in evaluator.tasks
    }
    return {
        "perplexity": describe_perplexity(found.whole),
        "budget": describe_budget(evaluator.budgets, found.allowed),
        "texts": texts,
        "tasks": tasks,
        "generation": describe_talk(found.talk, evaluator.prompts) if found.talk else None,
        "where": describe_hurt(found.hurt),
        "checks": [asdict(check) for check in found.checks],
        "warnings": found.warnings,
        "passed": found.passed,
    }


def describe_task(task: Task, found: Drop, limit: float | None) -> dict[str, Any]:
    return {
        "metric": task.metric,
        "higher_is_better": task.better > 0,
        "source": found.source,
        "compressed": found.compressed,
        "drop": found.drop,
        "drop_ci95": list(found.drop_ci95),
        "drop_upper": found.upper,
        "documents": found.documents,
        "changed": found.changed,
        "max_drop": limit,
        "passed": None if limit is None else found.upper <= limit,
        "metrics": {name: {"source": a, "compressed": b} for name, (a, b) in found.metrics.items()},
        "data": task.source,
        "sha256": task.sha256,
    }


def describe_talk(found: Talk, prompts: Sequence[Tensor]) -> dict[str, Any]:
    pair = ("source", "compressed")
    words = json.dumps([[prompt.tolist() for prompt in prompts], found.tokens])
    return {
        "prompts": found.prompts,
        "prompt_tokens": max(len(prompt) for prompt in prompts),
        "tokens": found.tokens,
        "agreement": found.agreement,
        "same_prefix": found.same_prefix,
        "distinct": {str(n): dict(zip(pair, both, strict=True)) for n, both in found.distinct.items()},
        "repetition": {**dict(zip(pair, found.repetition, strict=True)), "rise_ci95": list(found.rise_ci95)},
        "warnings": found.warnings,
        "samples": [asdict(sample) for sample in found.samples],
        "sha256": hashlib.sha256(words.encode()).hexdigest(),
    }


def describe_hurt(found: Hurt) -> dict[str, Any]:
    def rows(bands: list[Band]) -> list[dict[str, Any]]:
        return [
            {**asdict(b), "delta": b.compressed - b.baseline, "nats": math.log(b.compressed / b.baseline)}
            for b in bands
        ]

    windows = [
        {**asdict(window), "worst": [{"token": token, "nats": nats} for token, nats in window.worst]}
        for window in found.windows
    ]
    return {"frequency": rows(found.frequency), "position": rows(found.position), "windows": windows}


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
