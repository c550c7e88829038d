"""Every bad input: exit code 2, one `error:` line that says what to do, no traceback, and nothing written."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pytest
import torch
from conftest import SMALL, Compress, Refused, sentences
from localtasks import write_lines, write_task, write_yaml
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"
RECORD = "compression.json"


@pytest.fixture
def whole(refused: Refused, models: Path, options: list[str]) -> Refused:
    """The whole job on a sound model, with these arguments more (the last value of an option counts)."""

    def run(*arguments: str | Path, model: str | Path = models / "gpt2") -> str:
        return refused(model, *options, "--max-dppl", "5%", "--out", "out", *arguments)

    return run


@pytest.fixture
def spoiled(models: Path, tmp_path: Path) -> Path:
    """A copy of a sound model for a test to spoil."""
    return Path(shutil.copytree(models / "gpt2", tmp_path / "spoiled"))


# The model


def test_missing_directory(whole: Refused) -> None:
    assert "directory './nowhere' does not exist; give a directory" in whole(model="./nowhere")
    assert "/no/such/place" in whole(model="/no/such/place")


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://hub.invalid")  # a name that never resolves
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", "http://hub.invalid")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")


@pytest.mark.usefixtures("no_network")
def test_hub_id_without_network(whole: Refused) -> None:
    start = time.monotonic()
    message = whole(model="someone/model")
    assert time.monotonic() - start < 10
    assert "'someone/model'" in message
    assert "give a local directory, or `demo`" in message


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("name", ["wikitext2", "hub:someone/texts:small"])
def test_hub_text_without_network(refused: Refused, models: Path, name: str) -> None:
    start = time.monotonic()
    message = refused(models / "gpt2", *SMALL, "--text", name, "--max-dppl", "5%", "--out", "out")
    assert time.monotonic() - start < 10
    assert "is not in the local cache, and the Hugging Face Hub cannot be reached" in message
    assert "--text PATH" in message
    assert "--text demo" in message
    assert ("someone/texts" if name == "hub:someone/texts:small" else "Salesforce/wikitext") in message


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(("memory", "name"), [([], "self"), (["--low-memory"], "mix")])
def test_no_text_without_network(
    compress: Compress, models: Path, tmp_path: Path, memory: list[str], name: str
) -> None:
    """The model writes its own text, or where that takes too long there is one built in; it is said and recorded."""
    words = ["profile", models / "gpt2", *SMALL, *memory, "--no-swap", "--json", "--cache", tmp_path / "cache"]
    done = compress(*words)
    assert done.code == 0, done.err
    (line,) = [line for line in done.err.splitlines() if line.startswith("no --text is given")]
    assert "the Hugging Face Hub cannot be reached" in line
    assert f"(--text {name})" in line
    assert json.loads(done.out)["recipe"]["text"] == [name]


def test_no_model(refused: Refused, options: list[str]) -> None:
    assert "no model: give a directory" in refused(*options, "--max-dppl", "1", "--out", "out")


def test_model_is_a_file(whole: Refused, corpus: Path) -> None:
    assert "is a file; give the directory" in whole(model=corpus)


def test_no_config(whole: Refused, spoiled: Path) -> None:
    (spoiled / "config.json").unlink()
    assert "has no config.json" in whole(model=spoiled)


def test_no_weights(whole: Refused, spoiled: Path) -> None:
    (spoiled / WEIGHTS).unlink()
    assert f"needs {WEIGHTS}" in whole(model=spoiled)


def test_no_tokenizer(whole: Refused, spoiled: Path) -> None:
    for file in spoiled.glob("tokenizer*"):
        file.unlink()
    assert "save the tokenizer in the same directory" in whole(model=spoiled)


@pytest.mark.parametrize("kept", [-100, 9, 0])
def test_truncated_weights(whole: Refused, spoiled: Path, kept: int) -> None:
    content = (spoiled / WEIGHTS).read_bytes()
    (spoiled / WEIGHTS).write_bytes(content[:kept])
    assert f"{WEIGHTS} of {spoiled} is damaged" in whole(model=spoiled)


def test_garbage_weights(whole: Refused, spoiled: Path) -> None:
    (spoiled / WEIGHTS).write_bytes(bytes(range(256)) * 40)
    assert f"{WEIGHTS} of {spoiled} is damaged" in whole(model=spoiled)


def test_pickle_only(whole: Refused, spoiled: Path) -> None:
    torch.save(load_file(spoiled / WEIGHTS), spoiled / "pytorch_model.bin")
    (spoiled / WEIGHTS).unlink()
    assert "only pickle weights (pytorch_model.bin)" in whole(model=spoiled)


@pytest.mark.parametrize(
    ("family", "says"),
    [
        ("bert", "model type 'bert' is not supported"),  # as a decoder
        ("t5", "(t5) is an encoder-decoder"),
        ("mixtral", "model type 'mixtral' is not supported: it is a mixture of experts"),
    ],
)
def test_other_architectures(whole: Refused, models: Path, family: str, says: str) -> None:
    assert says in whole(model=models / family)


def test_encoder(whole: Refused, models: Path, tmp_path: Path) -> None:
    encoder = shutil.copytree(models / "bert", tmp_path / "encoder")
    config = json.loads((encoder / "config.json").read_text(encoding="utf-8"))
    (encoder / "config.json").write_text(json.dumps({**config, "is_decoder": False}), encoding="utf-8")
    assert "(bert) is an encoder" in whole(model=encoder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_no_numbers(whole: Refused, spoiled: Path, value: float) -> None:
    weights = load_file(spoiled / WEIGHTS)
    name = next(name for name in weights if name.endswith("h.1.mlp.c_fc.weight"))
    weights[name][0, 0] = value
    save_file(weights, spoiled / WEIGHTS, metadata={"format": "pt"})
    assert "NaN or infinite values in transformer.h.1.mlp.c_fc.weight" in whole(model=spoiled)


def test_already_compressed(whole: Refused, compressed: Path, models: Path) -> None:
    message = whole(model=compressed)
    assert f"{compressed} is already compressed" in message
    assert f"compress its source {models / 'gpt2'} instead" in message


# The text


def test_missing_text(whole: Refused) -> None:
    assert "text file nowhere.txt does not exist" in whole("--text", "nowhere.txt")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b" \n\t\n", "is empty"),
        (b"some\0bytes" * 9, "is binary"),
        (b"\x89PNG\r\n\x1a\n\0\0", "is binary"),
        ("naïve façade ".encode("latin-1") * 99, "is not UTF-8 (byte 2)"),
    ],
)
def test_unusable_text(whole: Refused, tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "text.txt").write_bytes(content)
    message = whole("--text", tmp_path / "text.txt")
    assert says in message
    assert str(tmp_path / "text.txt") in message


def test_text_is_a_directory(whole: Refused, tmp_path: Path) -> None:
    assert "is a directory; give one or more UTF-8 files" in whole("--text", tmp_path)


def test_text_is_too_short(refused: Refused, models: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(sentences(20), encoding="utf-8")
    message = refused(models / "gpt2", *SMALL, "--text", tmp_path / "text.txt", "--max-dppl", "5%", "--out", "out")
    assert "is too short" in message
    assert "calibration part (the first half of it) has " in message
    assert "4000 are asked for" in message  # 125 windows of 32


# The numbers


@pytest.mark.parametrize("value", ["-1", "0", "nan", "inf", "-inf", "-2%", "0%", "inf%"])
def test_budget_out_of_range(whole: Refused, value: str) -> None:
    message = whole(f"--max-dppl={value}")
    assert f"--max-dppl must be positive and finite, got {value}; try --max-dppl 1.0" in message


@pytest.mark.parametrize("value", ["much", "1,0", "%", "", "2%%", "1e"])
def test_budget_is_not_a_number(whole: Refused, value: str) -> None:
    assert f"--max-dppl must be a number or a percentage, got {value!r}" in whole(f"--max-dppl={value}")


@pytest.mark.parametrize("value", ["-1", "0", "nan", "inf", "-0.02"])
def test_divergence_out_of_range(whole: Refused, value: str) -> None:
    message = whole(f"--max-kl={value}")
    assert f"--max-kl must be positive and finite, got {value}; try --max-kl 0.02" in message


@pytest.mark.parametrize("value", ["much", "1,0", "2%", ""])
def test_divergence_is_not_a_number(whole: Refused, value: str) -> None:
    assert "--max-kl" in whole(f"--max-kl={value}")


@pytest.mark.parametrize("command", ["run", "plan"])
def test_budget_is_missing(refused: Refused, models: Path, options: list[str], command: str) -> None:
    assert "--max-dppl is missing" in refused(command, models / "gpt2", *options, "--out", "out")


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--confidence", "1", "confidence"),
        ("--confidence", "-1", "confidence"),
        ("--confidence", "nan", "confidence"),
        ("--confidence", "high", "--confidence"),
        ("--seq-len", "0", "seq_len"),
        ("--seq-len", "1", "seq_len"),
        ("--seq-len", "many", "--seq-len"),
        ("--seq-len", "65", "--seq-len 65 is beyond the model's context of 64; try --seq-len 64"),
        ("--calib-tokens", "0", "calib_tokens"),
        ("--calib-tokens", "-5", "calib_tokens"),
        ("--calib-tokens", "159", "--calib-tokens must be at least 160 at --seq-len 32, got 159"),
        ("--select-tokens", "31", "--select-tokens must be at least 32 at --seq-len 32, got 31"),
        ("--verify-tokens", "63", "--verify-tokens must be at least 64 at --seq-len 32, got 63"),
        ("--batch-size", "0", "batch_size"),
        ("--seed", "-1", "seed"),
        ("--seed", "99999999999999999999999", "seed"),
        ("--device", "gpu", "--device gpu is not known; use auto, cpu, cuda"),
        ("--device", "cuda:99", "device 'cuda:99' is not available here"),
        ("--dtype", "int8", "--dtype int8 is not known; use auto, float32"),
        ("--revision", "main", "revision 'main' needs a hub id"),
    ],
)
def test_unusable_value(whole: Refused, option: str, value: str, says: str) -> None:
    assert says in whole(f"{option}={value}")


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--kinds", "cubic", "--kinds cubic is not known; use linear, lowrank, pruned, hybrid, bias"),
        ("--kinds", "linear,", "--kinds '' is not known; use linear, lowrank, pruned, hybrid, bias"),
        ("--kinds", "Linear", "--kinds Linear is not known"),
        ("--blocks", "3", "--blocks 3: the model has blocks 0 to 2"),
        ("--blocks", "0-99", "--blocks 0-99: the model has blocks 0 to 2"),
        ("--skip", "1,7", "--skip 7: the model has blocks 0 to 2"),
        ("--skip", "0-2,0-2.attention", "--blocks and --skip leave no block to replace; the model has blocks 0 to 2"),
        ("--blocks", "2-1", "--blocks 2-1 is a range that ends before it begins; try --blocks 1-2"),
        ("--blocks", "-1", "--blocks takes numbers of blocks and ranges, got '-1'; try --blocks 0-3,7"),
        ("--blocks", "", "--blocks takes numbers of blocks and ranges, got ''"),
        ("--skip", "0,,1", "--skip takes numbers of blocks and ranges, got ''"),
        ("--skip", "first", "--skip takes numbers of blocks and ranges, got 'first'"),
        ("--rank-by", "luck", "rank_by: Input should be 'damage', 'r2' or 'stream', got 'luck'"),
    ],
)
def test_unusable_choice(whole: Refused, tmp_path: Path, option: str, value: str, says: str) -> None:
    """Refused before the text is read, which is empty."""
    (tmp_path / "empty.txt").touch()
    assert says in whole(f"{option}={value}", "--text", tmp_path / "empty.txt")


def test_choices_that_leave_nothing(whole: Refused) -> None:
    assert "leave no block to replace" in whole("--blocks", "0", "--blocks", "2", "--skip", "0-1,2")


def test_unknown_option(whole: Refused) -> None:
    message = whole("--max-ddpl", "1")
    assert "there is no option --max-ddpl; did you mean --max-dppl" in message
    assert message.endswith("See compress MODEL --help")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["profil", "demo"], "there is no command 'profil'; did you mean compress profile?"),
        (["chekc", "DIR", "--max-dppl", "1"], "there is no command 'chekc'; did you mean compress check?"),
        (["check", "--sorce", "x"], "there is no option --sorce; did you mean --source? See compress check --help"),
        (["check"], "missing argument 'PATH'; see compress check --help"),
        (["profile", "demo", "--frobnicate"], "there is no option --frobnicate; see compress profile --help"),
    ],
)
def test_a_mistyped_word_names_what_was_meant(refused: Refused, words: list[str], says: str) -> None:
    assert says in refused(*words)


def test_a_model_that_is_called_like_a_command(refused: Refused, models: Path, tmp_path: Path) -> None:
    """A directory of that name is there to be compressed."""
    (tmp_path / "profil").mkdir()
    assert "has no config.json" in refused(tmp_path / "profil", "--max-dppl", "1", "--out", "out", "--text", "demo")


def test_surplus_argument(whole: Refused) -> None:
    assert "surplus" in whole("surplus")


# The output


def test_out_is_missing(refused: Refused, models: Path, options: list[str]) -> None:
    assert "--out is missing" in refused(models / "gpt2", *options, "--max-dppl", "1")


def test_out_is_not_empty(whole: Refused, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter").write_text("dear")
    message = whole("--out", tmp_path / "full")
    assert "exists and is not empty; name another directory or add --overwrite" in message


def test_out_is_not_ours(whole: Refused, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter").write_text("dear")
    message = whole("--out", tmp_path / "full", "--overwrite")
    assert "was not written by compress, so --overwrite leaves it alone" in message


def test_out_is_a_file(whole: Refused, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "is a file; name a directory" in whole("--out", tmp_path / "file", "--overwrite")


def test_out_is_under_a_file(whole: Refused, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "cannot be written" in whole("--out", tmp_path / "file" / "out")
    assert "cannot be written" in whole("--out", tmp_path / "file" / "deep" / "out")


def test_out_is_the_source(whole: Refused, spoiled: Path) -> None:
    for out in (spoiled, spoiled.parent / "here" / ".." / spoiled.name):
        assert "is the source model itself" in whole("--out", out, "--overwrite", model=spoiled)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a place where nobody may write")
def test_out_is_not_writable(whole: Refused) -> None:
    assert "--out /proc/out cannot be written" in whole("--out", "/proc/out")


def test_plan_out_is_not_writable(refused: Refused, models: Path, options: list[str], tmp_path: Path) -> None:
    arguments = ["plan", models / "gpt2", *options, "--max-dppl", "1"]
    for out in (tmp_path, tmp_path / "nowhere" / "plan.json"):
        assert "cannot be written; name a file in an existing directory" in refused(*arguments, "--out", out)


# The recipe


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("seq_len: [1\n", ["is not valid YAML"]),
        ("- seq_len\n", ["must be a mapping"]),
        ("just a sentence\n", ["must be a mapping"]),
        ("1: 2\n", ["must be a mapping"]),
        ("seed: !!python/object/apply:os.system ['touch pwned']\n", ["is not valid YAML"]),
        ("trust_remote_code: true\n", ["trust_remote_code cannot stand in a recipe, pass --trust-remote-code"]),
        (
            "colour: blue\nbatch_size: big\nseed: 1.5\nmax_dppl: -3\noverwrite: 'no'\n",
            ["unknown key 'colour'", "batch_size", "'big'", "seed", "1.5", "got -3", "overwrite"],
        ),
        ("text: {a: 1}\n", ["text"]),
        ("batch_size: true\n", ["batch_size"]),
        ("kinds: cubic\nblocks: -1\n", ["--kinds cubic is not known", "--blocks takes numbers", "got '-1'"]),
        ("blocks: []\nskip: true\nrank_by: 2\n", ["blocks: ", "skip: ", "rank_by: "]),
    ],
)
def test_unusable_recipe(
    refused: Refused, models: Path, corpus: Path, tmp_path: Path, content: str, says: list[str]
) -> None:
    """No option beside it: an option would win over the key that is wrong."""
    file = tmp_path / "recipe.yaml"
    file.write_text(content, encoding="utf-8")
    message = refused(models / "gpt2", "--recipe", file, "--out", "out")
    for part in (str(file), *says):
        assert part in message


def test_recipe_cannot_be_read(whole: Refused, tmp_path: Path) -> None:
    assert "recipe nowhere.yaml does not exist" in whole("--recipe", "nowhere.yaml")
    assert "cannot be read" in whole("--recipe", tmp_path)
    (tmp_path / "recipe.yaml").write_bytes(b"seed: 1 # \xff\n")
    assert "cannot be read" in whole("--recipe", tmp_path / "recipe.yaml")


# The plan


@pytest.fixture(scope="module")
def sound_plan(compressed: Path) -> dict[str, Any]:
    """The record of a checkpoint is a plan too."""
    plan: dict[str, Any] = json.loads((compressed / RECORD).read_text(encoding="utf-8"))
    return plan


@pytest.fixture
def apply(refused: Refused, models: Path, tmp_path: Path) -> Refused:
    def run(plan: Any, *arguments: str | Path, model: str = "gpt2") -> str:
        file = tmp_path / "plan.json"
        file.write_text(plan if isinstance(plan, str) else json.dumps(plan), encoding="utf-8")
        return refused("apply", models / model, file, "--out", "out", *arguments)

    return run


def with_replacement(plan: dict[str, Any], index: int, **replacement: Any) -> dict[str, Any]:
    changed: dict[str, Any] = json.loads(json.dumps(plan))
    changed["blocks"][index]["replacement"] |= {"neurons": 0, **replacement}
    return changed


def test_sound_plan_applies(compress: Compress, sound_plan: dict[str, Any], models: Path, tmp_path: Path) -> None:
    """The plans below are refused for what is changed in them, and nothing else."""
    (tmp_path / "plan.json").write_text(json.dumps(sound_plan), encoding="utf-8")
    assert compress("apply", models / "gpt2", tmp_path / "plan.json", "--out", tmp_path / "out").code == 0


def test_plan_cannot_be_read(refused: Refused, models: Path, tmp_path: Path) -> None:
    arguments = ["apply", models / "gpt2"]
    assert "plan nowhere.json does not exist; make one with" in refused(*arguments, "nowhere.json", "--out", "out")
    assert "cannot be read" in refused(*arguments, tmp_path, "--out", "out")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "is not valid JSON"),
        ("{", "is not valid JSON"),
        ("[]", "is not a plan"),
        ("{}", "is not a plan"),
        ("[" * 100_000, "is not valid JSON"),
        ('{"schema_version": 2}', "is not a plan"),
    ],
)
def test_plan_is_none(apply: Refused, content: str, says: str) -> None:
    assert says in apply(content)


def test_plan_for_other_weights(apply: Refused, sound_plan: dict[str, Any], models: Path) -> None:
    message = apply(sound_plan, model="llama")
    assert f"was made for other weights ({models / 'gpt2'}) than" in message


def test_plan_for_a_block_that_is_not_there(apply: Refused, sound_plan: dict[str, Any]) -> None:
    changed = json.loads(json.dumps(sound_plan))
    changed["blocks"][2]["index"] = 3
    assert "replaces block 3, but the model has blocks 0 to 2" in apply(changed)
    changed["blocks"][2]["index"] = -1
    assert "blocks.2.index" in apply(changed)
    changed["blocks"][2]["index"] = 0
    assert "block 0 twice" in apply(changed)


@pytest.mark.parametrize(
    ("replacement", "says"),
    [
        ({"kind": "lowrank", "rank": 33}, "wants rank 33 in block 1, whose width is 32"),
        ({"kind": "lowrank", "rank": None}, "block 1 is lowrank with rank None"),
        ({"kind": "lowrank", "rank": 0}, "block 1 is lowrank with rank 0"),
        ({"kind": "linear", "rank": 4}, "block 1 is linear with rank 4"),
        ({"kind": "bias", "rank": 4}, "block 1 is bias with rank 4"),
        ({"kind": "pruned", "rank": 0}, "block 1 is pruned with rank 0 and 0 neurons, that is bias"),
        ({"kind": "pruned", "rank": 3, "neurons": 4}, "block 1 is pruned with rank 3 and 4 neurons, that is hybrid"),
        ({"kind": "pruned", "rank": 0, "neurons": 49}, "keeps 49 neurons in block 1, which has 48 neurons"),
        ({"kind": "hybrid", "rank": 2, "neurons": -1}, "blocks.1.replacement.neurons"),
        ({"kind": "lowrank", "rank": -1}, "blocks.1.replacement.rank"),
        ({"kind": "lowrank", "rank": "four"}, "blocks.1.replacement.rank"),
        ({"kind": "magic"}, "blocks.1.replacement.kind"),
    ],
)
def test_plan_with_an_unusable_replacement(
    apply: Refused, sound_plan: dict[str, Any], replacement: dict[str, Any], says: str
) -> None:
    assert says in apply(with_replacement(sound_plan, 1, **replacement))


def test_plan_replaces_nothing(apply: Refused, sound_plan: dict[str, Any]) -> None:
    plan = sound_plan
    for index in range(3):
        plan = with_replacement(plan, index, kind="keep", rank=None)
    for attention in plan["attention"]:
        attention["replacement"] |= {"kind": "keep", "rank": None, "heads": None}
    assert "replaces no block" in apply(plan)


def test_plan_with_an_unusable_recipe(apply: Refused, sound_plan: dict[str, Any]) -> None:
    message = apply({**sound_plan, "recipe": {**sound_plan["recipe"], "seed": -1, "colour": "blue"}})
    assert "seed" in message
    assert "unknown key 'colour'" in message


def test_plan_lacks_its_parts(apply: Refused, sound_plan: dict[str, Any]) -> None:
    for key in ("parameters", "blocks", "source", "budget", "recipe"):
        message = apply({name: value for name, value in sound_plan.items() if name != key})
        assert "is not a plan" in message
        assert key in message


# A compressed checkpoint


def test_check_of_something_else(refused: Refused, models: Path) -> None:
    for command in ("check", "info"):
        assert "it was not written by compress" in refused(command, models / "gpt2")
        assert "does not exist; give one that compress wrote" in refused(command, "nowhere")


@pytest.fixture
def damaged(compressed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(compressed, tmp_path / "damaged"))


@pytest.mark.parametrize("command", ["check", "info"])
@pytest.mark.parametrize("content", ["", "{", "[]", "{}", "null", '{"schema_version": 1}', '{"schema_version": 2}'])
def test_damaged_record(refused: Refused, damaged: Path, command: str, content: str) -> None:
    (damaged / RECORD).write_text(content, encoding="utf-8")
    assert RECORD in refused(command, damaged)


@pytest.mark.parametrize("key", ["blocks", "source", "parameters", "perplexity", "budget", "tool"])
def test_record_with_damaged_parts(compress: Compress, damaged: Path, key: str) -> None:
    """A part that is missing or of another shape is told, or is not needed."""
    record = json.loads((damaged / RECORD).read_text(encoding="utf-8"))
    for value in ({}, [], [{}], None, "text", 3):
        (damaged / RECORD).write_text(json.dumps({**record, key: value}), encoding="utf-8")
        for command in ("check", "info"):
            done = compress(command, damaged)
            assert done.code in (0, 2)
            assert len(done.errors) == (done.code == 2)
            assert "error: unexpected" not in done.err, (command, value, done.err)


def test_damaged_weights_of_a_checkpoint(refused: Refused, damaged: Path) -> None:
    (damaged / WEIGHTS).write_bytes((damaged / WEIGHTS).read_bytes()[:-50])
    assert f"{WEIGHTS} of {damaged} is damaged" in refused("check", damaged)


def test_damaged_recipe_of_a_checkpoint(refused: Refused, damaged: Path) -> None:
    (damaged / "recipe.yaml").write_text("seed: [", encoding="utf-8")
    assert "recipe.yaml is not valid YAML" in refused("check", damaged)


def test_source_has_gone(refused: Refused, damaged: Path, tmp_path: Path) -> None:
    gone = str(tmp_path / "gone")
    recipe = (damaged / "recipe.yaml").read_text(encoding="utf-8").splitlines()
    recipe = [f"model: {gone}" if line.startswith("model:") else line for line in recipe]
    (damaged / "recipe.yaml").write_text("\n".join(recipe), encoding="utf-8")
    message = refused("check", damaged)
    assert gone in message
    assert "--source" in message


def test_unusable_source(refused: Refused, compressed: Path) -> None:
    assert "nowhere" in refused("check", compressed, "--source", "./nowhere")
    assert "is already compressed" in refused("check", compressed, "--source", compressed)


@pytest.mark.parametrize("value", ["-1", "nan", "much"])
def test_check_with_an_unusable_budget(refused: Refused, compressed: Path, value: str) -> None:
    assert "--max-dppl must be" in refused("check", compressed, f"--max-dppl={value}")
    assert "--max-kl" in refused("check", compressed, f"--max-kl={value}")


# The tasks


@pytest.fixture
def tasked(
    whole: Refused, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Refused:
    """The whole job with a sound task `mine` in `tasks`, which a test may spoil."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
    write_task(tmp_path / "tasks", "mine")

    def run(*arguments: str | Path, tasks: str = "mine") -> str:
        return whole("--tasks", tasks, "--task-path", tmp_path / "tasks", *arguments)

    return run


def test_unknown_task(tasked: Refused, refused: Refused, compressed: Path, tmp_path: Path) -> None:
    assert "there is no task 'mien'; did you mean " in tasked(tasks="mien")
    assert "there is no task 'nothing_like_it'" in tasked(tasks="mine,nothing_like_it")
    assert "task mine has no metric 'f1' (those that can be compared: acc)" in tasked(tasks="mine:f1")
    message = refused("check", compressed, "--tasks", "mien", "--task-path", tmp_path / "tasks")
    assert "there is no task 'mien'; did you mean " in message


def test_malformed_task(tasked: Refused, tmp_path: Path) -> None:
    file = tmp_path / "tasks" / "mine.yaml"
    file.write_text("task: mine\noutput_type: [multiple_choice\ndoc_to_text: x\n", encoding="utf-8")
    assert f"task file {file} is not valid YAML (line 3)" in tasked()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"output_type": "guess"}, "cannot be loaded: Got invalid output_type 'guess'"),
        ({"validation_split": "nowhere"}, "cannot be loaded"),
        ({"doc_to_text": "{{ nothing }}"}, "cannot be loaded: 'nothing' is undefined"),
        ({"doc_to_text": "{{ ''.__class__ }}"}, "cannot be loaded: access to attribute '__class__'"),
        ({"dataset_path": "pandas"}, "has dataset_path 'pandas'"),
        ({"dataset_kwargs": {"data_files": {"validation": "nowhere.jsonl"}}}, "nowhere.jsonl does not exist"),
    ],
)
def test_unusable_task(tasked: Refused, tmp_path: Path, settings: dict[str, Any], says: str) -> None:
    write_task(tmp_path / "tasks", "mine", **settings)
    message = tasked()
    assert "task mine" in message
    assert says in message


def test_task_with_code(tasked: Refused, tmp_path: Path) -> None:
    with (tmp_path / "tasks" / "mine.yaml").open("a", encoding="utf-8") as handle:
        handle.write("process_docs: !function utils.touch\n")
    code = f"open({str(tmp_path / 'marker')!r}, 'w')\n"
    (tmp_path / "tasks" / "utils.py").write_text(code, encoding="utf-8")
    assert "runs Python code (utils.touch); pass --trust-remote-code to allow it" in tasked()


def test_broken_task_data(tasked: Refused, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "tasks" / "mine.jsonl", [{"question": "a"}] * 3)
    file.write_text(file.read_text(encoding="utf-8") + '{"question": \n', encoding="utf-8")
    assert f"task mine: data file {file} is broken in line 4" in tasked()
    file.write_text("", encoding="utf-8")
    assert f"task mine: data file {file} has no documents" in tasked()
    file.unlink()
    assert "mine.jsonl does not exist" in tasked()


def test_task_path_is_none(whole: Refused, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for name, says in (("nowhere", "is not a directory"), ("file", "is not a directory"), ("empty", "holds no .yaml")):
        assert f"{tmp_path / name} {says}" in whole("--tasks", "mine", "--task-path", tmp_path / name)


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--task-limit", "0", "task_limit"),
        ("--task-limit", "-3", "task_limit"),
        ("--task-limit", "all", "--task-limit"),
        ("--max-task-drop", "-0.01", "--max-task-drop must be between 0 and 1, got -0.01"),
        ("--max-task-drop", "1.5", "--max-task-drop must be between 0 and 1, got 1.5"),
        ("--max-task-drop", "nan", "--max-task-drop must be between 0 and 1, got nan"),
        ("--max-task-drop", "mine=-1%", "--max-task-drop must be between 0 and 1, got -1%"),
        ("--max-task-drop", "little", "--max-task-drop must be a number, got 'little'"),
        ("--max-task-drop", "mine=", "--max-task-drop must be a number, got ''"),
        ("--max-task-drop", "other=0.1", "--max-task-drop other=0.1: there is no task 'other' (known: mine)"),
    ],
)
def test_unusable_task_value(tasked: Refused, option: str, value: str, says: str) -> None:
    assert says in tasked(f"{option}={value}")


def test_task_drop_is_given_twice(tasked: Refused) -> None:
    assert "--max-task-drop is given twice; give it once" in tasked("--max-task-drop=0.1", "--max-task-drop=0.2")
    twice = ["--max-task-drop=mine=0.1", "--max-task-drop=mine=0.2"]
    assert "--max-task-drop is given twice for task mine; give it once" in tasked(*twice)


def test_task_drop_without_tasks(whole: Refused) -> None:
    assert "--max-task-drop is given, but no --tasks; name them" in whole("--max-task-drop", "0.01")


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("name", ["lambada_openai", "mine"])
def test_hub_task_without_network(whole: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    write_yaml(tmp_path / "tasks" / "mine.yaml", task="mine", dataset_path="someone/questions")
    start = time.monotonic()
    message = whole("--tasks", name, "--task-path", tmp_path / "tasks")
    assert time.monotonic() - start < 10
    dataset = "EleutherAI/lambada_openai" if name == "lambada_openai" else "someone/questions"
    assert f"task {name} needs the data set {dataset}, which is not in the local cache" in message
    assert "use --task-path DIR with a YAML on a local JSONL file" in message
