"""Trials of plans: a plan is fitted, put into the model, and measured on the selection text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from compressor.evaluate.budget import text_prefix
from compressor.evaluate.fidelity import (
    Fidelity,
    FidelityChange,
    Reference,
    compare_fidelity_parts,
    evaluate_against,
    measure_source,
)
from compressor.evaluate.perplexity import Losses, PerplexityChange, compare_parts, evaluate, limit_batch_size
from compressor.evaluate.speed import is_slower
from compressor.modeling_compressor import Replacement
from compressor.models.blocks import Block, modules_of
from compressor.models.branches import AttentionOf, BranchIndex, layer_of
from compressor.models.residual import Stream, open_stream
from compressor.models.source import identify
from compressor.patch.tree import patched
from compressor.plan.block_trials import BlockTrials
from compressor.plan.candidates import BlockCandidates
from compressor.plan.fit import Fitter, Module
from compressor.plan.moments_store import MomentsStore
from compressor.plan.shapes import Shape, Shapes, describe_shape, list_shapes
from compressor.runtime import distributed
from compressor.runtime.cache import Tensors
from compressor.runtime.environment import identify_machine
from compressor.runtime.errors import NumericsError
from compressor.runtime.figures import signed
from compressor.text import Split


@dataclass(frozen=True)
class Trial:
    """One plan that was fitted and measured on the selection text, by the text's name.

    A plan whose weights or activations overflow has no measured changes: it costs more than any budget.
    """

    shapes: dict[BranchIndex, Shape]
    predicted: float  # nats per token
    saved: int
    compensated: bool  # fitted in order of depth, each block compensating those before it
    changes: dict[str, PerplexityChange]
    fidelity: dict[str, FidelityChange] = field(default_factory=dict)  # only where a budget asks for it

    @property
    def overflows(self) -> bool:
        return not self.changes


class TrialRunner:
    """Tries plans on the selection text. Trials need no budget, so searches for several budgets share them.

    With `fidelity`, trials are also compared with the source token by token, for searches with a limit of KL.
    """

    def __init__(
        self,
        store: MomentsStore,
        candidates: Mapping[BranchIndex, BlockCandidates],
        fitter: Fitter,
        block_trials: BlockTrials,
        *,
        fidelity: bool = False,
    ) -> None:
        self.store, self.candidates, self.fitter, self.fidelity = store, candidates, fitter, fidelity
        self.block_trials = block_trials
        self.starts: dict[str, Stream] = {}  # by the hash of windows: their states at a layer that no plan has replaced
        self.model: Any = store.model
        self.text, self.blocks, self.context = store.text, list(store.blocks.values()), store.context
        self.before: Losses | None = None  # of the source, on the selection text
        self.reference: Reference | None = None  # of the selection text, once the source was measured there
        self.tried: dict[tuple[Any, ...], Trial] = {}
        self.overflowing: set[tuple[BranchIndex, Shape]] = (
            set()
        )  # shapes that overflow in this block, whatever the plan
        self.slow: dict[tuple[str, Shape], bool] = {}  # by the path of a block: whether a shape runs slower than it
        self.compensated: dict[tuple[Any, ...], dict[BranchIndex, Module]] = {}

    def attempt(self, shapes: Shapes, predicted: float, *, compensated: bool = False) -> Trial:
        """Fit one plan and measure it on the selection text."""
        key = (compensated, *sorted(shapes.items(), key=lambda item: item[0]))
        if key not in self.tried:
            self.before = self.before or self.measure_source()
            after, fidelity = self.measure(shapes, compensated, self.text.selection)
            split, parts, context = self.text.selection, self.text.parts("selection"), self.context
            changes: dict[str, PerplexityChange] = {}
            divergences: dict[str, FidelityChange] = {}
            if after.nats.isfinite().all():
                changes = compare_parts(self.before, after, split, parts, context.confidence, context.seed)
                if fidelity is not None:
                    divergences = compare_fidelity_parts(fidelity, split, parts, context.confidence, context.seed)
            saved = sum(self.candidates[index].saved(shape) for index, shape in shapes.items())
            self.tried[key] = Trial(dict(shapes), predicted, saved, compensated, changes, divergences)
            rises = ", ".join(
                f"{text_prefix(name)}ΔPPL {signed(change.delta)}"
                + (f", KL {divergences[name].kl:.4f}" if name in divergences else "")
                for name, change in changes.items()
            )
            found = f"selection {rises}" if changes else "it overflows"
            how = ", compensated" if compensated else ""
            context.progress.note(f"  tried {summarise_shapes(shapes)}{how}: {saved:,} parameters, {found}")
            if not changes and not compensated:
                self.leave_out([item for item in shapes.items() if self.overflows_alone(*item, shapes)])
        return self.tried[key]

    def overflows_alone(self, index: BranchIndex, shape: Shape, shapes: Shapes) -> bool:
        """Whether one block of a plan that overflows does so by itself."""
        if len(shapes) == 1:
            return True
        return not bool(self.measure({index: shape}, False, self.text.selection)[0].nats.isfinite().all())

    def attempt_on_spare(self, shapes: Shapes) -> dict[str, PerplexityChange]:
        """What a plan costs on the spare text, by the text's name; nothing where there is none, or where it overflows.

        Its documents are those of calibration: they show how a cost scatters, and alone would be too kind.
        """
        spare = self.text.spare
        if spare is None:
            return {}
        before = Losses(self.context.cache.get("", self.trial_key({}, False, spare), self.source_run(spare))["nats"])
        after, _ = self.measure(shapes, False, spare)
        if not after.nats.isfinite().all():
            return {}
        parts, context = self.text.parts("spare"), self.context
        return compare_parts(before, after, spare, parts, context.confidence, context.seed)

    def leave_out(self, found: Iterable[tuple[BranchIndex, Shape]]) -> None:
        """From here on no plan has these shapes in these blocks."""
        for index, shape in found:
            if (index, shape) not in self.overflowing:
                self.context.progress.note(
                    f"  block {index} ({describe_shape(index, shape)}) overflows, so it is left out"
                )
            self.overflowing.add((index, shape))

    def measure_source(self) -> Losses:
        """The losses of the source on the selection text; with `fidelity` also what trials are compared with."""
        windows, key = self.text.selection.windows, self.trial_key({}, False, self.text.selection)
        if self.fidelity:
            losses, self.reference = measure_source(
                self.model, windows, key, self.context, identity=identify(self.model), step="search"
            )
            return losses
        return Losses(self.context.cache.get("", key, self.source_run(self.text.selection))["nats"])

    def source_run(self, split: Split) -> Callable[[], Tensors]:
        """Measures the losses of the source on these windows, when it is called."""
        return lambda: {"nats": evaluate(self.model, split.windows, self.context, step="search").nats}

    def measure(self, shapes: Shapes, compensated: bool, split: Split) -> tuple[Losses, Fidelity | None]:
        """The losses of a plan on these windows, from the cache where an earlier run measured it, and on the selection
        text its fidelity, where that is wanted. Where a plan overflows, the losses are infinite."""
        windows, context = split.windows, self.context
        reference = self.reference if split is self.text.selection else None

        def run() -> Tensors:
            start = self.start_before(layer_of(min(shapes)), split)
            try:
                with patched(self.model, self.blocks, self.fit_modules(shapes, compensated)):
                    if reference is None:
                        return {"nats": evaluate(self.model, windows, context, step="search", start=start).nats}
                    losses, fidelity = evaluate_against(
                        self.model, reference, windows, context, step="search", start=start
                    )
                    return {"nats": losses.nats, "kl": fidelity.kl, "agrees": fidelity.agrees}
            except NumericsError:
                overflow = torch.full((len(windows), self.text.seq_len - 1), math.inf)
                return {"nats": overflow, "kl": overflow.clone(), "agrees": torch.zeros_like(overflow).bool()}

        more = {} if reference is None else {"fidelity": True}
        found = self.context.cache.get("", self.trial_key(shapes, compensated, split, **more), run)
        fidelity = None if reference is None else Fidelity(found["kl"], found["agrees"])
        return Losses(found["nats"]), fidelity

    def start_before(self, layer: int, split: Split) -> Stream:
        """These windows at this layer of the source, or at one before it: no plan changes what is before its first
        block."""
        start = self.starts.get(split.sha256)
        if start is None or start.position > layer:
            size = limit_batch_size(self.model, self.text.seq_len, self.context.batch_size)
            start = self.starts[split.sha256] = open_stream(self.model, self.store.layers, split.windows, size)
            start.advance(layer)
        if split is self.text.spare:  # tried from the first layer to the last
            start.advance(layer)
        return start

    def trial_key(self, shapes: Shapes, compensated: bool, split: Split, **more: Any) -> dict[str, Any]:
        """The cache key of a trial; without shapes, of the source."""
        by_index = {str(index): str(shapes[index]) for index in sorted(shapes)}
        how = {"shapes": by_index, "compensated": compensated, "measured": split.sha256, **more}
        return self.store.key("trial", self.store.layers[0], **how)

    def fit_modules(self, shapes: Shapes, compensated: bool) -> dict[BranchIndex, Module]:
        """The modules of a plan. Compensated fits take a pass over the text, so those of the last plan are kept."""
        if not compensated:
            return self.fitter.fit_at_once(shapes)
        key = tuple(sorted(shapes.items(), key=lambda item: item[0]))
        if key not in self.compensated:
            self.compensated = {key: self.fitter.fit_in_order(shapes)}
        return self.compensated[key]

    def is_slower(self, shape: Shape, index: BranchIndex, shapes: Shapes) -> bool:
        """Whether a shape takes longer than the FFN it replaces, on this machine.

        The result is cached: a run that continues after an interruption must come to the same plan. Blocks that are
        built alike share it: to time each of them would be to give the same answer more chances to be wrong.
        """
        block = self.store.blocks[index]
        like = self.first_built_like(block)
        if (like.path, shape) not in self.slow:
            module = self.fit_modules(shapes, False)[index]
            assert isinstance(module, Replacement)

            def run() -> Tensors:
                return {"slower": torch.tensor(is_slower(self.model, block, module))}

            key = self.store.key("slower", like, shape=str(shape), machine=identify_machine())
            self.slow[like.path, shape] = bool(
                self.context.cache.get("", key, lambda: distributed.compute_on_first(run))["slower"]
            )
        return self.slow[like.path, shape]

    def first_built_like(self, block: Block) -> Block:
        """The first block with the same modules of the same sizes."""

        def build(other: Block) -> tuple[Any, ...]:
            return other.width, other.parameters, *map(repr, modules_of(self.model, other))

        return next(other for other in self.blocks if build(other) == build(block))

    def trials(self) -> list[Trial]:
        return list(self.tried.values())


def summarise_shapes(shapes: Shapes) -> str:
    """A plan in one line: every block where there are few, else how many there are of each kind."""
    if len(shapes) <= 4:
        return list_shapes(shapes)
    attention = {index: shape for index, shape in shapes.items() if isinstance(index, AttentionOf)}
    blocks = {index: shape for index, shape in shapes.items() if index not in attention}
    counts = []
    for word, part in (("blocks", blocks), ("attention", attention)):
        kinds = [shape.kind for shape in part.values()]
        listed = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))
        counts += [f"{len(part)} {word} ({listed})"] if part else []
    return " and ".join(counts)
