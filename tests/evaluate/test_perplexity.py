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


@pytest.mark.parametrize("windows", [2, 3, 8, 16])
@pytest.mark.parametrize("spread_of_windows", [0.0, 1.0, 200.0])
def test_an_interval_has_ends_however_the_windows_differ(windows: int, spread_of_windows: float) -> None:
    generator = torch.Generator().manual_seed(windows)
    sums = 300 + spread_of_windows * torch.randn(2, windows, generator=generator, dtype=torch.float64)
    found = compare(spread(sums[0]), spread(sums[1]))
    low, high = found.delta_ci95
    assert -1.001 * found.baseline <= low <= found.delta <= high
    assert found.upper == pytest.approx(high)


def test_one_window_has_no_interval() -> None:
    found = compare(spread(torch.tensor([300.0])), spread(torch.tensor([301.0])))
    assert found.delta_ci95 == (-math.inf, math.inf)
    assert found.upper == math.inf
    assert compare(spread(torch.tensor([300.0])), spread(torch.tensor([301.0])), confidence=0).upper == found.delta


def made_documents(count: int, windows: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of nats before and after: documents differ in what they lose, their windows hardly do."""
    numbers = torch.arange(count).repeat_interleave(windows)
    base = 300 + 5 * torch.randn(count * windows, generator=generator, dtype=torch.float64)
    lost = 1 + 2 * torch.randn(count, generator=generator, dtype=torch.float64)[numbers]
    return base, base + lost + 0.1 * torch.randn(count * windows, generator=generator, dtype=torch.float64), numbers


def test_documents_are_resampled_where_there_are_enough() -> None:
    """By window the interval misses the truth of other documents far too often; by document it does not."""
    generator = torch.Generator().manual_seed(0)
    missed = {"document": 0, "window": 0}
    for seed in range(200):
        before, after, numbers = made_documents(16, 6, generator)
        for documents in (numbers, None):
            found = compare(spread(before), spread(after), seed=seed, documents=documents)
            missed[found.unit] += found.upper < found.baseline * math.expm1(0.01)
            assert (found.units, found.documents) == ((16, 16) if documents is not None else (96, 1))
    assert missed["document"] <= 10
    assert missed["window"] >= 30


def test_few_documents_are_what_the_promise_is_about() -> None:
    before, after, numbers = made_documents(4, 8, torch.Generator().manual_seed(0))
    found = compare(spread(before), spread(after), documents=numbers)
    assert (found.unit, found.units, found.documents) == ("window", 32, 4)
    assert "these 4 documents" in found.scope
    assert found.weakness is None
    few = compare(spread(before[:12]), spread(after[:12]))
    assert "12 windows are fewer than the 16" in str(few.weakness)
    many = made_documents(20, 3, torch.Generator().manual_seed(0))
    assert "documents of the same kind as the 20" in compare(spread(many[0]), spread(many[1]), documents=many[2]).scope


def test_sixteen_windows_hold_the_level() -> None:
    """Of skewed losses, as real ones are: few windows lose much. A percentile bootstrap misses far more often."""
    generator = torch.Generator().manual_seed(3)
    missed = 0
    for seed in range(400):
        base = 300 + 40 * torch.randn(16, generator=generator, dtype=torch.float64)
        lost = torch.randn(16, generator=generator, dtype=torch.float64).mul(0.5).exp()  # mean exp(1/8)
        found = compare(spread(base), spread(base + lost), seed=seed)
        missed += found.upper < 20 * (math.exp(math.exp(0.125) / 100) - 1) * math.exp((base.mean().item() - 300) / 100)
    assert missed <= 16


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
