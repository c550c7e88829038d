"""The memory of a training, estimated before it starts; where activations would not fit, layers are run again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from compressor.models.calls import other_forwards
from compressor.models.offload import device_of
from compressor.runtime.errors import InputError
from compressor.runtime.resources import available_memory, format_bytes
from compressor.text import Text

COPIES = 5  # of every trained weight: itself, its gradient, two moments, the best so far
ACTIVATIONS_PER_WEIGHT_ROW = 3.0  # values kept per output of a layer's matrices, for the backward pass


@contextmanager
def plan_memory(
    model: Any, layers: list[nn.Module], parameters: Mapping[str, nn.Parameter], size: int, text: Text
) -> Iterator[None]:
    """Refuse a training that does not fit into memory. While open, layers keep only their inputs, and run again in the
    backward pass, where all activations of `size` windows would not fit."""
    weights = 4 * COPIES * sum(p.numel() for p in parameters.values())
    rows = size * text.seq_len
    widths = [sum(p.shape[0] for p in layer.parameters() if p.ndim > 1) for layer in layers]
    activations = int(4 * rows * ACTIVATIONS_PER_WEIGHT_ROW * sum(widths))
    free = free_memory(model)
    if weights + activations <= free:
        yield
        return
    largest = int(4 * rows * ACTIVATIONS_PER_WEIGHT_ROW * max(widths, default=0))
    kept = 4 * rows * len(layers) * model.get_input_embeddings().weight.shape[1]
    if weights + largest + kept > free:
        raise InputError(
            f"healing takes {format_bytes(weights + largest + kept)} of memory beside the model, and "
            f"{format_bytes(free)} can be had; train less with --heal-params replaced, or leave --heal out"
        )
    with checkpointed(layers):
        yield


def free_memory(model: Any) -> int:
    """Bytes that the model's device has left."""
    device = device_of(model)
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()


@contextmanager
def checkpointed(layers: list[nn.Module]) -> Iterator[None]:
    """While open, each of these layers keeps only its input, and runs again in the backward pass."""

    def make(layer: nn.Module) -> Callable[..., Any]:
        forward = layer.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)

        return run

    with other_forwards(layers, make):
        yield
