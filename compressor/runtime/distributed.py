"""Several processes at one job (`torchrun`, `accelerate launch`): each takes its share of the batches, sums and rows
are brought together, and rank 0 decides, keeps and writes.

With one process every function here does nothing. Which batch goes where does not change what is computed of it, so
results differ from one process's only by the order in which float64 sums are added up.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from compressor.runtime.errors import InputError

Item = TypeVar("Item")
PATIENCE = datetime.timedelta(days=7)  # others may wait for hours while one writes; one that died is noticed at once
DEVICE_BACKENDS = "cpu:gloo,cuda:nccl"
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo", "NCCL", "ncclRemoteError")
STORES: list[Any] = []  # what the processes that were joined share beside their messages


def begin() -> None:
    """Join the processes that were launched together, if there are several."""
    if launched() > 1 and not dist.is_initialized():
        store, place, count = next(rendezvous("env://"))
        STORES.append(store)
        backend = DEVICE_BACKENDS if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=place, world_size=count, timeout=PATIENCE)


def end() -> None:
    """Leave the others in order."""
    if dist.is_available() and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
        STORES.clear()


def launched() -> int:
    """How many processes the launcher started; one when there is no launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_device() -> str:
    """The CUDA device of this process: each of a machine's has its own."""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if launched() > 1 else "cuda"


def is_first_to_fail() -> bool:
    """Whether no other process has told of an error yet: one line is enough for all."""
    if not STORES:
        return int(os.environ.get("RANK", "0")) == 0  # all of them fail alike
    try:
        return bool(STORES[0].add("failed", 1) == 1)
    except (RuntimeError, ValueError):  # it went with the process that had it
        return True


def told(error: BaseException) -> BaseException:
    """The error; what is left of a process that ended without a word, in words."""
    if size() > 1 and isinstance(error, RuntimeError) and any(word in str(error) for word in LOST):
        return InputError(
            "another process of this run has ended; nothing was written: see what it said, and give the same command "
            "again to go on where it stopped"
        )
    return error


def size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def mine(items: Sequence[Item]) -> list[Item]:
    """This process's share."""
    return list(items[rank() :: size()])


def agree(value: Any) -> Any:
    """Rank 0's value of something small, for all."""
    if size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def broadcast(tensors: Mapping[str, Tensor] | None, owner: int = 0) -> dict[str, Tensor]:
    """The owner's tensors, for all; the others' are not looked at."""
    if size() == 1:
        assert tensors is not None
        return dict(tensors)
    given = tensors if rank() == owner else None
    box: list[Any] = [[(name, t.shape, t.dtype, t.device.type) for name, t in given.items()] if given else None]
    dist.broadcast_object_list(box, src=owner)
    found = {}
    for name, shape, dtype, kind in box[0] or []:
        own = given[name].contiguous() if given else torch.empty(shape, dtype=dtype, device=kind)
        if own.numel():
            dist.broadcast(own.reshape(-1).view(torch.uint8), src=owner)  # whatever the dtype: gloo knows few
        found[name] = own
    return found


def gather(items: Sequence[Tensor]) -> list[Tensor]:
    """All processes' items, in the order in which `mine` dealt them out."""
    if size() == 1:
        return list(items)
    counts: list[Any] = [None] * size()
    dist.all_gather_object(counts, len(items))
    found = []
    for number in range(sum(counts)):
        owner, place = number % size(), number // size()
        found.append(broadcast({"": items[place]} if owner == rank() else None, owner)[""])
    return found


def add_up(tensors: Sequence[Tensor], owner: int | None = None) -> None:
    """Add the processes' tensors, in place: for all, or only for one (the others' are then worthless)."""
    if size() > 1:
        for tensor in tensors:
            if owner is None:
                dist.all_reduce(tensor)
            else:
                dist.reduce(tensor, dst=owner)


def once(compute: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """What rank 0 computes while the others wait."""
    return broadcast(compute() if rank() == 0 else None)


def groups(items: Sequence[Item]) -> list[Sequence[Item]]:
    """As many items at a time as there are processes: the one at place k is solved by rank k."""
    return [items[start : start + size()] for start in range(0, len(items), size())]
