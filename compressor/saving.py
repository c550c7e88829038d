"""Write everything a compressed checkpoint holds: whole or not at all."""

from __future__ import annotations

import csv
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from compressor.card import card
from compressor.charting import charts_of
from compressor.checkpoint import write_checkpoint
from compressor.errors import InputError
from compressor.figures import draw
from compressor.linearity import tables_of
from compressor.models import quiet, source_of
from compressor.page import page
from compressor.records import describe_model

RECORD = "compression.json"
PROFILE = "profile.json"


def check_output(out: str | Path, overwrite: bool, source: str | Path | None = None, record: str = RECORD) -> Path:
    """Refuse an output directory that cannot be had, before any work; return its absolute path.

    Only a directory that holds this tool's record is ever replaced.
    """
    target = Path(os.path.abspath(Path(out).expanduser()))
    if source is not None and Path(source).exists() and target.exists() and os.path.samefile(source, target):
        raise InputError(f"--out {out} is the source model itself; name another directory")
    if target.exists() and not target.is_dir():
        raise InputError(f"--out {out} is a file; name a directory")
    try:
        if target.is_dir() and any(target.iterdir()):
            if not overwrite:
                raise InputError(f"--out {out} exists and is not empty; name another directory or add --overwrite")
            if not (target / record).is_file():
                raise InputError(f"--out {out} was not written by compress, so --overwrite leaves it alone; remove it")
        parent = next(folder for folder in target.parents if folder.exists())
        tempfile.TemporaryDirectory(prefix=f".{target.name}.probe-", dir=parent).cleanup()
    except OSError as error:
        raise InputError(f"--out {out} cannot be written: {error.strerror}; name another directory") from error
    return target


@contextmanager
def whole_directory(target: Path) -> Iterator[Path]:
    """A directory beside the target that takes its place when the block ends well, and vanishes when it does not."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
    try:
        yield partial
        mask = current_umask()  # temporary directories and safetensors files are made for their owner alone
        for path in (partial, *partial.rglob("*")):
            path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)
        if target.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old-", dir=target.parent)) / "old"
            target.rename(old)
            partial.rename(target)
            shutil.rmtree(old.parent)
        else:
            partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def save(
    model: Any,
    tokenizer: Any,
    out: str | Path,
    *,
    report: dict[str, Any] | None = None,
    recipe: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Save a model (with the replacements that are in it) in its source's dtype, with its record and card."""
    target = check_output(out, overwrite, source_of(model).model)
    report = report or describe_model(model)
    try:
        with whole_directory(target) as partial:
            with quiet():
                write_checkpoint(model, tokenizer, partial, dtype=source_of(model).dtype)
            write_json(partial / RECORD, report)
            (partial / "README.md").write_text(card(report), encoding="utf-8")
            if "perplexity" in report:
                write_report(partial, report)
            if recipe is not None:
                (partial / "recipe.yaml").write_text(recipe, encoding="utf-8")
    except OSError as error:
        raise InputError(f"--out {out} cannot be written: {error.strerror or error}; nothing was kept") from error
    return target


def save_profile(report: dict[str, Any], target: Path) -> Path:
    """The report of a profile as a directory: the page, the figures, and the numbers as JSON and CSV."""
    try:
        with whole_directory(target) as partial:
            write_json(partial / PROFILE, report)
            for name, rows in tables_of(report).items():
                write_csv(partial / f"{name}.csv", rows)
            write_report(partial, report)
    except OSError as error:
        raise InputError(f"--out {target} cannot be written: {error.strerror or error}; nothing was kept") from error
    return target


def write_report(directory: Path, report: dict[str, Any]) -> None:
    """The page, and its figures as files."""
    (directory / "report.html").write_text(page(report), encoding="utf-8")
    figures = directory / "figures"
    figures.mkdir()
    for chart in charts_of(report):
        draw(chart, figures)


def write_csv(file: Path, rows: list[dict[str, Any]]) -> None:
    """One line per row; the columns are those of all rows, a missing value is empty."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with file.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(finite(row) for row in rows)


def write_json(file: Path, value: Any) -> None:
    """Write valid JSON in one step: infinite and undefined numbers become null."""
    partial = file.with_name(f".{file.name}.partial-{os.getpid()}")
    try:
        partial.write_text(to_json(value) + "\n", encoding="utf-8")
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def to_json(value: Any) -> str:
    return json.dumps(finite(value), indent=2, ensure_ascii=False, allow_nan=False)


def finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, (list, tuple)) else value
