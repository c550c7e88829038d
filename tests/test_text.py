"""Text in windows: disjoint splits, the same for the same seed, from files and from data sets of the Hub."""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
import time
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pytest
import torch
from conftest import Compress, sentences
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from zoo import tiny_tokenizer

from compressor.runtime.errors import InputError
from compressor.text import (
    CHARACTERS_PER_TOKEN,
    Document,
    Text,
    bos_prefix,
    cut_windows,
    load_text,
    sources,
    subsample,
)

SIZES = {"seq_len": 16, "calib_tokens": 800, "select_tokens": 160, "verify_tokens": 320}
SPLITS = ("calibration", "selection", "verification")


class Bytes:
    """One token per byte, so that windows can be read back."""

    bos_token_id = None
    vocab_size, all_special_ids = 256, (0,)

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode("utf-8"))}


def numbered(count: int, letter: str = "x") -> str:
    """Sixteen bytes to the line: every line is a window, and no two are alike."""
    return "".join(f"{letter} line {i:08d}\n" for i in range(count))


def lines(windows: Tensor) -> list[str]:
    return [bytes(window).decode("utf-8") for window in windows.tolist()]


def splits(text: Text) -> list[list[str]]:
    return [lines(getattr(text, name).windows) for name in SPLITS]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(numbered(500), encoding="utf-8")
    return path


def test_windows_are_consecutive_disjoint_and_in_order(file: Path) -> None:
    chosen = splits(load_text(file, Bytes(), **SIZES))
    assert [len(part) for part in chosen] == [50, 10, 20]
    text = numbered(500).splitlines(keepends=True)
    drawn = [line for part in chosen for line in part]
    assert set(drawn) <= set(text)  # each window is sixteen consecutive bytes, on the grid
    assert len(set(drawn)) == len(drawn)
    assert drawn == sorted(drawn)  # first calibration, then selection, then verification
    assert chosen[0][-1] < text[250]  # the first half, the next sixth, the last third
    assert text[250] <= chosen[1][0] <= chosen[1][-1] < text[333] <= chosen[2][0]


@pytest.mark.parametrize("option", ["calib_tokens", "select_tokens", "verify_tokens"])
@pytest.mark.parametrize("seq_len", [16, 32])
def test_more_tokens_of_a_split_move_no_border(file: Path, option: str, seq_len: int) -> None:
    """A larger verification takes only what nothing was fitted or searched on, and all that it had before."""
    few = load_text(file, Bytes(), **SIZES)
    many = load_text(file, Bytes(), **{**SIZES, "seq_len": seq_len, option: 2 * SIZES[option]})
    found = {split: {line for w in lines(getattr(many, split).windows) for line in w.splitlines()} for split in SPLITS}
    before = {split: {line.strip() for line in lines(getattr(few, split).windows)} for split in SPLITS}
    for first, second in itertools.permutations(SPLITS, 2):
        assert not found[first] & before[second]
    if seq_len == 16:
        assert all(before[split] <= found[split] for split in SPLITS)


def test_a_split_that_has_no_more_says_so(file: Path) -> None:
    load_text(file, Bytes(), **{**SIZES, "verify_tokens": 16 * 167})
    with pytest.raises(InputError, match=r"verification part \(the last third of it\) has 2672 tokens.*at most 2672"):
        load_text(file, Bytes(), **{**SIZES, "verify_tokens": 16 * 168})


def test_held_out_windows_are_not_fitted_on(file: Path) -> None:
    text = load_text(file, Bytes(), **SIZES)
    fitted, held = set(lines(text.fitting)), set(lines(text.held_out))
    assert len(held) == 10
    assert fitted | held == set(lines(text.calibration.windows))
    assert not fitted & held


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 10])
def test_every_named_text_is_fitted_and_held_out(tmp_path: Path, count: int) -> None:
    """Also five, where every fifth of all calibration windows would be one text."""
    names = "abcdefghij"[:count]
    for name in names:
        (tmp_path / name).write_text(numbered(400, name), encoding="utf-8")
    sizes = {**SIZES, "calib_tokens": 16 * 20 * count}
    text = load_text([f"{name}={tmp_path / name}" for name in names], Bytes(), **sizes)
    for part, windows in ((text.fitting, 16), (text.held_out, 4)):
        firsts = [line[0] for line in lines(part)]
        assert {name: firsts.count(name) for name in names} == dict.fromkeys(names, windows)


def test_what_is_held_out_is_in_the_hash(file: Path) -> None:
    """The same calibration windows, of one text or of two."""
    one = load_text(file, Bytes(), **SIZES)
    two = Text(one.calibration, one.selection, one.verification, {"a": (5, 10), "b": (5, 10)})
    assert one.calibration_sha256 != two.calibration_sha256
    assert one.calibration_sha256 == load_text(file, Bytes(), **SIZES).calibration_sha256


def test_same_seed_same_windows(file: Path) -> None:
    first, again, other = (load_text(file, Bytes(), **SIZES, seed=seed) for seed in (3, 3, 4))
    assert splits(first) == splits(again)
    assert all(a != b for a, b in zip(splits(first), splits(other), strict=True))


def test_seed_leaves_the_global_generator_alone(file: Path) -> None:
    state = torch.get_rng_state()
    load_text(file, Bytes(), **SIZES)
    assert torch.equal(torch.get_rng_state(), state)


def test_sha256_is_stable(file: Path) -> None:
    """Of the tokens as little-endian 64-bit integers, whatever the machine."""
    exact = {"seq_len": 16, "calib_tokens": 96, "select_tokens": 32, "verify_tokens": 64}
    file.write_text(numbered(12), encoding="utf-8")
    text = load_text(file, Bytes(), **exact)
    content = numbered(12).encode()
    for split, part in zip(SPLITS, (content[:96], content[96:128], content[128:]), strict=True):
        tokens = struct.pack(f"<{len(part)}q", *part)
        assert getattr(text, split).sha256 == hashlib.sha256(tokens).hexdigest()
    assert text.calibration.source == str(file)
    assert [getattr(text, name).tokens for name in SPLITS] == [96, 32, 64]


def test_every_file_contributes_to_every_split(file: Path, tmp_path: Path) -> None:
    (tmp_path / "more.txt").write_text(numbered(300, "y"), encoding="utf-8")
    text = load_text([file, str(tmp_path / "more.txt")], Bytes(), **SIZES)
    for part in splits(text):
        assert {line[0] for line in part} == {"x", "y"}
    everything = [line for part in splits(text) for line in part]
    assert len(set(everything)) == len(everything) == 80
    assert text.verification.source == f"{file}, {tmp_path / 'more.txt'}"


def test_whole_text_is_used_when_it_is_just_enough(tmp_path: Path) -> None:
    sizes = {"seq_len": 16, "calib_tokens": 480, "select_tokens": 160, "verify_tokens": 320}
    (tmp_path / "text.txt").write_text(numbered(60), encoding="utf-8")
    chosen = splits(load_text(tmp_path / "text.txt", Bytes(), **sizes))
    assert [line for part in chosen for line in part] == numbered(60).splitlines(keepends=True)
    (tmp_path / "text.txt").write_text(numbered(59), encoding="utf-8")
    with pytest.raises(InputError, match=r"calibration part \(the first half of it\) has 464 tokens in windows of 16"):
        load_text(tmp_path / "text.txt", Bytes(), **sizes)


@pytest.mark.parametrize(
    ("option", "least", "name"),
    [("calib_tokens", 80, "--calib-tokens"), ("select_tokens", 16, "--select"), ("verify_tokens", 32, "--verify")],
)
def test_least_tokens(file: Path, option: str, least: int, name: str) -> None:
    load_text(file, Bytes(), **{**SIZES, option: least})
    with pytest.raises(InputError, match=rf"{name}.* must be at least {least} at --seq-len 16, got {least - 1}"):
        load_text(file, Bytes(), **{**SIZES, option: least - 1})


def test_least_window(file: Path) -> None:
    assert load_text(file, Bytes(), **{**SIZES, "seq_len": 2}).seq_len == 2
    with pytest.raises(InputError, match="--seq-len must be at least 2, got 1"):
        load_text(file, Bytes(), **{**SIZES, "seq_len": 1})


# The prefix


def with_bos() -> Any:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<end> $A", special_tokens=[("<end>", 0)])
    return tokenizer


def test_prefix_is_what_the_tokenizer_adds() -> None:
    assert bos_prefix(tiny_tokenizer()) == []  # it has a bos token, and does not put it before a text
    assert bos_prefix(with_bos()) == [0]


def test_every_window_starts_with_the_prefix(tmp_path: Path) -> None:
    """And the text goes on in the next window with nothing lost between."""
    (tmp_path / "text.txt").write_text(sentences(300), encoding="utf-8")
    plain, prefixed = (load_text(tmp_path / "text.txt", t, **SIZES) for t in (tiny_tokenizer(), with_bos()))
    assert prefixed.seq_len == 16
    for name in SPLITS:
        windows = getattr(prefixed, name).windows
        assert bool((windows[:, 0] == 0).all())
        assert not bool((windows[:, 1:] == 0).any())
        assert not bool((getattr(plain, name).windows == 0).any())
    content = "the watery part of the world " * 20
    body = cut_windows([Document(0, content)], with_bos(), 16, [0])[0][:, 1:].flatten()
    ids = tiny_tokenizer()(content)["input_ids"]
    assert body.tolist() == ids[: len(body)]
    assert len(ids) - len(body) < 15


# Long texts


def test_text_is_tokenised_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """With line ends between them, and without any."""
    for content in (numbered(50), "no line end here " * 50):
        documents = [Document(0, content)]
        whole, _ = cut_windows(documents, Bytes(), 16, [])
        with monkeypatch.context() as patch:
            patch.setattr("compressor.text.windows.CHARACTERS_AT_ONCE", 100)
            assert torch.equal(cut_windows(documents, Bytes(), 16, [])[0], whole)


def test_thin_keeps_a_short_text() -> None:
    assert subsample("short\n", 6) == "short\n"


def test_thin_takes_from_the_whole_of_a_long_text() -> None:
    text = numbered(200_000)
    thinned = subsample(text, 40_000)
    assert 0.8 * 40_000 < len(thinned) <= 40_000
    numbers = [int(line.split()[-1]) for line in thinned.splitlines()[1:] if len(line) == 15]
    assert numbers == sorted(numbers)
    assert numbers[0] < 4_000
    assert numbers[-1] > 190_000
    tenths = {number // 20_000 for number in numbers}
    assert tenths == set(range(10))


def test_thin_of_a_text_without_line_ends() -> None:
    assert len(subsample("word " * 100_000, 6_400)) == 6_400


def test_huge_text_is_not_tokenised_whole(tmp_path: Path) -> None:
    seen = []

    class Counting(Bytes):
        def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
            seen.append(len(text))
            return super().__call__(text, **options)

    (tmp_path / "huge.txt").write_text(numbered(200_000), encoding="utf-8")
    text = load_text(tmp_path / "huge.txt", Counting(), **SIZES, guard=0)
    assert sum(seen) <= CHARACTERS_PER_TOKEN * 1280 + 10
    assert text.verification.tokens == 320
    assert max(int(line[7:15]) for line in lines(text.verification.windows) if line.startswith("x line")) > 100_000


# Documents


def owners(text: Text, split: str) -> dict[str, int]:
    """The document of every window, by what the window says."""
    part = getattr(text, split)
    assert part.documents is not None
    return dict(zip(lines(part.windows), part.documents.tolist(), strict=True))


def articles(count: int, size: int) -> str:
    """Articles as WikiText has them, with a section heading in each; every line has sixteen bytes."""
    body = "".join("words of it {0:03d}\n" for _ in range(size - 2))
    return "".join(f" = Title {i:03d}  = \n = = Part {i:02d} = = \n" + body.format(i) for i in range(count))


def test_one_file_is_one_document(file: Path) -> None:
    text = load_text(file, Bytes(), **SIZES)
    assert {*owners(text, "calibration").values(), *owners(text, "verification").values()} == {0}


def test_files_are_documents(file: Path, tmp_path: Path) -> None:
    (tmp_path / "more.txt").write_text(numbered(300, "y"), encoding="utf-8")
    text = load_text([file, str(tmp_path / "more.txt")], Bytes(), **SIZES)
    for split in SPLITS:
        assert {(line[0], number) for line, number in owners(text, split).items()} == {("x", 0), ("y", 1)}


def test_named_texts_share_no_document(file: Path, tmp_path: Path) -> None:
    (tmp_path / "more.txt").write_text(numbered(300, "y"), encoding="utf-8")
    text = load_text([f"a={file}", f"b={tmp_path / 'more.txt'}"], Bytes(), **SIZES)
    for split in SPLITS:
        pairs = {(line[0], number) for line, number in owners(text, split).items()}
        assert len(pairs) == len({number for _, number in pairs}) == 2


@pytest.mark.parametrize("separator", [None, "<|end|>\n"])
def test_many_documents_are_dealt_out_whole(tmp_path: Path, separator: str | None) -> None:
    """Headings of WikiText, or a separator; section headings begin no document. No document is in two splits."""
    content = articles(60, 10)
    if separator:
        content = content.replace(" = Title", f"{separator}Title")
    (tmp_path / "wiki.raw").write_text(content, encoding="utf-8")
    sizes = {"seq_len": 16, "calib_tokens": 3200, "select_tokens": 960, "verify_tokens": 1920}
    text = load_text(tmp_path / "wiki.raw", Bytes(), **sizes, document_separator=separator)
    seen = [set(owners(text, split).values()) for split in SPLITS]
    assert not seen[0] & seen[1]
    assert not seen[0] & seen[2]
    assert not seen[1] & seen[2]
    assert [len(documents) for documents in seen] == pytest.approx([30, 10, 20], abs=1)
    shares = [max(documents) - min(documents) for documents in seen]
    assert min(shares) > 45  # from the whole of the text


def test_few_documents_are_cut_like_one_file(tmp_path: Path) -> None:
    (tmp_path / "wiki.raw").write_text(articles(12, 50), encoding="utf-8")
    text = load_text(tmp_path / "wiki.raw", Bytes(), **SIZES)
    assert set(owners(text, "calibration").values()) == set(range(6))
    assert set(owners(text, "verification").values()) == {8, 9, 10, 11}


def test_a_document_that_is_most_of_the_text_is_cut(tmp_path: Path) -> None:
    (tmp_path / "wiki.raw").write_text(articles(60, 10) + numbered(2000), encoding="utf-8")
    text = load_text(tmp_path / "wiki.raw", Bytes(), **SIZES)
    assert [getattr(text, split).tokens for split in SPLITS] == [800, 160, 320]


def test_a_separator_that_is_nowhere(file: Path) -> None:
    with pytest.raises(InputError, match=r"--document-separator '%%' stands nowhere in text"):
        load_text(file, Bytes(), **SIZES, document_separator="%%")


# Windows to train on


@pytest.mark.parametrize("heal", [160, 1600, 3200, 10**6])
def test_healing_windows_are_of_the_calibration_part(file: Path, heal: int) -> None:
    """As many as asked for, or all that the part has; every other split is as it is without them."""
    plain, text = (load_text(file, Bytes(), **SIZES, heal_tokens=n, guard=0) for n in (0, heal))
    assert plain.healing is None
    assert splits(plain) == splits(text)
    assert text.healing is not None
    found = lines(text.healing.windows)
    assert len(found) == min(heal // 16, 250)
    assert len(set(found)) == len(found)
    assert set(found) <= set(numbered(500).splitlines(keepends=True)[:250])
    calibration = set(lines(text.calibration.windows))
    assert set(found) <= calibration if heal < 800 else calibration <= set(found)


def test_several_texts_give_equally_many_healing_windows(tmp_path: Path) -> None:
    for name, count in (("a", 400), ("b", 200)):
        (tmp_path / name).write_text(numbered(count, name), encoding="utf-8")
    text = load_text([f"{name}={tmp_path / name}" for name in "ab"], Bytes(), **SIZES, heal_tokens=10**6, guard=0)
    assert text.healing is not None
    assert "".join(line[0] for line in lines(text.healing.windows)) == "ab" * 100  # the smaller one has 100


def test_healing_of_a_subsampled_text_leaves_calibration_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "long").write_text(numbered(20_000), encoding="utf-8")
    plain, text = (load_text(tmp_path / "long", Bytes(), **SIZES, heal_tokens=n, guard=0) for n in (0, 16 * 5000))
    assert splits(plain) == splits(text)
    assert text.healing is not None
    assert text.healing.tokens == 16 * 5000


# The Hub


class Hub:
    """Stands in for datasets.load_dataset."""

    def __init__(self, columns: dict[str, list[str]] | None = None) -> None:
        self.calls: list[tuple[str, str | None, str]] = []
        self.columns = columns

    def __call__(self, repo: str, config: str | None, *, split: str) -> Any:
        self.calls.append((repo, config, split))
        rows = [f"{split[:1]} line {i:08d}" + "\n" * (i % 2) for i in range(60)]  # some rows have a line end
        return datasets.Dataset.from_dict(self.columns or {"text": rows})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    stub = Hub()
    monkeypatch.setattr(sources, "why_unreachable", lambda: None)
    monkeypatch.setattr(datasets, "load_dataset", stub)
    return stub


@pytest.mark.parametrize(
    ("name", "repo", "config"),
    [
        ("wikitext2", "Salesforce/wikitext", "wikitext-2-raw-v1"),
        ("hub:someone/texts:small", "someone/texts", "small"),
        ("hub:someone/texts", "someone/texts", None),
    ],
)
def test_hub_splits_become_ours(hub: Hub, name: str, repo: str, config: str | None) -> None:
    text = load_text(name, Bytes(), **SIZES)
    assert hub.calls == [(repo, config, split) for split in ("train", "validation", "test")]
    assert [{line[0] for line in part} for part in splits(text)] == [{"t"}, {"v"}, {"t"}]
    assert not set(lines(text.calibration.windows)) - set(numbered(60, "t").splitlines(keepends=True))
    assert text.calibration.source == name


def test_hub_text_and_a_file(hub: Hub, file: Path) -> None:
    text = load_text(["wikitext2", file], Bytes(), **SIZES)
    assert {line[0] for line in lines(text.selection.windows)} == {"v", "x"}


def test_data_set_without_text(hub: Hub) -> None:
    hub.columns = {"question": ["a"], "answer": ["b"]}
    with pytest.raises(InputError, match=r"someone/qa has no column 'text' \(it has question, answer\)"):
        load_text("hub:someone/qa", Bytes(), **SIZES)


@pytest.mark.parametrize("value", [[1, 2], [["a"], ["b"]]])
def test_data_set_whose_text_is_none(hub: Hub, value: list[Any]) -> None:
    hub.columns = {"text": value}
    with pytest.raises(InputError, match="column 'text' of data set someone/odd does not hold text"):
        load_text("hub:someone/odd", Bytes(), **SIZES)


def test_missing_rows_are_empty(hub: Hub) -> None:
    rows: list[Any] = [None, *(f"{i:015d}" for i in range(60))]
    hub.columns = {"text": rows}
    assert load_text("hub:someone/gaps", Bytes(), **SIZES).selection.tokens == 160


def test_data_set_that_fails(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise ValueError("Unknown split 'validation'.\nShould be one of ['train']")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(InputError, match=r"someone/one cannot be loaded: Unknown split 'validation'; use --text PATH"):
        load_text("hub:someone/one", Bytes(), **SIZES)


@pytest.fixture
def no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The real libraries, an empty cache of theirs, and no way out."""
    cache = tmp_path / "cache"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://hub.invalid")  # a name that never resolves
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", "http://hub.invalid")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    return cache


def test_data_set_that_is_not_cached_is_told_in_time(no_hub: Path) -> None:
    start = time.monotonic()
    with pytest.raises(InputError, match=r"not in the local cache.*cannot be reached.*--text PATH.*--text demo"):
        load_text("wikitext2", Bytes(), **SIZES)
    assert time.monotonic() - start < 10
    assert huggingface_hub.constants.HF_HUB_OFFLINE is False  # as they were
    assert datasets.config.HF_HUB_OFFLINE is False


def test_cached_data_set_needs_no_network(no_hub: Path) -> None:
    """Laid out as `datasets` leaves it after a download."""
    folder = no_hub / "Salesforce___wikitext" / "wikitext-2-raw-v1" / "0.0.0" / "0123abcd"
    folder.mkdir(parents=True)
    info: dict[str, Any] = {}
    for split, letter in (("train", "t"), ("validation", "v"), ("test", "e")):
        rows = datasets.Dataset.from_dict({"text": numbered(60, letter).splitlines(keepends=True)})
        with datasets.arrow_writer.ArrowWriter(
            path=str(folder / f"wikitext-{split}.arrow"), features=rows.features
        ) as writer:
            writer.write_table(rows.data.table)
            writer.finalize()
        info[split] = {"name": split, "num_bytes": 1, "num_examples": 60, "dataset_name": "wikitext"}
    features = {"text": {"dtype": "string", "_type": "Value"}}
    described = {"config_name": "wikitext-2-raw-v1", "dataset_name": "wikitext", "splits": info, "features": features}
    (folder / "dataset_info.json").write_text(json.dumps({**described, "version": "0.0.0"}), encoding="utf-8")
    start = time.monotonic()
    text = load_text("wikitext2", Bytes(), **SIZES)
    assert time.monotonic() - start < 10
    assert [{line[0] for line in part} for part in splits(text)] == [{"t"}, {"v"}, {"e"}]


def test_a_directory_called_demo_does_not_hide_the_built_in_text(
    compress: Compress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    words = ["--seq-len", "32", "--calib-tokens", "320", "--select-tokens", "64", "--verify-tokens", "64"]
    done = compress("profile", "demo", *words, "--no-swap", "--json")
    assert done.code == 0, done.err


# Spare windows


def test_spare_windows_are_of_the_calibration_part_and_nothing_is_fitted_on_them(file: Path) -> None:
    text = load_text(file, Bytes(), **SIZES)
    assert text.spare is not None
    found, selection = lines(text.spare.windows), len(text.selection.windows)
    assert len(set(found)) == len(found) == 2 * selection
    assert text.spare_ratio == 2
    assert set(found) <= set(numbered(500).splitlines(keepends=True)[:250])
    assert not set(found) & set(lines(text.calibration.windows))


def test_there_are_as_many_spare_windows_as_the_shortest_text_has_left(tmp_path: Path) -> None:
    for name, count in (("a", 400), ("b", 56)):
        (tmp_path / name).write_text(numbered(count, name), encoding="utf-8")
    words = [f"{name}={tmp_path / name}" for name in "ab"]
    text = load_text(words, Bytes(), seq_len=16, calib_tokens=800, select_tokens=48, verify_tokens=160)
    assert text.spare is not None
    assert "".join(line[0] for line in lines(text.spare.windows)) == "a" * 3 + "b" * 3
    assert [text.parts("spare")[name] for name in "ab"] == [slice(0, 3), slice(3, 6)]
    (tmp_path / "b").write_text(numbered(50, "b"), encoding="utf-8")
    text = load_text(words, Bytes(), seq_len=16, calib_tokens=800, select_tokens=48, verify_tokens=160)
    assert text.spare is None
    assert text.spare_ratio == 0


def test_guard_windows_are_random_words_and_the_built_in_mix_beside_the_same_text(file: Path) -> None:
    plain, guarded = (load_text(file, Bytes(), **SIZES, guard=share) for share in (0.0, 0.25))
    assert splits(plain) == splits(guarded)
    assert len(plain.guard) == 0
    assert guarded.guard.shape == (10, 16)  # of 40 windows that are fitted on
    assert 0 not in guarded.guard  # a special token
    assert int(guarded.guard.max()) < 256
    mix = "".join(document.content for document in sources.read_splits(["mix"], None)[0]).encode()  # its first part
    assert [bytes(window) in mix for window in guarded.guard.tolist()] == [False] * 5 + [True] * 5
    assert plain.fitted_sha256 == plain.calibration_sha256 == guarded.calibration_sha256 != guarded.fitted_sha256
    assert torch.equal(guarded.guard, load_text(file, Bytes(), **SIZES, guard=0.25).guard)
    assert not torch.equal(guarded.guard, load_text(file, Bytes(), **SIZES, guard=0.25, seed=1).guard)


def test_healing_sees_the_mix_too(file: Path) -> None:
    plain, guarded = (load_text(file, Bytes(), **SIZES, heal_tokens=1600, guard=share) for share in (0.0, 0.25))
    assert plain.healing is not None
    assert guarded.healing is not None
    assert len(plain.healing.windows) == 100
    assert torch.equal(guarded.healing.windows[:100], plain.healing.windows)
    mix = "".join(document.content for document in sources.read_splits(["mix"], None)[0]).encode()
    assert [bytes(window) in mix for window in guarded.healing.windows[100:].tolist()].count(True) >= 11
    assert len(guarded.healing.windows) == 112
