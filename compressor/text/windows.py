"""Text as windows of tokens in three disjoint splits: fit on calibration, search on selection, report verification.

A window is a run of `seq_len` consecutive tokens, and the unit that is drawn and held out. The splits are parts of the
text, fixed by the text alone: how many tokens are drawn from one of them moves no border. Where the text tells its
documents apart (several files, headings of WikiText, a separator), every window knows its document.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from compressor.runtime.errors import InputError
from compressor.runtime.names import (
    CALIBRATION_TOKENS,
    GUARD,
    MIX,
    SELECTION_TOKENS,
    SELF,
    SPLITS,
    UNNAMED,
    VERIFICATION_TOKENS,
    split_name,
)
from compressor.text.documents import Document, thin
from compressor.text.guard import draw_words, usual_words
from compressor.text.sources import absolute, read_splits

SPARE_PER_SELECTION = 2  # spare windows for each selection window
SPLIT_OPTIONS = ("calib", "select", "verify")
SPLIT_PLACES = ("the first half", "a sixth, after the first half,", "the last third")
HELD_OUT_EVERY = (
    5  # every fifth calibration window of each text is held out of the fit: it chooses ridges and measures R²
)
CHARACTERS_AT_ONCE = 1_000_000  # the longest piece of text that the tokenizer is given
WRITTEN_NUMBERS = 2**40  # documents that are written are numbered from here on, in each split apart
CHARACTERS_PER_TOKEN = 64  # a text longer than this per token that is needed is subsampled before it is tokenised


class ShortText(InputError):
    """A text is too short for what is asked of it. Of all texts, `calibration` tokens can be calibrated on."""

    def __init__(self, message: str, calibration: int) -> None:
        super().__init__(message)
        self.calibration = calibration


class DocumentWriter(Protocol):
    """Somebody who writes documents for `--text self`: see `compressor.models.writer`."""

    @property
    def tokenizer(self) -> Any: ...

    def write(self, split: str, tokens: int, seed: int) -> list[Document]:
        """Documents for one split with at least so many tokens; more tokens only add documents behind these."""


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
        return hash_windows(self.windows)


def hash_windows(windows: Tensor) -> str:
    return hashlib.sha256(windows.numpy().astype("<i8").tobytes()).hexdigest()


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
    healing: Split | None = None  # for training, from the part that calibration is from; texts alternate
    spare: Split | None = None  # of that part too, windows that nothing is fitted on, text after text
    guard: Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.long))  # see `compressor.text.guard`
    settings: dict[str, Any] = field(default_factory=dict)  # how it was read, as keys of a recipe

    def __post_init__(self) -> None:
        if not self.counts:
            self.counts[UNNAMED] = (len(self.selection.windows), len(self.verification.windows))

    def parts(self, split: str) -> dict[str, slice]:
        """The windows that belong to each text, by its name; `split` is "selection", "verification" or "spare"."""
        if split == "spare":
            each = len(self.spare.windows) // len(self.counts) if self.spare else 0
            sizes = dict.fromkeys(self.counts, each)
        else:
            column = ("selection", "verification").index(split)
            sizes = {name: pair[column] for name, pair in self.counts.items()}
        stops = accumulate(sizes.values())
        return {name: slice(stop - sizes[name], stop) for name, stop in zip(sizes, stops, strict=True)}

    @property
    def spare_ratio(self) -> float:
        """How many spare windows there are for each selection window."""
        return len(self.spare.windows) / len(self.selection.windows) if self.spare else 0.0

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
    def fitted_sha256(self) -> str:
        """A hash of all that replacements are fitted on and chosen by: the same, and the guard windows."""
        if not len(self.guard):
            return self.calibration_sha256
        guard = hash_windows(self.guard)
        return hashlib.sha256(f"{self.calibration_sha256} {guard}".encode()).hexdigest()

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
    guard: float = GUARD,
    heal_tokens: int = 0,
    document_separator: str | None = None,
    seed: int = 0,
    writer: DocumentWriter | None = None,
) -> Text:
    """Read `demo`, `mix`, `wikitext2`, `hub:OWNER/NAME[:CONFIG]`, or UTF-8 files, and cut them into windows.

    `self` is text that a model writes: `writer=compressor.Writer(model, tokenizer)`.

    `name=` before any of them makes it a separate text: the calibration tokens are divided equally among the texts,
    while each text gets the full number of selection and verification tokens. A hub data set gives its train,
    validation and test splits. Of a file the first half is for calibration, the next sixth for selection and the last
    third for verification; a text of many documents is dealt out in whole documents, in the same shares. The seed picks
    the windows when there are more than needed; more tokens of a split only add windows of the same part.
    `heal_tokens` asks for further windows to train on, from the part of the calibration windows, which may be among
    them; a text with fewer gives what it has, and several texts give equally many.
    Spare windows are drawn from that part too, behind the calibration windows; there may be fewer of them, or none.
    `guard` windows, as a share of those that are fitted on, are fitted on beside them: see `compressor.text.guard`.
    To what is trained on, windows of the mix are added, half as many for each.
    """
    if seq_len < 2:
        raise InputError(f"--seq-len must be at least 2, got {seq_len}; try --seq-len 256")
    given = [str(name) for name in ([text] if isinstance(text, (str, Path)) else text)]
    groups = group_by_name(given)
    minimum = {"calib": HELD_OUT_EVERY * len(groups), "select": 1, "verify": 2}  # windows; an interval needs two
    token_counts = {"calib": calib_tokens, "select": select_tokens, "verify": verify_tokens}
    for name, tokens in token_counts.items():
        if tokens < minimum[name] * seq_len:
            least = minimum[name] * seq_len
            raise InputError(f"--{name}-tokens must be at least {least} at --seq-len {seq_len}, got {tokens}")
    token_counts["calib"] //= len(groups)
    window_counts = [tokens // seq_len for tokens in token_counts.values()]
    heal = max(1, heal_tokens // len(groups) // seq_len) if heal_tokens else 0
    pools = []
    for name, names in groups.items():
        seeds = [seed_of(seed, name, split) for split in SPLITS]
        reader = Reader(names, tokenizer, seq_len, document_separator, writer, seed)
        pools.append(reader.fill_pools(window_counts, seeds, len(groups), heal))
    source = ", ".join(name for names in groups.values() for name in names)
    calibration, selection, verification = (
        join_splits([of_text[k].draw(window_counts[k]) for of_text in pools], source, alternate=k == 0)
        for k in range(3)
    )
    healing = None
    if heal:
        count = min([heal, *(len(of_text[3].windows) for of_text in pools)])
        healing = join_splits([of_text[3].draw(count) for of_text in pools], source, alternate=True)
    spare = None
    left = (len(of_text[0].windows) - window_counts[0] for of_text in pools)
    count = min([SPARE_PER_SELECTION * window_counts[1], *left])
    if count > 0:
        drawn = [of_text[0].draw(count, after=window_counts[0]) for of_text in pools]
        spare = join_splits(drawn, source, alternate=False)
    counts = dict.fromkeys(groups, (window_counts[1], window_counts[2]))
    settings = {
        "text": [name_again(word) for word in given],
        "seq_len": seq_len,
        "calib_tokens": calib_tokens,
        "select_tokens": select_tokens,
        "verify_tokens": verify_tokens,
        "guard": guard,
        **({"document_separator": document_separator} if document_separator else {}),
        "seed": seed,
    }
    whole = Text(calibration, selection, verification, counts, healing, spare, settings=settings)
    return add_guard(whole, tokenizer, guard, seed) if guard else whole


def add_guard(text: Text, tokenizer: Any, share: float, seed: int) -> Text:
    """The text with so many guard windows for each that is fitted on, and the mix among what healing trains on."""
    count, seed = round(share * len(text.fitting)), seed_of(seed, "guard")
    trained = round(share * len(text.healing.windows) / 2) if text.healing else 0
    reader = Reader([MIX], tokenizer, text.seq_len, None, None, seed)
    mix = reader.fill(read_splits([MIX], None)[0], SPLITS[0], max(trained, count // 2), seed)
    others = mix.draw(count // 2).windows
    words = draw_words(usual_words(tokenizer), count - len(others), text.fitting, seed)
    healing = text.healing
    if healing and trained:
        healing = join_splits([healing, mix.draw(trained)], f"{healing.source}, {MIX}", alternate=False)
    return replace(text, guard=torch.cat([words, others]), healing=healing)


def name_again(word: str) -> str:
    """An argument of `load_text` that still holds from another working directory."""
    name, rest = parse_text_argument(word)
    return absolute(rest) if name is None else f"{name}={absolute(rest)}"


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


@dataclass(frozen=True)
class Pool:
    """All windows of one part of a text, the document of each, and the order in which they are drawn."""

    windows: Tensor
    documents: Tensor
    order: Tensor
    source: str

    def draw(self, count: int, after: int = 0) -> Split:
        """So many windows, behind as many as were drawn before."""
        drawn = self.order[after : after + count].sort().values
        return Split(self.windows[drawn], self.source, self.documents[drawn])


@dataclass(frozen=True)
class Reader:
    """One text: its files, data sets or writer, and how it is cut into windows."""

    names: list[str]
    tokenizer: Any
    seq_len: int
    separator: str | None
    writer: DocumentWriter | None
    seed: int  # of what is written

    @property
    def is_written(self) -> bool:
        return all(name == SELF for name in self.names)

    def fill_pools(self, counts: list[int], seeds: list[int], texts: int, heal: int) -> list[Pool]:
        """A pool with `counts` windows or more for each of the three splits of this text, of so many, and behind them
        one of the calibration part with `heal` windows, or as many as it has."""
        read = [name for name in self.names if name != SELF]
        parts = read_splits(read, self.separator) if read else [[], [], []]
        pools = []
        for k, documents in enumerate(parts):
            more = heal if self.is_written and k == 0 else 0
            pool = self.fill(documents, SPLITS[k], max(more, counts[k]), seeds[k])
            if len(pool.windows) < counts[k]:
                have, need = len(pool.windows) * self.seq_len, counts[k] * self.seq_len
                short = InputError if k else partial(ShortText, calibration=texts * have)
                raise short(
                    f"text {', '.join(self.names)} is too short: its {SPLITS[k]} part ({SPLIT_PLACES[k]} of it) has "
                    f"{have} tokens in windows of {self.seq_len}, and {need} are asked for; other parts are not drawn "
                    f"from for it, so give more text, or lower --{SPLIT_OPTIONS[k]}-tokens to at most {have}"
                )
            pools.append(pool)
        if heal:
            pools.append(
                pools[0] if self.is_written else self.fill(parts[0], SPLITS[0], max(heal, counts[0]), seeds[0])
            )
        return pools

    def fill(self, documents: list[Document], split: str, count: int, seed: int) -> Pool:
        """The windows of these documents, of a longer text only about as many as are needed, and of what is written."""
        prefix = bos_prefix(self.tokenizer)
        kept = thin(documents, CHARACTERS_PER_TOKEN * count * self.seq_len)
        tokens = count * self.seq_len
        while True:
            written = self.have_written(split, tokens)
            windows, numbers = cut_windows([*kept, *written], self.tokenizer, self.seq_len, prefix)
            if len(windows) >= count or not written:
                break
            tokens += tokens // 2  # another tokenizer makes fewer tokens of what was written
        order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed))
        if self.is_written:  # it is written as needed, so nothing is left out; more of it only adds windows
            order = torch.arange(len(windows))
        return Pool(windows, numbers, order, ", ".join(self.names))

    def have_written(self, split: str, tokens: int) -> list[Document]:
        """What the model writes for a split, in its own tokens.

        They are the tokens that it chose: decoded and tokenised again, half a character or a word in unusual pieces
        would become others, and the text would not be what the model finds likely. Only another tokenizer, that of
        --cross, reads the decoded text.
        """
        if SELF not in self.names:
            return []
        if self.writer is None:
            raise InputError(
                "text self is written by a model; in Python, give it to "
                "load_text(..., writer=compressor.Writer(model, tokenizer))"
            )
        written = self.writer.write(split, tokens, self.seed)
        first = WRITTEN_NUMBERS * (1 + SPLITS.index(split))
        own = self.writer.tokenizer is self.tokenizer
        return [replace(d, number=first + d.number, ids=d.ids if own else None) for d in written]


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
        if document.ids is not None:
            ids += document.ids
            content = ""
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
