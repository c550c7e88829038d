"""Locks between processes: only one run writes an output, and temporary directories go when their owner has gone.

The system drops a lock with the process that holds it, however that ends, so nothing stays locked. The lock itself is
filelock's `lock_descriptor`. Its class `FileLock` would not do: it leaves its file behind, does not tell who holds the
lock, makes the file and the directory that `remove_abandoned` only looks for, and does not tell a file system without
locks from a file that cannot be opened.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import lock_descriptor

from compressor.runtime.errors import InputError
from compressor.runtime.interrupts import WRITTEN

SCRATCH = ".compressor-scratch-"
OWNER_LOCK = "lock"  # the file in a temporary directory that its owner keeps locked


def is_still_named(handle: int, file: Path) -> bool:
    """Whether the open file still has this name: the process that held the lock before removes the file at its end."""
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(file))
    except FileNotFoundError:
        return False


@contextmanager
def locked(target: Path, warn: Callable[[str], None]) -> Iterator[None]:
    """No other process that asks for this lock writes the target while the context is open.

    Missing parent directories are made, and removed at the end if they are still empty.
    """
    file = target.with_name(f".{target.name}.lock")
    made = make_parents(target)
    handle = None
    try:
        handle = acquire(file, target, warn)
        WRITTEN.unfinished.add(file)
        yield
    finally:
        if handle is not None:
            file.unlink(
                missing_ok=True
            )  # before the lock is dropped, so that whoever gets it next sees that it has gone
            os.close(handle)
        WRITTEN.unfinished.discard(file)
        remove_empty(made)


def make_parents(target: Path) -> list[Path]:
    """Make the directories above the target; return those that were missing, innermost first."""
    missing = [folder for folder in target.parents if not folder.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    return missing


def remove_empty(folders: list[Path]) -> None:
    """Remove directories in this order until one is not empty."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


def acquire(file: Path, target: Path, warn: Callable[[str], None]) -> int:
    """The descriptor of the locked file, which then holds this process's number. A symbolic link is not followed."""
    while True:
        handle = os.open(file, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o644)
        try:
            acquired = lock_descriptor(handle, blocking=False)
        except OSError as error:
            warn(f"warning: {target.parent} has no locks ({error.strerror}); let no second run write {target}")
            acquired = True
        if not acquired:
            owner = os.read(handle, 32).decode(errors="replace").strip()
            os.close(handle)
            who = f"process {owner}" if owner else "another process"
            raise InputError(f"{target} is being written by {who}; wait for it to end, or name another --out")
        if is_still_named(handle, file):
            os.ftruncate(handle, 0)
            os.write(handle, f"{os.getpid()}\n".encode())
            return handle
        os.close(handle)


@contextmanager
def owned_directory(parent: Path, prefix: str) -> Iterator[Path]:
    """A temporary directory that `remove_abandoned` in another process leaves alone while the context is open."""
    folder, handle = make_owned(parent, prefix)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)
        WRITTEN.unfinished.discard(folder)


def scratch_directory(owner: object, parent: Path | None = None) -> Path:
    """A directory that is removed with the owner object; if the process is killed, the next call removes it."""
    parent, stack = parent or Path(tempfile.gettempdir()), ExitStack()
    remove_abandoned(parent, SCRATCH)
    folder = stack.enter_context(owned_directory(parent, SCRATCH))
    weakref.finalize(owner, stack.close)
    return folder


def make_owned(parent: Path, prefix: str) -> tuple[Path, int]:
    """A new directory, and the descriptor of the locked file in it. An interrupt at any moment leaves nothing: the name
    is noted before the directory is made."""
    while True:
        folder = parent / f"{prefix}{uuid.uuid4().hex[:12]}"
        file = folder / OWNER_LOCK
        WRITTEN.unfinished.add(folder)
        try:
            folder.mkdir(mode=0o700)
            handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            WRITTEN.unfinished.discard(folder)
            if isinstance(error, FileNotFoundError) and parent.is_dir():
                continue  # removed as abandoned before it was locked
            raise
        try:
            lock_descriptor(handle)
        except OSError:
            return folder, handle  # without locks nobody removes it either
        if is_still_named(handle, file):
            return folder, handle
        os.close(handle)


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove the temporary directories whose owner is gone."""
    for folder in [path for path in parent.iterdir() if path.name.startswith(prefix)]:
        if folder.is_symlink() or not folder.is_dir():
            continue
        try:
            handle = os.open(folder / OWNER_LOCK, os.O_RDWR)
        except FileNotFoundError:  # its owner came no further, or is not one of ours
            remove_empty([folder])
            continue
        except OSError:  # another user's
            continue
        try:
            if lock_descriptor(handle, blocking=False):
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # no locks here: it may be in use
            continue
        finally:
            os.close(handle)
