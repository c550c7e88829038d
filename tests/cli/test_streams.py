"""stdout and stderr as a stranger has them: a reader that leaves, a POSIX locale, closed streams, a full disk."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Compress

COMMANDS = ["run", "profile", "plan", "apply", "check", "info", "push", "export", "cache"]
LOCALES = {
    "C": {"LC_ALL": "C"},
    "POSIX": {"LC_ALL": "POSIX"},
    "ascii": {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"},
    "latin-1": {"LC_ALL": "C", "PYTHONIOENCODING": "latin-1"},
}


def environment(**settings: str) -> dict[str, str]:
    """The environment without what says how to encode, and with these settings."""
    unset = ("PYTHONIOENCODING", "PYTHONUTF8", "LANG", "LC_ALL", "LC_CTYPE")
    return {**{name: value for name, value in os.environ.items() if name not in unset}, "PYTHONUTF8": "0", **settings}


def shell(line: str, **settings: str) -> subprocess.CompletedProcess[bytes]:
    """A line of bash, in which `compress` is the command. Its exit code is that of the first part of a pipe."""
    script = f'compress() {{ {sys.executable} -m compressor "$@"; }}; {line}; exit ${{PIPESTATUS[0]}}'
    return subprocess.run(["bash", "-c", script], env=environment(**settings), capture_output=True, timeout=120)


@pytest.mark.parametrize("reader", ["head -1", "head -c 5", "true", "sleep 0"])
@pytest.mark.parametrize(
    "command", ["info DIR", "info DIR --json", "run --help", "--help", "push DIR me/small --dry-run"]
)
def test_a_reader_may_leave(compressed: Path, command: str, reader: str) -> None:
    done = shell(f"compress {command.replace('DIR', str(compressed))} | {reader}")
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_reader_of_the_error_may_leave(tmp_path: Path) -> None:
    assert shell(f"compress info {tmp_path} 2>&1 | true").returncode == 2


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed(compressed: Path, tmp_path: Path, closed: str) -> None:
    assert shell(f"compress info {compressed} {closed}").returncode == 0
    assert shell(f"compress info {tmp_path} {closed}").returncode == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_one_line(compressed: Path) -> None:
    done = shell(f"compress info {compressed} > /dev/full")
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: out of disk")
    assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize("locale", LOCALES)
def test_every_locale_gets_its_output(compressed: Path, tmp_path: Path, locale: str) -> None:
    done = shell(f"compress info {compressed}", **LOCALES[locale])
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"perplexity" in done.stdout
    assert ("→".encode() in done.stdout) == (locale in ("C", "POSIX"))
    report = shell(f"compress info {compressed} --json", **LOCALES[locale])
    record = json.loads((compressed / "compression.json").read_text(encoding="utf-8"))
    assert json.loads(report.stdout.decode("utf-8")) == {**record, "weights_match": True}
    refusal = shell(f"compress info '{tmp_path}/nowhère'", **LOCALES[locale])
    assert refusal.returncode == 2
    assert refusal.stderr.startswith(b"error: ")
    assert b"PYTHONUTF8=1" in refusal.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_comes_out_in_a_posix_locale(command: str) -> None:
    done = shell(f"compress {command} --help", LC_ALL="POSIX")
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"--debug" in done.stdout


def test_a_check_in_a_posix_locale_without_a_home(compressed: Path, models: Path, tmp_path: Path) -> None:
    """Progress, model, text and result; the cache falls back to a temporary directory, with one warning."""
    home = tmp_path / "home"
    home.touch()
    settings = {"LC_ALL": "C", "HOME": str(home), "COMPRESSOR_CACHE": "", "XDG_CACHE_HOME": ""}
    done = shell(f"compress check {compressed} --source {models / 'gpt2'} --generate 4", **settings)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.decode("utf-8").splitlines()
    assert sum(line.startswith("warning: the cache") for line in lines) == 1, lines
    assert "→" in done.stdout.decode("utf-8")


def test_a_stream_that_is_no_file_is_left_alone(compress: Compress, tmp_path: Path) -> None:
    before = sys.stdout, sys.stderr
    assert isinstance(io.StringIO(), io.TextIOBase)
    assert compress("info", tmp_path).errors
    assert (sys.stdout, sys.stderr) == before
