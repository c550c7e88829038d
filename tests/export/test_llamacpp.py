"""The runner: stock llama.cpp in a child process computes what transformers does, and its end is one clear line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import gguf
import psutil
import pytest
import torch
from tinygguf import make_llama, write_gguf
from transformers import LlamaForCausalLM

from compressor.export import llamacpp
from compressor.export.llamacpp import Runner, Settings
from compressor.runtime.errors import InputError

ROOT = Path(__file__).parents[2]
ROWS = 300
IDS = [5, 9, 260, 17, 17, 42, 0, 299, 8, 100]


def add_letters(writer: gguf.GGUFWriter) -> None:
    """A vocabulary with hardly a merge, whose token 299 ends a text."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([chr(0x100 + i) for i in range(ROWS)])
    writer.add_token_types([int(gguf.TokenType.NORMAL)] * (ROWS - 1) + [int(gguf.TokenType.CONTROL)])
    writer.add_token_merges([f"{chr(0x100)} {chr(0x101)}"])
    writer.add_bos_token_id(ROWS - 1)
    writer.add_eos_token_id(ROWS - 1)
    writer.add_chat_template("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return make_llama(ROWS, layers=2)


@pytest.fixture(scope="module")
def file(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(file, model, add_letters)
    return file


@pytest.fixture(scope="module")
def run(file: Path) -> Iterator[Runner]:
    with Runner(file, Settings(context=128)) as run:
        yield run


def test_log_probabilities_are_those_of_transformers(model: LlamaForCausalLM, run: Runner) -> None:
    with torch.no_grad():
        expected = model(torch.tensor([IDS])).logits[0].double().log_softmax(-1)
    expected = expected[:-1].gather(1, torch.tensor(IDS[1:])[:, None])[:, 0]
    measured = torch.tensor(run.log_probabilities(IDS), dtype=torch.float64)
    assert expected.std() > 1  # or the comparison would prove little
    torch.testing.assert_close(measured, expected, atol=1e-4, rtol=1e-5)
    assert run.log_probabilities(IDS[:1]) == []


def test_greedy_tokens_are_those_of_transformers(model: LlamaForCausalLM, run: Runner) -> None:
    inputs = torch.tensor([IDS])
    generated = model.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=20, do_sample=False)
    assert run.continue_greedily(IDS, 20) == generated[0, len(IDS) :].tolist()


def test_the_cache_of_k_and_v_may_be_smaller(file: Path, run: Runner) -> None:
    with Runner(file, Settings(context=128, cache_type="f16", flash_attention=True)) as half:
        pairs = zip(half.log_probabilities(IDS), run.log_probabilities(IDS), strict=True)
        assert 0 < max(abs(a - b) for a, b in pairs) < 0.1


def test_speed_and_template(run: Runner) -> None:
    speed = run.measure_speed(64, 32)
    assert speed.prefill > speed.decode > 0
    assert run.chat_prompt([{"role": "user", "content": "Hello"}]) == "<user>Hello"


def test_a_connection_that_waited_is_no_failure(run: Runner) -> None:
    first = run.detokenize([65])
    time.sleep(6)  # longer than the server keeps one open
    assert run.detokenize([65]) == first


def test_too_many_tokens_are_refused(run: Runner) -> None:
    with pytest.raises(InputError, match="129 tokens do not fit into a context of 128"):
        run.continue_greedily([1] * 100, 29)
    with pytest.raises(InputError, match=r"llama\.cpp refuses a request"):
        run.continue_greedily([], 3)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "No such file"),
        (b"no GGUF file at all", "invalid magic"),
        # llama.cpp writes its log by a thread of its own; when it ends at once, the first line may be missing.
        ("half", "not within the file bounds|failed to load model"),
    ],
)
def test_a_bad_file_is_one_line(file: Path, tmp_path: Path, content: bytes | str | None, reason: str) -> None:
    bad = tmp_path / "bad.gguf"
    if content is not None:
        bad.write_bytes(content if isinstance(content, bytes) else file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(InputError, match=reason) as caught, Runner(bad):
        pass
    assert str(caught.value).startswith(f"llama.cpp cannot run {bad}: ")


def test_an_abort_is_one_line(tmp_path: Path) -> None:
    """Two tokens with one text: an assertion of llama.cpp, or an error in later versions."""

    def add_twins(writer: gguf.GGUFWriter) -> None:
        add_letters(writer)
        writer.kv_data[0]["tokenizer.ggml.tokens"].value[1] = chr(0x100)

    write_gguf(tmp_path / "twins.gguf", make_llama(ROWS), add_twins)
    with pytest.raises(InputError, match=r"GGML_ASSERT|duplicate"), Runner(tmp_path / "twins.gguf"):
        pass


def test_a_child_that_dies_is_one_line(file: Path) -> None:
    with Runner(file) as run:
        run.child.kill()
        with pytest.raises(InputError, match=r"llama\.cpp cannot run"):
            run.continue_greedily(IDS, 3)


def test_without_the_wheel_it_says_what_to_install(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llamacpp, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="pip install xllamacpp"), Runner(file):
        pass


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_no_child_outlives_its_parent(file: Path, number: int) -> None:
    code = (
        "import signal, sys, time\nfrom compressor.export.llamacpp import Runner\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a job in the background ignores it
        "with Runner(sys.argv[1]) as run:\n    print(run.child.pid, flush=True)\n    time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(file)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as parent:
        assert parent.stdout
        child = psutil.Process(int(parent.stdout.readline()))
        parent.send_signal(number)
        child.wait(20)
    assert not child.is_running()
