"""Loads a checkpoint whose feed-forward blocks were replaced; copied into every such checkpoint.

It imports nothing but torch and transformers, so it also works where the package that wrote the checkpoint is not
installed. config.json names the replaced modules in `quantization_config`. Importing this file teaches transformers
that quantization method: while the stock model is still on the meta device, the named modules are swapped, and then the
weights load as they always do.
"""

from __future__ import annotations

import copy
import functools
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

METHOD = "compressor"
SCHEMA_VERSION = 1
SPEC_KEYS = {"kind", "rank", "neurons", "width", "residual_inside", "bypass", "activation", "gated", "inner_bias"}
FIRST_SPECS = {"activation": None, "gated": False, "inner_bias": False}  # of checkpoints from before kept neurons
FILE_NAME = "modeling_compressor.py"
AUTO_MAP = {
    "AutoConfig": "modeling_compressor.CompressedConfig",
    "AutoModelForCausalLM": "modeling_compressor.CompressedModelForCausalLM",
}


class Replacement(nn.Module):
    """What stands in for a feed-forward block: y = bias + up(down x) + outer·act(inner x) of the kept neurons.

    A `rank` of None is one dense matrix instead of up and down; a rank of 0 has neither. Without neurons the last part
    is absent; gated neurons are act(gate x) · (inner x). All parameters begin at zero.
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
        self.bypass: tuple[str, ...] = ()  # modules that become identities because this one does their work
        self.guard = ""  # the stock weight that is gone: see `save_pretrained`

        def zeros(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))

        if rank is None:
            self.weight = zeros(width, width)
        elif rank > 0:
            self.down = zeros(rank, width)
            self.up = zeros(width, rank)
        if activation is not None:
            self.act = ACT2FN[activation]
            self.inner = zeros(neurons, width)
            self.outer = zeros(width, neurons)
            self.inner_bias = zeros(neurons) if inner_bias else None
            if gated:
                self.gate = zeros(neurons, width)
                self.gate_bias = zeros(neurons) if inner_bias else None
        self.bias = zeros(width)

    def forward(self, hidden_states: Tensor, residual: Tensor | None = None, **_: Any) -> Tensor:
        output: Tensor = self.bias
        for rows, weight in self.parts(hidden_states):
            first = output is self.bias
            output = functional.linear(rows, weight, output) if first else output + functional.linear(rows, weight)
        if output is self.bias:
            output = output.expand(hidden_states.shape).clone()  # a copy: Falcon adds to the output in place
        return output + residual if self.residual_inside and residual is not None else output

    def parts(self, hidden_states: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows and the matrix that takes them to the output."""
        if self.neurons:
            yield self.activate(hidden_states), self.outer
        if self.rank is None:
            yield hidden_states, self.weight
        elif self.rank > 0:
            yield functional.linear(hidden_states, self.down), self.up

    def activate(self, hidden_states: Tensor) -> Tensor:
        """The kept neurons' activations."""
        inner = functional.linear(hidden_states, self.inner, self.inner_bias)
        if self.gated:
            return self.act(functional.linear(hidden_states, self.gate, self.gate_bias)) * inner  # type: ignore[no-any-return]
        return self.act(inner)  # type: ignore[no-any-return]

    @property
    def kind(self) -> str:
        if self.neurons:
            return "pruned" if self.rank == 0 else "hybrid"
        return "linear" if self.rank is None else "lowrank" if self.rank > 0 else "bias"

    def spec(self) -> dict[str, Any]:
        """This replacement without its weights, as config.json keeps it."""
        names = ("kind", "rank", "neurons", "width", "residual_inside", "activation", "gated")
        found = {name: getattr(self, name) for name in names}
        return {**found, "inner_bias": self.has_inner_bias, "bypass": list(self.bypass)}

    def extra_repr(self) -> str:
        return f"{self.kind}, width={self.width}, rank={self.rank}, neurons={self.neurons}"


def build(spec: Mapping[str, Any]) -> Replacement:
    """An empty replacement of this spec, or a ValueError for a spec that this version does not know."""
    spec = {**FIRST_SPECS, **spec}
    odd = ", ".join(sorted(set(spec) ^ SPEC_KEYS))
    if odd:
        raise ValueError(f"a replacement has missing or unknown keys: {odd}; install the compressor that wrote it")
    if spec["activation"] not in (None, *ACT2FN):
        raise ValueError(f"a replacement has the activation {spec['activation']!r}, which this transformers has not")
    given = {key: spec[key] for key in ("neurons", "activation", "gated", "inner_bias")}
    module = Replacement(spec["width"], spec["rank"], spec["residual_inside"], **given)
    module.bypass = tuple(spec["bypass"])
    if module.spec() != spec:
        raise ValueError(f"a replacement of this kind is not known: {spec}; install the compressor that wrote it")
    return module


def replacements(model: nn.Module) -> dict[str, Replacement]:
    """Every replacement in the model by its path, also those of another copy of this file."""
    modules: Any = model.named_modules()
    return {path: module for path, module in modules if getattr(module, "is_compressor_replacement", False)}


def specs(model: nn.Module) -> dict[str, dict[str, Any]]:
    """The table {module path → replacement spec} of a model."""
    return {path: module.spec() for path, module in replacements(model).items()}


def swap(model: nn.Module, modules: Mapping[str, Replacement]) -> dict[str, nn.Module]:
    """Put each replacement at its path and identities at its bypass; return what stood there, for `restore`.

    From then on `model.save_pretrained` writes a checkpoint that loads.
    """
    originals: dict[str, nn.Module] = {}
    for path, module in modules.items():
        for place in (path, *module.bypass):
            originals[place] = model.get_submodule(place)
        module.guard = guard_of(originals, path, module)
        model.set_submodule(path, module)
        for place in module.bypass:
            model.set_submodule(place, nn.Identity())
    if originals and hasattr(model, "save_pretrained"):
        # A partial in the instance, for it follows the model through deepcopy and pickle.
        model.save_pretrained = functools.partial(save_pretrained, model)  # type: ignore[assignment]
    return originals


def restore(model: nn.Module, originals: Mapping[str, nn.Module]) -> None:
    """Undo the `swap` that returned these modules."""
    for path, module in originals.items():
        model.set_submodule(path, module)
    if not replacements(model):
        model.__dict__.pop("save_pretrained", None)


def guard_of(originals: Mapping[str, nn.Module], path: str, module: Replacement) -> str:
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
    warning. So one weight that it expects is stored with shape [0]: a size mismatch, which is an error.
    """
    if is_main_process:
        directory = Path(save_directory)
        directory.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(__file__, directory / FILE_NAME)
    state_dict = dict(model.state_dict() if state_dict is None else state_dict)
    path, module = next(iter(replacements(model).items()))
    if f"{path}.bias" in state_dict:  # not when only adapters are saved, or another process saves
        state_dict[module.guard] = torch.zeros(0, dtype=state_dict[f"{path}.bias"].dtype)
    config = model.config
    model.config = copy.deepcopy(config)
    model.config.quantization_config = CompressorConfig(replacements=specs(model))
    model.config.auto_map = {**(getattr(config, "auto_map", None) or {}), **AUTO_MAP}
    try:
        type(model).save_pretrained(model, save_directory, is_main_process, state_dict, *args, **kwargs)
    finally:
        model.config = config


class CompressorConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """The `quantization_config` of config.json: the table {module path → replacement spec}."""

    def __init__(
        self,
        replacements: dict[str, dict[str, Any]],
        schema_version: int = SCHEMA_VERSION,
        quant_method: str = METHOD,
        **unknown: Any,
    ) -> None:
        if schema_version != SCHEMA_VERSION:
            raise ValueError(
                f"the checkpoint has schema_version {schema_version}, this compressor reads {SCHEMA_VERSION}; "
                "install the compressor that wrote it"
            )
        if unknown:
            raise ValueError(f"quantization_config has unknown keys: {', '.join(sorted(unknown))}")
        self.quant_method = quant_method
        self.schema_version = schema_version
        self.replacements = replacements


class CompressorQuantizer(HfQuantizer):  # type: ignore[misc]
    """Swaps the replaced modules before the weights load. Nothing is quantized, and afterwards nothing says so."""

    requires_calibration = True  # a stock checkpoint cannot be loaded as a compressed one

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        table = {}
        for path, spec in self.quantization_config.replacements.items():
            module = build(spec)
            module.bypass = tuple(locate(model, place) for place in module.bypass)
            table[locate(model, path)] = module
        swap(model, table)
        ignored = {re.escape(module.guard) + "$" for module in table.values()}
        model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), *ignored}
        self.shapes = {name: parameter.shape for name, parameter in model.named_parameters()}

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> None:
        check_loaded(model, self.shapes)
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
    """The path in this model, which may be the bare backbone (AutoModel) of the one that was saved."""
    for candidate in (path, path.removeprefix(f"{model.base_model_prefix}.")):
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

        return AutoConfig.from_pretrained(path, **{**kwargs, "trust_remote_code": False})


class CompressedModelForCausalLM:
    """`AutoModelForCausalLM` of the checkpoint: the stock one, which now knows the quantizer."""

    register_for_auto_class = staticmethod(lambda auto_class=None: None)

    @staticmethod
    def from_pretrained(path: Any, *args: Any, **kwargs: Any) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(path, *args, **{**kwargs, "trust_remote_code": False})


# setdefault, for the package and a checkpoint's copy of this file may both be imported.
AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault(METHOD, CompressorConfig)
AUTO_QUANTIZER_MAPPING.setdefault(METHOD, CompressorQuantizer)
