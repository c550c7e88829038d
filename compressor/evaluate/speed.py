"""Speed before and after: FLOPs per token are counted; prefill and decoding are timed, both models in turns.

Times of a machine that does other things as well scatter widely, so a ratio of times comes with its interval."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compressor.modeling_compressor import Replacement, replacements
from compressor.models.blocks import Block, modules_of, placement_of
from compressor.models.heads import count_units
from compressor.models.offload import device_of, disk_weights_of
from compressor.patch.tree import Replacements, patched

TIMED_ROWS = 512
CALLS = 2  # of a block per turn, of which the faster one counts
# A replacement is slower than its block when the interval of the ratio says so, and when it takes longer by this factor
# and by this many seconds: less does not matter.
SLOWER_FACTOR = 1.05
SLOWER_SECONDS = 5e-5
PREFILL_TOKENS = 512
DECODED = 16
# The fewest pairs whose extremes are a 95 % interval, and how many are timed at most: as many as fit into the seconds.
LEAST_PAIRS, MOST_PAIRS = 6, 16
PAIRS_SECONDS = 8.0
CONFIDENCE = 0.95


@dataclass(frozen=True)
class PairedTimes:
    """Two things timed in turns: the median seconds of each, and how many times as fast the second one is."""

    before: float
    after: float
    ratio: float  # the median over pairs of before ÷ after
    ci95: tuple[float, float]
    pairs: int


@dataclass(frozen=True)
class Speed:
    """FLOPs per token of the source (before) and of the compressed model (after), and the times of both.

    Prefill and decoding in seconds per token. None where weights are read from disk: the clock would time the disk.
    """

    flops_before: int
    flops_after: int
    prefill: PairedTimes | None
    decode: PairedTimes | None
    seq_len: int

    @property
    def flops_ratio(self) -> float:
        """How many times fewer FLOPs the compressed model needs."""
        return self.flops_before / self.flops_after


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
    whole = 4 * config.hidden_size * (seq_len // 2)
    attention = whole * (config.num_hidden_layers - sum(1 - share for share in attention_shares(model)))
    return int(2 * weights + round(attention))


def attention_shares(model: Any) -> list[float]:
    """The share of its heads that attention has left, for every layer whose attention was replaced."""
    config = model.config.get_text_config()
    units = count_units(config, config.num_attention_heads)
    found = (module for module in replacements(model).values() if hasattr(module, "heads") or module.returns)
    return [len(getattr(module, "heads", ())) / units for module in found]


def time_call(run: Callable[[], Any], device: torch.device) -> float:
    began = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def time_in_turns(before: Callable[[], float], after: Callable[[], float]) -> PairedTimes:
    """Time two things in turns, in the order before, after, after, before, so that neither comes first more often.

    Each function runs one of them and returns its seconds. The ratio is the median of the ratios of pairs, which a
    stall of the machine in a few of them does not move.
    """
    before()
    after()
    began = time.perf_counter()
    pairs: list[tuple[float, float]] = []
    while len(pairs) < LEAST_PAIRS or (len(pairs) < MOST_PAIRS and time.perf_counter() - began < PAIRS_SECONDS):
        pairs.append((before(), after()))
        later = after()
        pairs.append((before(), later))
    ratios = [max(one, 1e-9) / max(other, 1e-9) for one, other in pairs]
    seconds = [statistics.median(column) for column in zip(*pairs, strict=True)]
    return PairedTimes(seconds[0], seconds[1], statistics.median(ratios), median_interval(ratios), len(ratios))


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The interval of the median that holds with 95 % or more, whatever the values are distributed like.

    Each value is as often above the median as below, so that the k-th lowest and the k-th highest enclose it with the
    probability that a fair coin gives. Needs six values.
    """
    count = len(values)
    outside, rank = 2.0 * 0.5**count, 1
    while outside + 2.0 * math.comb(count, rank) * 0.5**count <= 1 - CONFIDENCE:
        outside += 2.0 * math.comb(count, rank) * 0.5**count
        rank += 1
    ordered = sorted(values)
    return ordered[rank - 1], ordered[count - rank]


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

    def time_fastest(run: Callable[[], Tensor]) -> float:
        return min(time_call(run, x.device) for _ in range(CALLS))

    times = time_in_turns(lambda: time_fastest(original), lambda: time_fastest(lambda: replacement(x)))
    much = times.ratio < 1 / SLOWER_FACTOR and times.after - times.before > SLOWER_SECONDS
    return times.ci95[1] < 1 and much


@torch.no_grad()
def measure_speed(model: Any, blocks: list[Block], fits: Replacements, windows: Tensor) -> Speed:
    """FLOPs, prefill and decoding of the model without and with its replacements."""
    seq_len, device = windows.shape[1], device_of(model)
    flops = []
    for modules in ({}, fits):
        with patched(model, blocks, modules):
            flops.append(flops_per_token(model, seq_len))
    if disk_weights_of(model) is not None:
        return Speed(flops[0], flops[1], None, None, seq_len)
    batch = windows[: max(1, PREFILL_TOKENS // seq_len)].to(device)
    prompt = batch[:1, : max(1, min(seq_len // 2, 64))]
    steps = max(2, min(DECODED, seq_len - prompt.shape[1]))

    def prefill() -> float:
        """Seconds per token of a prompt."""
        return time_call(lambda: model(input_ids=batch, use_cache=False), device) / batch.numel()

    def decode() -> float:
        """Seconds per token after the prompt."""
        output = model(input_ids=prompt, use_cache=True)

        def step() -> None:
            nonlocal output
            token = output.logits[:, -1:].argmax(-1)
            output = model(input_ids=token, past_key_values=output.past_key_values, use_cache=True)

        return statistics.median(time_call(step, device) for _ in range(steps - 1))

    def compare(measure: Callable[[], float]) -> PairedTimes:
        def with_replacements() -> float:
            with patched(model, blocks, fits):
                return measure()

        return time_in_turns(measure, with_replacements)

    return Speed(flops[0], flops[1], compare(prefill), compare(decode), seq_len)
