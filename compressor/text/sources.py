"""Where text comes from: files, built-in texts, and data sets of the Hub."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from compressor.runtime.errors import InputError, reason_of
from compressor.runtime.names import BUILT_IN_TEXTS, DEMO_TEXT, HUB_SPLITS, HUB_TEXTS, MIX, PACKAGE
from compressor.runtime.network import why_unreachable
from compressor.text.documents import (
    DEALT_DOCUMENTS,
    LARGEST_DEALT,
    Document,
    cut_file,
    deal_documents,
    divide,
    divide_rows,
)

MIX_TEXT = PACKAGE / "mix"
TEXT_ALTERNATIVES = (
    "use --text PATH for a local file, --text self for text that the model writes, or --text mix or --text demo for a "
    "built-in text"
)


class MissingDataSet(InputError):
    """A data set is neither in the local cache nor to be had from the Hub."""


def read_splits(names: list[str], separator: str | None) -> list[list[Document]]:
    """The documents of each split of a text, or the parts of documents that each split has."""
    splits: list[list[Document]] = [[], [], []]
    files: list[list[Document]] = []
    numbers = count()
    separated = False

    def number(contents: list[str]) -> list[Document]:
        nonlocal separated
        separated |= len(contents) > 1
        return [Document(next(numbers), content) for content in contents]

    for name in names:
        if name in HUB_TEXTS or name.startswith("hub:"):
            for split, rows in zip(splits, read_hub_texts(name), strict=True):
                split += number(divide_rows(rows, separator))
        else:
            files += [number(divide(read_text_file(file), separator)) for file in find_text_files(name)]
    if separator is not None and not separated:
        raise InputError(f"--document-separator {separator!r} stands nowhere in text {', '.join(names)}")
    documents = [document for file in files for document in file]
    sizes = [len(document.content) for document in documents]
    dealt = len(documents) >= DEALT_DOCUMENTS and max(sizes) <= LARGEST_DEALT * sum(sizes)
    for shares in [deal_documents(documents)] if dealt else map(cut_file, files):
        for split, share in zip(splits, shares, strict=True):
            split += share
    return splits


def refuse_missing(name: str) -> None:
    """Refuse a text that should be a file and is none; what is built in, written or on the Hub is looked for later."""
    if name and name not in (*HUB_TEXTS, *BUILT_IN_TEXTS) and not name.startswith("hub:"):
        find_text_files(name)


def find_text_files(name: str) -> list[Path]:
    """The files of a text that is not a hub data set: those of a built-in text, or the file with this path."""
    if name in ("demo", MIX):
        return sorted((MIX_TEXT if name == MIX else DEMO_TEXT).glob("*.txt"))
    path = Path(name).expanduser()
    if not path.exists():
        hints = ", ".join([*BUILT_IN_TEXTS, *HUB_TEXTS, "hub:OWNER/NAME"])
        raise InputError(f"text file {name} does not exist; give a UTF-8 file, or one of {hints}")
    if path.is_dir():
        raise InputError(f"text {name} is a directory; give one or more UTF-8 files")
    return [path]


def absolute(name: str) -> str:
    """A path that still holds from another working directory; anything else, and what is built in, as it is."""
    if name in BUILT_IN_TEXTS or name in HUB_TEXTS:
        return name
    return os.path.abspath(os.path.expanduser(name)) if Path(name).expanduser().exists() else name


def read_text_file(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"text file {path} cannot be read: {error.strerror}") from error
    if not data.strip():
        raise InputError(f"text file {path} is empty")
    if b"\0" in data:
        raise InputError(f"text file {path} is binary; give a UTF-8 text file")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"text file {path} is not UTF-8 (byte {error.start}); convert it to UTF-8") from error


def find_data_set(name: str) -> tuple[str, list[Any]]:
    """The repository of a hub data set and its train, validation and test split; MissingDataSet where it is not."""
    repo, _, config = name.removeprefix("hub:").partition(":")
    if name in HUB_TEXTS:
        repo, config = HUB_TEXTS[name]
    offline = why_unreachable()
    import datasets

    try:
        with datasets_offline(offline is not None):
            return repo, [datasets.load_dataset(repo, config or None, split=split) for split in HUB_SPLITS]
    except Exception as error:  # datasets raises a dozen unrelated types for a missing set, config or split
        reason = reason_of(error)
        if offline:
            reason = f"it is not in the local cache, and the Hugging Face Hub cannot be reached ({offline})"
        raise MissingDataSet(f"data set {repo} cannot be loaded: {reason}; {TEXT_ALTERNATIVES}") from error


def read_hub_texts(name: str) -> list[list[str]]:
    """The rows of the train, validation and test split of a hub data set."""
    repo, parts = find_data_set(name)
    if "text" not in parts[0].column_names:
        columns = ", ".join(parts[0].column_names)
        raise InputError(f"data set {repo} has no column 'text' (it has {columns}); {TEXT_ALTERNATIVES}")
    texts = [[row for row in part["text"] if row is not None] for part in parts]
    if not all(isinstance(row, str) for rows in texts for row in rows):
        raise InputError(f"column 'text' of data set {repo} does not hold text; {TEXT_ALTERNATIVES}")
    return [[row if row.endswith("\n") else row + "\n" for row in rows] for rows in texts]


@contextmanager
def datasets_offline(wanted: bool) -> Iterator[None]:
    """While open and `wanted`, `datasets` uses only its local cache.

    Its environment variables are no help: they are read only when it is first imported.
    """
    import datasets
    from huggingface_hub import constants

    switches = (constants, datasets.config)
    before = [switch.HF_HUB_OFFLINE for switch in switches]
    try:
        for switch, value in zip(switches, before, strict=True):
            switch.HF_HUB_OFFLINE = wanted or value
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.HF_HUB_OFFLINE = value
