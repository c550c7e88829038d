"""Text as windows of tokens in three disjoint splits: fit on calibration, search on selection, report verification.

A window is a run of `seq_len` consecutive tokens, and the unit that is drawn, held out and resampled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
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
HELD_OUT_EVERY = 5  # every fifth calibration window is held out of the fit: it chooses ridges and measures R²
CHARACTERS_AT_ONCE = 1_000_000  # the longest piece of text that the tokenizer is given
CHARACTERS_PER_TOKEN = 64  # a text longer than this per token that is needed is subsampled before it is tokenised


class ShortText(InputError):
    """A text is too short for what is asked of it. Of all texts, `calibration` tokens can be calibrated on."""

    def __init__(self, message: str, calibration: int) -> None:
        super().__init__(message)
        self.calibration = calibration


@dataclass(frozen=True)
class Split:
    """Windows of consecutive tokens [windows, seq_len], and where they came from."""

    windows: Tensor
    source: str

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
        stops = list(accumulate(count[column] for count in self.counts.values()))
        return {
            name: slice(stop - self.counts[name][column], stop) for name, stop in zip(self.counts, stops, strict=True)
        }

    @property
    def seq_len(self) -> int:
        return self.calibration.windows.shape[1]

    @property
    def fitting(self) -> Tensor:
        """The calibration windows that replacements are fitted on."""
        index = torch.arange(len(self.calibration.windows))
        return self.calibration.windows[index % HELD_OUT_EVERY != HELD_OUT_EVERY - 1]

    @property
    def held_out(self) -> Tensor:
        """The calibration windows that nothing is fitted on: they choose ridges and measure R²."""
        return self.calibration.windows[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]


def load_text(
    text: str | Path | Sequence[str | Path],
    tokenizer: Any,
    *,
    seq_len: int = 512,
    calib_tokens: int = CALIBRATION_TOKENS,
    select_tokens: int = SELECTION_TOKENS,
    verify_tokens: int = VERIFICATION_TOKENS,
    seed: int = 0,
) -> Text:
    """Read `demo`, `wikitext2`, `hub:OWNER/NAME[:CONFIG]`, or UTF-8 files, and cut them into windows.

    `name=` before any of them makes it a separate text: the calibration tokens are divided equally among the texts,
    while each text gets the full number of selection and verification tokens. A hub data set gives its train,
    validation and test splits. Of every file the first part goes to calibration, the middle to selection and the end
    to verification. The seed picks the windows when there are more than needed.
    """
    if seq_len < 2:
        raise InputError(f"--seq-len must be at least 2, got {seq_len}; try --seq-len 256")
    groups = group_by_name([str(name) for name in ([text] if isinstance(text, (str, Path)) else text)])
    minimum = {"calib": HELD_OUT_EVERY * len(groups), "select": 1, "verify": 2}  # windows; a bootstrap needs two
    token_counts = {"calib": calib_tokens, "select": select_tokens, "verify": verify_tokens}
    for name, tokens in token_counts.items():
        if tokens < minimum[name] * seq_len:
            least = minimum[name] * seq_len
            raise InputError(f"--{name}-tokens must be at least {least} at --seq-len {seq_len}, got {tokens}")
    token_counts["calib"] //= len(groups)
    window_counts = [tokens // seq_len for tokens in token_counts.values()]
    generator = torch.Generator().manual_seed(seed)
    splits_by_name = {
        name: draw_splits(names, tokenizer, seq_len, window_counts, generator, len(groups))
        for name, names in groups.items()
    }
    fitting, *others = zip(*splits_by_name.values(), strict=True)
    alternating = torch.stack(fitting, dim=1).flatten(0, 1)
    windows = (alternating, *(torch.cat(parts) for parts in others))
    source = ", ".join(name for names in groups.values() for name in names)
    calibration, selection, verification = (Split(w, source) for w in windows)
    return Text(calibration, selection, verification, dict.fromkeys(groups, (window_counts[1], window_counts[2])))


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
    names: list[str], tokenizer: Any, seq_len: int, counts: list[int], generator: torch.Generator, texts: int = 1
) -> list[Tensor]:
    """Draw `counts` windows for each of the three splits of one text, of so many."""
    limit = CHARACTERS_PER_TOKEN * sum(counts) * seq_len
    prefix = bos_prefix(tokenizer)
    pools: list[list[Tensor]] = [[], [], []]
    for name in names:
        if name in HUB_TEXTS or name.startswith("hub:"):
            for pool, content in zip(pools, read_hub_texts(name), strict=True):
                pool.append(cut_windows(subsample(content, limit), tokenizer, seq_len, prefix))
        else:
            for file in find_text_files(name):
                windows = cut_windows(subsample(read_text_file(file), limit), tokenizer, seq_len, prefix)
                first = len(windows) * counts[0] // sum(counts)
                second = len(windows) * (counts[0] + counts[1]) // sum(counts)
                for pool, part in zip(pools, windows.tensor_split([first, second]), strict=True):
                    pool.append(part)
    splits = [torch.cat(pool) for pool in pools]
    if any(len(windows) < count for windows, count in zip(splits, counts, strict=True)):
        have, need = (sum(len(s) for s in splits) * seq_len, sum(counts) * seq_len)
        tokens = ", ".join(f"{split} {count * seq_len}" for split, count in zip(SPLITS, counts, strict=True))
        raise ShortText(
            f"text {', '.join(names)} is too short: it has {have} tokens in windows of {seq_len}, the splits need "
            f"{need} ({tokens}); give more text, or lower --calib-tokens, --select-tokens or --verify-tokens",
            calibration=texts * (have - (counts[1] + counts[2]) * seq_len),
        )
    return [
        windows[torch.randperm(len(windows), generator=generator)[:count].sort().values]
        for windows, count in zip(splits, counts, strict=True)
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


def read_hub_texts(name: str) -> list[str]:
    """The train, validation and test text of a hub data set."""
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
    return ["".join(row if row.endswith("\n") else row + "\n" for row in rows) for rows in texts]


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


def subsample(text: str, limit: int, slices: int = 64) -> str:
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


def cut_windows(text: str, tokenizer: Any, seq_len: int, prefix: list[int]) -> Tensor:
    """Tokenise a text into windows of `seq_len` tokens, the prefix included; an incomplete window is dropped."""
    ids: list[int] = []
    start = 0
    while start < len(text):
        stop = start + CHARACTERS_AT_ONCE
        if stop < len(text):
            stop = text.rfind("\n", start, stop) + 1 or stop
        ids += tokenizer(text[start:stop], add_special_tokens=False, verbose=False)["input_ids"]
        start = stop
    body = seq_len - len(prefix)
    count = len(ids) // body
    windows = torch.tensor(ids[: count * body], dtype=torch.long).reshape(count, body)
    return torch.cat([torch.tensor(prefix, dtype=torch.long).expand(count, -1), windows], dim=1)


def batches(windows: Tensor, size: int) -> list[Tensor]:
    """The windows in consecutive batches of at most this size."""
    return [windows[start : start + size] for start in range(0, len(windows), size)]
