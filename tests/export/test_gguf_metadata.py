"""The header of a GGUF file: what the package `gguf` reads in it is read here, and a damaged one is one line."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from runtimes import read_gguf
from zoo import compressed, tiny_tokenizer

from compressor.export.gguf import DTYPES, MULTIPLE, write_gguf
from compressor.export.gguf_metadata import read_header, replace_string
from compressor.export.llama import convert_to_llama
from compressor.runtime.errors import InputError

KEY = "compressor.record"


@pytest.fixture(scope="module", params=DTYPES)
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    llama = convert_to_llama(compressed("llama"), multiple=MULTIPLE, keep_original_widths=True)
    write_gguf(llama, tiny_tokenizer(), file, request.param, "tiny", {KEY: "Käse" + " " * 20})
    return file


def test_it_reads_what_the_package_reads(file: Path) -> None:
    values = read_header(file).values
    theirs = {
        name: field.contents()
        for name, field in read_gguf(file).fields.items()
        if not name.startswith("GGUF.") and not isinstance(field.contents(), list)
    }
    assert values == theirs
    assert values["general.name"] == "tiny"
    assert values[KEY] == "Käse" + " " * 20


def test_a_string_is_replaced_in_place(file: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(file.read_bytes())
    replace_string(copy, KEY, "Brötchen")
    assert read_header(copy).values[KEY].rstrip() == "Brötchen"
    assert copy.read_bytes().replace("Brötchen".encode(), b"") == file.read_bytes().replace("Käse    ".encode(), b"")
    with pytest.raises(ValueError, match="has room for 25 bytes, and 26 are given"):
        replace_string(copy, KEY, "x" * 26)


def test_a_file_that_was_cut_is_refused_wherever_it_was_cut(file: Path, tmp_path: Path) -> None:
    content, bad = file.read_bytes(), tmp_path / "bad.gguf"
    for length in [0, 3, 4, 11, 30, 500, len(content) // 8, len(content) // 2, len(content) - 1]:
        bad.write_bytes(content[:length])
        with pytest.raises(InputError, match=r"is damaged|is not a GGUF file"):
            read_header(bad)
    bad.write_bytes(content[:-1])
    with pytest.raises(InputError, match="it ends 1 bytes before its last tensor does; copy it again"):
        read_header(bad)


def test_other_bytes_are_read_or_refused(file: Path, tmp_path: Path) -> None:
    content, bad, rng = file.read_bytes(), tmp_path / "bad.gguf", random.Random(0)
    refused: list[str] = []
    for _ in range(300):
        changed = bytearray(content)
        for _ in range(3):
            changed[rng.randrange(4, 400)] = rng.randrange(256)
        bad.write_bytes(changed)
        try:
            read_header(bad)
        except InputError as error:
            refused.append(str(error))
    assert len(refused) > 50
    assert all(line.startswith(f"{bad} is damaged: ") for line in refused)


def test_what_is_not_there_or_no_gguf_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        read_header(tmp_path / "none.gguf")
    (tmp_path / "text.gguf").write_text("hello")
    with pytest.raises(InputError, match="is not a GGUF file"):
        read_header(tmp_path / "text.gguf")
