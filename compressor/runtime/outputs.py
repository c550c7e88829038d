"""An output directory that appears whole or not at all, whatever ends the process; only one run at a time writes it."""

from __future__ import annotations

import ctypes
import json
import math
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from compressor.runtime import distributed
from compressor.runtime.errors import InputError, disk_reason
from compressor.runtime.interrupts import TRACES
from compressor.runtime.locks import locked, owned_directory, remove_abandoned

HERE = -100  # AT_FDCWD: paths as they are
EXCHANGE = 2  # RENAME_EXCHANGE


def refuse_output(out: str | Path, overwrite: bool, source: str | Path | None, record: str) -> Path:
    """Refuse an output directory that cannot be had; return its absolute path.

    Only a directory that holds this tool's record is ever replaced.
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
    """The absolute path of the output, refused before any work or ours alone while the context is open.

    What a run that was killed left beside it is cleared away first. Of several processes the first has it for all.
    """
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
    """The same for a single file: only one that begins with `magic` is ever replaced."""
    with ExitStack() as stack:
        try:
            target = refuse_file(out, overwrite, magic)
            stack.enter_context(locked(target, warn))
            clear_leftovers(target)
        except OSError as error:
            raise InputError(f"--out {out} cannot be written: {error.strerror or error}; name another file") from error
        yield target


def refuse_file(out: str | Path, overwrite: bool, magic: bytes) -> Path:
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
    """Put back an earlier result that was being replaced, and remove what is half done. Only for who has the lock."""
    names = re.compile(rf"\.{re.escape(target.name)}\.(partial|old)-\w{{8}}")
    found = {path: names.fullmatch(path.name) for path in target.parent.iterdir()}
    partial, old = ([p for p, match in found.items() if match and match[1] == kind] for kind in ("partial", "old"))
    if old and not target.exists():
        old.pop().rename(target)
    for path in (*partial, *old):
        discard(path, target)


def beside(target: Path, kind: str, like: Path) -> Path:
    """Another temporary name beside the target, with the same ending as this one."""
    return target.with_name(f".{target.name}.{kind}-{like.name[-8:]}")


def discard(path: Path, target: Path) -> None:
    """Remove a directory: first its name, for one that is called old must be whole, then its files."""
    doomed = path.rename(beside(target, "partial", path))
    shutil.rmtree(doomed, ignore_errors=True)


@contextmanager
def whole_directory(target: Path) -> Iterator[Path]:
    """A directory beside the target that takes its place when the block ends well, and vanishes when it does not."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with growing(target) as partial:
        yield partial
        publish(partial, target)


@contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """The same for a single file."""
    with growing(target) as folder:
        yield folder / target.name
        publish(folder / target.name, target)


@contextmanager
def growing(target: Path) -> Iterator[Path]:
    """A directory beside the target that is gone with the block, unless it was renamed."""
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
    TRACES.unfinished.add(partial)
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        TRACES.unfinished.discard(partial)


def publish(partial: Path, target: Path) -> None:
    """What is finished goes to the disk and takes the target's place."""
    mask = current_umask()  # temporary directories and safetensors files are made for their owner alone
    for path in (partial, *partial.rglob("*")):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)
        sync(path)
    if partial.is_dir():
        put(partial, target)
    else:
        partial.replace(target)
    TRACES.finished = target
    sync(target.parent)


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def sync(path: Path) -> None:
    """On the disk itself, not only in the system's memory."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        if not path.is_dir():  # some file systems cannot do it for a directory
            raise
    finally:
        os.close(handle)


def put(partial: Path, target: Path) -> None:
    """Rename into place; what stood there has the other name afterwards, or is gone.

    Where the two cannot be exchanged in one step, there is a moment without a target: `clear_leftovers` knows it.
    """
    if not target.exists():
        partial.rename(target)
    elif not exchange(partial, target):
        old = target.rename(beside(target, "old", partial))
        try:
            partial.rename(target)
        except BaseException:
            old.rename(target)
            raise
        discard(old, target)


def exchange(first: Path, second: Path) -> bool:
    """Swap two names in one step, or say that it cannot be done here."""
    if not sys.platform.startswith("linux"):
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    return rename is not None and rename(HERE, os.fsencode(first), HERE, os.fsencode(second), EXCHANGE) == 0


@contextmanager
def refusing_disk(target: Path) -> Iterator[None]:
    """A disk that is full, or gone, is one line, whichever library wrote to it."""
    try:
        yield
    except Exception as error:
        reason = None if isinstance(error, InputError) else disk_reason(error)
        if reason is None:
            raise
        raise InputError(f"--out {target} cannot be written: {reason}; nothing was kept") from error


def write_json(file: Path, value: Any) -> None:
    """Write valid JSON in one step: infinite and undefined numbers become null."""
    if distributed.rank() > 0:
        return
    prefix = f".{file.name}.partial-"
    remove_abandoned(file.absolute().parent, prefix)
    with owned_directory(file.absolute().parent, prefix) as folder:
        partial = folder / file.name
        partial.write_text(to_json(value) + "\n", encoding="utf-8")
        sync(partial)
        partial.replace(file)


def to_json(value: Any) -> str:
    return json.dumps(finite(value), indent=2, ensure_ascii=False, allow_nan=False)


def finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, (list, tuple)) else value
