"""The command from end to end on a tiny model: what it writes, prints and returns, and that it can be repeated."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import SMALL, Compress
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import compressor
from compressor.cli import app as cli
from compressor.modeling_compressor import KeptHeads, Replacement
from compressor.runtime.errors import InputError

WEIGHTS = "model.safetensors"
RECORD = "compression.json"
NUMBER = (int, float)


def strict_json(text: str) -> Any:
    """JSON as the standard has it: NaN and Infinity are refused."""

    def refuse(constant: str) -> Any:
        raise ValueError(constant)

    return json.loads(text, parse_constant=refuse)


def sha256(directory: Path) -> str:
    return hashlib.sha256((directory / WEIGHTS).read_bytes()).hexdigest()


def replacements(record: dict[str, Any]) -> list[tuple[str, int | None]]:
    return [
        (block["replacement"]["kind"], block["replacement"]["rank"])
        for block in (*record["blocks"], *record["attention"])
    ]


def read_record(directory: Path) -> dict[str, Any]:
    record: dict[str, Any] = strict_json((directory / RECORD).read_text(encoding="utf-8"))
    return record


def fresh(*command: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """A Python of its own."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **settings}
    return subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, timeout=120)


def test_whole_job_writes_everything(compressed: Path, models: Path) -> None:
    names = {file.name for file in compressed.iterdir()}
    assert names >= {
        "config.json",
        WEIGHTS,
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "modeling_compressor.py",
        RECORD,
        "recipe.yaml",
        "README.md",
    }
    assert (compressed / WEIGHTS).stat().st_size < (models / "gpt2" / WEIGHTS).stat().st_size
    assert [path.name for path in compressed.parent.iterdir()] == [compressed.name]  # nothing is left beside it
    recipe = yaml.safe_load((compressed / "recipe.yaml").read_text(encoding="utf-8"))
    assert recipe["model"] == str(models / "gpt2")
    assert recipe["max_dppl"] == "0.2%"
    assert not {"out", "overwrite"} & set(recipe)


def test_record_keeps_the_contract(compressed: Path, models: Path, corpus: Path) -> None:
    record = read_record(compressed)
    shapes: dict[str, dict[str, Any]] = {
        "tool": {"name": str, "version": str},
        "environment": {"torch": str, "transformers": str},
        "source": {"model": str, "revision": (str, type(None)), "model_type": str, "weights_sha256": str},
        "budget": {"max_dppl": NUMBER, "confidence": NUMBER},
        "perplexity": {
            **dict.fromkeys(("baseline", "compressed", "delta"), NUMBER),
            **{"delta_ci95": list, "tokens": int, "seq_len": int},
        },
        "parameters": {"before": int, "after": int, "removed": int, "removed_fraction": float},
        "text": {"calibration": dict, "selection": dict, "verification": dict, "seq_len": int},
        "timings": {"total": NUMBER},
    }
    assert record["schema_version"] == 1
    for part, keys in shapes.items():
        for key, kind in keys.items():
            assert isinstance(record[part][key], kind), (part, key)
    for split in ("calibration", "selection", "verification"):
        assert record["text"][split]["source"] == str(corpus)
        assert re.fullmatch("[0-9a-f]{64}", record["text"][split]["sha256"])
    assert [record["text"][s]["tokens"] for s in ("calibration", "selection", "verification")] == [4000, 992, 1984]
    assert record["text"]["seq_len"] == record["perplexity"]["seq_len"] == 32
    assert record["source"]["model"] == str(models / "gpt2")
    assert record["source"]["model_type"] == "gpt2"


def test_record_describes_every_block(compressed: Path) -> None:
    record = read_record(compressed)
    numbers = ("r2_lin", "r2_stream", "r2_median", "effective_rank", "top_row_share")
    shapes: dict[str, Any] = {
        **dict.fromkeys(numbers, NUMBER),
        **{"index": int, "path": str, "r2_lin_ci95": list, "condition_number": (*NUMBER, type(None))},
        **{"params_before": int, "params_after": int, "verdict": str, "replacement": dict},
    }
    for index, block in enumerate(record["blocks"]):
        for key, kind in shapes.items():
            assert isinstance(block[key], kind), (index, key)
        low, high = block["r2_lin_ci95"]
        assert low <= block["r2_lin"] <= high
        assert block["verdict"] in ("safe", "costly", "unsafe")
        assert block["replacement"].keys() >= {"kind", "rank", "neurons"}
        assert (block["index"], block["path"]) == (index, f"transformer.h.{index}.mlp")
    assert len(record["blocks"]) == 3
    kinds = {kind for kind, _ in replacements(record)}
    assert len(kinds) > 1, "the shared example should hold more than one kind of replacement"


def test_record_has_tasks(compressed: Path) -> None:
    assert isinstance(read_record(compressed)["tasks"], dict)


def test_record_agrees_with_itself_and_the_weights(compressed: Path, models: Path) -> None:
    record = read_record(compressed)
    perplexity, parameters = record["perplexity"], record["parameters"]
    low, high = perplexity["delta_ci95"]
    assert perplexity["delta"] == pytest.approx(perplexity["compressed"] - perplexity["baseline"])
    assert low < perplexity["delta"] < high <= record["budget"]["max_dppl"]
    assert record["budget"]["max_dppl"] == pytest.approx(0.002 * perplexity["baseline"])
    branches = [*record["blocks"], *record["attention"]]
    saved = sum(block["params_before"] - block["params_after"] for block in branches)
    assert parameters["removed"] == parameters["before"] - parameters["after"] == saved > 0
    assert parameters["removed_fraction"] == pytest.approx(saved / parameters["before"])
    before, after = (load_file(directory / WEIGHTS) for directory in (models / "gpt2", compressed))
    assert parameters["before"] == sum(tensor.numel() for tensor in before.values())
    assert parameters["after"] == sum(tensor.numel() for tensor in after.values())


def test_result_loads_and_has_the_recorded_perplexity(compressed: Path, corpus: Path) -> None:
    """Counted here by hand, from the model that from_pretrained gives."""
    model = AutoModelForCausalLM.from_pretrained(compressed)
    record = read_record(compressed)
    replaced = sum(kind != "keep" for kind, _ in replacements(record))
    assert sum(isinstance(module, (Replacement, KeptHeads)) for module in model.modules()) == replaced > 0
    text = compressor.load_text(
        corpus,
        AutoTokenizer.from_pretrained(compressed),
        seq_len=32,
        calib_tokens=4000,
        select_tokens=1000,
        verify_tokens=2000,
    )
    windows = text.verification.windows
    with torch.no_grad():
        scores = model(windows).logits[:, :-1].log_softmax(-1).double()
    nats = -scores.gather(-1, windows[:, 1:, None]).mean()
    assert nats.exp().item() == pytest.approx(record["perplexity"]["compressed"], rel=1e-5)
    assert record["perplexity"]["tokens"] == windows[:, 1:].numel()


def test_json_is_alone_on_stdout_and_a_second_run_is_identical(
    compress: Compress, compressed: Path, models: Path, options: list[str], tmp_path: Path
) -> None:
    done = compress(models / "gpt2", *options, "--max-dppl", "0.2%", "--out", tmp_path / "again", "--json")
    assert done.code == 0
    report = strict_json(done.out)
    assert sha256(tmp_path / "again") == sha256(compressed)
    volatile = {"timings", "speed", "out"}
    recorded = read_record(compressed)
    assert {k: v for k, v in report.items() if k not in volatile} == {
        k: v for k, v in recorded.items() if k not in volatile
    }
    assert report["out"] == str(tmp_path / "again")


def test_table_names_every_block_and_the_result(
    compress: Compress, models: Path, options: list[str], tmp_path: Path
) -> None:
    words = ("run", models / "llama", *options, "--max-dppl", "5%", "--out", tmp_path / "small", "--overwrite")
    done = compress(*words, "--verbose")
    assert done.code == 0
    record = read_record(tmp_path / "small")
    assert re.findall(r"(?m)^ +(\d) +\d\.\d{3} ", done.out) == ["0", "1", "2"]
    assert f"perplexity {record['perplexity']['baseline']:.3f} → " in done.out
    assert done.errors == []
    plain = compress(*words)
    assert done.out.endswith(plain.out.partition(" smaller")[2].rpartition(" in ")[2])  # both end with the same answer
    assert not re.findall(r"(?m)^ +(\d) +\d\.\d{3} ", plain.out)


def test_the_answer_comes_last_and_says_what_to_do_next(
    compress: Compress, models: Path, options: list[str], tmp_path: Path
) -> None:
    done = compress(models / "llama", *options, "--max-dppl", "5%", "-o", tmp_path / "small")
    assert done.code == 0, done.err
    record, lines = read_record(tmp_path / "small"), done.out.splitlines()
    sizes, change = record["parameters"], record["perplexity"]
    share = f"{100 * sizes['removed_fraction']:.1f} % smaller: "
    assert lines[0].startswith(f"{share}{sizes['before']:,} → {sizes['after']:,} parameters, ")
    assert f"{change['baseline']:.3f} → {change['compressed']:.3f}" in lines[1]
    assert f"inside the budget of +{record['budget']['max_dppl']:.3f} (5 % of" in lines[1]
    after = lines[lines.index("next:") + 1 :]
    assert [line.split()[0] for line in after[::2]] == ["xdg-open", "compress", "compress"]
    assert f"compress check {tmp_path / 'small'}" in done.out
    for line in after[2::2]:  # the commands are commands: they can be parsed, and what they name is there
        assert compress(*line.split()[1:], "--help").code == 0
    assert (tmp_path / "small" / "report.html").is_file()


def test_progress_numbers_its_steps(compress: Compress, models: Path, options: list[str], tmp_path: Path) -> None:
    words = (models / "llama", *options, "--max-dppl", "5%", "--cache", tmp_path / "cache")
    done = compress(*words, "--out", tmp_path / "a")
    numbers = [int(number) for number in re.findall(r"(?m)^\[(\d)/8\] ", done.err)]
    assert set(numbers) == set(range(1, 9))
    assert (numbers[0], numbers[-1]) == (1, 8)
    assert "[3/8] measure every block: " in done.err
    for riddle in ("survey", "agreement", "together", "swap", "tried"):
        assert riddle not in done.err
    loud = compress(*words, "--out", tmp_path / "b", "-v")
    assert "tried" in loud.err
    assert "measured before" in loud.err
    quiet = compress(*words, "--out", tmp_path / "c", "-q")
    assert (quiet.err, quiet.code) == ("", 0)


def test_a_budget_that_buys_next_to_nothing(
    compress: Compress, models: Path, options: list[str], tmp_path: Path
) -> None:
    words = (models / "llama", *options, "--max-dppl", "5%", "--cache", tmp_path / "cache", "--out", tmp_path / "small")
    done = compress(*words, "--min-saving", "90%")
    assert done.code == 1
    assert done.errors[0].startswith("error: not worth it: the budget 5% buys ")
    assert "less than --min-saving 90%" in done.errors[0]
    assert not (tmp_path / "small").exists()
    assert compress(*words, "--min-saving", "0").code == 0


def test_a_budget_that_buys_nothing_names_one_that_may(
    compress: Compress, models: Path, options: list[str], tmp_path: Path
) -> None:
    done = compress("plan", models / "llama", *options, "--max-dppl", "0.000001", "--out", tmp_path / "plan.json")
    assert done.code == 1
    assert re.search(r"; --max-dppl [\d.e-]+ may buy 0\.5 % of the parameters; nothing written$", done.errors[0])
    assert "load " in done.err


def test_seed_changes_the_text(
    compress: Compress, compressed: Path, models: Path, options: list[str], tmp_path: Path
) -> None:
    arguments = ["--max-dppl", "5%", "--seed", "1", "--out", tmp_path / "small", "--json"]
    report = strict_json(compress(models / "gpt2", *options, *arguments).out)
    recorded = read_record(compressed)["text"]
    assert all(report["text"][s]["sha256"] != recorded[s]["sha256"] for s in ("calibration", "verification"))
    assert report["recipe"]["seed"] == 1


def test_plan_then_apply_is_the_whole_job(
    compress: Compress, compressed: Path, models: Path, options: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    made = compress("plan", models / "gpt2", *options, "--max-dppl", "0.2%", "--out", file, "--json")
    assert made.code == 0
    assert strict_json(file.read_text(encoding="utf-8")) == strict_json(made.out)
    assert list(tmp_path.iterdir()) == [file]
    done = compress("apply", models / "gpt2", file, "--out", tmp_path / "planned", "--json")
    assert done.code == 0, done.err
    assert replacements(strict_json(made.out)) == replacements(strict_json(done.out))
    # The record of a whole job, which verification text may have sent back to search, is a plan as well.
    done = compress("apply", models / "gpt2", compressed / "compression.json", "--out", tmp_path / "applied", "--json")
    assert done.code == 0, done.err
    report, recorded = strict_json(done.out), read_record(compressed)
    assert replacements(report) == replacements(recorded)
    assert sha256(tmp_path / "applied") == sha256(compressed)
    assert report["perplexity"] == recorded["perplexity"]
    assert report["parameters"] == recorded["parameters"]


def test_apply_refuses_a_plan_that_misses_its_budget(
    compress: Compress, models: Path, options: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    assert compress("plan", models / "gpt2", *options, "--max-dppl", "5%", "--out", file).code == 0
    missed = compress("apply", models / "gpt2", file, "--max-dppl", "0.001", "--out", tmp_path / "applied")
    assert missed.code == 1
    assert len(missed.errors) == 1
    assert "the budget 0.001 is missed on the verification text" in missed.errors[0]
    assert list(tmp_path.iterdir()) == [file]


def test_a_limit_of_kl_alone_goes_from_plan_to_apply_to_check(
    compress: Compress, models: Path, options: list[str], tmp_path: Path
) -> None:
    file, out = tmp_path / "plan.json", tmp_path / "planned"
    made = compress("plan", models / "gpt2", *options, "--max-kl", "0.0005", "--out", file, "--json")
    assert made.code == 0, made.err
    plan = strict_json(made.out)
    assert (plan["budget"]["max_dppl"], plan["budget"]["max_kl"]) == (None, 0.0005)
    assert plan["selection"]["text"]["fidelity"]["kl"] <= 0.0005
    done = compress("apply", models / "gpt2", file, "--out", out)
    assert done.code == 0, done.err
    assert "no limit on perplexity was asked for" in done.out
    assert re.search(r"KL from the source .* budget 0.0005: inside", done.out)
    record = read_record(out)
    assert record["fidelity"]["kl"] < record["texts"]["text"]["fidelity"]["kl_upper"] <= 0.0005
    assert record["texts"]["text"]["passed"] is None
    checked = compress("check", out, "--json")
    assert checked.code == 0, checked.err
    assert [check["name"] for check in strict_json(checked.out)["checks"]] == ["kl text"]
    missed = compress("apply", models / "gpt2", file, "--max-kl", "1e-9", "--out", tmp_path / "none")
    assert missed.code == 1
    assert re.search(r"the budget KL 1e-09 is missed on the verification text: .* with KL \d", missed.errors[0])
    assert sorted(tmp_path.iterdir()) == [file, out]


def test_recipe_reproduces_the_checkpoint(compress: Compress, compressed: Path, tmp_path: Path) -> None:
    done = compress("--recipe", compressed / "recipe.yaml", "--out", tmp_path / "again")
    assert done.code == 0, done.err
    assert sha256(tmp_path / "again") == sha256(compressed)
    assert (tmp_path / "again" / "recipe.yaml").read_bytes() == (compressed / "recipe.yaml").read_bytes()


def test_options_win_over_the_recipe(
    compress: Compress, models: Path, corpus: Path, compressed: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model: nowhere\nmax_dppl: -1\nseed: 1\nbatch_size: 3\ntext: {corpus}\n", encoding="utf-8")
    arguments = ["--recipe", recipe, *SMALL, "--seed", "0", "--max-dppl", "0.2%", "--out", tmp_path / "small"]
    done = compress(models / "gpt2", *arguments, "--json")
    assert done.code == 0, done.err
    report = strict_json(done.out)
    assert report["recipe"]["model"] == str(models / "gpt2")
    assert report["recipe"]["seed"] == 0
    assert report["text"] == read_record(compressed)["text"]


def test_overwrite_replaces_an_earlier_result(
    compress: Compress, compressed: Path, models: Path, options: list[str], tmp_path: Path
) -> None:
    out = Path(shutil.copytree(compressed, tmp_path / "small"))
    (out / WEIGHTS).write_bytes(b"old")
    (out / "stray").touch()
    arguments = [models / "gpt2", *options, "--max-dppl", "0.2%", "--out", out]
    assert compress(*arguments, "--overwrite").code == 0
    assert sha256(out) == sha256(compressed)
    assert not (out / "stray").exists()
    assert list(tmp_path.iterdir()) == [out]


def test_check_repeats_the_measurement(compress: Compress, compressed: Path) -> None:
    done = compress("check", compressed, "--generate", "0", "--json")
    assert done.code == 0, done.err
    report, recorded = strict_json(done.out), read_record(compressed)
    assert report["passed"] is True
    assert report["warnings"] == []
    assert report["perplexity"]["baseline"] == pytest.approx(recorded["perplexity"]["baseline"], rel=1e-6)
    assert report["perplexity"]["compressed"] == pytest.approx(recorded["perplexity"]["compressed"], rel=1e-6)
    assert report["parameters"] == recorded["parameters"]
    said = compress("check", compressed, "--generate", "0", "--max-dppl", "5%").out
    assert said.endswith("passed\n")
    assert "warning" not in said


def test_check_fails_a_missed_budget(compress: Compress, compressed: Path) -> None:
    done = compress("check", compressed, "--max-dppl", "0.0000001")
    assert done.code == 1
    assert done.out.endswith("FAILED: perplexity text\n")
    assert strict_json(compress("check", compressed, "--max-dppl", "1e-7", "--json").out)["passed"] is False


def test_check_fails_a_tampered_checkpoint(compress: Compress, compressed: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(compressed, tmp_path / "small"))
    weights = load_file(out / WEIGHTS)
    name = next(name for name in weights if name.endswith("ln_f.weight"))
    weights[name] = 30 * weights[name]
    save_file(weights, out / WEIGHTS, metadata={"format": "pt"})
    assert compress("check", out).code == 1


def test_check_against_another_source(compress: Compress, compressed: Path, models: Path, tmp_path: Path) -> None:
    """The same weights elsewhere pass in silence; other weights are told."""
    moved = shutil.copytree(models / "gpt2", tmp_path / "moved")
    same = compress("check", compressed, "--generate", "0", "--source", moved, "--json")
    assert same.code == 0, same.err
    assert strict_json(same.out)["warnings"] == []
    assert strict_json(same.out)["source"]["model"] == str(moved)
    weights = load_file(moved / WEIGHTS)
    name = next(name for name in weights if name.endswith("ln_f.bias"))
    weights[name] = weights[name] + 0.01
    save_file(weights, moved / WEIGHTS, metadata={"format": "pt"})
    other = compress("check", compressed, "--source", moved)
    assert "warning: the source's weights are not those the checkpoint was made from" in other.out


def test_info_prints_the_record(compress: Compress, compressed: Path, models: Path) -> None:
    done = compress("info", compressed)
    assert done.code == 0
    record = read_record(compressed)
    assert f"made from {models / 'gpt2'} (gpt2) by compressor {compressor.__version__}" in done.out
    assert f"perplexity {record['perplexity']['baseline']:.3f} → " in done.out
    assert re.findall(r"(?m)^ +(\d) +\d\.\d{3} ", done.out) == ["0", "1", "2"]
    assert strict_json(compress("info", compressed, "--json").out) == {**record, "weights_match": True}


def test_info_of_a_model_saved_through_the_api(compress: Compress, models: Path, tmp_path: Path) -> None:
    model, tokenizer = compressor.load(str(models / "gpt2"))
    compressor.save(model, tokenizer, tmp_path / "copy")
    done = compress("info", tmp_path / "copy")
    assert done.code == 0, done.err
    assert "no measurements are recorded" in done.out


def test_modes_follow_the_umask(models: Path, tmp_path: Path) -> None:
    """Others may read the result, folders in it too (a tokenizer with several chat templates writes one)."""
    model, tokenizer = compressor.load(str(models / "gpt2"))
    tokenizer.chat_template = {"default": "a", "other": "b"}
    before = os.umask(0o022)
    try:
        out = compressor.save(model, tokenizer, tmp_path / "copy")
    finally:
        os.umask(before)
    modes = {path: path.stat().st_mode & 0o777 for path in (out, *out.rglob("*"))}
    assert any(path.is_dir() for path in out.iterdir())
    assert modes == {path: 0o755 if path.is_dir() else 0o644 for path in modes}


def test_profile_measures_without_a_budget(
    compress: Compress, compressed: Path, models: Path, options: list[str], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = [arg for arg in options if arg not in ("--select-tokens", "1000", "--verify-tokens", "2000")]
    done = compress("profile", models / "gpt2", *arguments, "--json")
    assert done.code == 0, done.err
    report = strict_json(done.out)
    assert "budget" not in report
    assert len(report["blocks"]) == 3
    assert all(kind == "keep" for kind, _ in replacements(report))
    assert list(tmp_path.iterdir()) == []
    assert all(0 < block["r2_lin"] <= 1 for block in report["blocks"])


def test_impossible_budget_writes_nothing(compress: Compress, models: Path, options: list[str], tmp_path: Path) -> None:
    done = compress(models / "gpt2", *options, "--max-dppl", "1e-9", "--out", tmp_path / "small")
    assert done.code == 1
    assert len(done.errors) == 1
    assert re.search(r"closest was block \d \(.+\) with ΔPPL [+−]\d+\.\d+", done.errors[0])
    assert "Traceback" not in done.err
    assert done.out == ""
    assert list(tmp_path.iterdir()) == []


def test_interrupt_writes_nothing(
    compress: Compress, models: Path, options: list[str], tmp_path: Path, monkeypatch: Any
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("compressor.pipelines.outputs.write_checkpoint", interrupt)
    done = compress(models / "gpt2", *options, "--max-dppl", "5%", "--out", tmp_path / "small")
    assert done.code == 130
    line = "error: interrupted; nothing was written; the same command goes on where it stopped"
    assert done.errors == [line]
    assert list(tmp_path.iterdir()) == []


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["compress", "info", "./nowhere", "--debug"])
    with pytest.raises(InputError, match="nowhere does not exist"):
        cli.main()


def test_whole_job_in_a_fresh_process(compressed: Path, tmp_path: Path) -> None:
    """Byte-identical in another process too."""
    recipe, out = compressed / "recipe.yaml", tmp_path / "small"
    done = fresh("-m", "compressor", "--recipe", str(recipe), "--out", str(out), "--json")
    assert done.returncode == 0, done.stderr
    assert strict_json(done.stdout)["out"] == str(out)
    assert sha256(out) == sha256(compressed)


def test_help_and_version(compress: Compress) -> None:
    helped = compress("--help")
    assert helped.code == 0
    for command in ("profile", "plan", "apply", "check", "info"):
        assert re.search(rf"(?m)^ +{command} ", helped.out)
    assert "compress MODEL --max-dppl 1.0 --out DIR" in helped.out
    assert compress() == helped
    assert compress("run", "--help").code == 0
    versioned = compress("--version")
    assert (versioned.code, versioned.out) == (0, f"compress {compressor.__version__}\n")
