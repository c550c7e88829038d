"""Several processes at one job: the same plan as one process, and no hang when one of them ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import sentences
from planted import random_text
from zoo import stored, tiny_model, tiny_tokenizer

from compressor.pipelines.job import Setting, advise_batches
from compressor.runtime.progress import Progress

ROOT = Path(__file__).parents[2]
OPTIONS = ["--seq-len", "32", "--calib-tokens", "4000", "--select-tokens", "1000", "--verify-tokens", "2000"]
JOB = ["--max-dppl", "0.5%", "--objective", "size", *OPTIONS]
TIMEOUT = 240  # seconds: a hang, not a slow machine


def environment(cache: Path, **more: str) -> dict[str, str]:
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COMPRESSOR_CACHE": str(cache), "CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, **own, **more}


def run(command: list[Any], cache: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, *map(str, command)]
    return subprocess.run(words, env=environment(cache), capture_output=True, text=True, timeout=TIMEOUT, check=False)


def start(command: list[Any], cache: Path, count: int = 2) -> list[subprocess.Popen[str]]:
    """The processes of one run, as a launcher that does not look after them would start them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(count)}
    words = [sys.executable, "-m", "compressor", *map(str, command)]
    return [
        subprocess.Popen(
            words,
            env=environment(cache, **meeting, RANK=str(rank), LOCAL_RANK=str(rank)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]


def errors(*texts: str) -> list[str]:
    return [line for text in texts for line in text.splitlines() if line.startswith("error:")]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ranks")
    tiny_model("llama").to(torch.bfloat16).save_pretrained(root / "llama")  # a dtype that gloo may not know
    tiny_tokenizer().save_pretrained(root / "llama")
    (root / "corpus.txt").write_text(sentences(4000), encoding="utf-8")
    done = run(["-m", "compressor", root / "llama", *job(root, "one")], root / "cache-one")
    assert done.returncode == 0, done.stderr
    return root


def job(root: Path, out: str) -> list[Any]:
    return [*JOB, "--text", root / "corpus.txt", "--out", root / out]


LAUNCHERS: dict[str, Callable[[], list[str]]] = {
    "torchrun": lambda: ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "compressor"],
    "accelerate": lambda: [
        *["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "--num_machines", "1"],
        *["--mixed_precision", "no", "--dynamo_backend", "no", "-m", "compressor"],
    ],
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_two_processes_write_what_one_writes(launcher: str, place: Path) -> None:
    cache = place / f"cache-{launcher}"
    done = run([*LAUNCHERS[launcher](), place / "llama", *job(place, launcher)], cache)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("written to") == 1
    one, two = (json.loads((place / name / "compression.json").read_text()) for name in ("one", launcher))
    assert [block["replacement"] for block in two["blocks"]] == [block["replacement"] for block in one["blocks"]]
    for a, b in zip(one["blocks"], two["blocks"], strict=True):
        assert b["r2_lin"] == pytest.approx(a["r2_lin"], rel=1e-9)
    assert two["perplexity"]["compressed"] == pytest.approx(one["perplexity"]["compressed"], rel=1e-6)
    ours, theirs = stored(place / launcher), stored(place / "one")
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-2, atol=1e-3)  # a unit in the last place
    assert not list(place.glob(".*"))


def test_a_profile_with_probes_and_a_swap(place: Path) -> None:
    """Everything that gathers rows, with more processes than there are batches of some texts."""
    words = [place / "llama", *OPTIONS, "--text", place / "corpus.txt", "--probe", "bilinear", "--swap-tokens", "64"]
    one = run(["-m", "compressor", "profile", *words, "--json"], place / "cache-profile")
    processes = start(["profile", *words, "--json"], place / "cache-profiles", count=3)
    results = [process.communicate(timeout=TIMEOUT) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], results[0][1]
    assert [bool(out) for out, _ in results] == [True, False, False]
    first, second = json.loads(one.stdout), json.loads(results[0][0])
    for a, b in zip(first["blocks"], second["blocks"], strict=True):
        for name in ("r2_lin", "r2_stream", "r2_median", "effective_rank", "top_row_share"):
            assert b[name] == pytest.approx(a[name], rel=1e-9), name
        assert b["swap"]["delta"] == pytest.approx(a["swap"]["delta"], rel=1e-6)
        assert b["verdict"] == a["verdict"]


def test_a_gate_that_fails_still_shows_its_table(place: Path) -> None:
    """Exit 1 of several processes leaves at once, and must not lose what was said."""
    processes = start(["check", place / "one", "--max-dppl", "0.000001"], place / "cache-one")
    results = [process.communicate(timeout=TIMEOUT) for process in processes]
    assert [process.returncode for process in processes] == [1, 1], results[0][1]
    assert "FAILED" in results[0][0]
    assert results[1][0] == ""


def test_too_few_batches_for_the_processes_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    setting = Setting(Progress(visible=True))
    for processes in (3, 4):  # 24 selection windows in batches of 8
        monkeypatch.setattr("compressor.runtime.distributed.size", lambda count=processes: count)
        advise_batches(random_text(), 8, setting)
    assert capsys.readouterr().err.splitlines() == [
        "4 processes, but a text of 3 batches: a smaller --batch-size shares the work better"
    ]


def test_bad_input_is_one_line_for_all(place: Path) -> None:
    processes = start([place / "nowhere", *job(place, "bad")], place / "cache-bad")
    results = [process.communicate(timeout=TIMEOUT) for process in processes]
    assert [process.returncode for process in processes] == [2, 2]
    assert len(errors(*(err for _, err in results))) == 1


@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_dies_ends_the_other_with_one_line(victim: int, place: Path) -> None:
    cache = place / f"cache-victim-{victim}"
    processes = start([place / "llama", *job(place, f"victim-{victim}")], cache)
    deadline = time.monotonic() + TIMEOUT
    while not list(cache.glob("*.safetensors")) and time.monotonic() < deadline:  # in the middle of the work
        time.sleep(0.05)
    processes[victim].send_signal(signal.SIGKILL)
    survivor = processes[1 - victim]
    _, err = survivor.communicate(timeout=60)
    processes[victim].communicate()
    assert survivor.returncode == 2
    assert len(errors(err)) == 1
    assert "another process of this run has ended" in err
    assert not (place / f"victim-{victim}").exists()
    again = run(["-m", "compressor", place / "llama", *job(place, f"victim-{victim}")], cache)
    assert again.returncode == 0, again.stderr
    assert (place / f"victim-{victim}/model.safetensors").read_bytes() == (place / "one/model.safetensors").read_bytes()
