"""KL from the source and top-1 agreement against direct computation, their intervals, and what the source's kept states
are worth."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from planted import random_text
from torch import Tensor
from zoo import FAMILIES, random_replacement, save_tiny, tiny_model, tiny_tokenizer

import compressor.evaluate.fidelity as measuring
from compressor.evaluate import perplexity
from compressor.evaluate.budget import Budget
from compressor.evaluate.evaluator import Assessment, Evaluator, Measured
from compressor.evaluate.fidelity import (
    Fidelity,
    Reference,
    compare_fidelity,
    compare_rows,
    evaluate_against,
    measure_source,
)
from compressor.evaluate.perplexity import Losses, evaluate
from compressor.models.blocks import find_blocks
from compressor.models.load import load_model
from compressor.models.source import identify
from compressor.patch.tree import identify_patched, patched
from compressor.plan.shapes import Shape
from compressor.runtime.cache import Cache
from compressor.runtime.context import RunContext
from compressor.runtime.progress import Progress

TEXT = random_text()
WINDOWS = TEXT.verification.windows[:10]
KEY = {"kind": "losses"}


def damage(model: Any) -> dict[int, Any]:
    return {1: random_replacement(find_blocks(model)[1], Shape(5))}


def source_of(model: Any, context: RunContext, key: Mapping[str, Any] = KEY) -> tuple[Losses, Reference]:
    return measure_source(model, WINDOWS, key, context, identity={}, step="source")


@torch.no_grad()
def expected(model: Any, fits: dict[int, Any]) -> tuple[Tensor, Tensor]:
    """Both from the raw logits in float64."""
    source = model(WINDOWS).logits[:, :-1].double()
    with patched(model, find_blocks(model), fits):
        compressed = model(WINDOWS).logits[:, :-1].double()
    p, q = source.log_softmax(-1), compressed.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1), source.argmax(-1) == compressed.argmax(-1)


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_what_raw_logits_say(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every family: with capped or scaled logits, tied and biased heads, layers that return tuples."""
    monkeypatch.setattr(perplexity, "CHUNK_LOGITS", 3000)  # some rows at a time
    model, context = tiny_model(family), RunContext(batch_size=4)
    fits = damage(model)
    losses, reference = source_of(model, context)
    assert torch.equal(losses.nats, evaluate(model, WINDOWS, context).nats)
    with patched(model, find_blocks(model), fits):
        after, found = evaluate_against(model, reference, WINDOWS, context)
        assert torch.equal(after.nats, evaluate(model, WINDOWS, context).nats)
    kl, agrees = expected(model, fits)
    assert kl.mean() > 1e-4
    torch.testing.assert_close(found.kl.double(), kl, rtol=0, atol=1e-6)
    assert torch.equal(found.agrees, agrees)


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_is_exactly_as_near_to_itself_as_can_be(family: str, dtype: torch.dtype) -> None:
    model, context = tiny_model(family).to(dtype), RunContext(batch_size=4)
    _, reference = source_of(model, context)
    _, found = evaluate_against(model, reference, WINDOWS, context)
    assert not found.kl.any()
    change = compare_fidelity(found)
    assert (change.kl, change.kl_ci95, change.kl_upper, change.kl_error) == (0.0, (0.0, 0.0), 0.0, 0.0)
    assert (change.top1_agreement, change.top1_agreement_ci95) == (1.0, (1.0, 1.0))
    assert (change.tokens, change.unit, change.units) == (WINDOWS[:, 1:].numel(), "window", len(WINDOWS))


def test_rounding_makes_nothing_negative_and_loses_nothing_small() -> None:
    generator = torch.Generator().manual_seed(0)
    source = 30 + 10 * torch.randn(400, 3000, generator=generator)
    for size in (0.0, 1e-6, 1e-3, 1.0, 30.0):
        compressed = source - 25 + size * torch.randn(400, 3000, generator=generator)
        kl, _ = compare_rows(source, compressed)
        p, q = source.double().log_softmax(-1), compressed.double().log_softmax(-1)
        assert (kl >= 0).all()
        torch.testing.assert_close(kl.double(), (p.exp() * (p - q)).sum(-1), rtol=1e-4, atol=1e-6)


def test_tokens_that_neither_model_may_say_do_not_count() -> None:
    source, compressed = torch.tensor([[1.0, 2.0, -math.inf]]), torch.tensor([[2.0, 1.0, -math.inf]])
    kl, agrees = compare_rows(source, compressed)
    wanted, _ = compare_rows(source[:, :2], compressed[:, :2])
    assert kl.item() == pytest.approx(wanted.item())
    assert kl.item() == pytest.approx(math.tanh(0.5), rel=1e-6)  # by hand: σ(1)·1 − σ(−1)·1
    assert not agrees.item()
    assert compare_rows(source, torch.tensor([[2.0, -math.inf, 0.0]]))[0].item() == math.inf


def test_the_source_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its layers run once, in the pass that measures its losses."""
    model, context = tiny_model("llama"), RunContext(batch_size=4)
    calls: list[int] = []
    model.model.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    find_blocks(model)
    measuring.check_layers(model, find_blocks(model))
    calls.clear()
    _, reference = source_of(model, context)
    assert len(calls) == 3
    evaluate_against(model, reference, WINDOWS, context)
    assert len(calls) == 6  # those of the compressed model


def test_kept_states_are_read_and_missing_ones_are_made_again(tmp_path: Path) -> None:
    model = tiny_model("gpt2")
    context = RunContext(batch_size=4, cache=Cache(tmp_path, Progress()))
    losses, first = source_of(model, context)
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    passes: list[int] = []
    handle = model.transformer.h[0].register_forward_hook(lambda *_: passes.append(1))
    again, second = source_of(model, context)
    assert not passes
    assert torch.equal(again.nats, losses.nats)
    assert all(map(torch.equal, first.states, second.states))
    largest = max(tmp_path.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    largest.unlink()
    again, third = source_of(model, context)
    assert passes
    assert torch.equal(again.nats, losses.nats)
    assert all(map(torch.equal, first.states, third.states))
    handle.remove()


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "opt"])
def test_weights_on_disk_give_the_same(family: str, tmp_path: Path) -> None:
    save_tiny(family, tmp_path)
    found = []
    for low_memory in (False, True):
        model = load_model(str(tmp_path), low_memory=low_memory)[0]
        context = RunContext(batch_size=4)
        fits = damage(model)
        losses, reference = source_of(model, context)
        with patched(model, find_blocks(model), fits):
            after, fidelity = evaluate_against(model, reference, WINDOWS, context)
        found.append((losses.nats, after.nats, fidelity.kl, fidelity.agrees))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


# Intervals


def made(windows: int, generator: torch.Generator, tokens: int = 50) -> Fidelity:
    """Skewed divergences: a few windows have most of it. The mean is 0.02; a tenth of the tokens disagree."""
    spread = torch.exp(0.8 * torch.randn(windows, 1, generator=generator) - 0.32)
    kl = 0.02 * spread * torch.empty(windows, tokens).exponential_(generator=generator)
    rate = (0.1 * torch.exp(0.5 * torch.randn(windows, 1, generator=generator) - 0.125)).clamp_max(1.0)
    return Fidelity(kl, torch.rand(windows, tokens, generator=generator) >= rate)


def test_intervals_cover_the_truth_and_stay_inside_what_is_possible() -> None:
    generator = torch.Generator().manual_seed(0)
    covered = {"kl": 0, "agreement": 0, "upper": 0}
    for seed in range(200):
        found = compare_fidelity(made(32, generator), seed=seed)
        assert 0 < found.kl_ci95[0] < found.kl < found.kl_ci95[1]
        assert 0 < found.top1_agreement_ci95[0] < found.top1_agreement < found.top1_agreement_ci95[1] < 1
        covered["kl"] += found.kl_ci95[0] <= 0.02 <= found.kl_ci95[1]
        covered["upper"] += found.kl_upper >= 0.02
        covered["agreement"] += found.top1_agreement_ci95[0] <= 0.9 <= found.top1_agreement_ci95[1]
    assert covered["kl"] >= 186
    assert covered["upper"] >= 190
    assert covered["agreement"] >= 186


@pytest.mark.parametrize("windows", [1, 2, 3, 8, 16])
def test_few_windows_have_wide_intervals(windows: int) -> None:
    found = compare_fidelity(made(windows, torch.Generator().manual_seed(windows)))
    low, high = found.kl_ci95
    assert 0 <= low <= found.kl <= high
    assert found.kl_upper == pytest.approx(high) or windows == 1
    assert (high == math.inf) == (windows == 1)
    assert 0 <= found.top1_agreement_ci95[0] <= found.top1_agreement <= found.top1_agreement_ci95[1] <= 1
    point = compare_fidelity(made(windows, torch.Generator().manual_seed(windows)), confidence=0)
    assert point.kl_upper == pytest.approx(point.kl)


def test_documents_are_the_units_where_there_are_enough() -> None:
    fidelity = made(64, torch.Generator().manual_seed(1))
    of_windows = compare_fidelity(fidelity)
    of_documents = compare_fidelity(fidelity, documents=torch.arange(64) // 4)
    assert (of_documents.unit, of_documents.units, of_documents.kl) == ("document", 16, of_windows.kl)
    assert compare_fidelity(fidelity, documents=torch.arange(64) // 32).unit == "window"


# The evaluator


def assess(max_kl: float | None, budget: Budget, cache: Path | None = None) -> tuple[Assessment, Measured]:
    model, context = tiny_model("gpt2"), RunContext(batch_size=4, cache=Cache(cache, Progress()))
    evaluator = Evaluator(TEXT, tiny_tokenizer(), {"text": budget}, max_kl=max_kl, context=context)
    fits = damage(model)
    source = evaluator.measure(model, "source", identify(model))
    identity = identify_patched(model, fits)
    with patched(model, find_blocks(model), fits):
        after = evaluator.measure(model, "compressed", identity, source)
    assert source.fidelity is None
    return evaluator.assess(source, after, model, identity), after


def test_a_limit_is_a_check_and_without_one_it_is_only_reported(tmp_path: Path) -> None:
    assessment, after = assess(None, Budget(1e6), tmp_path)
    assert [check.name for check in assessment.checks] == ["perplexity text"]
    assert assessment.fidelity is not None
    found = assessment.text_fidelity["text"]
    assert found == assessment.fidelity
    assert after.fidelity is not None
    assert found.kl == pytest.approx(after.fidelity.kl.double().mean().item())
    inside, _ = assess(2 * found.kl_upper, Budget(1e6), tmp_path)  # from the cache, where all of it is
    assert [(check.name, check.passed) for check in inside.checks] == [("perplexity text", True), ("kl text", True)]
    assert inside.text_fidelity == assessment.text_fidelity
    outside, _ = assess(found.kl, Budget(math.inf), tmp_path)  # the estimate is inside, its upper end is not
    assert [(check.name, check.passed, check.limit) for check in outside.checks] == [("kl text", False, found.kl)]
    assert outside.checks[0].measured == found.kl_upper
    assert not outside.passed
