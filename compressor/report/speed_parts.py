"""The parts of a record about what a model costs to run: operations, tokens per second, and its key-value cache."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from compressor.report.part import Count, Figure, Interval, Part


class KVCache(Part):
    """Bytes that the key-value cache takes for every token, in all layers together; `dtype` is that of its values."""

    bytes_per_token_before: Count | None = None
    bytes_per_token_after: Count | None = None
    dtype: Annotated[str, Field(pattern=r"^[a-z0-9_]{0,32}$")] = ""

    @property
    def shrinks(self) -> bool:
        before, after = self.bytes_per_token_before, self.bytes_per_token_after
        return before is not None and after is not None and after < before


class SpeedStep(Part):
    """Tokens per second of one step, prefill or decoding, and how many times as fast it has become."""

    name: str
    before: Figure
    after: Figure
    ratio: Figure
    ci95: Interval

    @property
    def differs(self) -> bool:
        """Whether the clock can tell the two models apart: the interval of the ratio does not hold 1."""
        low, high = self.ci95
        return low > 1 or high < 1


class Speed(Part):
    """Operations counted, tokens per second measured in turns; None where the weights were on disk.

    A ratio is the median over pairs of runs. Records of earlier versions have ratios without an interval.
    """

    flops_before: Count
    flops_after: Count
    prefill_before: Figure | None
    prefill_after: Figure | None
    decode_before: Figure | None
    decode_after: Figure | None
    seq_len: Count
    flops_ratio: Figure
    prefill_ratio: Figure | None
    decode_ratio: Figure | None
    prefill_ratio_ci95: Interval | None = None
    decode_ratio_ci95: Interval | None = None
    prefill_pairs: Count | None = None
    decode_pairs: Count | None = None

    @property
    def steps(self) -> list[SpeedStep]:
        """Prefill and decoding, where they were timed and their ratio has an interval."""
        found = [
            ("prefill", self.prefill_before, self.prefill_after, self.prefill_ratio, self.prefill_ratio_ci95),
            ("decoding", self.decode_before, self.decode_after, self.decode_ratio, self.decode_ratio_ci95),
        ]
        return [
            SpeedStep(name=name, before=before, after=after, ratio=ratio, ci95=ci95)
            for name, before, after, ratio, ci95 in found
            if before is not None and after is not None and ratio is not None and ci95 is not None
        ]
