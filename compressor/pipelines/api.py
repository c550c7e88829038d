"""The whole job and the gate from Python: `compressor.compress` and `compressor.check`, with what they found as values.

They run the pipelines of the commands, so that the same promise holds; nothing is printed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from compressor.models.load import load_model
from compressor.models.source import identify_weights
from compressor.pipelines import check as checking
from compressor.pipelines import compress as compressing
from compressor.pipelines import recipe as recipes
from compressor.pipelines.compress import CompressedModel
from compressor.pipelines.job import placing
from compressor.pipelines.recipe import Recipe
from compressor.report.notebook import result_html, result_lines
from compressor.report.record import Record
from compressor.report.record_parts import Block, Parameters, PerplexityChange, SavedBlock, present
from compressor.runtime import distributed
from compressor.runtime.context import RunContext, open_context
from compressor.runtime.errors import InputError
from compressor.runtime.names import NAMED_BUILT_IN, RECORD
from compressor.runtime.outputs import reporting_disk_errors, reserved, whole_directory
from compressor.runtime.progress import Progress

AnyPath = str | os.PathLike[str]
# The keys of a recipe that a check takes: the others are about how a model is compressed.
CHECKED = (
    *("max_dppl", "max_kl", "text", "confidence", "seq_len", "verify_tokens", "document_separator"),
    *("tasks", "max_task_drop", "task_path", "task_limit", "generate", "prompts"),
    *("batch_size", "seed", "device", "dtype", "low_memory"),
)


@dataclass(eq=False, repr=False)
class Result:
    """What was found of a compressed model: `record` has everything, the other attributes what is asked for most.

    `out` is the directory of the checkpoint. A notebook shows the answer and the report's first picture.
    """

    record: Record
    out: Path | None
    loading: Mapping[str, Any] = field(default_factory=dict)  # where and in what precision the model is loaded

    @property
    def perplexity(self) -> PerplexityChange:
        """Of the source (`baseline`) and of the `compressed` model, the `delta` and its 95 % `interval`."""
        return present(self.record.perplexity)

    @property
    def parameters(self) -> Parameters:
        """How many there were `before`, how many there are `after`, `removed`, and as a `removed_fraction`."""
        return self.record.parameters

    @property
    def blocks(self) -> list[Block] | list[SavedBlock]:
        """Every FFN, and the attention that was replaced; of a check, what was replaced alone."""
        record = self.record
        return record.listed or [*record.replaced, *record.replaced_attention]

    @property
    def passed(self) -> bool:
        """Whether every promise holds."""
        return bool(self.record.passed)

    @cached_property
    def _loaded(self) -> tuple[Any, Any]:
        return load_model(str(self.out), allow_compressed=True, **self.loading)

    @property
    def model(self) -> Any:
        """The compressed model. One that is on disk is loaded when it is first asked for."""
        return self._loaded[0]

    @property
    def tokenizer(self) -> Any:
        return self._loaded[1]

    @property
    def _place(self) -> str:
        return f"checkpoint: {self.out}"

    def __repr__(self) -> str:
        return "\n".join(result_lines(self.record, self._place))

    def _repr_html_(self) -> str:
        return result_html(self.record, self._place)


@dataclass(eq=False, repr=False)
class Compression(Result):
    """A compressed model that holds its budget. Without `out` it is in memory, and `save` writes it."""

    held: CompressedModel | None = None
    identity: Mapping[str, Any] | None = None  # of the weights that were measured

    @cached_property
    def _loaded(self) -> tuple[Any, Any]:
        return super()._loaded if self.held is None else (self.held.model, self.held.tokenizer)

    @property
    def _place(self) -> str:
        return "in memory: .save(DIRECTORY) writes it" if self.out is None else super()._place

    def save(self, out: AnyPath, *, overwrite: bool = False) -> Path:
        """Write the checkpoint with everything that was measured, whole or not at all.

        A model that was changed in memory meanwhile is refused: the figures are not its own.
        """
        progress = Progress()
        if self.held is not None and identify_weights(self.held.model) != self.identity:
            raise InputError(
                "the model was changed after it was measured, so the figures are not its own; write it without them: "
                "compressor.save(result.model, result.tokenizer, DIRECTORY)"
            )
        taken = self.record.source.model if self.held is not None else self.out  # what may not be written over
        with reserved(os.fspath(out), overwrite, taken, RECORD, progress.say) as target:
            if self.held is not None:
                self.record = self.held.write(target, progress)
            else:
                self._copy(target)
        self.out = self.out or target
        return target

    def _copy(self, target: Path) -> None:
        if self.out is None or not (self.out / RECORD).is_file():
            raise InputError(f"{self.out} is gone; compress the model again")
        with reporting_disk_errors(target), whole_directory(target) as partial:
            shutil.copytree(self.out, partial, dirs_exist_ok=True)


def compress(
    model: AnyPath | None = None,
    *,
    out: AnyPath | None = None,
    recipe: AnyPath | None = None,
    cache: AnyPath | None = None,
    no_cache: bool = False,
    trust_remote_code: bool = False,
    progress: bool = False,
    **settings: Any,
) -> Compression:
    """The whole job of `compress MODEL --max-dppl 1.0 --out DIR`: find the smallest model inside the budget, verify it,
    and write it to `out`.

    `settings` are the keys of a recipe, which are the options of the command: `max_dppl=1.0`, `remove="10%"`,
    `text="corpus.txt"`, `kinds=["linear"]`, …; `recipe` is a YAML file with any of them. Without `out` the model stays
    in memory, and nothing is written until `.save(DIRECTORY)`. `progress` shows on stderr how far it is.

    BudgetError where nothing fits the budget; InputError where something is wrong with what was given.
    """
    chosen = resolve(recipe, {"model": model, "out": out, **settings})
    with started(cache, no_cache, trust_remote_code, progress) as context:
        loading = placing(chosen, context)
        if chosen.out is not None:
            record = compressing.run(chosen, context)
            return Compression(record, Path(present(record.out)), loading)
        compressing.refuse_early(chosen)
        held = compressing.compress(chosen, context)
        return Compression(held.record, None, loading, held, identify_weights(held.model))


def check(
    directory: AnyPath,
    *,
    source: AnyPath | None = None,
    baseline: AnyPath | None = None,
    update_baseline: bool = False,
    tolerance: float = 0.005,
    junit: AnyPath | None = None,
    report: AnyPath | None = None,
    cache: AnyPath | None = None,
    no_cache: bool = False,
    trust_remote_code: bool = False,
    progress: bool = False,
    **settings: Any,
) -> Result:
    """The gate of `compress check DIR`: measure a checkpoint against its source again; `.passed` says whether every
    promise holds.

    What is not given is as recorded. `settings` are the options of the command that a recipe has too: `max_dppl`,
    `text`, `tasks`, … InputError where something is wrong with what was given.
    """
    unknown = [key for key in settings if key not in CHECKED]
    if unknown:
        raise InputError(f"check does not take {', '.join(unknown)}; it takes {', '.join(CHECKED)}")
    given, chosen = plain_values(settings), Path(directory).expanduser()
    files = [None if file is None else Path(file) for file in (baseline, junit, report)]
    gate = checking.Gate(
        None if source is None else os.fspath(source), files[0], update_baseline, tolerance, files[1], files[2]
    )
    with started(cache, no_cache, trust_remote_code, progress) as context:
        record = checking.run(chosen, given, gate, context)
        return Result(record, chosen.absolute(), placing(recipes.resolve(None, given), context))


def resolve(recipe: AnyPath | None, settings: Mapping[str, Any]) -> Recipe:
    """The recipe of a call; a model in memory is refused, because its source could not be named."""
    model = settings.get("model")
    if model is not None and not isinstance(model, (str, os.PathLike)):
        raise InputError(
            f"compress takes a hub id, a directory, or {NAMED_BUILT_IN}, not a {type(model).__name__}; a model in "
            "memory is compressed by compressor.measure, plan, apply and save"
        )
    return recipes.resolve(None if recipe is None else Path(recipe), plain_values(settings))


def plain_values(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as a recipe file has them: paths as words, tuples and sets as lists."""

    def plain(value: Any) -> Any:
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        if isinstance(value, Mapping):
            return {key: plain(part) for key, part in value.items()}
        return [plain(part) for part in value] if isinstance(value, (list, tuple)) else value

    return {key: plain(value) for key, value in settings.items()}


@contextmanager
def started(cache: AnyPath | None, no_cache: bool, trust_remote_code: bool, progress: bool) -> Iterator[RunContext]:
    """Join the other processes of a launcher, if there are any, and open the cache, as the commands do."""
    distributed.join_processes()
    shown = Progress(visible=progress and distributed.rank() == 0)
    with open_context(None if cache is None else Path(cache), no_cache, shown, trust_remote_code) as context:
        yield context
