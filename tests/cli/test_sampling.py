"""`compress sample`: a compressed model and its source side by side, from words, from stdin, and in a loop."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path

import pytest
from conftest import Compress, Refused

from compressor.report.sample_record import SampledPrompt, say_difference

TOKENS = ["--tokens", "6"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def type_in(monkeypatch: pytest.MonkeyPatch, text: str, terminal: bool = False) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(text) if terminal else io.StringIO(text))


def test_both_texts_stand_side_by_side(compress: Compress, compressed: Path) -> None:
    done = compress("sample", compressed, "the cat", "a dog sat", *TOKENS)
    assert done.code == 0, done.err
    assert [line.strip() for line in done.out.splitlines() if "prompt:" in line] == [
        "prompt: the cat",
        "prompt: a dog sat",
    ]
    assert done.out.count("source (gpt2)") == done.out.count(f"compressed ({compressed.name})") == 2
    assert done.out.count("they part") + done.out.count("both write the same") == 2


def test_the_record_has_the_whole_texts(compress: Compress, compressed: Path) -> None:
    record = json.loads(compress("sample", compressed, "the cat", *TOKENS, "--json").out)
    (sample,) = record["samples"]
    again = json.loads(compress("sample", compressed, "the cat", *TOKENS, "--json").out)
    assert again == record
    assert sample["source_tokens"] <= 6
    place = sample["first_difference"]
    if place is None:
        assert sample["text"] == sample["source_text"]
    else:
        assert sample["next"] != sample["source_next"]
    drawn = ["--temperature", "1.5", "--json"]
    first, second = (
        json.loads(compress("sample", compressed, "the cat", *TOKENS, *drawn, "--seed", seed).out) for seed in "12"
    )
    assert first["samples"][0]["text"] != second["samples"][0]["text"]


def test_a_model_against_itself_never_parts(compress: Compress, models: Path) -> None:
    words = ["--source", models / "gpt2", *TOKENS, "--temperature", "1", "--json"]
    (sample,) = json.loads(compress("sample", models / "gpt2", "the cat", *words).out)["samples"]
    assert sample["first_difference"] is None
    assert sample["text"] == sample["source_text"]


def test_a_model_without_a_source_comes_alone(compress: Compress, models: Path) -> None:
    done = compress("sample", models / "llama", "the cat", *TOKENS, "--chat")
    assert done.code == 0, done.err
    assert "source" not in done.out
    assert "they part" not in done.out
    assert done.out.splitlines()[1].strip() == "llama"


def test_prompts_come_from_stdin_line_by_line(
    compress: Compress, compressed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    type_in(monkeypatch, "the cat\n\na dog sat\n")
    record = json.loads(compress("sample", compressed, *TOKENS, "--json").out)
    assert [sample["prompt"] for sample in record["samples"]] == ["the cat", "a dog sat"]


@pytest.mark.parametrize("end", ["\n", ""], ids=["an empty line", "the end of the input"])
def test_on_a_terminal_it_asks_again_and_again(
    compress: Compress, compressed: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    type_in(monkeypatch, f"the cat\n{'the cat ' * 80}\na dog sat\n{end}", terminal=True)
    done = compress("sample", compressed, *TOKENS)
    assert done.code == 0, done.err
    assert [line.strip() for line in done.out.splitlines() if "prompt:" in line] == [
        "prompt: the cat",
        "prompt: a dog sat",
    ]
    assert done.err.count("error: the prompt") == 1  # a prompt that is too long does not end the talk
    assert done.err.count("an empty line ends") == 4


def test_what_is_refused(
    refused: Refused,
    compressed: Path,
    models: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    assert "the prompt is empty" in refused("sample", compressed, " ")
    message = refused("sample", compressed, "the cat " * 80)
    assert "is beyond the model's context of 64; shorten it" in message
    assert "try --tokens 63" in refused("sample", compressed, "a", "--tokens", "64")
    assert "has 1 token;" in refused("sample", compressed, "a", "--tokens", "64")
    assert "--tokens must be between" in refused("sample", compressed, "a", "--tokens", "0")
    assert "--temperature must be 0 or more" in refused("sample", compressed, "a", "--temperature", "-1")
    assert "has no config.json" in refused("sample", tmp_path_factory.mktemp("empty"), "a")
    assert "does not exist" in refused("sample", "./absent", "a")
    type_in(monkeypatch, "")
    assert "no prompt" in refused("sample", compressed)
    type_in(monkeypatch, "a\n", terminal=True)
    assert "--json prints one report" in refused("sample", compressed, "--json")


def test_a_source_that_moved_is_named(
    compress: Compress, refused: Refused, compressed: Path, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    moved = tmp_path_factory.mktemp("moved") / "made"
    shutil.copytree(compressed, moved)
    file = moved / "compression.json"
    record = json.loads(file.read_text())
    record["source"]["model"] = "/absent/gpt2"
    file.write_text(json.dumps(record))
    assert "if it has moved, add --source DIRECTORY" in refused("sample", moved, "a", *TOKENS)
    done = compress("sample", moved, "a", *TOKENS, "--source", models / "gpt2")
    assert done.code == 0, done.err


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"first_difference": 0, "source_next": " a", "next": " b"}, "they part at the first token: "),
        ({"first_difference": 1, "source_next": " a", "next": " b"}, "they part after 1 token: "),
        ({"first_difference": 2, "source_next": " a", "next": None}, "they part after 2 tokens: "),
        ({"first_difference": 2, "source_next": " a", "next": None}, "' a', the compressed ends"),
        ({}, "both write the same 3 tokens"),
        ({"tokens": 1}, "both write the same 1 token"),
    ],
)
def test_where_they_part_is_said_exactly(values: dict[str, object], words: str) -> None:
    usual = {"prompt": "p", "prompt_tokens": 1, "text": "t", "tokens": 3, "source_text": "t"}
    said = say_difference(SampledPrompt(**{**usual, **values}))  # type: ignore[arg-type]
    assert words in said
    assert not said.endswith("1 tokens")
