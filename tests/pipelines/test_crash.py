"""Nothing is lost: killed, interrupted, out of disk, or two at once, on real processes and a tiny model.

A run that was stopped is finished by the same command in this process, which saves the time of another start.
"""

from __future__ import annotations

import hashlib
import json
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from conftest import Compress, Outcome
from preloaded import Process, Server
from safetensors import safe_open
from safetensors.torch import load_file

from compressor.evaluate import evaluator as assessing
from compressor.models.load import load_model
from compressor.plan import fit as fitting
from compressor.plan import trials

# By size, for the clock decides what is quick, and two runs are to come to the same plan.
BUDGET = ["--max-dppl", "0.2%", "--objective", "size", "--generate", "6"]

Launch = Callable[..., Process]


def sha256(directory: Path) -> dict[str, str]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def weights(directory: Path) -> bytes:
    return (directory / "model.safetensors").read_bytes()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def entries(cache: Path) -> int:
    return len(list(cache.glob("*.safetensors")))


def errors(err: str) -> list[str]:
    return [line for line in err.splitlines() if line.startswith("error:")]


@pytest.fixture(scope="module")
def command(models: Path, options: list[str]) -> list[str]:
    return [str(models / "gpt2"), *options, *BUDGET]


@pytest.fixture(scope="module")
def whole(compress: Compress, command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an uninterrupted run wrote; `cache` beside it is what it kept."""
    root = tmp_path_factory.mktemp("whole")
    done = compress(*command, "--cache", root / "cache", "--out", root / "out")
    assert done.code == 0, done.err
    return root / "out"


@pytest.fixture
def launch(server: Server, command: list[str]) -> Iterator[Launch]:
    """The command in a process of its own."""
    running: list[Process] = []

    def start(*arguments: str | Path) -> Process:
        running.append(server.start(*command, *arguments))
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.communicate()


def wait_for(happened: Callable[[], Any], process: Process) -> None:
    until = time.monotonic() + 120
    while not happened():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.001)


def partials(folder: Path, holding: str) -> list[Path]:
    return list(folder.glob(f".out.partial-*/{holding}"))


# What is seen from outside when the process is killed. An uninterrupted run keeps about 60 entries.
MOMENTS: dict[str, Callable[[Path], Any]] = {
    "the first measurement": lambda root: entries(root / "cache") >= 1,
    "the search": lambda root: entries(root / "cache") >= 20,
    "the weights are being written": lambda root: partials(root, "config.json"),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_and_started_again(
    compress: Compress,
    launch: Launch,
    command: list[str],
    models: Path,
    whole: Path,
    tmp_path: Path,
    moment: str,
) -> None:
    source = sha256(models / "gpt2")
    out, cache = tmp_path / "out", tmp_path / "cache"
    process = launch("--cache", cache, "--out", out)
    wait_for(lambda: MOMENTS[moment](tmp_path), process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not out.exists()
    assert sha256(models / "gpt2") == source
    kept = {file: file.stat().st_ino for file in cache.glob("*.safetensors") if not is_temporary(file)}
    done = compress(*command, "--cache", cache, "--out", out)
    assert done.code == 0, done.err
    assert "warning" not in done.err
    assert names(tmp_path) == ["cache", "out"]
    assert not list(cache.glob(".*"))
    assert {file: file.stat().st_ino for file in kept} == kept  # nothing was measured again
    assert weights(out) == weights(whole)
    assert same_record(out, whole)
    load_model(str(out), allow_compressed=True)


def is_temporary(file: Path) -> bool:
    """Whether an entry of the cache is only there until the blocks are surveyed."""
    with safe_open(file, framework="pt") as entry:
        return json.loads(entry.metadata()["key"])["kind"] == "gradients"


def same_record(first: Path, second: Path) -> bool:
    """Apart from what the clock says."""
    records = [json.loads((folder / "compression.json").read_text(encoding="utf-8")) for folder in (first, second)]
    for record in records:
        for name in ("timings", "speed"):
            del record[name]
    return bool(records[0] == records[1])


def test_killed_while_it_replaces_a_result(
    compress: Compress, launch: Launch, command: list[str], whole: Path, tmp_path: Path
) -> None:
    """Everything is measured, so the kill comes while files are written."""
    out, cache = tmp_path / "out", Path(shutil.copytree(whole.parent / "cache", tmp_path / "cache"))
    shutil.copytree(whole, out)
    (out / "README.md").write_text("the earlier one", encoding="utf-8")
    before = sha256(out)
    process = launch("--cache", cache, "--out", out, "--overwrite")
    wait_for(lambda: partials(tmp_path, "README.md"), process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert sha256(out) == before
    assert len(names(tmp_path)) == 4  # with the lock and the half of the new one
    refused = compress(*command, "--cache", cache, "--out", out)
    assert refused.code == 2
    assert "add --overwrite" in refused.errors[0]
    done = compress(*command, "--cache", cache, "--out", out, "--overwrite")
    assert done.code == 0, done.err
    assert names(tmp_path) == ["cache", "out"]
    assert "the earlier one" not in (out / "README.md").read_text(encoding="utf-8")
    assert weights(out) == weights(whole)


def test_a_finished_run_is_not_measured_again(
    compress: Compress, command: list[str], whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No loss, no task, no text, no fit that took a pass, no clock that decides."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the model was run")

    for module, part in [
        *((assessing, name) for name in ("evaluate", "score", "continue_greedily", "predict_along")),
        *((trials, name) for name in ("evaluate", "is_slower")),
        (fitting, "collect_moments"),
    ]:
        monkeypatch.setattr(module, part, refuse)
    out = tmp_path / "out"
    done = compress(*command, "--cache", whole.parent / "cache", "--out", out)
    assert done.code == 0, done.err
    assert weights(out) == weights(whole)


def test_a_plan_is_applied_where_it_stopped(
    compress: Compress, command: list[str], whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record of a result is a plan. It fails at the last moment, and nothing is fitted or measured twice."""
    arguments = ["apply", command[0], whole / "compression.json", "--generate", "6", "--cache", tmp_path / "cache"]

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("compressor.pipelines.outputs.card", fail)
        first = compress(*arguments, "--out", tmp_path / "out")
    assert first.code == 2
    assert first.errors == [
        f"error: --out {tmp_path / 'out'} cannot be written: No space left on device; nothing was kept"
    ]
    assert names(tmp_path) == ["cache"]
    with monkeypatch.context() as patch:
        patch.setattr(fitting, "collect_moments", fail)
        patch.setattr(assessing, "evaluate", fail)
        second = compress(*arguments, "--out", tmp_path / "out")
    assert second.code == 0, second.err
    assert weights(tmp_path / "out") == weights(whole)


def test_interrupted_and_started_again(
    compress: Compress, launch: Launch, command: list[str], whole: Path, tmp_path: Path
) -> None:
    out, cache = tmp_path / "out", tmp_path / "cache"
    process = launch("--cache", cache, "--out", out)
    wait_for(lambda: entries(cache) >= 5, process)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    said, err = process.communicate(timeout=20)
    assert time.monotonic() - began < 2.5
    assert (process.returncode, said) == (143, "")
    line = "error: interrupted; nothing was written; the same command goes on where it stopped"
    assert err.splitlines()[-1] == line
    assert errors(err) == [line]
    assert names(tmp_path) == ["cache"]
    assert not list(cache.glob(".*"))
    done = compress(*command, "--cache", cache, "--out", out)
    assert done.code == 0, done.err
    assert weights(out) == weights(whole)


def test_files_that_may_not_grow(
    compress: Compress, command: list[str], whole: Path, models: Path, tmp_path: Path
) -> None:
    """A limit on the size of a file is a full disk that any user can have."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((models / "gpt2" / "model.safetensors").stat().st_size // 2, limits[1]))
    try:
        done = compress(*command, "--cache", whole.parent / "cache", "--out", tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert done.code == 2
    assert done.errors == [f"error: --out {tmp_path / 'out'} cannot be written: File too large; nothing was kept"]
    assert names(tmp_path) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", place], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("only root may mount a disk")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_a_disk_that_fills_up(launch: Launch, whole: Path, small_disk: Path, tmp_path: Path) -> None:
    """There is room when it starts; then another process takes it."""
    process = launch("--cache", whole.parent / "cache", "--out", small_disk / "out", "--verbose")
    line = next(line for line in process.stderr if line.startswith("the result: about 10 MB on disk"))
    assert "can be had" in line
    with (small_disk / "filler").open("wb", buffering=0) as filler, suppress(OSError):
        while True:
            filler.write(bytes(4096))
    said, err = process.communicate(timeout=60)
    assert (process.returncode, said) == (2, "")
    assert errors(err) == [
        f"error: --out {small_disk / 'out'} cannot be written: No space left on device; nothing was kept"
    ]
    assert names(small_disk) == ["filler"]


def test_two_runs_at_once(launch: Launch, compress: Compress, command: list[str], whole: Path, tmp_path: Path) -> None:
    """One cache, two outputs: both come to the same end. A third, on an output that is taken, is told so at once."""
    cache = tmp_path / "cache"
    runs = {out: launch("--cache", cache, "--out", tmp_path / out) for out in ("one", "two")}
    wait_for(lambda: (tmp_path / ".one.lock").exists(), runs["one"])
    third = compress(*command, "--cache", cache, "--out", tmp_path / "one")
    assert third.code == 2
    assert third.errors == [
        f"error: {tmp_path / 'one'} is being written by process {runs['one'].pid}; wait for it to end, "
        "or name another --out"
    ]
    for out, process in runs.items():
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert "warning" not in err
        assert weights(tmp_path / out) == weights(whole)
    assert names(tmp_path) == ["cache", "one", "two"]
    assert not list(cache.glob(".*"))
    for file in cache.iterdir():
        load_file(file)


def test_a_damaged_cache_is_told_and_made_again(
    compress: Compress, command: list[str], whole: Path, tmp_path: Path
) -> None:
    """Every kind of damage, spread over all that a run keeps."""
    cache = Path(shutil.copytree(whole.parent / "cache", tmp_path / "cache"))
    files = sorted(cache.glob("*.safetensors"))
    for number, file in enumerate(files):
        content = bytearray(file.read_bytes())
        if number % 4 == 0:
            content[-1] ^= 1
        elif number % 4 == 1:
            del content[len(content) // 2 :]
        elif number % 4 == 2:
            content.clear()
        else:
            content = bytearray(files[(number + 1) % len(files)].read_bytes())
        file.write_bytes(content)
    done = compress(*command, "--cache", cache, "--out", tmp_path / "out")
    assert done.code == 0, done.err
    damaged = [line for line in done.err.splitlines() if "is damaged" in line]
    assert all(line.startswith("warning: the cached ") for line in damaged)
    assert len(files) / 2 < len(damaged) == len(set(damaged)) <= len(files)  # some are written anew without a look
    assert weights(tmp_path / "out") == weights(whole)
    assert sorted(cache.iterdir()) == files
    again = compress(*command, "--cache", cache, "--out", tmp_path / "again")
    assert again.code == 0
    assert "damaged" not in again.err


def test_the_output_is_refused_before_the_model_is_read(compress: Compress, command: list[str], tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for arguments in (command, ["profile", *command[: -len(BUDGET)]]):
        done: Outcome = compress(*arguments, "--out", tmp_path / "link")
        assert done.code == 2
        assert done.errors == [
            f"error: --out {tmp_path / 'link'} is a symbolic link to {tmp_path / 'nowhere'}; name the directory itself"
        ]
        assert "load" not in done.err
    assert names(tmp_path) == ["link"]
