"""Locks between processes: one run per output, and temporary directories that tell whether their owner still lives.

They are advisory `flock`s: the system drops them with the process, however it ended, so nothing stays locked.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from compressor.runtime.errors import InputError
from compressor.runtime.interrupts import TRACES

SCRATCH = ".compressor-scratch-"
HELD = "lock"  # the file in a temporary directory that its owner keeps locked


def lock(handle: int, *, wait: bool = False) -> bool:
    """Whether the open file is ours now; an OSError where the file system has no locks."""
    try:
        import fcntl
    except ImportError as error:  # Windows
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def still_there(handle: int, file: Path) -> bool:
    """Whether the open file is the one of this name: its last owner may have removed it meanwhile."""
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(file))
    except FileNotFoundError:
        return False


@contextmanager
def locked(target: Path, warn: Callable[[str], None]) -> Iterator[None]:
    """Nobody else writes this target while the context is open. Directories that are missing above it are made, and
    vanish again when nothing came of them."""
    file = target.with_name(f".{target.name}.lock")
    made = make_parents(target)
    handle = None
    try:
        handle = take(file, target, warn)
        TRACES.unfinished.add(file)
        yield
    finally:
        if handle is not None:
            file.unlink(missing_ok=True)  # while it is ours: who waits for it sees that it has gone
            os.close(handle)
        TRACES.unfinished.discard(file)
        remove_empty(made)


def make_parents(target: Path) -> list[Path]:
    missing = [folder for folder in target.parents if not folder.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    return missing


def remove_empty(folders: list[Path]) -> None:
    """From the innermost outwards, as far as they are empty."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


def take(file: Path, target: Path, warn: Callable[[str], None]) -> int:
    while True:
        handle = os.open(file, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
        try:
            mine = lock(handle)
        except OSError as error:
            warn(f"warning: {target.parent} has no locks ({error.strerror}); let no second run write {target}")
            mine = True
        if not mine:
            owner = os.read(handle, 32).decode(errors="replace").strip()
            os.close(handle)
            who = f"process {owner}" if owner else "another process"
            raise InputError(f"{target} is being written by {who}; wait for it to end, or name another --out")
        if still_there(handle, file):
            os.ftruncate(handle, 0)
            os.write(handle, f"{os.getpid()}\n".encode())
            return handle
        os.close(handle)


@contextmanager
def held_directory(parent: Path, prefix: str) -> Iterator[Path]:
    """A temporary directory that `sweep` of another process leaves alone while the context is open."""
    folder, handle = make_held(parent, prefix)
    TRACES.unfinished.add(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)
        TRACES.unfinished.discard(folder)


def scratch_directory(owner: object, parent: Path | None = None) -> Path:
    """A directory that is gone with its owner, or, when the process is killed, with the next one that makes such."""
    parent, held = parent or Path(tempfile.gettempdir()), ExitStack()
    sweep(parent, SCRATCH)
    folder = held.enter_context(held_directory(parent, SCRATCH))
    weakref.finalize(owner, held.close)
    return folder


def make_held(parent: Path, prefix: str) -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        file = folder / HELD
        try:
            handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError:  # swept away before it was locked
            continue
        try:
            lock(handle, wait=True)
        except OSError:
            return folder, handle  # without locks nobody sweeps either
        if still_there(handle, file):
            return folder, handle
        os.close(handle)


def sweep(parent: Path, prefix: str) -> None:
    """Remove the temporary directories whose owner is gone."""
    for folder in [path for path in parent.iterdir() if path.name.startswith(prefix)]:
        if folder.is_symlink() or not folder.is_dir():
            continue
        try:
            handle = os.open(folder / HELD, os.O_RDWR)
        except FileNotFoundError:  # its owner came no further, or is not one of ours
            remove_empty([folder])
            continue
        except OSError:  # another user's
            continue
        try:
            if lock(handle):
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # no locks here: it may be in use
            continue
        finally:
            os.close(handle)
