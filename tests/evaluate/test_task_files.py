"""Tasks as files: what a name stands for, and what is refused before lm-eval, datasets or torch are imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from localtasks import CHOICE, DOCUMENT, write_lines, write_task, write_yaml

from compressor.evaluate import task_files as taskfiles
from compressor.evaluate.task_files import (
    BUILT_IN_TASK,
    TaskFile,
    find_tasks,
    packaged_tasks,
    read_config,
    refuse_unusable,
)
from compressor.runtime.errors import InputError
from compressor.runtime.names import DEMO_TASKS


@pytest.fixture(autouse=True)
def no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks whether the Hub answers has failed, unless the test says otherwise."""

    def ask() -> str | None:
        raise AssertionError("the network was asked for")

    monkeypatch.setattr(taskfiles, "why_unreachable", ask)


def find(folder: Path, *names: str) -> list[TaskFile]:
    return find_tasks(list(names), [str(folder)])


def named(tasks: list[TaskFile]) -> list[str]:
    return [task.name for task in tasks]


def refusal(folder: Path, name: str = "mine", trust: bool = False) -> str:
    with pytest.raises(InputError) as refused:
        refuse_unusable(find(folder, name), trust)
    return str(refused.value)


# What a name stands for


def test_a_name(tmp_path: Path) -> None:
    file = write_task(tmp_path / "deep" / "down", "mine")
    write_task(tmp_path, "other")
    (task,) = find(tmp_path, "mine")
    assert (task.name, task.asked, task.metric, task.file) == ("mine", "mine", None, file)
    assert task.config["output_type"] == "multiple_choice"
    assert not task.packaged
    assert named(find(tmp_path, "other", "mine", "other")) == ["other", "mine"]


def test_a_name_with_a_metric(tmp_path: Path) -> None:
    write_task(tmp_path, "mine")
    (task,) = find(tmp_path, "mine:acc_norm")
    assert (task.name, task.asked, task.metric) == ("mine", "mine:acc_norm", "acc_norm")


def test_a_colon_that_belongs_to_the_name(tmp_path: Path) -> None:
    write_yaml(tmp_path / "file.yaml", task="mine:two", **CHOICE)
    (plain,) = find(tmp_path, "mine:two")
    (with_metric,) = find(tmp_path, "mine:two:acc")
    assert (plain.name, plain.metric) == ("mine:two", None)
    assert (with_metric.name, with_metric.metric) == ("mine:two", "acc")


def test_a_group_with_overrides(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        write_task(tmp_path, name, num_fewshot=0)
    write_yaml(tmp_path / "inner.yaml", group="inner", task=["b", {"task": "c", "num_fewshot": 2}])
    members = ["a", {"task": "inner", "num_fewshot": 1, "description": "outer"}]
    write_yaml(tmp_path / "outer.yaml", group="outer", task=members)
    found = {task.name: task for task in find(tmp_path, "outer:acc")}
    assert list(found) == ["a", "b", "c"]
    assert {task.asked for task in found.values()} == {"outer:acc"}
    assert {task.metric for task in found.values()} == {"acc"}
    # What stands nearest to the task wins, and what is said of a group holds for all in it.
    assert found["a"].overrides == {}
    assert found["b"].overrides == {"num_fewshot": 1, "description": "outer"}
    assert found["c"].overrides == {"num_fewshot": 2, "description": "outer"}
    assert [task.config["num_fewshot"] for task in found.values()] == [0, 1, 2]


def test_a_group_of_itself(tmp_path: Path) -> None:
    write_yaml(tmp_path / "group.yaml", group="round", task=["robin"])
    write_yaml(tmp_path / "other.yaml", group="robin", task=["round"])
    with pytest.raises(InputError, match="'round'"):
        find(tmp_path, "round")


@pytest.mark.parametrize("member", [3, ["a"], {"name": "a"}, {"task": ["a"]}, None])
def test_a_group_with_an_unusable_member(tmp_path: Path, member: Any) -> None:
    write_yaml(tmp_path / "group.yaml", group="mine", task=[member])
    with pytest.raises(InputError, match=r"group 'mine' in .*group\.yaml has a member that is not the name of a task"):
        find(tmp_path, "mine")


def test_a_tag(tmp_path: Path) -> None:
    write_task(tmp_path, "a", tag="sea")
    write_task(tmp_path, "b", tag=["shore", "sea"])
    write_task(tmp_path, "c", tag="season")
    assert named(find(tmp_path, "sea")) == ["a", "b"]
    assert named(find(tmp_path, "shore")) == ["b"]
    assert named(find(tmp_path, "sea", "a")) == ["a", "b"]


def test_an_include(tmp_path: Path) -> None:
    write_yaml(tmp_path / "common" / "base.yaml", tag="base", num_fewshot=3, **CHOICE)
    write_yaml(tmp_path / "common" / "middle.yaml", include="base.yaml", num_fewshot=2, description="middle")
    write_yaml(tmp_path / "extra.yaml", doc_to_decontamination_query="{{question}}")
    file = write_yaml(
        tmp_path / "mine.yaml", task="mine", include=["common/middle.yaml", "extra.yaml"], description="mine"
    )
    (task,) = find(tmp_path, "mine")
    assert task.file == file
    assert task.config == {
        "task": "mine",
        "tag": "base",
        **CHOICE,
        "num_fewshot": 2,
        "description": "mine",
        "doc_to_decontamination_query": "{{question}}",
    }
    assert named(find(tmp_path, "base")) == ["mine"]  # a tag is inherited


def test_the_same_include_twice_is_no_cycle(tmp_path: Path) -> None:
    write_yaml(tmp_path / "base.yaml", **CHOICE)
    for name in ("left", "right"):
        write_yaml(tmp_path / f"{name}.yaml", include="base.yaml")
    write_yaml(tmp_path / "mine.yaml", task="mine", include=["left.yaml", "right.yaml"])
    assert named(find(tmp_path, "mine")) == ["mine"]


@pytest.mark.parametrize("name", ["mine.yaml", "other.yaml", "../tasks/mine.yaml"])
def test_an_include_of_itself(tmp_path: Path, name: str) -> None:
    write_yaml(tmp_path / "tasks" / "mine.yaml", task="mine", include=name)
    write_yaml(tmp_path / "tasks" / "other.yaml", include="mine.yaml")
    with pytest.raises(InputError, match=r"includes itself$") as refused:
        find(tmp_path / "tasks", "mine")
    assert len(str(refused.value)) < 2 * len(str(tmp_path)) + 100


def test_an_include_that_is_missing(tmp_path: Path) -> None:
    file = write_yaml(tmp_path / "mine.yaml", task="mine", include="nowhere.yaml")
    with pytest.raises(InputError) as refused:
        find(tmp_path, "mine")
    assert str(refused.value) == f"task file {file} includes {tmp_path / 'nowhere.yaml'}, which does not exist"


# lm-eval's own


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were parsed."""
    files: list[Path] = []

    def record(file: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
        files.append(file)
        return read_config(file, seen)

    monkeypatch.setattr(taskfiles, "read_config", record)
    return files


def test_a_task_of_lm_eval_is_found_without_reading_them_all(reads: list[Path]) -> None:
    (task,) = find_tasks(["lambada_openai"], [])
    assert task.packaged
    assert task.config["dataset_path"] == "EleutherAI/lambada_openai"
    assert task.data_files is None
    assert 0 < len(reads) < 100
    folder = packaged_tasks()
    assert folder is not None
    assert len(list(folder.rglob("*.yaml"))) > 10_000


def test_a_local_file_wins(tmp_path: Path, reads: list[Path]) -> None:
    file = write_task(tmp_path, "lambada_openai")
    (task,) = find(tmp_path, "lambada_openai")
    assert task.file == file
    assert not task.packaged
    folder = packaged_tasks()
    assert not [file for file in reads if folder in file.parents]


def test_the_built_in_task_needs_no_path(reads: list[Path]) -> None:
    tasks = find_tasks([BUILT_IN_TASK], [])
    assert named(tasks) == [BUILT_IN_TASK]
    assert len(reads) == len(list(DEMO_TASKS.glob("*.yaml")))
    refuse_unusable(tasks, trust_remote_code=False)


def test_nothing_heavy_is_imported(tmp_path: Path) -> None:
    write_task(tmp_path, "mine")
    code = (
        "import sys\n"
        "from compressor.evaluate.task_files import find_tasks, refuse_unusable\n"
        "find_tasks(['lambada_openai'], [])\n"
        f"refuse_unusable(find_tasks(['mine'], [{str(tmp_path)!r}]), False)\n"
        "print(sorted({'torch', 'datasets', 'lm_eval', 'transformers', 'evaluate'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_an_unknown_name(tmp_path: Path) -> None:
    write_task(tmp_path, "seafaring")
    with pytest.raises(InputError, match=r"^there is no task 'seafarin'; did you mean .*\bseafaring\b"):
        find(tmp_path, "seafarin")
    with pytest.raises(InputError, match=r"did you mean .*\blambada_openai\b"):
        find_tasks(["lambada_opena1"], [])
    with pytest.raises(InputError, match=rf"^there is no task 'Ω{{3}}'; use --task-path .*{BUILT_IN_TASK}$"):
        find(tmp_path, "ΩΩΩ")


# The YAML file


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("task: mine\nmetric_list: [1\nother: 2\n", 3),
        ("task: mine\ndoc_to_text: a: b\n", 2),
        ("task: mine\ndescription: ok\n\tdoc_to_text: x\n", 3),
        ("task: !!python/object/apply:os.system ['touch pwned']\n", 1),
    ],
)
def test_malformed_yaml(tmp_path: Path, content: str, line: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.yaml").write_text(content, encoding="utf-8")
    with pytest.raises(InputError) as refused:
        find(tmp_path, "mine")
    assert str(refused.value).startswith(f"task file {tmp_path / 'broken.yaml'} is not valid YAML (line {line}): ")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "pwned").exists()


def test_yaml_nested_too_deep(tmp_path: Path) -> None:
    (tmp_path / "broken.yaml").write_text("task: " + "[" * 5_000, encoding="utf-8")
    with pytest.raises(InputError, match="is not valid YAML"):
        find(tmp_path, "mine")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "must be a mapping"),
        (b"- task\n", "must be a mapping"),
        (b"a sentence\n", "must be a mapping"),
        (b"task: caf\xe9\n", "cannot be read"),
    ],
)
def test_a_file_that_is_no_task(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "broken.yaml").write_bytes(content)
    with pytest.raises(InputError, match=rf"broken\.yaml {says}"):
        find(tmp_path, "mine")


def test_a_broken_file_does_not_hide_the_others(tmp_path: Path) -> None:
    (tmp_path / "broken.yaml").write_text("a: [", encoding="utf-8")
    write_task(tmp_path, "mine")
    assert named(find(tmp_path, "mine")) == ["mine"]


def test_the_path(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"--task-path .*nowhere is not a directory"):
        find(tmp_path / "nowhere", "mine")
    with pytest.raises(InputError, match=r"--task-path .*mine\.yaml is not a directory"):
        find(write_task(tmp_path, "mine"), "mine")
    with pytest.raises(InputError, match=r"--task-path .*empty holds no \.yaml files"):
        find(tmp_path / "empty", "mine")


# The data


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (["{}", '{"a": 1', "{}"], "is broken in line 2: Expecting"),
        (["", "", "{]"], "is broken in line 3: Expecting"),
        (["{}", "{}", "[1, 2]"], "is broken in line 3: it is not a JSON object"),
        (['"text"'], "is broken in line 1: it is not a JSON object"),
        (["3", "4"], "is broken in line 1: it is not a JSON object"),
        (["not JSON at all"], "is broken in line 1: Expecting value"),
        (["{}", "[" * 100_000], "is broken in line 2: "),
    ],
)
def test_a_broken_line(tmp_path: Path, lines: list[str], says: str) -> None:
    write_task(tmp_path, "mine")
    (tmp_path / "mine.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    message = refusal(tmp_path)
    assert message.startswith(f"task mine: data file {tmp_path / 'mine.jsonl'} {says}")
    assert "\n" not in message


@pytest.mark.parametrize("content", ["", "\n \n\t\n"])
def test_an_empty_file(tmp_path: Path, content: str) -> None:
    write_task(tmp_path, "mine")
    (tmp_path / "mine.jsonl").write_text(content, encoding="utf-8")
    assert refusal(tmp_path) == f"task mine: data file {tmp_path / 'mine.jsonl'} has no documents"


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    write_task(tmp_path, "mine")
    (tmp_path / "mine.jsonl").write_bytes(b'{"a": "\xff"}\n')
    assert f"data file {tmp_path / 'mine.jsonl'} cannot be read" in refusal(tmp_path)


def test_a_missing_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_task(tmp_path / "tasks", "mine")
    (tmp_path / "tasks" / "mine.jsonl").unlink()
    assert f"data file {tmp_path / 'mine.jsonl'} does not exist; paths count from" in refusal(tmp_path / "tasks")


@pytest.mark.parametrize(
    "content",
    [
        '[{"a": 1}, {"a": 2}]',
        '[\n  {"a": 1},\n  {"a": 2}\n]\n',
        '{"a": 1}\n',
        '{\n "a": 1\n}\n',
        '{"a": 1}\r\n{"a": 2}',
        '{"a": "[\u2028]"}\n{"a": "\u0085"}\n',  # what str.splitlines takes for the end of a line
    ],
)
def test_sound_data(tmp_path: Path, content: str) -> None:
    write_task(tmp_path, "mine")
    (tmp_path / "mine.jsonl").write_bytes(content.encode())
    refuse_unusable(find(tmp_path, "mine"), trust_remote_code=False)


def test_paths_count_from_the_yaml_and_else_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    splits = {"validation": ["data/both.jsonl", "data/here.jsonl"], "train": str(tmp_path / "absolute.jsonl")}
    write_yaml(
        tmp_path / "tasks" / "mine.yaml",
        **{"task": "mine", "dataset_path": "json", "dataset_kwargs": {"data_files": splits}, **CHOICE},
    )
    for root, name in ((tmp_path / "tasks", "both"), (here, "both"), (here, "here")):
        (root / "data").mkdir(exist_ok=True)
        write_lines(root / "data" / f"{name}.jsonl", [DOCUMENT])
    write_lines(tmp_path / "absolute.jsonl", [DOCUMENT])
    tasks = find(tmp_path / "tasks", "mine")
    assert tasks[0].data_files == {
        "validation": [tmp_path / "tasks" / "data" / "both.jsonl", here / "data" / "here.jsonl"],
        "train": [tmp_path / "absolute.jsonl"],
    }
    refuse_unusable(tasks, trust_remote_code=False)


@pytest.mark.parametrize("files", ["mine.jsonl", ["mine.jsonl"]])
def test_files_without_a_split_are_the_train_split(tmp_path: Path, files: Any) -> None:
    write_task(tmp_path, "mine", dataset_kwargs={"data_files": files})
    assert find(tmp_path, "mine")[0].data_files == {"train": [tmp_path / "mine.jsonl"]}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"dataset_path": None}, "names no data: set dataset_path"),
        ({"dataset_kwargs": None}, "names no data files; add dataset_kwargs"),
        ({"dataset_kwargs": {"data_files": {}}}, "names no data files; add dataset_kwargs"),
        # These formats of datasets run what stands in the file: a pickle is code.
        ({"dataset_path": "pandas"}, "has dataset_path 'pandas'; use json, csv, parquet, text or a data set"),
        ({"dataset_path": "webdataset"}, "has dataset_path 'webdataset'"),
    ],
)
def test_data_of_another_kind(tmp_path: Path, settings: dict[str, Any], says: str) -> None:
    file = write_task(tmp_path, "mine", **settings)
    assert refusal(tmp_path).startswith(f"task mine ({file}) {says}")
    assert refusal(tmp_path, trust=True).startswith(f"task mine ({file}) {says}")


def test_other_formats_are_not_read_as_json(tmp_path: Path) -> None:
    write_task(tmp_path, "mine", dataset_path="csv", dataset_kwargs={"data_files": "mine.csv"})
    (tmp_path / "mine.csv").write_text("question,label\na,0\n", encoding="utf-8")
    refuse_unusable(find(tmp_path, "mine"), trust_remote_code=False)


# Code


@pytest.mark.parametrize(
    "line",
    [
        "process_docs: !function utils.touch",
        "metric_list: [{metric: !function utils.touch, aggregation: mean}]",
        "filter_list: [{name: f, filter: [{function: custom, filter_fn: !function utils.touch}]}]",
        "class: !function utils.Touch",
    ],
)
def test_code_needs_trust(tmp_path: Path, line: str) -> None:
    file = write_task(tmp_path, "mine")
    with file.open("a", encoding="utf-8") as handle:
        handle.write(line + "\n")
    marker = tmp_path / "marker"
    (tmp_path / "utils.py").write_text(f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n", encoding="utf-8")
    message = refusal(tmp_path)
    assert message.startswith(f"task mine ({file}) runs Python code (utils.")
    assert message.endswith("; pass --trust-remote-code to allow it")
    refuse_unusable(find(tmp_path, "mine"), trust_remote_code=True)
    assert not marker.exists()


def test_code_of_an_include_and_of_a_group_needs_trust(tmp_path: Path) -> None:
    write_task(tmp_path, "mine", include="base.yaml")
    write_task(tmp_path, "member")
    (tmp_path / "base.yaml").write_text("process_docs: !function utils.one\n", encoding="utf-8")
    group = "group: all\ntask: [{task: member, process_docs: !function utils.two}]\n"
    (tmp_path / "group.yaml").write_text(group, encoding="utf-8")
    assert "runs Python code (utils.one)" in refusal(tmp_path, "mine")
    assert "runs Python code (utils.two)" in refusal(tmp_path, "all")


def test_code_of_lm_eval_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user installed it; only the data are missing."""
    monkeypatch.setattr(taskfiles, "why_unreachable", lambda: None)
    tasks = find_tasks(["hellaswag"], [])
    assert list(taskfiles.find_code(tasks[0].config))
    refuse_unusable(tasks, trust_remote_code=False)


# The Hub


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    return tmp_path


def test_a_hub_task_without_network(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[None] = []
    monkeypatch.setattr(taskfiles, "why_unreachable", lambda: asked.append(None) or "the cable is cut")
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("it went to the network all the same"))
    write_task(empty_cache / "tasks", "mine", dataset_path="someone/questions", dataset_kwargs=None)
    message = refusal(empty_cache / "tasks")
    assert message == (
        "task mine needs the data set someone/questions, which is not in the local cache, and the Hugging Face Hub "
        "cannot be reached (the cable is cut); use --task-path DIR with a YAML on a local JSONL file, or the built-in "
        f"{BUILT_IN_TASK}"
    )
    assert len(asked) == 1


def test_a_hub_task_with_network_is_left_to_lm_eval(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taskfiles, "why_unreachable", lambda: None)
    write_task(empty_cache / "tasks", "mine", dataset_path="someone/questions", dataset_kwargs=None)
    refuse_unusable(find(empty_cache / "tasks", "mine"), trust_remote_code=False)


@pytest.mark.parametrize("place", ["hub/datasets--someone--questions", "datasets/someone___questions"])
def test_a_cached_hub_task_needs_no_network(empty_cache: Path, place: str) -> None:
    (empty_cache / place).mkdir(parents=True)
    write_task(empty_cache / "tasks", "mine", dataset_path="someone/questions", dataset_kwargs=None)
    refuse_unusable(find(empty_cache / "tasks", "mine"), trust_remote_code=False)


def test_a_data_set_in_a_directory_needs_no_network(tmp_path: Path) -> None:
    write_task(tmp_path, "mine", dataset_path=os.fspath(tmp_path), dataset_kwargs=None)
    refuse_unusable(find(tmp_path, "mine"), trust_remote_code=False)
