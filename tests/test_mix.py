"""The built-in mix: every kind in every split, every file with its licence, all of it in the package."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from zoo import tiny_tokenizer

import compressor
from compressor.text import MIX_TEXT
from compressor.text.sources import read_splits

KINDS = {"prose", "dialogue", "code", "data"}
LANGUAGES = {"python", "javascript", "typescript", "c", "go"}
FORMATS = {"json", "csv", "tsv", "yaml", "toml", "markdown", "html", "shell", "log"}
FILES = sorted(MIX_TEXT.glob("*.txt"))


def kind_of(file: Path) -> list[str]:
    return file.name.split("-")


def test_size_and_kinds() -> None:
    assert 400_000 <= sum(file.stat().st_size for file in FILES) <= 700_000
    assert {kind_of(file)[0] for file in FILES} == KINDS
    assert {kind_of(file)[1] for file in FILES if kind_of(file)[0] == "code"} >= LANGUAGES
    assert {kind_of(file)[1] for file in FILES if kind_of(file)[0] == "data"} >= FORMATS


def test_every_split_has_every_kind() -> None:
    """Whole documents, in the shares of a text, and no kind in small measure."""
    by_content = {file.read_text(encoding="utf-8"): file for file in FILES}
    parts = read_splits(["mix"], None)
    total = sum(len(document.content) for part in parts for document in part)
    for share, part in zip((1 / 2, 1 / 6, 1 / 3), parts, strict=True):
        size = sum(len(document.content) for document in part)
        assert size / total == pytest.approx(share, abs=0.02)
        kinds: dict[str, int] = dict.fromkeys(KINDS, 0)
        for document in part:
            kinds[kind_of(by_content[document.content])[0]] += len(document.content)
        assert min(kinds.values()) > size / 12, kinds
        languages = {kind_of(by_content[d.content])[1] for d in part if by_content[d.content].name.startswith("code")}
        assert len(languages & LANGUAGES) >= 3


def test_windows_of_it() -> None:
    text = compressor.load_text("mix", tiny_tokenizer(), seq_len=64, calib_tokens=6400)
    assert text.calibration.tokens == 6400
    assert len(text.verification.documents.unique()) > 20  # type: ignore[union-attr]
    assert text.calibration.source == "mix"


def test_every_file_has_its_licence() -> None:
    content = (MIX_TEXT / "LICENSE.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in content.splitlines() if line.startswith("| ")]
    named = {row[0]: (row[1], row[2]) for row in rows[1:]}
    assert set(named) == {file.name for file in FILES}
    allowed = re.compile(r"MIT|BSD-3-Clause|Apache-2\.0|PSF-2\.0|public domain")
    for source, licence in named.values():
        assert re.match(r"(PyPI|npm|Debian) `[^`]+` \d", source)
        assert allowed.match(licence)
    packages = {re.findall("`(.*?)`", source)[0]: licence for source, licence in named.values()}
    for package, licence in packages.items():  # MIT, BSD and PSF want their text and the copyright line beside it
        section = content.partition(f"## {package} (")[2].partition("\n## ")[0]
        assert re.search(r"Copyright|copyright", section) or re.match("Apache|public domain", licence), package


def test_nothing_that_is_held_out_for_measuring() -> None:
    forbidden = re.compile(r"austen|sotu|state of the union|sympy|wikitext", re.IGNORECASE)
    assert not [file.name for file in FILES if forbidden.search(file.name)]
    demo = "".join(file.read_text(encoding="utf-8") for file in (MIX_TEXT.parent / "demo" / "text").glob("*.txt"))
    for file in FILES:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if len(line) > 60]
        assert not [line for line in lines if line in demo], file.name


def test_it_is_in_the_package() -> None:
    settings = (MIX_TEXT.parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    patterns = re.findall(r'"(.*?)"', settings.partition("[tool.setuptools.package-data]")[2].partition("]")[0])
    found = {path for pattern in patterns for path in MIX_TEXT.parent.glob(pattern)}
    assert {*FILES, MIX_TEXT / "LICENSE.md"} <= found
