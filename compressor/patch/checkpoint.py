"""Write a model, patched or not, as a checkpoint directory that `from_pretrained` loads."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.core_model_loading import revert_weight_conversion

from compressor.modeling_compressor import replacements
from compressor.models.deferred import is_deferred, realize
from compressor.models.offload import disk_weights_of, read_tensor
from compressor.models.safetensors_files import write_shard
from compressor.runtime.errors import InputError
from compressor.runtime.stored_weights import INDEX

SHARD_SIZE = "5GB"


def write_checkpoint(
    model: Any,
    tokenizer: Any,
    directory: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = SHARD_SIZE,
) -> None:
    """Write config, weights, tokenizer and generation files (and, with replacements, the modeling file).

    Floating-point tensors are stored as `dtype` (None: as they are). The model in memory is not changed.
    """
    directory = Path(directory)
    refuse_unsavable(model, directory)
    on_disk = disk_weights_of(model) is not None or is_deferred(model)
    weights = {} if on_disk else cast(model.state_dict(), dtype)
    config, generation_config = model.config, model.generation_config
    model.config = copy.deepcopy(config)  # save_pretrained writes into it
    model.generation_config = (
        GenerationConfig()
    )  # the real one is written below, because save_pretrained refuses one that is not valid
    try:
        model.save_pretrained(directory, state_dict=weights, max_shard_size=max_shard_size)
    finally:
        model.config, model.generation_config = config, generation_config
    if on_disk:
        write_weights_from_disk(model, directory, dtype or model.dtype, max_shard_size)
    if dtype is not None:
        set_dtype(directory / "config.json", dtype)
    generation_config.to_json_file(directory / "generation_config.json")
    tokenizer.save_pretrained(directory)


def write_weights_from_disk(model: Any, directory: Path, dtype: torch.dtype, max_shard_size: int | str) -> None:
    """Write the weight files as save_pretrained would, for a model whose weights are on disk: tensor by tensor."""
    guards = [module.guard for module in replacements(model).values()][:1]
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in model.state_dict(keep_vars=True).items()}
    shapes |= {guard: (torch.Size([0]), dtype) for guard in guards}
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    empty = {
        name: torch.empty(shape, dtype=dtype if kind.is_floating_point else kind, device="meta")
        for name, (shape, kind) in shapes.items()
        if tied.get(name) not in shapes
    }
    stored = revert_weight_conversion(model, dict(empty))
    model_names = {id(tensor): name for name, tensor in empty.items()}
    converted = [name for name, tensor in stored.items() if id(tensor) not in model_names]
    if converted:
        raise InputError(f"{converted[0]} is not stored as it is computed with; leave --low-memory out")

    def read(name: str) -> Tensor:
        model_name = model_names[id(stored[name])]
        if model_name in guards:
            return torch.zeros(0, dtype=dtype)
        tensor: Tensor = realize(read_tensor(model, model_name))
        return tensor.to(stored[name].dtype)

    split = split_torch_state_dict_into_shards(
        stored, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
    )
    for file in directory.glob("*.safetensors"):  # save_pretrained was given no weights and wrote an empty file
        file.unlink()
    for file_name, names in split.filename_to_tensors.items():
        write_shard(directory / file_name, {name: stored[name] for name in names}, read)
    if split.is_sharded:
        metadata = {"total_parameters": model.num_parameters(), **split.metadata}
        index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
        (directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def count_parameters(model: nn.Module) -> int:
    """How many distinct parameters the model stores: tied weights count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def refuse_unsavable(model: Any, directory: Path) -> None:
    """Refuse a directory that is not empty, a quantized model, and a model with code of its own."""
    if any(directory.iterdir()):
        raise InputError(f"{directory} is not empty; name a new directory")
    if getattr(model, "hf_quantizer", None) is not None:
        method = model.hf_quantizer.quantization_config.quant_method
        raise InputError(f"the model is quantized ({method}) and cannot be written; load unquantized weights instead")
    refuse_foreign_code(model)


def refuse_foreign_code(model: Any) -> None:
    """Refuse a model with code of its own: the stock classes could not load its checkpoint."""
    if not type(model).__module__.startswith("transformers."):
        name = type(model).__name__
        raise InputError(f"{name} is code from outside transformers and cannot be written; use a built-in model type")


def cast(state: dict[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The state dict with its floating-point tensors as `dtype`; tensors that share memory still share it."""
    converted: dict[tuple[Any, ...], Tensor] = {}  # by the memory that a tensor occupies

    def convert(name: str, tensor: Tensor) -> Tensor:
        if dtype in (None, tensor.dtype) or not tensor.is_floating_point():
            return tensor
        if tensor.device.type == "meta":  # offloaded by accelerate: saving reads it from disk as it is
            raise InputError(
                f"{name} is offloaded as {tensor.dtype} and cannot be written as {dtype}; load it as {dtype}"
            )
        memory = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride())
        if memory not in converted:
            converted[memory] = tensor.to(dtype)
        return converted[memory]

    return {name: convert(name, tensor) for name, tensor in state.items()}


def set_dtype(config_file: Path, dtype: torch.dtype) -> None:
    """Name the dtype of the stored weights in config.json."""
    config = json.loads(config_file.read_text(encoding="utf-8"))
    config["dtype"] = str(dtype).removeprefix("torch.")
    config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
