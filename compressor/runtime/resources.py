"""What this process can really have: memory within every limit that is set for it, and the free disk of a place."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from compressor.runtime.errors import InputError

GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


def available_memory() -> int:
    """Bytes: the least of what the machine has, what the control groups leave, and what RLIMIT_AS leaves.

    Processes that were launched together on this machine share it.
    """
    shared = min([psutil.virtual_memory().available, *group_limits(GROUPS, OWN_GROUPS)])
    return max(0, min([shared // int(os.environ.get("LOCAL_WORLD_SIZE", "1")), *address_limit()]))


def address_limit() -> Iterator[int]:
    try:
        import resource
    except ImportError:  # Windows has no such limits
        return
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        yield limit - psutil.Process().memory_info().vms


def group_limits(root: Path, own: Path) -> Iterator[int]:
    """What every control group above this process leaves; a page cache that can be dropped counts as free."""
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / "memory" if controllers else root
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        inactive = "total_inactive_file" if controllers else "inactive_file"
        # Inside a container the path may be that of the host: then only the root of the hierarchy is there.
        folder = base / path.strip("/")
        for place in (folder, *(p for p in folder.parents if p == base or base in p.parents)):
            limit, used = (read_number(place / name) for name in names)
            if limit is not None and used is not None:
                yield limit - used + droppable(place / "memory.stat", inactive)


def read_number(file: Path) -> int | None:
    """None for a file that is not there, or that says `max`."""
    try:
        return int(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def droppable(file: Path, name: str) -> int:
    try:
        rows = dict(line.split() for line in file.read_text(encoding="utf-8").splitlines())
        return int(rows.get(name, 0))
    except (OSError, ValueError):
        return 0


class ShortMemory(InputError):
    """A model that memory does not hold; `shortage` says it without what to do."""

    def __init__(self, shortage: str) -> None:
        super().__init__(f"{shortage}; add --low-memory, which reads each layer from disk when it runs")
        self.shortage = shortage


def require_memory(what: str, needed: int) -> None:
    """Refuse what cannot be had before the work starts."""
    free = available_memory()
    if needed > free:
        raise ShortMemory(f"{what} takes {amount(needed)} of memory, and {amount(free)} can be had")


def require_precision(dtype: Any) -> None:
    """Refuse a dtype that the processor cannot compute in: some announce it and then stop the process.

    Tried in a child, for nothing else survives it.
    """
    import torch

    if dtype == torch.float32 or not hasattr(os, "fork"):
        return
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # the parent's threads are not here
        rows = torch.ones(64, 64, dtype=dtype)
        rows @ rows
        os._exit(0)
    if os.WIFSIGNALED(os.waitpid(child, 0)[1]):
        name = str(dtype).removeprefix("torch.")
        raise InputError(f"this machine's processor stops at its first {name} product; use --dtype float32")


def free_disk(place: Path) -> int:
    """Bytes that this user may still write where the path is, or will be."""
    there = next(folder for folder in (place, *place.parents) if folder.exists())
    return shutil.disk_usage(there).free


def require_disk(what: str, needed: int, place: Path, remedy: str) -> str:
    """Say what it takes, or refuse it before the work starts."""
    free = free_disk(place)
    if needed > free:
        raise InputError(f"{what} needs {amount(needed)} of disk, and {place} has {amount(free)}; {remedy}")
    return f"{what}: about {amount(needed)} on disk ({amount(free)} can be had)"


def amount(size: int) -> str:
    return f"{size / 2**30:.1f} GB" if size >= 2**30 else f"{max(1, size >> 20)} MB"
