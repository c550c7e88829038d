"""Thousands of spoiled inputs: each is read, or refused with one line; nothing is written elsewhere.

Most cases call, in this process, the functions that read the file (the entry points below). Some cases of every kind go
through the whole command, which shows that the line reaches the user and that nothing is left behind.
"""

from __future__ import annotations

import io
import itertools
import json
import resource
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from pathlib import Path

import huggingface_hub
import pytest
import torch
import yaml
from conftest import Compress, Outcome, sentences, tree
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutation import spoiled
from safetensors.torch import load_file, save_file
from zoo import save_tiny

from compressor.measure.profile import measure
from compressor.models.blocks import find_blocks
from compressor.models.load import load_model
from compressor.models.safetensors_files import find_shards, list_tensors
from compressor.models.source import context_length
from compressor.patch.checkpoint import refuse_foreign_code
from compressor.pipelines import apply
from compressor.pipelines import recipe as recipes
from compressor.pipelines.recipe import Recipe
from compressor.report import tables
from compressor.report.page import page
from compressor.report.record import Record, read_record
from compressor.runtime.context import RunContext
from compressor.runtime.errors import DONE, InputError, report_error
from compressor.text import Split, Text

WEIGHTS, INDEX, NOWHERE = "model.safetensors", "model.safetensors.index.json", "./nowhere"
SECONDS = 20  # for the slowest single input
MEMORY = 3 * 2**20  # KiB that all of them together may add
QUICK = ["--seq-len", "16", "--calib-tokens", "160", "--select-tokens", "32", "--verify-tokens", "64"]
PROFILE = ["profile", "model", "--text", "text.txt", *QUICK, "--no-swap", "--json", "--no-cache"]
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


FEW = Text(*(Split(torch.arange(1, 1 + count * 16).view(count, 16) % 250, "made up") for count in (5, 1, 1)))


TURNS = itertools.count()


# The entry points: what reads each kind of file. InputError, or nothing.


def read_config() -> None:
    """Everything before the text; and a model that was let in can be measured."""
    model, _ = load_model("model")
    find_blocks(model)
    refuse_foreign_code(model)
    context = context_length(model)
    if context is None or context >= FEW.seq_len:
        measure(model, FEW)


def read_index() -> None:
    list_tensors(find_shards(Path("model"), "model", None), "model")


def read_recipe() -> None:
    recipe = recipes.resolve(Path("recipe.yaml"), {})
    recipes.dump(recipe, "header")
    if recipe.max_dppl:
        recipe.budgets(["text"])


def read_plan() -> None:
    """Everything that `apply` does before it looks for the model, which is not there; and the report that it writes."""
    asked = recipes.resolve(None, {"model": NOWHERE, "out": "out", "generate": 0})
    try:
        apply.run(asked, Path("plan.json"), RunContext())
    except InputError as error:
        if not str(error).startswith(f"directory {NOWHERE!r} does not exist"):
            raise
        if next(TURNS) % 12 == 0:  # a page takes half a second
            page(apply.read_plan(Path("plan.json")))


def read_info() -> None:
    record = read_record(Path("made"))
    tables.info_lines(record)
    if isinstance(record, Record):
        tables.block_table(record)


def outcome(read: Callable[[], None]) -> Outcome:
    """What the user would see of a function that reads a file."""
    err = io.StringIO()
    code = DONE
    with redirect_stderr(err):
        try:
            read()
        except Exception as error:
            code = report_error(error)
    return Outcome(code, "", err.getvalue())


class Range:
    """A working directory in which one file after another is spoiled, and what each run must leave as it was."""

    def __init__(self, root: Path, compress: Compress) -> None:
        self.root, self.compress = root, compress
        self.watched = root.parent.parent  # where `../..` leads
        self.seen: set[bytes] = set()
        self.codes: Counter[int] = Counter()
        self.slowest = 0.0

    def run(self, content: bytes, call: Callable[[], Outcome]) -> None:
        began = time.monotonic()
        done = call()
        self.slowest = max(self.slowest, time.monotonic() - began)
        self.seen.add(content)
        self.codes[done.code] += 1
        assert done.code in (0, 1, 2), done.err
        assert "Traceback" not in done.err, done.err
        assert len(done.errors) == (done.code != 0), done.err
        assert not any(line.startswith("error: unexpected") for line in done.errors), done.errors
        assert not any(c < " " for line in done.errors for c in line), done.errors

    def command(self, content: bytes, *arguments: str) -> None:
        before = tree(self.watched)
        self.run(content, lambda: self.compress(*arguments))
        out = self.root / "out"
        shutil.rmtree(out) if out.is_dir() else out.unlink(missing_ok=True)
        after = tree(self.watched)
        assert after == before, sorted(set(after) ^ set(before))

    def fuzz(
        self,
        file: str,
        contents: st.SearchStrategy[bytes],
        read: Callable[[], None],
        command: list[str],
        *,
        cases: int,
        commands: int,
    ) -> None:
        """The same inputs on every machine; so many cases in process, then so many whole commands."""
        before = tree(self.watched)
        original = (self.root / file).read_bytes() if (self.root / file).exists() else None
        numbers = itertools.count()

        @settings(
            max_examples=cases + commands,
            derandomize=True,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(contents)
        def each(content: bytes) -> None:
            (self.root / file).write_bytes(content)
            if next(numbers) < cases:
                self.run(content, lambda: outcome(read))
            else:
                self.command(content, *command)

        each()
        assert len(self.seen) >= 0.9 * (cases + commands)  # chance repeats a few
        if original is None:
            (self.root / file).unlink()
        else:
            (self.root / file).write_bytes(original)
        assert tree(self.watched) == before


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


@pytest.mark.parametrize(
    ("family", "cases", "commands"),
    [("gpt2", 320, 30), ("llama", 320, 30), ("gpt_neo", 90, 10), ("mpt", 90, 10), ("opt", 90, 10)],
)
def test_config(field: Callable[[], Range], family: str, cases: int, commands: int) -> None:
    place = field()
    save_tiny(family, place.root / "model")
    base = json.loads((place.root / "model/config.json").read_text(encoding="utf-8"))
    contents = spoiled(base, CONFIG_KEYS)
    place.fuzz("model/config.json", contents, read_config, PROFILE, cases=cases, commands=commands)
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
    contents = spoiled({"metadata": {"total_size": 1}, "weight_map": table}, ["weight_map", "metadata"])
    place.fuzz(f"model/{INDEX}", contents, read_index, PROFILE, cases=220, commands=30)
    assert set(place.codes) == {0, 2}


@pytest.mark.parametrize(("command", "cases", "commands"), [("profile", 500, 60), ("plan", 0, 40)])
def test_recipe(field: Callable[[], Range], command: str, cases: int, commands: int) -> None:
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
    words = [command, "--recipe", "recipe.yaml", "--no-cache", *output]
    contents = spoiled(base, list(Recipe.model_fields), yaml.safe_dump)
    place.fuzz("recipe.yaml", contents, read_recipe, words, cases=cases, commands=commands)
    assert {0, 2} <= set(place.codes)


@pytest.mark.parametrize(("budget", "cases", "commands"), [("0.0001%", 280, 20), ("50%", 0, 8)])
def test_plan(field: Callable[[], Range], compress: Compress, budget: str, cases: int, commands: int) -> None:
    """Most plans miss their budget, for what is measured and written after that takes time."""
    place = field()
    save_tiny("gpt2", place.root / "model")
    file = place.root / "plan.json"
    made = compress("plan", "model", "--text", "text.txt", *QUICK, "--max-dppl", "50%", "--out", file)
    assert made.code == 0, made.err
    base = json.loads(file.read_text(encoding="utf-8"))
    base["recipe"]["max_dppl"] = budget
    words = ["apply", "model", "plan.json", "--out", "out", "--generate", "0"]
    file.write_text(json.dumps(base), encoding="utf-8")
    place.command(b"as it was written", *words)
    contents = spoiled(base, ["compensated", "recipe", "extra"])
    place.fuzz("plan.json", contents, read_plan, words, cases=cases, commands=commands)
    assert set(place.codes) >= ({0, 1, 2} if cases else {0, 2})


def test_record(field: Callable[[], Range], compressed: Path) -> None:
    """compression.json, as `info` shows it."""
    place = field()
    shutil.copytree(compressed, place.root / "made")
    base = json.loads((place.root / "made/compression.json").read_text(encoding="utf-8"))
    contents = spoiled(base, ["perplexity", "texts", "tasks", "budget"])
    place.fuzz("made/compression.json", contents, read_info, ["info", "made"], cases=170, commands=30)
    assert set(place.codes) == {0, 2}
