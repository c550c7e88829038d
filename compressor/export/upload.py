"""Choose the files of a compressed checkpoint that are sent to the Hub, and remove local paths from them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard

from compressor.models.load import is_compressed, load_model
from compressor.models.safetensors_files import find_shards
from compressor.models.source import source_of
from compressor.patch.checkpoint import count_parameters
from compressor.report.card import PICTURE, card
from compressor.report.card_metadata import list_problems
from compressor.report.formats import last_part, num
from compressor.report.record import Record, SavedRecord, read_record, refuse_other_weights
from compressor.runtime.errors import InputError
from compressor.runtime.names import RECORD, split_name
from compressor.runtime.network import is_hub_id
from compressor.runtime.safe_files import Malformed, parse_yaml, read_json, read_text, to_json
from compressor.runtime.stored_weights import INDEX, SINGLE

CARD, RECIPE, CODE = "README.md", "recipe.yaml", "modeling_compressor.py"
REQUIRED = ("config.json", CODE, RECORD)
TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "*.bpe.model", "*.tiktoken"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
)
FILES_OF_COMPRESS = (
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
LICENCE_FILES = (
    "LICENSE",
    "LICENSE.md",
    "LICENSE.txt",
    "NOTICE",
    "NOTICE.md",
    "NOTICE.txt",
)  # many licences demand them
UNFINISHED = re.compile(r"\..+\.(partial|old)-\w{8}")
CARD_BYTES = 2**20

Files = dict[str, Path | bytes]  # by name in the repository: a file of the directory, or bytes to send instead


@dataclass(frozen=True)
class Upload:
    """The files of a checkpoint that are sent, and those that are left out."""

    files: Files
    left_out: dict[str, str]  # name → reason
    notes: list[str]
    metadata: dict[str, Any]  # of the card
    model: str  # the name of the source
    record: str  # the file by which a repository is known to hold an earlier one
    written: tuple[str, ...]  # patterns of the files of an earlier one, which go if they are not sent again

    def sizes(self) -> dict[str, int]:
        """The size of every file in bytes."""
        return {
            name: len(content) if isinstance(content, bytes) else content.stat().st_size
            for name, content in self.files.items()
        }


def collect_upload(directory: Path, repo: str) -> Upload:
    """The upload of a checkpoint. One that is incomplete, or whose card the Hub would reject, is refused."""
    record = read_record(directory)
    if UNFINISHED.fullmatch(directory.resolve().name):
        raise InputError(f"{directory} is what a run left half done; give the directory that it was to become")
    shards = require_complete(directory, record)
    files: Files = {}
    left_out: dict[str, str] = {}
    for name, path in list_files(directory):
        reason = reason_to_leave_out(name, path, shards)
        if reason:
            left_out[name] = reason
        else:
            files[name] = path
    missing = next((name for name in (*REQUIRED, *sorted(shards)) if name not in files), None)
    if missing:
        raise InputError(f"{missing} of {directory} is a symbolic link; put the file itself there")
    notes = hide_local_paths(files, record, directory)
    notes.append(add_card(files, record, repo, directory))
    if isinstance(record, Record) and (record.generation or record.where):
        notes.append(f"{RECORD} and report.html quote the text that it was measured on")
    name, written = last_part(record.source.model), (*FILES_OF_COMPRESS, *WEIGHTS)
    return Upload(dict(sorted(files.items())), left_out, notes, read_metadata(files[CARD]), name, RECORD, written)


def read_metadata(content: Path | bytes) -> dict[str, Any]:
    """The metadata of a card that is sent, as plain values."""
    text = content.decode() if isinstance(content, bytes) else read_card(content)
    data: Any = ModelCard(text).data
    metadata: dict[str, Any] = json.loads(json.dumps(data.to_dict(), default=str, skipkeys=True))  # JSON has no dates
    return metadata


def require_complete(directory: Path, record: Record | SavedRecord) -> set[str]:
    """Load the model to check that its files belong together; return the names of its weight files."""
    for name in REQUIRED:
        if not (directory / name).is_file():
            raise InputError(f"{directory} lacks {name}; it is not a whole checkpoint of compress, make it again")
    if not is_compressed(read_json(directory / "config.json", str(directory)), str(directory)):
        raise InputError(f"config.json of {directory} names no replaced block; it is not what compress wrote")
    model, _ = load_model(str(directory), allow_compressed=True, low_memory=True, device="cpu")
    counted, recorded = count_parameters(model), record.parameters.after
    if counted != recorded:
        raise InputError(
            f"{directory} has {counted:,} parameters, but its {RECORD} says {num(recorded)}: "
            "they do not belong together"
        )
    refuse_other_weights(directory, record, source_of(model).weights_sha256)
    shards = {shard.name for shard in find_shards(directory, str(directory), None)}
    return shards if shards == {SINGLE} else {*shards, INDEX}


def list_files(directory: Path) -> Iterator[tuple[str, Path]]:
    """Every file with its name relative to the directory; folders other than FOLDERS are listed, but not entered."""
    for path in sorted(directory.iterdir()):
        if path.name in FOLDERS and path.is_dir() and not path.is_symlink():
            yield from ((f"{path.name}/{inner.name}", inner) for inner in sorted(path.iterdir()))
        else:
            yield path.name, path


def reason_to_leave_out(name: str, path: Path, shards: set[str]) -> str | None:
    """Why a file is not sent, or None if it is."""
    if path.is_symlink():
        return "a symbolic link"
    if path.is_dir():
        return "a directory"
    if not path.is_file():
        return "not a file"
    if any(fnmatchcase(name, pattern) for pattern in WEIGHTS):
        return None if name in shards else "not among the weights that config.json and the index name"
    return None if is_written_by_compress(name) or name in LICENCE_FILES else "not written by compress"


def is_written_by_compress(name: str) -> bool:
    """Whether compress writes files of this name."""
    return any(fnmatchcase(name, pattern) for pattern in (*FILES_OF_COMPRESS, *WEIGHTS))


def hide_local_paths(files: Files, record: Record | SavedRecord, directory: Path) -> list[str]:
    """Replace the files that contain local paths by copies without directories; return a note for each."""
    paths = local_paths(record_paths(record))
    changed = []
    values = read_json(directory / RECORD, str(directory))
    public = shorten_paths(values, paths)
    if public != values:
        files[RECORD] = (to_json(public) + "\n").encode()
        changed.append(RECORD)
    if RECIPE in files:
        try:
            settings = parse_yaml(directory / RECIPE)
        except (OSError, ValueError) as error:
            raise InputError(f"{RECIPE} of {directory} cannot be read: {error}; make the checkpoint again") from error
        paths |= local_paths(recipe_paths(settings, None))
        if shorten_paths(settings, paths) != settings:
            comment = re.match(r"(#.*\n)*", (directory / RECIPE).read_text(encoding="utf-8"))
            content = yaml.safe_dump(shorten_paths(settings, paths), sort_keys=False, allow_unicode=True)
            files[RECIPE] = ((comment[0] if comment else "") + content).encode()
            changed.append(RECIPE)
    return [f"{name} is sent as a copy that names local files without their directories" for name in changed]


def local_paths(names: Iterable[str]) -> dict[str, str]:
    """Those of the names that are local paths, each with its last part."""
    return {name: last_part(name) for name in names if re.search(r"[/\\]", name) and not name.startswith("hub:")}


def record_paths(record: Record | SavedRecord) -> Iterator[str]:
    """The models, texts and task files in a record, except repositories of the Hub."""
    revision = record.source.revision
    models = [record.source.model]
    if isinstance(record, Record):
        models += [record.cross.source.model] if record.cross else []
        splits = (record.text.calibration, record.text.selection, record.text.verification) if record.text else ()
        lines = [*(task.data for task in record.tasks.values()), *(split.source for split in splits if split)]
        yield from (path for line in lines for path in line.split(", "))
        yield from recipe_paths(record.recipe, revision)
    yield from (model for model in models if not is_hub_id(model, revision))


def recipe_paths(settings: Any, revision: str | None) -> Iterator[str]:
    """The models, texts, task files and prompts in a recipe, except repositories of the Hub."""
    if not isinstance(settings, dict):
        return
    models = [model for key in ("model", "cross") for model in list_strings(settings.get(key))]
    yield from (model for model in models if not is_hub_id(model, revision))
    yield from (split_name(word)[1] for word in list_strings(settings.get("text")))
    yield from (word for key in ("task_path", "prompts") for word in list_strings(settings.get(key)))


def list_strings(value: Any) -> list[str]:
    """The strings of a setting that is a string or a list; other values, which a user may have written, are skipped."""
    return [word for word in (value if isinstance(value, list) else [value]) if isinstance(word, str)]


def shorten_paths(value: Any, paths: Mapping[str, str]) -> Any:
    """The value with each of these paths replaced by its last part; absolute paths also within longer strings."""
    if isinstance(value, dict):
        return {key: shorten_paths(item, paths) for key, item in value.items()}
    if isinstance(value, list):
        return [shorten_paths(item, paths) for item in value]
    if not isinstance(value, str):
        return value
    if value in paths:
        return paths[value]
    name, rest = split_name(value)
    if name is not None and rest in paths:
        return f"{name}={paths[rest]}"
    for path in sorted(paths, key=len, reverse=True):
        if os.path.isabs(path) and path in value:
            value = value.replace(path, paths[path])
    return value


def add_card(files: Files, record: Record | SavedRecord, repo: str, directory: Path) -> str:
    """Keep a card that somebody has edited; else make one that names the repository in its examples. Returns a note."""
    picture = PICTURE in files
    file = files.get(CARD)
    text = read_card(file) if isinstance(file, Path) else None
    if text in (None, card(record, picture=picture)):
        files[CARD] = card(record, picture=picture, repo=repo).encode()
        return f"{CARD} is sent with {repo} in its examples" if text else f"{CARD} was made anew: there was none"
    assert text is not None
    refuse_problems(text, directory)
    return f"{CARD} is sent as it is"


def refuse_problems(text: str, directory: Path) -> None:
    """Refuse a card that the Hub would reject."""
    problems = list_problems(text)
    if problems:
        raise InputError(f"the Hub would not take {CARD} of {directory}: {'; '.join(problems[:4])}; correct it first")


def read_card(file: Path) -> str:
    """The text of a card, which must be UTF-8 and not larger than CARD_BYTES."""
    try:
        return read_text(file, CARD_BYTES)
    except (OSError, UnicodeDecodeError, Malformed) as error:
        raise InputError(f"{file} cannot be read: {error}; correct it, or remove it to have it made anew") from error
