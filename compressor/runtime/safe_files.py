"""JSON and YAML that strangers wrote: read within limits of size and depth, or refused with the reason.

Key by key the last of two equal ones would win in silence, an alias of aliases grows without end, and a nesting of a
thousand lists breaks whoever walks through it later: none of these is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from compressor.runtime.errors import InputError, reason_of

JSON_BYTES = 32 * 2**20  # the index of a model of a hundred thousand tensors has ten megabytes
YAML_BYTES = 2**17  # twice the largest of lm-eval's tasks; a second or two to read
DEPTH = 64


class Malformed(ValueError):
    """Why a file cannot be taken as what it claims to be; `where` is the line, where that is known."""

    def __init__(self, reason: str, where: str = "") -> None:
        super().__init__(reason)
        self.where = where


class PlainLoader(yaml.SafeLoader):
    """Plain values only, each written where it stands."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(
                problem=f"*{event.anchor} is an alias; write it out", problem_mark=event.start_mark
            )
        self.depth += 1
        if self.depth > DEPTH:
            raise yaml.YAMLError(f"it is nested more than {DEPTH} deep")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


class UniqueLoader(PlainLoader):
    """And every key once."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key, _ in node.value:
            if (key.tag, str(key.value)) in seen:
                raise yaml.MarkedYAMLError(problem=f"key {key.value!r} stands twice", problem_mark=key.start_mark)
            seen.add((key.tag, str(key.value)))
        return super().construct_mapping(node, deep)


def parse_json(file: Path, most: int = JSON_BYTES) -> Any:
    """The file's value. Malformed, UnicodeDecodeError or OSError where there is none."""
    text = read_text(file, most)
    try:
        value = json.loads(text, object_pairs_hook=unique, parse_constant=refuse_constant)
    except Malformed:
        raise
    except (ValueError, RecursionError) as error:
        raise Malformed(reason_of(error)) from error
    check_values(value)
    return value


def parse_yaml(file: Path, loader: type[PlainLoader] = UniqueLoader) -> Any:
    """The same of a YAML file."""
    return load_yaml(read_text(file, YAML_BYTES), loader)


def load_yaml(text: str, loader: type[PlainLoader] = UniqueLoader) -> Any:
    """The value of a text, or Malformed."""
    try:
        value = yaml.load(text, Loader=loader)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError, TypeError, AttributeError) as error:
        # A date of month 13 is a ValueError, a list as a key a TypeError, and so on: all are the file's mistakes.
        mark = getattr(error, "problem_mark", None)
        reason = getattr(error, "problem", None) or reason_of(error)
        raise Malformed(reason, f" (line {mark.line + 1})" if mark else "") from error
    check_values(value)
    return value


def read_text(file: Path, most: int) -> str:
    """The text of a file that has at most so many bytes."""
    with file.open("rb") as stream:
        data = stream.read(most + 1)
    if len(data) > most:
        raise Malformed(f"it is larger than {most:,} bytes")
    return data.decode("utf-8")


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object, if it has every key once."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise Malformed(f"key {key!r} stands twice")
        found[key] = value
    return found


def refuse_constant(word: str) -> float:
    """Infinity has its uses as a limit; NaN has none."""
    if word == "NaN":
        raise Malformed("NaN is not a number")
    return float(word)


def check_values(value: Any) -> None:
    """Refuse what cannot be walked through or written again: deep nesting, and halves of characters."""
    level = [value]
    for _ in range(DEPTH):
        level = [child for parent in level for child in children(parent)]
        if not level:
            return
    raise Malformed(f"it is nested more than {DEPTH} deep")


def children(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value
        yield from value.values()
    elif isinstance(value, (list, tuple, set)):
        yield from value
    elif isinstance(value, str) and not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise Malformed(f"{value[:40]!r} has half a character (a lone surrogate)") from error


def read_json(path: Path, model: str, most: int = JSON_BYTES) -> dict[str, Any]:
    if not path.is_file():
        adapter = (path.parent / "adapter_config.json").is_file()
        remedy = "merge the adapter into its base model first" if adapter else "give the directory of a saved model"
        raise InputError(f"{model} has no {path.name}; {remedy}")
    try:
        content = parse_json(path, most)
    except (OSError, ValueError) as error:
        raise InputError(f"{path.name} of {model} cannot be read: {reason_of(error)}; save the model again") from error
    if not isinstance(content, dict):
        raise InputError(f"{path.name} of {model} is not a JSON object; save the model again")
    return content
