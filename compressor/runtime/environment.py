"""What a run computes with: Python, the libraries and their versions, and the number of threads."""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import Any

import torch

PACKAGES = ("transformers", "safetensors", "tokenizers", "lm-eval")


def describe_environment() -> dict[str, Any]:
    """For records: results depend on these in their last digits."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: version(name) for name in PACKAGES},
        "threads": torch.get_num_threads(),
    }
