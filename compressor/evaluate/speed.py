"""Speed before and after: FLOPs per token are counted; prefill and decoding are timed, both models in one run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compressor.modeling_compressor import Replacement
from compressor.models.blocks import Block, modules_of, placement_of
from compressor.models.offload import device_of, disk_weights_of
from compressor.patch.tree import patched

TIMED_ROWS = 512
REPEATS = 4
# A replacement is slower than its block when it takes longer by this factor and by this many seconds: two runs of the
# same module differ by less.
SLOWER_FACTOR = 1.05
SLOWER_SECONDS = 5e-5
PREFILL_TOKENS = 1024
DECODED = 16
TURNS = 4


@dataclass(frozen=True)
class Speed:
    """FLOPs per token, and tokens per second, of the source (before) and of the compressed model (after)."""

    flops_before: int
    flops_after: int
    prefill_before: float | None  # None where weights are read from disk: the clock would time the disk
    prefill_after: float | None
    decode_before: float | None
    decode_after: float | None
    seq_len: int

    @property
    def flops_ratio(self) -> float:
        """How many times fewer FLOPs the compressed model needs."""
        return self.flops_before / self.flops_after

    @property
    def prefill_ratio(self) -> float | None:
        return self.prefill_after / self.prefill_before if self.prefill_after and self.prefill_before else None

    @property
    def decode_ratio(self) -> float | None:
        return self.decode_after / self.decode_before if self.decode_after and self.decode_before else None


def flops_per_token(model: Any, seq_len: int) -> int:
    """Two FLOPs per weight of every matrix that a token is multiplied with, and the attention over half a window.

    An embedding is looked up and costs nothing; an output head that is tied to it is multiplied, and counts.
    """
    config = model.config.get_text_config()
    looked_up = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    weights = sum(p.numel() for p in model.parameters() if p.ndim == 2 and id(p) not in looked_up)
    head = model.get_output_embeddings()
    if head is not None and id(head.weight) in looked_up:
        weights += head.weight.numel()
    attention = 4 * config.hidden_size * config.num_hidden_layers * (seq_len // 2)
    return int(2 * weights + attention)


def time_call(run: Callable[[], Any], device: torch.device) -> float:
    began = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def time_in_turns(
    first: Callable[[], Any], second: Callable[[], Any], device: torch.device, repeats: int
) -> list[float]:
    """Seconds of the fastest run of each, taking turns, so that a slow moment of the machine hits both."""
    first()
    second()
    times = [(time_call(first, device), time_call(second, device)) for _ in range(repeats)]
    return [min(column) for column in zip(*times, strict=True)]


@torch.no_grad()
def is_slower(model: Any, block: Block, replacement: Replacement) -> bool:
    """Whether a replacement takes longer than its block, on rows like those of a prefill."""
    parts = modules_of(model, block)
    x = torch.randn(1, TIMED_ROWS, block.width, generator=torch.Generator().manual_seed(0)).to(
        **placement_of(model, block)
    )

    def original() -> Tensor:
        first, *rest = parts
        output = first(x, torch.zeros_like(x)) if block.residual_inside else first(x)
        for part in rest:
            output = part(output)
        return output  # type: ignore[no-any-return]

    before, after = time_in_turns(original, lambda: replacement(x), x.device, REPEATS)
    return after > SLOWER_FACTOR * before and after - before > SLOWER_SECONDS


@torch.no_grad()
def measure_speed(model: Any, blocks: list[Block], fits: Mapping[int, Replacement], windows: Tensor) -> Speed:
    """Prefill and decoding of the model without and with its replacements, taking turns; the fastest of each."""
    seq_len = windows.shape[1]
    flops = []
    for modules in ({}, fits):
        with patched(model, blocks, modules):
            flops.append(flops_per_token(model, seq_len))
    if disk_weights_of(model) is not None:
        return Speed(flops[0], flops[1], None, None, None, None, seq_len)
    batch = windows[: max(1, PREFILL_TOKENS // seq_len)].to(device_of(model))
    prompt = batch[:1, : max(1, min(seq_len // 2, 64))]
    steps = max(2, min(DECODED, seq_len - prompt.shape[1]))

    def decode() -> float:
        """Seconds per token after the prompt."""
        output = model(input_ids=prompt, use_cache=True)

        def step() -> None:
            nonlocal output
            token = output.logits[:, -1:].argmax(-1)
            output = model(input_ids=token, past_key_values=output.past_key_values, use_cache=True)

        return statistics.median(time_call(step, device_of(model)) for _ in range(steps - 1))

    prefills: tuple[list[float], list[float]] = ([], [])
    decodes: tuple[list[float], list[float]] = ([], [])
    for turn in range(TURNS):
        for which, modules in enumerate(({}, fits)):
            with patched(model, blocks, modules):
                if turn == 0:
                    model(input_ids=batch, use_cache=False)
                prefills[which].append(time_call(lambda: model(input_ids=batch, use_cache=False), device_of(model)))
                decodes[which].append(decode())
    tokens = batch.numel()
    return Speed(
        flops_before=flops[0],
        flops_after=flops[1],
        prefill_before=tokens / min(prefills[0]),
        prefill_after=tokens / min(prefills[1]),
        decode_before=1 / min(decodes[0]),
        decode_after=1 / min(decodes[1]),
        seq_len=seq_len,
    )
