"""How much text is calibrated on where nobody says: enough for the widest block, or what there is."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from conftest import Compress, sentences
from zoo import tiny_model

from compressor.measure.profile import tokens_to_fit
from compressor.pipelines import job
from compressor.pipelines.recipe import Recipe
from compressor.runtime.names import CALIBRATION_TOKENS

REST = ("--seq-len", "32", "--select-tokens", "640", "--verify-tokens", "640")


@pytest.mark.parametrize(
    ("width", "neurons", "seq_len", "tokens"),
    [
        (192, 768, 512, CALIBRATION_TOKENS),  # the built-in model: the least is enough
        (576, 1536, 512, 42_496),  # SmolLM2-135M: 16 for each of 2,112
        (2048, 8192, 512, 65_536),  # 16 for each of 10,240 would be more than so many tokens
        (2048, 8192, 500, 65_500),  # the same in whole windows
        (4096, 14_336, 512, 92_160),  # 4 for each of 18,432, and a fifth held out
        (8192, 512, 512, 102_400),  # few neurons: 10 for each input
        (2048, None, 512, 65_536),  # neurons that are not known
    ],
)
def test_the_size_follows_the_width(
    width: int, neurons: int | None, seq_len: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = SimpleNamespace(width=width, parameters=1)
    monkeypatch.setattr(job, "find_blocks", lambda _: [block])
    monkeypatch.setattr(job, "find_neurons", lambda *_: None if neurons is None else SimpleNamespace(count=neurons))
    size = job.choose_calibration(None, seq_len)
    assert size.tokens == tokens
    windows = tokens // seq_len
    fitted = (windows - windows // 5) * seq_len
    assert fitted >= 4 * size.features
    assert fitted >= 10 * width


def test_whole_windows_hold_the_rows() -> None:
    for rows in (1, 31, 32, 33, 640, 641):
        windows = tokens_to_fit(rows, 32) // 32
        assert (windows - windows // 5) * 32 >= rows


def test_the_neurons_of_the_model_are_counted() -> None:
    assert job.choose_calibration(tiny_model("gpt2"), 32).features == 32 + 48


@pytest.fixture
def small_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a few tokens were enough for any model, so that a tiny one asks for more."""
    monkeypatch.setattr(job, "CALIBRATION_TOKENS", 192)
    monkeypatch.setattr(job, "AMPLE_TOKENS", 192)


def profile(compress: Compress, model: Path, text: Path, *more: str) -> tuple[dict[str, Any], str]:
    done = compress("profile", model, "--text", text, *REST, "--json", "--no-swap", "-v", *more)
    assert done.code == 0, done.err
    return json.loads(done.out), done.err


@pytest.mark.usefixtures("small_least")
def test_what_was_chosen_is_said_and_recorded(compress: Compress, models: Path, corpus: Path) -> None:
    record, said = profile(compress, models / "gpt2", corpus)
    assert "calibration: 416 tokens, 4.4 fitted rows for each of 80 features" in said
    assert record["recipe"]["calib_tokens"] == record["text"]["calibration"]["tokens"] == 416
    assert record["rows"] == {"fitted": 352, "held_out": 64}
    record, said = profile(compress, models / "gpt2", corpus, "--calib-tokens", "480")
    assert "calibration:" not in said
    assert record["recipe"]["calib_tokens"] == record["text"]["calibration"]["tokens"] == 480


@pytest.mark.usefixtures("small_least")
def test_a_shorter_text_gives_what_it_has_and_says_so(compress: Compress, models: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    few = ("--seq-len", "32", "--select-tokens", "64", "--verify-tokens", "128")
    for count in range(40, 10, -2):
        short.write_text(sentences(count), encoding="utf-8")
        done = compress("profile", models / "gpt2", "--text", short, *few, "--json", "--no-swap", "-v")
        if done.code == 2:
            assert "too short" in done.errors[0]
            continue
        record = json.loads(done.out)
        tokens = record["text"]["calibration"]["tokens"]
        assert 192 <= tokens <= 416
        assert record["recipe"]["calib_tokens"] == tokens
        assert f"calibration: {tokens} tokens" in done.err
        assert ("the text has no more for it, 416 would be better" in done.err) == (tokens < 416)
        if tokens < 416:
            return
    raise AssertionError("no text was between the least and enough")


@pytest.mark.usefixtures("small_least")
def test_every_corpus_gets_what_it_has(compress: Compress, models: Path, corpus: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text(sentences(400, seed=1), encoding="utf-8")
    record, _ = profile(compress, models / "gpt2", corpus, "--text", str(other))
    assert [corpus["text"]["tokens"] for corpus in record["corpora"]] == [416, 416]


def test_a_recipe_without_the_number_is_chosen_for_and_one_with_it_keeps_it() -> None:
    assert Recipe().calib_tokens is None
    assert "calib_tokens" not in yaml.safe_load(yaml.safe_dump(Recipe().settings()))
    assert Recipe(calib_tokens=24_576).settings()["calib_tokens"] == 24_576
