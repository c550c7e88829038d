"""Perplexity and its interval against direct computation."""

from __future__ import annotations

import math

import pytest
import torch
from planted import random_text
from torch import Tensor
from zoo import FAMILIES, tiny_model

from compressor.evaluate import perplexity as evaluating
from compressor.evaluate.perplexity import Losses, compare, evaluate, has_plain_head
from compressor.runtime.context import RunContext
from compressor.runtime.errors import InputError


def spread(sums: Tensor, tokens: int = 100) -> Losses:
    """Windows whose nats sum to these, spread evenly over their tokens."""
    return Losses((sums / tokens)[:, None].expand(-1, tokens))


def test_perplexity_sums_first_and_divides_once() -> None:
    model, windows = tiny_model("gpt2"), random_text().selection.windows
    losses = evaluate(model, windows, RunContext(batch_size=7))
    with torch.no_grad():
        scores = model(windows).logits[:, :-1].log_softmax(-1)
    nats = -scores.gather(-1, windows[:, 1:, None]).double().sum()
    assert losses.perplexity == pytest.approx(math.exp(nats / windows[:, 1:].numel()), rel=1e-5)
    assert losses.nats.numel() == windows[:, 1:].numel()


def test_batches_do_not_change_the_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    model, windows = tiny_model("llama"), random_text().selection.windows
    whole = evaluate(model, windows, RunContext(batch_size=24))
    monkeypatch.setattr(evaluating, "LOGITS_BYTES", 1)  # forces one window at a time
    torch.testing.assert_close(
        evaluate(model, windows, RunContext(batch_size=24)).nats, whole.nats, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_the_shorter_way_through_a_plain_head_gives_the_same_losses(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, windows = tiny_model(family), random_text().selection.windows[:9]
    own = evaluate(model, windows, RunContext(batch_size=4)).nats
    monkeypatch.setattr(evaluating, "CHUNK_LOGITS", 31 * 4 * 77)  # 77 words of the vocabulary at a time
    if has_plain_head(model, windows):
        torch.testing.assert_close(
            evaluate(model, windows, RunContext(batch_size=4), plain=True).nats, own, rtol=1e-5, atol=1e-5
        )
    torch.testing.assert_close(evaluate(model, windows, RunContext(batch_size=4)).nats, own, rtol=1e-5, atol=1e-5)


def test_a_head_that_does_more_is_left_to_the_model() -> None:
    windows = random_text().selection.windows
    assert has_plain_head(tiny_model("llama"), windows)
    assert has_plain_head(tiny_model("gpt2"), windows)
    assert not has_plain_head(tiny_model("gemma2"), windows)  # caps its logits
    assert not has_plain_head(tiny_model("cohere"), windows)  # scales them


def test_the_interval_is_paired_and_covers_the_truth() -> None:
    """Windows differ wildly, the difference hardly: a paired interval is narrow, and right 95 times in a hundred."""
    generator = torch.Generator().manual_seed(0)
    hits = 0
    for seed in range(200):
        base = 300 + 60 * torch.randn(50, generator=generator, dtype=torch.float64)
        change = 1.0 + 2.0 * torch.randn(50, generator=generator, dtype=torch.float64)
        found = compare(spread(base), spread(base + change), seed=seed)
        low, high = found.delta_ci95
        assert low < found.delta < high
        assert high - low < 1.0  # unpaired it would be over 6
        truth = found.baseline * math.expm1(0.01)
        hits += low <= truth <= high
    assert 180 <= hits <= 199


def test_confidence_sets_the_upper_end() -> None:
    generator = torch.Generator().manual_seed(1)
    sums = 300 + torch.randn(40, generator=generator, dtype=torch.float64)
    before = spread(sums)
    after = spread(sums + torch.randn(40, generator=generator, dtype=torch.float64))
    ends = [compare(before, after, confidence).upper for confidence in (0.0, 0.5, 0.95, 0.99)]
    assert ends == sorted(ends)
    assert ends[0] == compare(before, after).delta
    assert ends[2] == compare(before, after).delta_ci95[1]
    assert compare(before, after, seed=3) == compare(before, after, seed=3)


def test_an_overflowing_model_is_refused() -> None:
    model = tiny_model("gpt2")
    with torch.no_grad():
        model.transformer.ln_f.weight.fill_(torch.inf)
    with pytest.raises(InputError, match="window 0"):
        evaluate(model, random_text().selection.windows)
