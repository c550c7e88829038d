"""Loads a checkpoint whose feed-forward blocks or attention were replaced; copied into every such checkpoint.

It imports nothing but torch and transformers, so it also works where the package that wrote the checkpoint is not
installed. config.json names the replaced modules in `quantization_config`. Importing this file teaches transformers
that quantization method: while the stock model is still on the meta device, the named modules are swapped, and then the
weights load as they always do.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import cache_utils
from transformers.activations import ACT2FN
from transformers.core_model_loading import WeightRenaming
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

METHOD = "compressor"
# 1: a replacement's weights were bare parameters; since 2 they are those of nn.Linear modules; 3 knows attention.
# A checkpoint is of the first version that says all that is in it.
SCHEMA_VERSION = 3
# What later versions added to the spec of a replacement, and what it was before; attention's alone is left out there.
ATTENTION_SPECS = {"returns": 0, "biased": True}
FIRST_SPECS = {"activation": None, "gated": False, "inner_bias": False, **ATTENTION_SPECS}
SPEC_KEYS = {"kind", "rank", "neurons", "width", "residual_inside", "bypass", *FIRST_SPECS}
HEADS_KEYS = {"kind", "rank", "heads", "width", "residual_inside", "bypass", "inputs", "output", "counts", "per_head"}
# Attributes of attention modules, or of their configs, that say how many heads there are or how wide they are together.
COUNTS = {"num_heads", "num_attention_heads", "n_heads", "num_key_value_heads", "num_kv_heads", "split_size"}
COUNTS |= {"embed_dim", "config.num_attention_heads"}
FILE_NAME = "modeling_compressor.py"
AUTO_MAP = {
    "AutoConfig": "modeling_compressor.CompressedConfig",
    "AutoModel": "modeling_compressor.CompressedModel",
    "AutoModelForCausalLM": "modeling_compressor.CompressedModelForCausalLM",
}
# The value of `transformers_weights` in config.json, where stock transformers wants the name of a safetensors file. It
# refuses this one and quotes it, whatever flags it is given; `CompressorQuantizer` takes it out of the config.
WEIGHTS_NOTE = (
    "this checkpoint has compressed blocks, which stock transformers cannot read; "
    "load it with trust_remote_code=True, or import compressor first"
)


class Replacement(nn.Module):
    """What stands in for a block: y = bias + up(down x) + outer·act(inner x) of the kept neurons.

    A `rank` of None is one dense matrix, `linear`, instead of up and down; a rank of 0 has neither. Without neurons the
    last part is absent; gated neurons are act(gate x) · (inner x). Every matrix is an nn.Linear, so that adapters and
    quantisers find it. The bias is that of the first part: outer, else linear or up; a block that is only a bias has it
    as a parameter of its own. All parameters begin at zero.

    Attention without heads is the same without neurons: it `returns` a tuple of so many values, the output first, and
    its linear map is `biased` only where the original output projection was.
    """

    is_compressor_replacement = True  # a checkpoint's copy of this file has a Replacement class of its own

    def __init__(
        self,
        width: int,
        rank: int | None,
        residual_inside: bool = False,
        *,
        neurons: int = 0,
        activation: str | None = None,
        gated: bool = False,
        inner_bias: bool = False,
        returns: int = 0,
        biased: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if rank is not None and not 0 <= rank <= width:
            raise ValueError(f"the rank of a replacement must be between 0 and its width {width}, got {rank}")
        if neurons < 0 or (neurons > 0) != (activation is not None) or (neurons == 0 and (gated or inner_bias)):
            raise ValueError(f"{neurons} neurons with activation {activation}: neurons have one, no neurons none")
        self.width = width
        self.rank = rank
        self.residual_inside = residual_inside  # the block is called as ffn(x, residual) and adds the residual itself
        self.neurons, self.activation, self.gated, self.has_inner_bias = neurons, activation, gated, inner_bias
        self.returns, self.biased = returns, biased or neurons > 0 or rank == 0
        self.bypass: tuple[str, ...] = ()  # modules that become identities because this one does their work
        self.guard = ""  # the stock weight that is gone: see `save_pretrained`
        self.cache_index: int | None = None  # the number of the cache's layer that attention would write to

        linear = functools.partial(zero_linear, dtype=dtype, device=device)
        if activation is not None:
            self.act = ACT2FN[activation]
            self.inner = linear(width, neurons, inner_bias)
            if gated:
                self.gate = linear(width, neurons, inner_bias)
            self.outer = linear(neurons, width, True)
        if rank is None:
            self.linear = linear(width, width, biased and not neurons)
        elif rank > 0:
            self.down = linear(width, rank, False)
            self.up = linear(rank, width, biased and not neurons)
        elif not neurons:
            self.bias = nn.Parameter(torch.zeros(width, dtype=dtype, device=device))

    def forward(self, hidden_states: Tensor, residual: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        if self.cache_index is not None:
            leave_cache(self.cache_index, residual, *args, *kwargs.values())
        if self.kind == "bias":
            output = self.bias.expand(hidden_states.shape).clone()  # a copy: Falcon adds to the output in place
        elif self.neurons:
            output = self.outer(self.activate(hidden_states))
            if self.rank != 0:
                output = output + self.map_linearly(hidden_states)
        else:
            output = self.map_linearly(hidden_states)
        if self.residual_inside and residual is not None:
            output = output + residual
        return (output, *[None] * (self.returns - 1)) if self.returns else output

    def map_linearly(self, hidden_states: Tensor) -> Tensor:
        """The dense matrix, or the product of two."""
        return self.linear(hidden_states) if self.rank is None else self.up(self.down(hidden_states))  # type: ignore[no-any-return]

    def activate(self, hidden_states: Tensor) -> Tensor:
        """The kept neurons' activations."""
        inner = self.inner(hidden_states)
        return self.act(self.gate(hidden_states)) * inner if self.gated else self.act(inner)  # type: ignore[no-any-return]

    @property
    def bias_name(self) -> str:
        """The name of the parameter that is added to the output, where there is one."""
        if self.neurons:
            return "outer.bias"
        return "linear.bias" if self.rank is None else "up.bias" if self.rank > 0 else "bias"

    @property
    def output_bias(self) -> nn.Parameter:
        """What is added to the output, where the replacement is biased."""
        return self.get_parameter(self.bias_name)

    def first_names(self) -> dict[str, str]:
        """What every parameter was called in checkpoints of schema 1."""
        names = {"linear.weight": "weight", self.bias_name: "bias"}
        return {
            name: names.get(name, name.removesuffix(".weight").replace(".", "_")) for name, _ in self.named_parameters()
        }

    @property
    def kind(self) -> str:
        if self.neurons:
            return "pruned" if self.rank == 0 else "hybrid"
        return "linear" if self.rank is None else "lowrank" if self.rank > 0 else "bias"

    def spec(self) -> dict[str, Any]:
        """This replacement without its weights, as config.json keeps it."""
        names = ("kind", "rank", "neurons", "width", "residual_inside", "activation", "gated", "returns", "biased")
        found = {name: getattr(self, name) for name in names}
        found |= {"inner_bias": self.has_inner_bias, "bypass": list(self.bypass)}
        return {key: value for key, value in found.items() if ATTENTION_SPECS.get(key, ...) != value}

    def extra_repr(self) -> str:
        return f"{self.kind}, width={self.width}, rank={self.rank}, neurons={self.neurons}"


class KeptHeads(nn.Module):
    """Attention with some of its heads: the stock module with narrower projections, and up(down x) beside it.

    Heads go in units: a key-value head with all of its query heads. `heads` are the numbers of the units that are kept.
    `inputs` are the stock module's projections of x with the outputs that they have left, `output` its output
    projection with the inputs that are left; `counts` are attributes of the stock module (or of its config, as
    "config.NAME") that say how many heads there are. `per_head` is None, or says which arguments have a part for each
    query head, such as ALiBi's slopes: {"heads": query heads of the stock module, "arguments": {name: position}}. The
    output projection always has a bias. A `rank` of 0 has no up and down.
    """

    is_compressor_replacement = True
    first_names = staticmethod(dict[str, str])  # checkpoints of schema 1 had no kept heads

    def __init__(
        self,
        attention: Any,
        width: int,
        rank: int,
        heads: Sequence[int],
        inputs: Mapping[str, int],
        output: tuple[str, int],
        counts: Mapping[str, int],
        residual_inside: bool = False,
        per_head: Mapping[str, Any] | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if not 0 <= rank < width or not heads:
            raise ValueError(f"kept heads have at least one head and a rank below {width}, got {len(heads)} and {rank}")
        self.width, self.rank, self.residual_inside = width, rank, residual_inside
        self.heads, self.inputs, self.output = list(heads), dict(inputs), (output[0], output[1])
        self.counts = dict(counts)
        self.per_head = per_head and {"heads": per_head["heads"], "arguments": dict(per_head["arguments"])}
        self.units = count_units(attention, self)
        if matrix_shape(getattr(attention, output[0]))[0] != width:
            raise ValueError(f"{output[0]} of {type(attention).__name__} has not the width {width}")
        if self.per_head and self.per_head["heads"] % self.units:
            raise ValueError(f"{self.per_head['heads']} query heads cannot belong to {self.units} key-value heads")
        self.bypass: tuple[str, ...] = ()
        self.guard = ""
        self.cache_index: int | None = None
        self.attention = narrow(attention, self, dtype=dtype, device=device)
        if rank > 0:
            self.down = zero_linear(width, rank, False, dtype=dtype, device=device)
            self.up = zero_linear(rank, width, False, dtype=dtype, device=device)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.per_head is not None:
            for name, position in self.per_head["arguments"].items():
                if name in kwargs:
                    kwargs = {**kwargs, name: self.select_heads(kwargs[name])}
                elif len(args) > position:
                    args = (*args[:position], self.select_heads(args[position]), *args[position + 1 :])
        output = self.attention(*args, **kwargs)
        if self.rank == 0:
            return output
        hidden_states = args[0] if args else kwargs["hidden_states"]
        beside = self.up(self.down(hidden_states))
        return (output[0] + beside, *output[1:]) if isinstance(output, (tuple, list)) else output + beside

    def select_heads(self, values: Any) -> Any:
        """The kept heads' parts of an argument: [batch, heads, …] or [batch · heads, …]; one part is for all heads."""
        total: int = self.per_head["heads"]  # type: ignore[index]
        if not isinstance(values, Tensor) or (values.ndim == 4 and values.shape[1] != total):
            return values
        parts = values if values.ndim == 4 else values.reshape(-1, total, *values.shape[1:])
        kept = parts.reshape(len(parts), self.units, -1, *parts.shape[2:])[:, self.heads].flatten(1, 2)
        return kept if values.ndim == 4 else kept.flatten(0, 1)

    @property
    def kind(self) -> str:
        return "hybrid" if self.rank else "pruned"

    @property
    def output_projection(self) -> Any:
        return self.attention.get_submodule(self.output[0])

    @property
    def output_bias(self) -> nn.Parameter:
        return self.output_projection.bias  # type: ignore[no-any-return]

    def spec(self) -> dict[str, Any]:
        """This replacement without its weights, as config.json keeps it."""
        names = ("kind", "rank", "heads", "width", "residual_inside", "inputs", "counts")
        listed = {"output": list(self.output), "per_head": self.per_head, "bypass": list(self.bypass)}
        return {name: getattr(self, name) for name in names} | listed

    def extra_repr(self) -> str:
        return f"{self.kind}, width={self.width}, rank={self.rank}, heads={self.heads}"


def zero_linear(inputs: int, outputs: int, bias: bool, **placement: Any) -> nn.Linear:
    """A linear layer whose parameters are zero; no random numbers are drawn."""
    with torch.device("meta"):
        module = nn.Linear(inputs, outputs, bias=bias)
    for name, parameter in list(module.named_parameters()):
        setattr(module, name, nn.Parameter(torch.zeros(parameter.shape, **placement)))
    return module


def leave_cache(index: int, *arguments: Any) -> None:
    """Mark this layer as one that keeps nothing, in the cache that is among the arguments, if one is.

    Else a cache that moves its layers to the CPU would fetch this one instead of the next, and one with a sliding
    window could not be cut. Early versions of transformers 5 have no such mark.
    """
    for cache in arguments if hasattr(cache_utils, "DummyLayer") else ():
        layers = cache.layers if isinstance(cache, cache_utils.Cache) else []
        if index < len(layers) and not layers[index].is_initialized:
            layers[index] = cache_utils.DummyLayer()


class OtherCounts:
    """A config in which some counts are others; the rest is read from the stock config, which may change."""

    def __init__(self, stock: Any, counts: Mapping[str, int]) -> None:
        self.__dict__.update(counts, stock=stock)

    def __getattr__(self, name: str) -> Any:
        if name == "stock" or name.startswith("__"):  # while it is copied
            raise AttributeError(name)
        return getattr(self.stock, name)


def count_units(stock: Any, module: KeptHeads) -> int:
    """How many units the stock attention has, or a ValueError where the kept ones cannot be some of them."""
    heads, output, kept, name = module.heads, module.output, len(module.heads), type(stock).__name__
    sizes = {}  # of all units and of the kept ones
    for part, size in (*module.inputs.items(), output):
        if not isinstance(getattr(getattr(stock, part, None), "weight", None), Tensor):
            raise ValueError(f"{name} has no projection that is called {part}")
        sizes[part] = (matrix_shape(getattr(stock, part))[part == output[0]], size)
    for part, size in module.counts.items():
        owner, attribute = (stock.config, part[7:]) if part.startswith("config.") else (stock, part)
        if part not in COUNTS or not isinstance(getattr(owner, attribute, None), int):
            raise ValueError(f"{name} has no count of heads that is called {part}")
        sizes[part] = (getattr(owner, attribute), size)
    units = sizes[output[0]][0] * kept // max(output[1], 1)
    if {*map(type, heads)} != {int} or sorted({*heads}) != heads or not 0 <= heads[0] <= heads[-1] < units:
        raise ValueError(f"the kept heads {heads} are not some of the {units} of {name} in their order")
    width = getattr(stock, "head_dim", getattr(stock, "head_size", 1))
    if any(sizes[part][0] % (units * width) for part in (*module.inputs, output[0])):
        raise ValueError(f"the kept heads {heads} of {name} cannot have {output[1]} inputs of {output[0]}")
    for part, (whole, size) in sizes.items():
        if whole % units or whole // units * kept != size or type(size) is not int:
            raise ValueError(f"{kept} of {units} heads of {name} leave {whole * kept / units:g} of {part}, not {size}")
    return units


def matrix_shape(module: Any) -> tuple[int, int]:
    """Outputs and inputs of a linear module; the matrix of a Conv1D is stored transposed."""
    outputs, inputs = module.weight.shape if isinstance(module, nn.Linear) else module.weight.T.shape
    return outputs, inputs


def narrow(stock: Any, kept: KeptHeads, **placement: Any) -> Any:
    """A copy of a stock attention module, which stays as it is, with projections of fewer heads, all zeros."""
    module = copy.copy(stock)
    module.__dict__.update(vars(nn.Module()))  # without hooks, and without the forward of accelerate's
    for name in ("forward", "_old_forward", "_hf_hook"):
        module.__dict__.pop(name, None)
    for name in ("training", "_parameters", "_buffers", "_non_persistent_buffers_set", "_modules"):
        module.__dict__[name] = copy.copy(stock.__dict__[name])
    projections = {name: (None, rows) for name, rows in kept.inputs.items()} | {kept.output[0]: (kept.output[1], None)}
    for name, child in stock.named_children():
        if name not in projections:
            setattr(module, name, copy.deepcopy(child))
    for name, (columns, rows) in projections.items():
        outputs, features = matrix_shape(getattr(stock, name))
        biased = getattr(stock, name).bias is not None or name == kept.output[0]
        setattr(module, name, zero_linear(columns or features, rows or outputs, biased, **placement))
    module.__dict__.update((name, count) for name, count in kept.counts.items() if not name.startswith("config."))
    in_config = {name[7:]: count for name, count in kept.counts.items() if name.startswith("config.")}
    if in_config:
        module.config = OtherCounts(stock.config, in_config)
    return module


def build(spec: Mapping[str, Any], stock: nn.Module | None = None, **placement: Any) -> Any:
    """An empty replacement of this spec, or a ValueError for a spec that this version does not know.

    Kept heads are made of the `stock` attention that they take the place of.
    """
    with_heads = "heads" in spec
    spec = dict(spec) if with_heads else {**FIRST_SPECS, **spec}
    odd = ", ".join(sorted(set(spec) ^ (HEADS_KEYS if with_heads else SPEC_KEYS)))
    if odd:
        raise ValueError(f"a replacement has missing or unknown keys: {odd}; install the compressor that wrote it")
    module: Any
    if with_heads:
        try:
            module = KeptHeads(stock, **{key: spec[key] for key in HEADS_KEYS - {"kind", "bypass"}}, **placement)
        except (TypeError, KeyError, IndexError, AttributeError) as error:
            raise ValueError(f"a replacement of attention cannot be read: {spec}") from error
    elif spec["activation"] not in (None, *ACT2FN):
        raise ValueError(f"a replacement has the activation {spec['activation']!r}, which this transformers has not")
    else:
        given = {key: spec[key] for key in ("neurons", "activation", "gated", "inner_bias", "returns", "biased")}
        module = Replacement(spec["width"], spec["rank"], spec["residual_inside"], **given, **placement)
        module.bypass = tuple(spec["bypass"])
    if {**({} if with_heads else FIRST_SPECS), **module.spec()} != spec:
        raise ValueError(f"a replacement of this kind is not known: {spec}; install the compressor that wrote it")
    return module


def replacements(model: nn.Module) -> dict[str, Replacement]:
    """Every replacement in the model by its path, also those of another copy of this file."""
    modules: Any = model.named_modules()
    return {path: module for path, module in modules if getattr(module, "is_compressor_replacement", False)}


def specs(model: nn.Module) -> dict[str, dict[str, Any]]:
    """The table {module path → replacement spec} of a model."""
    return {path: module.spec() for path, module in replacements(model).items()}


def swap(model: nn.Module, modules: Mapping[str, Replacement | KeptHeads]) -> dict[str, nn.Module]:
    """Put each replacement at its path and identities at its bypass; return what stood there, for `restore`.

    From then on `model.save_pretrained` writes a checkpoint that loads.
    """
    originals: dict[str, nn.Module] = {}
    for path, module in modules.items():
        for place in (path, *module.bypass):
            originals[place] = model.get_submodule(place)
        module.guard = guard_of(originals, path, module)
        places = (getattr(originals[path], name, None) for name in ("layer_idx", "layer_id", "cache_index"))
        module.cache_index = next((place for place in places if place is not None), None)
        model.set_submodule(path, module)
        for place in module.bypass:
            model.set_submodule(place, nn.Identity())
    for name, method in METHODS.items():
        if originals and hasattr(model, name):
            # A partial in the instance, for it follows the model through deepcopy and pickle.
            setattr(model, name, functools.partial(method, model))
    return originals


def restore(model: nn.Module, originals: Mapping[str, nn.Module]) -> None:
    """Undo the `swap` that returned these modules."""
    for path, module in originals.items():
        model.set_submodule(path, module)
    if not replacements(model):
        for name in METHODS:
            model.__dict__.pop(name, None)


def put_replacements(model: Any, table: Mapping[str, Mapping[str, Any]]) -> dict[str, Replacement]:
    """Swap in what config.json names, in the dtype and on the device of what stood there; return it by its path."""
    modules = {}
    for stored_path, spec in table.items():
        path = locate(model, stored_path)
        like = next(model.get_submodule(path).parameters(), torch.empty(0))
        module = build(spec, model.get_submodule(path), dtype=like.dtype, device=like.device)
        module.bypass = tuple(locate(model, place) for place in module.bypass)
        modules[path] = module
    swap(model, modules)
    return modules


def guard_of(originals: Mapping[str, nn.Module], path: str, module: Replacement | KeptHeads) -> str:
    """The name of a weight matrix that the stock model has and the swapped model has not."""
    inherited = getattr(originals[path], "guard", None)  # one replacement takes the place of another
    if inherited:
        return str(inherited)
    place = (path, *module.bypass)[-1]
    for name, parameter in originals[place].named_parameters():
        if parameter.ndim > 1:
            return f"{place}.{name}"
    raise ValueError(f"{place} has no weight matrix, so it cannot be a feed-forward block")


def save_pretrained(
    model: Any,
    save_directory: str | os.PathLike[str],
    is_main_process: bool = True,
    state_dict: dict[str, Tensor] | None = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """What `model.save_pretrained` is for a model with replacements: the stock one, plus what loading needs.

    Stock transformers without this file would load such a checkpoint with random feed-forward blocks and a mere
    warning. So config.json has WEIGHTS_NOTE, which stops it. And for readers that do not look there, one weight that
    the stock model has is stored with shape [0], which does not fit.
    """
    if is_main_process:
        directory = Path(save_directory)
        directory.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(__file__, directory / FILE_NAME)
    state_dict = dict(model.state_dict() if state_dict is None else state_dict)
    path, module = next(iter(replacements(model).items()))
    first = f"{path}.{next(module.named_parameters())[0]}"
    if first in state_dict:  # not when only adapters are saved, or another process saves
        state_dict[module.guard] = torch.zeros(0, dtype=state_dict[first].dtype)
    config = model.config
    model.config = copy.deepcopy(config)
    model.config.quantization_config = CompressorConfig(replacements=specs(model))
    model.config.auto_map = {**(getattr(config, "auto_map", None) or {}), **AUTO_MAP}
    # In the instance, for the stock method deletes `transformers_weights` just before it writes.
    model.config.__dict__["to_json_file"] = functools.partial(write_config, model.config)
    try:
        type(model).save_pretrained(model, save_directory, is_main_process, state_dict, *args, **kwargs)
    finally:
        model.config = config


def static_cache_shape(model: Any) -> Any:
    """None where heads differ from layer to layer: then a static cache takes its sizes from the first keys it sees."""
    varied = CompressorConfig(replacements=specs(model)).schema_version >= 3
    return None if varied else type(model)._get_static_cache_init_shape(model)


METHODS: dict[str, Any] = {"save_pretrained": save_pretrained, "_get_static_cache_init_shape": static_cache_shape}


def write_config(config: Any, file: str | os.PathLike[str], **kwargs: Any) -> None:
    """Write config.json with WEIGHTS_NOTE in it."""
    del config.__dict__["to_json_file"]  # all that stands there is written
    config.to_json_file(file, **kwargs)
    values = json.loads(Path(file).read_text(encoding="utf-8"))
    values["transformers_weights"] = WEIGHTS_NOTE
    Path(file).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


class CompressorConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """The `quantization_config` of config.json: the table {module path → replacement spec}."""

    newest = SCHEMA_VERSION

    def __init__(
        self,
        replacements: dict[str, dict[str, Any]],
        schema_version: int | None = None,
        quant_method: str = METHOD,
        **unknown: Any,
    ) -> None:
        has_attention = any({"heads", *ATTENTION_SPECS} & {*spec} for spec in replacements.values())
        if schema_version is None:
            schema_version = 3 if has_attention else 2
        if schema_version not in range(1, SCHEMA_VERSION + 1):
            raise ValueError(
                f"the checkpoint has schema_version {schema_version}, this compressor reads 1 to {SCHEMA_VERSION}; "
                "install the compressor that wrote it"
            )
        if has_attention and schema_version < 3:
            raise ValueError(f"schema_version {schema_version} has no attention, but a replacement is one")
        if unknown:
            raise ValueError(f"quantization_config has unknown keys: {', '.join(sorted(unknown))}")
        self.quant_method = quant_method
        self.schema_version = schema_version
        self.replacements = replacements


def without_note(config: Any) -> Any:
    """The config without WEIGHTS_NOTE."""
    if getattr(config, "transformers_weights", None) == WEIGHTS_NOTE:
        config = copy.copy(config)
        del config.transformers_weights
    return config


class Patterns(list[str]):
    """Patterns of weight names: transformers adds them to a list in early versions of 5, and joins a set later."""

    def __or__(self, others: set[str]) -> set[str]:
        return {*self, *others}


class CompressorQuantizer(HfQuantizer):  # type: ignore[misc]
    """Swaps the replaced modules before the weights load. Nothing is quantized, and afterwards nothing says so."""

    requires_calibration = True  # a stock checkpoint cannot be loaded as a compressed one

    def __init__(self, quantization_config: CompressorConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.renamings: list[WeightRenaming] = []
        self.shapes: dict[str, torch.Size] = {}

    def update_attn_implementation(self, config: Any) -> Any:
        """The config as transformers goes on with it: the weights are looked for under their usual names."""
        return without_note(config)

    update_tp_plan = update_attn_implementation  # the method that is given the config before transformers 5.18

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        modules = put_replacements(model, self.quantization_config.replacements)
        prefix = f"{model.base_model_prefix}."  # is missing where the bare backbone was saved
        ignored = {rf"(^|\.){re.escape(module.guard.removeprefix(prefix))}$" for module in modules.values()}
        ignored.update(model._keys_to_ignore_on_load_unexpected or ())
        model._keys_to_ignore_on_load_unexpected = Patterns(ignored)
        self.shapes = {name: parameter.shape for name, parameter in model.named_parameters()}

    def get_weight_conversions(self) -> list[WeightRenaming]:
        """How the weights of a checkpoint of schema 1 are called now."""
        if self.quantization_config.schema_version == 1:
            self.renamings = [
                WeightRenaming(f"^{re.escape(f'{path}.{before}')}$", f"{path}.{now}")
                for path, spec in self.quantization_config.replacements.items()
                for now, before in build(spec, device="meta").first_names().items()
                if now != before
            ]
        return self.renamings

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> None:
        check_loaded(model, self.shapes)
        # Saving undoes the renamings that are kept here; the old names are not to be written again.
        if self.renamings:
            model._weight_conversions = [each for each in model._weight_conversions if each not in self.renamings]
        del model.hf_quantizer, model.quantization_method
        model.is_quantized = False  # else .half(), .float() and Trainer refuse
        for module in model.modules():
            if hasattr(module, "config"):
                module.config._is_quantized = False

    def is_serializable(self, **_: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True


def locate(model: Any, path: str) -> str:
    """The path in this model, which may be the bare backbone (AutoModel) of the one that was saved, or have one."""
    prefix = f"{model.base_model_prefix}."
    for candidate in (path, path.removeprefix(prefix), prefix + path):
        try:
            model.get_submodule(candidate)
        except AttributeError:
            continue
        return candidate
    raise ValueError(f"config.json replaces {path}, but {type(model).__name__} has no such module")


def check_loaded(model: nn.Module, shapes: Mapping[str, torch.Size]) -> None:
    """Raise where the checkpoint lacks a replacement's weight or has another shape.

    Transformers checks no shapes when a quantizer is at work, and fills in what is missing.
    """
    for name, parameter in model.named_parameters():
        if parameter.shape != shapes.get(name, parameter.shape):
            raise ValueError(f"{name} has shape {list(parameter.shape)}, config.json says {list(shapes[name])}")
    for path, module in replacements(model).items():
        for name, parameter in module.named_parameters():
            if parameter.device.type != "meta" and not getattr(parameter, "_is_hf_initialized", False):
                raise ValueError(f"the checkpoint has no {path}.{name}; its weights do not belong to its config.json")


class CompressedConfig:
    """`AutoConfig` of the checkpoint: the stock one. It is named in `auto_map` so that this file is imported."""

    register_for_auto_class = staticmethod(lambda auto_class=None: None)

    @staticmethod
    def from_pretrained(path: Any, **kwargs: Any) -> Any:
        from transformers import AutoConfig

        loaded = AutoConfig.from_pretrained(path, **{**kwargs, "trust_remote_code": False})
        if isinstance(loaded, tuple):  # with the arguments that were not used
            return without_note(loaded[0]), *loaded[1:]
        return without_note(loaded)


def is_own(config: Any) -> bool:
    """Whether a quantization_config that is passed on is none at all, or the checkpoint's own (lm-eval does that)."""
    method = config.get("quant_method") if isinstance(config, dict) else getattr(config, "quant_method", None)
    return config is None or method == METHOD


class CompressedModel:
    """`AutoModel` of the checkpoint: the stock one, which now knows the quantizer."""

    auto_class = "AutoModel"
    register_for_auto_class = staticmethod(lambda auto_class=None: None)

    @classmethod
    def from_pretrained(cls, path: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_own(kwargs.get("quantization_config")):
            raise ValueError(
                f"{path} has compressed blocks and cannot be quantised while it loads: its config.json has a "
                "quantization_config already; quantise the loaded model, whose blocks are made of nn.Linear, or export "
                "it with `compress export --to hf-dense` or `--to gguf` and quantise that"
            )
        adapter = dict(kwargs.pop("adapter_kwargs", None) or {})
        adapter_path = adapter.pop("_adapter_model_path", path)  # of peft: that of an adapter made for this checkpoint
        loaded = cls.stock_class().from_pretrained(path, *args, **{**kwargs, "trust_remote_code": False})
        if str(adapter_path) != str(path):  # an adapter in the checkpoint's own directory is loaded already
            model = loaded[0] if isinstance(loaded, tuple) else loaded
            model.load_adapter(adapter_path, kwargs.get("adapter_name", "default"), adapter_kwargs=adapter)
        return loaded

    @classmethod
    def from_config(cls, config: Any, **kwargs: Any) -> Any:
        """A model of the compressed shapes with new weights: those of the replacements are drawn as the stock ones."""
        model = cls.stock_class().from_config(config, **{**kwargs, "trust_remote_code": False})
        table: Any = getattr(config, "quantization_config", None) or {}
        if not isinstance(table, dict):  # an object of this file or of another copy of it
            table = table.to_dict()
        with torch.no_grad():
            for module in put_replacements(model, CompressorConfig.from_dict(table).replacements).values():
                for part in module.modules():
                    if isinstance(part, nn.Linear):
                        model._init_weights(part)
        return model

    _from_config = from_config  # the name by which transformers calls it

    @classmethod
    def stock_class(cls) -> Any:
        import transformers  # not yet whole when this file is imported

        return getattr(transformers, cls.auto_class)


class CompressedModelForCausalLM(CompressedModel):
    """`AutoModelForCausalLM` of the checkpoint."""

    auto_class = "AutoModelForCausalLM"


# The package and copies of this file in checkpoints may all be imported; the newest reads what the others wrote.
if getattr(AUTO_QUANTIZATION_CONFIG_MAPPING.get(METHOD), "newest", 1) < SCHEMA_VERSION:
    AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = CompressorConfig
    AUTO_QUANTIZER_MAPPING[METHOD] = CompressorQuantizer
