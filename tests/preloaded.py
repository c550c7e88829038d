"""Processes that start in a moment: forked from one that has imported torch, transformers and the package already.

Importing these takes seconds, and tests that kill, interrupt or join real processes start dozens. The server has run
nothing but imports, so its children are what a fresh process is once it has imported: they have their own arguments,
environment, working directory and output, can be signalled, and end as Python ends. What a test says about imports
themselves needs `subprocess`.

    python preloaded.py SOCKET     is the server; it ends when its standard input is closed.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

COMMAND = "from compressor.__main__ import run; run()"
IMPORTS = """
import datasets, lm_eval.evaluator, torch.distributed, torch.utils.flop_counter
import compressor.cli.app, compressor.pipelines.check, compressor.pipelines.compress, compressor.pipelines.profile
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2LMHeadModel, LlamaForCausalLM
import transformers.integrations.accelerate, transformers.quantizers.auto
"""


class Process:
    """One child of the server, with the part of `subprocess.Popen` that the tests use."""

    def __init__(self, connection: socket.socket, stdout: IO[str], stderr: IO[str]) -> None:
        self.connection, self.stdout, self.stderr = connection, stdout, stderr
        self.answers = connection.makefile("r")
        self.pid = int(self.answers.readline())
        self.returncode: int | None = None
        self.ended = threading.Event()
        threading.Thread(target=self.watch, daemon=True).start()

    def watch(self) -> None:
        self.returncode = int(self.answers.readline() or -signal.SIGKILL)
        self.ended.set()

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        if not self.ended.is_set():
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        if not self.ended.wait(timeout):
            raise subprocess.TimeoutExpired("preloaded process", timeout or 0)
        assert self.returncode is not None
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What is left of its output, until it ends."""
        until = time.monotonic() + (timeout or 3600)
        texts = {"stdout": "", "stderr": ""}

        def read(name: str) -> None:
            stream: IO[str] = getattr(self, name)
            texts[name] = "" if stream.closed else stream.read()
            stream.close()

        threads = [threading.Thread(target=read, args=(name,), daemon=True) for name in texts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(until - time.monotonic())
            if thread.is_alive():
                raise subprocess.TimeoutExpired("preloaded process", timeout or 0)
        self.wait(until - time.monotonic())
        return texts["stdout"], texts["stderr"]


class Server:
    """Starts processes; one for all tests of a session."""

    def __init__(self, root: Path) -> None:
        self.folder = tempfile.mkdtemp(prefix="preloaded-")  # the path of a socket must be short
        self.path = os.path.join(self.folder, "s")
        environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
        words = [sys.executable, __file__, self.path]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(words, env=environment, text=True, **pipes)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def start(
        self, *arguments: str | Path, code: str = COMMAND, ignore: Sequence[int] = (), **environment: str
    ) -> Process:
        """Run code, by default the command, with these arguments and more environment; `ignore` some signals."""
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self.path)
        ours, theirs = zip(os.pipe(), os.pipe(), strict=True)
        job = {
            "argv": ["-c", *map(str, arguments)],
            "code": code,
            "ignore": list(ignore),
            "environment": {**os.environ, "OMP_NUM_THREADS": "1", **environment},
            "directory": os.getcwd(),
        }
        data = json.dumps(job).encode()
        socket.send_fds(connection, [len(data).to_bytes(8, "little")], list(theirs))
        connection.sendall(data)
        for number in theirs:
            os.close(number)
        stdout, stderr = (os.fdopen(number, "r", encoding="utf-8") for number in ours)
        return Process(connection, stdout, stderr)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=20)
        if os.path.exists(self.path):
            os.unlink(self.path)
        os.rmdir(self.folder)


def serve(path: str) -> dict[str, Any]:
    """Fork for every request. Returns in each child, with what it is to do."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the watchers are not waited for
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(16)
        server = os.getpid()
        threading.Thread(target=lambda: (sys.stdin.read(), os.kill(server, signal.SIGKILL)), daemon=True).start()
        print("ready", flush=True)
        while True:
            connection, _ = listener.accept()
            if os.fork():
                connection.close()
                continue
            job = watch(connection)
            if job is not None:
                return job


def watch(connection: socket.socket) -> dict[str, Any] | None:
    """Fork the process, tell its id, wait for it and tell how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, (stdout, stderr), _, _ = socket.recv_fds(connection, 8, 2)
    with connection.makefile("rb") as stream:
        job: dict[str, Any] = json.loads(stream.read(int.from_bytes(size, "little")))
    child = os.fork()
    if child == 0:
        connection.close()
        for source, target in ((stdout, 1), (stderr, 2)):
            os.dup2(source, target)
            os.close(source)
        return job
    os.close(stdout)
    os.close(stderr)
    connection.sendall(f"{child}\n".encode())
    _, status = os.waitpid(child, 0)
    connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def settle(job: dict[str, Any]) -> None:
    """Be the process that was asked for."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in job["ignore"]:
        signal.signal(number, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.environ.clear()
    os.environ.update(job["environment"])
    os.chdir(job["directory"])
    sys.argv = job["argv"]


def work(code: str) -> NoReturn:
    """Run the code and end as Python does, but for taking every module down, which takes a second after torch."""
    status = 0
    try:
        exec(code, {"__name__": "__main__"})
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    exec(IMPORTS, {})
    gc.freeze()  # a collection in a child would copy every page
    job = serve(sys.argv[1])
    settle(job)
    work(job["code"])
