"""lm-eval tasks as files: find them by name, and refuse what is wrong with them before anything heavy is imported.

lm-eval itself indexes all of its 14,000 tasks to find one, skips a YAML file that it cannot read, and reports a broken
line of data without saying where it is.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from compressor.runtime.errors import InputError, reason_of
from compressor.runtime.names import DEMO_TASKS
from compressor.runtime.network import why_unreachable
from compressor.runtime.safe_files import PlainLoader, parse_yaml, read_named

BUILT_IN_TASK = "demo_last_word"
LOCAL_FORMATS = {"json": (".json", ".jsonl"), "csv": (".csv",), "parquet": (".parquet",), "text": (".txt",)}
TASK_ALTERNATIVES = f"use --task-path DIR with a YAML on a local JSONL file, or the built-in {BUILT_IN_TASK}"
# Keys of a group that are about the group itself; all others are passed on to its tasks.
GROUP_KEYS = {"group", "group_alias", "task", "tag", "aggregate_metric_list", "metadata"}
Config = dict[str, Any]


@dataclass(frozen=True)
class TaskFile:
    """One task: its YAML file, its merged configuration (code as text), and what the user called it."""

    name: str
    asked: str
    metric: str | None
    file: Path
    config: Config
    overrides: Config = field(default_factory=dict)  # keys that its group sets

    @property
    def packaged(self) -> bool:
        """Whether the task is one of lm-eval's own: its code was installed with lm-eval."""
        folder = packaged_tasks()
        return folder is not None and folder in self.file.parents

    @property
    def data_files(self) -> dict[str, list[Path]] | None:
        """Local data files by split, or None for data of the Hub. Relative paths start at the YAML file, else here."""
        given = (self.config.get("dataset_kwargs") or {}).get("data_files")
        if self.config.get("dataset_path") not in LOCAL_FORMATS or not given:
            return None
        splits = given if isinstance(given, dict) else {"train": given}
        return {
            str(split): [self.locate(str(file)) for file in (files if isinstance(files, list) else [files])]
            for split, files in splits.items()
        }

    def locate(self, name: str) -> Path:
        beside = self.file.parent / os.path.expanduser(name)
        return beside if beside.exists() else Path(name).expanduser().absolute()


class CodeReference(str):
    """`!function module.name` in a YAML file, as text: no code runs while tasks are looked for."""


class TaskLoader(PlainLoader):
    """Reads plain values, and code as text. A key may stand twice, as it does in some of lm-eval's own files."""


TaskLoader.add_constructor("!function", lambda _, node: CodeReference(node.value))


def packaged_tasks() -> Path | None:
    """The directory of lm-eval's own tasks, found without importing it."""
    spec = importlib.util.find_spec("lm_eval")
    folders = list(spec.submodule_search_locations or []) if spec else []
    return Path(folders[0]).resolve() / "tasks" if folders else None


def read_config(file: Path, seen: tuple[Path, ...] = ()) -> Config:
    """A task's YAML, merged over the files that it includes. `seen` are the files that led here."""
    if file in seen:
        raise InputError(f"task file {file} includes itself")
    missing = f"task file {seen[-1] if seen else file} includes {file}, which does not exist"
    config = read_named("task file", file, partial(parse_yaml, loader=TaskLoader), missing)
    if not isinstance(config, dict):
        raise InputError(f"task file {file} must be a mapping with a key `task`, such as `task: my_task`")
    merged: Config = {}
    includes = config.pop("include", [])
    for name in includes if isinstance(includes, list) else [includes]:
        merged |= read_config((file.parent / str(name)).resolve(), (*seen, file))
    return merged | config


class Catalogue:
    """The task files of the given directories, of the built-in task, and those of lm-eval that were needed so far."""

    def __init__(self, paths: list[str]) -> None:
        self.broken: list[InputError] = []
        self.files: dict[Path, Config] = {}
        for name in paths:
            folder = Path(name).expanduser()
            if not folder.is_dir():
                raise InputError(f"--task-path {name} is not a directory; give one that holds lm-eval YAML files")
            files = sorted(folder.resolve().rglob("*.yaml"))
            if not files:
                raise InputError(f"--task-path {name} holds no .yaml files; give a directory of lm-eval tasks")
            self.add(files)
        self.add(sorted(DEMO_TASKS.resolve().glob("*.yaml")))

    def add(self, files: list[Path], packaged: bool = False) -> None:
        for file in files:
            if file in self.files:
                continue
            try:
                self.files[file] = read_config(file)
            except InputError as error:
                if not packaged:
                    self.broken.append(error)

    def find(self, name: str) -> list[tuple[Path, Config]]:
        """The file of a task or group, or all files that carry a tag; local ones win over lm-eval's."""
        matches = self.match(name)
        if not matches and self.broken:  # the task may be in the file that cannot be read
            raise self.broken[0]
        for search in (self.packaged_named, self.packaged_mentioning):  # the quick way first
            if not matches:
                self.add(list(search(name)), packaged=True)
                matches = self.match(name)
        if len(matches) != 1 or matches[0][1].get("task") != name:  # a tag or group: its tasks may be beside it
            for folder in {file.parent for file, _ in matches}:
                self.add(sorted(folder.rglob("*.yaml")), packaged=True)
            matches = self.match(name)
        return matches

    def match(self, name: str) -> list[tuple[Path, Config]]:
        """The file of a task or group of this name, or all files with this tag, among those read so far."""
        for key in ("task", "group"):
            exact = [(file, config) for file, config in self.files.items() if config.get(key) == name]
            if exact:
                return exact[:1]
        return [
            (f, c) for f, c in self.files.items() if name in as_list(c.get("tag")) and isinstance(c.get("task"), str)
        ]

    @cached_property
    def packaged(self) -> list[Path]:
        folder = packaged_tasks()
        return sorted(folder.rglob("*.yaml")) if folder else []

    def packaged_named(self, name: str) -> Iterator[Path]:
        return (file for file in self.packaged if file.stem == name)

    def packaged_mentioning(self, name: str) -> Iterator[Path]:
        word = re.compile(rb"(?<![\w-])" + re.escape(name.encode()) + rb"(?![\w-])")
        return (file for file in self.packaged if word.search(file.read_bytes()))

    def unknown_task(self, name: str) -> InputError:
        names = [
            str(c.get(key)) for c in self.files.values() for key in ("task", "group") if isinstance(c.get(key), str)
        ]
        names += [file.stem for file in self.packaged]
        close = difflib.get_close_matches(name, sorted(set(names)), n=3)
        hint = f"did you mean {', '.join(close)}?" if close else TASK_ALTERNATIVES
        return InputError(f"there is no task {name!r}; {hint}")


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def find_tasks(names: list[str], paths: list[str]) -> list[TaskFile]:
    """The tasks that these names stand for (`name`, `name:metric`, a group or a tag), each once."""
    catalogue = Catalogue(paths)
    tasks: dict[str, TaskFile] = {}
    for asked in names:
        name, metric = asked, None
        if not catalogue.match(asked) and ":" in asked:
            name, _, metric = asked.rpartition(":")
        for task in expand_name(catalogue, name, asked, metric, {}, ()):
            tasks.setdefault(task.name, task)
    return list(tasks.values())


def expand_name(
    catalogue: Catalogue, name: str, asked: str, metric: str | None, overrides: Config, inside: tuple[str, ...]
) -> Iterator[TaskFile]:
    """The tasks that a name stands for. `inside` are the groups around it, `overrides` the keys that they set."""
    entries = catalogue.find(name)
    if not entries or name in inside:
        raise catalogue.unknown_task(name)
    for file, config in entries:
        members = config.get("task")
        if isinstance(members, str):
            yield TaskFile(members, asked, metric, file, config | overrides, overrides)
            continue
        shared = {key: value for key, value in config.items() if key not in GROUP_KEYS}
        if next(find_code(shared), None) is not None:
            raise InputError(f"group {name!r} in {file} gives its tasks Python code; name the tasks themselves")
        for member in as_list(members):
            changes = {key: value for key, value in member.items() if key != "task"} if isinstance(member, dict) else {}
            child = member.get("task") if isinstance(member, dict) else member
            if not isinstance(child, str):
                raise InputError(f"group {name!r} in {file} has a member that is not the name of a task: {member!r}")
            yield from expand_name(catalogue, child, asked, metric, shared | overrides | changes, (*inside, name))


def refuse_unusable(tasks: list[TaskFile], trust_remote_code: bool) -> None:
    """Refuse tasks with code that is not trusted or data that do not exist, without importing lm-eval."""
    hub: list[tuple[TaskFile, str]] = []
    for task in tasks:
        if not task.packaged and not trust_remote_code:
            code = next(iter(find_code(task.config)), None)
            if code is not None:
                raise InputError(
                    f"task {task.name} ({task.file}) runs Python code ({code}); pass --trust-remote-code to allow it"
                )
        files = task.data_files
        if files is None:
            path = task.config.get("dataset_path")
            if not isinstance(path, str) and "custom_dataset" not in task.config and "class" not in task.config:
                raise InputError(f"task {task.name} ({task.file}) names no data: set dataset_path")
            if path in LOCAL_FORMATS:
                raise InputError(
                    f"task {task.name} ({task.file}) names no data files; add dataset_kwargs: {{data_files: "
                    "{validation: FILE}}"
                )
            if Path(str(path)).expanduser().is_dir():
                continue
            if not task.packaged and "/" not in str(path):
                raise InputError(
                    f"task {task.name} ({task.file}) has dataset_path {path!r}; use {', '.join(LOCAL_FORMATS)} or a "
                    "data set of the Hub"
                )
            hub.append((task, str(path)))
            continue
        for file in (file for split in files.values() for file in split):
            check_data(task, file)
    missing = [(task, path) for task, path in hub if not is_cached(path)]
    offline = why_unreachable() if missing else None
    if offline:
        task, path = missing[0]
        raise InputError(
            f"task {task.name} needs the data set {path}, which is not in the local cache, and the Hugging Face Hub "
            f"cannot be reached ({offline}); {TASK_ALTERNATIVES}"
        )


def refuse_early(
    names: list[str] | None, paths: list[str] | None, recipe: Path | None, trust_remote_code: bool
) -> None:
    """Refuse the tasks of the options, else of a recipe. Other mistakes in the recipe are reported when it is read."""
    settings: Any = {}
    with suppress(OSError, ValueError):
        settings = parse_yaml(recipe) if recipe else {}
    settings = settings if isinstance(settings, dict) else {}
    asked, folders = as_list(names or settings.get("tasks")), as_list(paths or settings.get("task_path"))
    words = [part.strip() for word in asked if isinstance(word, str) for part in word.split(",")]
    if any(words):
        refuse_unusable(
            find_tasks([w for w in words if w], [f for f in folders if isinstance(f, str)]), trust_remote_code
        )


def find_code(value: Any) -> Iterator[str]:
    """The references to Python code in a configuration."""
    if isinstance(value, CodeReference):
        yield str(value)
    elif isinstance(value, dict):
        yield from (code for item in value.values() for code in find_code(item))
    elif isinstance(value, list):
        yield from (code for item in value for code in find_code(item))


def is_cached(dataset: str) -> bool:
    """Whether a data set seems to be in the local cache. Only loading it shows that it is whole."""
    from huggingface_hub import constants

    home = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME) / "datasets")
    hub = Path(constants.HF_HUB_CACHE) / f"datasets--{dataset.replace('/', '--')}"
    return hub.is_dir() or any(home.glob(f"{dataset.replace('/', '___')}*"))


def check_data(task: TaskFile, file: Path) -> None:
    """Refuse a data file that does not exist, is empty, or has a line that cannot be read."""
    where = f"task {task.name}: data file {file}"
    if not file.is_file():
        raise InputError(f"{where} does not exist; paths count from the YAML file, or from the working directory")
    try:
        text = file.read_text(encoding="utf-8") if task.config["dataset_path"] == "json" else "unread"
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{where} cannot be read: {error}") from error
    if not text.strip():
        raise InputError(f"{where} has no documents")
    if task.config["dataset_path"] != "json" or is_one_document(text):
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where} is broken in line {number}: {reason_of(error)}") from error
        if not isinstance(document, dict):
            raise InputError(f"{where} is broken in line {number}: it is not a JSON object")


def is_one_document(text: str) -> bool:
    """A JSON file that is one list or object rather than one object per line."""
    if text.lstrip()[0] not in "[{" or (text.lstrip()[0] == "{" and "\n{" in text.strip()):
        return False
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
