"""Thousands of spoiled inputs through the real command: it succeeds, or says one line; it never writes elsewhere."""

from __future__ import annotations

import json
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml
from conftest import Compress, Outcome, sentences, tree
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutation import spoiled
from safetensors.torch import load_file, save_file
from zoo import save_tiny

from compressor.pipelines.recipe import Recipe

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SECONDS = 20  # for the slowest single input
MEMORY = 3 * 2**20  # KiB that all of them together may add
QUICK = ["--seq-len", "16", "--calib-tokens", "160", "--select-tokens", "32", "--verify-tokens", "64"]
# What a config.json of any family may hold, and what transformers reacts to.
CONFIG_KEYS = """num_labels num_hidden_layers n_layer num_experts num_local_experts vocab_size hidden_size n_embd n_head
num_attention_heads num_key_value_heads head_dim intermediate_size n_inner max_position_embeddings n_positions n_ctx
max_seq_len sliding_window rope_theta rope_scaling rope_parameters partial_rotary_factor rotary_dim layer_types
attention_types hidden_act activation_function torch_dtype dtype architectures auto_map model_type quantization_config
_name_or_path _attn_implementation attn_implementation transformers_weights tie_word_embeddings return_dict use_cache
output_hidden_states output_attentions is_decoder is_encoder_decoder add_cross_attention pruned_heads id2label label2id
pad_token_id bos_token_id eos_token_id layer_norm_epsilon rms_norm_eps attention_dropout resid_pdrop embd_pdrop
initializer_range tokenizer_class text_config vision_config chunk_size_feed_forward torchscript problem_type
scale_attn_weights reorder_and_upcast_attn mlp_bias attention_bias pretraining_tp generation_config""".split()  # noqa: SIM905


class Range:
    """A working directory in which one file after another is spoiled, and what each run must leave as it was."""

    def __init__(self, root: Path, compress: Compress) -> None:
        self.root, self.compress = root, compress
        self.watched = root.parent.parent  # where `../..` leads
        self.seen: set[bytes] = set()
        self.codes: dict[int, int] = {}
        self.slowest = 0.0

    def run(self, content: bytes, *arguments: str | Path) -> Outcome:
        before, began = tree(self.watched), time.monotonic()
        done = self.compress(*arguments)
        self.slowest = max(self.slowest, time.monotonic() - began)
        self.seen.add(content)
        self.codes[done.code] = self.codes.get(done.code, 0) + 1
        assert done.code in (0, 1, 2), done.err
        assert "Traceback" not in done.err, done.err
        assert len(done.errors) == (done.code != 0), done.err
        assert not any(line.startswith("error: unexpected") for line in done.errors), done.errors
        assert not any(c < " " for line in done.errors for c in line), done.errors
        out = self.root / "out"
        shutil.rmtree(out) if out.is_dir() else out.unlink(missing_ok=True)
        after = tree(self.watched)
        assert after == before, sorted(set(after) ^ set(before))
        return done


@pytest.fixture(scope="module")
def field(tmp_path_factory: pytest.TempPathFactory, compress: Compress) -> Iterator[Callable[[], Range]]:
    """A range of one's own, in which the command then runs; at the end, no input took all the memory or time."""
    root = tmp_path_factory.mktemp("fuzz")
    (root / "text.txt").write_text(sentences(120), encoding="utf-8")
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ranges: list[Range] = []

    def begin() -> Range:
        place = root / str(len(ranges)) / "deep" / "down"
        place.mkdir(parents=True)
        shutil.copy(root / "text.txt", place)
        monkeypatch.chdir(place)
        ranges.append(Range(place, compress))
        return ranges[-1]

    yield begin
    monkeypatch.undo()
    assert max(one.slowest for one in ranges) < SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < MEMORY


def fuzz(contents: st.SearchStrategy[bytes], examples: int, check: Callable[[bytes], Any]) -> None:
    """The same inputs on every machine."""

    @settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(contents)
    def each(content: bytes) -> None:
        check(content)

    each()


@pytest.mark.parametrize(
    ("family", "examples"), [("gpt2", 350), ("llama", 350), ("gpt_neo", 100), ("mpt", 100), ("opt", 100)]
)
def test_config(field: Callable[[], Range], family: str, examples: int) -> None:
    place = field()
    save_tiny(family, place.root / "model")
    file = place.root / "model" / "config.json"

    def check(content: bytes) -> None:
        file.write_bytes(content)
        place.run(content, "profile", "model", "--text", "text.txt", *QUICK, "--no-swap", "--json", "--no-cache")

    fuzz(spoiled(json.loads(file.read_text(encoding="utf-8")), CONFIG_KEYS), examples, check)
    assert len(place.seen) >= 0.95 * examples
    assert set(place.codes) == {0, 2}


def test_index(field: Callable[[], Range]) -> None:
    place = field()
    save_tiny("gpt2", place.root / "model")
    weights = load_file(place.root / "model" / WEIGHTS)
    (place.root / "model" / WEIGHTS).unlink()
    table = {}
    for number in range(3):
        part = {name: tensor for i, (name, tensor) in enumerate(sorted(weights.items())) if i % 3 == number}
        save_file(part, place.root / "model" / f"part-{number}.safetensors", metadata={"format": "pt"})
        table |= dict.fromkeys(part, f"part-{number}.safetensors")
    file = place.root / "model" / INDEX

    def check(content: bytes) -> None:
        file.write_bytes(content)
        place.run(content, "profile", "model", "--text", "text.txt", *QUICK, "--no-swap", "--json", "--no-cache")

    fuzz(spoiled({"metadata": {"total_size": 1}, "weight_map": table}, ["weight_map", "metadata"]), 250, check)
    assert len(place.seen) >= 0.95 * 250
    assert set(place.codes) == {0, 2}


@pytest.mark.parametrize(("command", "examples"), [("profile", 500), ("plan", 100)])
def test_recipe(field: Callable[[], Range], command: str, examples: int) -> None:
    place = field()
    save_tiny("gpt2", place.root / "model")
    keys = ["seq_len", "calib_tokens", "select_tokens", "verify_tokens"]
    base = {"model": "model", "max_dppl": "20%", "confidence": 0.9, "seed": 1, "swap": False}
    base |= dict(zip(keys, map(int, QUICK[1::2]), strict=True))
    base |= {
        "batch_size": 4,
        "tasks": [],
        "generate": 0,
        "device": "cpu",
        "dtype": "float32",
        "text": {"a": ["text.txt"]},
    }
    output = {"profile": ["--json"], "plan": ["--out", "out"]}[command]

    def check(content: bytes) -> None:
        (place.root / "recipe.yaml").write_bytes(content)
        place.run(content, command, "--recipe", "recipe.yaml", "--no-cache", *output)

    fuzz(spoiled(base, list(Recipe.model_fields), yaml.safe_dump), examples, check)
    assert len(place.seen) >= 0.95 * examples
    assert {0, 2} <= set(place.codes)


@pytest.mark.parametrize(("budget", "examples"), [("0.0001%", 280), ("50%", 20)])
def test_plan(field: Callable[[], Range], compress: Compress, budget: str, examples: int) -> None:
    """Most plans miss their budget, for what is measured and written after that takes time."""
    place = field()
    save_tiny("gpt2", place.root / "model")
    file = place.root / "plan.json"
    made = compress("plan", "model", "--text", "text.txt", *QUICK, "--max-dppl", "50%", "--out", file)
    assert made.code == 0, made.err
    base = json.loads(file.read_text(encoding="utf-8"))
    base["recipe"]["max_dppl"] = budget

    def check(content: bytes) -> None:
        file.write_bytes(content)
        place.run(content, "apply", "model", "plan.json", "--out", "out", "--generate", "0")

    fuzz(spoiled(base, ["compensated", "recipe", "extra"]), examples, check)
    assert len(place.seen) >= 0.95 * examples
    assert set(place.codes) >= ({1, 2} if examples > 100 else {0, 2})


def test_record(field: Callable[[], Range], compressed: Path) -> None:
    """compression.json, as `info` shows it."""
    place = field()
    shutil.copytree(compressed, place.root / "made")
    file = place.root / "made" / "compression.json"

    def check(content: bytes) -> None:
        file.write_bytes(content)
        place.run(content, "info", "made")

    fuzz(spoiled(json.loads(file.read_text(encoding="utf-8")), ["perplexity", "texts", "tasks", "budget"]), 200, check)
    assert len(place.seen) >= 180
    assert set(place.codes) == {0, 2}
