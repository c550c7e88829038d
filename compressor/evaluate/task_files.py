"""lm-eval tasks as files: find them by name, and refuse what is wrong with them before anything heavy is imported.

lm-eval itself indexes all of its 14,000 tasks to find one, passes over a YAML file that it cannot read, and leaves a
broken line of data to an exception that does not name it.
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
from functools import cached_property
from pathlib import Path
from typing import Any

from compressor.runtime.errors import InputError, reason_of
from compressor.runtime.network import why_unreachable
from compressor.runtime.safe_files import Malformed, PlainLoader, parse_yaml

BUILT_IN = Path(__file__).parents[1] / "demo" / "tasks"
BUILT_IN_TASK = "demo_last_word"
LOCAL_FORMATS = {"json": (".json", ".jsonl"), "csv": (".csv",), "parquet": (".parquet",), "text": (".txt",)}
TASK_ALTERNATIVES = f"use --task-path DIR with a YAML on a local JSONL file, or the built-in {BUILT_IN_TASK}"
GROUP_KEYS = {"group", "group_alias", "task", "tag", "aggregate_metric_list", "metadata"}  # the rest is for its tasks
Config = dict[str, Any]


@dataclass(frozen=True)
class TaskFile:
    """One task: its YAML file, its merged configuration (code as text), and what the user called it."""

    name: str
    asked: str
    metric: str | None
    file: Path
    config: Config
    overrides: Config = field(default_factory=dict)  # from the group that it was found in

    @property
    def packaged(self) -> bool:
        """Whether it came with lm-eval, whose code the user installed."""
        folder = packaged_tasks()
        return folder is not None and folder in self.file.parents

    @property
    def data_files(self) -> dict[str, list[Path]] | None:
        """Local data by split, or None when they are a hub's. A relative path counts from the YAML, else from here."""
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


class Code(str):
    """`!function module.name`, not resolved: finding a task runs nothing."""


class Loader(PlainLoader):
    """Plain values, and code as text. Some of lm-eval's own files have a key twice."""


Loader.add_constructor("!function", lambda _, node: Code(node.value))


def packaged_tasks() -> Path | None:
    """lm-eval's own tasks, without importing it."""
    spec = importlib.util.find_spec("lm_eval")
    folders = list(spec.submodule_search_locations or []) if spec else []
    return Path(folders[0]).resolve() / "tasks" if folders else None


def read_config(file: Path, seen: tuple[Path, ...] = ()) -> Config:
    """A task's YAML with what it includes."""
    if file in seen:
        raise InputError(f"task file {file} includes itself")
    try:
        config = parse_yaml(file, Loader)
    except FileNotFoundError:
        raise InputError(f"task file {seen[-1] if seen else file} includes {file}, which does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"task file {file} cannot be read: {error}") from error
    except Malformed as error:
        raise InputError(f"task file {file} is not valid YAML{error.where}: {error}") from error
    if not isinstance(config, dict):
        raise InputError(f"task file {file} must be a mapping with a key `task`, such as `task: my_task`")
    merged: Config = {}
    includes = config.pop("include", [])
    for name in includes if isinstance(includes, list) else [includes]:
        merged |= read_config((file.parent / str(name)).resolve(), (*seen, file))
    return merged | config


class Catalogue:
    """The task files of some directories, of the built-in task, and those of lm-eval that mention a name."""

    def __init__(self, paths: list[str]) -> None:
        self.broken: list[InputError] = []
        self.files: dict[Path, Config] = {}
        for name in paths:
            folder = Path(name).expanduser()
            if not folder.is_dir():
                raise InputError(f"--task-path {name} is not a directory; give one that holds lm-eval YAML files")
            found = sorted(folder.resolve().rglob("*.yaml"))
            if not found:
                raise InputError(f"--task-path {name} holds no .yaml files; give a directory of lm-eval tasks")
            self.add(found)
        self.add(sorted(BUILT_IN.resolve().glob("*.yaml")))

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
        found = self.matching(name)
        if not found and self.broken:  # it may stand in the file that cannot be read
            raise self.broken[0]
        for files in (self.named, self.mentioned):  # a file of that name is the quick way
            if not found:
                self.add(list(files(name)), packaged=True)
                found = self.matching(name)
        if len(found) != 1 or found[0][1].get("task") != name:  # a tag or group: files beside it may include its own
            for folder in {file.parent for file, _ in found}:
                self.add(sorted(folder.rglob("*.yaml")), packaged=True)
            found = self.matching(name)
        return found

    def matching(self, name: str) -> list[tuple[Path, Config]]:
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

    def named(self, name: str) -> Iterator[Path]:
        return (file for file in self.packaged if file.stem == name)

    def mentioned(self, name: str) -> Iterator[Path]:
        word = re.compile(rb"(?<![\w-])" + re.escape(name.encode()) + rb"(?![\w-])")
        return (file for file in self.packaged if word.search(file.read_bytes()))

    def unknown(self, name: str) -> InputError:
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
    found: dict[str, TaskFile] = {}
    for asked in names:
        name, metric = asked, None
        if not catalogue.matching(asked) and ":" in asked:
            name, _, metric = asked.rpartition(":")
        for task in expand(catalogue, name, asked, metric, {}, ()):
            found.setdefault(task.name, task)
    return list(found.values())


def expand(
    catalogue: Catalogue, name: str, asked: str, metric: str | None, overrides: Config, inside: tuple[str, ...]
) -> Iterator[TaskFile]:
    entries = catalogue.find(name)
    if not entries or name in inside:
        raise catalogue.unknown(name)
    for file, config in entries:
        members = config.get("task")
        if isinstance(members, str):
            yield TaskFile(members, asked, metric, file, config | overrides, overrides)
            continue
        shared = {key: value for key, value in config.items() if key not in GROUP_KEYS}
        if next(code_in(shared), None) is not None:
            raise InputError(f"group {name!r} in {file} gives its tasks Python code; name the tasks themselves")
        for member in as_list(members):
            own = {key: value for key, value in member.items() if key != "task"} if isinstance(member, dict) else {}
            child = member.get("task") if isinstance(member, dict) else member
            if not isinstance(child, str):
                raise InputError(f"group {name!r} in {file} has a member that is not the name of a task: {member!r}")
            yield from expand(catalogue, child, asked, metric, shared | overrides | own, (*inside, name))


def refuse_unusable(tasks: list[TaskFile], trust_remote_code: bool) -> None:
    """Everything that can be said without importing lm-eval: code that is not trusted, data that are not there."""
    hub: list[tuple[TaskFile, str]] = []
    for task in tasks:
        if not task.packaged and not trust_remote_code:
            code = next(iter(code_in(task.config)), None)
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
    missing = [(task, path) for task, path in hub if not cached(path)]
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
    """Refuse the tasks of options, else of a recipe; what else is wrong with the recipe is told when it is read."""
    recorded: Any = {}
    with suppress(OSError, ValueError):
        recorded = parse_yaml(recipe) if recipe else {}
    recorded = recorded if isinstance(recorded, dict) else {}
    asked, folders = as_list(names or recorded.get("tasks")), as_list(paths or recorded.get("task_path"))
    words = [part.strip() for word in asked if isinstance(word, str) for part in word.split(",")]
    if any(words):
        refuse_unusable(
            find_tasks([w for w in words if w], [f for f in folders if isinstance(f, str)]), trust_remote_code
        )


def code_in(value: Any) -> Iterator[str]:
    """Python that a configuration would run."""
    if isinstance(value, Code):
        yield str(value)
    elif isinstance(value, dict):
        yield from (found for item in value.values() for found in code_in(item))
    elif isinstance(value, list):
        yield from (found for item in value for found in code_in(item))


def cached(dataset: str) -> bool:
    """Whether datasets could have this without a network; it has the last word on that."""
    from huggingface_hub import constants

    home = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME) / "datasets")
    hub = Path(constants.HF_HUB_CACHE) / f"datasets--{dataset.replace('/', '--')}"
    return hub.is_dir() or any(home.glob(f"{dataset.replace('/', '___')}*"))


def check_data(task: TaskFile, file: Path) -> None:
    """A data file that exists, is not empty, and whose every line can be read."""
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
