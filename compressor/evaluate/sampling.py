"""What a model writes after a prompt: greedily, or sampled with random numbers that another model can be given too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compressor.models.offload import device_of
from compressor.models.writer import Writer, choose_tokens
from compressor.runtime.errors import InputError, NumericsError
from compressor.text import bos_prefix


@torch.no_grad()
def continue_prompt(model: Any, tokenizer: Any, prompt: Tensor, uniforms: Tensor, temperature: float) -> list[int]:
    """The tokens that a model writes after a prompt, one for every uniform number, or fewer where it ends the text.

    At temperature 0 it is always the most likely token. Two models that are given the same numbers differ only where
    their probabilities do.
    """
    ends = set(Writer(model, tokenizer).end_tokens)
    ids, past, written = prompt[None].to(device_of(model)), None, []
    for uniform in uniforms:
        output = model(input_ids=ids, past_key_values=past, use_cache=True)
        past, logits = output.past_key_values, output.logits[:, -1]
        if not logits.isfinite().any():
            raise NumericsError("the model's logits are not finite; try --dtype float32")
        chosen = logits.argmax(-1) if temperature == 0 else choose_tokens(logits / temperature, uniform[None])
        token = int(chosen)
        if token in ends:
            break
        written.append(token)
        ids = chosen[:, None].to(ids.device)
    return written


def encode_prompt(prompt: str, tokenizer: Any, chat: bool) -> list[int]:
    """The tokens of a prompt as the model is asked for a continuation; with `chat` as a user's message."""
    if not chat:
        ids: list[int] = bos_prefix(tokenizer) + tokenizer(prompt, add_special_tokens=False)["input_ids"]
        return ids
    if not getattr(tokenizer, "chat_template", None):
        raise InputError("--chat needs a tokenizer with a chat template, and this one has none; leave --chat out")
    message = [{"role": "user", "content": prompt}]
    try:
        words = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # whatever a template raises that came with the model
        raise InputError(f"the model's chat template cannot be used: {error}; leave --chat out") from error
    ids = tokenizer(words, add_special_tokens=False)["input_ids"]
    return ids
