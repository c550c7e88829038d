"""What was written is read again and held against the model in memory, before anybody can see it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from compressor.capacity import available_memory
from compressor.checkpoint import cast
from compressor.errors import InputError
from compressor.modeling_compressor import replacements
from compressor.models import DTYPES, load_config, load_weights, quiet, source_of
from compressor.progress import Progress
from compressor.weights import find_shards, open_shard, read_json

TOKENS = 16
SPARE = 1.2  # times its weights: the memory that a second copy of a model takes
ROUNDING = (1e-4, 16)  # of the largest logit, and of the coarser precision: what rounding may change


def first_tokens(model: Any) -> Tensor:
    """A few token ids that every model has."""
    rows: int = model.get_input_embeddings().weight.shape[0]
    return (torch.arange(TOKENS) % rows)[None]


@torch.no_grad()
def verify_written(directory: Path, model: Any, tokens: Tensor, progress: Progress) -> None:
    """InputError when the checkpoint in the directory does not compute what the model computes on these tokens.

    Where memory does not hold a second copy, the stored tensors are compared with the model's own instead.
    """
    if not has_room(model):
        progress.say("memory is short of a second copy: what was written is compared tensor by tensor, and not run")
        compare_tensors(directory, model)
        return
    name = str(directory)
    try:
        with quiet():
            config = load_config(read_json(directory / "config.json", name), directory, name, trust_remote_code=False)
            again = load_weights(directory, name, config, model.dtype, trust_remote_code=False)
    except InputError as error:
        raise InputError(f"what was written cannot be read again ({error}); nothing was kept") from error
    expected = logits_of(model, tokens)
    found = logits_of(again.to(model.device), tokens)
    least, factor = ROUNDING
    coarse = max(torch.finfo(dtype).eps for dtype in (model.dtype, source_of(model).dtype))
    off = (found - expected).abs().max() / expected.abs().max().clamp_min(1e-30)
    if not off <= max(least, factor * coarse):
        raise InputError(
            f"what was written does not compute what the model in memory computes (logits differ by {off:.1%}); "
            "nothing was kept: try again, and look after the disk if it stays so"
        )


def logits_of(model: Any, tokens: Tensor) -> Tensor:
    with evaluating(model):
        found: Tensor = model(input_ids=tokens.to(model.device), use_cache=False).logits
    return found.double().cpu()


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """The model in evaluation mode; each of its modules is put back into its own."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def has_room(model: Any) -> bool:
    """Whether a second copy can be had where the model is, and on the way there."""
    parameters = list(model.parameters())
    if model.dtype not in DTYPES.values() or any(p.device.type == "meta" for p in parameters):
        return False
    needed: float = SPARE * sum(p.numel() * p.element_size() for p in parameters)
    free = [available_memory()]
    if model.device.type == "cuda":
        free.append(torch.cuda.mem_get_info(model.device)[0])
    return min(free) > needed


def compare_tensors(directory: Path, model: Any) -> None:
    """InputError when the stored tensors are not the model's own, one of them in memory at a time."""
    own = stored_names(model)
    seen = set()
    for shard in find_shards(directory, str(directory), None):
        with open_shard(shard, str(directory)) as file:
            for name in file.keys():  # noqa: SIM118  it is not a mapping
                if name not in own or not same(file.get_tensor(name), own[name]):
                    raise InputError(f"what was written as {name} is not what is in memory; nothing was kept")
                seen.add(name)
    places = {own[name].data_ptr() for name in seen}
    missing = [name for name, tensor in own.items() if name not in seen and tensor.data_ptr() not in places]
    if missing:  # tied weights are stored once
        raise InputError(f"what was written lacks {missing[0]}; nothing was kept")


def stored_names(model: Any) -> dict[str, Tensor]:
    """The model's tensors under the names that a checkpoint has for them."""
    guards = {module.guard: torch.zeros(0) for module in replacements(model).values()}
    found: dict[str, Tensor] = revert_weight_conversion(model, {**model.state_dict(), **dict(list(guards.items())[:1])})
    return found


def same(stored: Tensor, own: Tensor) -> bool:
    if own.device.type == "meta":  # offloaded: it is on disk already
        return stored.shape == own.shape
    return torch.equal(stored, cast({"": own}, stored.dtype)[""].cpu())
