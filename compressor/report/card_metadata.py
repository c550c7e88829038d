"""The metadata at the top of a model card: the measurements as the Hub's model-index wants them, and a check of the
whole against the Hub's rules, as far as they can be checked without asking the Hub.

`huggingface_hub` reads a card and its model-index; the patterns are those that the Hub's own refusals name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

from huggingface_hub import EvalResult, ModelCard
from huggingface_hub.repocard import REGEX_YAML_BLOCK

from compressor.report.fidelity import Fidelity, format_ends, format_shares
from compressor.report.formats import last_part
from compressor.report.record import Record, SavedRecord
from compressor.report.record_parts import present
from compressor.runtime.card_rules import DATASET, LANGUAGE, LICENSE, fits, matching
from compressor.runtime.errors import reason_of, shorten, visible
from compressor.runtime.figures import signed, signed_interval
from compressor.runtime.names import HUB_SPLITS, HUB_TEXTS, MIX, NO_LIMIT, SELF, UNNAMED, split_name
from compressor.runtime.network import is_repo_id
from compressor.runtime.safe_files import load_yaml

RELATIONS = ("adapter", "merge", "quantized", "finetune")
TASK = "text-generation"
# What is not on the Hub is called as `datasets` calls files of its kind; a name of its own might be somebody's there.
PLAIN_TEXT = "text"
FILES = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
METRICS = {"acc": "accuracy"}  # lm-eval's names that the Hub has others for
Metrics = list[tuple[str, float, str]]  # type, value, name
Dataset = dict[str, str | None]  # arguments of EvalResult


def list_scores(record: Record | SavedRecord) -> list[EvalResult]:
    """Every finite number that was measured of the compressed model, and what it is to be compared with."""
    if not isinstance(record, Record):
        return []
    scores: list[EvalResult] = []
    taken: set[tuple[str | None, str | None]] = set()
    for dataset, metrics in [*text_scores(record), *task_scores(record)]:
        # huggingface_hub takes two data sets of one type and one configuration for the same.
        kind, config = dataset["dataset_type"], dataset.get("dataset_config")
        number = next(n for n in range(1, len(taken) + 2) if (kind, number_config(config, n)) not in taken)
        name = remove_markup(str(dataset["dataset_name"]))
        arguments: dict[str, Any] = dataset | {"dataset_config": number_config(config, number), "dataset_name": name}
        taken.add((kind, arguments["dataset_config"]))
        scores += [
            EvalResult(TASK, metric_type=metric, metric_value=value, metric_name=remove_markup(label), **arguments)
            for metric, value, label in metrics
            if math.isfinite(value)
        ]
    return scores


def number_config(config: str | None, number: int) -> str | None:
    return config if number == 1 else f"{config or PLAIN_TEXT}-{number}"


def text_scores(record: Record) -> Iterator[tuple[Dataset, Metrics]]:
    confidence = present(record.budget).confidence
    end = f"upper end of the rise at {confidence:.0%}" if confidence else "the rise"
    words = text_words(record)
    for name, text in record.text_results().items():
        low, high = text.delta_ci95
        budget = (
            f"{NO_LIMIT} was asked for" if text.max_dppl is None else f"the budget is {signed(text.max_dppl, '.4f')}"
        )
        metrics: Metrics = [
            ("perplexity", text.compressed, f"perplexity, windows of {text.seq_len} tokens"),
            ("source_perplexity", text.baseline, "perplexity of the source model"),
            ("perplexity_rise", text.delta, f"rise in perplexity (95 % interval {signed_interval(low, high, '.4f')})"),
            ("perplexity_rise_upper", text.delta_upper, f"{end}; {budget}"),
        ]
        yield describe_dataset(words.get(name, []), name), [*metrics, *fidelity_scores(text.fidelity)]


def fidelity_scores(found: Fidelity | None) -> Metrics:
    """The divergence from the source and the agreement with it, where they were measured."""
    if found is None:
        return []
    nats = f"KL divergence from the source, nats per token (95 % interval {format_ends(found.kl_ci95)})"
    agreement = (
        "share of tokens where it finds the same one most likely as the source (95 % interval "
        f"{format_shares(found.top1_agreement_ci95)})"
    )
    return [("kl_divergence", found.kl, nats), ("top1_agreement", found.top1_agreement, agreement)]


def task_scores(record: Record) -> Iterator[tuple[Dataset, Metrics]]:
    for name, task in record.tasks.items():
        on_hub = DATASET.fullmatch(task.data)
        kind = task.data if on_hub else FILES.get(PurePath(task.data).suffix, PLAIN_TEXT)
        metrics: Metrics = [
            (METRICS.get(metric, slug(metric)), values.compressed, clean_name(metric))
            for metric, values in task.metrics.items()
        ]
        metric = METRICS.get(task.metric, slug(task.metric))
        ends = signed_interval(*task.drop_ci95, ".4f")
        drop = f"drop of {clean_name(task.metric)} from {task.source:.4f} (95 % interval {ends})"
        metrics.append((f"{metric}_drop", task.drop, drop))
        yield {"dataset_type": kind, "dataset_name": clean_name(name), "dataset_config": slug(name)}, metrics


def text_words(record: Record) -> dict[str, list[str]]:
    """The files, built-in texts and data sets that each text was made of, by the text's name."""
    recipe = record.recipe.get("text")
    recorded = recipe if isinstance(recipe, list) and recipe else present(record.text).verification.source.split(", ")
    texts = record.text_results()
    words: dict[str, list[str]] = {}
    for word in map(str, recorded):
        name, rest = split_name(word)
        if name in texts:
            words.setdefault(str(name), []).append(rest)
        else:  # without a name, or a file whose own name looks as if it had one
            words.setdefault(UNNAMED, []).append(word)
    return words


def describe_dataset(words: list[str], name: str) -> Dataset:
    """The data set that a text is: one on the Hub, or plain text that has only a name."""
    only = words[0] if len(words) == 1 else ""
    repo, _, config = only.removeprefix("hub:").partition(":")
    if only in HUB_TEXTS:
        repo, config = HUB_TEXTS[only]
    if only in HUB_TEXTS or (only.startswith("hub:") and DATASET.fullmatch(repo)):
        return {
            "dataset_type": repo,
            "dataset_name": repo,
            "dataset_config": slug(config) if config else None,
            "dataset_split": HUB_SPLITS[-1],
        }
    names = ", ".join(name_text(word) for word in words) or clean_name(name)
    return {"dataset_type": PLAIN_TEXT, "dataset_name": names, "dataset_config": slug(names)}


def name_text(word: str) -> str:
    """A text as it may be called in public: without the directory that it lies in."""
    built_in = {"demo": "built-in text of compressor", MIX: "built-in mix of compressor", SELF: "text the model wrote"}
    if word in built_in:
        return built_in[word]
    if word.startswith("hub:"):
        return clean_name(word.removeprefix("hub:"))
    return clean_name(last_part(word))


def clean_name(text: str) -> str:
    """A name in one line: control characters are escaped, a long one is cut, an empty one becomes a dash."""
    return shorten(" ".join(visible(text).split()), 120) or "–"


def remove_markup(text: str) -> str:
    """A name for metadata, where nothing can be escaped; some viewers show that part as Markdown, too."""
    return text.translate(str.maketrans("<>[]`", "‹›()'"))


def slug(text: str) -> str:
    """A name with which a data set or a metric could be called."""
    return re.sub(r"[^\w.-]+", "-", clean_name(text), flags=re.ASCII).strip("-.")[:80] or PLAIN_TEXT


def list_problems(text: str) -> list[str]:
    """Why the Hub would not take a card, or would not show what it says. Empty: nothing to object to."""
    block = REGEX_YAML_BLOCK.search(text)
    if not block:
        return ["it has no metadata between lines of `---` at its top"]
    try:
        load_yaml(block[2])  # more than huggingface_hub asks: aliases of aliases, and keys that stand twice
        card = ModelCard(text)
    except Exception as error:  # YAML's own, and whatever a wrong type in it raises
        return [f"its metadata cannot be read: {reason_of(error)}"]
    return list(metadata_problems(card.data))


def metadata_problems(data: Any) -> Iterator[str]:
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
        yield from result_problems(result)


def result_problems(result: EvalResult) -> Iterator[str]:
    """What is wrong with one metric of the model-index."""
    what = f"model-index, {result.dataset_name!r}"
    if not fits(result.dataset_type, DATASET):
        yield f"{what}: dataset.type is {result.dataset_type!r}, which no data set can be called"
    if not all(isinstance(name, str) and name for name in (result.task_type, result.dataset_name, result.metric_type)):
        yield f"{what}: task, data set and metric need a name each"
    value = result.metric_value
    if isinstance(value, float) and not math.isfinite(value):
        yield f"{what}: {result.metric_type} is {value}"
