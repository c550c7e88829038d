"""The precision that healing computes in: bfloat16 where the machine multiplies it faster, with float32 weights."""

from __future__ import annotations

import time
from typing import Any

import torch

from compressor.models.offload import device_of
from compressor.runtime import distributed
from compressor.runtime.cache import Tensors
from compressor.runtime.context import RunContext
from compressor.runtime.environment import identify_machine
from compressor.runtime.errors import InputError
from compressor.runtime.resources import require_precision

WORTH = 1.5  # times as fast as float32: less is not worth the rounding
SIDE = 768  # rows and columns of the matrices that are timed


def choose_precision(model: Any, context: RunContext) -> torch.dtype | None:
    """The dtype of autocast, or None to compute in the model's own.

    On a GPU, and for models that compute in 16 bits anyway, it is bfloat16. Processors differ: some multiply bfloat16
    five times as fast as float32, some two hundred times slower, so it is timed, once per machine.
    """
    if device_of(model).type == "cuda" or model.dtype in (torch.bfloat16, torch.float16):
        return torch.bfloat16
    if device_of(model).type != "cpu":
        return None
    key = {"kind": "bfloat16 is faster", "machine": identify_machine()}

    def run() -> Tensors:
        return {"faster": torch.tensor(is_bfloat16_faster())}

    faster = context.cache.get("", key, lambda: distributed.compute_on_first(run))["faster"]
    return torch.bfloat16 if bool(faster) else None


def is_bfloat16_faster() -> bool:
    try:
        require_precision(torch.bfloat16)
    except InputError:  # the processor announces instructions that it cannot run
        return False
    plain, short = (best_time(dtype) for dtype in (torch.float32, torch.bfloat16))
    return short * WORTH <= plain


def best_time(dtype: torch.dtype) -> float:
    """Seconds of one product of two matrices, the fastest of some."""
    a = torch.ones(SIDE, SIDE, dtype=dtype)
    times = []
    for _ in range(6):
        began = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - began)
        if times[-1] > 1.0:  # seconds: this is one of the slow machines
            break
    return min(times)
