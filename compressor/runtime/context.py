"""How a run computes: the settings that every step needs and that no result is about."""

from __future__ import annotations

from dataclasses import dataclass, field

from compressor.runtime.cache import Cache
from compressor.runtime.progress import Progress


def no_cache() -> Cache:
    return Cache(None, Progress())


@dataclass(frozen=True)
class RunContext:
    """Windows per forward pass, the seed of every draw, the confidence of intervals, where measurements are kept, what
    the user sees meanwhile, and whether code that comes with a model may run."""

    batch_size: int = 8
    seed: int = 0
    confidence: float = 0.95
    cache: Cache = field(default_factory=no_cache)
    progress: Progress = field(default_factory=Progress)
    trust_remote_code: bool = False
