"""The metadata of a card, as far as the Hub's rules for it can be held without asking the Hub.

`huggingface_hub` reads a card and its model-index; the patterns are those the Hub's own refusals name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard
from huggingface_hub.errors import HFValidationError
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from compressor.hub import reason_of
from compressor.parsing import YAML_BYTES, Malformed, PlainLoader, load_yaml

RELATIONS = ("adapter", "merge", "quantized", "finetune")
DATASET = re.compile(r"(?:[\w-]+/)?[\w.-]+", re.ASCII)
LICENSE = re.compile(r"[a-z0-9][a-z0-9._+-]{0,63}")
LANGUAGE = re.compile(r"[a-z]{2,3}(-[A-Za-z0-9]{2,8})*|multilingual|code")
LINK = re.compile(r"https?://[^\s<>\"'`\\]{1,500}", re.ASCII)
PLAIN_FILE = re.compile(r"[\w.-]{1,100}", re.ASCII)
MOST = 100  # entries of a list that is carried over


def is_repo_id(name: Any) -> bool:
    """A name that a repository on the Hub can have: OWNER/NAME, or one of the old ones without an owner."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def read_front_matter(file: Path) -> dict[str, Any]:
    """What stands between the lines `---` at the top of a card that a stranger wrote; empty when it is not sound."""
    if not file.is_file():  # nor a pipe, which would be waited for
        return {}
    try:
        with file.open("rb") as stream:
            text = stream.read(YAML_BYTES).decode("utf-8-sig", "replace")
        found = REGEX_YAML_BLOCK.search(text)
        values = load_yaml(found[2], PlainLoader) if found else None
    except (OSError, Malformed):
        return {}
    return values if isinstance(values, dict) else {}


def carry_over(values: Mapping[str, Any]) -> dict[str, Any]:
    """Of a source's metadata, what holds for its compressed copy too and is written as the Hub wants it."""
    found: dict[str, Any] = {}
    licenses = matching(values.get("license"), LICENSE)
    if licenses:
        found["license"] = licenses[0] if len(licenses) == 1 else licenses
    if licenses == ["other"]:
        name, link = values.get("license_name"), values.get("license_link")
        if isinstance(name, str) and fits(name.lower(), LICENSE):
            found["license_name"] = name.lower()
        if fits(link, LINK):
            found["license_link"] = link
    for key, pattern in (("language", LANGUAGE), ("datasets", DATASET)):
        kept = matching(values.get(key), pattern)
        if kept:
            found[key] = kept
    return found


def matching(value: Any, pattern: re.Pattern[str]) -> list[str]:
    """The words of a value, which may be one or a list, that the Hub would take."""
    words = value if isinstance(value, list) else [value]
    words = ["no" if word is False and pattern is LANGUAGE else word for word in words[:MOST]]  # older YAML's Norwegian
    return list(dict.fromkeys(word for word in words if fits(word, pattern)))


def fits(word: Any, pattern: re.Pattern[str]) -> bool:
    return isinstance(word, str) and pattern.fullmatch(word) is not None


def list_problems(text: str) -> list[str]:
    """Why the Hub would not take a card, or would not show what it says. Empty: nothing to object to."""
    found = REGEX_YAML_BLOCK.search(text)
    if not found:
        return ["it has no metadata between lines of `---` at its top"]
    try:
        load_yaml(found[2])  # more than huggingface_hub asks: aliases of aliases, and keys that stand twice
        card = ModelCard(text)
    except Exception as error:  # YAML's own, and whatever a wrong type in it raises
        return [f"its metadata cannot be read: {reason_of(error)}"]
    return list(objections(card.data))


def objections(data: Any) -> Iterator[str]:
    for key, pattern in (("license", LICENSE), ("language", LANGUAGE), ("datasets", DATASET)):
        value = data.get(key)
        for word in value if isinstance(value, list) else [] if value is None else [value]:
            if not matching([word], pattern):
                yield f"{key} is {word!r}"
    bases = data.get("base_model")
    for base in bases if isinstance(bases, list) else [bases]:
        if base is not None and not is_repo_id(base):
            yield f"base_model is {base!r}, which is no model on the Hub"
    relation = data.get("base_model_relation")
    if relation is not None and relation not in RELATIONS:
        yield f"base_model_relation is {relation!r}, not one of {', '.join(RELATIONS)}"
    tags = data.get("tags") or []
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        yield f"tags are {tags!r}, not a list of words"
    for result in data.get("eval_results") or []:
        yield from objections_to(result)


def objections_to(result: EvalResult) -> Iterator[str]:
    """One metric of the model-index."""
    what = f"model-index, {result.dataset_name!r}"
    if not fits(result.dataset_type, DATASET):
        yield f"{what}: dataset.type is {result.dataset_type!r}, which no data set can be called"
    if not all(isinstance(name, str) and name for name in (result.task_type, result.dataset_name, result.metric_type)):
        yield f"{what}: task, data set and metric need a name each"
    value = result.metric_value
    if isinstance(value, float) and not math.isfinite(value):
        yield f"{what}: {result.metric_type} is {value}"
