"""Exports on disk: what `compress info` says of them, without torch, and what they give away."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Compress, Refused
from tinygguf import make_llama, write_gguf
from zoo import LINEAR_SHAPES, save_compressed

from compressor.export.gguf_metadata import read_header

FORMS = {"gguf": "q8_0.gguf", "onnx": "graph", "hf-dense": "dense", "vllm": "deci"}


@pytest.fixture(scope="module")
def folder(compress: Compress, deployed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The exports of a compressed Llama in every form; what `--json` printed of each is beside it."""
    folder = tmp_path_factory.mktemp("exports") / "all"
    shutil.copytree(deployed, folder)
    for form in ("hf-dense", "vllm"):
        done = compress("export", folder / "small", "--to", form, "--out", folder / FORMS[form], "--force", "--json")
        assert done.code == 0, done.err
        (folder / f"{FORMS[form]}.json").write_text(done.out)
    return folder


@pytest.mark.parametrize("form", FORMS)
def test_info_says_what_the_export_said_of_itself(compress: Compress, folder: Path, form: str) -> None:
    printed = json.loads((folder / f"{FORMS[form]}.json").read_text())
    found = json.loads(compress("info", folder / FORMS[form], "--json").out)
    assert {key: value for key, value in found.items() if key not in ("out", "bytes")} == {
        key: value for key, value in printed.items() if key not in ("out", "bytes", "seconds")
    }
    assert found["bytes"] == printed["bytes"]
    recorded = json.loads((folder / "small" / "compression.json").read_text())
    origin = found["origin"]
    assert origin["checkpoint"] == "small"
    assert origin["checkpoint_sha256"] == recorded["compressed_sha256"]
    assert origin["source"]["weights_sha256"] == recorded["source"]["weights_sha256"]
    assert origin["perplexity"] == recorded["perplexity"]
    assert origin["recipe"]["text"] == ["corpus.txt"]
    assert origin["recipe"]["max_dppl"] == ["3%"]
    assert origin["local"] == ["source", "text"]


@pytest.mark.parametrize("form", FORMS)
def test_info_in_words(compress: Compress, folder: Path, form: str) -> None:
    done = compress("info", folder / FORMS[form])
    assert done.code == 0, done.err
    for words in (
        "made from the checkpoint small of llama (llama, a local directory)",
        "when it was written",
        "corpus",
    ):
        assert words in done.out, words
    assert ("24 of 24 greedy tokens" in done.out) == (form == "gguf")


@pytest.mark.parametrize("form", ["gguf", "onnx"])
def test_info_imports_neither_torch_nor_numpy(folder: Path, form: str) -> None:
    code = (
        "import sys, compressor.cli.app as cli\n"
        f"sys.argv = ['compress', 'info', {str(folder / FORMS[form])!r}]\n"
        "try: cli.main()\n"
        "except SystemExit as end: assert end.code == 0, end.code\n"
        "print([name for name in ('torch', 'transformers', 'numpy', 'gguf') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_no_export_names_a_local_directory(folder: Path, deployed: Path, models: Path, corpus: Path) -> None:
    for name in FORMS.values():
        path = folder / name
        files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        for file in files:
            content = file.read_bytes()
            for place in (folder, deployed, models, corpus.parent):
                assert str(place).encode() not in content, (file, place)


def test_the_record_of_a_gguf_file_has_what_its_check_found(folder: Path) -> None:
    record = json.loads(read_header(folder / FORMS["gguf"]).values["compressor.record"])
    assert record["checked"]["greedy_equal"] == record["checked"]["greedy"] == 24
    assert record["checked"]["runtime"].startswith("llama.cpp")


def test_a_checkpoint_without_a_record_of_its_text_exports_too(compress: Compress, tmp_path: Path) -> None:
    save_compressed(tmp_path / "small", "llama", LINEAR_SHAPES)
    done = compress("export", tmp_path / "small", "--to", "gguf", "--out", tmp_path / "m.gguf", "--json")
    assert done.code == 0, done.err
    origin = json.loads(done.out)["origin"]
    assert origin["checkpoint"] == "small"
    assert "recipe" not in origin
    assert compress("info", tmp_path / "m.gguf").code == 0


def test_what_is_no_export_is_one_line(refused: Refused, folder: Path, tmp_path: Path) -> None:
    def add_vocabulary(writer: Any) -> None:
        writer.add_tokenizer_model("gpt2")

    write_gguf(tmp_path / "foreign.gguf", make_llama(20), add_vocabulary)
    whole = (folder / FORMS["gguf"]).read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) - 100])
    (tmp_path / "changed.gguf").write_bytes(whole.replace(b'{"schema_version": 1,', b'{"schema_version"; 1,', 1))
    (tmp_path / "other.gguf").write_bytes(whole.replace(b'{"schema_version": 1,', b'{"schema_version": 9,', 1))
    (tmp_path / "graph").mkdir()
    (tmp_path / "graph" / "model.onnx").write_bytes(b"")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "export.json").write_text('{"to": "onnx"')
    for name, words in {
        "foreign.gguf": "it was not written by compress",
        "cut.gguf": "it ends 100 bytes before its last tensor does",
        "changed.gguf": "compressor.record of",
        "other.gguf": "is not the record of an export: schema_version",
        "none.gguf": "does not exist",
        "graph": "has no compression.json",
        "broken": "export.json of",
    }.items():
        for command in ("info", "check"):
            assert words in refused(command, tmp_path / name), (command, name)
