"""Several processes at one job (`torchrun`, `accelerate launch`): each computes its share of the batches, the results
are gathered or summed, and rank 0 decides and writes.

With one process these functions return their input. Results of several processes differ from those of one only by the
order in which float64 sums are added up.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from compressor.runtime.errors import InputError

Item = TypeVar("Item")
TIMEOUT = datetime.timedelta(days=7)  # one process may write for hours; the loss of one is noticed at once
DEVICE_BACKENDS = "cpu:gloo,cuda:nccl"
LOST_PROCESS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "gloo",
    "NCCL",
    "ncclRemoteError",
)
LINGER_SECONDS = 2.0  # of the process that holds the store, after it failed
STORES: list[Any] = []  # torch's key-value store of the processes that have joined, if they have


def join_processes() -> None:
    """Join the processes that were launched together, if there are several."""
    if launched_processes() > 1 and not dist.is_initialized():
        store, own_rank, count = next(rendezvous("env://"))
        STORES.append(store)
        backend = DEVICE_BACKENDS if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=own_rank, world_size=count, timeout=TIMEOUT)


def leave_processes() -> None:
    """Wait for the other processes, then close the connection to them."""
    if dist.is_available() and dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
        STORES.clear()


def launched_processes() -> int:
    """How many processes the launcher started; one when there is no launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_device() -> str:
    """The CUDA device of this process: every process of a machine has one of its own."""
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if launched_processes() > 1 else "cuda"


def is_first_to_fail() -> bool:
    """Whether no other process has failed before: only the first one prints its error."""
    if not STORES:
        return int(os.environ.get("RANK", "0")) == 0  # before they join, all processes fail alike
    try:
        return bool(STORES[0].add("failed", 1) == 1)
    except (RuntimeError, ValueError):  # the process that held the store has ended
        return True


def let_others_fail() -> None:
    """Wait a moment, where this process holds the store, until the others have asked whether they failed first."""
    deadline = time.monotonic() + LINGER_SECONDS
    try:
        while STORES and dist.get_rank() == 0 and STORES[0].add("failed", 0) < size() and time.monotonic() < deadline:
            time.sleep(0.02)
    except (RuntimeError, ValueError):
        return


def describe_failure(error: BaseException) -> BaseException:
    """The error; a lost connection becomes an InputError that says that another process has ended."""
    if size() > 1 and isinstance(error, RuntimeError) and any(word in str(error) for word in LOST_PROCESS):
        return InputError(
            "another process of this run has ended; nothing was written: see what it said, and give the same command "
            "again to go on where it stopped"
        )
    return error


def size() -> int:
    """The number of processes."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """The number of this process, from 0."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def own_share(items: Sequence[Item]) -> list[Item]:
    """The items of this process: every size-th, beginning with its rank."""
    return list(items[rank() :: size()])


def broadcast_value(value: Any) -> Any:
    """The value that rank 0 has, on every process; for small values."""
    if size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def broadcast(tensors: Mapping[str, Tensor] | None, owner: int = 0) -> dict[str, Tensor]:
    """The tensors of the owner, on every process; those that the others pass are ignored."""
    if size() == 1:
        assert tensors is not None
        return dict(tensors)
    given = tensors if rank() == owner else None
    box: list[Any] = [[(name, t.shape, t.dtype, t.device.type) for name, t in given.items()] if given else None]
    dist.broadcast_object_list(box, src=owner)
    received = {}
    for name, shape, dtype, kind in box[0] or []:
        own = given[name].contiguous() if given else torch.empty(shape, dtype=dtype, device=kind)
        if own.numel():
            dist.broadcast(own.reshape(-1).view(torch.uint8), src=owner)  # as bytes, because gloo supports few dtypes
        received[name] = own
    return received


def gather(items: Sequence[Tensor]) -> list[Tensor]:
    """The items of all processes, in the order before `own_share` divided them."""
    if size() == 1:
        return list(items)
    counts: list[Any] = [None] * size()
    dist.all_gather_object(counts, len(items))
    gathered = []
    for number in range(sum(counts)):
        owner, place = number % size(), number // size()
        gathered.append(broadcast({"": items[place]} if owner == rank() else None, owner)[""])
    return gathered


def sum_over_processes(tensors: Sequence[Tensor], owner: int | None = None) -> None:
    """Sum the tensors of all processes in place, on every process, or only on the owner (not valid elsewhere)."""
    if size() > 1:
        for tensor in tensors:
            if owner is None:
                dist.all_reduce(tensor)
            else:
                dist.reduce(tensor, dst=owner)


def compute_on_first(compute: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Compute on rank 0 while the others wait, and return the result on every process."""
    return broadcast(compute() if rank() == 0 else None)


def rounds(items: Sequence[Item]) -> list[Sequence[Item]]:
    """The items in groups of as many as there are processes: rank k takes item k of each group."""
    return [items[start : start + size()] for start in range(0, len(items), size())]
