"""lm-eval tasks, scored document by document, so that two models are compared in pairs.

lm-eval has habits that this module works around: it ties the weights of the model it is given anew; its task templates
can run any Python code; it changes the tokenizer's pad token; its longest sequence defaults to the model's context; its
few-shot examples depend on which documents were drawn before; and without a network it takes long to fail.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from compressor.evaluate.intervals import fall_interval
from compressor.evaluate.perplexity import limit_batch_size
from compressor.evaluate.task_files import TASK_ALTERNATIVES, TaskFile, find_tasks, refuse_unusable
from compressor.models.load import quiet
from compressor.models.offload import device_of
from compressor.models.source import context_length
from compressor.runtime.context import RunContext
from compressor.runtime.datasets_cache import provide_datasets_cache
from compressor.runtime.errors import InputError, reason_of
from compressor.runtime.network import why_unreachable
from compressor.runtime.progress import Progress
from compressor.text import datasets_offline

FEWSHOT_SEED = 1234  # lm-eval's own default
LONGEST_SEQUENCE = 2048  # tokens: with more, tasks that score whole texts would need gigabytes of logits
SAMPLED_REQUESTS = 64  # of a task, whose tokens are counted to know those of all
AGGREGATIONS = ("mean", "nanmean", "perplexity")  # those that need one number per document
Scores = dict[str, Tensor]  # metric → its value for every document


@dataclass(frozen=True)
class Task:
    """A task that is ready to run on its first `documents` documents."""

    name: str
    aliases: tuple[str, ...]  # what the user called it, with and without the metric
    metric: str  # the one that its budget is about
    metrics: tuple[str, ...]
    better: int  # +1 when more of the metric is better, else −1
    documents: int
    sha256: str  # of its configuration and documents
    source: str
    lm_eval_task: Any = field(repr=False)  # lm-eval's own object

    def total(self, metric: str, values: Tensor) -> float:
        """A metric of all documents, as lm-eval would print it."""
        return float(self.lm_eval_task.aggregation()[metric](values.tolist()))


@dataclass(frozen=True)
class TaskChange:
    """How much a task's score fell on the documents that decide, with the interval over documents.

    A search that gives blocks back chooses them on one half of the documents (`chosen_on`), and the other half decides;
    `looks` counts the plans that were asked about. `metrics` are those of all documents, as lm-eval prints them.
    """

    source: float
    compressed: float
    drop: float
    drop_ci95: tuple[float, float]
    upper: float
    documents: int
    changed: int
    metrics: dict[str, tuple[float, float]]
    chosen_on: int = 0
    looks: int = 1


def load_tasks(names: Sequence[str], paths: Sequence[str], limit: int | None, trust_remote_code: bool) -> list[Task]:
    """Find, check and load tasks. InputError says what is wrong with one."""
    files = find_tasks(list(names), list(paths))
    refuse_unusable(files, trust_remote_code)
    offline = why_unreachable() if any(file.data_files is None for file in files) else None
    return [load_task(file, limit, offline, trust_remote_code or file.packaged) for file in files]


def load_task(file: TaskFile, limit: int | None, offline: str | None, trusted: bool) -> Task:
    data_files = file.data_files
    dataset = str(file.config.get("dataset_path"))
    with silenced(), datasets_offline(data_files is not None or offline is not None):
        from lm_eval import utils
        from lm_eval.tasks import TaskManager
        from lm_eval.tasks._yaml_loader import load_yaml

        provide_datasets_cache()
        if not trusted:
            refuse_foreign_metrics(file)
        try:
            config = load_yaml(file.file) | file.overrides | {"task": file.name}
            if data_files is not None:
                data = {split: [str(path) for path in paths] for split, paths in data_files.items()}
                config["dataset_kwargs"] = {**config["dataset_kwargs"], "data_files": data}
            with replaced_attribute(utils, "env", sandbox_templates(utils.env)):
                body = TaskManager(include_defaults=False).load([config])["tasks"][file.name]
            documents = list(body.eval_docs)[:limit]
        except Exception as error:  # lm-eval and datasets raise a dozen unrelated types
            reason = f"{reason_of(error)} ({offline})" if offline else reason_of(error)
            raise InputError(
                f"task {file.name} ({file.file}) cannot be loaded: {reason}; {TASK_ALTERNATIVES}"
            ) from error
    if not documents:
        raise InputError(f"task {file.name} ({file.file}) has no documents")
    metrics = [name for name, function in body.aggregation().items() if function.__name__ in AGGREGATIONS]
    means = [name for name in metrics if body.aggregation()[name].__name__ == "mean"]
    metric = file.metric or next(iter(means), None)
    if metric is None or metric not in means:
        known = ", ".join(means) or "none"
        lack = f"no metric {file.metric!r}" if file.metric else "no metric that is a mean over documents"
        raise InputError(
            f"task {file.name} has {lack} (those that can be compared: {known}); for perplexity use --text"
        )
    if body.get_config("num_fewshot") is None:
        body.set_config(key="num_fewshot", value=0)
    contents = {"config": file.config, "documents": documents, "fewshot": body.get_config("num_fewshot")}
    return Task(
        name=file.name,
        aliases=(file.asked, file.asked.removesuffix(f":{file.metric}")),
        metric=metric,
        metrics=tuple(metrics),
        better=-1 if body.higher_is_better().get(metric) is False else 1,  # None: lm-eval does not know
        documents=len(documents),
        sha256=hashlib.sha256(json.dumps(contents, sort_keys=True, default=str).encode()).hexdigest(),
        source=", ".join(str(f) for split in data_files.values() for f in split) if data_files else dataset,
        lm_eval_task=body,
    )


def refuse_foreign_metrics(file: TaskFile) -> None:
    """Refuse a metric that lm-eval does not know: it would run a script of that name, from this machine or the Hub."""
    from lm_eval.api.registry import METRIC_REGISTRY

    metrics = file.config.get("metric_list") or []
    for entry in metrics if isinstance(metrics, list) else [metrics]:
        name = entry.get("metric") if isinstance(entry, dict) else entry
        if name not in METRIC_REGISTRY or (isinstance(entry, dict) and entry.get("hf_evaluate")):
            raise InputError(
                f"task {file.name} ({file.file}) has the metric {name!r}, which is not one of lm-eval's own; correct "
                "it, or pass --trust-remote-code to run the code of another"
            )


def task_key(task: Task, max_length: int) -> dict[str, Any]:
    """What a score depends on besides the model."""
    return {"task": task.name, "sha256": task.sha256, "max_length": max_length, "lm_eval": version("lm-eval")}


def longest_sequence(model: Any) -> int:
    return min(context_length(model) or LONGEST_SEQUENCE, LONGEST_SEQUENCE)


def score(
    model: Any,
    tokenizer: Any,
    task: Task,
    context: RunContext | None = None,
    *,
    step: str = "task",
    only: Sequence[int] | None = None,
) -> Scores:
    """Every metric of every document (or of the documents `only`), by lm-eval's HFLM. The model is not changed."""
    context = context or RunContext()
    prefix = find_prefix_token(model, tokenizer, task)
    with ExitStack() as stack:
        stack.enter_context(silenced())
        stack.enter_context(quiet())
        if only is not None:
            stack.enter_context(
                replaced_attribute(task.lm_eval_task, "build_all_requests", request_documents(task, only))
            )
        stack.enter_context(replaced_attribute(model, "tie_weights", lambda *_, **__: None))
        from lm_eval import api, evaluator, utils
        from lm_eval.models import huggingface

        stack.enter_context(replaced_attribute(utils, "env", sandbox_templates(utils.env)))
        bar = make_bar_class(context.progress, f"{step} {task.name}")
        stack.enter_context(replaced_attribute(huggingface, "tqdm", bar))
        for module in (api.model, api.task):
            stack.enter_context(replaced_attribute(module, "tqdm", lambda items, **_: items))
        try:
            lm = huggingface.HFLM(
                pretrained=model,
                tokenizer=copy.deepcopy(tokenizer),
                backend="causal",
                batch_size=limit_batch_size(
                    model, longest_request(task, tokenizer, longest_sequence(model)), context.batch_size
                ),
                max_length=longest_sequence(model),
                prefix_token_id=prefix,
            )
            lm._device = device_of(model)  # lm-eval finds no device where the weights are on disk
            task.lm_eval_task.set_fewshot_seed(seed=FEWSHOT_SEED)
            results = evaluator.evaluate(
                lm=lm,
                task_dict={"tasks": {task.name: task.lm_eval_task}},
                limit=None if only is not None else task.documents,
                samples=None if only is None else {task.name: list(only)},
                bootstrap_iters=0,
                log_samples=True,
            )
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {reason_of(error)}"
            if isinstance(error, AssertionError):
                most = longest_sequence(model)
                reason = f"a document's answer does not fit into the {most} tokens that the model can take"
            raise InputError(f"task {task.name} cannot be run: {reason}") from error
    samples = results["samples"][task.name]
    first_filter = samples[0]["filter"]
    rows = sorted((row for row in samples if row["filter"] == first_filter), key=lambda row: int(row["doc_id"]))
    names = [name for name in task.metrics if name in rows[0]]
    if task.metric not in names:
        raise InputError(f"task {task.name} gave no {task.metric} for its documents; it gave {', '.join(names)}")
    return {name: torch.tensor([float(row[name]) for row in rows], dtype=torch.float64) for name in names}


def find_prefix_token(model: Any, tokenizer: Any, task: Task) -> int | None:
    """The token that begins a text without a prompt. None: the tokenizer has one that lm-eval takes by itself."""
    if tokenizer.eos_token_id is None and task.lm_eval_task.OUTPUT_TYPE == "generate_until":
        raise InputError(f"task {task.name} writes until the end, but the tokenizer has no eos_token; give it one")
    if tokenizer.bos_token_id is not None or tokenizer.eos_token_id is not None:
        return None
    recorded = (getattr(model.config.get_text_config(), f"{end}_token_id", None) for end in ("bos", "eos"))
    return next((token for token in recorded if isinstance(token, int) and 0 <= token < len(tokenizer)), 0)


def longest_request(task: Task, tokenizer: Any, most: int) -> int:
    """Tokens of the longest request, which decides how many requests fit into a batch."""
    task.lm_eval_task.set_fewshot_seed(seed=FEWSHOT_SEED)
    task.lm_eval_task.build_all_requests(limit=task.documents, rank=0, world_size=1)
    texts = sorted(("".join(map(str, i.args)) for i in task.lm_eval_task.instances), key=len, reverse=True)[:16]
    return min(most, max(len(tokenizer(text, verbose=False)["input_ids"]) for text in texts))


def count_request_tokens(task: Task, tokenizer: Any, most: int) -> int:
    """Tokens of all requests together, from some of them."""
    with silenced():
        from lm_eval import api, utils

        with (
            replaced_attribute(utils, "env", sandbox_templates(utils.env)),
            replaced_attribute(api.task, "tqdm", lambda items, **_: items),
        ):
            longest_request(task, tokenizer, most)  # builds them
    texts = ["".join(map(str, instance.args)) for instance in task.lm_eval_task.instances]
    some = texts[:: max(1, len(texts) // SAMPLED_REQUESTS)]
    tokens = sum(min(most, len(tokenizer(text, verbose=False)["input_ids"])) for text in some)
    return round(tokens * len(texts) / len(some))


def request_documents(task: Task, only: Sequence[int]) -> Any:
    """A method for lm-eval's task that requests only these documents, with the few-shot examples of a whole run.

    Few-shot examples depend on the documents before, so all requests are built and the others are dropped.
    """
    build = task.lm_eval_task.build_all_requests
    numbers = {document: number for number, document in enumerate(only)}

    def build_selected(**options: Any) -> None:
        build(**{**options, "limit": task.documents, "samples": None})
        selected = [instance for instance in task.lm_eval_task.instances if instance.doc_id in numbers]
        for instance in selected:
            instance.doc_id = numbers[instance.doc_id]
        task.lm_eval_task._instances = selected

    return build_selected


def split_documents(count: int) -> tuple[list[int], list[int]]:
    """The documents on which a search chooses, and those that decide: one of each pair of neighbours.

    Which one does not depend on the number of documents, so that no other limit moves a document to the other half.
    """
    halves: tuple[list[int], list[int]] = ([], [])
    for document in range(count):
        first = hashlib.sha256(f"pair {document // 2}".encode()).digest()[0] % 2
        halves[(document + first) % 2].append(document)
    return halves


def confidence_at(look: int, confidence: float) -> float:
    """The confidence of one look at the deciding documents: the first may spend half of the error, every further one
    half of what is left, so that all looks together keep to it."""
    return 1 - (1 - confidence) / 2**look if confidence > 0 else 0.0


def compare_scores(
    task: Task,
    before: Scores,
    after: Scores,
    confidence: float = 0.95,
    seed: int = 0,
    only: Sequence[int] | None = None,
) -> TaskChange:
    """The fall in score of all documents, or of these, with an interval over pairs of answers to the same document."""
    documents = list(range(len(before[task.metric])) if only is None else only)
    first, second = before[task.metric][documents], after[task.metric][documents]
    falls = task.better * (first - second)
    interval = fall_interval(falls, confidence, seed)
    return TaskChange(
        source=first.mean().item(),
        compressed=second.mean().item(),
        drop=falls.mean().item(),
        drop_ci95=(interval.low, interval.high),
        upper=interval.upper,
        documents=len(falls),
        changed=int((falls != 0).sum()),
        metrics={name: (task.total(name, before[name]), task.total(name, after[name])) for name in before},
    )


def find_lost_documents(task: Task, before: Scores, after: Scores, only: Sequence[int], most: int) -> list[int]:
    """Those of the given documents on which the compressed model does worse, the worst first."""
    documents = torch.tensor(list(only), dtype=torch.long)
    falls = task.better * (before[task.metric] - after[task.metric])[documents]
    order = falls.argsort(descending=True, stable=True)[:most]
    return sorted(documents[order[falls[order] > 0]].tolist())


@contextmanager
def replaced_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside the context, an attribute of `owner` has another value."""
    before = vars(owner).get(name, owner)  # `owner` itself stands for no value
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is owner:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def sandbox_templates(environment: Any) -> Any:
    """The same jinja2 environment, in which templates cannot run arbitrary Python code."""
    from jinja2.sandbox import SandboxedEnvironment

    safe = SandboxedEnvironment(
        loader=environment.loader,
        undefined=environment.undefined,
        keep_trailing_newline=environment.keep_trailing_newline,
    )
    safe.filters.update(environment.filters)
    return safe


def make_bar_class(progress: Progress, label: str) -> Any:
    """A class that replaces tqdm inside lm-eval: one progress bar per task, in this tool's style."""

    class Bar:
        def __init__(self, items: Any = None, *, total: int | None = None, **_: Any) -> None:
            self.items = items
            self.stack = ExitStack()
            count = total if total is not None else len(items or [])
            self.advance = self.stack.enter_context(progress.bar(label, count))

        def __iter__(self) -> Iterator[Any]:
            for item in self.items:
                yield item
                self.advance(1)
            self.close()

        def update(self, count: int = 1) -> None:
            self.advance(count)

        def close(self) -> None:
            self.stack.close()

    return Bar


@contextmanager
def silenced() -> Iterator[None]:
    """Inside the context, lm-eval and datasets neither log nor draw progress bars."""
    loggers: Mapping[str, logging.Logger] = {name: logging.getLogger(name) for name in ("lm_eval", "datasets")}
    levels = {name: logger.level for name, logger in loggers.items()}
    import datasets

    had_bars = datasets.utils.is_progress_bar_enabled()
    datasets.utils.disable_progress_bars()
    for logger in loggers.values():
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name, logger in loggers.items():
            logger.setLevel(levels[name])
        if had_bars:
            datasets.utils.enable_progress_bars()
