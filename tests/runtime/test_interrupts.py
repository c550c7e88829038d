"""Ctrl-C and SIGTERM: one line within two seconds, also in the middle of a call that Python cannot interrupt."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from conftest import Compress
from preloaded import Process, Server

from compressor.runtime.interrupts import WRITTEN, handle_interrupts

LINE = "error: interrupted; nothing was written"
ONWARDS = "; the same command goes on where it stopped"

# The whole job is replaced by something long, in the middle of writing a directory.
LONG = """
import sys, time
from pathlib import Path
import torch
from compressor.runtime import outputs as directories
from compressor.pipelines import compress as pipeline
from compressor.__main__ import run

HOW = sys.argv.pop()

def in_torch():
    torch.linalg.eigh(torch.eye(6000, dtype=torch.float64) + 1)

def in_python():
    while True:
        time.sleep(0.01)

def swallowed():
    while True:
        try:
            time.sleep(10)
        except KeyboardInterrupt:
            pass

def work(recipe, setting):
    with directories.reserved(recipe.out, False, None, "record", print) as target:
        with directories.whole_directory(target) as partial:
            (partial / "half").touch()
            print("ready", flush=True)
            globals()[HOW]()

torch.set_num_threads(1)
pipeline.run = work
run()
"""


Launch = Callable[..., Process]


@pytest.fixture
def launch(server: Server, tmp_path: Path) -> Launch:
    def start(how: str, *options: str, ignore: Sequence[int] = ()) -> Process:
        words = ["demo", "--max-dppl", "1", "--out", str(tmp_path / "out"), *options, how]
        process = server.start(*words, code=LONG, ignore=ignore, COMPRESSOR_CACHE=str(tmp_path / "cache"))
        assert process.stdout.readline() == "ready\n"
        return process

    return start


@pytest.mark.parametrize(
    ("how", "number", "options", "line"),
    [
        ("in_torch", signal.SIGINT, [], LINE + ONWARDS),
        ("in_python", signal.SIGTERM, ["--no-cache"], LINE),
        ("swallowed", signal.SIGTERM, [], LINE + ONWARDS),
    ],
)
def test_a_signal_ends_it_with_one_line(
    launch: Launch, tmp_path: Path, how: str, number: signal.Signals, options: list[str], line: str
) -> None:
    process = launch(how, *options)
    time.sleep(0.5)  # the call is under way
    began = time.monotonic()
    process.send_signal(number)
    process.send_signal(number)  # an impatient user gets no second line
    out, err = process.communicate(timeout=20)
    assert time.monotonic() - began < 2.5
    assert (process.returncode, out, err.splitlines()) == (128 + number, "", [line])
    assert [path.name for path in tmp_path.iterdir()] in ([], ["cache"])


def test_a_signal_that_the_caller_ignores_stays_ignored(launch: Launch) -> None:
    """A job in the background of a script, or under nohup."""
    process = launch("in_python", ignore=[signal.SIGINT])
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=2)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=20)[1].splitlines() == [LINE + ONWARDS]
    assert process.returncode == 143


def test_everything_is_put_back(capfd: pytest.CaptureFixture[str]) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    threads = threading.active_count()
    with pytest.raises(KeyboardInterrupt), handle_interrupts(resumes=True):
        signal.raise_signal(signal.SIGTERM)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert threading.active_count() == threads
    assert signal.set_wakeup_fd(-1) == -1
    time.sleep(1.2)  # nothing ends this process
    assert capfd.readouterr().err == ""


def test_a_result_that_is_complete_is_not_denied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with handle_interrupts(resumes=True) as caught:
        WRITTEN.finished = tmp_path / "out"
        assert [caught.print_line(signal.SIGTERM), caught.print_line(signal.SIGTERM)] == [143, 143]
    assert capsys.readouterr().err == f"error: interrupted; {tmp_path / 'out'} is complete\n"


def test_a_child_may_be_ended_alone() -> None:
    """A forked worker that gets a signal must not end its parent, which shares the pipe."""
    with handle_interrupts(resumes=True):
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
        time.sleep(0.2)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGTERM
        time.sleep(1.3)


def test_another_thread_runs_the_command_too(compress: Compress) -> None:
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(compress("info", "./nowhere").code))
    thread.start()
    thread.join()
    assert codes == [2]
