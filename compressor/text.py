"""Text as windows of tokens in three disjoint splits: fit on the first, search on the second, report the third."""

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
PIECE = 1_000_000  # characters tokenised at a time
CHARACTERS_PER_TOKEN = 64  # a text longer than this per wanted token is thinned before it is tokenised


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

    Several named texts stand one after another in the selection and the verification windows, `counts` windows each,
    and take turns in the calibration windows.
    """

    calibration: Split
    selection: Split
    verification: Split
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)  # name → selection and verification windows

    def __post_init__(self) -> None:
        if not self.counts:
            self.counts[UNNAMED] = (len(self.selection.windows), len(self.verification.windows))

    def parts(self, split: str) -> dict[str, slice]:
        """Which windows of the selection or the verification split belong to which text."""
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
        """The calibration windows that maps are fitted on."""
        index = torch.arange(len(self.calibration.windows))
        return self.calibration.windows[index % HELD_OUT_EVERY != HELD_OUT_EVERY - 1]

    @property
    def held_out(self) -> Tensor:
        """The calibration windows that no map is fitted on."""
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

    `name=` before any of them makes it a text of its own: calibration tokens are shared out equally, selection and
    verification tokens are those of every text. A hub data set gives its train, validation and test splits. Of every
    file the first part goes to calibration, the middle to selection and the end to verification. The seed picks the
    windows when there are more than needed.
    """
    if seq_len < 2:
        raise InputError(f"--seq-len must be at least 2, got {seq_len}; try --seq-len 256")
    groups = group([str(name) for name in ([text] if isinstance(text, (str, Path)) else text)])
    minimum = {"calib": HELD_OUT_EVERY * len(groups), "select": 1, "verify": 2}  # windows; a bootstrap draws from two
    asked = {"calib": calib_tokens, "select": select_tokens, "verify": verify_tokens}
    for name, tokens in asked.items():
        if tokens < minimum[name] * seq_len:
            least = minimum[name] * seq_len
            raise InputError(f"--{name}-tokens must be at least {least} at --seq-len {seq_len}, got {tokens}")
    asked["calib"] //= len(groups)
    wanted = [tokens // seq_len for tokens in asked.values()]
    generator = torch.Generator().manual_seed(seed)
    chosen = {name: cut_splits(names, tokenizer, seq_len, wanted, generator) for name, names in groups.items()}
    fitting, *others = zip(*chosen.values(), strict=True)
    turns = torch.stack(fitting, dim=1).flatten(0, 1)
    windows = (turns, *(torch.cat(parts) for parts in others))
    source = ", ".join(name for names in groups.values() for name in names)
    calibration, selection, verification = (Split(w, source) for w in windows)
    return Text(calibration, selection, verification, dict.fromkeys(groups, (wanted[1], wanted[2])))


def split_text(word: str) -> tuple[str | None, str]:
    """`name=text` → (name, text); a file whose own name looks like that is a file."""
    return (None, word) if Path(word).expanduser().exists() else split_name(word)


def group(words: Sequence[str]) -> dict[str, list[str]]:
    """Texts by name: `wiki=PATH` is named, all that have no name are one text."""
    groups: dict[str, list[str]] = {}
    for word in words:
        name, rest = split_text(word)
        if not rest:
            raise InputError(f"--text {word}: nothing stands after the name; give --text {name}=FILE")
        groups.setdefault(name or UNNAMED, []).append(rest)
    return groups


def cut_splits(
    names: list[str], tokenizer: Any, seq_len: int, wanted: list[int], generator: torch.Generator
) -> list[Tensor]:
    """The windows of one text for each of the three splits: as many as wanted, drawn from all there are."""
    limit = CHARACTERS_PER_TOKEN * sum(wanted) * seq_len
    prefix = bos_prefix(tokenizer)
    pools: list[list[Tensor]] = [[], [], []]
    for name in names:
        if name in HUB_TEXTS or name.startswith("hub:"):
            for pool, content in zip(pools, read_hub(name), strict=True):
                pool.append(cut(thin(content, limit), tokenizer, seq_len, prefix))
        else:
            for file in files_of(name):
                windows = cut(thin(read_file(file), limit), tokenizer, seq_len, prefix)
                first = len(windows) * wanted[0] // sum(wanted)
                second = len(windows) * (wanted[0] + wanted[1]) // sum(wanted)
                for pool, part in zip(pools, windows.tensor_split([first, second]), strict=True):
                    pool.append(part)
    splits = [torch.cat(pool) for pool in pools]
    if any(len(have) < need for have, need in zip(splits, wanted, strict=True)):
        have, need = (sum(len(s) for s in splits) * seq_len, sum(wanted) * seq_len)
        tokens = ", ".join(f"{split} {count * seq_len}" for split, count in zip(SPLITS, wanted, strict=True))
        raise InputError(
            f"text {', '.join(names)} is too short: it has {have} tokens in windows of {seq_len}, the splits need "
            f"{need} ({tokens}); give more text, or lower --calib-tokens, --select-tokens or --verify-tokens"
        )
    return [
        windows[torch.randperm(len(windows), generator=generator)[:need].sort().values]
        for windows, need in zip(splits, wanted, strict=True)
    ]


def files_of(name: str) -> list[Path]:
    if name == "demo":
        return sorted(DEMO_TEXT.glob("*.txt"))
    path = Path(name).expanduser()
    if not path.exists():
        hints = ", ".join(["demo", *HUB_TEXTS, "hub:OWNER/NAME"])
        raise InputError(f"text file {name} does not exist; give a UTF-8 file, or one of {hints}")
    if path.is_dir():
        raise InputError(f"text {name} is a directory; give one or more UTF-8 files")
    return [path]


def read_file(path: Path) -> str:
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


def read_hub(name: str) -> list[str]:
    """The train, validation and test text of a hub data set."""
    repo, _, config = name.removeprefix("hub:").partition(":")
    if name in HUB_TEXTS:
        repo, config = HUB_TEXTS[name]
    offline = why_unreachable()
    import datasets

    try:
        with cache_only(offline is not None):
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
def cache_only(wanted: bool) -> Iterator[None]:
    """Make datasets use what it has cached; its environment variables count only before it is first imported."""
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


def thin(text: str, limit: int, slices: int = 64) -> str:
    """At most about `limit` characters: evenly spaced slices of a longer text, cut at line ends."""
    if len(text) <= limit:
        return text
    step, size = len(text) // slices, limit // slices
    kept = (text[i * step : i * step + size] for i in range(slices))
    return "".join(piece[: piece.rfind("\n") + 1] or piece for piece in kept)


def bos_prefix(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before a text: a window starts as a text would (Gemma breaks down without its <bos>)."""
    bos = tokenizer.bos_token_id
    return [bos] if bos is not None and tokenizer("a")["input_ids"][:1] == [bos] else []


def cut(text: str, tokenizer: Any, seq_len: int, prefix: list[int]) -> Tensor:
    """Whole windows of `seq_len` tokens, the prefix included; the rest at the end is dropped."""
    ids: list[int] = []
    start = 0
    while start < len(text):
        stop = start + PIECE
        if stop < len(text):
            stop = text.rfind("\n", start, stop) + 1 or stop
        ids += tokenizer(text[start:stop], add_special_tokens=False, verbose=False)["input_ids"]
        start = stop
    body = seq_len - len(prefix)
    count = len(ids) // body
    windows = torch.tensor(ids[: count * body], dtype=torch.long).reshape(count, body)
    return torch.cat([torch.tensor(prefix, dtype=torch.long).expand(count, -1), windows], dim=1)


def batches(windows: Tensor, size: int) -> list[Tensor]:
    return [windows[start : start + size] for start in range(0, len(windows), size)]
