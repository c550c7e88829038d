"""The gate: what `compress check` measures again, what it is held against, and who is told; and the GitHub action."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from html import unescape
from pathlib import Path
from typing import Any
from unittest import mock
from xml.etree import ElementTree

import datasets
import pytest
import torch
import yaml
from conftest import SMALL, Compress, Outcome, sentences
from localtasks import write_task
from safetensors.torch import load_file, save_file
from zoo import TEXT

from compressor.pipelines import check as checking
from compressor.pipelines.baseline import BaselineFile, baseline_of, compare_with
from compressor.report.record import Record

ROOT = Path(__file__).parents[2]
WEIGHTS = "model.safetensors"
TASK = "tiny"
GENEROUS = ["--max-dppl", "1000%"]


# What is checked


@pytest.fixture(scope="module", autouse=True)
def own_datasets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What datasets makes of a task's documents does not go into the user's cache."""
    folder = tmp_path_factory.mktemp("datasets")
    with (
        mock.patch.object(datasets.config, "HF_DATASETS_CACHE", folder),
        mock.patch.dict(os.environ, {"HF_DATASETS_CACHE": str(folder)}),
    ):
        os.environ.pop("GITHUB_STEP_SUMMARY", None)  # these tests may run in a job themselves
        yield


def documents(count: int = 24) -> list[dict[str, Any]]:
    rng, words = random.Random(0), TEXT.split()
    return [
        {"question": " ".join(rng.choices(words, k=5)), "choices": rng.sample(words, 4), "label": 2}
        for _ in range(count)
    ]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_task(tmp_path_factory.mktemp("tasks"), TASK, documents()).parent


Check = Callable[..., Outcome]


@pytest.fixture(scope="module")
def check(compress: Compress, compressed: Path, models: Path, tasks: Path) -> Check:
    """The gate with a task and short continuations; what the tests change are `directory`, `source` and `task`."""

    def run(
        *arguments: str | Path,
        directory: Path = compressed,
        source: Path = models / "gpt2",
        task: Path | None = tasks,
        code: int = 0,
    ) -> Outcome:
        tasked = ["--tasks", TASK, "--task-path", task] if task else []
        done = compress("check", directory, "--source", source, *tasked, "--generate", "8", *arguments)
        assert done.code == code, (done.out, done.err)
        assert "Traceback" not in done.err
        assert not any(line.startswith("error: unexpected") for line in done.errors)
        assert len(done.errors) == (code == 2)
        return done

    return run


def report_of(done: Outcome) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(done.out)
    return report


def failed(report: dict[str, Any]) -> list[str]:
    return [check["name"] for check in report["checks"] if not check["passed"]]


def changed_copy(directory: Path, to: Path, factor: float) -> Path:
    """A checkpoint whose last normalisation is scaled: its words are the same, its certainty is not."""
    shutil.copytree(directory, to)
    weights = load_file(to / WEIGHTS)
    name = next(name for name in weights if name.endswith("ln_f.weight"))
    weights[name] = factor * weights[name]
    save_file(weights, to / WEIGHTS, metadata={"format": "pt"})
    return to


# The budget


def test_the_recorded_budget_holds_by_default(check: Check, compressed: Path) -> None:
    record = json.loads((compressed / "compression.json").read_text(encoding="utf-8"))
    report = report_of(check("--json"))
    assert report["passed"] is True
    assert report["budget"] == record["budget"]
    assert report["budget"]["asked"] == "0.2%"
    assert [(c["name"], c["passed"]) for c in report["checks"]] == [("perplexity text", True)]
    (found,) = report["checks"]
    assert found["limit"] == pytest.approx(0.002 * record["perplexity"]["baseline"])
    assert found["measured"] == pytest.approx(record["perplexity"]["delta_upper"], rel=1e-6)


def test_the_record_has_the_budget_too(compress: Compress, compressed: Path, corpus: Path, tmp_path: Path) -> None:
    """Without its recipe; and a checkpoint that promises nothing is refused."""
    copy = Path(shutil.copytree(compressed, tmp_path / "small"))
    (copy / "recipe.yaml").unlink()
    text = ["--text", corpus, "--seq-len", "32", "--verify-tokens", "2000", "--generate", "0"]
    done = compress("check", copy, *text, "--json")
    assert done.code in (0, 1), done.err  # other windows than it was made on
    assert report_of(done)["budget"]["asked"] == "0.2%"
    record = json.loads((copy / "compression.json").read_text(encoding="utf-8"))
    for key in ("perplexity", "budget"):
        del record[key]
    (copy / "compression.json").write_text(json.dumps(record), encoding="utf-8")
    done = compress("check", copy, *text)
    assert done.code == 2
    assert "the checkpoint records no budget; give one with --max-dppl 1.0" in done.errors[0]


def test_an_option_overrides_the_recorded_budget(check: Check) -> None:
    allowed = report_of(check("--max-dppl", "40", "--json"))
    assert allowed["checks"][0]["limit"] == 40
    done = check("--max-dppl", "0.0001", "--json", code=1)
    assert report_of(done)["passed"] is False
    assert failed(report_of(done)) == ["perplexity text"]


def test_fidelity_is_measured_and_can_fail_alone(check: Check, compressed: Path, tmp_path: Path) -> None:
    record = json.loads((compressed / "compression.json").read_text(encoding="utf-8"))
    report = report_of(check("--json"))
    found = report["fidelity"]
    for name in ("kl", "kl_ci95", "top1_agreement", "top1_agreement_ci95"):
        assert found[name] == pytest.approx(record["fidelity"][name], rel=1e-3)
    assert {"kl", "kl_ci95", "top1_agreement", "top1_agreement_ci95", "tokens", "unit", "units"} <= found.keys()
    assert found["tokens"] == report["perplexity"]["tokens"]
    assert report["texts"]["text"]["fidelity"] == found
    assert report["budget"]["max_kl"] is None
    limit = 2 * found["kl_upper"]
    holds = report_of(check("--max-kl", str(limit), "--json"))
    assert [(c["name"], c["passed"]) for c in holds["checks"]] == [("perplexity text", True), ("kl text", True)]
    worse = changed_copy(compressed, tmp_path / "worse", -1.0)
    done = check(
        "--max-dppl", "1e9", "--max-kl", str(limit), "--junit", tmp_path / "junit.xml", directory=worse, code=1
    )
    assert done.out.endswith("FAILED: kl text\n")
    assert re.search(r"(?m)^kl text \(nats per token\) .* FAILED *$", done.out)
    cases = {case.attrib["name"]: case for case in ElementTree.parse(tmp_path / "junit.xml").iter("testcase")}
    assert cases["kl text"].find("failure") is not None
    assert cases["perplexity text"].find("failure") is None


def test_a_recorded_limit_of_kl_holds_by_default(check: Check, compressed: Path, tmp_path: Path) -> None:
    """From the recipe, and from the record where there is no recipe; perplexity need not have a limit."""
    copy = Path(shutil.copytree(compressed, tmp_path / "small"))
    record = json.loads((copy / "compression.json").read_text(encoding="utf-8"))
    recipe = yaml.safe_load((copy / "recipe.yaml").read_text(encoding="utf-8"))
    del recipe["max_dppl"]
    (copy / "recipe.yaml").write_text(yaml.safe_dump({**recipe, "max_kl": 7.0}), encoding="utf-8")
    record["budget"] |= {"max_dppl": None, "asked": "no limit", "max_kl": 5.0}
    (copy / "compression.json").write_text(json.dumps(record), encoding="utf-8")
    report = report_of(check("--json", directory=copy))
    assert [(c["name"], c["limit"]) for c in report["checks"]] == [("kl text", 7.0)]
    assert report["budget"] == {**record["budget"], "max_kl": 7.0}
    assert report["texts"]["text"]["passed"] is None
    (copy / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    report = report_of(check("--json", directory=copy))
    assert [(c["name"], c["limit"]) for c in report["checks"]] == [("kl text", 5.0)]
    record["budget"]["max_kl"] = -5.0
    (copy / "compression.json").write_text(json.dumps(record), encoding="utf-8")
    (error,) = check(directory=copy, code=2).errors
    assert "--max-kl must be positive and finite, got -5.0" in error


def test_a_failing_check_is_named(check: Check) -> None:
    done = check("--max-dppl", "0.0001", code=1)
    assert done.out.endswith("FAILED: perplexity text\n")
    assert re.search(r"(?m)^perplexity text .* FAILED *$", done.out)


def test_a_task_can_fail_alone(check: Check, compressed: Path, tmp_path: Path) -> None:
    """Its score is promised, and the interval of the fall counts: without a limit it is only reported."""
    worse = changed_copy(compressed, tmp_path / "worse", -1.0)
    assert failed(report_of(check("--max-task-drop", "1", "--json"))) == []
    report = report_of(check("--max-dppl", "1e9", "--max-task-drop", "0.01", "--json", directory=worse, code=1))
    assert failed(report) == [f"task {TASK}"]
    found = report["tasks"][TASK]
    assert found["max_drop"] == 0.01
    assert found["passed"] is False
    assert found["drop_upper"] > 0.01
    report = report_of(check("--max-dppl", "1e9", "--json", directory=worse))
    assert report["tasks"][TASK]["passed"] is None
    assert f"task {TASK}" not in [c["name"] for c in report["checks"]]


def test_json_carries_everything_measured(check: Check) -> None:
    report = report_of(check("--json", "--max-task-drop", "1"))
    assert [c["name"] for c in report["checks"]] == ["perplexity text", f"task {TASK}"]
    assert all(c.keys() == {"name", "passed", "measured", "limit", "detail"} for c in report["checks"])
    text = report["texts"]["text"]
    assert {"baseline", "compressed", "delta", "delta_ci95", "max_dppl", "asked", "passed", "sha256"} <= text.keys()
    task = report["tasks"][TASK]
    assert (task["metric"], task["documents"], task["max_drop"]) == ("acc", 24, 1.0)
    assert task["drop"] == pytest.approx(task["source"] - task["compressed"])
    talk = report["generation"]
    assert (talk["prompts"], talk["tokens"], len(talk["samples"])) == (16, 8, 16)
    assert {"prompt", "source", "compressed", "agreement", "first_difference"} == talk["samples"][0].keys()
    where = report["where"]
    tokens = report["perplexity"]["tokens"]
    assert sum(band["tokens"] for band in where["frequency"]) == tokens
    assert sum(band["tokens"] for band in where["position"]) == tokens
    assert len(where["windows"]) == 10
    for key in ("tokenizer_sha256", "compressed_sha256"):
        assert re.fullmatch("[0-9a-f]{64}", report[key])


def test_prompts_of_the_user(check: Check, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("Call me\n\nthe watery part\n", encoding="utf-8")
    report = report_of(check("--prompts", file, "--json"))
    assert [sample["prompt"] for sample in report["generation"]["samples"]] == ["Call me", "the watery part"]
    file.write_text("\n", encoding="utf-8")
    assert str(file) in check("--prompts", file, code=2).errors[0]


def test_a_source_that_has_gone(compress: Compress, compressed: Path, models: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(compressed, tmp_path / "small"))
    for file in (copy / "recipe.yaml", copy / "compression.json"):
        moved = file.read_text(encoding="utf-8").replace(str(models / "gpt2"), str(tmp_path / "gone"))
        file.write_text(moved, encoding="utf-8")
    done = compress("check", copy, "--generate", "0")
    assert done.code == 2
    assert len(done.errors) == 1
    assert str(tmp_path / "gone") in done.errors[0]
    assert "--source DIRECTORY" in done.errors[0]
    assert compress("check", copy, "--generate", "0", "--source", models / "gpt2").code == 0


def test_another_process_measures_the_same(check: Check, compressed: Path, models: Path, tasks: Path) -> None:
    """To the last digit, measured anew in a process of its own; and what is kept on disk is the same again."""
    arguments = ["check", compressed, "--source", models / "gpt2", "--tasks", TASK, "--task-path", tasks]
    command = [sys.executable, "-m", "compressor", *map(str, arguments), "--generate", "8", "--no-cache", "--json"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "1"}  # nothing may depend on the order of a set
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "measured before" not in done.stderr
    cold, warm = check("--json"), check("--json", "-v")
    assert "measured before" in warm.err
    assert done.stdout == cold.out == warm.out  # byte for byte


# Several texts


CODE_WORDS = ["&l|v:", "all:vr|j", "B?v:l&|R", "V^r:se|l"]  # of tokens that the tiny model's blocks matter to


@pytest.fixture(scope="module")
def two_texts(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    code, rng = tmp_path_factory.mktemp("code") / "code.txt", random.Random(7)
    code.write_text("".join("".join(rng.choices(CODE_WORDS, k=9)) + "\n" for _ in range(1000)), encoding="utf-8")
    return ["--text", f"wiki={corpus}", "--text", f"code={code}"]


Both = Callable[..., Outcome]


@pytest.fixture(scope="module")
def compressed_on_both(
    compress: Compress, models: Path, two_texts: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out = tmp_path_factory.mktemp("both") / "small"
    budgets = ["--max-dppl", "wiki=50%", "--max-dppl", "code=50%", "--generate", "0"]
    done = compress(models / "gpt2", *two_texts, *SMALL, *budgets, "--out", out)
    assert done.code == 0, done.err
    return out


def test_every_text_has_a_check_of_its_own(compress: Compress, compressed_on_both: Path) -> None:
    done = compress("check", compressed_on_both, "--json")
    assert done.code == 0, done.err
    report = report_of(done)
    assert [c["name"] for c in report["checks"]] == ["perplexity wiki", "perplexity code"]
    assert report["texts"].keys() == {"wiki", "code"}
    assert report["warnings"] == []
    for found in report["texts"].values():
        assert found["max_dppl"] == pytest.approx(found["baseline"] / 2)
        assert found["tokens"] == report["perplexity"]["tokens"] / 2
    record = json.loads((compressed_on_both / "compression.json").read_text(encoding="utf-8"))
    assert report["texts"] == record["texts"]


@pytest.mark.parametrize("tight", ["wiki", "code"])
def test_a_tight_budget_on_one_text_fails_that_text(compress: Compress, compressed_on_both: Path, tight: str) -> None:
    loose = "code" if tight == "wiki" else "wiki"
    arguments = ["--generate", "0", "--max-dppl", f"{tight}=0.5%", "--max-dppl", f"{loose}=50%"]
    done = compress("check", compressed_on_both, *arguments)
    assert done.code == 1
    assert done.out.endswith(f"FAILED: perplexity {tight}\n")


def test_what_was_compressed_on_prose_does_not_lose_code_in_silence(
    compress: Compress, two_texts: list[str], options: list[str], models: Path, tmp_path: Path
) -> None:
    """Within 3 % on the prose that it was made on and verified with, and outside on code; a job on both keeps both."""
    budgets = ["--max-dppl", "wiki=5%", "--max-dppl", "code=5%", "--generate", "0"]
    assert compress(models / "gpt2", *options, "--max-dppl", "3%", "--out", tmp_path / "prose").code == 0
    done = compress("check", tmp_path / "prose", *two_texts, *budgets, "--json")
    assert done.code == 1
    report = report_of(done)
    assert failed(report) == ["perplexity code"]
    assert report["texts"]["code"]["delta_ci95"][0] > 0.1 * report["texts"]["code"]["baseline"]
    done = compress(models / "gpt2", *two_texts, *SMALL, *budgets, "--out", tmp_path / "both", "--json")
    assert done.code == 0, done.err
    assert all(found["passed"] for found in report_of(done)["texts"].values())
    assert report_of(done)["parameters"]["removed"] > 0


def test_a_text_without_a_budget_is_refused(
    compress: Compress, compressed_on_both: Path, models: Path, two_texts: list[str], tmp_path: Path
) -> None:
    whole = [models / "gpt2", *two_texts, *SMALL, "--out", tmp_path / "out"]
    for command in (["check", compressed_on_both], whole):
        done = compress(*command, "--max-dppl", "wiki=50%")
        assert done.code == 2
        assert "text 'code' has no budget; add --max-dppl code=1.0" in done.errors[0]
        done = compress(*command, "--max-dppl", "50%", "--max-dppl", "poems=1")
        assert done.code == 2
        assert "there is no text 'poems' (known: wiki, code)" in done.errors[0]
    assert list(tmp_path.iterdir()) == []


# The baseline


@pytest.fixture(scope="module")
def kept(check: Check, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The baseline of a check that passed; no test may change it."""
    file = tmp_path_factory.mktemp("baseline") / "baseline.json"
    report = report_of(check("--baseline", file, "--update-baseline", "--json"))
    assert report["baseline_written"] == str(file)
    assert [path.name for path in file.parent.iterdir()] == ["baseline.json"]
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


Edit = Callable[[dict[str, Any]], None]


@pytest.fixture
def baseline(kept: dict[str, Any], tmp_path: Path) -> Callable[..., Path]:
    """A baseline file for this test alone, changed as it wants."""

    def write(edit: Edit | None = None) -> Path:
        value = json.loads(json.dumps(kept))
        if edit:
            edit(value)
        file = tmp_path / "baseline.json"
        file.write_text(json.dumps(value), encoding="utf-8")
        return file

    return write


Baseline = Callable[..., Path]
FIGURES = [
    "perplexity text source",
    "perplexity text compressed",
    "kl text compressed",
    f"task {TASK} acc source",
    f"task {TASK} acc compressed",
    "generation agreement",
]


def test_a_missing_baseline_says_how_to_write_it(check: Check, tmp_path: Path) -> None:
    file = tmp_path / "baseline.json"
    (error,) = check("--baseline", file, code=2).errors
    assert f"baseline {file} does not exist; write it with --baseline {file} --update-baseline" in error
    assert not file.exists()


def test_a_baseline_holds_the_figures(kept: dict[str, Any], check: Check) -> None:
    report = report_of(check("--json"))
    assert list(kept["figures"]) == FIGURES
    values = [figure["value"] for figure in kept["figures"].values()]
    task = report["tasks"][TASK]
    text = report["texts"]["text"]
    agreement = report["generation"]["agreement"]
    kl = text["fidelity"]["kl"]
    assert values == [text["baseline"], text["compressed"], kl, task["source"], task["compressed"], agreement]
    assert kept["environment"] == report["environment"]
    assert kept["source"]["weights_sha256"] == report["source"]["weights_sha256"]


def test_the_same_check_passes_its_baseline(check: Check, baseline: Baseline) -> None:
    file = baseline()
    before = file.read_bytes()
    report = report_of(check("--baseline", file, "--tolerance", "0", "--json"))
    assert [c["name"] for c in report["checks"]] == ["perplexity text", *(f"baseline {name}" for name in FIGURES)]
    assert report["passed"] is True
    assert not any("baseline" in warning for warning in report["warnings"])
    assert file.read_bytes() == before
    assert "baseline_written" not in report


def test_a_missed_budget_writes_no_baseline(check: Check, baseline: Baseline, tmp_path: Path) -> None:
    new = tmp_path / "new.json"
    missed = ["--max-dppl", "0.0001", "--update-baseline", "--json"]
    assert "baseline_written" not in report_of(check("--baseline", new, *missed, code=1))
    assert not new.exists()
    file = baseline(lambda value: value.update(note="as it was"))
    before = file.read_bytes()
    check("--baseline", file, *missed, code=1)
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_update_replaces_figures_that_were_better(check: Check, baseline: Baseline, kept: dict[str, Any]) -> None:
    """An update is a decision: it is not held against the figures that it replaces."""
    file = baseline(lambda value: value["figures"][FIGURES[1]].update(value=1.0))
    check("--baseline", file, code=1)
    report = report_of(check("--baseline", file, "--update-baseline", "--json"))
    assert report["baseline_written"] == str(file)
    assert json.loads(file.read_text(encoding="utf-8"))["figures"] == kept["figures"]
    check("--baseline", file)


def test_an_update_that_cannot_be_written_leaves_the_old_one(
    check: Check, baseline: Baseline, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = baseline()
    before = file.read_bytes()

    def full(path: Path, *_: Any) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(Path, "replace", full)
    assert "No space left on device" in check("--baseline", file, "--update-baseline", code=2).errors[0]
    assert file.read_bytes() == before


def test_update_needs_a_file(check: Check) -> None:
    assert "add --baseline baseline.json" in check("--update-baseline", code=2).errors[0]


@pytest.mark.parametrize("tolerance", ["-0.1", "1", "nan", "inf"])
def test_a_tolerance_out_of_range(check: Check, baseline: Baseline, tolerance: str) -> None:
    assert "--tolerance must be" in check("--baseline", baseline(), "--tolerance", tolerance, code=2).errors[0]


def test_worse_weights_inside_the_budget_are_caught(
    check: Check, baseline: Baseline, compressed: Path, tmp_path: Path
) -> None:
    worse = changed_copy(compressed, tmp_path / "worse", 1.1)
    check(*GENEROUS, directory=worse)  # the budget alone lets it pass
    done = check(*GENEROUS, "--baseline", baseline(), directory=worse, code=1)
    (verdict,) = re.findall(r"(?m)^FAILED: (.*)", done.out)
    assert "baseline perplexity text compressed" in verdict
    assert "source" not in verdict
    assert "warning: the compressed weights are not those of the baseline" in done.out


def test_a_worse_source_is_caught(check: Check, baseline: Baseline, models: Path, tmp_path: Path) -> None:
    """A source that got worse makes the same compressed model look better."""
    source = changed_copy(models / "gpt2", tmp_path / "gpt2", 1.1)
    check(source=source)
    report = report_of(check("--baseline", baseline(), "--json", source=source, code=1))
    assert "baseline perplexity text source" in failed(report)
    assert "baseline perplexity text compressed" not in failed(report)
    assert "the source's weights are not those of the baseline" in report["warnings"]


def test_another_text_is_caught(check: Check, baseline: Baseline, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text(sentences(4000, seed=5), encoding="utf-8")
    arguments = ["--text", other, *GENEROUS, "--baseline", baseline(), "--json"]
    report = report_of(check(*arguments, code=1))
    # The prompts are the beginnings of the text; the task is the same.
    assert failed(report) == [f"baseline {name}" for name in FIGURES if not name.startswith("task")]
    assert all("changed" in c["detail"] for c in report["checks"] if not c["passed"])


def test_windows_of_another_length_are_caught(check: Check, kept: dict[str, Any]) -> None:
    """The same tokens in shorter windows are another measurement."""
    report = report_of(check("--json"))
    report["texts"]["text"]["seq_len"] //= 2
    checks, _ = compare_with(BaselineFile.model_validate(kept), baseline_of(Record.model_validate(report)), 0.005)
    assert [check.name for check in checks if not check.passed] == [f"baseline {name}" for name in FIGURES[:3]]


def swap_tokens(directory: Path, one: str, other: str) -> None:
    """Two tokens of the vocabulary change places."""
    file = directory / "tokenizer.json"
    value = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = value["model"]["vocab"]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    file.write_text(json.dumps(value), encoding="utf-8")


@pytest.mark.parametrize(
    ("pair", "text_changed"), [("ea", True), ("ĀĢ", False)], ids=["tokens of the text", "tokens that it never uses"]
)
def test_another_tokenizer_is_caught(
    check: Check, baseline: Baseline, compressed: Path, tmp_path: Path, pair: str, text_changed: bool
) -> None:
    copy = Path(shutil.copytree(compressed, tmp_path / "copy"))
    swap_tokens(copy, *pair)
    check(*GENEROUS, directory=copy)
    report = report_of(check(*GENEROUS, "--baseline", baseline(), "--json", directory=copy, code=1))
    assert "baseline tokenizer" in failed(report)
    assert ("baseline perplexity text source" in failed(report)) == text_changed


def test_changed_documents_are_caught(check: Check, baseline: Baseline, tasks: Path, tmp_path: Path) -> None:
    """One word of one document; and a task of the same name on fewer documents."""
    other = Path(shutil.copytree(tasks, tmp_path / "other"))
    data = other / f"{TASK}.jsonl"
    first, rest = data.read_text(encoding="utf-8").split("\n", 1)
    row = json.loads(first)
    data.write_text(json.dumps({**row, "question": row["question"] + " sea"}) + "\n" + rest, encoding="utf-8")
    caught = [f"baseline task {TASK} acc source", f"baseline task {TASK} acc compressed"]
    report = report_of(check("--baseline", baseline(), "--json", task=other, code=1))
    assert failed(report) == caught
    assert all(c["detail"] == "the documents or the task changed" for c in report["checks"] if not c["passed"])
    assert failed(report_of(check("--baseline", baseline(), "--task-limit", "23", "--json", code=1))) == caught


def test_what_is_no_longer_measured_is_caught(check: Check, baseline: Baseline) -> None:
    report = report_of(check("--baseline", baseline(), "--json", task=None, code=1))
    assert failed(report) == [f"baseline task {TASK} acc source", f"baseline task {TASK} acc compressed"]
    assert {c["detail"] for c in report["checks"] if not c["passed"]} == {"measured in the baseline, but not now"}
    report = report_of(check("--baseline", baseline(), "--generate", "0", "--json", code=1))
    assert failed(report) == ["baseline generation agreement"]


def test_what_is_measured_for_the_first_time_is_told(check: Check, baseline: Baseline) -> None:
    file = baseline(lambda value: value["figures"].pop(FIGURES[5]))
    report = report_of(check("--baseline", file, "--json"))
    assert "not in the baseline: generation agreement; add it with --update-baseline" in report["warnings"]


def test_another_library_is_only_told(check: Check, baseline: Baseline) -> None:
    file = baseline(lambda value: value["environment"].update(torch="2.0.0", numpy="1.0", threads=64))
    done = check("--baseline", file)
    assert f"warning: torch was 2.0.0 in the baseline, is {torch.__version__}" in done.out
    assert "warning: numpy was 1.0 in the baseline, is None" in done.out
    assert "threads" not in done.out
    assert done.out.endswith("passed\n")


def scale(name: str, factor: float = 1.0, more: float = 0.0) -> Edit:
    def edit(value: dict[str, Any]) -> None:
        figure = value["figures"][name]
        figure["value"] = factor * figure["value"] + more

    return edit


def behind(kept: dict[str, Any], edit: Edit, tolerance: float) -> list[str]:
    """The figures that are behind those of a baseline that was changed."""
    value = json.loads(json.dumps(kept))
    edit(value)
    checks, _ = compare_with(BaselineFile.model_validate(value), BaselineFile.model_validate(kept), tolerance)
    assert len(checks) == len(FIGURES)
    return [check.name.removeprefix("baseline ") for check in checks if not check.passed]


def test_figures_that_improved_pass(check: Check, baseline: Baseline, kept: dict[str, Any]) -> None:
    def edit(value: dict[str, Any]) -> None:
        for name in FIGURES:
            scale(name, 2)(value) if name.startswith(("perplexity", "kl")) else scale(name, more=-0.2)(value)

    assert behind(kept, edit, 0) == []
    check("--baseline", baseline(edit), "--tolerance", "0")


def test_tolerance_is_a_share_of_a_perplexity(kept: dict[str, Any]) -> None:
    """One percent behind."""
    for name in FIGURES[:2]:
        edit = scale(name, 1 / 1.01)
        assert [behind(kept, edit, limit) for limit in (0, 0.009, 0.011)] == [[name], [name], []]


def test_tolerance_is_a_difference_of_scores(kept: dict[str, Any]) -> None:
    """Eight points behind. One document of the task's 24 may always flip, with the arithmetic of another machine."""
    for name in FIGURES[3:]:
        edit = scale(name, more=0.08)
        assert [behind(kept, edit, limit) for limit in (0, 0.075, 0.085)] == [[name], [name], []]
    assert behind(kept, scale(FIGURES[4], more=1 / 24), 0) == []
    assert behind(kept, scale(FIGURES[4], more=2 / 24), 0) == [FIGURES[4]]


def test_a_tiny_divergence_may_round_otherwise_elsewhere(kept: dict[str, Any]) -> None:
    kl = kept["figures"][FIGURES[2]]["value"]
    assert 1e-6 < kl < 1e-3
    assert behind(kept, scale(FIGURES[2], more=-0.5e-5), 0) == []
    assert behind(kept, scale(FIGURES[2], more=-1.5e-5), 0) == [FIGURES[2]]
    assert behind(kept, scale(FIGURES[2], more=-1.5e-5), 2.0) == []


def test_a_score_of_which_less_is_better(kept: dict[str, Any]) -> None:
    """`better` decides which way is behind, not the kind of figure."""

    def less(more: float) -> Edit:
        return lambda value: (value["figures"][FIGURES[3]].update(better=-1), scale(FIGURES[3], more=more)(value))[1]

    assert behind(kept, less(-0.1), 0.005) == [FIGURES[3]]
    assert behind(kept, less(+0.1), 0.005) == []


def test_tolerance_of_the_command(check: Check, baseline: Baseline) -> None:
    """One percent behind is too much for the default of 0.5 %."""
    file = baseline(scale(FIGURES[1], 1 / 1.01))
    assert failed(report_of(check("--baseline", file, "--json", code=1))) == [f"baseline {FIGURES[1]}"]
    check("--baseline", file, "--tolerance", "0.011")


def test_a_baseline_of_another_model_is_refused(check: Check, baseline: Baseline, models: Path, tmp_path: Path) -> None:
    """Another family, whatever it is called; the same size under another name. An update does not pass over it."""
    file = baseline()
    other = changed_copy(models / "gpt2", tmp_path / "other", 1.01)
    before = file.read_bytes()
    renamed = Path(shutil.copytree(models / "llama", tmp_path / "llama" / "gpt2"))
    for source in (models / "llama", renamed, other):
        for arguments in (["--baseline", file], ["--baseline", file, "--update-baseline"]):
            (error,) = check(*arguments, *GENEROUS, source=source, code=2).errors
            assert f"baseline {file} is of another model" in error
            assert str(source) in error
    assert file.read_bytes() == before


def test_the_same_weights_elsewhere_are_the_same_model(
    check: Check, baseline: Baseline, models: Path, tmp_path: Path
) -> None:
    moved = Path(shutil.copytree(models / "gpt2", tmp_path / "elsewhere"))
    check("--baseline", baseline(), source=moved)


def whole(kept: dict[str, Any], **changes: Any) -> bytes:
    return json.dumps({**kept, **changes}).encode()


SPOILED: dict[str, Callable[[dict[str, Any]], bytes]] = {
    "empty": lambda kept: b"",
    "cut off": lambda kept: whole(kept)[:-40],
    "binary": lambda kept: bytes(range(256)),
    "not UTF-8": lambda kept: whole(kept, note="x").replace(b'"x"', b'"\xff"'),
    "a list": lambda kept: b"[]",
    "deep": lambda kept: b"[" * 100_000,
    "a newer schema": lambda kept: whole(kept, schema_version=2),
    "no schema": lambda kept: json.dumps({k: v for k, v in kept.items() if k != "schema_version"}).encode(),
    "no figures": lambda kept: json.dumps({k: v for k, v in kept.items() if k != "figures"}).encode(),
    "a figure that is no number": lambda kept: whole(kept, figures={"x": {"value": "?", "better": 1, "of": ""}}),
    "an infinite figure": lambda kept: whole(kept, figures={"x": {"value": float("inf"), "better": -1, "of": ""}}),
    "a figure without a value": lambda kept: whole(kept, figures={"x": {"value": None, "better": 1, "of": ""}}),
    "a figure without a direction": lambda kept: whole(kept, figures={"x": {"value": 1.0, "of": ""}}),
    "a compression record": lambda kept: json.dumps({"schema_version": 1, "source": {}, "blocks": []}).encode(),
}


@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED)
def test_a_spoiled_baseline_is_refused(
    check: Check,
    kept: dict[str, Any],
    spoil: Callable[[dict[str, Any]], bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before any model is loaded."""
    monkeypatch.setattr(checking, "load_model", None)
    file = tmp_path / "baseline.json"
    file.write_bytes(spoil(kept))
    (error,) = check("--baseline", file, code=2).errors
    assert "baseline.json" in error
    assert file.read_bytes() == spoil(kept)


# Who is told


def cases(file: Path) -> dict[str, bool]:
    """The test cases of a JUnit file, and whether each passed; its counts must be right."""
    root = ElementTree.fromstring(file.read_bytes())
    assert root.tag == "testsuites"
    (suite,) = root
    found = {case.attrib["name"]: case.find("failure") is None for case in suite.iter("testcase")}
    for element in (root, suite):
        assert int(element.attrib["tests"]) == len(found)
        assert int(element.attrib["failures"]) == list(found.values()).count(False)
        assert float(element.attrib["time"]) >= 0
    return found


def test_junit_has_a_case_per_check(check: Check, baseline: Baseline, tmp_path: Path) -> None:
    file = tmp_path / "junit.xml"
    check("--junit", file)
    assert cases(file) == {"perplexity text": True}
    arguments = ["--baseline", baseline(scale(FIGURES[1], 0.9)), "--junit", file, "--json"]
    report = report_of(check(*arguments, code=1))
    assert cases(file) == {c["name"]: c["passed"] for c in report["checks"]}
    assert list(cases(file).values()).count(False) == 1
    (failure,) = ElementTree.parse(file).iter("failure")
    assert "was " in failure.attrib["message"]
    check("--max-dppl", "0.0001", "--junit", file, code=1)
    assert cases(file) == {"perplexity text": False}


def test_warnings_stand_in_the_suite(check: Check, baseline: Baseline, tmp_path: Path) -> None:
    file = tmp_path / "junit.xml"
    check("--baseline", baseline(lambda value: value["environment"].update(torch="<2>&")), "--junit", file)
    told = "".join(element.text or "" for element in ElementTree.parse(file).iter("system-err"))
    assert f"torch was <2>& in the baseline, is {torch.__version__}" in told


def test_hostile_names_through_the_command(
    check: Check, compress: Compress, compressed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory and a task that would break out of XML, HTML and a Markdown table."""
    name = 'a<b>&"|\x01x'
    folder = write_task(tmp_path / "tasks", TASK, documents(), task=name).parent
    directory = Path(shutil.copytree(compressed, tmp_path / "<i>&\x07|\n# x"))
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    done = compress(
        *("check", directory, "--tasks", name, "--task-path", folder, "--max-task-drop", "1", "--generate", "2"),
        *("--junit", tmp_path / "junit.xml", "--report", tmp_path / "report.html"),
    )
    assert done.code == 0, done.err
    assert cases(tmp_path / "junit.xml") == {"perplexity text": True, 'task a<b>&"|\ufffdx': True}
    rows = table_rows(tmp_path / "summary.md")
    assert [len(row) for row in rows] == [5] * len(rows)
    assert rows[-1][0] == 'task a\\<b\\>\\&"\\|\u2401x'
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "a<b>" not in html
    assert "<i>" not in html


@pytest.mark.parametrize("option", ["--junit", "--report", "--baseline"])
def test_an_unwritable_file_is_refused_before_the_work(
    check: Check, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checking, "load_model", None)
    update = ["--update-baseline"] if option == "--baseline" else []
    for file in (tmp_path / "none" / "file", tmp_path):
        assert f"{option} {file} cannot be written" in check(option, file, *update, code=2).errors[0]
    assert list(tmp_path.iterdir()) == []


def table_rows(file: Path) -> list[list[str]]:
    """The cells of a Markdown table; an escaped pipe is no border."""
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def test_a_disk_that_fills_up_is_told(check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing fails without the name of a file."""

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    (error,) = check("--junit", tmp_path / "junit.xml", code=2).errors
    assert "cannot be written: No space left on device" in error
    assert "None" not in error


def test_the_step_summary_is_appended(check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "summary.md"
    file.write_text("what another step wrote\n\n", encoding="utf-8")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(file))
    check()
    check("--max-dppl", "0.0001", code=1)
    text = file.read_text(encoding="utf-8")
    assert text.startswith("what another step wrote\n\n## compress check: passed\n")
    assert text.count("## compress check: FAILED\n") == 1
    head, _, first, _, _, second = table_rows(file)
    assert head[:3] == ["check", "measured", "limit"]
    assert (first[0], first[3]) == ("perplexity text", "passed")
    assert (second[0], second[3]) == ("perplexity text", "**FAILED**")


def test_a_summary_that_cannot_be_written(check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "none" / "summary.md"))
    assert "warning: the step summary" in check().err
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "")
    check()


def letters(text: str) -> str:
    return re.sub("[^A-Za-z]", "", text)


def test_the_report_shows_continuations_and_the_worst_window(check: Check, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    report = report_of(check("--report", file, "--json"))
    shown = letters(unescape(re.sub("<[^>]*>", "", file.read_text(encoding="utf-8"))))
    sample = max(report["generation"]["samples"], key=lambda sample: len(letters(sample["source"])))
    excerpt = report["where"]["windows"][0]["excerpt"]
    for words in (sample["prompt"], sample["source"], sample["compressed"], excerpt):
        assert len(letters(words)) > 4
        assert letters(words) in shown


# The GitHub action


ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
STEPS: list[dict[str, Any]] = ACTION["runs"]["steps"]
STUB = """#!{python}
import json, os, sys
with open({log!r}, "w", encoding="utf-8") as file:
    json.dump({{"argv": sys.argv[1:], "cache": os.environ.get("COMPRESSOR_CACHE")}}, file)
sys.exit({code})
"""
INPUTS = {f"${{{{ inputs.{name} }}}}": name for name in ACTION["inputs"]}


def script(name: str) -> dict[str, Any]:
    return next(step for step in STEPS if step.get("name") == name)


@pytest.fixture
def act(tmp_path: Path) -> Callable[..., tuple[int, list[str]]]:
    """Run a step's script as GitHub does, with `compress` and `python` replaced by a stub; what they were given."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "here").mkdir()
    log = tmp_path / "argv.json"

    def run(step: str = "check", code: int = 0, **inputs: str) -> tuple[int, list[str]]:
        for command in ("compress", "python"):
            stub = tmp_path / "bin" / command
            stub.write_text(STUB.format(python=sys.executable, log=str(log), code=code), encoding="utf-8")
            stub.chmod(0o755)
        log.unlink(missing_ok=True)
        given = {name: value.get("default", "") for name, value in ACTION["inputs"].items()}
        given |= {name.replace("_", "-"): value for name, value in inputs.items()}
        env = {"PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"}
        for name, value in script(step)["env"].items():
            env[name] = given[INPUTS[value]] if value in INPUTS else f"<{value}>"
        file = tmp_path / "step.sh"
        file.write_text(script(step)["run"], encoding="utf-8")
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(file)]
        done = subprocess.run(command, env=env, cwd=tmp_path / "here", capture_output=True, text=True, timeout=30)
        assert list((tmp_path / "here").iterdir()) == [], "an input was run"
        seen = json.loads(log.read_text(encoding="utf-8")) if log.exists() else {"argv": []}
        assert seen.get("cache", "").endswith("/compressor-cache>") if step == "check" and log.exists() else True
        return done.returncode, seen["argv"]

    return run


Act = Callable[..., tuple[int, list[str]]]
HOSTILE_INPUTS = [
    "$(touch pwned)",
    "`touch pwned`",
    "; touch pwned #",
    "a b  c",
    "\"; touch pwned; '",
    "${PATH}",
    "*",
    "--help",
    "\\",
]


def test_the_action_is_whole() -> None:
    assert ACTION["name"] == "compress check"
    assert list(ACTION["inputs"]) == [
        *("directory", "max-dppl", "max-kl", "tasks", "max-task-drop", "task-path", "baseline", "junit", "report"),
        *("arguments", "python-version", "version"),
    ]
    assert [name for name, value in ACTION["inputs"].items() if value.get("required")] == ["directory"]
    defaults = {name: value["default"] for name, value in ACTION["inputs"].items() if "default" in value}
    assert defaults == {"junit": "compress-check.xml", "python-version": "3.11"}
    assert all(value["description"] for value in ACTION["inputs"].values())
    uses = [step["uses"].split("@")[0] for step in STEPS if "uses" in step]
    assert uses == ["actions/setup-python", "actions/cache"]
    used = {match for step in STEPS for match in re.findall(r"inputs\.([\w-]+)", json.dumps(step))}
    assert used == set(ACTION["inputs"])
    assert len((ROOT / "action.yml").read_text(encoding="utf-8").splitlines()) < 70


def test_no_input_stands_in_a_script() -> None:
    scripts = [step["run"] for step in STEPS if "run" in step]
    assert len(scripts) == 2
    assert not any("${{" in words for words in scripts)
    assert all(words.startswith("set -euo pipefail\n") for words in scripts)
    assert all(step["shell"] == "bash" for step in STEPS if "run" in step)


def test_measurements_are_kept_between_runs() -> None:
    """A key is written once, so every run has its own and begins with the latest of its system."""
    cache = next(step["with"] for step in STEPS if step.get("uses", "").startswith("actions/cache"))
    assert cache["path"] == script("check")["env"]["COMPRESSOR_CACHE"]
    assert cache["key"].startswith(cache["restore-keys"])
    assert "${{ runner.os }}" in cache["restore-keys"]
    assert "${{ github.run_id }}" in cache["key"]


def test_inputs_become_options(act: Act) -> None:
    assert act(directory="small") == (0, ["check", "--junit=compress-check.xml", "--", "small"])
    code, argv = act(
        directory="small",
        max_dppl="wiki=1%\ncode=2%\n",
        max_kl="0.02",
        tasks="piqa,arc_easy",
        max_task_drop="0.01",
        task_path="tasks",
        baseline="baseline.json",
        junit="",
        report="report.html",
        arguments="--tolerance 0.01\n  --text 'my text.txt' --json",
    )
    assert code == 0
    assert argv == [
        *("check", "--max-dppl=wiki=1%", "--max-dppl=code=2%", "--max-kl=0.02", "--tasks=piqa,arc_easy"),
        *("--max-task-drop=0.01", "--task-path=tasks", "--baseline=baseline.json", "--report=report.html"),
        *("--tolerance", "0.01", "--text", "my text.txt", "--json", "--", "small"),
    ]


@pytest.mark.parametrize("value", HOSTILE_INPUTS)
def test_hostile_inputs_stay_words(act: Act, value: str) -> None:
    names = ["max_dppl", "max_kl", "tasks", "max_task_drop", "task_path", "baseline", "junit", "report"]
    code, argv = act(directory=value, **dict.fromkeys(names, value))
    assert code == 0
    assert argv == ["check", *(f"--{name.replace('_', '-')}={value}" for name in names), "--", value]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("$(touch pwned)", ["$(touch", "pwned)"]),
        ("; rm -rf x", [";", "rm", "-rf", "x"]),
        ("`touch pwned` && touch pwned", ["`touch", "pwned`", "&&", "touch", "pwned"]),
        ('"$(touch pwned)" *', ["$(touch pwned)", "*"]),
        ("  \n ", []),
        ("%s%n \\\\", ["%s%n", "\\"]),
    ],
)
def test_hostile_arguments_stay_words(act: Act, value: str, words: list[str]) -> None:
    assert act(directory="small", junit="", arguments=value) == (0, ["check", *words, "--", "small"])


def test_arguments_with_an_open_quote_fail(act: Act) -> None:
    code, argv = act(directory="small", arguments="--text 'my text")
    assert code != 0
    assert argv == []


@pytest.mark.parametrize("code", [1, 2])
def test_the_step_ends_as_the_gate_does(act: Act, code: int) -> None:
    assert act(directory="small", code=code)[0] == code


def test_the_gate_understands_the_words_of_the_action(act: Act, compress: Compress, compressed: Path) -> None:
    """The command itself is given what the script made."""
    _, argv = act(directory=str(compressed), max_dppl="text=5%", junit="", arguments="--generate 0 --json")
    done = compress(*argv)
    assert done.code == 0, done.err
    assert report_of(done)["budget"]["asked"] == "5%"


def test_the_package_is_installed_from_the_checkout_or_as_asked(act: Act) -> None:
    place = "<${{ github.action_path }}>"
    install = ["-m", "pip", "install", "-c", f"{place}/constraints.txt", "--"]
    assert act("install") == (0, [*install, place])
    for value in ("compressor==0.1.0", "compressor @ file:///x y", *HOSTILE_INPUTS):
        assert act("install", version=value) == (0, [*install, value])


def test_a_baseline_that_is_only_read_need_not_be_writable(
    check: Check, baseline: Baseline, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = baseline()
    monkeypatch.setattr("compressor.report.ci.os.access", lambda _, mode, **__: mode != os.W_OK)
    check("--baseline", file)
    assert "cannot be written" in check("--baseline", file, "--update-baseline", code=2).errors[0]
