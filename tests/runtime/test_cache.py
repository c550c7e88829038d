"""What was measured before: taken from disk when nothing it depends on has changed, else measured again."""

from __future__ import annotations

import json
import os
import resource
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Compress, Outcome
from safetensors.torch import load_file, save_file
from torch import Tensor

from compressor.evaluate import evaluator as assessing
from compressor.runtime.cache import Cache, open_cache
from compressor.runtime.cache_files import default_directory
from compressor.runtime.errors import InputError
from compressor.runtime.locks import owned_directory
from compressor.runtime.progress import Progress

KEY = {"text": "abc", "seq_len": 32, "prompts": [[1, 2], [3]]}


class Spoken(Progress):
    """Keeps what it says."""

    def __init__(self) -> None:
        super().__init__(verbose=True)
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


class Measurement:
    """Counts how often it is asked."""

    def __init__(self, value: float = 1.0) -> None:
        self.calls, self.value = 0, value

    def __call__(self) -> dict[str, Tensor]:
        self.calls += 1
        return {"nats": torch.full((2, 3), self.value), "ids": torch.arange(5)}


@pytest.fixture
def spoken() -> Spoken:
    return Spoken()


@pytest.fixture
def cache(tmp_path: Path, spoken: Spoken) -> Cache:
    return Cache(tmp_path / "deep" / "cache", spoken)


def entries(cache: Cache) -> list[Path]:
    """Everything in the directory, hidden files too."""
    assert cache.directory is not None
    return sorted(cache.directory.iterdir())


def same(found: dict[str, Tensor], value: float = 1.0) -> bool:
    expected = Measurement(value)()
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_second_time_costs_nothing(cache: Cache, spoken: Spoken, tmp_path: Path) -> None:
    measure = Measurement()
    assert same(cache.get("source text", KEY, measure))
    assert (measure.calls, spoken.lines) == (1, [])
    assert same(cache.get("source text", dict(reversed(KEY.items())), measure))
    assert (measure.calls, spoken.lines) == (1, ["source text: measured before"])
    assert same(Cache(tmp_path / "deep" / "cache", Spoken()).get("again", KEY, measure))  # another run
    assert measure.calls == 1
    assert [file.suffix for file in entries(cache)] == [".safetensors"]


@pytest.mark.parametrize(
    "changed", [{"text": "abd"}, {"seq_len": 64}, {"prompts": [[1], [2, 3]]}, {"seq_len": "32"}, {"more": None}]
)
def test_another_key_is_measured(cache: Cache, spoken: Spoken, changed: dict[str, Any]) -> None:
    cache.get("step", KEY, Measurement())
    other = Measurement(2.0)
    assert same(cache.get("step", {**KEY, **changed}, other), 2.0)
    assert (other.calls, spoken.lines) == (1, [])
    assert same(cache.get("step", KEY, other))  # and the first one is still there
    assert other.calls == 1
    assert len(entries(cache)) == 2


def cut_off(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-4])


def cut_off_in_the_header(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:20])


def huge_header(file: Path) -> None:
    file.write_bytes(b"\xff" * 8 + file.read_bytes()[8:])


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-3] ^= 4
    file.write_bytes(content)


DAMAGES: list[Callable[[Path], Any]] = [
    flip_a_bit,
    cut_off,
    cut_off_in_the_header,
    huge_header,
    lambda file: file.write_bytes(b""),
    lambda file: file.write_bytes(bytes(range(256))),
    lambda file: file.write_text("version https://git-lfs"),
    lambda file: file.write_bytes(file.read_bytes() + b"more"),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_measured_again(cache: Cache, spoken: Spoken, damage: Callable[[Path], Any]) -> None:
    cache.get("step", KEY, Measurement())
    (file,) = entries(cache)
    damage(file)
    measure = Measurement(3.0)
    assert same(cache.get("step", KEY, measure), 3.0)
    assert measure.calls == 1
    assert len(spoken.lines) == 1
    assert spoken.lines[0].startswith(f"warning: the cached {file.name} is damaged (")
    assert same(cache.get("step", KEY, measure), 3.0)  # it was put right
    assert (measure.calls, spoken.lines[1:]) == (1, ["step: measured before"])
    assert entries(cache) == [file]


def test_a_directory_in_the_place_of_an_entry(cache: Cache, spoken: Spoken) -> None:
    cache.get("step", KEY, Measurement())
    (file,) = entries(cache)
    file.unlink()
    file.mkdir()
    measure = Measurement()
    assert same(cache.get("step", KEY, measure))
    assert measure.calls == 1
    assert all(line.startswith("warning: the cache") for line in spoken.lines)
    assert entries(cache) == [file]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_entry_that_cannot_be_read(cache: Cache, spoken: Spoken) -> None:
    cache.get("step", KEY, Measurement())
    (file,) = entries(cache)
    file.chmod(0)
    measure = Measurement()
    assert same(cache.get("step", KEY, measure))
    assert measure.calls == 1
    assert len(spoken.lines) == 1
    assert same(cache.get("step", KEY, measure))  # it was replaced
    assert measure.calls == 1


def test_what_a_killed_writer_left_is_gone_with_the_next_run(cache: Cache) -> None:
    assert cache.directory is not None
    cache.get("step", KEY, Measurement())
    (file,) = entries(cache)
    stale = cache.directory / ".partial-abcdefgh"
    stale.mkdir()
    for name in ("lock", file.name):
        (stale / name).write_bytes(b"half")
    with owned_directory(cache.directory, ".partial-") as alive:
        Cache(cache.directory, Spoken())
        assert entries(cache) == sorted([file, alive])
    assert entries(cache) == [file]


def test_a_disk_that_is_too_small_costs_the_entries_and_one_line(cache: Cache, spoken: Spoken) -> None:
    """A real limit: no file may grow beyond this size."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    try:
        for number in range(3):
            assert same(cache.get("step", {"number": number}, Measurement()))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(spoken.lines) == 1
    assert spoken.lines[0].startswith(f"warning: the cache {cache.directory} was not written: ")
    assert "File too large" in spoken.lines[0]
    assert entries(cache) == []


def test_an_entry_of_another_key_is_not_taken(cache: Cache) -> None:
    """The file's name is a hash; the whole key stands in it."""
    cache.get("step", KEY, Measurement())
    (file,) = entries(cache)
    save_file({"nats": torch.zeros(1)}, file, {"key": json.dumps({"text": "other"})})
    measure = Measurement()
    assert same(cache.get("step", KEY, measure))
    assert measure.calls == 1
    save_file({"nats": torch.zeros(1)}, file)
    assert same(cache.get("step", KEY, measure))
    assert measure.calls == 2


@pytest.mark.parametrize("below", [".", "cache"])
def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"cannot be made: .*; name another with --cache, or --no-cache"):
        Cache(tmp_path / "file" / below, Spoken())


def test_a_directory_that_is_lost_later_costs_a_warning(cache: Cache, spoken: Spoken) -> None:
    assert cache.directory is not None
    cache.directory.rmdir()
    measure = Measurement()
    assert same(cache.get("step", KEY, measure))
    assert measure.calls == 1
    assert len(spoken.lines) == 1
    assert spoken.lines[0].startswith(f"warning: the cache {cache.directory} was not written: ")
    cache.directory.write_text("a file now", encoding="utf-8")
    assert same(cache.get("step", KEY, measure))
    assert measure.calls == 2


@pytest.mark.parametrize("name", ["save_file", "os.replace"])
def test_a_full_disk_leaves_nothing_behind(
    cache: Cache, spoken: Spoken, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"compressor.runtime.cache.{name}", full)
    assert same(cache.get("step", KEY, Measurement()))
    assert len(spoken.lines) == 1
    assert "No space left on device" in spoken.lines[0]
    assert entries(cache) == []


def test_an_interrupt_leaves_nothing_behind(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("compressor.runtime.cache.save_file", interrupt)
    with pytest.raises(KeyboardInterrupt):
        cache.get("step", KEY, Measurement())
    assert entries(cache) == []


def test_a_measurement_that_fails_keeps_nothing(cache: Cache) -> None:
    def fail() -> dict[str, Tensor]:
        raise InputError("its activations overflow")

    with pytest.raises(InputError, match="overflow"):
        cache.get("step", KEY, fail)
    assert entries(cache) == []


def test_two_writers_at_once(tmp_path: Path) -> None:
    """Both have measured before either writes, time and again: whoever is last wins, and no entry is ever half."""
    rounds, meet = 20, threading.Barrier(2, timeout=30)
    failures: list[BaseException] = []
    said = [Spoken(), Spoken()]

    def measure() -> dict[str, Tensor]:
        found = Measurement()()
        meet.wait()
        return found

    def run(mine: Spoken) -> None:
        try:
            cache = Cache(tmp_path / "cache", mine)
            for number in range(rounds):
                assert same(cache.get("step", {"round": number}, measure))
                meet.wait()
        except BaseException as error:
            failures.append(error)
            meet.abort()

    threads = [threading.Thread(target=run, args=(mine,)) for mine in said]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert [mine.lines for mine in said] == [[], []]
    later = Spoken()
    cache, measured = Cache(tmp_path / "cache", later), Measurement()
    assert all(same(cache.get("step", {"round": number}, measured)) for number in range(rounds))
    assert (measured.calls, len(entries(cache))) == (0, rounds)


def test_without_a_directory_nothing_is_kept(spoken: Spoken) -> None:
    cache, measure = Cache(None, spoken), Measurement()
    assert all(same(cache.get("step", KEY, measure)) for _ in range(2))
    assert (measure.calls, spoken.lines) == (2, [])


def test_where_it_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COMPRESSOR_CACHE", str(tmp_path / "named"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_directory() == tmp_path / "named"
    monkeypatch.delenv("COMPRESSOR_CACHE")
    assert default_directory() == tmp_path / "xdg" / "compressor"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    assert default_directory() == tmp_path / "home" / ".cache" / "compressor"


# Through the command

STEPS = ["source text", "source writes", "compressed text", "compressed writes", "compressed agrees"]


def measured_before(done: Outcome) -> list[str]:
    """The steps that were taken from disk."""
    ends = ": measured before"
    return [line.removesuffix(ends) for line in done.err.splitlines() if line.endswith(ends)]


def report_of(done: Outcome) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(done.out)
    return report


@pytest.fixture
def check(compress: Compress, compressed: Path, tmp_path: Path) -> Compress:
    """A check that keeps what it measures in a directory of this test."""

    def run(*arguments: str | Path, directory: Path = compressed) -> Outcome:
        done = compress(
            "check", directory, "--cache", tmp_path / "kept", "--generate", "6", "--json", "--verbose", *arguments
        )
        assert done.code == 0, done.err
        return done

    return run


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From now on no model may run."""

    def forbid() -> None:
        def refuse(*_: Any, **__: Any) -> None:
            raise AssertionError("the model was run")

        for name in ("evaluate", "score", "continue_greedily", "predict_along"):
            monkeypatch.setattr(assessing, name, refuse)

    return forbid


def test_checking_twice_runs_the_model_once(check: Compress, no_model: Callable[[], None], tmp_path: Path) -> None:
    first = check()
    assert measured_before(first) == []
    files = sorted((tmp_path / "kept").iterdir())
    assert len(files) == len(STEPS) + 1  # and the source's states
    assert {file.suffix for file in files} == {".safetensors"}
    no_model()
    second = check()
    assert measured_before(second) == STEPS
    assert report_of(second) == report_of(first)
    assert sorted((tmp_path / "kept").iterdir()) == files
    assert measured_before(check("--max-dppl", "50%", "--seed", "0", "--confidence", "0.5")) == STEPS


def test_no_cache_measures(
    check: Compress, compress: Compress, compressed: Path, no_model: Callable[[], None], tmp_path: Path
) -> None:
    first = check()
    files = {file: file.read_bytes() for file in (tmp_path / "kept").iterdir()}
    again = check("--no-cache")
    assert measured_before(again) == []
    assert report_of(again) == report_of(first)
    assert {file: file.read_bytes() for file in (tmp_path / "kept").iterdir()} == files
    no_model()
    done = compress("check", compressed, "--cache", tmp_path / "kept", "--generate", "6", "--no-cache")
    assert done.code == 2
    assert "the model was run" in done.errors[0]


def test_changed_weights_are_measured_again(check: Compress, compressed: Path, tmp_path: Path) -> None:
    first = report_of(check())
    copy = Path(shutil.copytree(compressed, tmp_path / "copy"))
    assert measured_before(check(directory=copy)) == STEPS  # the same weights elsewhere
    file = copy / "model.safetensors"
    weights = load_file(file)
    name = next(name for name in weights if name.endswith("ln_f.weight"))
    weights[name][0] *= 1.5
    save_file(weights, file, metadata={"format": "pt"})
    done = check("--max-dppl", "1000%", directory=copy)
    assert measured_before(done) == ["source text", "source writes"]
    found = report_of(done)
    assert found["perplexity"]["baseline"] == first["perplexity"]["baseline"]
    assert found["perplexity"]["compressed"] != first["perplexity"]["compressed"]


def test_a_changed_config_is_measured_again(check: Compress, compressed: Path, tmp_path: Path) -> None:
    """The same weights compute something else under another configuration."""
    check()
    copy = Path(shutil.copytree(compressed, tmp_path / "copy"))
    config = json.loads((copy / "config.json").read_text(encoding="utf-8"))
    config["layer_norm_epsilon"] = 0.01
    (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
    done = check("--max-dppl", "1000%", directory=copy)
    assert measured_before(done) == ["source text", "source writes"]


def test_other_options_are_measured_again(check: Compress) -> None:
    check()
    for arguments, kept in [
        (["--verify-tokens", "1984"], STEPS),  # 62 windows of 32 either way
        (["--generate", "0"], ["source text", "compressed text"]),
        (["--generate", "5"], ["source text", "compressed text"]),
        (["--verify-tokens", "1000"], []),
        (["--batch-size", "3"], []),  # the same sums in another order
        (["--dtype", "bfloat16"], []),
    ]:
        assert measured_before(check("--max-dppl", "50%", *arguments)) == kept, arguments


def test_damage_is_told_by_the_command(check: Compress, tmp_path: Path) -> None:
    first = check()
    for file in (tmp_path / "kept").iterdir():
        cut_off(file)
    again = check()
    assert sum("is damaged" in line for line in again.err.splitlines()) == len(STEPS) + 1  # and the source's states
    assert measured_before(again) == []
    assert report_of(again) == report_of(first)


def test_a_cache_that_cannot_be_made_is_bad_input(compress: Compress, compressed: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = compress("check", compressed, "--cache", tmp_path / "file")
    assert done.code == 2
    assert len(done.errors) == 1
    assert "cannot be made" in done.errors[0]


def test_a_home_that_cannot_be_written_costs_a_warning(
    spoken: Spoken, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.touch()
    for name in ("COMPRESSOR_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    cache = open_cache(None, spoken)
    assert [line.startswith("warning: the cache") for line in spoken.lines] == [True]
    assert same(cache.get("step", KEY, Measurement()))
    assert same(cache.get("step", KEY, Measurement(2.0)))  # kept while the run lasts
    assert home.read_bytes() == b""


def test_a_default_cache_that_is_read_only_costs_a_warning(
    spoken: Spoken, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COMPRESSOR_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda *_: False)
    cache = open_cache(None, spoken)
    assert cache.directory != tmp_path / "compressor"
    assert len(spoken.lines) == 1


def test_a_named_cache_that_cannot_be_made_is_an_error(
    spoken: Spoken, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(InputError, match="cannot be made"):
        open_cache(blocked / "cache", spoken)
    monkeypatch.setenv("COMPRESSOR_CACHE", str(blocked / "cache"))
    with pytest.raises(InputError, match="cannot be made"):
        open_cache(None, spoken)
