"""What was measured, as the Hub's model-index wants it: a task, a data set and a metric for every number."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from huggingface_hub import EvalResult

from compressor.report.markup import last_part
from compressor.runtime.card_rules import DATASET
from compressor.runtime.errors import shorten, visible
from compressor.runtime.names import HUB_SPLITS, HUB_TEXTS, UNNAMED, split_name

TASK = "text-generation"
# What is not on the Hub is called as `datasets` calls files of its kind; a name of its own might be somebody's there.
PLAIN_TEXT = "text"
FILES = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
METRICS = {"acc": "accuracy"}  # lm-eval's names that the Hub has others for
Record = Mapping[str, Any]


def list_scores(report: Record) -> list[EvalResult]:
    """Every finite number that was measured of the compressed model, and what it is to be compared with."""
    found: list[EvalResult] = []
    taken: set[tuple[str, str | None]] = set()
    for dataset, metrics in [*text_scores(report), *task_scores(report)]:
        # huggingface_hub takes two data sets of one type and one configuration for the same.
        kind, config = dataset["dataset_type"], dataset.get("dataset_config")
        number = next(n for n in range(1, len(taken) + 2) if (kind, numbered(config, n)) not in taken)
        dataset |= {"dataset_config": numbered(config, number), "dataset_name": harmless(dataset["dataset_name"])}
        taken.add((kind, dataset["dataset_config"]))
        for metric, value, name in metrics:
            if isinstance(value, (int, float)) and math.isfinite(value):
                found.append(
                    EvalResult(TASK, metric_type=metric, metric_value=value, metric_name=harmless(name), **dataset)
                )
    return found


def numbered(config: str | None, number: int) -> str | None:
    return config if number == 1 else f"{config or PLAIN_TEXT}-{number}"


Metrics = list[tuple[str, Any, str]]


def text_scores(report: Record) -> Iterator[tuple[dict[str, Any], Metrics]]:
    if "perplexity" not in report:
        return
    confidence = report["budget"]["confidence"]
    end = f"upper end of the rise at {confidence:.0%}" if confidence else "the rise"
    words = words_of(report)
    for name, found in texts_of(report).items():
        low, high = found["delta_ci95"]
        yield (
            {**dataset_of(words.get(name, []), name)},
            [
                ("perplexity", found["compressed"], f"perplexity, windows of {found['seq_len']} tokens"),
                ("source_perplexity", found["baseline"], "perplexity of the source model"),
                ("perplexity_rise", found["delta"], f"rise in perplexity (95 % interval {low:+.4f} … {high:+.4f})"),
                ("perplexity_rise_upper", found["delta_upper"], f"{end}; the budget is {found['max_dppl']:+.4f}"),
            ],
        )


def task_scores(report: Record) -> Iterator[tuple[dict[str, Any], Metrics]]:
    for name, found in (report.get("tasks") or {}).items():
        low, high = found["drop_ci95"]
        data = found.get("data")
        on_hub = isinstance(data, str) and DATASET.fullmatch(data)
        kind = data if on_hub else FILES.get(PurePath(str(data)).suffix, PLAIN_TEXT)
        metrics: Metrics = [
            (METRICS.get(metric, slug(metric)), values["compressed"], plain(metric))
            for metric, values in found["metrics"].items()
        ]
        metric = METRICS.get(found["metric"], slug(found["metric"]))
        drop = f"drop of {plain(found['metric'])} from {found['source']:.4f} (95 % interval {low:+.4f} … {high:+.4f})"
        metrics.append((f"{metric}_drop", found["drop"], drop))
        yield {"dataset_type": kind, "dataset_name": plain(name), "dataset_config": slug(name)}, metrics


def texts_of(report: Record) -> Mapping[str, Any]:
    """Name → figures; a record of one text may have them at its top alone."""
    if report.get("texts"):
        return dict(report["texts"])
    found = {**report["perplexity"], **report["budget"]}
    return {UNNAMED: {**found, "passed": found["delta_upper"] <= found["max_dppl"]}}


def words_of(report: Record) -> dict[str, list[str]]:
    """Name → the files, built-in texts and data sets that it was made of."""
    recorded = (report.get("recipe") or {}).get("text") or str(report["text"]["verification"]["source"]).split(", ")
    found: dict[str, list[str]] = {}
    for word in recorded:
        name, rest = split_name(str(word))
        known = name is not None and name in texts_of(report)  # else a file whose own name looks like that
        found.setdefault(str(name) if known else UNNAMED, []).append(rest if known else str(word))
    return found


def dataset_of(words: list[str], name: str) -> dict[str, Any]:
    """The data set that a text is: one on the Hub, or plain text that has only a name."""
    only = words[0] if len(words) == 1 else ""
    repo, _, config = only.removeprefix("hub:").partition(":")
    if only in HUB_TEXTS:
        repo, config = HUB_TEXTS[only]
    if only in HUB_TEXTS or (only.startswith("hub:") and DATASET.fullmatch(repo)):
        part = {"dataset_config": slug(config) if config else None, "dataset_split": HUB_SPLITS[-1]}
        return {"dataset_type": repo, "dataset_name": repo, **part}
    told = ", ".join(name_text(word) for word in words) or plain(name)
    return {"dataset_type": PLAIN_TEXT, "dataset_name": told, "dataset_config": slug(told)}


def name_text(word: str) -> str:
    """A text as it may be called in public: without the directory that it lies in."""
    if word == "demo":
        return "built-in text of compressor"
    if word.startswith("hub:"):
        return plain(word.removeprefix("hub:"))
    return plain(last_part(word))


def plain(text: str) -> str:
    """A name in one line that can be written, and ends, and is not empty."""
    return shorten(" ".join(visible(str(text)).split()), 120) or "–"


def harmless(text: str) -> str:
    """A name for metadata, where nothing can be escaped; some viewers show that part as Markdown, too."""
    return text.translate(str.maketrans("<>[]`", "‹›()'"))


def slug(text: str) -> str:
    """A name with which a data set or a metric could be called."""
    return re.sub(r"[^\w.-]+", "-", plain(text), flags=re.ASCII).strip("-.")[:80] or PLAIN_TEXT
