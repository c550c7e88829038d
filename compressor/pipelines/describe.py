"""What was computed, as parts of the record."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from torch import Tensor, nn

from compressor.evaluate.breakdown import Band, LossBreakdown
from compressor.evaluate.budget import Budget
from compressor.evaluate.evaluator import Assessment, Evaluator
from compressor.evaluate.fidelity import FidelityChange
from compressor.evaluate.generation import GenerationCheck
from compressor.evaluate.kv_cache import kv_cache_bytes
from compressor.evaluate.perplexity import PerplexityChange
from compressor.evaluate.speed import PairedTimes, Speed
from compressor.evaluate.tasks import Task, TaskChange
from compressor.export.llama import LLAMA_TYPES
from compressor.heal.distil import Healing, healing_split
from compressor.modeling_compressor import specs
from compressor.models.blocks import Block, find_attention, find_blocks
from compressor.models.branches import AttentionOf, layer_of
from compressor.models.heads import count_units
from compressor.models.neurons import count_neurons
from compressor.models.source import describe_origin, source_of, stored_dtype
from compressor.patch.checkpoint import count_parameters
from compressor.patch.tree import Replacements
from compressor.plan.calibration import Calibration
from compressor.plan.removal import SizeTarget
from compressor.plan.search import Plan
from compressor.plan.shapes import describe_shape
from compressor.report import record_parts as parts
from compressor.report import search_parts, speed_parts
from compressor.report.fidelity import Fidelity
from compressor.report.record import Record, SavedRecord, describe_tool
from compressor.report.record_parts import present
from compressor.runtime.names import NO_LIMIT, UNNAMED
from compressor.text import SPLITS, Split, Text

KEEP = parts.Replacement(kind="keep", rank=None, neurons=None)
AnyBlock = TypeVar("AnyBlock", bound=parts.Block)


def describe_source(model: Any) -> parts.Source:
    source = source_of(model)
    return parts.Source(
        model=source.model,
        revision=source.revision,
        model_type=source.model_type,
        weights_sha256=source.weights_sha256,
        dtype=str(source.dtype).removeprefix("torch."),
        exports=[*(["gguf", "vllm"] if source.model_type in LLAMA_TYPES else []), "hf-dense", "onnx"],
        card=describe_origin(source),
    )


def describe_split(split: Split) -> parts.TextSplit:
    documents = None if split.documents is None else len(set(split.documents.tolist()))
    return parts.TextSplit(source=split.source, sha256=split.sha256, tokens=split.tokens, documents=documents)


def describe_text(text: Text) -> parts.Texts:
    splits = {name: describe_split(getattr(text, name)) for name in SPLITS}
    if len(text.guard):
        splits["guard"] = describe_split(Split(text.guard, "mix and random words"))
    return parts.Texts(**splits, seq_len=text.seq_len, names=list(text.counts))


def describe_model(model: Any) -> SavedRecord:
    """The record of a model that was patched through the Python API: what it is, without measurements."""
    blocks, attention = list_replaced(model)
    return SavedRecord(
        **describe_tool(),
        source=describe_source(model),
        parameters=parts.Parameters(after=count_parameters(model)),
        blocks=blocks,
        attention=attention,
        kv_cache=describe_kv_cache(model, None, kv_cache_bytes(model)),
    )


def list_replaced(model: Any, source: Any = None) -> tuple[list[parts.SavedBlock], list[parts.SavedBlock]]:
    """The replaced FFNs and the replaced attention of a model; its source, where it is there, tells how many neurons
    the FFNs had."""
    blocks, attention = [], []
    ffns = {block.path: keep_ffn(source, block) for block in find_blocks(source)} if source is not None else {}
    found = specs(model)
    paths = {block.path for block in find_attention(model)} if found else set()
    for path, spec in found.items():
        if path in paths:
            replacement = shorten_attention(spec, keep_attention(model))
            attention.append(parts.SavedBlock(path=path, replacement=replacement))
        else:
            blocks.append(parts.SavedBlock(path=path, replacement=shorten(spec, ffns.get(path, KEEP))))
    return blocks, attention


def shorten(spec: Mapping[str, Any], kept: parts.Replacement) -> parts.Replacement:
    """What the record keeps of a spec that stands for an FFN, which as a whole is `kept`."""
    return kept.model_copy(update={"kind": spec["kind"], "rank": spec["rank"], "neurons": spec["neurons"]})


def keep_ffn(model: Any, block: Block) -> parts.Replacement:
    """An FFN that is as it was: how many neurons it has, where they are known."""
    return parts.Replacement(kind="keep", rank=None, neurons=None, units=count_neurons(model, block))


def shorten_attention(spec: Mapping[str, Any], kept: parts.Replacement) -> parts.Replacement:
    """What the record keeps of a spec that stands for attention, which as a whole is `kept`."""
    heads = list(spec.get("heads", []))
    values = {"kind": spec["kind"], "rank": spec["rank"], "heads": len(heads), "kept_heads": heads}
    return kept.model_copy(update=values)


def keep_attention(model: Any) -> parts.Replacement:
    """Attention that is as it was: how many heads it has."""
    config = model.config.get_text_config()
    units = count_units(config, config.num_attention_heads)
    queries = config.num_attention_heads // units
    return parts.Replacement(kind="keep", rank=None, heads=None, units=units, query_heads_per_unit=queries)


def describe_kv_cache(model: Any, before: int | None, after: int | None) -> speed_parts.KVCache | None:
    """The bytes per token of the key-value cache, of a model that may have none."""
    if after is None:
        return None
    dtype = str(stored_dtype(model)).removeprefix("torch.")
    return speed_parts.KVCache(bytes_per_token_before=before, bytes_per_token_after=after, dtype=dtype)


def describe_sizes(before: int, after: int) -> parts.Parameters:
    removed = before - after
    return parts.Parameters(before=before, after=after, removed=removed, removed_fraction=removed / before)


def put_replacements(record: Record, fits: Replacements) -> Record:
    """The record with these replacements in its blocks and attention, and the parameters they leave."""
    blocks: list[parts.Block] = []
    for block in record.blocks:
        module = fits.get(block.index)
        kept = block.replacement.model_copy(update={"kind": "keep", "rank": None, "neurons": None})
        replacement = kept if module is None else shorten(module.spec(), kept)
        blocks.append(put_replacement(block, module, replacement))
    attention: list[parts.Attention] = []
    for branch in record.attention:
        module = fits.get(AttentionOf(branch.index))
        kept = branch.replacement.model_copy(update={"kind": "keep", "rank": None, "heads": None, "kept_heads": None})
        replacement = kept if module is None else shorten_attention(module.spec(), kept)
        attention.append(put_replacement(branch, module, replacement))
    before = present(record.parameters.before)
    removed = sum(block.params_before - block.params_after for block in (*blocks, *attention))
    return record.with_parts(blocks=blocks, attention=attention, parameters=describe_sizes(before, before - removed))


def put_replacement(block: AnyBlock, module: nn.Module | None, replacement: parts.Replacement) -> AnyBlock:
    after = block.params_before if module is None else count_parameters(module)
    return block.model_copy(update={"params_after": after, "replacement": replacement})


def describe_plan(record: Record, plan: Plan, healing: search_parts.Healing | None = None) -> Record:
    """The record of a search: the profile, what stands where, and every plan that was tried."""
    trials = [
        search_parts.TriedPlan(
            replacements={str(index): asdict(shape) for index, shape in trial.shapes.items()},
            compensated=trial.compensated,
            removed=trial.saved,
            predicted_dloss=trial.predicted,
            texts=describe_changes(trial.changes, trial.fidelity),
        )
        for trial in plan.trials
    ]
    return put_replacements(record, plan.fits).with_parts(
        selection=describe_changes(plan.selection, plan.fidelity),
        trials=trials,
        tasks={},
        compensated=plan.compensated,
        healing=healing,
        agreement=describe_calibration(plan.calibration),
    )


def describe_healing(healing: Healing | None, text: Text) -> search_parts.Healing | None:
    """How a plan's replacements were trained; None where nothing was."""
    if healing is None:
        return None
    settings, windows = healing.settings, healing_split(text)
    looks = [search_parts.HealingLook(**asdict(look)) for look in healing.looks]
    return search_parts.Healing(
        asked_tokens=settings.tokens,
        tokens=healing.tokens,
        text=windows.source,
        text_tokens=windows.tokens,
        text_sha256=windows.sha256,
        params=settings.params,
        trained_parameters=healing.trained,
        learning_rate=settings.learning_rate,
        batch_tokens=settings.batch_tokens,
        clip=settings.clip,
        seed=settings.seed,
        precision=healing.precision,
        seconds=round(healing.seconds, 2),
        looks=looks,
        kept=search_parts.HealingLook(**asdict(healing.after)),
        stopped=healing.stopped,
    )


def describe_calibration(calibration: Calibration) -> search_parts.Agreement:
    """Predicted against measured nats per token, one replacement in every block alone."""
    points = [
        search_parts.Prediction(
            index=layer_of(point.candidate.index),
            replacement=describe_shape(point.candidate.index, point.candidate.shape),
            predicted=point.predicted,
            measured=point.measured,
            standard_error=point.error,
            kl=point.kl,
            kl_standard_error=point.kl_error,
        )
        for point in calibration.points
    ]
    loss, kl = (None if math.isnan(r) else r for r in (calibration.correlation, calibration.kl_correlation))
    of_attention = [isinstance(point.candidate.index, AttentionOf) for point in calibration.points]
    blocks = [point for point, attends in zip(points, of_attention, strict=True) if not attends]
    attention = [point for point, attends in zip(points, of_attention, strict=True) if attends]
    return search_parts.Agreement(rank_correlation=loss, kl_rank_correlation=kl, blocks=blocks, attention=attention)


def describe_speed(speed: Speed) -> speed_parts.Speed:
    return speed_parts.Speed(
        flops_before=speed.flops_before,
        flops_after=speed.flops_after,
        flops_ratio=speed.flops_ratio,
        seq_len=speed.seq_len,
        **describe_times("prefill", speed.prefill),
        **describe_times("decode", speed.decode),
    )


def describe_times(name: str, times: PairedTimes | None) -> dict[str, Any]:
    """Tokens per second, and their ratio with its interval."""
    return {
        f"{name}_before": 1 / times.before if times else None,
        f"{name}_after": 1 / times.after if times else None,
        f"{name}_ratio": times.ratio if times else None,
        f"{name}_ratio_ci95": times.ci95 if times else None,
        f"{name}_pairs": times.pairs if times else None,
    }


def describe_change(change: PerplexityChange) -> parts.PerplexityChange:
    return parts.PerplexityChange(**change_values(change))


def change_values(change: PerplexityChange, fidelity: Fidelity | None = None) -> dict[str, Any]:
    """The fields of a change in perplexity, as the record names them; with the fidelity where it was measured."""
    values = asdict(change)
    upper, error = values.pop("upper"), values.pop("error")
    more = {} if fidelity is None else {"fidelity": fidelity}
    return {**values, "delta_upper": upper, "delta_error": error, **more}


def describe_changes(
    changes: Mapping[str, PerplexityChange], fidelity: Mapping[str, FidelityChange]
) -> dict[str, parts.PerplexityChange]:
    found = {name: describe_fidelity(of_text) for name, of_text in fidelity.items()}
    return {name: parts.PerplexityChange(**change_values(change, found.get(name))) for name, change in changes.items()}


def describe_fidelity(found: FidelityChange, limit: float | None = None) -> Fidelity:
    values = asdict(found) if limit is None else {**asdict(found), "max_kl": limit, "passed": found.kl_upper <= limit}
    return Fidelity(**values)


def describe_budget(
    budgets: Mapping[str, Budget],
    allowed: Mapping[str, float],
    max_kl: float | None = None,
    target: SizeTarget | None = None,
) -> parts.Budget:
    """What was asked for, word for word, and the rise it allows; of several texts the smallest."""
    remove = None if target is None else parts.Removal(asked=str(target.asked), parameters=target.parameters)
    confidence = next(iter(budgets.values())).confidence
    if not all(budget.limited for budget in budgets.values()):
        return parts.Budget(max_dppl=None, asked=NO_LIMIT, max_kl=max_kl, confidence=confidence, remove=remove)
    only = list(budgets) == [UNNAMED]
    asked = ",".join(str(budget) if only else f"{name}={budget}" for name, budget in budgets.items())
    least = min(allowed.values())
    return parts.Budget(max_dppl=least, asked=asked, max_kl=max_kl, confidence=confidence, remove=remove)


def check_size(sizes: parts.Parameters, target: SizeTarget | None) -> list[parts.Check]:
    """Whether as much is gone as was asked for, as a share of the model."""
    if target is None:
        return []
    removed, before = present(sizes.removed), present(sizes.before)
    return [
        parts.Check(
            name=parts.SIZE_CHECK,
            passed=removed >= target.parameters,
            measured=removed / before,
            limit=target.parameters / before,
            detail=f"{removed:,} of {before:,}; asked: at least {target.asked} ({target.parameters:,} parameters)",
        )
    ]


def describe_assessment(
    assessment: Assessment, evaluator: Evaluator, sizes: parts.Parameters, target: SizeTarget | None = None
) -> dict[str, Any]:
    """Everything measured of a compressed model against its source, as fields of the record; `sizes` are those of both,
    `target` how much was to go."""
    slices = evaluator.text.parts("verification")
    windows = evaluator.text.verification.windows
    fidelity = {name: describe_fidelity(found, assessment.max_kl) for name, found in assessment.text_fidelity.items()}
    texts = {
        name: parts.TextResult(
            **change_values(change, fidelity.get(name)),
            max_dppl=assessment.allowed[name] if evaluator.budgets[name].limited else None,
            asked=str(evaluator.budgets[name]),
            passed=change.upper <= assessment.allowed[name] if evaluator.budgets[name].limited else None,
            sha256=Split(windows[slices[name]], name).sha256,
            about=change.scope,
        )
        for name, change in assessment.texts.items()
    }
    tasks = {
        task.name: describe_task(task, assessment.tasks[task.name], assessment.limits[task.name])
        for task in evaluator.tasks
    }
    generation, size_checks = assessment.generation, check_size(sizes, target)
    return {
        "perplexity": describe_change(assessment.whole),
        "fidelity": None if assessment.fidelity is None else describe_fidelity(assessment.fidelity),
        "budget": describe_budget(evaluator.budgets, assessment.allowed, assessment.max_kl, target),
        "texts": texts,
        "tasks": tasks,
        "generation": describe_generation(generation, evaluator.prompts) if generation else None,
        "where": describe_breakdown(assessment.breakdown),
        "checks": [*(parts.Check(**asdict(check)) for check in assessment.checks), *size_checks],
        "warnings": assessment.warnings,
        "passed": assessment.passed and all(check.passed for check in size_checks),
    }


def describe_task(task: Task, change: TaskChange, limit: float | None) -> parts.TaskResult:
    return parts.TaskResult(
        metric=task.metric,
        higher_is_better=task.better > 0,
        source=change.source,
        compressed=change.compressed,
        drop=change.drop,
        drop_ci95=change.drop_ci95,
        drop_upper=change.upper,
        documents=change.documents,
        changed=change.changed,
        chosen_on=change.chosen_on,
        looks=change.looks,
        max_drop=limit,
        passed=None if limit is None else change.upper <= limit,
        metrics={name: parts.MetricPair(source=a, compressed=b) for name, (a, b) in change.metrics.items()},
        data=task.source,
        sha256=task.sha256,
    )


def describe_generation(check: GenerationCheck, prompts: Sequence[Tensor]) -> parts.Generation:
    words = json.dumps([[prompt.tolist() for prompt in prompts], check.tokens])
    source, compressed = check.repetition
    return parts.Generation(
        prompts=check.prompts,
        prompt_tokens=max(len(prompt) for prompt in prompts),
        tokens=check.tokens,
        agreement=check.agreement,
        same_prefix=check.same_prefix,
        distinct={str(n): parts.MetricPair(source=a, compressed=b) for n, (a, b) in check.distinct.items()},
        repetition=parts.Repetition(source=source, compressed=compressed, rise_ci95=check.rise_ci95),
        warnings=check.warnings,
        samples=[parts.Sample(**asdict(sample)) for sample in check.samples],
        sha256=hashlib.sha256(words.encode()).hexdigest(),
    )


def describe_breakdown(breakdown: LossBreakdown) -> parts.Breakdown:
    def rows(bands: list[Band]) -> list[parts.Band]:
        return [
            parts.Band(**asdict(b), delta=b.compressed - b.baseline, nats=math.log(b.compressed / b.baseline))
            for b in bands
        ]

    windows = []
    for window in breakdown.windows:
        worst = [parts.TokenLoss(token=token, nats=nats) for token, nats in window.worst]
        windows.append(parts.Window(**{**asdict(window), "worst": worst}))
    return parts.Breakdown(frequency=rows(breakdown.frequency), position=rows(breakdown.position), windows=windows)
