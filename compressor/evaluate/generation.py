"""Greedy continuations of the same prompts by two models, compared.

Perplexity is an average over given text; a model can hold it and still fall into loops when it writes by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor.evaluate.intervals import mean_interval
from compressor.models.offload import device_of
from compressor.runtime.errors import InputError
from compressor.runtime.figures import signed, signed_interval
from compressor.runtime.progress import Progress
from compressor.text import Text, bos_prefix, read_text_file

PROMPTS = 16
PROMPT_TOKENS = 32
REPEATED_TOKENS = 4  # as many tokens in a row that came before in the same text count as repetition
MORE_REPETITION = 0.1  # a rise in repetition, or fall in distinct pairs, that a reader would notice
LEAST_AGREEMENT = 0.5


@dataclass(frozen=True)
class Sample:
    """One prompt and what each model wrote."""

    prompt: str
    source: str
    compressed: str
    agreement: float
    first_difference: int | None


@dataclass(frozen=True)
class GenerationCheck:
    """How two models' continuations compare; (source, compressed) where there are two numbers."""

    prompts: int
    tokens: int
    agreement: float  # share of the source's tokens that the compressed model finds most likely at their place
    same_prefix: float  # tokens until the two texts differ, on average
    distinct: dict[int, tuple[float, float]]  # n → share of different n-grams
    repetition: tuple[float, float]
    rise_ci95: tuple[float, float]
    warnings: list[str]
    samples: list[Sample]


def opening_prompts(text: Text, tokens: int, context: int | None) -> list[Tensor]:
    """The beginnings of verification windows, evenly spread over a text that no replacement was fitted on."""
    windows = text.verification.windows
    length = min(PROMPT_TOKENS, text.seq_len // 2, (context or text.seq_len + tokens) - tokens)
    if length < 1:
        raise InputError(f"--generate {tokens} leaves no room for a prompt in the model's context of {context}")
    chosen = torch.linspace(0, len(windows) - 1, min(PROMPTS, len(windows))).round().long()
    return list(windows[chosen, :length])


def read_prompts(file: str, tokenizer: Any, tokens: int, context: int | None) -> list[Tensor]:
    """One prompt per line of a UTF-8 file."""
    path = Path(file).expanduser()
    if not path.is_file():
        raise InputError(f"--prompts {file} does not exist; give a file with one prompt per line")
    lines = [line.strip() for line in read_text_file(path).splitlines()]
    prefix = bos_prefix(tokenizer)
    prompts = []
    for number, line in enumerate(lines, start=1):
        ids = prefix + tokenizer(line, add_special_tokens=False)["input_ids"]
        if context is not None and len(ids) + tokens > context:
            raise InputError(
                f"prompt {number} of {file} has {len(ids)} tokens; with --generate {tokens} that is beyond the model's "
                f"context of {context}"
            )
        if line and ids:
            prompts.append(torch.tensor(ids))
    if not prompts:
        raise InputError(f"{file} holds no prompts; write one per line")
    return prompts


@torch.no_grad()
def continue_greedily(model: Any, prompts: Sequence[Tensor], tokens: int, progress: Progress, step: str) -> Tensor:
    """The most likely next token, again and again: [prompts, tokens]. An end-of-text token does not stop it."""
    written = torch.zeros(len(prompts), tokens, dtype=torch.long)
    lengths = sorted({len(prompt) for prompt in prompts})
    work = [(length, position) for length in lengths for position in range(tokens)]
    state: dict[str, Any] = {}
    for length, position in progress.track(step, work, len(work)):
        rows = [i for i, prompt in enumerate(prompts) if len(prompt) == length]
        if position == 0:
            state = {"input_ids": torch.stack([prompts[i] for i in rows]).to(device_of(model)), "past_key_values": None}
        output = model(**state, use_cache=True)
        chosen = output.logits[:, -1].argmax(-1)
        written[rows, position] = chosen.cpu()
        state = {"input_ids": chosen[:, None], "past_key_values": output.past_key_values}
    return written


@torch.no_grad()
def predict_along(model: Any, prompts: Sequence[Tensor], written: Tensor, progress: Progress, step: str) -> Tensor:
    """The model's own most likely token at every position of a given continuation: [prompts, tokens]."""
    choices = torch.zeros_like(written)
    for i, prompt in enumerate(progress.track(step, prompts, len(prompts))):
        ids = torch.cat([prompt, written[i]])[None, :-1].to(device_of(model))
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :]
        choices[i] = logits.argmax(-1).cpu()
    return choices


def ngrams(row: Tensor, size: int) -> list[tuple[int, ...]]:
    tokens = row.tolist()
    return [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]


def distinct_share(row: Tensor, size: int) -> float:
    """How many different n-grams of `size` tokens a text has, as a share of all of its n-grams."""
    grams = ngrams(row, size)
    return len(set(grams)) / len(grams) if grams else 1.0


def compare_continuations(
    tokenizer: Any, prompts: Sequence[Tensor], source: Tensor, compressed: Tensor, predicted: Tensor, seed: int = 0
) -> GenerationCheck:
    """Compare what two models wrote; `predicted` are the compressed model's choices along the source's text."""
    equal = source == compressed
    agreement = (predicted == source).double().mean(1)
    same = equal.long().cumprod(1).sum(1)
    repetition = torch.tensor(
        [[1 - distinct_share(row, REPEATED_TOKENS) for row in rows] for rows in (source, compressed)]
    ).double()
    pairs = torch.tensor([[distinct_share(row, 2) for row in rows] for rows in (source, compressed)]).double()
    rises = torch.stack([repetition[1] - repetition[0], pairs[0] - pairs[1]])
    spreads = [mean_interval(row, 0.95, seed) for row in rises]
    intervals = [(spread.low, spread.high) for spread in spreads]
    complaints = [
        (rises[0], intervals[0], "it repeats itself more than its source"),
        (rises[1], intervals[1], "its words are less varied than its source's"),
    ]
    warnings = [
        f"{complaint} ({signed(float(rise.mean()), '.2f')}, 95 % interval {signed_interval(low, high, '.2f')})"
        for rise, (low, high), complaint in complaints
        if rise.mean() >= MORE_REPETITION and low > 0
    ]
    if agreement.mean() < LEAST_AGREEMENT:
        warnings.append(f"it picks its source's next token in only {agreement.mean():.0%} of places")
    length = source.shape[1]
    samples = [
        Sample(
            prompt=tokenizer.decode(prompt, skip_special_tokens=True),
            source=tokenizer.decode(a),
            compressed=tokenizer.decode(b),
            agreement=share.item(),
            first_difference=None if n == length else int(n),
        )
        for prompt, a, b, share, n in zip(prompts, source, compressed, agreement, same, strict=True)
    ]
    means = repetition.mean(1).tolist()
    return GenerationCheck(
        prompts=len(prompts),
        tokens=length,
        agreement=agreement.mean().item(),
        same_prefix=same.double().mean().item(),
        distinct={n: (mean_distinct(source, n), mean_distinct(compressed, n)) for n in (1, 2, 3)},
        repetition=(means[0], means[1]),
        rise_ci95=intervals[0],
        warnings=warnings,
        samples=samples,
    )


def mean_distinct(rows: Tensor, size: int) -> float:
    return sum(distinct_share(row, size) for row in rows) / len(rows)
