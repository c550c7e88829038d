"""lm-eval tasks on local data, as the tests write them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

ACC = {"metric": "acc", "aggregation": "mean", "higher_is_better": True}
CHOICE: dict[str, Any] = {
    "validation_split": "validation",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "choices",
    "doc_to_target": "label",
    "metric_list": [ACC],
}
DOCUMENT = {"question": "Some years", "choices": ["ago", "sea"], "label": 0}


def write_yaml(file: Path, **config: Any) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    return file


def write_lines(file: Path, documents: Iterable[Any]) -> Path:
    file.write_text("".join(json.dumps(document) + "\n" for document in documents), encoding="utf-8")
    return file


def write_task(folder: Path, name: str, documents: Iterable[Any] = (DOCUMENT,), **settings: Any) -> Path:
    """NAME.yaml, a multiple-choice task unless the settings say otherwise, and its documents in NAME.jsonl."""
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"validation": f"{name}.jsonl"}}}
    file = write_yaml(folder / f"{name}.yaml", **{"task": name, **data, **CHOICE, **settings})
    write_lines(folder / f"{name}.jsonl", documents)
    return file
