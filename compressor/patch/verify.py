"""Read a checkpoint that was just written, and compare its logits with those of the model in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor.models.deferred import is_deferred
from compressor.models.load import keep_weights_on_disk, load_config, load_weights, quiet
from compressor.models.offload import device_of, disk_weights_of
from compressor.models.source import stored_dtype
from compressor.runtime.errors import InputError
from compressor.runtime.progress import Progress
from compressor.runtime.resources import available_memory
from compressor.runtime.safe_files import read_json

TOKENS = 16  # how many are compared
COPY_MEMORY_FACTOR = 1.2  # a second copy of a model takes this many times the memory of its weights
# How far rounding may move a logit, relative to the largest: at least, and in units of the coarser dtype's epsilon.
LEAST_TOLERANCE, TOLERANCE_IN_EPSILONS = 1e-4, 16


def first_tokens(model: Any) -> Tensor:
    """A few token ids that every model has, as a batch of one sequence."""
    rows: int = model.get_input_embeddings().weight.shape[0]
    return (torch.arange(TOKENS) % rows)[None]


@torch.no_grad()
def verify_written(
    directory: Path, model: Any, tokens: Tensor, progress: Progress, stored: torch.dtype | None = None
) -> float:
    """Raise InputError if the checkpoint in the directory does not compute the model's logits on these tokens.

    Returns the largest difference relative to the largest logit. `stored` is the dtype of the files (None: the
    source's own). Where memory has no room for a second copy, the checkpoint is read and run a layer at a time.
    """
    name, by_layer = str(directory), not has_memory_for_copy(model)
    if by_layer and disk_weights_of(model) is None and not is_deferred(model):
        progress.say("memory is short of a second copy: what was written is read again a layer at a time")
    try:
        with quiet():
            config = load_config(read_json(directory / "config.json", name), directory, name, trust_remote_code=False)
            device_map: dict[str, Any] = {"device_map": {"": "disk"}} if by_layer else {}
            reloaded = load_weights(directory, name, config, model.dtype, trust_remote_code=False, **device_map)
    except InputError as error:
        raise InputError(f"what was written cannot be read again ({error}); nothing was kept") from error
    if by_layer:
        keep_weights_on_disk(reloaded, device_of(model))
    else:
        reloaded.to(device_of(model))
    return compare_logits(model, reloaded, tokens, stored or stored_dtype(model))


def compare_logits(model: Any, other: Any, tokens: Tensor, stored: torch.dtype) -> float:
    """The largest difference of the two models' logits, relative to the largest logit of the first.

    A difference that rounding does not explain is an InputError. `stored` is the dtype of the second model's files.
    """
    expected, logits = logits_of(model, tokens), logits_of(other, tokens)
    epsilon = max(torch.finfo(dtype).eps for dtype in (model.dtype, stored))
    difference = (logits - expected).abs().max() / expected.abs().max().clamp_min(1e-30)
    if not difference <= max(LEAST_TOLERANCE, TOLERANCE_IN_EPSILONS * epsilon):
        raise InputError(
            f"what was written does not compute what the model in memory computes (logits differ by {difference:.1%}); "
            "nothing was kept: try again, and look after the disk if it stays so"
        )
    return difference.item()


def logits_of(model: Any, tokens: Tensor) -> Tensor:
    """The logits at every position, in float64 on the CPU."""
    with evaluation_mode(model):
        logits: Tensor = model(input_ids=tokens.to(device_of(model)), use_cache=False).logits
    return logits.double().cpu()


@contextmanager
def evaluation_mode(model: Any) -> Iterator[None]:
    """While open, the model is in evaluation mode; afterwards each module gets its former mode back."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def has_memory_for_copy(model: Any) -> bool:
    """Whether memory suffices for a second copy: on the CPU, where it is loaded, and on the model's GPU if any."""
    parameters = list(model.parameters())
    if is_deferred(model) or any(p.device.type == "meta" for p in parameters):
        return False
    needed: float = COPY_MEMORY_FACTOR * sum(p.numel() * p.element_size() for p in parameters)
    free = [available_memory()]
    if model.device.type == "cuda":
        free.append(torch.cuda.mem_get_info(model.device)[0])
    return min(free) > needed
