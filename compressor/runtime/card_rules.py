"""The metadata at the top of a model card: reading a stranger's, and which values the Hub takes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub.repocard import REGEX_YAML_BLOCK

from compressor.runtime.safe_files import YAML_BYTES, Malformed, PlainLoader, load_yaml

DATASET = re.compile(r"(?:[\w-]+/)?[\w.-]+", re.ASCII)
LICENSE = re.compile(r"[a-z0-9][a-z0-9._+-]{0,63}")
LANGUAGE = re.compile(r"[a-z]{2,3}(-[A-Za-z0-9]{2,8})*|multilingual|code")
LINK = re.compile(r"https?://[^\s<>\"'`\\]{1,500}", re.ASCII)
PLAIN_FILE = re.compile(r"[\w.-]{1,100}", re.ASCII)
MOST = 100  # entries of a list that is carried over


def read_front_matter(file: Path) -> dict[str, Any]:
    """What stands between the lines `---` at the top of a card that a stranger wrote; empty when it is not sound."""
    if not file.is_file():  # nor a pipe, which would be waited for
        return {}
    try:
        with file.open("rb") as stream:
            text = stream.read(YAML_BYTES).decode("utf-8-sig", "replace")
        front_matter = REGEX_YAML_BLOCK.search(text)
        values = load_yaml(front_matter[2], PlainLoader) if front_matter else None
    except (OSError, Malformed):
        return {}
    return values if isinstance(values, dict) else {}


def carry_over(values: Mapping[str, Any]) -> dict[str, Any]:
    """Of a source's metadata, what holds for its compressed copy too and is written as the Hub wants it."""
    carried: dict[str, Any] = {}
    licenses = matching(values.get("license"), LICENSE)
    if licenses:
        carried["license"] = licenses[0] if len(licenses) == 1 else licenses
    if licenses == ["other"]:
        name, link = values.get("license_name"), values.get("license_link")
        if isinstance(name, str) and fits(name.lower(), LICENSE):
            carried["license_name"] = name.lower()
        if fits(link, LINK):
            carried["license_link"] = link
    for key, pattern in (("language", LANGUAGE), ("datasets", DATASET)):
        kept = matching(values.get(key), pattern)
        if kept:
            carried[key] = kept
    return carried


def matching(value: Any, pattern: re.Pattern[str]) -> list[str]:
    """The words of a value, which may be one or a list, that the Hub would take."""
    words = value if isinstance(value, list) else [value]
    words = ["no" if word is False and pattern is LANGUAGE else word for word in words[:MOST]]  # older YAML's Norwegian
    return list(dict.fromkeys(word for word in words if fits(word, pattern)))


def fits(word: Any, pattern: re.Pattern[str]) -> bool:
    return isinstance(word, str) and pattern.fullmatch(word) is not None
