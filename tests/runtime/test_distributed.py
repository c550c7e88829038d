"""Several processes at one job: the same plan as one process, and no hang when one of them ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Compress, sentences
from planted import random_text
from preloaded import Process, Server
from zoo import stored, tiny_model, tiny_tokenizer

from compressor.pipelines.job import advise_batches
from compressor.runtime.context import RunContext
from compressor.runtime.progress import Progress

ROOT = Path(__file__).parents[2]
OPTIONS = ["--seq-len", "32", "--calib-tokens", "4000", "--select-tokens", "1000", "--verify-tokens", "2000"]
JOB = ["--max-dppl", "0.5%", "--max-kl", "5", "--objective", "size", *OPTIONS]
TIMEOUT = 240  # seconds: a hang, not a slow machine


Start = Callable[..., list[Process]]


def run(launcher: list[str], command: list[Any], cache: Path) -> subprocess.CompletedProcess[str]:
    """The command under a launcher, each of its processes started afresh."""
    words = [sys.executable, *launcher, "-m", "compressor", *map(str, command)]
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COMPRESSOR_CACHE": str(cache), "CUDA_VISIBLE_DEVICES": ""}
    env = {**os.environ, **own}
    return subprocess.run(words, env=env, capture_output=True, text=True, timeout=TIMEOUT, check=False)


@pytest.fixture
def start(server: Server) -> Iterator[Start]:
    """The processes of one run, as a launcher that does not look after them would start them."""
    running: list[Process] = []

    def start_all(command: list[Any], cache: Path, count: int = 2, **settings: str) -> list[Process]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(count)}
        own = {**meeting, "COMPRESSOR_CACHE": str(cache), "CUDA_VISIBLE_DEVICES": "", **settings}
        started = [server.start(*command, **own, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(count)]
        running.extend(started)
        return started

    yield start_all
    for process in running:
        process.kill()


def errors(*texts: str) -> list[str]:
    return [line for text in texts for line in text.splitlines() if line.startswith("error:")]


@pytest.fixture(scope="module")
def place(compress: Compress, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a text, and what one process made of them."""
    root = tmp_path_factory.mktemp("ranks")
    tiny_model("llama").to(torch.bfloat16).save_pretrained(root / "llama")  # a dtype that gloo may not know
    tiny_tokenizer().save_pretrained(root / "llama")
    (root / "corpus.txt").write_text(sentences(4000), encoding="utf-8")
    done = compress(root / "llama", *job(root, "one"), "--cache", root / "cache-one")
    assert done.code == 0, done.err
    return root


def job(root: Path, out: str) -> list[Any]:
    return [*JOB, "--branches", "all", "--text", root / "corpus.txt", "--out", root / out]


def test_two_processes_of_torchrun_write_what_one_writes(place: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = run(launcher, [place / "llama", *job(place, "two")], place / "cache-two")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("written to") == 1
    one, two = (json.loads((place / name / "compression.json").read_text()) for name in ("one", "two"))
    assert len(one["attention"]) == 3
    for branch in ("blocks", "attention"):
        assert [b["replacement"] for b in two[branch]] == [b["replacement"] for b in one[branch]]
        for a, b in zip(one[branch], two[branch], strict=True):
            assert b["r2_lin"] == pytest.approx(a["r2_lin"], rel=1e-9)
            assert b["r2_stream"] == pytest.approx(a["r2_stream"], rel=1e-9)
    assert two["perplexity"]["compressed"] == pytest.approx(one["perplexity"]["compressed"], rel=1e-6)
    for name in ("kl", "top1_agreement"):
        assert two["fidelity"][name] == pytest.approx(one["fidelity"][name], rel=0.02, abs=2e-3)
    ours, theirs = stored(place / "two"), stored(place / "one")
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-2, atol=1e-3)  # a unit in the last place
    assert not list(place.glob(".*"))


def test_the_first_of_two_processes_writes_the_text_of_all(compress: Compress, place: Path) -> None:
    words = ["profile", place / "llama", "--text", "self", *OPTIONS, "--no-swap", "--json"]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    two = run(launcher, words, place / "cache-two-written")
    assert two.returncode == 0, two.stderr[-2000:]
    one = compress(*words, "--cache", place / "cache-one-written")
    assert one.code == 0, one.err
    assert json.loads(two.stdout)["text"] == json.loads(one.out)["text"]  # hashes of all windows


def test_two_processes_share_the_batches_of_healing(compress: Compress, place: Path) -> None:
    words = ["heal", place / "one", "--heal", "6k", "--max-dppl", "90%"]
    one = compress(*words, "--cache", place / "cache-healed", "--out", place / "healed-one")
    assert one.code == 0, one.err
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    two = run(launcher, [*words, "--out", place / "healed-two"], place / "cache-healed-two")
    assert two.returncode == 0, two.stderr[-2000:]
    first, second = (
        json.loads((place / name / "compression.json").read_text())["healing"] for name in ("healed-one", "healed-two")
    )
    assert len(first["looks"]) > 2
    for a, b in zip(first["looks"], second["looks"], strict=True):
        assert b["kl"] == pytest.approx(a["kl"], rel=0.05)


def test_three_processes_of_accelerate_profile_with_probes_and_a_swap(compress: Compress, place: Path) -> None:
    """Everything that gathers rows, with more processes than there are batches of some texts."""
    # With --cpu accelerate starts one process, however many it is asked for; without GPUs these use gloo.
    launcher = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "3", "--num_machines", "1"]
    launcher += ["--mixed_precision", "no", "--dynamo_backend", "no"]
    words = [place / "llama", *OPTIONS, "--text", place / "corpus.txt", "--probe", "bilinear", "--swap-tokens", "64"]
    words += ["--batch-size", "16", "--branches", "all"]
    one = compress("profile", *words, "--json", "--cache", place / "cache-profile")
    three = run(launcher, ["profile", *words, "--json"], place / "cache-profiles")
    assert three.returncode == 0, three.stderr[-2000:]
    assert three.stderr.count("3 processes, but a text of 2 batches") == 1
    first, second = json.loads(one.out), json.loads(three.stdout)  # only one of the three spoke
    assert len(first["attention"]) == 3
    branches = (record["blocks"] + record["attention"] for record in (first, second))
    for a, b in zip(*branches, strict=True):
        for name in ("r2_lin", "r2_stream", "r2_median", "effective_rank", "top_row_share"):
            assert b[name] == pytest.approx(a[name], rel=1e-9), name
        assert b["swap"]["delta"] == pytest.approx(a["swap"]["delta"], rel=1e-6)
        assert b["verdict"] == a["verdict"]


GATHER = """
import torch
from compressor.runtime import distributed
distributed.join_processes()
items = [torch.full((number,), number) for number in range(7)]
print([item.tolist() for item in distributed.gather(distributed.own_share(items))] == [item.tolist() for item in items])
distributed.leave_processes()
"""


def test_what_was_dealt_out_is_gathered_in_order(start: Start, tmp_path: Path) -> None:
    processes = start([], tmp_path, count=3, code=GATHER)
    assert [process.communicate(timeout=TIMEOUT)[0] for process in processes] == ["True\n"] * 3


def test_a_gate_that_fails_still_shows_its_table(start: Start, place: Path) -> None:
    """Exit 1 of several processes leaves at once, and must not lose what was said."""
    processes = start(["check", place / "one", "--max-dppl", "0.000001"], place / "cache-one")
    results = [process.communicate(timeout=TIMEOUT) for process in processes]
    assert [process.returncode for process in processes] == [1, 1], results[0][1]
    assert "FAILED" in results[0][0]
    assert results[1][0] == ""


def test_too_few_batches_for_the_processes_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    context = RunContext(progress=Progress(visible=True))
    for processes in (3, 4):  # 24 selection windows in batches of 8
        monkeypatch.setattr("compressor.runtime.distributed.size", lambda count=processes: count)
        advise_batches(random_text(), context)
    assert capsys.readouterr().err.splitlines() == [
        "4 processes, but a text of 3 batches: a smaller --batch-size shares the work better"
    ]


def test_a_dry_run_of_two_processes_says_it_once(start: Start, place: Path) -> None:
    processes = start([place / "llama", *job(place, "dry"), "--dry-run", "--json"], place / "cache-dry")
    results = [process.communicate(timeout=TIMEOUT) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], results[0][1]
    assert json.loads(results[0][0])["processes"] == 2
    assert results[1][0] == ""
    assert not (place / "cache-dry").exists()
    assert not (place / "dry").exists()


def test_bad_input_is_one_line_for_all(start: Start, place: Path) -> None:
    processes = start([place / "nowhere", *job(place, "bad")], place / "cache-bad")
    results = [process.communicate(timeout=TIMEOUT) for process in processes]
    assert [process.returncode for process in processes] == [2, 2]
    assert len(errors(*(err for _, err in results))) == 1


@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_dies_ends_the_other_with_one_line(
    victim: int, start: Start, compress: Compress, place: Path
) -> None:
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
    again = compress(place / "llama", *job(place, f"victim-{victim}"), "--cache", cache)
    assert again.code == 0, again.err
    assert (place / f"victim-{victim}/model.safetensors").read_bytes() == (place / "one/model.safetensors").read_bytes()
