"""A compressed model compared with its source: perplexity and fidelity on every text, scores of every task, generated
text."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from compressor.evaluate.breakdown import LossBreakdown, break_down
from compressor.evaluate.budget import Budget
from compressor.evaluate.fidelity import (
    Fidelity,
    FidelityChange,
    Reference,
    compare_fidelity,
    compare_fidelity_parts,
    evaluate_against,
    measure_source,
)
from compressor.evaluate.generation import GenerationCheck, compare_continuations, continue_greedily, predict_along
from compressor.evaluate.perplexity import Losses, PerplexityChange, compare, compare_parts, evaluate
from compressor.evaluate.tasks import (
    Scores,
    Task,
    TaskChange,
    compare_scores,
    confidence_at,
    longest_sequence,
    score,
    split_documents,
    task_key,
)
from compressor.runtime import distributed
from compressor.runtime.cache import cache_key
from compressor.runtime.context import RunContext
from compressor.runtime.figures import count, signed
from compressor.text import Text

Identity = Mapping[str, Any]  # what a model's outputs depend on: of `identify` or `identify_patched`


@dataclass(frozen=True)
class Measured:
    """Everything that was measured of one model."""

    losses: Losses
    scores: dict[str, Scores]
    continuations: Tensor | None  # what it writes after each prompt, as tokens
    fidelity: Fidelity | None = None  # to the source; the source itself has none
    reference: Reference | None = None  # of the source alone: what others are compared with


@dataclass(frozen=True)
class Check:
    """One limit, what was measured against it, and whether that is inside."""

    name: str
    passed: bool
    measured: float | None
    limit: float | None
    detail: str


@dataclass(frozen=True)
class Assessment:
    """A compressed model against its source."""

    whole: PerplexityChange  # all texts together
    texts: dict[str, PerplexityChange]
    allowed: dict[str, float]  # the rise in perplexity, by text; infinite: it is only reported
    tasks: dict[str, TaskChange]
    limits: dict[str, float | None]  # the largest fall in score, by task; None: only reported
    generation: GenerationCheck | None
    breakdown: LossBreakdown
    fidelity: FidelityChange | None = None  # on all texts together
    text_fidelity: dict[str, FidelityChange] = field(default_factory=dict)
    max_kl: float | None = None

    @property
    def checks(self) -> list[Check]:
        return [*self.text_checks(), *self.fidelity_checks(), *self.task_checks()]

    def text_checks(self) -> list[Check]:
        checks = []
        for name, c in self.texts.items():
            detail = f"{c.baseline:.3f} → {c.compressed:.3f} ({signed(c.delta)}), windows of {c.seq_len} tokens"
            limit = self.allowed[name]
            if math.isfinite(limit):
                checks.append(Check(f"perplexity {name}", c.upper <= limit, c.upper, limit, detail))
        return checks

    def fidelity_checks(self) -> list[Check]:
        if self.max_kl is None:
            return []
        limit = self.max_kl
        return [
            Check(f"kl {name}", c.kl_upper <= limit, c.kl_upper, limit, str(c))
            for name, c in self.text_fidelity.items()
        ]

    def task_checks(self) -> list[Check]:
        checks = []
        for name, c in self.tasks.items():
            limit = self.limits[name]
            detail = f"{c.source:.4f} → {c.compressed:.4f} on {count(c.documents, 'document')}, {c.changed} changed"
            if limit is not None and c.drop <= limit < c.upper:
                drop = signed(c.drop, ".4f")
                detail += f"; the drop of {drop} is inside, its interval is not: more documents would narrow it"
            if limit is not None:
                checks.append(Check(f"task {name}", c.upper <= limit, c.upper, limit, detail))
        return checks

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    @property
    def warnings(self) -> list[str]:
        warnings = self.generation.warnings if self.generation else []
        limited = self.text_checks()
        fine = bool(limited) and all(check.passed for check in limited)
        weak = [f"verification {name}: {c.weakness}" for name, c in self.texts.items() if c.weakness]
        return [*weak, *(f"perplexity is fine, its text is not: {w}" if fine else f"its text: {w}" for w in warnings)]


class Evaluator:
    """Measures models on the same texts, tasks and prompts, and compares them. Every measurement is cached."""

    def __init__(
        self,
        text: Text,
        tokenizer: Any,
        budgets: Mapping[str, Budget],
        *,
        tasks: Sequence[Task] = (),
        limits: Mapping[str, float | None] | None = None,
        max_kl: float | None = None,
        prompts: Sequence[Tensor] = (),
        tokens: int = 0,
        context: RunContext,
    ) -> None:
        self.text, self.tokenizer, self.budgets = text, tokenizer, budgets
        self.tasks, self.limits, self.max_kl = list(tasks), dict(limits or {}), max_kl
        self.prompts, self.tokens = list(prompts) if tokens else [], tokens
        self.context = context

    def measure(self, model: Any, step: str, identity: Identity, source: Measured | None = None) -> Measured:
        """Everything of one model. `identity` is all that its outputs depend on: a part of the cache keys.

        A compressed model is compared with its `source`, token by token.
        """
        return replace(
            self.measure_texts(model, step, identity, source),
            scores=self.score_tasks(model, step, identity),
            continuations=self.write_continuations(model, step, identity),
        )

    def measure_texts(self, model: Any, step: str, identity: Identity, source: Measured | None = None) -> Measured:
        """What `measure` gives of the verification text alone: losses and, of a compressed model, its fidelity."""
        split = self.text.verification
        if source is None or source.reference is None:
            key = self.losses_key(identity)
            losses, reference = measure_source(
                model, split.windows, key, self.context, identity=identity, step=step, named=f"{step} text"
            )
            return Measured(losses, {}, None, reference=reference)
        reference = source.reference

        def run() -> dict[str, Tensor]:
            losses, fidelity = evaluate_against(model, reference, split.windows, self.context, step=step)
            return {"nats": losses.nats, "kl": fidelity.kl, "agrees": fidelity.agrees}

        key = self.key("fidelity", identity, split.sha256, seq_len=self.text.seq_len, source=reference.identity)
        found = self.context.cache.get(f"{step} text", key, run)
        return Measured(Losses(found["nats"]), {}, None, Fidelity(found["kl"], found["agrees"]))

    def measure_losses(self, model: Any, step: str, identity: Identity) -> Losses:
        """The losses alone, of a model that no other is compared with."""

        def run() -> dict[str, Tensor]:
            return {"nats": evaluate(model, self.text.verification.windows, self.context, step=step).nats}

        return Losses(self.context.cache.get(f"{step} text", self.losses_key(identity), run)["nats"])

    def losses_key(self, identity: Identity) -> dict[str, Any]:
        return self.key("losses", identity, self.text.verification.sha256, seq_len=self.text.seq_len)

    def score_tasks(self, model: Any, step: str, identity: Identity) -> dict[str, Scores]:
        return {task.name: self.score_task(model, task, step, identity) for task in self.tasks}

    def score_task(
        self, model: Any, task: Task, step: str, identity: Identity, only: Sequence[int] | None = None
    ) -> Scores:
        """The scores of one task, on all of its documents or only on these."""
        how = {**task_key(task, longest_sequence(model)), "tokenizer": tokenizer_sha256(self.tokenizer), "only": only}
        key = self.key("scores", identity, task.sha256, **how)

        def run() -> Scores:
            return score(model, self.tokenizer, task, self.context, only=only, step=step)

        return self.context.cache.get(f"{step} {task.name}", key, lambda: distributed.compute_on_first(run))

    def write_continuations(self, model: Any, step: str, identity: Identity) -> Tensor | None:
        if not self.prompts:
            return None
        name = f"{step} writes"
        key = self.key("written", identity, self.prompts_sha256(), tokens=self.tokens)

        def run() -> dict[str, Tensor]:
            return {"written": continue_greedily(model, self.prompts, self.tokens, self.context.progress, name)}

        return self.context.cache.get(name, key, lambda: distributed.compute_on_first(run))["written"]

    def predict_along(self, model: Any, continuations: Tensor, step: str, identity: Identity) -> Tensor:
        """The token that the model finds most likely at every position of another model's continuations."""
        key = self.key("along", identity, self.prompts_sha256(), along=continuations.tolist())

        def run() -> dict[str, Tensor]:
            return {"along": predict_along(model, self.prompts, continuations, self.context.progress, f"{step} agrees")}

        return self.context.cache.get(f"{step} agrees", key, lambda: distributed.compute_on_first(run))["along"]

    def key(self, kind: str, identity: Identity, text: str, **more: Any) -> dict[str, Any]:
        return cache_key(kind, identity, text, batch=self.context.batch_size, **more)

    def prompts_sha256(self) -> str:
        return hashlib.sha256(json.dumps([prompt.tolist() for prompt in self.prompts]).encode()).hexdigest()

    def perplexities(self, losses: Losses) -> dict[str, float]:
        """The perplexity on every text of the verification split."""
        return {name: losses.part(part).perplexity for name, part in self.text.parts("verification").items()}

    def compare_texts(self, before: Losses, after: Losses) -> dict[str, PerplexityChange]:
        split, parts = self.text.verification, self.text.parts("verification")
        return compare_parts(before, after, split, parts, self.context.confidence, self.context.seed)

    def compare_fidelity(self, after: Measured) -> dict[str, FidelityChange]:
        """The fidelity of a compressed model on every text; none where it was not measured."""
        if after.fidelity is None:
            return {}
        split, parts = self.text.verification, self.text.parts("verification")
        return compare_fidelity_parts(after.fidelity, split, parts, self.context.confidence, self.context.seed)

    def compare_tasks(
        self, before: Mapping[str, Scores], after: Mapping[str, Scores], looks: Mapping[str, int] | None = None
    ) -> dict[str, TaskChange]:
        """The fall in every task's score, on all documents.

        `looks` names the tasks that decide a search, and how many plans they have been asked about, this one included.
        A second plan has blocks that were chosen on one half of the documents: the other half decides on it.
        """
        confidence, seed = self.context.confidence, self.context.seed
        changes = {}
        for task in self.tasks:
            scores, look = (before[task.name], after[task.name]), (looks or {}).get(task.name)
            if look is None:
                changes[task.name] = compare_scores(task, *scores, confidence, seed)
            else:
                choosing, deciding = split_documents(task.documents) if look > 1 else ([], None)
                change = compare_scores(task, *scores, confidence_at(look, confidence), seed, deciding)
                changes[task.name] = replace(change, chosen_on=len(choosing), looks=look)
        return changes

    def compare_choosing(
        self, before: Mapping[str, Scores], after: Mapping[str, Scores], names: Sequence[str]
    ) -> dict[str, TaskChange]:
        """The fall in the score of these tasks, on the half of their documents on which a search chooses blocks."""
        confidence, seed = self.context.confidence, self.context.seed
        changes = {}
        for task in (task for task in self.tasks if task.name in names):
            choosing, _ = split_documents(task.documents)
            changes[task.name] = compare_scores(task, before[task.name], after[task.name], confidence, seed, choosing)
        return changes

    def assess(
        self,
        before: Measured,
        after: Measured,
        compressed: Any,
        identity: Identity,
        task_looks: Mapping[str, int] | None = None,
    ) -> Assessment:
        """Compare a compressed model with its source.

        `compressed` is the model that `after` was measured of: it is run once more, along the source's continuations.
        `task_looks` is as in `compare_tasks`.
        """
        texts = self.compare_texts(before.losses, after.losses)
        generation = None
        if before.continuations is not None and after.continuations is not None:
            predicted = self.predict_along(compressed, before.continuations, "compressed", identity)
            generation = compare_continuations(
                self.tokenizer, self.prompts, before.continuations, after.continuations, predicted, self.context.seed
            )
        return Assessment(
            whole=compare(
                before.losses,
                after.losses,
                self.context.confidence,
                self.context.seed,
                self.text.verification.documents,
            ),
            texts=texts,
            allowed={name: self.budgets[name].allowed_rise(c.baseline) for name, c in texts.items()},
            tasks=self.compare_tasks(before.scores, after.scores, task_looks),
            limits=self.limits,
            generation=generation,
            breakdown=break_down(self.text, before.losses, after.losses, self.tokenizer),
            fidelity=None
            if after.fidelity is None
            else compare_fidelity(
                after.fidelity, self.context.confidence, self.context.seed, self.text.verification.documents
            ),
            text_fidelity=self.compare_fidelity(after),
            max_kl=self.max_kl,
        )


def tokenizer_sha256(tokenizer: Any) -> str:
    """A hash of everything that turns text into tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    words = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    special = json.dumps([tokenizer.bos_token_id, tokenizer.eos_token_id, bool(tokenizer.is_fast)])
    return hashlib.sha256((words + special).encode()).hexdigest()
