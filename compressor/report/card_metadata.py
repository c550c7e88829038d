"""The metadata of a card, as far as the Hub's rules for it can be held without asking the Hub.

`huggingface_hub` reads a card and its model-index; the patterns are those the Hub's own refusals name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from huggingface_hub import EvalResult, ModelCard
from huggingface_hub.repocard import REGEX_YAML_BLOCK

from compressor.runtime.card_rules import DATASET, LANGUAGE, LICENSE, fits, matching
from compressor.runtime.errors import reason_of
from compressor.runtime.network import is_repo_id
from compressor.runtime.safe_files import load_yaml

RELATIONS = ("adapter", "merge", "quantized", "finetune")


def list_problems(text: str) -> list[str]:
    """Why the Hub would not take a card, or would not show what it says. Empty: nothing to object to."""
    found = REGEX_YAML_BLOCK.search(text)
    if not found:
        return ["it has no metadata between lines of `---` at its top"]
    try:
        load_yaml(found[2])  # more than huggingface_hub asks: aliases of aliases, and keys that stand twice
        card = ModelCard(text)
    except Exception as error:  # YAML's own, and whatever a wrong type in it raises
        return [f"its metadata cannot be read: {reason_of(error)}"]
    return list(objections(card.data))


def objections(data: Any) -> Iterator[str]:
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
        yield from objections_to(result)


def objections_to(result: EvalResult) -> Iterator[str]:
    """One metric of the model-index."""
    what = f"model-index, {result.dataset_name!r}"
    if not fits(result.dataset_type, DATASET):
        yield f"{what}: dataset.type is {result.dataset_type!r}, which no data set can be called"
    if not all(isinstance(name, str) and name for name in (result.task_type, result.dataset_name, result.metric_type)):
        yield f"{what}: task, data set and metric need a name each"
    value = result.metric_value
    if isinstance(value, float) and not math.isfinite(value):
        yield f"{what}: {result.metric_type} is {value}"
