"""What the source of a compressed model says about itself: its licence, its languages, what it was made from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.repocard import REGEX_YAML_BLOCK

from compressor.errors import InputError
from compressor.models import DEMO
from compressor.network import is_hub_id, is_repo_id
from compressor.parsing import YAML_BYTES, Malformed, PlainLoader, load_yaml, read_json
from compressor.scrutiny import CONFIG_BYTES
from compressor.sources import Source

DATASET = re.compile(r"(?:[\w-]+/)?[\w.-]+", re.ASCII)
LICENSE = re.compile(r"[a-z0-9][a-z0-9._+-]{0,63}")
LANGUAGE = re.compile(r"[a-z]{2,3}(-[A-Za-z0-9]{2,8})*|multilingual|code")
LINK = re.compile(r"https?://[^\s<>\"'`\\]{1,500}", re.ASCII)
PLAIN_FILE = re.compile(r"[\w.-]{1,100}", re.ASCII)
MOST = 100  # entries of a list that is carried over


def describe_origin(source: Source) -> dict[str, Any]:
    """For the record: what the card of a compressed copy may say, and never more than the source's own card says."""
    file = find_card(source)
    values = read_front_matter(file) if file else {}
    repo = source.model if is_hub_id(source.model, source.revision) else None
    link = values.get("license_link")
    if repo and isinstance(link, str) and PLAIN_FILE.fullmatch(link):  # a file beside that card, not beside ours
        values["license_link"] = f"https://huggingface.co/{repo}/blob/{source.revision or 'main'}/{link}"
    base = {} if repo else find_base(source, values)
    return {**base, **carry_over(values)}


def find_card(source: Source) -> Path | None:
    """README.md of the source, wherever it was loaded from; nothing is downloaded for it here."""
    if is_hub_id(source.model, source.revision):
        cached = try_to_load_from_cache(source.model, constants.REPOCARD_NAME, revision=source.revision)
        return Path(cached) if isinstance(cached, str) else None
    directory = DEMO if source.model == "demo" else Path(source.model)
    return directory / constants.REPOCARD_NAME if directory.is_absolute() else None


def find_base(source: Source, values: Mapping[str, Any]) -> dict[str, str]:
    """What a local model was made from, where its card or its config plainly names one repository: OWNER/NAME."""
    own = values.get("base_model")
    named = [own[0] if isinstance(own, list) and len(own) == 1 else own]  # of several it is none in particular
    if Path(source.model).is_absolute():
        with suppress(InputError):
            named.append(read_json(Path(source.model) / "config.json", source.model, CONFIG_BYTES).get("_name_or_path"))
    for name in named:
        if isinstance(name, str) and "/" in name and is_repo_id(name) and not Path(name).exists():
            return {"base_model": name}
    return {}


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
