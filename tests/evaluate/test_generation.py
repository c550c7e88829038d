"""Greedy continuations against a plain loop, what is counted in them, and when a reader is warned."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from planted import random_text
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from zoo import REPRESENTATIVE, TEXT, VOCAB, compressed, tiny_model, tiny_tokenizer

from compressor.evaluate.breakdown import LossBreakdown
from compressor.evaluate.evaluator import Assessment
from compressor.evaluate.generation import (
    PROMPTS,
    compare_continuations,
    continue_greedily,
    distinct_share,
    opening_prompts,
    predict_along,
    read_prompts,
)
from compressor.evaluate.perplexity import PerplexityChange
from compressor.runtime.errors import InputError
from compressor.runtime.progress import Progress

TOKENS = 5


def prompts_of(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(1, VOCAB, (length,), generator=generator) for length in lengths]


@torch.no_grad()
def by_hand(model: Any, prompt: Tensor, tokens: int) -> list[int]:
    """The whole sequence again for every token, without a cache."""
    ids = prompt[None]
    for _ in range(tokens):
        chosen = model(input_ids=ids, use_cache=False).logits[0, -1].argmax()
        ids = torch.cat([ids, chosen[None, None]], dim=1)
    return ids[0, len(prompt) :].tolist()


def forgetful(model: Any, prompt: Tensor, tokens: int) -> list[int]:
    """What would be written if the cache were lost at every token."""
    words = [int(prompt[-1])]
    for _ in range(tokens):
        words += by_hand(model, torch.tensor(words[-1:]), 1)
    return words[1:]


def written_by(model: Any, prompts: Sequence[Tensor], tokens: int = TOKENS) -> Tensor:
    return continue_greedily(model, prompts, tokens, Progress(), "writes")


def along(model: Any, prompts: Sequence[Tensor], written: Tensor) -> Tensor:
    return predict_along(model, prompts, written, Progress(), "agrees")


# Continuations


@torch.no_grad()
def talkative(family: str) -> Any:
    """A tiny model whose next word depends on more than the last one: its layers count for more."""
    model = tiny_model(family)
    words = {id(layer.weight) for layer in (model.get_input_embeddings(), model.get_output_embeddings())}
    for parameter in model.parameters():
        if parameter.ndim == 2 and id(parameter) not in words:
            parameter.mul_(2)
    return model


@pytest.mark.parametrize("family", REPRESENTATIVE)
def test_every_family_continues_as_without_a_cache(family: str) -> None:
    """Prompts of different lengths, two of the same; and the model agrees with what it wrote itself."""
    model, prompts = talkative(family), prompts_of(5, 2, 5)
    written = written_by(model, prompts)
    assert written.tolist() == [by_hand(model, prompt, TOKENS) for prompt in prompts]
    assert torch.equal(along(model, prompts, written), written)
    assert all(row != forgetful(model, prompt, TOKENS) for row, prompt in zip(written.tolist(), prompts, strict=True))


@pytest.mark.parametrize("family", ["gpt2", "llama", "opt"])
def test_a_compressed_model_continues_as_without_a_cache(family: str) -> None:
    model, prompts = compressed(family), prompts_of(3, 8)
    assert written_by(model, prompts).tolist() == [by_hand(model, prompt, TOKENS) for prompt in prompts]


def test_the_prompt_is_read_once() -> None:
    """One forward pass over prompts of the same length, then one token at a time."""
    model, shapes = tiny_model("llama"), []
    model.register_forward_pre_hook(lambda _, __, given: shapes.append(given["input_ids"].shape), with_kwargs=True)
    written_by(model, prompts_of(7, 4, 7), tokens=3)
    assert shapes == [(1, 4), (1, 1), (1, 1), (2, 7), (2, 1), (2, 1)]


def test_the_other_prompts_do_not_matter() -> None:
    model, prompts = tiny_model("gpt2"), prompts_of(4, 11, 4, 6)
    alone = torch.cat([written_by(model, [prompt]) for prompt in prompts])
    assert torch.equal(written_by(model, prompts), alone)
    assert torch.equal(written_by(model, prompts[::-1]), alone.flip(0))


def test_an_end_of_text_does_not_end_it() -> None:
    model, prompts = tiny_model("gpt2"), prompts_of(4)
    free = written_by(model, prompts)
    model.config.eos_token_id = model.generation_config.eos_token_id = int(free[0, 0])
    assert torch.equal(written_by(model, prompts), free)


def test_a_model_agrees_with_itself() -> None:
    model, prompts = tiny_model("gpt2"), prompts_of(5, 8, 5)
    written = written_by(model, prompts)
    found = compare_continuations(tiny_tokenizer(), prompts, written, written, along(model, prompts, written))
    assert (found.agreement, found.same_prefix) == (1.0, TOKENS)
    assert (found.prompts, found.tokens) == (3, TOKENS)
    assert all(first == second for first, second in [*found.distinct.values(), found.repetition])
    assert found.rise_ci95 == (0.0, 0.0)
    assert found.warnings == []
    for sample, prompt in zip(found.samples, prompts, strict=True):
        assert (sample.agreement, sample.first_difference) == (1.0, None)
        assert sample.source == sample.compressed
        assert sample.prompt == tiny_tokenizer().decode(prompt)


def test_two_models_are_told_apart() -> None:
    """Counted by hand: the agreement is along the source's words, the first difference between both own ones."""
    source, other, prompts = tiny_model("gpt2"), compressed("gpt2"), prompts_of(5, 8, 3)
    first, second = written_by(source, prompts), written_by(other, prompts)
    found = compare_continuations(tiny_tokenizer(), prompts, first, second, along(other, prompts, first))
    same = [[a == b for a, b in zip(*rows, strict=True)] for rows in zip(first.tolist(), second.tolist(), strict=True)]
    parted = [row.index(False) if False in row else None for row in same]
    assert [sample.first_difference for sample in found.samples] == parted
    assert any(place is not None for place in parted)
    hits = [
        by_hand(other, torch.cat([prompt, row[:place]]), 1)[0] == row[place].item()
        for prompt, row in zip(prompts, first, strict=True)
        for place in range(TOKENS)
    ]
    assert found.agreement == pytest.approx(sum(hits) / len(hits))
    assert [sample.source for sample in found.samples] == [tiny_tokenizer().decode(row) for row in first]
    assert [sample.compressed for sample in found.samples] == [tiny_tokenizer().decode(row) for row in second]


# What is counted


@pytest.mark.parametrize(
    ("row", "size", "share"),
    [
        ([1, 2, 3, 4, 5], 1, 1.0),
        ([1, 2, 1, 2], 1, 0.5),
        ([1, 2, 1, 2], 2, 2 / 3),  # 12 21 12
        ([1, 2, 3, 1, 2, 3, 1], 3, 3 / 5),  # 123 231 312 123 231
        ([7] * 8, 4, 1 / 5),
        ([1, 2], 3, 1.0),  # too short to repeat anything
    ],
)
def test_distinct_runs(row: list[int], size: int, share: float) -> None:
    assert distinct_share(torch.tensor(row), size) == pytest.approx(share)


VARIED = torch.arange(6 * 24).reshape(6, 24)
LOOPING = torch.tensor([5, 6]).repeat(6, 12)


def compare(source: Tensor, compressed: Tensor, agreed: Tensor | None = None) -> Any:
    prompts = prompts_of(*[3] * len(source))
    return compare_continuations(tiny_tokenizer(), prompts, source, compressed, source if agreed is None else agreed)


def test_known_figures_of_a_loop() -> None:
    """24 tokens are 21 runs of four, of which a loop of two has two; and 23 pairs, of which it has two."""
    found = compare(VARIED, LOOPING)
    assert found.repetition == pytest.approx((0.0, 19 / 21))
    assert found.distinct[1] == pytest.approx((1.0, 2 / 24))
    assert found.distinct[2] == pytest.approx((1.0, 2 / 23))
    assert found.distinct[3] == pytest.approx((1.0, 2 / 22))
    assert found.rise_ci95 == pytest.approx((19 / 21, 19 / 21))
    assert (found.same_prefix, found.agreement) == (0.0, 1.0)


def test_a_loop_that_the_source_does_not_have_is_told() -> None:
    repeats, bland = compare(VARIED, LOOPING).warnings
    assert repeats.startswith("it repeats itself more than its source (+0.90")
    assert bland.startswith("its words are less varied than its source's (+0.91")


def test_what_the_source_does_too_is_not_told() -> None:
    assert compare(LOOPING, LOOPING).warnings == []
    assert compare(LOOPING, VARIED, LOOPING).warnings == []  # better than its source
    assert compare(VARIED, VARIED.flip(1)).warnings == []  # other words, as varied


def test_one_loop_among_many_is_not_told() -> None:
    """Of 16 continuations one loops: a source has such a one too, now and then."""
    varied = torch.arange(16 * 24).reshape(16, 24)
    one = varied.clone()
    one[3] = LOOPING[0]
    assert compare(varied, one).warnings == []
    one[4:12] = LOOPING[0]
    assert len(compare(varied, one).warnings) == 2


def test_loops_that_come_and_go_are_not_told() -> None:
    """Half of them stop and most of the others begin: more on average, but that may be chance."""
    source, other = VARIED[:4].clone(), VARIED[:4].clone()
    source[2] = other[0] = other[3] = LOOPING[0]
    found = compare(source, other)
    assert found.repetition[1] - found.repetition[0] > 0.2
    assert found.rise_ci95[0] < 0
    assert found.warnings == []


def test_picking_other_words_is_told() -> None:
    agreed = VARIED.clone()
    agreed[:, :14] = 0
    assert compare(VARIED, VARIED, agreed).warnings == ["it picks its source's next token in only 42% of places"]
    agreed[:, 10:14] = VARIED[:, 10:14]
    assert compare(VARIED, VARIED, agreed).warnings == []


@pytest.mark.parametrize(("upper", "begins"), [(0.5, "perplexity is fine, its text is not: it"), (2.0, "its text: it")])
def test_a_warning_says_whether_perplexity_saw_it(upper: float, begins: str) -> None:
    found = PerplexityChange(20.0, 20.4, 0.4, (0.3, 0.5), upper, 0.05, 100, 32, "window", 16, 1)
    said = compare(VARIED, LOOPING)
    assessment = Assessment(found, {"text": found}, {"text": 1.0}, {}, {}, said, LossBreakdown([], [], []))
    assert len(assessment.warnings) == len(said.warnings)
    assert assessment.warnings[0].startswith(begins)


# Prompts


def test_prompts_of_a_file(tmp_path: Path) -> None:
    """One per line; blank lines do not count, and space at the ends of a line is dropped."""
    file, tokenizer = tmp_path / "prompts.txt", tiny_tokenizer()
    file.write_text("\nCall me\n\n  \t\n  the watery part \r\nwörld\n\n", encoding="utf-8")
    prompts = read_prompts(str(file), tokenizer, 8, 64)
    assert [tokenizer.decode(prompt) for prompt in prompts] == ["Call me", "the watery part", "wörld"]


def test_prompts_begin_as_windows_do(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    bos = tokenizer.bos_token_id
    template = TemplateProcessing(single="<end> $A", special_tokens=[("<end>", bos)])
    tokenizer.backend_tokenizer.post_processor = template
    file = tmp_path / "prompts.txt"
    file.write_text("Call me\n\n", encoding="utf-8")
    (prompt,) = read_prompts(str(file), tokenizer, 8, 64)
    assert prompt.tolist() == [bos, *tiny_tokenizer()("Call me")["input_ids"]]


@pytest.mark.parametrize("content", [b"", b"\n \n\t\n"])
def test_a_file_without_prompts_is_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(content)
    with pytest.raises(InputError, match=r"prompts\.txt"):
        read_prompts(str(file), tiny_tokenizer(), 8, 64)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist; give a file with one prompt per line"):
        read_prompts(str(tmp_path / "none.txt"), tiny_tokenizer(), 8, 64)


def test_a_prompt_beyond_the_context_is_refused(tmp_path: Path) -> None:
    """To the token: what fits is taken, one more is refused with its line."""
    file, tokenizer = tmp_path / "prompts.txt", tiny_tokenizer()
    line = " ".join(TEXT.split()[:12])
    file.write_text(f"Call me\n\n{line}\n", encoding="utf-8")
    length = len(tokenizer(line)["input_ids"])
    assert [len(prompt) for prompt in read_prompts(str(file), tokenizer, 8, length + 8)][1] == length
    assert len(read_prompts(str(file), tokenizer, 8, None)) == 2
    with pytest.raises(InputError, match=f"prompt 3 of .* has {length} tokens; with --generate 9 .* {length + 8}"):
        read_prompts(str(file), tokenizer, 9, length + 8)


def test_opening_prompts_are_spread_over_the_verification_text() -> None:
    text = random_text(verification=46)
    prompts = torch.stack(opening_prompts(text, 48, 64))
    assert prompts.shape == (PROMPTS, 16)  # half a window
    assert torch.equal(prompts, text.verification.windows[::3, :16])
    assert [len(prompt) for prompt in opening_prompts(text, 60, 64)] == [4] * PROMPTS  # what the context leaves
    assert len(opening_prompts(random_text(verification=5), 48, None)) == 5
    with pytest.raises(InputError, match="--generate 64 leaves no room"):
        opening_prompts(text, 64, 64)
