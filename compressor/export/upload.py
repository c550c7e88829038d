"""What of a compressed checkpoint is made public: the files that compress writes, and no path of this machine."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard

from compressor.models.load import is_compressed, load_model
from compressor.models.safetensors_files import INDEX, SINGLE, find_shards
from compressor.patch.checkpoint import count_parameters
from compressor.report.card import PICTURE, card
from compressor.report.card_metadata import list_problems
from compressor.report.markup import last_part
from compressor.report.record import read_record
from compressor.runtime.errors import InputError
from compressor.runtime.names import RECORD, split_name
from compressor.runtime.network import is_hub_id
from compressor.runtime.outputs import to_json
from compressor.runtime.safe_files import Malformed, parse_yaml, read_json, read_text

CARD, RECIPE, CODE = "README.md", "recipe.yaml", "modeling_compressor.py"
REQUIRED = ("config.json", CODE, RECORD)
TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "*.bpe.model", "*.tiktoken"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
)
WRITTEN = (
    *REQUIRED,
    *TOKENIZER,
    "generation_config.json",
    CARD,
    RECIPE,
    "report.html",
    "figures/*.png",
    "figures/*.svg",
)
FOLDERS = ("figures", "additional_chat_templates")
WEIGHTS = ("*.safetensors", INDEX)
ADDED = ("LICENSE", "LICENSE.md", "LICENSE.txt", "NOTICE", "NOTICE.md", "NOTICE.txt")  # many licences ask for it
HALF_DONE = re.compile(r"\..+\.(partial|old)-\w{8}")
CARD_BYTES = 2**20


@dataclass(frozen=True)
class Parcel:
    """Files by their name in the repository: a file of the directory, or the bytes that stand for it."""

    directory: Path
    files: dict[str, Path | bytes]
    left_out: dict[str, str]  # name → why
    notes: list[str]
    metadata: dict[str, Any]
    name: str
    sizes: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        sizes = {n: len(c) if isinstance(c, bytes) else c.stat().st_size for n, c in self.files.items()}
        object.__setattr__(self, "sizes", sizes)


def pack(directory: Path, repo: str) -> Parcel:
    """Refuse what is not a whole checkpoint with a card that the Hub would take; else what is to be sent of it."""
    record = read_record(directory)
    if HALF_DONE.fullmatch(directory.resolve().name):
        raise InputError(f"{directory} is what a run left half done; give the directory that it was to become")
    shards = find_whole(directory, record)
    files: dict[str, Path | bytes] = {}
    left_out: dict[str, str] = {}
    for name, path in walk(directory):
        reason = why_not(name, path, shards)
        if reason:
            left_out[name] = reason
        else:
            files[name] = path
    missing = next((name for name in (*REQUIRED, *sorted(shards)) if name not in files), None)
    if missing:
        raise InputError(f"{missing} of {directory} is a symbolic link; put the file itself there")
    notes = make_public(files, record, directory)
    notes += put_card(files, record, repo, directory)
    if record.get("generation") or record.get("where"):
        notes.append(f"{RECORD} and report.html quote the text that it was measured on")
    name = last_part(record["source"]["model"])
    content = files[CARD]
    text = content.decode() if isinstance(content, bytes) else read_card(content)
    data: Any = ModelCard(text).data
    metadata = json.loads(json.dumps(data.to_dict(), default=str, skipkeys=True))  # YAML has dates, JSON has none
    return Parcel(directory, dict(sorted(files.items())), left_out, notes, metadata, name)


def find_whole(directory: Path, record: Mapping[str, Any]) -> set[str]:
    """The names of the weights, after the model was read as a user would load it: its parts belong together."""
    for name in REQUIRED:
        if not (directory / name).is_file():
            raise InputError(f"{directory} lacks {name}; it is not a whole checkpoint of compress, make it again")
    if not is_compressed(read_json(directory / "config.json", str(directory)), str(directory)):
        raise InputError(f"config.json of {directory} names no replaced block; it is not what compress wrote")
    model, _ = load_model(str(directory), allow_compressed=True, low_memory=True, device="cpu")
    found, recorded = count_parameters(model), record["parameters"]["after"]
    if found != recorded:
        raise InputError(
            f"{directory} has {found:,} parameters, but its {RECORD} says {recorded:,}: they do not belong together"
        )
    shards = {shard.name for shard in find_shards(directory, str(directory), None)}
    return shards if shards == {SINGLE} else {*shards, INDEX}


def walk(directory: Path) -> Iterator[tuple[str, Path]]:
    """Every file by its name from the directory; a directory that nothing is taken from stands for its files."""
    for path in sorted(directory.iterdir()):
        if path.name in FOLDERS and path.is_dir() and not path.is_symlink():
            yield from ((f"{path.name}/{inner.name}", inner) for inner in sorted(path.iterdir()))
        else:
            yield path.name, path


def why_not(name: str, path: Path, shards: set[str]) -> str | None:
    """Why a file is not sent, or None."""
    if path.is_symlink():
        return "a symbolic link"
    if path.is_dir():
        return "a directory"
    if not path.is_file():
        return "not a file"
    if any(fnmatchcase(name, pattern) for pattern in WEIGHTS):
        return None if name in shards else "not among the weights that config.json and the index name"
    return None if is_ours(name) or name in ADDED else "not written by compress"


def is_ours(name: str) -> bool:
    """Whether compress writes files of this name."""
    return any(fnmatchcase(name, pattern) for pattern in (*WRITTEN, *WEIGHTS))


def make_public(files: dict[str, Path | bytes], record: Mapping[str, Any], directory: Path) -> list[str]:
    """Put copies in the place of the files that name directories of this machine."""
    names = local_names(record)
    notes = []
    public = reduce(record, names)
    if public != record:
        files[RECORD] = (to_json(public) + "\n").encode()
        notes.append(RECORD)
    if RECIPE in files:
        try:
            settings = parse_yaml(directory / RECIPE)
        except (OSError, ValueError) as error:
            raise InputError(f"{RECIPE} of {directory} cannot be read: {error}; make the checkpoint again") from error
        names |= local_names({"recipe": settings})
        if reduce(settings, names) != settings:
            head = re.match(r"(#.*\n)*", (directory / RECIPE).read_text(encoding="utf-8"))
            kept = yaml.safe_dump(reduce(settings, names), sort_keys=False, allow_unicode=True)
            files[RECIPE] = ((head[0] if head else "") + kept).encode()
            notes.append(RECIPE)
    return [f"{name} is sent as a copy that names local files without their directories" for name in notes]


def local_names(record: Mapping[str, Any]) -> dict[str, str]:
    """Paths of this machine that a record names → their last part."""
    recipe, source = record.get("recipe"), record.get("source") or {}
    settings: Mapping[str, Any] = recipe if isinstance(recipe, dict) else {}
    models = [source.get("model"), ((record.get("cross") or {}).get("source") or {}).get("model")]
    models += [settings.get("model"), settings.get("cross")]
    paths = [model for model in models if isinstance(model, str) and not is_hub_id(model, source.get("revision"))]
    texts = settings.get("text") or []
    paths += [split_name(word)[1] for word in (texts if isinstance(texts, list) else [texts]) if isinstance(word, str)]
    for key in ("task_path", "prompts"):
        value = settings.get(key)
        paths += [word for word in (value if isinstance(value, list) else [value]) if isinstance(word, str)]
    joined = [task.get("data") for task in (record.get("tasks") or {}).values()]
    joined += [part.get("source") for part in (record.get("text") or {}).values() if isinstance(part, dict)]
    paths += [word for line in joined if isinstance(line, str) for word in line.split(", ")]
    return {path: last_part(path) for path in paths if re.search(r"[/\\]", path) and not path.startswith("hub:")}


def reduce(value: Any, names: Mapping[str, str]) -> Any:
    """A value in which every one of these paths is its last part, also inside of other words when it is absolute."""
    if isinstance(value, dict):
        return {key: reduce(item, names) for key, item in value.items()}
    if isinstance(value, list):
        return [reduce(item, names) for item in value]
    if not isinstance(value, str):
        return value
    if value in names:
        return names[value]
    name, rest = split_name(value)
    if name is not None and rest in names:
        return f"{name}={names[rest]}"
    for path in sorted(names, key=len, reverse=True):
        if os.path.isabs(path) and path in value:
            value = value.replace(path, names[path])
    return value


def put_card(files: dict[str, Path | bytes], record: dict[str, Any], repo: str, directory: Path) -> list[str]:
    """The card as it is, when somebody wrote in it; one that nobody touched names the repository in its examples."""
    picture = PICTURE in files
    found = files.get(CARD)
    text = read_card(found) if isinstance(found, Path) else None
    try:
        own = card(record, picture=picture)
        if text in (None, own):
            files[CARD] = card(record, picture=picture, repo=repo).encode()
            return [f"{CARD} is sent with {repo} in its examples" if text else f"{CARD} was made anew: there was none"]
    except Exception as error:  # whatever stands in the record, in whatever place
        if text is None:
            raise InputError(
                f"{RECORD} of {directory} gives no card ({type(error).__name__}); make it again"
            ) from error
    assert text is not None
    problems = list_problems(text)
    if problems:
        raise InputError(f"the Hub would not take {CARD} of {directory}: {'; '.join(problems[:4])}; correct it first")
    return [f"{CARD} is sent as it is"]


def read_card(file: Path) -> str:
    try:
        return read_text(file, CARD_BYTES)
    except (OSError, UnicodeDecodeError, Malformed) as error:
        raise InputError(f"{file} cannot be read: {error}; correct it, or remove it to have it made anew") from error
