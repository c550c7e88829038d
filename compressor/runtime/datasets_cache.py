"""Where the library datasets keeps its copy of all that it reads."""

from __future__ import annotations

import os
from pathlib import Path

from compressor.runtime.locks import scratch_directory


def provide_datasets_cache() -> None:
    """Let datasets use a directory that is removed with the process where it cannot write into the user's home."""
    from datasets import config

    place = Path(config.HF_DATASETS_CACHE)
    try:
        place.mkdir(parents=True, exist_ok=True)
        writable = os.access(place, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        config.HF_DATASETS_CACHE = scratch_directory(config)
        config.DOWNLOADED_DATASETS_PATH = config.HF_DATASETS_CACHE / "downloads"
