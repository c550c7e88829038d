"""Input that means harm: bombs, lies, pickles, code, and names that would break out of a page or a terminal."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import struct
import time
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import datasets
import pytest
import torch
from conftest import SMALL, Compress, Refused, sentences
from localtasks import write_task
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from zoo import FAMILIES, save_tiny, tiny_model, tiny_tokenizer

from compressor.models import config_check
from compressor.models.safetensors_files import StoredTensor, list_tensors
from compressor.runtime.errors import InputError
from compressor.runtime.safe_files import DEPTH, JSON_BYTES, YAML_BYTES

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
QUICK = ["--seq-len", "16", "--calib-tokens", "160", "--select-tokens", "32", "--verify-tokens", "64"]
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
MERGES = "a: &a {x: 1}\nb: &b {<<: [*a, *a]}\n"
NESTED = "[" * 5000 + "]" * 5000


@pytest.fixture
def spoiled(models: Path, tmp_path: Path) -> Path:
    """A copy of a sound model for a test to spoil."""
    return Path(shutil.copytree(models / "gpt2", tmp_path / "spoiled"))


@pytest.fixture
def profile(refused: Refused, corpus: Path) -> Callable[[Path], str]:
    """What `compress profile` says of a model that it refuses; it takes no time and writes nothing."""

    def run(model: Path) -> str:
        began = time.monotonic()
        message = refused("profile", model, "--text", corpus, *QUICK, "--no-swap")
        assert time.monotonic() - began < 10
        return message

    return run


Profile = Callable[[Path], str]


def configure(model: Path, **values: Any) -> None:
    config = json.loads((model / CONFIG).read_text(encoding="utf-8"))
    (model / CONFIG).write_text(json.dumps(config | values), encoding="utf-8")


# config.json


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"model_type": "gpt2", "model_type": "llama"}', "key 'model_type' stands twice"),
        ('{"model_type": "gpt2", "a": {"b": 1, "b": 1}}', "key 'b' stands twice"),
        ('{"model_type": "gpt2", "n_layer": NaN}', "NaN is not a number"),
        ('{"model_type": "gpt2", "n_layer": ' + "9" * 5000 + "}", "cannot be read"),
        ('{"model_type": "gpt2", "a": ' + NESTED + "}", "cannot be read"),
        ('{"model_type": "gpt2", "a": ' + "[" * DEPTH + "]" * DEPTH + "}", f"nested more than {DEPTH} deep"),
        ('{"model_type": "\\ud800"}', "half a character"),
        ('{"a": "' + "x" * config_check.CONFIG_BYTES + '"}', f"larger than {config_check.CONFIG_BYTES:,} bytes"),
    ],
)
def test_config_that_is_no_honest_json(profile: Profile, spoiled: Path, content: str, says: str) -> None:
    (spoiled / CONFIG).write_text(content, encoding="utf-8")
    message = profile(spoiled)
    assert "config.json" in message
    assert says in message


@pytest.mark.parametrize("number", [2**27 + 1, 10**12, 10**40])
@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("gpt2", "n_layer"),
        ("gpt2", "num_labels"),
        ("gpt2", "n_positions"),
        ("gpt2", "vocab_size"),
        ("gpt2", "n_embd"),
        ("gpt2", "n_inner"),
        ("gpt2", "n_head"),
        ("llama", "num_hidden_layers"),
        ("llama", "num_key_value_heads"),
        ("llama", "head_dim"),
        ("llama", "intermediate_size"),
        ("gpt_neo", "max_position_embeddings"),
        ("gptj", "n_positions"),
        ("mpt", "max_seq_len"),
        ("opt", "word_embed_proj_dim"),
        ("opt", "max_position_embeddings"),
        ("xglm", "max_position_embeddings"),
        ("mixtral", "num_local_experts"),
        ("gemma3", "num_hidden_layers"),
    ],
)
def test_absurd_number(profile: Profile, tmp_path: Path, family: str, key: str, number: int) -> None:
    save_tiny(family, tmp_path / "model")
    configure(tmp_path / "model", **{key: number})
    assert "model" in profile(tmp_path / "model")


def test_a_list_that_is_made_of_a_number_in_it(profile: Profile, tmp_path: Path) -> None:
    save_tiny("gpt_neo", tmp_path / "model")
    configure(tmp_path / "model", attention_types=[[["global"], 10**10]])
    assert "sets attention_types to 10000000000; no model has more" in profile(tmp_path / "model")


def test_more_layers_than_tensors(profile: Profile, spoiled: Path) -> None:
    configure(spoiled, n_layer=50_000)
    assert "sets n_layer to 50000, but its weights are only" in profile(spoiled)


def test_tables_that_no_file_holds(profile: Profile, tmp_path: Path) -> None:
    """Three masks of 10^5 × 10^5 positions would be 30 GB; the stored table of positions is made to fit."""
    save_tiny("gpt_neo", tmp_path / "model")
    configure(tmp_path / "model", max_position_embeddings=100_000)
    weights = load_file(tmp_path / "model" / WEIGHTS)
    weights["transformer.wpe.weight"] = torch.zeros(100_000, 32)
    save_file(weights, tmp_path / "model" / WEIGHTS, metadata={"format": "pt"})
    assert "describes a model of 3e+10 numbers, but its weights hold 3" in profile(tmp_path / "model")


@pytest.mark.parametrize(
    "values",
    [
        {"n_layer": "three"},
        {"n_layer": -1},
        {"n_layer": 0},
        {"n_layer": None},
        {"n_layer": [3]},
        {"activation_function": "magic"},
        {"dtype": "float99"},
        {"dtype": 5},
        {"quantization_config": 7},
        {"quantization_config": {"quant_method": "compressor", "replacements": 5}},
        {"quantization_config": ["compressor"]},
        {"return_dict": False},
        {"layer_norm_epsilon": "small"},
        {"n_head": 5},
        {"_attn_implementation": "kernels/evil"},
        {"attn_implementation": {"": "../evil"}},
    ],
)
def test_nonsense_in_a_config(profile: Profile, spoiled: Path, values: dict[str, Any]) -> None:
    configure(spoiled, **values)
    profile(spoiled)


@pytest.mark.parametrize(
    "values",
    [
        {"rope_parameters": {"rope_type": "magic", "rope_theta": 1e4}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": "much"}},
        {"rope_parameters": 5},
        {"head_dim": 7},
    ],
)
def test_nonsense_about_positions(profile: Profile, tmp_path: Path, values: dict[str, Any]) -> None:
    save_tiny("llama", tmp_path / "model")
    configure(tmp_path / "model", **values)
    profile(tmp_path / "model")


@pytest.mark.parametrize(
    "values",
    [{"architectures": "<b>"}, {"architectures": [5]}, {"_name_or_path": "/etc"}, {"torch_dtype": ["float32"]}],
)
def test_what_nobody_reads(compress: Compress, spoiled: Path, corpus: Path, values: dict[str, Any]) -> None:
    configure(spoiled, **values)
    done = compress("profile", spoiled, "--text", corpus, *QUICK, "--no-swap", "--json")
    assert done.code in (0, 2)
    assert len(done.errors) == done.code // 2
    assert "unexpected" not in done.err


@pytest.mark.parametrize("family", FAMILIES)
def test_scrutiny_knows_the_size_of_every_family(family: str, tmp_path: Path) -> None:
    """Sound models pass, the size is that of the parameters in memory and a little, and no dice are thrown."""
    tiny_model(family).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / CONFIG).read_text(encoding="utf-8"))
    stored = list_tensors([tmp_path / WEIGHTS], "it")
    before = torch.get_rng_state()
    size = config_check.check_config_fits(AutoConfig.from_pretrained(tmp_path), raw, stored, "it")
    assert torch.equal(torch.get_rng_state(), before)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert size == sum(t.numel() for t in (*loaded.parameters(), *loaded.buffers()))


def test_scrutiny_compares_with_and_without_the_prefix(models: Path) -> None:
    config = AutoConfig.from_pretrained(models / "gpt2")
    for name in ("transformer.wte.weight", "wte.weight"):
        stored = {name: StoredTensor(Path("file"), torch.Size([300, 31]), torch.float32)}
        with pytest.raises(InputError, match=re.escape("wte.weight is [300, 31], config.json says [300, 32]")):
            config_check.check_config_fits(config, {}, stored, "it")


# The weights and their index


def header(tensors: dict[str, Any] | bytes, data: int, length: int | None = None) -> bytes:
    text = tensors if isinstance(tensors, bytes) else json.dumps(tensors).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + b"\0" * data


def tensor(shape: list[int], start: int, stop: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, stop]}


TWICE = b'{"a": %s, "a": %s}' % ((json.dumps(tensor([2], 0, 8)).encode(),) * 2)


@pytest.mark.parametrize(
    "content",
    [
        header({"a": tensor([3], 0, 8)}, 8),
        header({"a": tensor([2], 0, 16)}, 8),
        header({"a": tensor([2], 8, 0)}, 8),
        header({"a": tensor([-2], 0, 8)}, 8),
        header({"a": tensor([2], 0, 8), "b": tensor([2], 4, 12)}, 12),
        header({"a": tensor([2], 0, 8), "b": tensor([2], 16, 24)}, 24),
        header({"a": tensor([2], 0, 8)}, 800),
        header({"a": tensor([2**40], 0, 2**42)}, 8),
        header({"a": tensor([2**62, 2**62], 0, 8)}, 8),
        header({}, 0, 2**63),
        header({}, 0, 2**31),
        header(NESTED.encode(), 0),
        header(TWICE, 8),
    ],
    ids=[
        "shape",
        "beyond",
        "backwards",
        "negative",
        "overlap",
        "hole",
        "rest",
        "huge",
        "overflow",
        "length-huge",
        "length-long",
        "deep",
        "twice",
    ],
)
def test_header_that_lies(profile: Profile, spoiled: Path, content: bytes) -> None:
    (spoiled / WEIGHTS).write_bytes(content)
    assert f"{WEIGHTS} of {spoiled} is damaged" in profile(spoiled)


@pytest.fixture
def sharded(spoiled: Path) -> Path:
    """The model in two files and an index."""
    weights = load_file(spoiled / WEIGHTS)
    (spoiled / WEIGHTS).unlink()
    names = sorted(weights)
    table = {}
    for number, part in enumerate((names[:9], names[9:])):
        file = f"part-{number}.safetensors"
        save_file({name: weights[name] for name in part}, spoiled / file, metadata={"format": "pt"})
        table |= dict.fromkeys(part, file)
    (spoiled / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": table}), encoding="utf-8")
    return spoiled


def remap(model: Path, **table: str) -> None:
    index = json.loads((model / INDEX).read_text(encoding="utf-8"))
    index["weight_map"] |= table
    (model / INDEX).write_text(json.dumps(index), encoding="utf-8")


def test_sharded_model_is_sound(compress: Compress, sharded: Path, corpus: Path) -> None:
    """The ones below are refused for what is changed in them, and nothing else."""
    assert compress("profile", sharded, "--text", corpus, *QUICK, "--no-swap", "--json").code == 0


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../part-0.safetensors", "deep/part-0.safetensors", "..\\part-0.safetensors"]
)
def test_index_that_leads_outside(profile: Profile, sharded: Path, name: str) -> None:
    remap(sharded, extra=name)
    assert f"names {name!r}, which is outside the directory" in profile(sharded)


@pytest.mark.parametrize("name", ["part-0.bin", "*.safetensors", "part-[0].safetensors", "", "..", "a\0.safetensors\0"])
def test_index_of_other_files(profile: Profile, sharded: Path, name: str) -> None:
    (sharded / "part-0.bin").write_bytes((sharded / "part-0.safetensors").read_bytes())
    remap(sharded, extra=name)
    assert INDEX in profile(sharded)


def test_index_that_is_wrong(profile: Profile, sharded: Path) -> None:
    remap(sharded, **{"transformer.wte.weight": "part-0.safetensors"})
    says = f"{INDEX} of {sharded} puts transformer.wte.weight into part-0.safetensors, which does not hold it"
    assert says in profile(sharded)


def test_index_with_a_key_twice(profile: Profile, sharded: Path) -> None:
    text = (sharded / INDEX).read_text(encoding="utf-8")
    (sharded / INDEX).write_text(text.replace('"weight_map": {', '"weight_map": {}, "weight_map": {'), encoding="utf-8")
    assert "key 'weight_map' stands twice" in profile(sharded)


def test_tensor_in_two_files(profile: Profile, sharded: Path) -> None:
    one = load_file(sharded / "part-0.safetensors")
    name = next(iter(load_file(sharded / "part-1.safetensors")))
    save_file({**one, name: torch.zeros(2)}, sharded / "part-0.safetensors", metadata={"format": "pt"})
    assert f"has {name} in part-0.safetensors and in part-1.safetensors" in profile(sharded)


class Mine:
    """Unpickling it leaves a mark."""

    def __init__(self, file: Path) -> None:
        self.file = str(file)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.file,)


def test_no_pickle_is_loaded(compress: Compress, spoiled: Path, corpus: Path, tmp_path: Path) -> None:
    """Whatever pickles lie beside the weights."""
    mark = tmp_path / "ran"
    for name in ("pytorch_model.bin", "model.pt", "training_args.bin", "adapter_model.bin", "optimizer.pt"):
        (spoiled / name).write_bytes(pickle.dumps(Mine(mark)))
    done = compress("profile", spoiled, "--text", corpus, *QUICK, "--no-swap", "--json")
    assert done.code == 0, done.err
    assert not mark.exists()
    pickle.loads((spoiled / "model.pt").read_bytes())
    assert mark.exists()  # it would have


@pytest.mark.parametrize("place", ["code.Evil", "someone/repo--code.Evil"])
def test_code_of_a_known_type_is_not_run(
    compress: Compress, spoiled: Path, corpus: Path, tmp_path: Path, place: str
) -> None:
    (spoiled / "code.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\n", encoding="utf-8")
    configure(spoiled, auto_map={"AutoConfig": place, "AutoModelForCausalLM": place, "AutoTokenizer": [place, place]})
    done = compress("profile", spoiled, "--text", corpus, *QUICK, "--no-swap", "--json")
    assert done.code in (0, 2), done.err
    assert "unexpected" not in done.err
    assert not (tmp_path / "ran").exists()


def test_adapter_that_names_another_model(profile: Profile, spoiled: Path) -> None:
    content = {"base_model_name_or_path": "/somewhere/else", "peft_type": "LORA"}
    (spoiled / "adapter_config.json").write_text(json.dumps(content), encoding="utf-8")
    assert "has adapter_config.json; merge the adapter" in profile(spoiled)


# YAML and records


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (BOMB, "*a is an alias; write it out"),
        (MERGES, "*a is an alias; write it out"),
        ("seed: &a [*a]\n", "*a is an alias"),
        ("seed: !!python/object/apply:os.mkdir [ran]\n", "could not determine a constructor"),
        ("seed: !!python/name:os.system\n", "could not determine a constructor"),
        ("seed: " + NESTED, "is not valid YAML"),
        ("seed: 1\nseed: 2\n", "(line 2): key 'seed' stands twice"),
        ("seed: " + "9" * 5000, "is not valid YAML"),
        ("seed: 2001-13-01\n", "is not valid YAML"),
        ("? [a]\n: 1\n", "is not valid YAML"),
        ("#" * YAML_BYTES + "\n", f"larger than {YAML_BYTES:,} bytes"),
        ('model: "\\ud800"\n', "half a character"),
        ("probe_steps: 1000000000000\n", "probe_steps"),
    ],
)
def test_recipe_bomb(
    refused: Refused,
    models: Path,
    tmp_path: Path,
    compressed: Path,
    content: str,
    says: str,
) -> None:
    """As a file that is given, and as the one in a checkpoint."""
    file = tmp_path / "recipe.yaml"
    file.write_text(content, encoding="utf-8")
    assert says in refused(models / "gpt2", "--recipe", file, "--out", "out")
    damaged = shutil.copytree(compressed, tmp_path / "damaged")
    shutil.copy(file, damaged)
    assert says in refused("check", damaged)


@pytest.mark.parametrize("content", [BOMB, "task: mine\na: !!python/name:os.system\n", "task: mine\na: " + NESTED])
def test_task_bomb(refused: Refused, models: Path, options: list[str], tmp_path: Path, content: str) -> None:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "mine.yaml").write_text(content, encoding="utf-8")
    tasks = ["--tasks", "mine", "--task-path", tmp_path / "tasks"]
    message = refused(models / "gpt2", *options, "--max-dppl", "5%", "--out", "out", *tasks)
    assert f"task file {tmp_path / 'tasks' / 'mine.yaml'} is not valid YAML" in message


@pytest.mark.parametrize("content", ['{"a": 1, "a": 2}', "[" * 99 + "]" * 99, '{"a": NaN}', " " * (JSON_BYTES + 1)])
def test_record_bomb(refused: Refused, models: Path, compressed: Path, tmp_path: Path, content: str) -> None:
    """A plan, a baseline and the record of a checkpoint are read alike."""
    file = tmp_path / "record.json"
    file.write_text(content, encoding="utf-8")
    assert "is not valid JSON" in refused("apply", models / "gpt2", file, "--out", "out")
    assert "is not a baseline" in refused("check", compressed, "--baseline", file)
    damaged = shutil.copytree(compressed, tmp_path / "damaged")
    shutil.copy(file, damaged / "compression.json")
    assert "cannot be read" in refused("info", damaged)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"width": 10**9}, "do not fit its config: transformer.h."),
        ({"width": -1}, "config.json of"),
        ({"neurons": 10**9, "kind": "hybrid", "activation": "gelu_new"}, "config.json of"),
        ({"rank": "all"}, "config.json of"),
        ({"bypass": 5}, "config.json of"),
        ({"activation": "magic"}, "config.json of"),
    ],
)
def test_replacement_that_lies(
    refused: Refused, compressed: Path, tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    damaged = Path(shutil.copytree(compressed, tmp_path / "damaged"))
    quantization = json.loads((damaged / CONFIG).read_text(encoding="utf-8"))["quantization_config"]
    next(iter(quantization["replacements"].values())).update(change)
    configure(damaged, quantization_config=quantization)
    assert says in refused("check", damaged)


def test_plan_does_not_speak_for_this_run(compress: Compress, models: Path, compressed: Path, tmp_path: Path) -> None:
    """Who made the checkpoint, from what and on what text is what `apply` did, not what the plan says."""
    plan = json.loads((compressed / "compression.json").read_text(encoding="utf-8"))
    truth = {key: plan[key] for key in ("tool", "source", "text", "environment")}
    plan["tool"] = {"name": "x", "version": "<script>alert(1)</script>"}
    plan["source"] = {**plan["source"], "model": "[other](http://x)"}
    plan["environment"], plan["text"] = {"torch": "<b>"}, {"verification": {"source": "<b>", "sha256": "0"}}
    (tmp_path / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    done = compress("apply", models / "gpt2", tmp_path / "plan.json", "--out", tmp_path / "out", "--generate", "0")
    assert done.code == 0, done.err
    written = json.loads((tmp_path / "out" / "compression.json").read_text(encoding="utf-8"))
    assert {key: written[key] for key in truth} == truth


# Names that break out


class Tags(HTMLParser):
    """The names of all elements, and of all their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.attributes: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append(tag)
        self.attributes |= {name for name, _ in attrs}


EVIL = '"><img src=x onerror=alert(1)><script>x|`[a](http:x)\n# b\x1b[31m\x9b2J\u202e'


def test_names_do_not_break_out(
    compress: Compress, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole job and the check of it, with a hostile model, text, content and task."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
    model, text = tmp_path / f"model {EVIL}", tmp_path / f"text {EVIL}.txt"
    save_tiny("gpt2", model)
    content = sentences(1200).replace("me", "<script>alert(1)</script>").replace("sea", '"><img onerror=x>\x1b[31m')
    text.write_text(content, encoding="utf-8")
    task = 'my<script>"><img onerror=x>|`task`\x1b[31m\x01'
    documents = [{"question": f"<script>{n}\x1b", "choices": ["ago", "sea"], "label": n % 2} for n in range(8)]
    folder = write_task(tmp_path / "tasks", "mine", documents, task=task).parent
    out, junit, summary = tmp_path / "out", tmp_path / "junit.xml", tmp_path / "summary.md"
    tasks = ["--tasks", task, "--task-path", folder, "--max-task-drop", "1"]
    done = compress(model, "--text", text, *SMALL, *tasks, "--max-dppl", "50%", "--generate", "4", "--out", out)
    assert done.code == 0, done.err
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    check = ["check", out, "--task-path", folder, "--junit", junit, "--report", tmp_path / "check.html"]
    checked = compress(*check, "--source", model)
    assert checked.code == 0, checked.err
    told = compress("info", out)
    printed = compress(*check, "--source", model, "--json")
    for outcome in (done, checked, told, printed):
        for stream in (outcome.out, outcome.err):
            assert not set(stream) & {chr(c) for c in (*range(9), *range(11, 32), *range(127, 160), 0x202E)}
    assert not any(line.startswith("# b") for line in (done.out + done.err + checked.out + checked.err).splitlines())
    assert json.loads(printed.out)["source"]["model"] == str(model)
    for page in (out / "report.html", tmp_path / "check.html"):
        tags = Tags(page.read_text(encoding="utf-8"))
        assert tags.found.count("script") == 1
        assert "img" not in tags.found
        assert not any(name.startswith("on") for name in tags.attributes)
    for figure in (out / "figures").glob("*.svg"):
        assert not any("script" in str(element.tag) for element in ElementTree.parse(figure).iter())
    ElementTree.parse(junit)
    for file in (out / "README.md", summary):
        markdown = file.read_text(encoding="utf-8")
        assert not re.search(r"(?<!\\)<(script|img)", markdown)
        assert not re.search(r"(?<!\\)\]\(http:x", markdown)
        assert "\n# b" not in markdown
        assert "\x1b" not in markdown
        assert "\\<script\\>" in markdown


def test_error_lines_hold_no_controls(refused: Refused) -> None:
    message = refused("./\x1b[31m\x9bno\nwhere\u202e", "--max-dppl", "1", "--out", "out")
    assert "./␛[31m�no\\nwhere" in message or "\\x1b[31m" in message
    assert message.isprintable()


def test_error_lines_end(refused: Refused) -> None:
    assert len(refused("./" + "x" * 20_000, "--max-dppl", "1", "--out", "out")) < 2100


def test_names_that_are_no_utf8(refused: Refused, models: Path) -> None:
    message = refused(models / "gpt2", "--text", "caf\udce9.txt", "--max-dppl", "1", "--out", "out")
    assert r"'caf\udce9.txt' is not UTF-8; rename" in message


# Tokenizers and windows


def bare_tokenizer() -> PreTrainedTokenizerFast:
    """No token for padding, beginning or end."""
    backend: Tokenizer = tiny_tokenizer().backend_tokenizer
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_tokenizer_without_special_tokens(
    compress: Compress, spoiled: Path, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole job: texts, a task that compares, and continuations; a task that writes is refused by name."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    for file in (*spoiled.glob("tokenizer*"), *spoiled.glob("special_tokens*"), *spoiled.glob("chat_template*")):
        file.unlink()
    tokenizer = bare_tokenizer()
    assert (tokenizer.pad_token, tokenizer.bos_token, tokenizer.eos_token) == (None, None, None)
    tokenizer.save_pretrained(spoiled)
    documents = [{"question": f"Some {'years ' * n}", "choices": ["ago", "the sea"], "label": n % 2} for n in range(9)]
    write_task(tmp_path / "tasks", "mine", documents)
    tasks = ["--tasks", "mine", "--task-path", tmp_path / "tasks", "--generate", "4"]
    done = compress(spoiled, *options, *tasks, "--max-dppl", "50%", "--out", tmp_path / "out")
    assert done.code == 0, done.err
    record = json.loads((tmp_path / "out" / "compression.json").read_text(encoding="utf-8"))
    assert record["tasks"]["mine"]["documents"] == 9
    assert record["generation"]["tokens"] == 4
    written = {"output_type": "generate_until", "doc_to_target": "{{choices[label]}}", "doc_to_choice": None}
    match = {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}
    write_task(tmp_path / "tasks", "mine", documents, **written, metric_list=[match])
    done = compress(spoiled, *options, *tasks, "--max-dppl", "50%", "--out", tmp_path / "other")
    assert done.code == 2
    assert "task mine writes until the end, but the tokenizer has no eos_token; give it one" in done.errors[0]


def test_tokenizer_larger_than_the_embeddings(profile: Profile, spoiled: Path) -> None:
    """Though neither the sentence that it is tried on nor the text needs its last token."""
    file = spoiled / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    content["model"]["vocab"]["never"] = 300
    file.write_text(json.dumps(content), encoding="utf-8")
    assert f"the tokenizer of {spoiled} has tokens up to 300, but the model has 300 embeddings" in profile(spoiled)


def test_added_token_without_an_embedding(compress: Compress, spoiled: Path, corpus: Path) -> None:
    """A padding token that nobody trained is common, and does no harm until a text holds it."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<padding>"})
    assert tokenizer.pad_token_id == 300
    tokenizer.save_pretrained(spoiled)
    done = compress("profile", spoiled, "--text", corpus, *QUICK, "--no-swap", "--json")
    assert done.code == 0, done.err


def test_windows_of_two_tokens(compress: Compress, models: Path, corpus: Path, tmp_path: Path) -> None:
    tokens = ["--calib-tokens", "2000", "--select-tokens", "200", "--verify-tokens", "400", "--seq-len", "2"]
    done = compress(models / "gpt2", "--text", corpus, *tokens, "--max-dppl", "50%", "--out", tmp_path / "out")
    assert done.code in (0, 1), done.err
    assert "unexpected" not in done.err
    assert len(done.errors) == done.code


def test_windows_of_one_token(refused: Refused, models: Path, corpus: Path) -> None:
    message = refused(models / "gpt2", "--text", corpus, "--seq-len", "1", "--max-dppl", "1", "--out", "out")
    assert "seq_len: Input should be greater than or equal to 2, got 1" in message


def test_text_of_one_line(compress: Compress, refused: Refused, models: Path, tmp_path: Path) -> None:
    file = tmp_path / "line.txt"
    file.write_text(" ".join(sentences(300).split()), encoding="utf-8")
    done = compress("profile", models / "gpt2", "--text", file, *QUICK, "--no-swap", "--json")
    assert done.code == 0, done.err
    file.write_text("word", encoding="utf-8")
    assert "is too short" in refused("profile", models / "gpt2", "--text", file, *QUICK)
    file.write_text("\n", encoding="utf-8")
    assert "is empty" in refused("profile", models / "gpt2", "--text", file, *QUICK)
