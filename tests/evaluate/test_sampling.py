"""What a model writes after a prompt: its own greedy tokens, or tokens drawn by numbers that two models can share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from zoo import tiny_model, tiny_tokenizer

from compressor.evaluate.sampling import continue_prompt, encode_prompt
from compressor.runtime.errors import InputError

PROMPT = torch.tensor([5, 9, 260, 17])


def numbers(count: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def write(model: Any, temperature: float, seed: int = 0, tokens: int = 12) -> list[int]:
    return continue_prompt(model, tiny_tokenizer(), PROMPT, numbers(tokens, seed), temperature)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_at_temperature_0_it_is_what_generate_writes(family: str) -> None:
    model = tiny_model(family)
    generated = model.generate(
        PROMPT[None], attention_mask=torch.ones(1, 4, dtype=torch.long), max_new_tokens=12, do_sample=False
    )
    expected = generated[0, 4:].tolist()
    assert write(model, 0.0) == expected[: expected.index(0) if 0 in expected else None]  # 0 ends a text


def test_the_same_numbers_give_the_same_text_and_others_another() -> None:
    model = tiny_model("gpt2")
    assert write(model, 1.0, seed=1) == write(model, 1.0, seed=1)
    assert write(model, 1.0, seed=1) != write(model, 1.0, seed=2)
    assert write(model, 1e-4, seed=1) == write(model, 0.0)  # cold enough, it is greedy


def test_an_end_token_ends_it() -> None:
    model = tiny_model("gpt2")
    whole = write(model, 1.0)
    end = whole[-1]
    model.generation_config.eos_token_id = [end]
    assert write(model, 1.0) == whole[: whole.index(end)] != whole


def test_a_chat_is_a_message_in_the_model_s_own_form() -> None:
    tokenizer = tiny_tokenizer()
    expected = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], add_generation_prompt=True, tokenize=False
    )
    assert tokenizer.decode(encode_prompt("hello", tokenizer, chat=True)) == expected != "hello"
    assert tokenizer.decode(encode_prompt("hello", tokenizer, chat=False)) == "hello"
    tokenizer.chat_template = None
    with pytest.raises(InputError, match="leave --chat out"):
        encode_prompt("hello", tokenizer, chat=True)
    tokenizer.chat_template = "{{ raise_exception('no system message') }}"
    with pytest.raises(InputError, match="chat template cannot be used"):
        encode_prompt("hello", tokenizer, chat=True)
