"""One model against another on everything that was promised: texts, tasks, and whether it still talks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from compressor.evaluate.breakdown import Hurt, dissect
from compressor.evaluate.budget import Budget
from compressor.evaluate.generation import Talk, choices_along, continue_greedily, talk
from compressor.evaluate.perplexity import Evaluation, Losses, compare, compare_parts, evaluate
from compressor.evaluate.tasks import Drop, Scores, Task, compare_scores, longest, score, task_key
from compressor.runtime import distributed
from compressor.runtime.cache import Cache
from compressor.runtime.progress import Progress
from compressor.text import Text

Identity = Mapping[str, Any]  # of `sources.identify`, or of `patching.identify_patched`


@dataclass(frozen=True)
class Measured:
    """Everything that was measured of one model."""

    losses: Losses
    scores: dict[str, Scores]
    written: Tensor | None  # its own continuations of the prompts


@dataclass(frozen=True)
class Check:
    """One promise, and whether it was kept."""

    name: str
    passed: bool
    measured: float | None
    limit: float | None
    detail: str


@dataclass(frozen=True)
class Assessment:
    """A compressed model against its source."""

    whole: Evaluation  # all texts together
    texts: dict[str, Evaluation]
    allowed: dict[str, float]  # the rise in perplexity, by text
    drops: dict[str, Drop]
    limits: dict[str, float | None]  # the fall in score, by task
    talk: Talk | None
    hurt: Hurt

    @property
    def checks(self) -> list[Check]:
        return [*self.text_checks(), *self.task_checks()]

    def text_checks(self) -> list[Check]:
        found = []
        for name, e in self.texts.items():
            detail = f"{e.baseline:.3f} → {e.compressed:.3f} ({e.delta:+.3f}), windows of {e.seq_len} tokens"
            limit = self.allowed[name]
            found.append(Check(f"perplexity {name}", e.upper <= limit, e.upper, limit, detail))
        return found

    def task_checks(self) -> list[Check]:
        found = []
        for name, d in self.drops.items():
            limit = self.limits[name]
            detail = f"{d.source:.4f} → {d.compressed:.4f} on {d.documents} documents, {d.changed} changed"
            if limit is not None and d.drop <= limit < d.upper:
                detail += f"; the drop of {d.drop:+.4f} is inside, its interval is not: more documents would narrow it"
            if limit is not None:
                found.append(Check(f"task {name}", d.upper <= limit, d.upper, limit, detail))
        return found

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    @property
    def warnings(self) -> list[str]:
        said = self.talk.warnings if self.talk else []
        fine = all(check.passed for check in self.text_checks())
        return [f"perplexity is fine, its text is not: {what}" if fine else f"its text: {what}" for what in said]


class Evaluator:
    """The texts, tasks and prompts that two models are measured on. What was measured before is not measured again."""

    def __init__(
        self,
        text: Text,
        tokenizer: Any,
        budgets: Mapping[str, Budget],
        *,
        tasks: Sequence[Task] = (),
        limits: Mapping[str, float | None] | None = None,
        prompts: Sequence[Tensor] = (),
        tokens: int = 0,
        confidence: float = 0.95,
        batch_size: int = 8,
        seed: int = 0,
        cache: Cache | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.text, self.tokenizer, self.budgets = text, tokenizer, budgets
        self.tasks, self.limits = list(tasks), dict(limits or {})
        self.prompts, self.tokens = list(prompts) if tokens else [], tokens
        self.confidence, self.batch_size, self.seed = confidence, batch_size, seed
        self.progress = progress or Progress()
        self.cache = cache or Cache(None, self.progress)
        self.tokenizer_sha256 = tokenizer_sha256(tokenizer) if tasks else ""

    def measure(self, model: Any, step: str, identity: Identity) -> Measured:
        """`identity`: all that the model's outputs depend on; what is measured of it is kept under that name."""
        return Measured(
            self.losses(model, step, identity),
            self.scores(model, step, identity),
            self.written(model, step, identity),
        )

    def losses(self, model: Any, step: str, identity: Identity) -> Losses:
        split = self.text.verification

        def run() -> dict[str, Tensor]:
            options: dict[str, Any] = {"batch_size": self.batch_size, "progress": self.progress, "step": step}
            return {"nats": evaluate(model, split.windows, **options).nats}

        key = {"text": split.sha256, "seq_len": self.text.seq_len}
        return Losses(self.kept(f"{step} text", key, run, identity)["nats"])

    def scores(self, model: Any, step: str, identity: Identity) -> dict[str, Scores]:
        return {task.name: self.score(model, task, step, identity) for task in self.tasks}

    def score(self, model: Any, task: Task, step: str, identity: Identity, only: Sequence[int] | None = None) -> Scores:
        """One task, or of it the documents `only`."""
        key = {**task_key(task, longest(model)), "tokenizer": self.tokenizer_sha256, "only": only}

        def run() -> Scores:
            options: dict[str, Any] = {"batch_size": self.batch_size, "progress": self.progress, "step": step}
            return score(model, self.tokenizer, task, only=only, **options)

        return self.kept(f"{step} {task.name}", key, lambda: distributed.compute_on_first(run), identity)

    def written(self, model: Any, step: str, identity: Identity) -> Tensor | None:
        if not self.prompts:
            return None
        name = f"{step} writes"
        key = {"prompts": [prompt.tolist() for prompt in self.prompts], "tokens": self.tokens}

        def run() -> dict[str, Tensor]:
            return {"written": continue_greedily(model, self.prompts, self.tokens, self.progress, name)}

        return self.kept(name, key, lambda: distributed.compute_on_first(run), identity)["written"]

    def along(self, model: Any, written: Tensor, step: str, identity: Identity) -> Tensor:
        """What the model would say at every step of another's continuations."""
        prompts = [prompt.tolist() for prompt in self.prompts]
        key = {"prompts": prompts, "along": written.tolist()}

        def run() -> dict[str, Tensor]:
            return {"along": choices_along(model, self.prompts, written, self.progress, f"{step} agrees")}

        return self.kept(f"{step} agrees", key, lambda: distributed.compute_on_first(run), identity)["along"]

    def kept(self, step: str, key: Mapping[str, Any], run: Any, identity: Identity) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self.cache.get(step, {**identity, "batch_size": self.batch_size, **key}, run)
        return found

    def compare_texts(self, before: Losses, after: Losses) -> dict[str, Evaluation]:
        return compare_parts(before, after, self.text.parts("verification"), self.confidence, self.seed)

    def compare_tasks(self, before: Mapping[str, Scores], after: Mapping[str, Scores]) -> dict[str, Drop]:
        return {
            task.name: compare_scores(task, before[task.name], after[task.name], self.confidence, self.seed)
            for task in self.tasks
        }

    def assess(self, before: Measured, after: Measured, compressed: Any, identity: Identity) -> Assessment:
        """`compressed` is the model of `after`: it is asked about the source's continuations."""
        texts = self.compare_texts(before.losses, after.losses)
        said = None
        if before.written is not None and after.written is not None:
            along = self.along(compressed, before.written, "compressed", identity)
            said = talk(self.tokenizer, self.prompts, before.written, after.written, along, self.seed)
        return Assessment(
            whole=compare(before.losses, after.losses, self.confidence, self.seed),
            texts=texts,
            allowed={name: self.budgets[name].dppl(e.baseline) for name, e in texts.items()},
            drops=self.compare_tasks(before.scores, after.scores),
            limits=self.limits,
            talk=said,
            hurt=dissect(self.text, before.losses, after.losses, self.tokenizer),
        )


def tokenizer_sha256(tokenizer: Any) -> str:
    """A hash of everything that turns text into tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    words = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    special = json.dumps([tokenizer.bos_token_id, tokenizer.eos_token_id, bool(tokenizer.is_fast)])
    return hashlib.sha256((words + special).encode()).hexdigest()
