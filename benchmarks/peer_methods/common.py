"""What the methods share: the model under test, its linears, and models with fewer neurons."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from compressor.models.blocks import Block, find_blocks
from compressor.patch.checkpoint import count_parameters

BATCH = 8
RIDGE = 1e-8  # of the mean diagonal: keeps a Gram matrix invertible
Take = Callable[[Tensor, Tensor], Any]


class Inapplicable(Exception):
    """The method cannot be used on this model or at this size; the message says why."""


@dataclass(frozen=True, eq=False)
class Subject:
    """A model, and the text that a method may see: windows to calibrate on, and further ones that healing trains on."""

    model: Any
    windows: Tensor
    healing: Tensor | None = None
    directory: Path | None = None  # for statistics that several methods share

    @property
    def blocks(self) -> list[Block]:
        """The FFN of every layer."""
        return find_blocks(self.model)

    @property
    def parameters(self) -> int:
        return count_parameters(self.model)


# The changed copy of the model, without at least so many parameters.
Method = Callable[[Subject, int], Any]


def share_copy(model: Any) -> Any:
    """A copy whose modules may be exchanged. Until then both have the same tensors: nothing writes into them."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def ffn_linears(model: nn.Module, block: Block) -> tuple[list[str], str]:
    """Paths of the linears that read the FFN's input, and of the one that writes its output."""
    roots = [block.path, f"{block.layer_path}.fc2"] if block.path.endswith(".fc1") else [block.path]
    paths = [path for root in roots for path in linears_in(model, root)]
    return paths[:-1], paths[-1]


def linears_in(model: nn.Module, root: str) -> list[str]:
    """Paths of all linears in a module, in order."""
    named = model.get_submodule(root).named_modules()
    return [f"{root}.{name}".rstrip(".") for name, module in named if isinstance(module, (nn.Linear, Conv1D))]


def weight_and_bias(model: nn.Module, path: str) -> tuple[Tensor, Tensor | None]:
    """The weight as [out, in], whichever way the module keeps it, and the bias."""
    module: Any = model.get_submodule(path)
    bias = None if module.bias is None else module.bias.detach()
    return (module.weight.T if isinstance(module, Conv1D) else module.weight).detach(), bias


def as_linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    linear.load_state_dict({"weight": weight} if bias is None else {"weight": weight, "bias": bias})
    return linear


def ridged(gram: Tensor, ridge: float = RIDGE) -> Tensor:
    size = ridge * gram.diagonal().mean().clamp_min(1e-30)  # a layer may put out nothing
    return gram + size * torch.eye(len(gram), dtype=gram.dtype)


@torch.no_grad()
def observe(model: Any, windows: Tensor, paths: Iterable[str], take: Take) -> Iterator[dict[str, Any]]:
    """Batch by batch, what `take` makes of the rows [tokens, width] into and out of every module named."""
    seen: dict[str, Any] = {}

    def see(path: str, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        pair = (args[0] if args else kwargs["hidden_states"], output if isinstance(output, Tensor) else output[0])
        seen[path] = take(*(rows.reshape(-1, rows.shape[-1]) for rows in pair))

    handles = [model.get_submodule(path).register_forward_hook(partial(see, path), with_kwargs=True) for path in paths]
    try:
        for start in range(0, len(windows), BATCH):
            model.base_model(input_ids=windows[start : start + BATCH], use_cache=False)
            yield seen
    finally:
        for handle in handles:
            handle.remove()


def share_out(amounts: Sequence[float]) -> list[int]:
    """Whole numbers near these amounts, whose sum is theirs, rounded up."""
    found: list[int] = []
    wanted = 0.0
    for amount in amounts:
        wanted += amount
        found.append(max(0, math.ceil(wanted - 1e-6) - sum(found)))
    return found


def neuron_size(model: nn.Module, block: Block) -> int:
    """The parameters of one neuron of an FFN."""
    ups, down = ffn_linears(model, block)
    weight, _ = weight_and_bias(model, down)
    parameters = sum(p.numel() for up in ups for p in model.get_submodule(up).parameters())
    return parameters // weight.shape[1] + weight.shape[0]


def neuron_count(model: nn.Module, block: Block) -> int:
    return weight_and_bias(model, ffn_linears(model, block)[1])[0].shape[1]


def share_neurons(subject: Subject, parameters: int, weights: Sequence[float] | None = None) -> list[int]:
    """How many neurons of every FFN go, in these proportions (else alike), so that so many parameters do."""
    blocks = subject.blocks
    shares = list(weights or [1.0] * len(blocks))
    sizes = [neuron_size(subject.model, block) for block in blocks]
    counts = [neuron_count(subject.model, block) for block in blocks]
    wanted = parameters / sum(share * size * count for share, size, count in zip(shares, sizes, counts, strict=True))
    removed = share_out([wanted * share * count for share, count in zip(shares, counts, strict=True)])
    if any(gone >= count for gone, count in zip(removed, counts, strict=True)):
        raise Inapplicable(f"{parameters:,} parameters are more than the FFNs can lose")
    return removed


@torch.no_grad()
def keep_neurons(model: nn.Module, block: Block, kept: Tensor, outputs: Tensor) -> None:
    """Leave an FFN these neurons, in place, with `outputs` [width, kept] as the weight of its last linear."""
    ups, down = ffn_linears(model, block)
    weight, bias = weight_and_bias(model, down)
    neurons = weight.shape[1]
    model.set_submodule(down, as_linear(outputs, bias))
    for up in ups:
        weight, bias = weight_and_bias(model, up)
        rows = torch.cat([kept + start for start in range(0, len(weight), neurons)])  # gate and up may be one
        model.set_submodule(up, as_linear(weight[rows], None if bias is None else bias[rows]))
