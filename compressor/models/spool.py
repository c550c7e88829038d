"""Tensors in memory or, when memory is short, in files."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor


class TensorSpool(Sequence[Tensor]):
    """A sequence of tensors: in memory or, with a directory, each in a file that is deleted with the spool."""

    def __init__(self, tensors: Iterable[Tensor] = (), directory: Path | None = None) -> None:
        self.directory = directory
        self.items: list[Any] = []
        for tensor in tensors:
            self.append(tensor)

    def append(self, tensor: Tensor) -> None:
        if self.directory is None:
            self.items.append(tensor)
            return
        file = self.directory / uuid.uuid4().hex
        tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tofile(file)
        self.items.append((file, tensor.dtype, tensor.shape, tensor.device))

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: Any) -> Any:
        item = self.items[index]
        if self.directory is None:
            return item
        file, dtype, shape, device = item
        return torch.from_numpy(np.fromfile(file, dtype=np.uint8)).view(dtype).reshape(shape).to(device)

    def __del__(self) -> None:
        for item in self.items if self.directory is not None else ():
            item[0].unlink(missing_ok=True)
