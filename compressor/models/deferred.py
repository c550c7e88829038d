"""Tensors that are read from disk, or computed from such tensors, each time they are needed, and kept nowhere.

Reshaping, joining or scaling deferred tensors gives deferred tensors, so a model can be rewritten for another runtime
without being in memory. An operation that takes an ordinary tensor as well, such as a layer's product with its input,
is computed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from compressor.models.offload import disk_weights_of, forget_disk_weights

CPU = torch.device("cpu")
VALUE = torch.ops.aten._local_scalar_dense  # what bool(), float() and .item() ask for


class DeferredTensor(Tensor):
    """A tensor with a shape and a dtype whose contents `compute` gives, every time anew."""

    compute: Callable[[], Tensor]
    shadow: Tensor  # of the same shape, on the meta device

    @staticmethod
    def __new__(cls, shadow: Tensor, compute: Callable[[], Tensor]) -> DeferredTensor:
        tensor: DeferredTensor = torch.Tensor._make_wrapper_subclass(
            cls, shadow.shape, strides=shadow.stride(), dtype=shadow.dtype, device=CPU, requires_grad=False
        )
        tensor.shadow, tensor.compute = shadow, compute
        return tensor

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"DeferredTensor({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [part for part in tree_flatten((args, kwargs))[0] if isinstance(part, Tensor)]
        if func._schema.is_mutable and isinstance(args[0], DeferredTensor):
            raise NotImplementedError(f"{func} would change a tensor that is on disk")
        if func.overloadpacket is VALUE or not all(isinstance(tensor, DeferredTensor) for tensor in tensors):
            return func(*tree_map(realize, args), **tree_map(realize, kwargs))

        def compute() -> Any:
            return func(*tree_map(realize, args), **tree_map(realize, kwargs))

        shadows = func(*tree_map(shadow_of, args), **tree_map(on_meta, tree_map(shadow_of, kwargs)))
        if isinstance(shadows, Tensor):
            return cls(shadows, compute)
        return [cls(shadow, partial(take, compute, place)) for place, shadow in enumerate(shadows)]


def take(compute: Callable[[], Sequence[Tensor]], place: int) -> Tensor:
    """One of several results."""
    return compute()[place]


def shadow_of(value: Any) -> Any:
    return value.shadow if isinstance(value, DeferredTensor) else value


def on_meta(value: Any) -> Any:
    return torch.device("meta") if isinstance(value, torch.device) else value


def realize(value: Any) -> Any:
    """The contents of a deferred tensor; any other value is returned as it is."""
    return value.compute() if isinstance(value, DeferredTensor) else value


def defer(shadow: Tensor, compute: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """What a function makes of these tensors: computed now or, if one of them is deferred, when it is needed.

    `shadow` has the shape and the dtype of the result. For functions that change tensors of their own as they go.
    """
    if not any(isinstance(tensor, DeferredTensor) for tensor in tensors):
        return compute(*tensors)
    return DeferredTensor(shadow.to("meta"), lambda: compute(*map(realize, tensors)))


def is_deferred(model: torch.nn.Module) -> bool:
    """Whether any parameter of the model is read when it is needed."""
    return any(isinstance(parameter, DeferredTensor) for parameter in model.parameters())


def defer_weights(model: Any) -> None:
    """Make every parameter of a model that keeps its weights on disk a deferred tensor."""
    weights = disk_weights_of(model)
    assert weights is not None
    for stored in {id(stored): stored for stored in weights.tensors.values()}.values():
        shadow = stored.placeholder.detach()
        tensor = DeferredTensor(shadow, stored.read)
        stored.set_parameter(torch.nn.Parameter(tensor, requires_grad=False))
    forget_disk_weights(model)
