"""What the source of a compressed model says about itself: its licence, its languages, what it was made from."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import constants, try_to_load_from_cache

from compressor.models.config_check import CONFIG_BYTES
from compressor.models.load import DEMO
from compressor.models.source import Source
from compressor.runtime.card_rules import PLAIN_FILE, carry_over, read_front_matter
from compressor.runtime.errors import InputError
from compressor.runtime.network import is_hub_id, is_repo_id
from compressor.runtime.safe_files import read_json


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
