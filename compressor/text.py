"""Text as windows of tokens in three disjoint splits: fit on calibration, search on selection, report verification.

A window is a run of `seq_len` consecutive tokens, and the unit that is drawn and held out. The splits are parts of the
text, fixed by the text alone: how many tokens are drawn from one of them moves no border. Where the text tells its
documents apart (several files, headings of WikiText, a separator), every window knows its document.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, count, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor.runtime.errors import InputError, reason_of
from compressor.runtime.names import (
    CALIBRATION_TOKENS,
    HUB_SPLITS,
    HUB_TEXTS,
    SELECTION_TOKENS,
    UNNAMED,
    VERIFICATION_TOKENS,
    split_name,
)
from compressor.runtime.network import why_unreachable

DEMO_TEXT = Path(__file__).parent / "demo" / "text"
TEXT_ALTERNATIVES = "use --text PATH for a local file, or --text demo for the built-in text"
SPLITS = ("calibration", "selection", "verification")
SPLIT_OPTIONS = ("calib", "select", "verify")
SPLIT_SHARES = (1 / 2, 1 / 6, 1 / 3)  # of a text
SPLIT_PLACES = ("the first half", "a sixth, after the first half,", "the last third")
DEALT_DOCUMENTS = 48  # with so many documents each split gets whole ones: a third of them are 16
LARGEST_DEALT = 1 / 12  # of the text: where one document is larger, dealing whole ones would not keep to the shares
LONG_ROW = 1000  # characters: where the rows of a hub data set are this long on average, each is a document
WIKITEXT_HEADING = re.compile(r"^ = [^=\n][^\n]* = $", re.MULTILINE)
HELD_OUT_EVERY = (
    5  # every fifth calibration window of each text is held out of the fit: it chooses ridges and measures R²
)
CHARACTERS_AT_ONCE = 1_000_000  # the longest piece of text that the tokenizer is given
SLICES = 64  # a text that is subsampled is taken from this many places
CHARACTERS_PER_TOKEN = 64  # a text longer than this per token that is needed is subsampled before it is tokenised


class ShortText(InputError):
    """A text is too short for what is asked of it. Of all texts, `calibration` tokens can be calibrated on."""

    def __init__(self, message: str, calibration: int) -> None:
        super().__init__(message)
        self.calibration = calibration


@dataclass(frozen=True)
class Document:
    """A document of a text, or the part of one that a split has."""

    number: int
    content: str


@dataclass(frozen=True)
class Split:
    """Windows of consecutive tokens [windows, seq_len], where they came from, and the document that each is from."""

    windows: Tensor
    source: str
    documents: Tensor | None = None  # None: the text does not tell documents apart

    @property
    def tokens(self) -> int:
        return self.windows.numel()

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.windows.numpy().astype("<i8").tobytes()).hexdigest()


@dataclass(frozen=True)
class Text:
    """Three splits of the same window length; no window is in two of them.

    With several named texts, the selection and verification windows hold one text after another, `counts` windows
    each; in the calibration windows the texts alternate.
    """

    calibration: Split
    selection: Split
    verification: Split
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)  # name → selection and verification windows

    def __post_init__(self) -> None:
        if not self.counts:
            self.counts[UNNAMED] = (len(self.selection.windows), len(self.verification.windows))

    def parts(self, split: str) -> dict[str, slice]:
        """The windows that belong to each text, by its name; `split` is "selection" or "verification"."""
        column = ("selection", "verification").index(split)
        stops = list(accumulate(pair[column] for pair in self.counts.values()))
        return {
            name: slice(stop - self.counts[name][column], stop) for name, stop in zip(self.counts, stops, strict=True)
        }

    @property
    def seq_len(self) -> int:
        return self.calibration.windows.shape[1]

    @property
    def is_held_out(self) -> Tensor:
        """For every calibration window, whether it is held out: every fifth window of each text."""
        turn = torch.arange(len(self.calibration.windows)) // len(self.counts)
        return turn % HELD_OUT_EVERY == HELD_OUT_EVERY - 1

    @property
    def calibration_sha256(self) -> str:
        """A hash of the calibration windows and of which of them are held out, for cache keys."""
        return hashlib.sha256(f"{self.calibration.sha256} {self.is_held_out.tolist()}".encode()).hexdigest()

    @property
    def fitting(self) -> Tensor:
        """The calibration windows that replacements are fitted on."""
        return self.calibration.windows[~self.is_held_out]

    @property
    def held_out(self) -> Tensor:
        """The calibration windows that nothing is fitted on: they choose ridges and measure R²."""
        return self.calibration.windows[self.is_held_out]


def load_text(
    text: str | Path | Sequence[str | Path],
    tokenizer: Any,
    *,
    seq_len: int = 512,
    calib_tokens: int = CALIBRATION_TOKENS,
    select_tokens: int = SELECTION_TOKENS,
    verify_tokens: int = VERIFICATION_TOKENS,
    document_separator: str | None = None,
    seed: int = 0,
) -> Text:
    """Read `demo`, `wikitext2`, `hub:OWNER/NAME[:CONFIG]`, or UTF-8 files, and cut them into windows.

    `name=` before any of them makes it a separate text: the calibration tokens are divided equally among the texts,
    while each text gets the full number of selection and verification tokens. A hub data set gives its train,
    validation and test splits. Of a file the first half is for calibration, the next sixth for selection and the last
    third for verification; a text of many documents is dealt out in whole documents, in the same shares. The seed picks
    the windows when there are more than needed; more tokens of a split only add windows of the same part.
    """
    if seq_len < 2:
        raise InputError(f"--seq-len must be at least 2, got {seq_len}; try --seq-len 256")
    groups = group_by_name([str(name) for name in ([text] if isinstance(text, (str, Path)) else text)])
    minimum = {"calib": HELD_OUT_EVERY * len(groups), "select": 1, "verify": 2}  # windows; an interval needs two
    token_counts = {"calib": calib_tokens, "select": select_tokens, "verify": verify_tokens}
    for name, tokens in token_counts.items():
        if tokens < minimum[name] * seq_len:
            least = minimum[name] * seq_len
            raise InputError(f"--{name}-tokens must be at least {least} at --seq-len {seq_len}, got {tokens}")
    token_counts["calib"] //= len(groups)
    window_counts = [tokens // seq_len for tokens in token_counts.values()]
    splits_by_name = {}
    for name, names in groups.items():
        seeds = [seed_of(seed, name, split) for split in SPLITS]
        splits_by_name[name] = draw_splits(
            names, tokenizer, seq_len, window_counts, document_separator, seeds, len(groups)
        )
    source = ", ".join(name for names in groups.values() for name in names)
    calibration, selection, verification = (
        join_splits([splits[k] for splits in splits_by_name.values()], source, alternate=k == 0) for k in range(3)
    )
    return Text(calibration, selection, verification, dict.fromkeys(groups, (window_counts[1], window_counts[2])))


def seed_of(seed: int, *names: str) -> int:
    """A seed of its own for everything that is named differently."""
    return int.from_bytes(hashlib.sha256(" ".join([str(seed), *names]).encode()).digest()[:7], "big")


def join_splits(splits: Sequence[Split], source: str, *, alternate: bool) -> Split:
    """The same split of several texts as one: text after text, or window after window in turns."""
    numbers, first = [], 0  # documents of different texts are different documents
    for split in splits:
        numbers.append(
            torch.zeros(len(split.windows), dtype=torch.long) if split.documents is None else split.documents
        )
        numbers[-1] = numbers[-1] + first
        first = int(numbers[-1].max()) + 1
    windows = [split.windows for split in splits]
    if alternate:
        return Split(torch.stack(windows, dim=1).flatten(0, 1), source, torch.stack(numbers, dim=1).flatten())
    return Split(torch.cat(windows), source, torch.cat(numbers))


def parse_text_argument(word: str) -> tuple[str | None, str]:
    """Split `name=text` into (name, text); where a file is called exactly that, it is (None, the file)."""
    return (None, word) if Path(word).expanduser().exists() else split_name(word)


def group_by_name(words: Sequence[str]) -> dict[str, list[str]]:
    """The texts by name: `wiki=PATH` belongs to the text `wiki`; arguments without a name form one text together."""
    groups: dict[str, list[str]] = {}
    for word in words:
        name, rest = parse_text_argument(word)
        if not rest:
            raise InputError(f"--text {word}: nothing stands after the name; give --text {name}=FILE")
        groups.setdefault(name or UNNAMED, []).append(rest)
    return groups


def draw_splits(
    names: list[str],
    tokenizer: Any,
    seq_len: int,
    counts: list[int],
    separator: str | None,
    seeds: list[int],
    texts: int,
) -> list[Split]:
    """Draw `counts` windows for each of the three splits of one text, of so many."""
    prefix = bos_prefix(tokenizer)
    splits = []
    for k, documents in enumerate(read_splits(names, separator)):
        limit = CHARACTERS_PER_TOKEN * counts[k] * seq_len
        windows, numbers = cut_windows(thin(documents, limit), tokenizer, seq_len, prefix)
        if len(windows) < counts[k]:
            have, need, option = len(windows) * seq_len, counts[k] * seq_len, f"--{SPLIT_OPTIONS[k]}-tokens"
            short = InputError if k else partial(ShortText, calibration=texts * have)
            raise short(
                f"text {', '.join(names)} is too short: its {SPLITS[k]} part ({SPLIT_PLACES[k]} of it) has {have} "
                f"tokens in windows of {seq_len}, and {need} are asked for; other parts are not drawn from for it, so "
                f"give more text, or lower {option} to at most {have}"
            )
        generator = torch.Generator().manual_seed(seeds[k])
        drawn = torch.randperm(len(windows), generator=generator)[: counts[k]].sort().values
        splits.append(Split(windows[drawn], ", ".join(names), numbers[drawn]))
    return splits


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


def find_text_files(name: str) -> list[Path]:
    """The files of a text that is not a hub data set: those of `demo`, or the file with this path."""
    if name == "demo":
        return sorted(DEMO_TEXT.glob("*.txt"))
    path = Path(name).expanduser()
    if not path.exists():
        hints = ", ".join(["demo", *HUB_TEXTS, "hub:OWNER/NAME"])
        raise InputError(f"text file {name} does not exist; give a UTF-8 file, or one of {hints}")
    if path.is_dir():
        raise InputError(f"text {name} is a directory; give one or more UTF-8 files")
    return [path]


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


def read_hub_texts(name: str) -> list[list[str]]:
    """The rows of the train, validation and test split of a hub data set."""
    repo, _, config = name.removeprefix("hub:").partition(":")
    if name in HUB_TEXTS:
        repo, config = HUB_TEXTS[name]
    offline = why_unreachable()
    import datasets

    try:
        with datasets_offline(offline is not None):
            parts = [datasets.load_dataset(repo, config or None, split=split) for split in HUB_SPLITS]
    except Exception as error:  # datasets raises a dozen unrelated types for a missing set, config or split
        reason = reason_of(error)
        if offline:
            reason = f"it is not in the local cache, and the Hugging Face Hub cannot be reached ({offline})"
        raise InputError(f"data set {repo} cannot be loaded: {reason}; {TEXT_ALTERNATIVES}") from error
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


def subsample(text: str, limit: int, slices: int = SLICES) -> str:
    """At most about `limit` characters: of a longer text, evenly spaced slices that end at a line end."""
    if len(text) <= limit:
        return text
    step, size = len(text) // slices, limit // slices
    pieces = (text[i * step : i * step + size] for i in range(slices))
    return "".join(piece[: piece.rfind("\n") + 1] or piece for piece in pieces)


def bos_prefix(tokenizer: Any) -> list[int]:
    """The token that the tokenizer puts before a text, if any; every window begins with it.

    Gemma's perplexity explodes without its <bos>.
    """
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else []


def cut_windows(
    documents: Sequence[Document], tokenizer: Any, seq_len: int, prefix: list[int]
) -> tuple[Tensor, Tensor]:
    """Tokenise documents, one after another, into windows of `seq_len` tokens, the prefix included.

    An incomplete window is dropped. The second tensor is the document of every window: that of its middle token.
    """
    ids: list[int] = []
    ends: list[int] = []  # tokens up to the end of each document
    for document in documents:
        content, start = document.content, 0
        while start < len(content):
            stop = start + CHARACTERS_AT_ONCE
            if stop < len(content):
                stop = content.rfind("\n", start, stop) + 1 or stop
            ids += tokenizer(content[start:stop], add_special_tokens=False, verbose=False)["input_ids"]
            start = stop
        ends.append(len(ids))
    body = seq_len - len(prefix)
    rows = len(ids) // body
    windows = torch.tensor(ids[: rows * body], dtype=torch.long).reshape(rows, body)
    middles = torch.arange(rows) * body + body // 2
    numbers = torch.tensor([document.number for document in documents], dtype=torch.long)
    owners = numbers[torch.searchsorted(torch.tensor(ends, dtype=torch.long), middles, right=True)]
    return torch.cat([torch.tensor(prefix, dtype=torch.long).expand(rows, -1), windows], dim=1), owners


def batches(windows: Tensor, size: int) -> list[Tensor]:
    """The windows in consecutive batches of at most this size."""
    return [windows[start : start + size] for start in range(0, len(windows), size)]
