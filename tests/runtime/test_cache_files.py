"""The size of the cache: what was not used for longest goes first, and nothing that a run needs."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Compress, Refused, tree
from safetensors.torch import save_file
from torch import Tensor

from compressor.runtime import cache_files
from compressor.runtime.cache import Cache, cache_key
from compressor.runtime.cache_files import RECENT_SECONDS, choose_limit, in_use, list_entries, parse_size, prune
from compressor.runtime.errors import InputError
from compressor.runtime.locks import owned_directory
from compressor.runtime.progress import Progress
from compressor.runtime.resources import format_bytes

HOUR = 3600.0


class Spoken(Progress):
    """Keeps what it says."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


def measure() -> dict[str, Tensor]:
    return {"nats": torch.full((2, 3), 1.0), "ids": torch.arange(5)}


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache", Spoken())


def place(cache: Cache) -> Path:
    assert cache.directory is not None
    return cache.directory


def fill(cache: Cache, ages: list[float]) -> list[Path]:
    """Entries of one size that were last used so many hours ago."""
    files = []
    for number, age in enumerate(ages):
        key = {"number": number}
        cache.get("", key, measure)
        file = cache.place(key)[0]
        used = time.time() - age * HOUR
        os.utime(file, (used, used))
        files.append(file)
    assert len({file.stat().st_size for file in files}) == 1
    return files


def test_the_least_recently_used_goes_first(cache: Cache) -> None:
    files = fill(cache, [30, 50, 40, 60])
    size = files[0].stat().st_size
    assert [entry.file for entry in list_entries(place(cache))] == [files[3], files[1], files[2], files[0]]
    done = prune(place(cache), 2 * size)
    assert (done.removed, done.freed, done.left) == (2, 2 * size, 2 * size)
    assert {entry.file for entry in list_entries(place(cache))} == {files[0], files[2]}
    assert prune(place(cache), 2 * size).removed == 0
    assert prune(place(cache), 0).left == 0
    assert list(place(cache).iterdir()) == []


@pytest.mark.parametrize("use", ["read", "has", "written again"])
def test_a_use_makes_an_entry_the_newest(cache: Cache, use: str) -> None:
    files = fill(cache, [50, 40])
    if use == "read":
        assert cache.find({"number": 0}) is not None
    elif use == "has":
        assert cache.has({"number": 0})
    else:
        cache.keep({"number": 0}, measure())
    prune(place(cache), files[0].stat().st_size)
    assert list(place(cache).iterdir()) == [files[0]]


def test_other_files_are_left_alone(cache: Cache) -> None:
    fill(cache, [50])
    others = [place(cache) / name for name in ("notes.txt", "model.safetensors", f"{'a' * 40}.safetensors.bak")]
    for file in others:
        file.write_bytes(b"mine")
    folder = place(cache) / f"{'b' * 40}.safetensors"
    folder.mkdir()
    assert prune(place(cache), 0).removed == 1
    assert sorted(place(cache).iterdir()) == sorted([*others, folder])


def test_what_a_living_run_has_used_stays(cache: Cache) -> None:
    """Also when it was asked to remove everything; the mark of a run that was killed protects nothing."""
    files = fill(cache, [50, 40, 30])
    killed = place(cache) / ".running-abcdefgh"
    killed.mkdir()
    (killed / "lock").touch()
    os.utime(killed / "lock", (0, 0))
    with owned_directory(place(cache), cache_files.RUNNING):
        assert cache.find({"number": 1}) is not None
        done = prune(place(cache), 0)
        assert (done.removed, done.left) == (2, done.protected)
        assert [entry.file for entry in list_entries(place(cache))] == [files[1]]
    assert list(place(cache).iterdir()) == [files[1]]
    assert prune(place(cache), 0).removed == 1


def test_an_entry_that_is_used_after_it_was_listed_stays(cache: Cache) -> None:
    (file,) = fill(cache, [50])
    (listed,) = list_entries(place(cache))
    assert cache.has({"number": 0})
    assert not cache_files.remove_unused(listed)
    assert file.is_file()


def test_two_prunings_while_two_runs_write(tmp_path: Path) -> None:
    """Everybody removes and writes at once: no error, and what a run has just written it can read."""
    spoken, failures = Spoken(), list[BaseException]()
    directory = Cache(tmp_path, spoken).directory
    assert directory is not None
    stop = threading.Event()

    def write(run: int) -> None:
        try:
            with in_use(directory, spoken.say):
                cache = Cache(directory, spoken)
                for number in range(40):
                    key = {"run": run, "number": number}
                    cache.keep(key, measure(), needed=True)
                    assert cache.find(key) is not None
        except BaseException as error:
            failures.append(error)

    def remove() -> None:
        try:
            while not stop.is_set():
                prune(directory, 0)
        except BaseException as error:
            failures.append(error)

    prunings = [threading.Thread(target=remove) for _ in range(2)]
    runs = [threading.Thread(target=write, args=(number,)) for number in range(2)]
    for thread in (*prunings, *runs):
        thread.start()
    for thread in runs:
        thread.join()
    stop.set()
    for thread in prunings:
        thread.join()
    assert (failures, spoken.lines) == ([], [])


def test_a_run_prunes_at_its_end(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    files = fill(cache, [60, 50, 40, 1])
    size, spoken = files[0].stat().st_size, Spoken()
    monkeypatch.setenv("COMPRESSOR_CACHE_LIMIT", str(size))
    with in_use(place(cache), spoken.say):
        assert cache.find({"number": 0}) is not None
        assert len(list_entries(place(cache))) == 4
    # The newest was used by an interrupted run an hour ago, the first by this run.
    assert {entry.file for entry in list_entries(place(cache))} == {files[0], files[3]}
    removed, limit = format_bytes(2 * size), format_bytes(size)
    assert spoken.lines == [
        f"cache: the 2 least recently used entries removed ({removed}), because its limit is {limit}"
    ]
    assert RECENT_SECONDS > HOUR


def test_an_interrupt_removes_nothing(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(cache, [60, 50])
    monkeypatch.setenv("COMPRESSOR_CACHE_LIMIT", "0")
    with pytest.raises(KeyboardInterrupt), in_use(place(cache), Spoken().say):
        raise KeyboardInterrupt
    assert len(list(place(cache).iterdir())) == 2
    with pytest.raises(InputError, match="the budget"), in_use(place(cache), Spoken().say):
        raise InputError("the budget")
    assert list(place(cache).iterdir()) == []


def test_no_limit_removes_nothing(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(cache, [60, 50])
    monkeypatch.setenv("COMPRESSOR_CACHE_LIMIT", "none")
    with in_use(place(cache), Spoken().say):
        pass
    assert len(list(place(cache).iterdir())) == 2


def test_a_cache_that_cannot_be_written_is_read_all_the_same(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """No mark, no time of use, no pruning, and no error. Root may write everywhere, so the calls are refused."""
    (file,) = fill(cache, [60])
    before = file.stat().st_mtime

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(30, "Read-only file system")

    for name in ("utime", "unlink", "mkdir"):
        monkeypatch.setattr(os, name, refuse)
    monkeypatch.setenv("COMPRESSOR_CACHE_LIMIT", "0")
    spoken = Spoken()
    with in_use(place(cache), spoken.say):
        assert cache.find({"number": 0}) is not None
        assert cache.has({"number": 0})
    assert (file.stat().st_mtime, spoken.lines) == (before, [])
    assert prune(place(cache), 0).removed == 0


@pytest.mark.parametrize(
    ("words", "size"),
    [
        *[("5GB", 5e9), ("1.5 tb", 1.5e12), ("500MB", 5e8), ("0", 0), ("2k", 2000), ("7", 7), ("none", math.inf)],
        *[("500MiB", 500 * 2**20), ("1.5 gib", 1.5 * 2**30)],
    ],
)
def test_sizes_in_words(words: str, size: float) -> None:
    assert parse_size(words, "--limit") == size


@pytest.mark.parametrize("words", ["-5GB", "5 gigs", "", "GB", "1e9", "nan", "5GBB", "5Gi", "½"])
def test_sizes_that_are_none(words: str) -> None:
    with pytest.raises(InputError, match=r"--limit .* is not a size; .*such as 5GB"):
        parse_size(words, "--limit")


def test_the_usual_limit_is_at_most_a_tenth_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COMPRESSOR_CACHE_LIMIT", raising=False)

    class Usage:
        total = 50 * 10**9

    monkeypatch.setattr("shutil.disk_usage", lambda place: Usage)
    assert choose_limit(tmp_path / "not" / "there") == 5 * 10**9
    Usage.total = 2**50
    assert choose_limit(tmp_path) == 20 * 10**9
    monkeypatch.setenv("COMPRESSOR_CACHE_LIMIT", "1GB")
    assert choose_limit(tmp_path) == 10**9
    assert choose_limit(tmp_path, "2GB") == 2 * 10**9


# Through the command


def entry(directory: Path, name: str, notes: dict[str, str] | None) -> Path:
    file = directory / f"{name * 40}.safetensors"
    save_file({"nats": torch.zeros(4)}, file, notes)
    return file


def test_what_is_in_it(compress: Compress, tmp_path: Path) -> None:
    """Also old entries, which say no name, and damaged ones, which say nothing."""
    cache = Cache(tmp_path, Spoken())
    cache.model_names["w" * 64] = "gpt2"
    cache.keep(cache_key("moments", {"weights": "w" * 64}, "t"), measure())
    cache.keep(cache_key("moments", {"weights": "v" * 64}, "t"), measure())
    entry(tmp_path, "a", {"key": json.dumps(cache_key("losses", {"weights": "w" * 64}, "t"))})
    entry(tmp_path, "b", None)
    (tmp_path / f"{'c' * 40}.safetensors").write_bytes(b"\xff" * 20)
    done = compress("cache", "--cache", tmp_path, "--json")
    assert done.code == 0, done.err
    record = json.loads(done.out)
    assert record["entries"] == 5
    assert record["bytes"] == sum(file.stat().st_size for file in tmp_path.iterdir())
    assert {group["name"]: group["entries"] for group in record["kinds"]} == {"moments": 2, "losses": 1, "not known": 2}
    models = {group["name"]: group["entries"] for group in record["models"]}
    assert models == {"gpt2": 2, f"weights {'v' * 12}": 1, "not known": 2}
    assert record.keys() >= {"directory", "limit", "oldest_use", "newest_use", "running", "used_by_runs"}
    assert "pruned" not in record
    shown = compress("cache", "--show", "--cache", tmp_path, "--limit", "0")
    assert shown.code == 0
    assert "5 entries" in shown.out
    assert "gpt2" in shown.out
    assert "over the limit by" in shown.out


def test_pruning_by_command(compress: Compress, tmp_path: Path) -> None:
    cache = Cache(tmp_path, Spoken())
    files = fill(cache, [50, 3, 0])
    size = files[0].stat().st_size
    done = compress("cache", "--prune", "--limit", f"{2 * size}", "--cache", tmp_path, "--json")
    assert done.code == 0, done.err
    record = json.loads(done.out)
    assert record["pruned"] == {"entries": 1, "bytes": size}
    assert sorted(tmp_path.iterdir()) == sorted(files[1:])
    assert "removed: 2 entries" in compress("cache", "--prune", "--limit", "0", "--cache", tmp_path).out
    assert list(tmp_path.iterdir()) == []
    assert "removed: nothing" in compress("cache", "--prune", "--limit", "0", "--cache", tmp_path).out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--limit", "5 parsecs"], "--limit '5 parsecs' is not a size"),
        (["--limit", "-1"], "--limit '-1' is not a size"),
        (["--cache", "nowhere"], "the cache nowhere does not exist"),
        (["--show", "--prune"], "--show and --prune are both given"),
        (["--prune", "--limit"], "requires an argument"),
        (["everything"], "unexpected extra argument"),
    ],
)
def test_bad_input_of_the_cache(refused: Refused, options: list[str], said: str) -> None:
    assert said in refused("cache", *options)


def test_a_file_is_no_cache(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "is no directory" in refused("cache", "--cache", tmp_path / "file")


def test_a_default_that_is_not_there_is_empty(
    compress: Compress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMPRESSOR_CACHE", str(tmp_path / "none"))
    before = tree(tmp_path)
    for options in ([], ["--prune"]):
        done = compress("cache", *options)
        assert (done.code, tree(tmp_path)) == (0, before), done.err
        assert "0 entries" in done.out


def test_a_wrong_limit_ends_a_run_before_it_begins(
    refused: Refused, models: Path, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMPRESSOR_CACHE_LIMIT", "much")
    said = refused(models / "gpt2", *options, "--max-dppl", "1%", "--out", "out")
    assert said.startswith("error: COMPRESSOR_CACHE_LIMIT 'much' is not a size")


def test_a_run_keeps_what_it_used_and_names_the_model(
    compress: Compress, compressed: Path, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache(tmp_path / "kept", Spoken())
    old = fill(cache, [100])[0]
    monkeypatch.setenv("COMPRESSOR_CACHE_LIMIT", "0")
    done = compress("check", compressed, "--cache", tmp_path / "kept", "--generate", "6")
    assert done.code == 0, done.err
    assert "cache: the 1 least recently used entry removed" in done.err
    assert not old.exists()
    record = json.loads(compress("cache", "--cache", tmp_path / "kept", "--json").out)
    assert record["entries"] == 6
    assert {group["name"] for group in record["models"]} == {str(compressed), str(models / "gpt2")}
    assert not list((tmp_path / "kept").glob(".*"))
    again = compress("check", compressed, "--cache", tmp_path / "kept", "--generate", "6", "--verbose")
    assert again.err.count("measured before") == 5


def test_torch_is_not_imported(tmp_path: Path) -> None:
    program = (
        "import sys; sys.argv = ['compress', 'cache', '--cache', sys.argv[1]]\n"
        "from compressor.cli.app import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    print(end.code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "0 False", done.stderr
