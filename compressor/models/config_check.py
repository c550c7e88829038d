"""What a config.json promises, held against the stored tensors before anything is allocated for it.

transformers believes a config: it makes a list of a billion layers, or a table for as many positions, and fills what
the weights do not hold with random numbers. Here the model is built without memory (on the meta device) and compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from compressor.modeling_compressor import build
from compressor.models.offload import device_of
from compressor.models.safetensors_files import Stored
from compressor.runtime.errors import InputError

CONFIG_BYTES = 4 * 2**20
REPEATED = re.compile(
    r"(layers?|experts?|blocks|stages|depths?|labels|heads?|attention_types)$"
)  # lists are made of it
MODULES = re.compile(r"(layers?|experts?|blocks|stages|depths?|attention_types)$")
PLACES = re.compile(r"position|seq_len|n_ctx|max_length")
MOST_REPEATED = 100_000
MOST_PLACES = 2**27
FEW = 128  # modules that cost nothing, however few tensors there are
SLACK = 2**28  # elements that no file has to hold: tables of positions and masks


def numbers_in(value: Any, key: str = "") -> Iterator[tuple[str, int]]:
    """Every whole number with the key that it stands under, however deep in lists."""
    if isinstance(value, dict):
        for name, child in value.items():
            yield from numbers_in(child, str(name))
    elif isinstance(value, (list, tuple)):
        for child in value:
            yield from numbers_in(child, key)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield key, value


def refuse_absurd(raw: Mapping[str, Any], model: str) -> None:
    """Numbers that would hurt as soon as a config object is made of them."""
    for key, number in numbers_in(raw):
        most = MOST_REPEATED if REPEATED.search(key) else MOST_PLACES if PLACES.search(key) else None
        if most is not None and number > most:
            shown = str(number) if number < 10**15 else f"a number of {len(str(number))} digits"
            raise InputError(f"config.json of {model} sets {key} to {shown}; no model has more than {most:,}")


def compare(
    config: Any, raw: Mapping[str, Any], stored: Mapping[str, Stored], model: str, *, trust_remote_code: bool = False
) -> int:
    """Refuse a config that the stored tensors do not fit; the numbers that its model holds in memory, buffers included.

    Only tensors of the same name are compared (with or without the base model's prefix): transformers renames some.
    """
    for key, number in numbers_in(raw):
        if MODULES.search(key) and number > max(FEW, len(stored)):
            raise InputError(
                f"config.json of {model} sets {key} to {number}, but its weights are only {len(stored)} tensors; "
                "give the config that belongs to them"
            )
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
        replaced = {path: build(spec) for path, spec in replacements_of(raw).items()}
    expected = {name: tensor.shape for name, tensor in empty.state_dict().items()}
    for path, module in replaced.items():
        gone = tuple(f"{place}." for place in (path, *module.bypass))
        expected = {name: shape for name, shape in expected.items() if not name.startswith(gone)}
        expected |= {f"{path}.{name}": parameter.shape for name, parameter in module.named_parameters()}
    prefix = f"{empty.base_model_prefix}."
    for name, shape in sorted(expected.items()):
        found = next((stored[n] for n in (name, name.removeprefix(prefix), prefix + name) if n in stored), None)
        if found is not None and found.shape != shape:
            shapes = f"{name} is {list(found.shape)}, config.json says {list(shape)}"
            raise InputError(f"weights of {model} do not fit its config: {shapes}")
    size: int = sum(tensor.numel() for tensor in (*empty.parameters(), *empty.buffers()))
    held = sum(tensor.shape.numel() for tensor in stored.values())
    if size > 2 * held + SLACK:
        raise InputError(
            f"config.json of {model} describes a model of {size:.3g} numbers, but its weights hold {held:.3g}; "
            "give the config that belongs to them"
        )
    return size


def replacements_of(raw: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The table of a checkpoint that this tool wrote."""
    table = (raw.get("quantization_config") or {}).get("replacements") or {}
    if not isinstance(table, dict) or not all(isinstance(spec, dict) for spec in table.values()):
        raise ValueError("quantization_config.replacements is not a table of replacements")
    return table


@torch.no_grad()
def try_out(loaded: Any) -> None:
    """One short pass, as every measurement makes it: settings that cannot be computed with show here."""
    ids = torch.zeros(1, 2, dtype=torch.long, device=device_of(loaded))
    output = loaded(input_ids=ids, use_cache=True)
    if output.logits.shape[:2] != ids.shape:
        raise ValueError(f"its logits have shape {list(output.logits.shape)}")
