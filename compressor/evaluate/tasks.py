"""lm-eval tasks, scored document by document, so that two models are compared in pairs.

Traps of lm-eval that are kept away here: it ties the weights of the model it is given anew; it renders task templates
with all of Python in reach; it changes the tokenizer's pad token; its longest sequence defaults to the model's context;
its few-shot examples depend on what was drawn before; and where there is no network it takes long to say so.
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

from compressor.evaluate.perplexity import interval_of, logits_batch, resampled_means
from compressor.evaluate.task_files import TASK_ALTERNATIVES, TaskFile, find_tasks, refuse_unusable
from compressor.models.load import quiet
from compressor.models.offload import device_of
from compressor.models.source import context_length
from compressor.runtime.context import RunContext
from compressor.runtime.errors import InputError, reason_of
from compressor.runtime.network import why_unreachable
from compressor.runtime.progress import Progress
from compressor.text import datasets_offline

FEWSHOT_SEED = 1234  # lm-eval's own default
LONGEST = 2048  # tokens: a longer default makes rolling tasks build gigabytes of logits
AGGREGATIONS = ("mean", "nanmean", "perplexity")  # of one number per document
Scores = dict[str, Tensor]  # metric → its value for every document


@dataclass(frozen=True)
class Task:
    """A task that is ready to run on its first `documents` documents."""

    name: str
    aliases: tuple[str, ...]  # what the user called it, with and without the metric
    metric: str  # the one that budgets are held against
    metrics: tuple[str, ...]
    better: int  # +1 when more of the metric is better, else −1
    documents: int
    sha256: str  # of its configuration and documents
    source: str
    body: Any = field(repr=False)  # lm-eval's own object

    def total(self, metric: str, values: Tensor) -> float:
        """A metric of all documents, as lm-eval would print it."""
        return float(self.body.aggregation()[metric](values.tolist()))


@dataclass(frozen=True)
class TaskChange:
    """How much a task's score fell, with the paired bootstrap interval over documents."""

    source: float
    compressed: float
    drop: float
    drop_ci95: tuple[float, float]
    upper: float
    documents: int
    changed: int
    metrics: dict[str, tuple[float, float]]


def open_tasks(names: Sequence[str], paths: Sequence[str], limit: int | None, trust_remote_code: bool) -> list[Task]:
    """Find, check and load tasks, or say in one line what is wrong with one."""
    files = find_tasks(list(names), list(paths))
    refuse_unusable(files, trust_remote_code)
    offline = why_unreachable() if any(file.data_files is None for file in files) else None
    return [open_task(file, limit, offline, trust_remote_code or file.packaged) for file in files]


def open_task(file: TaskFile, limit: int | None, offline: str | None, trusted: bool) -> Task:
    local = file.data_files
    dataset = str(file.config.get("dataset_path"))
    with silent(), datasets_offline(local is not None or offline is not None):
        from lm_eval import utils
        from lm_eval.tasks import TaskManager
        from lm_eval.tasks._yaml_loader import load_yaml

        if not trusted:
            refuse_foreign_metrics(file)
        try:
            config = load_yaml(file.file) | file.overrides | {"task": file.name}
            if local is not None:
                data = {split: [str(path) for path in paths] for split, paths in local.items()}
                config["dataset_kwargs"] = {**config["dataset_kwargs"], "data_files": data}
            with replaced(utils, "env", sandbox(utils.env)):
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
    chosen = file.metric or next(iter(means), None)
    if chosen is None or chosen not in means:
        have = ", ".join(means) or "none"
        what = f"no metric {file.metric!r}" if file.metric else "no metric that is a mean over documents"
        raise InputError(f"task {file.name} has {what} (those that can be compared: {have}); for perplexity use --text")
    if body.get_config("num_fewshot") is None:
        body.set_config(key="num_fewshot", value=0)
    described = {"config": file.config, "documents": documents, "fewshot": body.get_config("num_fewshot")}
    return Task(
        name=file.name,
        aliases=(file.asked, file.asked.removesuffix(f":{file.metric}")),
        metric=chosen,
        metrics=tuple(metrics),
        better=-1 if body.higher_is_better().get(chosen) is False else 1,  # None: lm-eval does not know
        documents=len(documents),
        sha256=hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest(),
        source=", ".join(str(f) for split in local.values() for f in split) if local else dataset,
        body=body,
    )


def refuse_foreign_metrics(file: TaskFile) -> None:
    """lm-eval looks for a metric that it does not have among scripts, here and on the Hub, and runs what it finds."""
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


def longest(model: Any) -> int:
    return min(context_length(model) or LONGEST, LONGEST)


def score(
    model: Any,
    tokenizer: Any,
    task: Task,
    context: RunContext | None = None,
    *,
    step: str = "task",
    only: Sequence[int] | None = None,
) -> Scores:
    """Every metric of every document (or of the documents `only`), by lm-eval's HFLM. The model is left as it was."""
    context = context or RunContext()
    prefix = prefix_of(model, tokenizer, task)
    with ExitStack() as stack:
        stack.enter_context(silent())
        stack.enter_context(quiet())
        if only is not None:
            stack.enter_context(replaced(task.body, "build_all_requests", request_only(task, only)))
        stack.enter_context(replaced(model, "tie_weights", lambda *_, **__: None))
        from lm_eval import api, evaluator, utils
        from lm_eval.models import huggingface

        stack.enter_context(replaced(utils, "env", sandbox(utils.env)))
        bar = bar_class(context.progress, f"{step} {task.name}")
        stack.enter_context(replaced(huggingface, "tqdm", bar))
        for module in (api.model, api.task):
            stack.enter_context(replaced(module, "tqdm", lambda items, **_: items))
        try:
            lm = huggingface.HFLM(
                pretrained=model,
                tokenizer=copy.deepcopy(tokenizer),
                backend="causal",
                batch_size=logits_batch(model, longest_request(task, tokenizer, longest(model)), context.batch_size),
                max_length=longest(model),
                prefix_token_id=prefix,
            )
            lm._device = device_of(model)  # of a model whose weights are on disk it would be none
            task.body.set_fewshot_seed(seed=FEWSHOT_SEED)
            results = evaluator.evaluate(
                lm=lm,
                task_dict={"tasks": {task.name: task.body}},
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
                reason = f"a document's answer does not fit into the {longest(model)} tokens that the model can take"
            raise InputError(f"task {task.name} cannot be run: {reason}") from error
    samples = results["samples"][task.name]
    first = samples[0]["filter"]
    rows = sorted((row for row in samples if row["filter"] == first), key=lambda row: int(row["doc_id"]))
    names = [name for name in task.metrics if name in rows[0]]
    if task.metric not in names:
        raise InputError(f"task {task.name} gave no {task.metric} for its documents; it gave {', '.join(names)}")
    return {name: torch.tensor([float(row[name]) for row in rows], dtype=torch.float64) for name in names}


def prefix_of(model: Any, tokenizer: Any, task: Task) -> int | None:
    """The token before a text with nothing before it; None: lm-eval takes the tokenizer's beginning or end."""
    if tokenizer.eos_token_id is None and task.body.OUTPUT_TYPE == "generate_until":
        raise InputError(f"task {task.name} writes until the end, but the tokenizer has no eos_token; give it one")
    if tokenizer.bos_token_id is not None or tokenizer.eos_token_id is not None:
        return None
    recorded = (getattr(model.config.get_text_config(), f"{end}_token_id", None) for end in ("bos", "eos"))
    return next((token for token in recorded if isinstance(token, int) and 0 <= token < len(tokenizer)), 0)


def longest_request(task: Task, tokenizer: Any, most: int) -> int:
    """Tokens of the longest request: what a batch of logits must have room for."""
    task.body.set_fewshot_seed(seed=FEWSHOT_SEED)
    task.body.build_all_requests(limit=task.documents, rank=0, world_size=1)
    texts = sorted(("".join(map(str, i.args)) for i in task.body.instances), key=len, reverse=True)[:16]
    return min(most, max(len(tokenizer(text, verbose=False)["input_ids"]) for text in texts))


def request_only(task: Task, only: Sequence[int]) -> Any:
    """Few-shot examples are drawn from document to document: all requests are built, then those wanted are kept."""
    build = task.body.build_all_requests
    place = {document: number for number, document in enumerate(only)}

    def build_some(**options: Any) -> None:
        build(**{**options, "limit": task.documents, "samples": None})
        kept = [instance for instance in task.body.instances if instance.doc_id in place]
        for instance in kept:
            instance.doc_id = place[instance.doc_id]
        task.body._instances = kept

    return build_some


def compare_scores(task: Task, before: Scores, after: Scores, confidence: float = 0.95, seed: int = 0) -> TaskChange:
    """Resample documents, the same for both models: what a document costs both of them is no difference."""
    fall = task.better * (before[task.metric] - after[task.metric])
    drop = fall.mean().item()
    interval, upper = interval_of(resampled_means(fall[None], seed)[0], drop, confidence)
    return TaskChange(
        source=before[task.metric].mean().item(),
        compressed=after[task.metric].mean().item(),
        drop=drop,
        drop_ci95=interval,
        upper=upper,
        documents=len(fall),
        changed=int((fall != 0).sum()),
        metrics={name: (task.total(name, before[name]), task.total(name, after[name])) for name in before},
    )


def lost_documents(task: Task, before: Scores, after: Scores, most: int) -> list[int]:
    """The documents on which the compressed model does worse, the worst first."""
    fall = task.better * (before[task.metric] - after[task.metric])
    order = fall.argsort(descending=True, stable=True)[:most]
    return sorted(order[fall[order] > 0].tolist())


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute of lm-eval or of the model that is another for a while."""
    before = vars(owner).get(name, owner)  # `owner` itself: there was none
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is owner:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def sandbox(environment: Any) -> Any:
    """The same template environment, without the way from a template to all of Python."""
    from jinja2.sandbox import SandboxedEnvironment

    safe = SandboxedEnvironment(
        loader=environment.loader,
        undefined=environment.undefined,
        keep_trailing_newline=environment.keep_trailing_newline,
    )
    safe.filters.update(environment.filters)
    return safe


def bar_class(progress: Progress, label: str) -> Any:
    """Stands in for tqdm inside lm-eval: one bar per task, in this tool's own style."""

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
def silent() -> Iterator[None]:
    """lm-eval, datasets and fsspec log and draw bars of their own; restored after."""
    loggers: Mapping[str, logging.Logger] = {name: logging.getLogger(name) for name in ("lm_eval", "datasets")}
    levels = {name: logger.level for name, logger in loggers.items()}
    import datasets

    bars = datasets.utils.is_progress_bar_enabled()
    datasets.utils.disable_progress_bars()
    for logger in loggers.values():
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name, logger in loggers.items():
            logger.setLevel(levels[name])
        if bars:
            datasets.utils.enable_progress_bars()
