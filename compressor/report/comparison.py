"""Two models side by side: the record of `compress compare`, its tables and lines."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from compressor.report.export_check import Contrast
from compressor.report.fidelity import Fidelity, format_nats, format_share
from compressor.report.formats import MISSING, num
from compressor.report.grid import Grid
from compressor.report.part import Count, Part
from compressor.report.record import Versioned
from compressor.report.record_parts import Budget, PerplexityChange, Source, TaskResult, Texts
from compressor.report.search_parts import Healing
from compressor.runtime.figures import signed, signed_interval
from compressor.runtime.resources import format_bytes


class Side(Part):
    """One of the two models, as its record describes it. Of a source the figures are those that the other model was
    compared with."""

    name: str
    kind: Literal["compressed", "source"]
    source: Source
    parameters: Count | None = None
    bytes: Count | None = None  # of the weight files
    compressed_sha256: str | None = None
    budget: Budget | None = None
    text: Texts | None = None
    perplexity: PerplexityChange | None = None
    fidelity: Fidelity | None = None
    tasks: dict[str, TaskResult] = Field(default_factory=dict)
    healing: Healing | None = None
    replaced: str = ""  # how many blocks, by kind

    @property
    def recorded_perplexity(self) -> float | None:
        """The model's own perplexity."""
        if self.perplexity is None:
            return None
        return self.perplexity.compressed if self.kind == "compressed" else self.perplexity.baseline

    def score(self, task: str) -> float | None:
        found = self.tasks.get(task)
        return None if found is None else found.compressed if self.kind == "compressed" else found.source


class BlockDifference(Part):
    """A block in whose place the two models have something else."""

    path: str
    words: str
    first: str
    second: str
    parameters_first: Count | None = None
    parameters_second: Count | None = None


class Measured(Part):
    """Both models on the same verification text."""

    text: Texts
    contrast: Contrast  # the second against the first


class Comparison(Versioned):
    """Two models side by side."""

    first: Side
    second: Side
    blocks: list[BlockDifference] = Field(default_factory=list)
    same_source: bool
    same_text: bool | None = None  # None: of one of them no text is recorded
    notes: list[str] = Field(default_factory=list)
    measured: Measured | None = None


def comparison_tables(record: Comparison) -> list[Grid]:
    """The figures of both models, and the blocks that differ."""
    first, second = record.first, record.second
    table = Grid(("", first.name, second.name), left=("", first.name, second.name))
    rows: list[tuple[str, str, str]] = [
        ("what it is", say_kind(first), say_kind(second)),
        ("parameters", num(first.parameters), num(second.parameters)),
        ("weights on disk", say_bytes(first), say_bytes(second)),
        ("budget", say_budget(first), say_budget(second)),
        ("text", say_text(first), say_text(second)),
        ("perplexity, as recorded", say_perplexity(first), say_perplexity(second)),
        ("KL from the source", say_divergence(first), say_divergence(second)),
    ]
    tasks = dict.fromkeys([*first.tasks, *second.tasks])
    rows += [(f"task {task}", num(first.score(task)), num(second.score(task))) for task in tasks]
    rows += [
        ("healed on", say_healing(first), say_healing(second)),
        ("replaced", first.replaced or MISSING, second.replaced or MISSING),
    ]
    for row in rows:
        table.add_row(*row)
    if not record.blocks:
        return [table]
    blocks = Grid(("block", first.name, second.name, "parameters", ""), left=("block", first.name, second.name))
    for block in record.blocks:
        sizes = (num(block.parameters_first), num(block.parameters_second))
        blocks.add_row(block.words, block.first, block.second, *sizes)
    return [table, blocks]


def say_kind(side: Side) -> str:
    return f"compressed {side.source.model}" if side.kind == "compressed" else f"the source ({side.source.model_type})"


def say_bytes(side: Side) -> str:
    return MISSING if side.bytes is None else format_bytes(side.bytes)


def say_budget(side: Side) -> str:
    if side.budget is None:
        return MISSING
    size = f", remove {side.budget.remove.asked}" if side.budget.remove else ""
    kl = f", KL {side.budget.max_kl:g}" if side.budget.max_kl is not None else ""
    return f"{side.budget.asked}{kl}{size}"


def say_text(side: Side) -> str:
    if side.text is None:
        return MISSING
    split = side.text.verification
    return f"{split.source}: {split.tokens:,} tokens in windows of {side.text.seq_len}"


def say_perplexity(side: Side) -> str:
    change = side.perplexity
    if change is None:
        return MISSING
    if side.kind == "source":
        return f"{change.baseline:.3f}"
    low, high = change.delta_ci95
    return f"{change.compressed:.3f} ({signed(change.delta)} from its source, {signed_interval(low, high)})"


def say_divergence(side: Side) -> str:
    found = side.fidelity
    if found is None or side.kind == "source":
        return MISSING
    return f"{format_nats(found.kl)} nats per token, top-1 {format_share(found.top1_agreement)} %"


def say_healing(side: Side) -> str:
    healing = side.healing
    if side.kind == "source":
        return MISSING
    return f"{healing.tokens:,} tokens of {healing.text} ({healing.params})" if healing else "nothing was trained"


def comparison_lines(record: Comparison) -> list[str]:
    """What can be said of the two together, and what cannot."""
    first, second = record.first, record.second
    lines = list(record.notes)
    if first.parameters and second.parameters:
        change = second.parameters / first.parameters - 1
        lines.append(
            f"{second.name} has {signed(second.parameters - first.parameters, ',d')} parameters "
            f"({signed(change, '.2%')})"
        )
    if not record.blocks:
        lines.append("every block has the same form in both")
    figures = first.recorded_perplexity, second.recorded_perplexity
    if record.measured is not None:
        lines.append(say_measured(record.measured, second.name, first.name))
    elif not record.same_source or record.same_text is False or None in figures:
        lines.append(f"{say_why_not(record)}: the recorded perplexities cannot be compared; add --measure")
    else:
        rise = (figures[1] or 0.0) - (figures[0] or 0.0)
        lines.append(
            f"perplexity of {second.name} minus that of {first.name}, on the same recorded text: {signed(rise)}; add "
            "--measure for its interval"
        )
    return lines


def say_why_not(record: Comparison) -> str:
    if not record.same_source:
        return "they were made from different sources"
    if record.same_text is False:
        return "they were measured on different texts"
    return "one of them records no perplexity"


def say_measured(measured: Measured, second: str, first: str) -> str:
    found = measured.contrast
    low, high = found.delta_ci95
    share = format_share(found.greedy_equal / max(1, found.tokens))
    return (
        f"measured on the same {found.tokens:,} tokens of {measured.text.verification.source}, windows of "
        f"{found.seq_len}: perplexity {found.baseline:.3f} in {first}, {found.compressed:.3f} in {second} "
        f"({signed(found.delta)}, 95 % interval {signed_interval(low, high)}); log-probabilities differ by "
        f"{found.log_probability_off_mean:.2g} on average; {share} % of the greedy tokens are equal"
    )
