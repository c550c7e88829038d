"""JSON and YAML from untrusted files, read within limits of size and depth.

Refused are files that are too large, values nested too deep for a recursive function, keys that stand twice (the first
value would be lost in silence), YAML aliases (which can grow without end), and strings that UTF-8 cannot encode. JSON
that is written has no numbers that other readers refuse.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from compressor.runtime.errors import InputError, reason_of

JSON_BYTES = 32 * 2**20  # the index of a model of a hundred thousand tensors has ten megabytes
YAML_BYTES = 2**17  # twice the largest of lm-eval's tasks; a second or two to read
DEPTH = 64


class Malformed(ValueError):
    """A file is not valid; the message says why, and `where` names the line if it is known."""

    def __init__(self, reason: str, where: str = "") -> None:
        super().__init__(reason)
        self.where = where


class PlainLoader(yaml.SafeLoader):
    """Plain values only, without aliases, up to a depth."""

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
    """The same, and a key that stands twice is refused."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key, _ in node.value:
            if (key.tag, str(key.value)) in seen:
                raise yaml.MarkedYAMLError(problem=f"key {key.value!r} stands twice", problem_mark=key.start_mark)
            seen.add((key.tag, str(key.value)))
        return super().construct_mapping(node, deep)


def parse_json(file: Path, most: int = JSON_BYTES) -> Any:
    """The value of a JSON file. Raises Malformed, UnicodeDecodeError or OSError."""
    text = read_text(file, most)
    try:
        value = json.loads(text, object_pairs_hook=unique_keys, parse_constant=refuse_constant)
    except Malformed:
        raise
    except (ValueError, RecursionError) as error:
        raise Malformed(reason_of(error)) from error
    check_values(value)
    return value


def parse_yaml(file: Path, loader: type[PlainLoader] = UniqueLoader) -> Any:
    """The value of a YAML file. Raises Malformed, UnicodeDecodeError or OSError."""
    return load_yaml(read_text(file, YAML_BYTES), loader)


def load_yaml(text: str, loader: type[PlainLoader] = UniqueLoader) -> Any:
    """The value of YAML text. Raises Malformed."""
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
    """The text of a file; Malformed if it has more than `most` bytes."""
    with file.open("rb") as stream:
        data = stream.read(most + 1)
    if len(data) > most:
        raise Malformed(f"it is larger than {most:,} bytes")
    return data.decode("utf-8")


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The dictionary of these pairs; a key that stands twice is refused."""
    mapping: dict[str, Any] = {}
    for key, value in pairs:
        if key in mapping:
            raise Malformed(f"key {key!r} stands twice")
        mapping[key] = value
    return mapping


def refuse_constant(word: str) -> float:
    """NaN is refused; Infinity is allowed, because it is used as a limit."""
    if word == "NaN":
        raise Malformed("NaN is not a number")
    return float(word)


def check_values(value: Any) -> None:
    """Refuse values that are nested too deep, and strings that UTF-8 cannot encode."""
    level = [value]
    for _ in range(DEPTH):
        level = [child for parent in level for child in children(parent)]
        if not level:
            return
    raise Malformed(f"it is nested more than {DEPTH} deep")


def children(value: Any) -> Iterator[Any]:
    """The keys and values that a value contains; a string that UTF-8 cannot encode is refused."""
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


def read_named(what: str, file: Path, parse: Callable[[Path], Any], missing: str) -> Any:
    """The value of a JSON or YAML file that the user named; `missing` is the error line where there is none."""
    try:
        return parse(file)
    except FileNotFoundError:
        raise InputError(missing) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{what} {file} cannot be read: {error}") from error
    except Malformed as error:
        language = "JSON" if parse is parse_json else "YAML"
        raise InputError(f"{what} {file} is not valid {language}{error.where}: {error}") from error


def read_json(path: Path, model: str, most: int = JSON_BYTES) -> dict[str, Any]:
    """The JSON object in a file of a model; an InputError that names the model if there is none."""
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


def to_json(value: Any) -> str:
    return json.dumps(finite(value), indent=2, ensure_ascii=False, allow_nan=False)


def finite(value: Any) -> Any:
    """The value with None instead of infinite and undefined numbers."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, (list, tuple)) else value
