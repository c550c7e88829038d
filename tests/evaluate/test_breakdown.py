"""Where it hurts: planted damage must show up in its own band and window, and nowhere else."""

from __future__ import annotations

import math

import pytest
import torch
from planted import SEQ_LEN, random_text
from torch import Tensor
from zoo import VOCAB, tiny_tokenizer

from compressor.evaluate.breakdown import (
    WORST_WINDOWS,
    Band,
    break_down,
    find_worst_windows,
    frequency_masks,
    measure_bands,
    position_masks,
)
from compressor.evaluate.perplexity import Losses
from compressor.text import Split, Text

FREQUENT, NEXT, LATER, RARE, UNSEEN = (
    *("rank 1–10", "rank 11–100", "rank 101–1,000", "rank beyond 1,000"),
    "not in the calibration text",
)


def split(windows: Tensor) -> Split:
    return Split(windows, "planted")


def skewed_text(vocabulary: int = 3000) -> Text:
    """Frequencies like those of words: every band is there, and tokens that the calibration text has not seen."""
    generator = torch.Generator().manual_seed(0)
    weights = 1 / torch.arange(1, vocabulary + 1).double() ** 0.7
    names = torch.randperm(vocabulary, generator=generator)  # a token's number says nothing about its frequency

    def draw(count: int) -> Split:
        ids = torch.multinomial(weights, count * SEQ_LEN, replacement=True, generator=generator)
        return split(names[ids].reshape(count, SEQ_LEN))

    return Text(draw(150), draw(50), draw(40))


def random_losses(text: Text, seed: int = 1) -> Losses:
    windows = text.verification.windows
    shape = (len(windows), windows.shape[1] - 1)
    return Losses(torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 5)


def shares(found: list[Band]) -> dict[str, float]:
    return {band.band: band.share for band in found}


@pytest.mark.parametrize("text", [skewed_text(), random_text()], ids=["skewed", "random"])
def test_bands_partition_the_predicted_tokens(text: Text) -> None:
    before, after = random_losses(text), random_losses(text, seed=2)
    for masks in (frequency_masks(text), position_masks(text.verification.windows)):
        stacked = torch.stack([mask.expand_as(before.nats) for _, mask in masks])
        assert torch.equal(stacked.sum(0), torch.ones_like(before.nats, dtype=torch.long))
        assert len({name for name, _ in masks}) == len(masks)
    found = break_down(text, before, after, tiny_tokenizer())
    rise = after.nats.double().sum() - before.nats.double().sum()
    for cut in (found.frequency, found.position):
        assert sum(band.tokens for band in cut) == before.nats.numel()
        assert sum(band.share for band in cut) == pytest.approx(1.0)
        # the bands hold all of the loss, not only all of the tokens
        for losses, key in ((before, "baseline"), (after, "compressed")):
            nats = sum(band.tokens * math.log(getattr(band, key)) for band in cut)
            assert nats == pytest.approx(losses.nats.double().sum().item())
        nats = [band.tokens * math.log(band.compressed / band.baseline) for band in cut]
        assert [band.share for band in cut] == pytest.approx([n / rise.item() for n in nats])


def test_every_frequency_band_is_there() -> None:
    found = [name for name, mask in frequency_masks(skewed_text()) if mask.any()]
    assert found == [FREQUENT, NEXT, LATER, RARE, UNSEEN]


def test_frequency_is_that_of_calibration_and_selection() -> None:
    """Token t stands 40 − t times in the calibration text, but the selection text makes token 30 the first."""
    counts = torch.tensor([40 - token for token in range(40)])
    seen = torch.arange(40).repeat_interleave(counts)
    calibration = seen[: len(seen) // 4 * 4].reshape(-1, 4)
    selection = torch.full((20, 4), 30)
    verification = torch.tensor([[99, 30, 0, 8], [99, 9, 38, 45], [0, 50, 30, 30]])
    text = Text(split(calibration), split(selection), split(verification))
    masks = dict(frequency_masks(text))
    assert masks[FREQUENT].tolist() == [[True, True, True], [False, False, False], [False, True, True]]
    assert masks[NEXT].tolist() == [[False] * 3, [True, True, False], [False] * 3]
    assert masks[UNSEEN].tolist() == [[False] * 3, [False, False, True], [True, False, False]]
    assert not masks[RARE].any()


@pytest.mark.parametrize("name", [FREQUENT, RARE, UNSEEN])
def test_damage_to_tokens_of_one_frequency(name: str) -> None:
    """Two nats more on every token of one band: that band pays all, the others nothing."""
    text = skewed_text()
    before = random_losses(text)
    mask = dict(frequency_masks(text))[name]
    found = break_down(text, before, Losses(before.nats + 2 * mask), tiny_tokenizer())
    for band in found.frequency:
        hit = band.band == name
        assert band.share == pytest.approx(float(hit), abs=1e-6)
        assert band.compressed / band.baseline == pytest.approx(math.e**2 if hit else 1.0, rel=1e-5)


def test_damage_to_rare_tokens_is_found_by_the_token() -> None:
    """Which tokens are hit is decided here by counting, not by the code under test."""
    text = skewed_text()
    seen = torch.cat([text.calibration.windows.flatten(), text.selection.windows.flatten()]).tolist()
    counts = {token: seen.count(token) for token in text.verification.windows[:, 1:].flatten().unique().tolist()}
    once = torch.tensor([[counts[t] == 1 for t in row] for row in text.verification.windows[:, 1:].tolist()])
    assert once.any()
    before = random_losses(text)
    found = shares(break_down(text, before, Losses(before.nats + once), tiny_tokenizer()).frequency)
    assert found[RARE] == pytest.approx(1.0)


def test_damage_to_late_positions() -> None:
    text = random_text()
    before = random_losses(text)
    after = before.nats.clone()
    after[:, 15:] += 1  # predicted from 16 tokens and more
    found = break_down(text, before, Losses(after), tiny_tokenizer()).position
    assert [band.band for band in found] == ["1", "2–3", "4–7", "8–15", "16–31"]
    assert [band.tokens // len(before.nats) for band in found] == [1, 2, 4, 8, 16]
    assert [band.share for band in found] == pytest.approx([0, 0, 0, 0, 1], abs=1e-6)


def test_damage_to_the_first_prediction() -> None:
    text = random_text()
    before = random_losses(text)
    after = before.nats.clone()
    after[:, 0] += 1
    assert shares(break_down(text, before, Losses(after), tiny_tokenizer()).position)["1"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("length", "names"),
    [(2, ["1"]), (3, ["1", "2"]), (4, ["1", "2–3"]), (10, ["1", "2–3", "4–7", "8–9"]), (9, ["1", "2–3", "4–7", "8"])],
)
def test_position_bands_end_with_the_window(length: int, names: list[str]) -> None:
    masks = position_masks(torch.zeros(3, length, dtype=torch.long))
    assert [name for name, _ in masks] == names
    assert sum(int(mask.sum()) for _, mask in masks) == 3 * (length - 1)


def test_no_rise_has_no_shares() -> None:
    text = random_text()
    losses = random_losses(text)
    found = break_down(text, losses, losses, tiny_tokenizer())
    assert {band.share for band in (*found.frequency, *found.position)} == {0.0}
    assert all(band.baseline == band.compressed for band in found.frequency)
    assert {window.nats for window in found.windows} == {0.0}


def test_a_band_without_tokens_is_left_out() -> None:
    losses = Losses(torch.ones(2, 3))
    none, every = torch.zeros(2, 3, dtype=torch.bool), torch.ones(2, 3, dtype=torch.bool)
    assert [band.band for band in measure_bands([("none", none), ("all", every)], losses, losses)] == ["all"]


def test_the_ten_worst_windows_in_order() -> None:
    """Window i loses `order[i]` nats, most of them at one place of its own."""
    text, tokenizer = random_text(), tiny_tokenizer()
    windows = text.verification.windows
    count = len(windows)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(3))
    before = random_losses(text)
    after = before.nats.clone()
    for i in range(count):
        after[i, i % 31] += 0.6 * order[i]
        after[i, (i + 7) % 31] += 0.3 * order[i]
        after[i, (i + 11) % 31] += 0.1 * order[i]
    found = find_worst_windows(text, before, Losses(after), tokenizer)
    worst = order.argsort(descending=True)[:WORST_WINDOWS].tolist()
    assert WORST_WINDOWS == len(found) == 10
    assert [window.window for window in found] == worst
    assert [window.nats for window in found] == pytest.approx(
        [float(count - 1 - place) for place in range(10)], rel=1e-4
    )
    for window in found:
        i = window.window
        assert window.text_name == "text"
        assert window.excerpt == tokenizer.decode(windows[i], skip_special_tokens=True)
        assert window.baseline == pytest.approx(before.nats[i].mean().exp().item(), rel=1e-5)
        assert window.compressed == pytest.approx(after[i].mean().exp().item(), rel=1e-5)
        places = [i % 31, (i + 7) % 31, (i + 11) % 31]
        assert [token for token, _ in window.worst] == [tokenizer.decode([windows[i, k + 1].item()]) for k in places]
        lost = [share * order[i].item() for share in (0.6, 0.3, 0.1)]
        assert [nats for _, nats in window.worst] == pytest.approx(lost, rel=1e-3)


def test_worst_windows_are_counted_in_their_own_text() -> None:
    drawn = random_text(verification=9)
    names = {"wiki": (12, 5), "code": (12, 4)}
    text = Text(drawn.calibration, drawn.selection, drawn.verification, names)
    before = random_losses(text)
    after = before.nats.clone()
    for place, i in enumerate([6, 0, 4, 5, 8]):
        after[i] += 5 - place
    found = find_worst_windows(text, before, Losses(after), tiny_tokenizer())
    first = [(window.text_name, window.window) for window in found[:5]]
    assert first == [("code", 1), ("wiki", 0), ("wiki", 4), ("code", 0), ("code", 3)]
    assert len(found) == 9  # as many as there are
    assert found[0].excerpt == tiny_tokenizer().decode(text.verification.windows[6], skip_special_tokens=True)


def test_a_text_of_few_windows_and_a_small_vocabulary() -> None:
    windows = torch.randint(VOCAB, (2, 2), generator=torch.Generator().manual_seed(5))
    text = Text(split(windows), split(windows[:1]), split(windows))
    found = break_down(text, Losses(torch.ones(2, 1)), Losses(torch.full((2, 1), 2.0)), tiny_tokenizer())
    assert [(band.band, band.tokens, band.share) for band in found.frequency] == [(FREQUENT, 2, 1.0)]
    assert len(found.windows) == 2
    assert [len(window.worst) for window in found.windows] == [1, 1]
