"""How many tokens a machine heals in a minute, timed on one step of the kind that healing takes."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import torch

from compressor.heal.precision import choose_precision
from compressor.heal.settings import BATCH_TOKENS
from compressor.heal.student import frozen
from compressor.models.blocks import find_blocks, modules_of
from compressor.models.offload import device_of
from compressor.models.source import identify
from compressor.runtime import distributed
from compressor.runtime.cache import Tensors, cache_key
from compressor.runtime.context import RunContext
from compressor.runtime.environment import identify_machine

LOOKS_SHARE = 0.8  # of the time is left for steps: the rest goes into looks at the selection text and the short trial
LEAST_TOKENS = 1024


def tokens_in(model: Any, minutes: float, seq_len: int, context: RunContext) -> int:
    """The tokens, in thousands, that so many minutes are enough for."""
    seconds = seconds_per_token(model, seq_len, context)
    tokens = LOOKS_SHARE * 60 * minutes / seconds * distributed.size()
    return max(LEAST_TOKENS, round(tokens / 1000) * 1000)


def seconds_per_token(model: Any, seq_len: int, context: RunContext) -> float:
    """The pace of this machine, which is kept: given again, the same command makes the same tokens of its minutes."""
    key = cache_key("pace of healing", identify(model), "", seq_len=seq_len, machine=identify_machine())

    def run() -> Tensors:
        return {"seconds": torch.tensor(time_step(model, seq_len, context), dtype=torch.float64)}

    return context.cache.get("", key, lambda: distributed.compute_on_first(run))["seconds"].item()


def time_step(model: Any, seq_len: int, context: RunContext) -> float:
    """Seconds per token: one pass without gradients, one with those of all feed-forward blocks, and one back."""
    device, precision = device_of(model), choose_precision(model, context)
    size = max(1, BATCH_TOKENS // seq_len)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    batch = torch.randint(vocabulary, (size, seq_len), generator=torch.Generator().manual_seed(0)).to(device)

    def step() -> None:
        with torch.autocast(device.type, dtype=precision) if precision else nullcontext():
            with torch.no_grad():
                model(input_ids=batch, use_cache=False)
            loss = model(input_ids=batch, use_cache=False).logits.float().logsumexp(-1).mean()
        loss.backward()

    with frozen(model):
        trained = [p for block in find_blocks(model) for m in modules_of(model, block) for p in m.parameters()]
        for parameter in trained:
            parameter.requires_grad_(True)
        try:
            times = []
            for _ in range(2):  # the first warms the machine up
                began = time.perf_counter()
                step()
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                times.append(time.perf_counter() - began)
        finally:
            for parameter in trained:
                parameter.requires_grad_(False)
                parameter.grad = None
    return min(times) / batch.numel()
