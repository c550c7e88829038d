"""Output directories: whole or absent whatever happens, one writer at a time, nothing left behind."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from preloaded import Server

from compressor.runtime import locks
from compressor.runtime import outputs as directories
from compressor.runtime.errors import InputError
from compressor.runtime.locks import locked, owned_directory, remove_abandoned
from compressor.runtime.outputs import clear_leftovers, reserved, whole_directory

RECORD = "record.json"
FILES = 20

# Replaces one directory by the next version, on and on, and says when it begins.
REPLACE = f"""
import sys
from pathlib import Path
from compressor.runtime import outputs as directories
target, exchanges = Path(sys.argv[1]), sys.argv[2] == "exchange"
if not exchanges:
    directories.exchange = lambda *_: False
with directories.reserved(target, True, None, {RECORD!r}, print):
    for version in range(1, 100_000):
        with directories.whole_directory(target) as partial:
            for number in range({FILES}):
                (partial / f"part{{number}}").write_text(str(version))
            (partial / {RECORD!r}).write_text(str(version))
        if version == 1:
            print("begun", flush=True)
"""

# Counts up a file that only who has the lock may touch.
COUNT = """
import sys
from pathlib import Path
from compressor.runtime.errors import InputError
from compressor.runtime.locks import locked
target, counter = Path(sys.argv[1]), Path(sys.argv[2])
done = 0
while done < 200:
    try:
        with locked(target, print):
            counter.write_text(str(int(counter.read_text()) + 1))
            done += 1
    except InputError:
        pass
"""


def versions(directory: Path) -> set[str]:
    files = sorted(path.name for path in directory.iterdir())
    assert files == sorted([*(f"part{number}" for number in range(FILES)), RECORD])
    return {path.read_text() for path in directory.iterdir()}


@pytest.mark.parametrize("how", ["exchange", "two renames"])
def test_a_kill_at_any_moment_leaves_one_whole_version(server: Server, tmp_path: Path, how: str) -> None:
    rng = random.Random(0)
    target = tmp_path / "out"
    for _ in range(6):
        process = server.start(target, how, code=REPLACE)
        assert process.stdout.readline() == "begun\n"
        time.sleep(rng.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if how == "exchange":
            assert len(versions(target)) == 1  # there is no moment without it
        with reserved(target, True, None, RECORD, print):
            assert len(versions(target)) == 1
            assert {path.name for path in tmp_path.iterdir()} == {"out", ".out.lock"}
        assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_earlier_result_that_was_being_replaced_is_put_back(tmp_path: Path) -> None:
    """The one moment of two renames in which there is no target."""
    old, half = tmp_path / ".out.old-abcdefg1", tmp_path / ".out.partial-abcdefg1"
    for folder in (old, half):
        folder.mkdir()
        (folder / RECORD).write_text(folder.name)
    others = [".out.partial-abc", ".out.partial-foo.partial-abcdefg1", ".other.partial-abcdefg1", "out.old-abcdefg1"]
    for name in others:
        (tmp_path / name).mkdir()
    with (
        pytest.raises(InputError, match="exists and is not empty"),
        reserved(tmp_path / "out", False, None, RECORD, print),
    ):
        pass
    assert (tmp_path / "out" / RECORD).read_text() == old.name
    assert {path.name for path in tmp_path.iterdir()} == {"out", *others}


def test_leftovers_do_not_replace_a_target_that_is_there(tmp_path: Path) -> None:
    for name in ("out", ".out.old-abcdefg1", ".out.partial-abcdefg1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / RECORD).write_text(name)
    clear_leftovers(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / RECORD).read_text() == "out"


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_second_rename_that_fails_undoes_the_first(
    tmp_path: Path, exchanges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / RECORD).touch()
    if not exchanges:
        monkeypatch.setattr(directories, "exchange", lambda *_: False)
    with whole_directory(target) as partial:
        (partial / "new").touch()
    assert [path.name for path in target.iterdir()] == ["new"]
    with pytest.raises(FileNotFoundError), whole_directory(target) as partial:
        partial.rmdir()
    assert [path.name for path in target.iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("kind", ["dangling", "to a directory", "to a result"])
def test_a_symbolic_link_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    if kind != "dangling":
        (tmp_path / "there").mkdir()
    if kind == "to a result":
        (tmp_path / "there" / RECORD).touch()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    with (
        pytest.raises(InputError, match=r"--out .*link/? is a symbolic link to .*there; name the directory itself"),
        reserved(f"{tmp_path}/link/", True, None, RECORD, print),
    ):
        pass
    assert (tmp_path / "link").is_symlink()


def test_a_linked_parent_is_fine(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with (
        reserved(tmp_path / "link" / "out", False, None, RECORD, print) as target,
        whole_directory(target) as partial,
    ):
        (partial / RECORD).touch()
    assert [path.name for path in (tmp_path / "real").iterdir()] == ["out"]


def test_missing_parents_vanish_when_nothing_came(tmp_path: Path) -> None:
    deep = tmp_path / "a" / "b" / "out"
    with pytest.raises(ZeroDivisionError), reserved(deep, False, None, RECORD, print):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    with reserved(deep, False, None, RECORD, print) as target, whole_directory(target):
        pass
    assert [path.name for path in deep.parent.iterdir()] == ["out"]


def test_the_second_run_is_told_who_has_the_lock(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with locked(target, print):
        with pytest.raises(InputError, match=rf"out is being written by process {os.getpid()}; wait"):  # noqa: SIM117
            with locked(target, print):
                pass
        assert (tmp_path / ".out.lock").exists()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / ".out.lock").write_text("4711")  # of a run that was killed
    with locked(target, print):
        assert (tmp_path / ".out.lock").read_text() == f"{os.getpid()}\n"
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / ".out.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(InputError, match="cannot be written"), reserved(tmp_path / "out", True, None, RECORD, print):
        pass
    assert (tmp_path / "precious").read_text() == "mine"


def test_only_one_has_the_lock(server: Server, tmp_path: Path) -> None:
    """Four processes take it in turns, and each takes the file away when it is done."""
    counter = tmp_path / "counter"
    counter.write_text("0")
    processes = [server.start(tmp_path / "out", counter, code=COUNT) for _ in range(4)]
    assert [process.wait(timeout=60) for process in processes] == [0] * 4
    assert counter.read_text() == "800"
    assert [path.name for path in tmp_path.iterdir()] == ["counter"]


def test_a_file_system_without_locks_costs_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> bool:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(locks, "lock_descriptor", refuse)
    said: list[str] = []
    with locked(tmp_path / "out", said.append):
        pass
    assert len(said) == 1
    assert said[0].startswith(f"warning: {tmp_path} has no locks (Operation not supported)")
    with owned_directory(tmp_path, ".partial-") as folder:
        remove_abandoned(tmp_path, ".partial-")
        assert folder.is_dir()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def abandoned(server: Server, tmp_path: Path) -> Iterator[Callable[[], Path]]:
    """A held directory whose owner was killed."""
    code = (
        "import sys, time; from pathlib import Path; from compressor.runtime.locks import owned_directory\n"
        "with owned_directory(Path(sys.argv[1]), '.partial-') as folder:\n"
        "    (folder / 'half').touch(); print(folder, flush=True); time.sleep(60)"
    )
    process = server.start(tmp_path, code=code)
    folder = Path(process.stdout.readline().strip())

    def kill() -> Path:
        process.kill()
        process.wait()
        return folder

    yield kill
    kill()


def test_only_directories_without_an_owner_are_swept_away(tmp_path: Path, abandoned: Callable[[], Path]) -> None:
    (mine,) = tmp_path.iterdir()
    remove_abandoned(tmp_path, ".partial-")
    assert (mine / "half").exists()  # its owner lives
    assert abandoned() == mine
    (tmp_path / ".partial-empty").mkdir()
    (tmp_path / ".partial-file").touch()
    (tmp_path / ".partial-link").symlink_to(mine)
    (tmp_path / ".partial-foreign").mkdir()
    (tmp_path / ".partial-foreign" / "something").touch()
    with owned_directory(tmp_path, ".partial-") as held:
        remove_abandoned(tmp_path, ".partial-")
        left = {path.name for path in tmp_path.iterdir()}
    assert left == {held.name, ".partial-file", ".partial-link", ".partial-foreign"}
