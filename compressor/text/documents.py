"""Documents of a text, and how they are shared out to its three splits."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import accumulate, pairwise

SPLIT_SHARES = (1 / 2, 1 / 6, 1 / 3)  # of a text
DEALT_DOCUMENTS = 48  # with so many documents each split gets whole ones: a third of them are 16
LARGEST_DEALT = 1 / 12  # of the text: where one document is larger, dealing whole ones would not keep to the shares
LONG_ROW = 1000  # characters: where the rows of a hub data set are this long on average, each is a document
WIKITEXT_HEADING = re.compile(r"^ = [^=\n][^\n]* = $", re.MULTILINE)
SLICES = 64  # a text that is subsampled is taken from this many places


@dataclass(frozen=True)
class Document:
    """A document of a text, or the part of one that a split has."""

    number: int
    content: str
    ids: tuple[int, ...] | None = None  # the tokens that a model wrote; None: the content is tokenised


def divide(content: str, separator: str | None = None) -> list[str]:
    """The documents of a file: what stands between separators, or under each heading of WikiText, or the whole of it.

    Nothing is lost: a heading begins its document, a separator ends it.
    """
    if separator is not None:
        parts = content.split(separator)
        pieces = [part + separator for part in parts[:-1]] + parts[-1:]
        return [piece for piece in pieces if piece.strip()] or [content]
    starts = [match.start() for match in WIKITEXT_HEADING.finditer(content)]
    borders = [0, *(start for start in starts if content[:start].strip()), len(content)]
    return [content[start:stop] for start, stop in pairwise(borders)]


def divide_rows(rows: list[str], separator: str | None) -> list[str]:
    """The documents of a hub data set: long rows are documents; short ones are the lines of one text."""
    if separator is None and sum(map(len, rows)) >= LONG_ROW * max(1, len(rows)):
        return rows
    return divide("".join(rows), separator)


def deal_documents(documents: list[Document]) -> list[list[Document]]:
    """Whole documents for every split: each goes to the split that has least of what it is due by then."""
    splits: list[list[Document]] = [[], [], []]
    sizes, total = [0, 0, 0], 0
    for document in documents:
        total += len(document.content)
        behind = [share * total - size for share, size in zip(SPLIT_SHARES, sizes, strict=True)]
        chosen = behind.index(max(behind))
        splits[chosen].append(document)
        sizes[chosen] += len(document.content)
    return splits


def cut_file(documents: list[Document]) -> list[list[Document]]:
    """One file cut in three, at the ends of lines; a document at a border is in both splits."""
    content = "".join(document.content for document in documents)
    borders = [0]
    for share in accumulate(SPLIT_SHARES[:-1]):
        wanted = round(share * len(content))
        borders.append(max(borders[-1], content.rfind("\n", 0, wanted) + 1 or wanted))
    borders.append(len(content))
    splits: list[list[Document]] = [[], [], []]
    start = 0
    for document in documents:
        stop = start + len(document.content)
        for split, low, high in zip(splits, borders, borders[1:], strict=False):
            part = content[max(low, start) : min(high, stop)]
            if part:
                split.append(Document(document.number, part))
        start = stop
    return splits


def thin(documents: list[Document], limit: int) -> list[Document]:
    """At most about `limit` characters: of a longer text, the same share of every document."""
    total = sum(len(document.content) for document in documents)
    if total <= limit:
        return documents
    shares = [len(document.content) / total for document in documents]
    return [
        Document(d.number, subsample(d.content, max(1, int(limit * share)), max(1, int(SLICES * share))))
        for d, share in zip(documents, shares, strict=True)
    ]


def subsample(text: str, limit: int, slices: int = SLICES) -> str:
    """At most about `limit` characters: of a longer text, evenly spaced slices that end at a line end."""
    if len(text) <= limit:
        return text
    step, size = len(text) // slices, limit // slices
    pieces = (text[i * step : i * step + size] for i in range(slices))
    return "".join(piece[: piece.rfind("\n") + 1] or piece for piece in pieces)
