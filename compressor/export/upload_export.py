"""Choose the files of an export that are sent to the Hub: what compress writes in its form, its card and its record."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from compressor.export.upload import (
    CARD,
    LICENCE_FILES,
    TOKENIZER,
    UNFINISHED,
    WEIGHTS,
    Files,
    Upload,
    list_files,
    read_card,
    read_metadata,
    refuse_problems,
)
from compressor.export.written import read_export
from compressor.models.safetensors_files import find_shards, list_tensors
from compressor.report.card import export_card
from compressor.report.export_record import ExportRecord
from compressor.report.formats import last_part
from compressor.runtime.errors import InputError
from compressor.runtime.names import EXPORT
from compressor.runtime.safe_files import to_json

SHARED = ("config.json", *TOKENIZER, EXPORT, CARD)
ONNX = "model.onnx"
# What each form of export consists of, beside SHARED.
FORMS = {
    "hf-dense": ("generation_config.json", *WEIGHTS),
    "vllm": ("generation_config.json", "configuration_decilm.py", *WEIGHTS),
    "onnx": ("generation_config.json", ONNX, f"{ONNX}.data"),
}
KNOWN_LATER = ("out", "bytes", "seconds")  # of a record: not in export.json


def collect_export_upload(path: Path, repo: str) -> Upload:
    """The upload of a GGUF file or of an exported directory. One that is no whole export is refused."""
    if any(UNFINISHED.fullmatch(part.name) for part in (path.absolute(), path.absolute().parent)):
        raise InputError(f"{path} is what a run left half done; give the export that it was to become")
    if path.is_symlink():
        raise InputError(f"{path} is a symbolic link; give what it leads to")
    record = read_export(path)
    if path.is_dir():
        if record.to not in FORMS:
            raise InputError(f"{path} is no export of a form that is a directory: its {EXPORT} says {record.to!r}")
        return collect_directory(path, record, repo)
    if path.suffix != ".gguf":
        raise InputError(f"{path} does not end in .gguf, by which the Hub knows such files; rename it")
    return collect_file(path, record, repo)


def collect_file(path: Path, record: ExportRecord, repo: str) -> Upload:
    """A GGUF file, and beside it its card and its record, which are made here."""
    values = {key: value for key, value in record.to_json_value().items() if key not in KNOWN_LATER}
    files: Files = {
        path.name: path,
        EXPORT: (to_json(values) + "\n").encode(),
        CARD: export_card(record, None, repo=repo, file=path.name).encode(),
    }
    notes = [f"{CARD} and {EXPORT} were made from the record in {path.name}; other files there stay"]
    return finish_upload(files, {}, notes, record, ())


def collect_directory(directory: Path, record: ExportRecord, repo: str) -> Upload:
    patterns = (*SHARED, *FORMS[record.to])
    require_whole(directory, record)
    files: Files = {}
    left_out: dict[str, str] = {}
    for name, path in list_files(directory):
        if path.is_symlink() or not path.is_file():
            left_out[name] = "a symbolic link" if path.is_symlink() else "not a file"
        elif matches(name, (*patterns, *LICENCE_FILES)):
            files[name] = path
        else:
            left_out[name] = "not written by compress"
    linked = next((name for name in left_out if matches(name, patterns) and left_out[name] == "a symbolic link"), None)
    if linked:
        raise InputError(f"{linked} of {directory} is a symbolic link; put the file itself there")
    notes = [add_export_card(files, record, repo, directory)]
    written = (*SHARED, *(pattern for form in FORMS.values() for pattern in form))
    return finish_upload(files, left_out, notes, record, written)


def finish_upload(
    files: Files, left_out: dict[str, str], notes: list[str], record: ExportRecord, written: tuple[str, ...]
) -> Upload:
    origin = record.origin
    name = (
        last_part(origin.source.model) if origin and origin.source else last_part(origin.checkpoint) if origin else ""
    )
    metadata = read_metadata(files[CARD])
    return Upload(dict(sorted(files.items())), left_out, notes, metadata, name or "a model", EXPORT, written)


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def require_whole(directory: Path, record: ExportRecord) -> None:
    """Refuse a directory whose files are not all there, or have other weights than its record counts."""
    missing = next((name for name in missing_files(directory, record.to)), None)
    if missing:
        raise InputError(f"{directory} lacks {missing}; it is not a whole export, make it again")
    if record.to == "onnx":
        return
    tensors = list_tensors(find_shards(directory, str(directory), None), str(directory))
    counted = sum(tensor.shape.numel() for tensor in tensors.values())
    if counted != record.parameters.exported:
        raise InputError(
            f"{directory} has {counted:,} parameters, but its {EXPORT} says {record.parameters.exported:,}: "
            "they do not belong together"
        )


def missing_files(directory: Path, form: str) -> Iterator[str]:
    names = {"onnx": ("config.json", ONNX), "vllm": ("config.json", "configuration_decilm.py")}
    yield from (name for name in names.get(form, ("config.json",)) if not (directory / name).is_file())
    data = directory / f"{ONNX}.data"
    if form == "onnx" and not data.is_file() and names_file(directory / ONNX, data.name):
        yield data.name


def names_file(graph: Path, name: str) -> bool:
    """Whether a graph has its weights in another file of this name: a graph names it in plain bytes."""
    wanted, chunk = name.encode(), 2**20
    with graph.open("rb") as stream:
        before = b""
        while part := stream.read(chunk):
            if wanted in before + part:
                return True
            before = part[-len(wanted) :]
    return False


def add_export_card(files: Files, record: ExportRecord, repo: str, directory: Path) -> str:
    """Let the card name the repository in its examples; make one where there is none. Returns a note."""
    file = files.get(CARD)
    if not isinstance(file, Path):
        files[CARD] = export_card(record, None, repo=repo).encode()
        return f"{CARD} was made anew: there was none"
    text = read_card(file)
    refuse_problems(text, directory)
    if record.to == "onnx":  # its graph is opened as a local file
        return f"{CARD} is sent as it is"
    named = text.replace('from_pretrained("DIRECTORY")', f'from_pretrained("{repo}")')
    named = named.replace("vllm serve DIRECTORY ", f"vllm serve {repo} ")
    files[CARD] = named.encode()
    return f"{CARD} is sent {'as it is' if named == text else f'with {repo} in its examples'}"
