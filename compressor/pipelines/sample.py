"""Let a compressed model and its source continue the same prompts: `compress sample DIR "prompt"`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from compressor.evaluate.sampling import continue_prompt, encode_prompt
from compressor.models.load import load_model
from compressor.models.source import context_length, source_of
from compressor.report.record import describe_tool, read_record
from compressor.report.sample_record import SampledPrompt, SampleRecord
from compressor.runtime.errors import InputError, shorten
from compressor.runtime.figures import count
from compressor.runtime.names import RECORD
from compressor.runtime.progress import Progress

MOST_TOKENS = 100_000


@dataclass(frozen=True)
class SampleSettings:
    """How prompts are continued."""

    tokens: int = 48
    temperature: float = 0.0
    seed: int = 0
    chat: bool = False

    def refuse_mistakes(self) -> None:
        if not 1 <= self.tokens <= MOST_TOKENS:
            raise InputError(f"--tokens must be between 1 and {MOST_TOKENS}, got {self.tokens}; try --tokens 48")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InputError(f"--temperature must be 0 or more, got {self.temperature}; 0 is greedy, 1 as trained")
        if not 0 <= self.seed < 2**63:
            raise InputError(f"--seed must be 0 or more and below 2^63, got {self.seed}; try --seed 0")


@dataclass(frozen=True)
class Sampler:
    """A model, and beside it the source that it was made from, if it has one."""

    directory: str
    model: Any
    tokenizer: Any
    settings: SampleSettings
    origin: str | None = None
    source: Any = None
    warnings: Sequence[str] = ()

    def run(self, prompts: Sequence[str]) -> SampleRecord:
        """What both models write after each prompt; the same random numbers serve both."""
        encoded = [self.encode(prompt) for prompt in prompts]
        settings = self.settings
        return SampleRecord(
            **describe_tool(),
            directory=self.directory,
            source=self.origin,
            tokens=settings.tokens,
            temperature=settings.temperature,
            seed=settings.seed,
            chat=settings.chat,
            samples=[self.sample(prompt, ids) for prompt, ids in zip(prompts, encoded, strict=True)],
            warnings=list(self.warnings),
        )

    def encode(self, prompt: str) -> list[int]:
        """The tokens of a prompt, if it has any and the context has room for them and for a continuation."""
        if not prompt.strip():
            raise InputError("the prompt is empty; give some words to continue")
        ids = encode_prompt(prompt, self.tokenizer, self.settings.chat)
        lengths = [length for length in map(context_length, self.models) if length is not None]
        room = min(lengths) - len(ids) if lengths else self.settings.tokens
        if room < self.settings.tokens:
            instead = f"shorten it, or try --tokens {room}" if room > 0 else "shorten it"
            raise InputError(
                f"the prompt {shorten(prompt, 40)!r} has {count(len(ids), 'token')}; with --tokens "
                f"{self.settings.tokens} that is beyond the model's context of {min(lengths)}; {instead}"
            )
        return ids

    @property
    def models(self) -> list[Any]:
        return [self.model] if self.source is None else [self.source, self.model]

    def sample(self, prompt: str, ids: Sequence[int]) -> SampledPrompt:
        settings = self.settings
        generator = torch.Generator().manual_seed(settings.seed)
        uniforms = torch.rand(settings.tokens, generator=generator, dtype=torch.float64)
        written = [
            continue_prompt(model, self.tokenizer, torch.tensor(ids), uniforms, settings.temperature)
            for model in self.models
        ]
        texts = [self.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in written]
        if self.source is None:
            return SampledPrompt(prompt=prompt, prompt_tokens=len(ids), text=texts[0], tokens=len(written[0]))
        first, second = written
        same = next((n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), None)
        if same is None and len(first) != len(second):  # one of them ends the text there
            same = min(len(first), len(second))
        following = [None if same is None else self.decode_next(tokens, same) for tokens in written]
        return SampledPrompt(
            prompt=prompt,
            prompt_tokens=len(ids),
            text=texts[1],
            tokens=len(second),
            source_text=texts[0],
            source_tokens=len(first),
            first_difference=same,
            source_next=following[0],
            next=following[1],
        )

    def decode_next(self, tokens: Sequence[int], place: int) -> str | None:
        """The token at a place; None where the text ended before it."""
        return str(self.tokenizer.decode([tokens[place]])) if place < len(tokens) else None


def open_sampler(
    directory: str,
    source: str | None,
    settings: SampleSettings,
    progress: Progress,
    *,
    device: str = "auto",
    dtype: str = "auto",
    trust_remote_code: bool = False,
) -> Sampler:
    """Load a checkpoint and the source that it names, or the one that is given; a model without either comes alone."""
    settings.refuse_mistakes()
    place: dict[str, Any] = {"device": device, "dtype": dtype, "trust_remote_code": trust_remote_code}
    recorded = read_record(Path(directory)) if (Path(directory) / RECORD).is_file() else None
    origin = source or (recorded.source.model if recorded else None)
    progress.say(f"load {directory}" + (f" and its source {origin}" if origin else ""))
    model, tokenizer = load_model(directory, allow_compressed=True, **place)
    if origin is None:
        return Sampler(directory, model, tokenizer, settings)
    revision = None if source or recorded is None else recorded.source.revision
    try:
        original, _ = load_model(origin, revision=revision, allow_compressed=source is not None, **place)
    except InputError as error:
        if source:
            raise
        raise InputError(f"the source of {directory}: {error}; if it has moved, add --source DIRECTORY") from error
    rows = [found.get_input_embeddings().weight.shape[0] for found in (original, model)]
    if rows[0] != rows[1]:
        raise InputError(
            f"{origin} has {rows[0]} embeddings and {directory} has {rows[1]}: one is not made from the other; name "
            "the source with --source"
        )
    warnings = []
    if recorded and source_of(original).weights_sha256 != recorded.source.weights_sha256:
        warnings.append("the source's weights are not those the checkpoint was made from")
    return Sampler(directory, model, tokenizer, settings, origin, original, warnings)
