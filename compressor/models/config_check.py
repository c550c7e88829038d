"""Compare a config.json with the stored tensors before memory is allocated for the model.

transformers trusts a config: it builds a list of a billion layers, or a table for as many positions, and fills weights
that are not in the files with random numbers. So the model is first built on the meta device, which takes no memory,
and its shapes are compared with those of the stored tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from compressor.modeling_compressor import put_replacements
from compressor.models.blocks import unsupported
from compressor.models.offload import device_of
from compressor.models.safetensors_files import StoredTensor
from compressor.runtime.errors import InputError

CONFIG_BYTES = 4 * 2**20
REPEATED = re.compile(
    r"(layers?|experts?|blocks|stages|depths?|labels|heads?|attention_types)$"
)  # lists are made of it
MODULES = re.compile(r"(layers?|experts?|blocks|stages|depths?|attention_types)$")
POSITIONS = re.compile(r"position|seq_len|n_ctx|max_length")
MOST_REPEATED = 100_000
MOST_POSITIONS = 2**27
ALLOWED_MODULES = 128  # a config may ask for this many layers however few tensors are stored
UNSTORED_ELEMENTS = 2**28  # tables of positions and masks may have this many elements without being stored


def numbers_in(value: Any, key: str = "") -> Iterator[tuple[str, int]]:
    """Every integer in nested dictionaries and lists, with the dictionary key that is nearest to it."""
    if isinstance(value, dict):
        for name, child in value.items():
            yield from numbers_in(child, str(name))
    elif isinstance(value, (list, tuple)):
        for child in value:
            yield from numbers_in(child, key)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield key, value


def refuse_huge_numbers(raw: Mapping[str, Any], model: str) -> None:
    """Refuse numbers so large that making a config object of them would exhaust the memory."""
    for key, number in numbers_in(raw):
        most = MOST_REPEATED if REPEATED.search(key) else MOST_POSITIONS if POSITIONS.search(key) else None
        if most is not None and number > most:
            shown = str(number) if number < 10**15 else f"a number of {len(str(number))} digits"
            raise InputError(f"config.json of {model} sets {key} to {shown}; no model has more than {most:,}")


def check_config_fits(
    config: Any,
    raw: Mapping[str, Any],
    stored: Mapping[str, StoredTensor],
    model: str,
    *,
    trust_remote_code: bool = False,
) -> int:
    """Refuse a config that the stored tensors do not fit; return how many elements its parameters and buffers have.

    Tensors are matched by name, with or without the base model's prefix. Others are skipped: transformers renames some.
    """
    for key, number in numbers_in(raw):
        if MODULES.search(key) and number > max(ALLOWED_MODULES, len(stored)):
            raise InputError(
                f"config.json of {model} sets {key} to {number}, but its weights are only {len(stored)} tensors; "
                "give the config that belongs to them"
            )
    with torch.device("meta"):
        meta_model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
        replaced = put_replacements(meta_model, read_replacement_specs(raw))
    expected = {name: tensor.shape for name, tensor in meta_model.state_dict().items()}
    first_names = {
        f"{path}.{now}": f"{path}.{before}"
        for path, module in replaced.items()
        for now, before in module.first_names().items()
    }
    prefix = f"{meta_model.base_model_prefix}."
    for name, shape in sorted(expected.items()):
        names = (name, first_names.get(name, name))
        spellings = (spelling for n in names for spelling in (n, n.removeprefix(prefix), prefix + n))
        tensor = next((stored[spelling] for spelling in spellings if spelling in stored), None)
        if tensor is not None and tensor.shape != shape:
            shapes = f"{name} is {list(tensor.shape)}, config.json says {list(shape)}"
            raise InputError(f"weights of {model} do not fit its config: {shapes}")
    size: int = sum(tensor.numel() for tensor in (*meta_model.parameters(), *meta_model.buffers()))
    stored_size = sum(tensor.shape.numel() for tensor in stored.values())
    if size > 2 * stored_size + UNSTORED_ELEMENTS:
        raise InputError(
            f"config.json of {model} describes a model of {size:.3g} numbers, but its weights hold {stored_size:.3g}; "
            "give the config that belongs to them"
        )
    return size


def read_replacement_specs(raw: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The replacement specs in the config of a compressed checkpoint, by module path; none in any other config."""
    table = (raw.get("quantization_config") or {}).get("replacements") or {}
    if not isinstance(table, dict) or not all(isinstance(spec, dict) for spec in table.values()):
        raise ValueError("quantization_config.replacements is not a table of replacements")
    return table


@torch.no_grad()
def run_short_pass(loaded: Any) -> None:
    """Run two tokens through the model: settings that cannot be computed with fail here, not in a measurement."""
    ids = torch.zeros(1, 2, dtype=torch.long, device=device_of(loaded))
    output = loaded(input_ids=ids, use_cache=True)
    if output.logits.shape[:2] != ids.shape:
        raise ValueError(f"its logits have shape {list(output.logits.shape)}")
    if getattr(output, "past_key_values", None) is None:
        raise unsupported(loaded.config.model_type, "it keeps no past_key_values, which continuing a text needs")
