"""How a run computes: the settings that every step needs and that no result is about."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from compressor.runtime import distributed
from compressor.runtime.cache import Cache, open_cache
from compressor.runtime.cache_files import in_use
from compressor.runtime.locks import scratch_directory
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


@contextmanager
def open_context(
    cache: Path | None, no_cache: bool, progress: Progress, trust_remote_code: bool = False
) -> Iterator[RunContext]:
    """The context of one run with its cache, which is pruned at the end. Without one, measurements go to a directory
    that is removed with the run."""
    opened = Cache(scratch_directory(progress), progress) if no_cache else open_cache(cache, progress)
    with in_use(opened.directory, progress.say) if distributed.rank() == 0 else nullcontext(), progress.alive():
        yield RunContext(cache=opened, progress=progress, trust_remote_code=trust_remote_code)
        progress.leave()
