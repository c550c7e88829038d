"""Outputs that are complete or absent: they are written beside the target under a lock and then renamed."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from compressor.runtime.errors import InputError, disk_reason
from compressor.runtime.interrupts import WRITTEN
from compressor.runtime.locks import locked, owned_directory, remove_abandoned
from compressor.runtime.safe_files import to_json

AT_FDCWD = -100  # relative paths begin at the working directory
RENAME_EXCHANGE = 2


def refuse_output(out: str | Path, overwrite: bool, source: str | Path | None, record: str) -> Path:
    """Refuse an output directory that may not be written; return its absolute path.

    A directory that is not empty is replaced only if it holds this tool's record.
    """
    target = Path(os.path.abspath(Path(out).expanduser()))
    if target.is_symlink():
        raise InputError(f"--out {out} is a symbolic link to {os.readlink(target)}; name the directory itself")
    if source is not None and Path(source).exists() and target.exists() and os.path.samefile(source, target):
        raise InputError(f"--out {out} is the source model itself; name another directory")
    if target.exists() and not target.is_dir():
        raise InputError(f"--out {out} is a file; name a directory")
    if target.is_dir() and any(target.iterdir()):
        if not overwrite:
            raise InputError(f"--out {out} exists and is not empty; name another directory or add --overwrite")
        if not (target / record).is_file():
            raise InputError(f"--out {out} was not written by compress, so --overwrite leaves it alone; remove it")
    return target


@contextmanager
def reserved(
    out: str | Path,
    overwrite: bool,
    source: str | Path | None,
    record: str,
    warn: Callable[[str], None],
) -> Iterator[Path]:
    """Check and lock an output directory while the context is open; yield its absolute path.

    Leftovers of a run that was killed are removed first. Of several processes of one run only the first has the lock.
    """
    from compressor.runtime import distributed  # it imports torch, which refusing an output does not need

    if distributed.rank() > 0:
        yield Path(os.path.abspath(Path(out).expanduser()))
        return
    with ExitStack() as stack:
        try:
            target = refuse_output(out, overwrite, source, record)
            stack.enter_context(locked(target, warn))
            clear_leftovers(target)
            refuse_output(out, overwrite, source, record)  # an earlier result may have been put back
        except OSError as error:
            raise InputError(
                f"--out {out} cannot be written: {error.strerror or error}; name another directory"
            ) from error
        yield target


@contextmanager
def reserved_file(out: str | Path, overwrite: bool, magic: bytes, warn: Callable[[str], None]) -> Iterator[Path]:
    """The same for a single file: an existing one is replaced only if it begins with `magic`."""
    with ExitStack() as stack:
        try:
            target = refuse_file(out, overwrite, magic)
            stack.enter_context(locked(target, warn))
            clear_leftovers(target)
        except OSError as error:
            raise InputError(f"--out {out} cannot be written: {error.strerror or error}; name another file") from error
        yield target


def refuse_file(out: str | Path, overwrite: bool, magic: bytes) -> Path:
    """Refuse an output file that may not be written; return its absolute path."""
    target = Path(os.path.abspath(Path(out).expanduser()))
    if target.is_symlink():
        raise InputError(f"--out {out} is a symbolic link to {os.readlink(target)}; name the file itself")
    if target.is_dir():
        raise InputError(f"--out {out} is a directory; name a file")
    if target.exists():
        if not overwrite:
            raise InputError(f"--out {out} exists; name another file or add --overwrite")
        with target.open("rb") as stream:
            if stream.read(len(magic)) != magic:
                raise InputError(f"--out {out} is not such a file, so --overwrite leaves it alone; remove it")
    return target


def clear_leftovers(target: Path) -> None:
    """Restore an earlier result that was being replaced, and remove unfinished outputs. The caller has the lock."""
    names = re.compile(rf"\.{re.escape(target.name)}\.(partial|old)-\w{{8}}")
    matches = {path: names.fullmatch(path.name) for path in target.parent.iterdir()}
    partial, old = ([p for p, match in matches.items() if match and match[1] == kind] for kind in ("partial", "old"))
    if old and not target.exists():
        old.pop().rename(target)
    for path in (*partial, *old):
        discard(path, target)


def sibling(target: Path, kind: str, like: Path) -> Path:
    """A temporary name of this kind beside the target, with the same random ending as `like`."""
    return target.with_name(f".{target.name}.{kind}-{like.name[-8:]}")


def discard(path: Path, target: Path) -> None:
    """Remove a directory. It is renamed first: one that is called old must be complete, and may be restored."""
    doomed = path.rename(sibling(target, "partial", path))
    shutil.rmtree(doomed, ignore_errors=True)


@contextmanager
def whole_directory(target: Path) -> Iterator[Path]:
    """A directory beside the target that replaces it at the end of the context, or is removed after an exception."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with partial_directory(target) as partial:
        yield partial
        publish(partial, target)


@contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """A file beside the target that replaces it at the end of the context, or is removed after an exception."""
    with partial_directory(target) as folder:
        yield folder / target.name
        publish(folder / target.name, target)


@contextmanager
def partial_directory(target: Path) -> Iterator[Path]:
    """A temporary directory beside the target that is removed at the end, unless it was renamed."""
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
    WRITTEN.unfinished.add(partial)
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        WRITTEN.unfinished.discard(partial)


def publish(partial: Path, target: Path) -> None:
    """Give the files the modes of the umask, write them to the disk, and rename them to the target."""
    mask = current_umask()  # temporary directories and safetensors files are readable by their owner only
    for path in (partial, *partial.rglob("*")):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)
        sync(path)
    if partial.is_dir():
        move_into_place(partial, target)
    else:
        partial.replace(target)
    WRITTEN.finished = target
    sync(target.parent)


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def sync(path: Path) -> None:
    """Write a file or directory from the system's memory to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        if not path.is_dir():  # some file systems cannot do it for a directory
            raise
    finally:
        os.close(handle)


def move_into_place(partial: Path, target: Path) -> None:
    """Rename the directory to the target; an earlier target then has the other name, or is removed.

    Where the two names cannot be swapped in one step, there is a moment without a target. If the process is killed
    then, `clear_leftovers` of the next run restores the earlier one.
    """
    if not target.exists():
        partial.rename(target)
    elif not exchange(partial, target):
        old = target.rename(sibling(target, "old", partial))
        try:
            partial.rename(target)
        except BaseException:
            old.rename(target)
            raise
        discard(old, target)


def exchange(first: Path, second: Path) -> bool:
    """Swap two names in one step; False where the system or the file system cannot."""
    if not sys.platform.startswith("linux"):
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    return (
        rename is not None and rename(AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), RENAME_EXCHANGE) == 0
    )


@contextmanager
def reporting_disk_errors(target: Path) -> Iterator[None]:
    """Errors of the disk become an InputError that names the target, whichever library wrote to it."""
    try:
        yield
    except Exception as error:
        reason = None if isinstance(error, InputError) else disk_reason(error)
        if reason is None:
            raise
        raise InputError(f"--out {target} cannot be written: {reason}; nothing was kept") from error


def write_json(file: Path, value: Any) -> None:
    """Write a JSON file in one step, on rank 0 only: infinite and undefined numbers become null."""
    from compressor.runtime import distributed

    if distributed.rank() > 0:
        return
    prefix = f".{file.name}.partial-"
    remove_abandoned(file.absolute().parent, prefix)
    with owned_directory(file.absolute().parent, prefix) as folder:
        partial = folder / file.name
        partial.write_text(to_json(value) + "\n", encoding="utf-8")
        sync(partial)
        partial.replace(file)
