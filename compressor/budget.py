"""The promise: the largest rise in perplexity that the user accepts, and how sure to be of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from compressor.errors import InputError


@dataclass(frozen=True)
class Budget:
    """A rise in perplexity, absolute or as a percentage of the baseline; `confidence` 0 takes the point estimate."""

    amount: float
    percent: bool = False
    confidence: float = 0.95

    @classmethod
    def parse(cls, text: str | float, confidence: float = 0.95) -> Budget:
        word = str(text).strip()
        percent = word.endswith("%")
        try:
            amount = float(word.removesuffix("%"))
        except ValueError:
            raise InputError(f"--max-dppl must be a number or a percentage, got {word!r}; try 1.0 or 2%") from None
        if not math.isfinite(amount) or amount <= 0:
            raise InputError(f"--max-dppl must be positive and finite, got {word}; try --max-dppl 1.0")
        if not 0 <= confidence < 1:
            raise InputError(f"--confidence must be at least 0 and below 1, got {confidence}; try --confidence 0.95")
        return cls(amount, percent, confidence)

    def dppl(self, baseline: float) -> float:
        """The rise in perplexity that this budget allows on a text of that baseline."""
        return baseline * self.amount / 100 if self.percent else self.amount

    def __str__(self) -> str:
        digits = repr(self.amount).removesuffix(".0")  # all of them: the record is read back
        return f"{digits}%" if self.percent else digits
