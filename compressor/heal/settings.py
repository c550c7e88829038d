"""How a model is healed: how long, what is trained, and the fixed numbers of the training."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any, Literal

from compressor.runtime.errors import InputError

HealParams = Literal["replaced", "norms", "all"]
TOKENS = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[kKmM]?)")
BATCH_TOKENS = 512  # of one step; larger steps on as many tokens win less
RATE_TIMES_WIDTH = 0.1
UNITS = {"": 1, "k": 1_000, "m": 1_000_000}


def parse_tokens(word: str | int | float) -> int:
    """A number of tokens: 200000, 200k or 1.5m."""
    match = TOKENS.fullmatch(str(word).strip())
    tokens = round(float(match["number"]) * UNITS[match["unit"].lower()]) if match else 0
    if tokens < 1:
        raise InputError(f"--heal takes a number of tokens, got {word}; try --heal 200k")
    return tokens


@dataclass(frozen=True)
class HealSettings:
    """The training: AdamW with a short warm-up and a cosine to zero, one gradient clip, one seed."""

    tokens: int
    learning_rate: float
    params: HealParams = "norms"
    seed: int = 0
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    warmup: float = 0.05  # of all steps
    clip: float = 1.0  # norm of the gradient
    batch_tokens: int = BATCH_TOKENS
    looks: int = 8  # at the selection text, evenly spaced

    @classmethod
    def for_width(cls, tokens: int, width: int, **more: Any) -> HealSettings:
        """The settings for a model of this width: the wider it is, the smaller are the steps."""
        return cls(tokens, RATE_TIMES_WIDTH / width, **more)

    def describe(self) -> dict[str, Any]:
        return asdict(self)
