"""What was measured once, on disk: tensors under the hash of everything that they depend on."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from compressor.runtime import distributed
from compressor.runtime.cache_files import PARTIAL, choose_limit, default_directory, mark_used
from compressor.runtime.errors import InputError
from compressor.runtime.locks import owned_directory, remove_abandoned, scratch_directory
from compressor.runtime.outputs import sync
from compressor.runtime.progress import Progress

Tensors = dict[str, Tensor]
KEY_VERSION = 6  # of what is kept under a key


def open_cache(named: Path | None, progress: Progress) -> Cache:
    """The cache in the directory that the user named, else in the default one.

    A default that cannot be written, as in a read-only home, is no reason to stop: then measurements are kept in a
    directory that is removed with the run.
    """
    if named or os.environ.get("COMPRESSOR_CACHE"):
        return Cache(named or default_directory(), progress)
    try:
        directory = default_directory()
        cache = Cache(directory, progress)
        reason = None if os.access(directory, os.W_OK) else f"the cache {directory} cannot be written"
    except (InputError, RuntimeError) as error:  # RuntimeError: this user has no home
        reason = str(error).partition(";")[0]
    if reason is None:
        return cache
    progress.say(f"warning: {reason}; measurements are kept only while this run lasts (--cache DIR keeps them)")
    return Cache(scratch_directory(progress), progress)


def open_untouched(named: Path | None, scratch: bool, progress: Progress) -> UntouchedCache:
    """The cache that a run would use, asked only what it holds; with `scratch`, or without a home, it keeps nothing."""
    directory = Path(tempfile.gettempdir())
    if not scratch:
        with suppress(RuntimeError):  # this user has no home
            directory = named or default_directory()
    choose_limit(directory)  # a limit that a run would refuse is refused
    return UntouchedCache(directory, progress)


def cache_key(kind: str, model: Mapping[str, Any], text: str, **more: Any) -> dict[str, Any]:
    """What a measurement depends on: its kind, the identity of the model, the hash of the text, and whatever else."""
    return {"kind": kind, "version": KEY_VERSION, "model": dict(model), "text": text, **more}


class Cache:
    """Measurements by key. Without a directory nothing is kept; a damaged entry is measured again."""

    def __init__(self, directory: Path | None, progress: Progress) -> None:
        self.directory, self.progress, self.warned = directory, progress, False
        self.model_names: dict[str, str] = {}  # by the hash of the weights; entries are marked with them
        if directory is not None:
            try:
                directory.mkdir(parents=True, exist_ok=True)
                remove_abandoned(directory, PARTIAL)
            except OSError as error:
                raise InputError(
                    f"the cache {directory} cannot be made: {error.strerror}; name another with --cache, or --no-cache"
                ) from error

    def get(self, step: str, key: Mapping[str, Any], measure: Callable[[], Tensors]) -> Tensors:
        """The tensors of this key: from disk when they are there (a named step says so), else measured and kept."""
        kept = self.find(key)
        if kept is None:
            kept = measure()
            self.keep(key, kept)
        elif step:
            self.progress.note(f"{step}: measured before")
        return kept

    def find(self, key: Mapping[str, Any]) -> Tensors | None:
        """What rank 0 has kept of this key, for all processes."""
        kept = self.read_own(key) if distributed.rank() == 0 else None
        return distributed.broadcast(kept) if distributed.broadcast_value(kept is not None) else None

    def keep(self, key: Mapping[str, Any], tensors: Tensors, *, needed: bool = False) -> None:
        """What is `needed` is read again in the same run, and cannot do without a disk that holds it."""
        if distributed.rank() == 0:
            self.write_own(key, tensors)
            if needed and not self.place(key)[0].is_file():
                raise InputError(
                    f"the cache {self.directory} holds no more, and what is measured must be kept while the run lasts; "
                    "make room, or name another with --cache, and give the same command again"
                )

    def read_own(self, key: Mapping[str, Any]) -> Tensors | None:
        """What this process has kept of this key."""
        return None if self.directory is None else self.read(*self.place(key))

    def write_own(self, key: Mapping[str, Any], tensors: Tensors) -> None:
        if self.directory is not None:
            self.write(*self.place(key), tensors)

    def drop(self, key: Mapping[str, Any]) -> None:
        if self.directory is not None:
            self.place(key)[0].unlink(missing_ok=True)

    def has(self, key: Mapping[str, Any]) -> bool:
        exists = distributed.rank() == 0 and self.directory is not None and self.place(key)[0].is_file()
        if exists:
            mark_used(self.place(key)[0])
        return bool(distributed.broadcast_value(exists))

    def place(self, key: Mapping[str, Any]) -> tuple[Path, str]:
        """The file of a key, and the key in words."""
        assert self.directory is not None
        words = json.dumps(key, sort_keys=True, default=str)
        return self.directory / f"{hashlib.sha256(words.encode()).hexdigest()[:40]}.safetensors", words

    def read(self, file: Path, words: str) -> Tensors | None:
        try:
            with safe_open(file, framework="pt") as entry:
                notes = entry.metadata() or {}
                tensors = {name: entry.get_tensor(name) for name in entry.keys()}  # noqa: SIM118
            if notes.get("key") == words and notes.get("sha256") == digest(sorted(tensors.items())):
                mark_used(file)
                return tensors
            reason = "its contents are not what was written"
        except FileNotFoundError:
            return None
        except (SafetensorError, OSError, ValueError) as error:
            reason = str(error)
        self.progress.say(f"warning: the cached {file.name} is damaged ({reason}); it is measured again")
        return None

    def write(self, file: Path, words: str, tensors: Tensors) -> None:
        """One rename, so that a reader never sees half of it. A full disk costs the entry, not the run."""
        try:
            with owned_directory(file.parent, PARTIAL) as folder:
                notes = {"key": words, "sha256": digest(sorted(tensors.items())), **self.name_model(words)}
                partial = folder / file.name
                save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial, notes)
                sync(partial)
                os.replace(partial, file)
                sync(file.parent)
        except (OSError, SafetensorError) as error:
            if not self.warned:  # one line: a full disk refuses every entry from here on
                self.progress.say(f"warning: the cache {self.directory} was not written: {error}")
            self.warned = True

    def name_model(self, words: str) -> dict[str, str]:
        """The name of the model that a key is about, where it is known: for people who look into the cache."""
        model = json.loads(words).get("model")
        name = self.model_names.get(model.get("weights", "")) if isinstance(model, dict) else None
        return {"model": name} if name else {}


class UntouchedCache(Cache):
    """A cache that is only asked what it holds: nothing in it is read, written, or marked as used."""

    def __init__(self, directory: Path, progress: Progress) -> None:
        super().__init__(None, progress)
        self.directory = directory
        there = next(folder for folder in (directory.absolute(), *directory.absolute().parents) if folder.exists())
        if not there.is_dir():
            raise InputError(f"the cache {directory} cannot be made: {there} is a file; name another with --cache")

    def has(self, key: Mapping[str, Any]) -> bool:
        return bool(distributed.broadcast_value(self.place(key)[0].is_file()))

    def read_own(self, key: Mapping[str, Any]) -> Tensors | None:
        return None

    def write_own(self, key: Mapping[str, Any], tensors: Tensors) -> None:
        """Nothing is written."""

    def drop(self, key: Mapping[str, Any]) -> None:
        """Nothing is removed."""


def digest(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 of named tensors in the given order, one tensor in memory at a time."""
    sha = hashlib.sha256()
    for name, tensor in tensors:
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        sha.update(bytes_of(tensor))
    return sha.hexdigest()


def bytes_of(tensor: Tensor) -> Any:
    """A view of the tensor's bytes."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
