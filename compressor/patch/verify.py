"""What was written is read again and held against the model in memory, before anybody can see it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor.models.load import keep_weights_on_disk, load_config, load_weights, quiet
from compressor.models.offload import device_of, disk_weights_of
from compressor.models.source import source_of
from compressor.runtime.errors import InputError
from compressor.runtime.progress import Progress
from compressor.runtime.resources import available_memory
from compressor.runtime.safe_files import read_json

TOKENS = 16
COPY_MEMORY_FACTOR = 1.2  # times its weights: the memory that a second copy of a model takes
ROUNDING = (1e-4, 16)  # of the largest logit, and of the coarser precision: what rounding may change


def first_tokens(model: Any) -> Tensor:
    """A few token ids that every model has."""
    rows: int = model.get_input_embeddings().weight.shape[0]
    return (torch.arange(TOKENS) % rows)[None]


@torch.no_grad()
def verify_written(
    directory: Path, model: Any, tokens: Tensor, progress: Progress, stored: torch.dtype | None = None
) -> float:
    """InputError when the checkpoint in the directory does not compute what the model computes on these tokens.

    Returns how far its logits are off, of the largest. `stored` is the dtype of the files (None: the source's own).

    Where memory does not hold a second copy, it is read and run a layer at a time.
    """
    name, layers = str(directory), not has_memory_for_copy(model)
    if layers and disk_weights_of(model) is None:
        progress.say("memory is short of a second copy: what was written is read again a layer at a time")
    try:
        with quiet():
            config = load_config(read_json(directory / "config.json", name), directory, name, trust_remote_code=False)
            place: dict[str, Any] = {"device_map": {"": "disk"}} if layers else {}
            again = load_weights(directory, name, config, model.dtype, trust_remote_code=False, **place)
    except InputError as error:
        raise InputError(f"what was written cannot be read again ({error}); nothing was kept") from error
    if layers:
        keep_weights_on_disk(again, device_of(model))
    else:
        again.to(device_of(model))
    return compare_logits(model, again, tokens, stored or source_of(model).dtype)


def compare_logits(model: Any, again: Any, tokens: Tensor, stored: torch.dtype) -> float:
    """How far the second model's logits are off, of the largest of the first's; InputError for more than rounding."""
    expected, found = logits_of(model, tokens), logits_of(again, tokens)
    least, factor = ROUNDING
    coarse = max(torch.finfo(dtype).eps for dtype in (model.dtype, stored))
    off = (found - expected).abs().max() / expected.abs().max().clamp_min(1e-30)
    if not off <= max(least, factor * coarse):
        raise InputError(
            f"what was written does not compute what the model in memory computes (logits differ by {off:.1%}); "
            "nothing was kept: try again, and look after the disk if it stays so"
        )
    return off.item()


def logits_of(model: Any, tokens: Tensor) -> Tensor:
    with evaluation_mode(model):
        found: Tensor = model(input_ids=tokens.to(device_of(model)), use_cache=False).logits
    return found.double().cpu()


@contextmanager
def evaluation_mode(model: Any) -> Iterator[None]:
    """The model in evaluation mode; each of its modules is put back into its own."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def has_memory_for_copy(model: Any) -> bool:
    """Whether a second copy can be had where the model is, and on the way there."""
    parameters = list(model.parameters())
    if any(p.device.type == "meta" for p in parameters):
        return False
    needed: float = COPY_MEMORY_FACTOR * sum(p.numel() * p.element_size() for p in parameters)
    free = [available_memory()]
    if model.device.type == "cuda":
        free.append(torch.cuda.mem_get_info(model.device)[0])
    return min(free) > needed
