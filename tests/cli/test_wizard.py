"""`compress` alone on a terminal: it asks, shows the command and the time, and runs it; elsewhere it prints help."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

SECONDS = 240


class Terminal:
    """A command on a terminal of 80 columns."""

    def __init__(self, folder: Path) -> None:
        self.main, other = pty.openpty()
        env = {**os.environ, "COLUMNS": "80", "TERM": "xterm", "OMP_NUM_THREADS": "1"}
        env["COMPRESSOR_CACHE"] = str(folder / "cache")
        words = [sys.executable, "-m", "compressor"]
        self.process = subprocess.Popen(words, stdin=other, stdout=other, stderr=other, cwd=folder, env=env)
        os.close(other)
        self.seen = ""

    def wait_for(self, words: str) -> str:
        """What was printed since the last call, up to these words."""
        deadline = time.monotonic() + SECONDS
        while words not in self.seen:
            assert time.monotonic() < deadline, self.seen
            if select.select([self.main], [], [], 1)[0]:
                try:
                    self.seen += os.read(self.main, 4096).decode("utf-8", "replace").replace("\r\n", "\n")
                except OSError:  # the command has ended
                    assert words in self.seen, self.seen
        before, _, self.seen = self.seen.partition(words)
        return before + words

    def answer(self, question: str, words: str) -> str:
        asked = self.wait_for(question)
        os.write(self.main, f"{words}\n".encode())
        return asked


def test_it_asks_again_shows_the_command_and_runs_nothing_unasked(tmp_path: Path) -> None:
    (tmp_path / "demo-lin").mkdir()
    terminal = Terminal(tmp_path)
    terminal.answer("model [demo]: ", "./nowhere")
    assert "directory ./nowhere does not exist" in terminal.answer("model [demo]: ", "")
    terminal.answer("text [the usual one]: ", "nowhere.txt")
    assert "text file nowhere.txt does not exist" in terminal.answer("text [the usual one]: ", "demo")
    terminal.answer("budget [2%]: ", "much")
    assert "--max-dppl must be a number or a percentage, got 'much'" in terminal.answer("budget [2%]: ", "1.0")
    terminal.answer("result [./demo-lin-2]: ", "")
    shown = terminal.answer("Run it? [Y/n]: ", "n")
    assert re.search(r"time: about [\d.]+ (s|min) on\s+this machine", shown)
    assert "compress demo --max-dppl 1.0 --out ./demo-lin-2 --text demo\n" in shown
    assert terminal.process.wait(30) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo-lin"]


def test_ctrl_c_ends_it_with_one_line(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path)
    terminal.wait_for("model [demo]: ")
    terminal.process.send_signal(signal.SIGINT)  # the terminal of a test is not the one that controls it
    assert "error: interrupted; nothing was written" in terminal.wait_for("nothing was written")
    assert terminal.process.wait(30) == 130


def test_without_a_terminal_nothing_is_asked() -> None:
    done = subprocess.run([sys.executable, "-m", "compressor"], input="", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: compress")
