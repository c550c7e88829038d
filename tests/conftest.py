"""Shared by the tests of the command: the command itself, tiny models, a text, and one finished compression."""

from __future__ import annotations

import io
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

# Some virtual machines announce AMX and then stop the process at its first instruction; bfloat16 would use it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import pytest
import torch
from preloaded import Server
from zoo import TEXT, save_tiny

from compressor.cli import app as cli

SMALL = ["--seq-len", "32", "--calib-tokens", "4000", "--select-tokens", "1000", "--verify-tokens", "2000"]


@dataclass(frozen=True)
class Outcome:
    """What one run of the command left behind."""

    code: int
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        return [line for line in self.err.splitlines() if line.startswith("error:")]


Compress = Callable[..., Outcome]


@pytest.fixture(scope="session")
def compress() -> Compress:
    """The real entry point with this command line, in this process."""

    def run(*arguments: str | Path) -> Outcome:
        out, err = io.StringIO(), io.StringIO()
        argv = ["compress", *map(str, arguments)]
        with (
            mock.patch.object(sys, "argv", argv),
            redirect_stdout(out),
            redirect_stderr(err),
            pytest.raises(SystemExit) as end,
        ):
            cli.main()
        assert isinstance(end.value.code, int)
        return Outcome(end.value.code, out.getvalue(), err.getvalue())

    return run


def tree(root: Path) -> dict[str, bytes | None]:
    """Every file and directory under a root, hidden ones too, with its content."""
    return {str(p.relative_to(root)): p.read_bytes() if p.is_file() else None for p in sorted(root.rglob("*"))}


Refused = Callable[..., str]


@pytest.fixture
def refused(compress: Compress, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Refused:
    """Run the command in an empty directory of its own; return its only error line."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)

    def run(*arguments: str | Path) -> str:
        before = tree(tmp_path)
        done = compress(*arguments)
        assert done.code == 2, (done.code, done.err)
        assert len(done.errors) == 1, done.err
        assert done.err.splitlines()[-1] == done.errors[0]
        assert "Traceback" not in done.err
        assert not done.errors[0].startswith("error: unexpected")  # the line for what nobody thought of
        assert done.out == ""
        assert tree(tmp_path) == before
        return done.errors[0]

    return run


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing that a test measures goes into the user's cache, and nothing comes from it."""
    with mock.patch.dict(os.environ, {"COMPRESSOR_CACHE": str(tmp_path_factory.mktemp("cache"))}):
        yield


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny models gain nothing from more, and byte-identical results must not depend on the machine."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One directory per family; no test may change them."""
    root = tmp_path_factory.mktemp("models")
    for family in ("gpt2", "llama", "mixtral", "bert", "t5"):
        save_tiny(family, root / family)
    return root


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """Starts processes that have imported everything; see preloaded.py."""
    found = Server(Path(__file__).parents[1])
    yield found
    found.close()


def sentences(count: int, seed: int = 0) -> str:
    rng = random.Random(seed)
    words = TEXT.split()
    return "".join(" ".join(rng.choices(words, k=rng.randint(5, 14))) + "\n" for _ in range(count))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "corpus.txt"
    file.write_text(sentences(4000), encoding="utf-8")
    return file


@pytest.fixture(scope="session")
def options(corpus: Path) -> list[str]:
    """The text and its small splits, as options."""
    return ["--text", str(corpus), *SMALL]


@pytest.fixture(scope="session")
def compressed(compress: Compress, models: Path, options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `compress MODEL --max-dppl 0.2% --out DIR` wrote; no test may change it."""
    out = tmp_path_factory.mktemp("compressed") / "small"
    done = compress(models / "gpt2", *options, "--max-dppl", "0.2%", "--out", out)
    assert done.code == 0, done.err
    return out


@pytest.fixture(scope="session")
def deployed(compress: Compress, models: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A compressed Llama as `small`, its exports, and what `--json` printed of each; no test may change them."""
    root = tmp_path_factory.mktemp("deployed")
    done = compress(models / "llama", "--text", corpus, *SMALL, "--max-dppl", "3%", "--out", root / "small")
    assert done.code == 0, done.err
    for name, form in {
        "f32.gguf": ["gguf", "--dtype", "f32"],
        "q8_0.gguf": ["gguf", "--dtype", "q8_0"],
        "graph": ["onnx"],
    }.items():
        done = compress("export", root / "small", "--to", *form, "--out", root / name, "--json")
        assert done.code == 0, done.err
        (root / f"{name}.json").write_text(done.out, encoding="utf-8")
    return root


@pytest.fixture(scope="session")
def profiled(compress: Compress, models: Path, options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `compress profile MODEL` wrote with everything that it can measure; no test may change it."""
    root = tmp_path_factory.mktemp("profiled")
    other = root / "other.txt"
    other.write_text("".join(line[::-1] + "\n" for line in sentences(4000, seed=5).splitlines()), encoding="utf-8")
    probes = ["--probe", "bilinear", "--probe", "trained", "--probe-steps", "20", "--cross", str(models / "llama")]
    probes.append("--no-cache")  # the time of every stage must be in it
    done = compress("profile", models / "gpt2", *options, "--text", other, *probes, "--out", root / "report")
    assert done.code == 0, done.err
    return root / "report"
