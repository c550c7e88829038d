"""What a run computes with: Python, the libraries and their versions, the number of threads, and the machine."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

CPU_INFO = Path("/proc/cpuinfo")
PACKAGES = ("transformers", "safetensors", "tokenizers", "lm-eval")


def describe_environment() -> dict[str, Any]:
    """For records: results depend on these in their last digits."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: version(name) for name in PACKAGES},
        "threads": torch.get_num_threads(),
    }


def identify_machine() -> str:
    """A hash of what a measured time depends on, for cache keys: the machine, its processors and the threads used."""
    devices = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parts = [
        platform.node(),
        platform.machine(),
        processor_name(),
        os.cpu_count(),
        cores,
        torch.get_num_threads(),
        devices,
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def processor_name() -> str:
    """The model of the processor; where the system does not say, what Python knows of it."""
    try:
        lines = CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        lines = []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
