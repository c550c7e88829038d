"""What the key-value cache of a model takes: bytes for every token of context."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from compressor.models.offload import device_of
from compressor.models.source import stored_dtype


@torch.no_grad()
def kv_cache_bytes(model: Any) -> int | None:
    """Bytes per token that the keys and values of all layers take, in the dtype that the checkpoint is stored in.

    They are counted in the cache that the model itself fills in a pass over one token, so that they are right for every
    family, and with attention replaced. None for a model without such a cache.
    """
    token = torch.zeros(1, 1, dtype=torch.long, device=device_of(model))
    cache: Any = getattr(model(input_ids=token, use_cache=True), "past_key_values", None)
    if not hasattr(cache, "layers"):
        return None
    # Layers without attention say that they are initialised, and keep nothing.
    filled = [layer for layer in cache.layers if isinstance(getattr(layer, "keys", None), Tensor)]
    values: int = sum(layer.keys.numel() + layer.values.numel() for layer in filled)
    return values * stored_dtype(model).itemsize
