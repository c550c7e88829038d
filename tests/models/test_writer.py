"""Text that a model writes itself: planted distributions and loops, chunks in the cache, whole commands."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import SMALL, Compress, Refused
from zoo import REPRESENTATIVE, TEXT, tiny_model, tiny_tokenizer

import compressor
from compressor.models import writer as writing
from compressor.models.writer import CHUNKS, LEAST_TOKENS, Writer, choose_tokens, is_degenerate
from compressor.runtime.cache import Cache, Tensors
from compressor.runtime.context import RunContext
from compressor.runtime.errors import InputError
from compressor.runtime.progress import Progress
from compressor.text import Document, load_text

SIZES = {"seq_len": 16, "calib_tokens": 800, "select_tokens": 160, "verify_tokens": 320}
SPLITS = ("calibration", "selection", "verification")


def contents(documents: list[Document]) -> list[tuple[int, ...]]:
    return [document.ids or () for document in documents]


@pytest.fixture(scope="module")
def gpt2() -> Any:
    return tiny_model("gpt2")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


@pytest.fixture
def kept(gpt2: Any, tokenizer: Any, tmp_path: Path) -> Writer:
    """A writer with a cache."""
    return Writer(gpt2, tokenizer, RunContext(cache=Cache(tmp_path / "cache", Progress())))


def test_tokens_are_drawn_with_their_probability() -> None:
    shares = torch.tensor([0.0, 0.5, 0.0, 0.2, 0.3, 0.0])
    uniforms = (torch.arange(1000) + 0.5) / 1000
    chosen = choose_tokens(shares.log().expand(1000, -1), uniforms.double())
    assert (chosen.bincount(minlength=6) / 1000).tolist() == pytest.approx(shares.tolist(), abs=1e-3)


def test_logits_that_are_not_finite_are_refused() -> None:
    with pytest.raises(InputError, match="logits are not finite"):
        choose_tokens(torch.tensor([[0.0, torch.nan]]), torch.tensor([0.5]))


@pytest.mark.parametrize("family", REPRESENTATIVE)
def test_what_is_written_at_once_is_what_is_written_alone(
    family: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents that end leave the batch and its key-value cache; the others go on as if they were alone."""
    model = tiny_model(family)
    monkeypatch.setattr(model.generation_config, "eos_token_id", list(range(20, 60)))
    writer = Writer(model, tokenizer)
    uniforms = torch.rand(6, 40, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    words = [100, 101, 102, 103, 104, 105]
    together = writer.continue_words(words, uniforms, 0)
    assert len({len(ids) for ids in together}) > 1
    assert min(map(len, together)) > LEAST_TOKENS
    forbidden, ends = writer.forbidden(), writer.end_tokens
    for row, ids in enumerate(together):
        assert (ids[0] == words[row]) == bool(row % 2)
        for position in range(row % 2, len(ids)):
            before = torch.tensor([[writer.first_token, *ids[:position]]])
            with torch.no_grad():
                logits = model(input_ids=before, use_cache=False).logits[:, -1]
            logits[:, forbidden if position >= LEAST_TOKENS else [*forbidden, *ends]] = -torch.inf
            assert ids[position] == int(choose_tokens(logits, uniforms[row : row + 1, position]))
        assert not set(ids[:-1]) & set(ends)
        assert ids[-1] in ends or len(ids) == 40


def test_without_a_first_token_every_document_begins_with_a_word(gpt2: Any) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = tokenizer.eos_token = None
    writer = Writer(gpt2, tokenizer)
    assert writer.first_token is None
    documents = writer.continue_words([70, 71], torch.rand(2, 10, dtype=torch.float64), 0)
    assert [ids[0] for ids in documents] == [70, 71]


@pytest.mark.parametrize("period", [1, 3, 17])
def test_loops_are_degenerate_and_text_is_not(tokenizer: Any, period: int) -> None:
    rng = random.Random(0)
    loop = [rng.randrange(1, 300) for _ in range(period)]
    beginning = tokenizer(TEXT)["input_ids"]
    assert is_degenerate((loop * 400)[:400], tokenizer)
    assert is_degenerate(beginning[:100] + (loop * 400)[:300], tokenizer)
    assert not is_degenerate(beginning, tokenizer)
    assert not is_degenerate([rng.randrange(1, 300) for _ in range(400)], tokenizer)


def test_a_model_that_only_repeats_itself_is_refused(tokenizer: Any) -> None:
    model = tiny_model("gpt2")
    with torch.no_grad():
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.copy_(1000 * model.transformer.wte.weight[7])  # token 7, whatever stands before
    with pytest.raises(InputError, match=r"of 64 documents that the model wrote, 64 say one thing over.*--text mix"):
        Writer(model, tokenizer).write("calibration", 1000, 0)


def test_splits_are_whole_documents_and_none_is_in_two(gpt2: Any, tokenizer: Any) -> None:
    writer = Writer(gpt2, tokenizer)
    documents = {split: contents(writer.write(split, 800, 0)) for split in SPLITS}
    assert not set(documents["calibration"]) & {*documents["selection"], *documents["verification"]}
    assert not set(documents["selection"]) & set(documents["verification"])
    text = load_text("self", tokenizer, writer=writer, **SIZES)
    assert [getattr(text, split).tokens for split in SPLITS] == [800, 160, 320]
    for split in SPLITS:
        written = [token for ids in documents[split] for token in ids]
        windows = getattr(text, split).windows
        assert windows.flatten().tolist() == written[: windows.numel()]  # the tokens as they were written
        assert len(getattr(text, split).documents.unique()) > 1


def test_the_same_seed_writes_the_same_and_more_tokens_only_add(gpt2: Any, tokenizer: Any) -> None:
    writer = Writer(gpt2, tokenizer)
    state = torch.random.get_rng_state()
    few = load_text("self", tokenizer, writer=writer, **SIZES)
    assert torch.equal(torch.random.get_rng_state(), state)
    many = load_text("self", tokenizer, writer=writer, **{**SIZES, "calib_tokens": 8000}, heal_tokens=9600, guard=0)
    assert few.verification.sha256 == many.verification.sha256
    assert torch.equal(few.calibration.windows, many.calibration.windows[: len(few.calibration.windows)])
    assert many.healing is not None
    assert many.healing.tokens == 9600
    assert torch.equal(many.healing.windows[: len(many.calibration.windows)], many.calibration.windows)
    assert load_text("self", tokenizer, writer=writer, **SIZES, seed=1).verification.sha256 != few.verification.sha256


def test_an_interrupted_text_goes_on_where_it_stopped(kept: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    sample, calls = Writer.sample, 0

    def stop_at_the_third(self: Writer, *arguments: Any) -> Tensors:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return sample(self, *arguments)

    monkeypatch.setattr(Writer, "sample", stop_at_the_third)
    tokens = 3 * CHUNKS["selection"] * kept.length
    with pytest.raises(KeyboardInterrupt):
        kept.write("selection", tokens, 0)
    resumed = contents(kept.write("selection", tokens, 0))
    assert calls > 3
    before = calls
    assert contents(kept.write("selection", tokens, 0)) == resumed
    assert calls == before  # nothing is written twice
    assert resumed == contents(Writer(kept.model, kept.tokenizer).write("selection", tokens, 0))


def test_another_model_does_not_find_it(kept: Writer) -> None:
    other = tiny_model("gpt2")
    with torch.no_grad():
        other.transformer.wte.weight.mul_(1.01)
    key = kept.key("selection", 0, 0)
    assert key != Writer(other, kept.tokenizer).key("selection", 0, 0)
    assert key != kept.key("selection", 0, 1)


def test_another_tokenizer_reads_the_decoded_text(gpt2: Any, tokenizer: Any) -> None:
    class Letters:
        """One token for every eight characters: fewer tokens than the writer's."""

        bos_token_id = None

        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            return {"input_ids": [ord(c) for c in text[::8]]}

    writer = Writer(gpt2, tokenizer)
    text = load_text("self", Letters(), writer=writer, **SIZES, guard=0)
    assert [getattr(text, split).tokens for split in SPLITS] == [800, 160, 320]
    written = writer.write("selection", 10, 0)[0].content
    assert text.selection.windows[0].tolist()[: len(written[::8])] == [ord(c) for c in written[::8]][:16]


def test_python_without_a_model(tokenizer: Any) -> None:
    with pytest.raises(InputError, match=r"text self is written by a model.*compressor\.Writer\(model, tokenizer\)"):
        compressor.load_text("self", tokenizer, **SIZES)


def test_beside_a_file(gpt2: Any, tokenizer: Any, corpus: Path) -> None:
    writer = Writer(gpt2, tokenizer)
    own = load_text("self", tokenizer, writer=writer, **SIZES)
    text = load_text([f"wiki={corpus}", "own=self"], tokenizer, writer=writer, **SIZES)
    assert text.counts == {"wiki": (10, 20), "own": (10, 20)}
    assert torch.equal(text.verification.windows[20:], own.verification.windows)
    assert torch.equal(text.calibration.windows[1::2], own.calibration.windows[:25])


# Commands


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COMPRESSOR_CACHE", str(tmp_path / "own-cache"))
    return tmp_path / "own-cache"


@pytest.mark.usefixtures("cache")
def test_whole_job_and_check(compress: Compress, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    done = compress(models / "gpt2", "--text", "self", *SMALL, "--max-dppl", "2%", "--out", out, "-v")
    assert done.code == 0, done.err
    assert "write text for calibration" in done.err
    assert yaml.safe_load((out / "recipe.yaml").read_text())["text"] == ["self"]
    assert "text the model wrote" in (out / "README.md").read_text()
    monkeypatch.setattr(Writer, "sample", None)  # it is not written again
    again = compress("check", out, "--json")
    assert again.code == 0, again.err
    found, recorded = json.loads(again.out), json.loads((out / "compression.json").read_text())
    assert found["text"]["verification"]["sha256"] == recorded["text"]["verification"]["sha256"]
    assert found["perplexity"] == recorded["perplexity"]
    assert not any("verification tokens" in warning for warning in found["warnings"])


def test_dry_run_writes_a_sample_and_keeps_nothing(compress: Compress, models: Path, cache: Path) -> None:
    done = compress(models / "gpt2", "--text", "self", *SMALL, "--max-dppl", "1", "--dry-run", "--json")
    assert done.code == 0, done.err
    record = json.loads(done.out)
    assert record["text"]["calibration"]["tokens"] == 4000
    (step,) = [step for step in record["steps"] if step["name"] == "text"]
    assert step["expected"] > 0
    assert not step["kept"]
    assert not cache.exists()


@pytest.mark.usefixtures("cache")
def test_plan_and_apply_beside_a_file(compress: Compress, models: Path, corpus: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({"text": {"wiki": str(corpus), "own": "self"}}, sort_keys=False))
    plan, budget = tmp_path / "plan.json", ["--max-dppl", "2%"]
    done = compress("plan", models / "gpt2", "--recipe", recipe, *SMALL, *budget, "--out", plan)
    assert done.code == 0, done.err
    done = compress("apply", models / "gpt2", plan, "--out", tmp_path / "out", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["text"]["names"] == ["wiki", "own"]


@pytest.mark.usefixtures("cache")
def test_profile_compares_it_with_the_mix(compress: Compress, models: Path) -> None:
    done = compress("profile", models / "gpt2", "--text", "self", "--text", "mix", *SMALL, "--no-swap", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["recipe"]["text"] == ["self=self", "mix=mix"]


@pytest.mark.usefixtures("cache")
def test_a_second_model_reads_what_the_first_wrote(compress: Compress, models: Path) -> None:
    words = ["--text", "self", "--cross", models / "llama", *SMALL, "--no-swap", "--json"]
    done = compress("profile", models / "gpt2", *words)
    assert done.code == 0, done.err
    assert json.loads(done.out)["recipe"]["text"] == ["self"]


def test_weights_on_disk_write_nothing(refused: Refused, models: Path) -> None:
    words = ["--text", "self", *SMALL, "--low-memory", "--max-dppl", "1", "--out", "out"]
    assert "--text self does not work with --low-memory" in refused(models / "gpt2", *words)


def test_the_step_is_among_the_costs() -> None:
    from compressor.pipelines.costs import step_of

    assert step_of(writing.STEP) == "text"
