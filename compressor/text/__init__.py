"""Windows of tokens in three disjoint splits, of one text or several: read from files and the Hub, or written."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compressor.runtime.lazy import offer
from compressor.runtime.names import DEMO_TEXT, SPLITS

if TYPE_CHECKING:
    from compressor.text.documents import Document, divide, subsample
    from compressor.text.sources import (
        MIX_TEXT,
        MissingDataSet,
        absolute,
        datasets_offline,
        find_data_set,
        find_text_files,
        read_text_file,
    )
    from compressor.text.windows import (
        CHARACTERS_PER_TOKEN,
        HELD_OUT_EVERY,
        DocumentWriter,
        ShortText,
        Split,
        Text,
        batches,
        bos_prefix,
        cut_windows,
        group_by_name,
        load_text,
        name_again,
        parse_text_argument,
        seed_of,
    )

DOCUMENTS = ("Document", "divide", "subsample")
SOURCES = (
    "MIX_TEXT",
    "MissingDataSet",
    "absolute",
    "datasets_offline",
    "find_data_set",
    "find_text_files",
    "read_text_file",
)
WINDOWS = (
    "CHARACTERS_PER_TOKEN",
    "HELD_OUT_EVERY",
    "DocumentWriter",
    "ShortText",
    "Split",
    "Text",
    "batches",
    "bos_prefix",
    "cut_windows",
    "group_by_name",
    "load_text",
    "name_again",
    "parse_text_argument",
    "seed_of",
)
HOMES = {"documents": DOCUMENTS, "sources": SOURCES, "windows": WINDOWS}
__all__ = [
    "CHARACTERS_PER_TOKEN",
    "DEMO_TEXT",
    "HELD_OUT_EVERY",
    "MIX_TEXT",
    "SPLITS",
    "Document",
    "DocumentWriter",
    "MissingDataSet",
    "ShortText",
    "Split",
    "Text",
    "absolute",
    "batches",
    "bos_prefix",
    "cut_windows",
    "datasets_offline",
    "divide",
    "find_data_set",
    "find_text_files",
    "group_by_name",
    "load_text",
    "name_again",
    "parse_text_argument",
    "read_text_file",
    "seed_of",
    "subsample",
]

offer(__name__, {name: f"{home}:{name}" for home, names in HOMES.items() for name in names})
