"""The memory and disk that this process may use, within every limit that is set for it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from compressor.runtime.errors import InputError

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


def available_memory() -> int:
    """Bytes of memory that this process may still take: the least that the machine, the control groups and RLIMIT_AS
    leave. Processes that were launched together on this machine share it equally.
    """
    shared = min([psutil.virtual_memory().available, *cgroup_limits(CGROUPS, OWN_CGROUPS)])
    return max(0, min([shared // int(os.environ.get("LOCAL_WORLD_SIZE", "1")), *address_space_limit()]))


def address_space_limit() -> Iterator[int]:
    """Bytes that RLIMIT_AS leaves, if it is set."""
    try:
        import resource
    except ImportError:  # Windows has no such limits
        return
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        yield limit - psutil.Process().memory_info().vms


def cgroup_limits(root: Path, own: Path) -> Iterator[int]:
    """Bytes that each control group of this process leaves; page cache that the system can reclaim counts as free."""
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
                yield limit - used + reclaimable(place / "memory.stat", inactive)


def read_number(file: Path) -> int | None:
    """The number in a file, or None if the file is missing or says `max`."""
    try:
        return int(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def reclaimable(file: Path, name: str) -> int:
    """Bytes of page cache that the system can reclaim, from the row `name` of memory.stat."""
    try:
        rows = dict(line.split() for line in file.read_text(encoding="utf-8").splitlines())
        return int(rows.get(name, 0))
    except (OSError, ValueError):
        return 0


class NotEnoughMemory(InputError):
    """A model does not fit into memory; `shortage` is the message without the remedy."""

    def __init__(self, shortage: str) -> None:
        super().__init__(f"{shortage}; add --low-memory, which reads each layer from disk when it runs")
        self.shortage = shortage


def require_memory(what: str, needed: int) -> None:
    """Refuse before the work starts if this many bytes of memory are not available."""
    free = available_memory()
    if needed > free:
        raise NotEnoughMemory(f"{what} takes {format_bytes(needed)} of memory, and {format_bytes(free)} can be had")


def require_precision(dtype: Any) -> None:
    """Refuse a dtype whose instructions the processor announces but cannot run.

    It is tried in a child process, because an illegal instruction kills the process.
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
    """Bytes free on the disk of a path that may not exist yet."""
    there = next(folder for folder in (place, *place.parents) if folder.exists())
    return shutil.disk_usage(there).free


def require_disk(what: str, needed: int, place: Path, remedy: str, spare: int = 0) -> str:
    """A line with the bytes needed and free; refuse before the work starts if there are too few.

    `spare` are bytes that may be needed beside these: there must be room for them, but they are not announced.
    """
    free = free_disk(place)
    if needed + spare > free:
        wanted = format_bytes(needed + spare)
        raise InputError(f"{what} needs {wanted} of disk, and {place} has {format_bytes(free)}; {remedy}")
    return f"{what}: about {format_bytes(needed)} on disk ({format_bytes(free)} can be had)"


def format_bytes(size: int) -> str:
    """A size in the units of disks and downloads: a GB is a billion bytes, a MB a million, a kB a thousand."""
    if size >= 999_500_000:
        return f"{size / 1e9:,.1f} GB"
    if size >= 999_500:
        return f"{size / 1e6:.0f} MB" if size >= 9_950_000 else f"{size / 1e6:.1f} MB"
    return f"{max(1, round(size / 1e3))} kB"
