"""What a dry run says: the record that `--json` prints, and its lines."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from compressor.report.formats import num, percent
from compressor.report.record_parts import Budget, Count, Part, Source, Texts
from compressor.runtime.figures import count
from compressor.runtime.progress import duration
from compressor.runtime.resources import format_bytes

LEAST_SHOWN = 0.05  # of the whole time: shorter steps are told together


class BlockSizes(Part):
    """The feed-forward blocks that are alike: how many, and their sizes. Neurons are None where they are not known."""

    count: Count
    width: Count
    neurons: Count | None
    matrices: Count | None
    parameters: Count


class SecondsRange(Part):
    """A time on this machine, roughly."""

    expected: float
    least: float
    most: float


class StepEstimate(SecondsRange):
    """One step of the job; `kept` where what it measures is in the cache, so that it takes no time."""

    name: str
    title: str
    kept: bool


class Resources(Part):
    """Bytes of memory and disk that the job takes, and those that can be had."""

    memory: Count
    memory_available: Count
    statistics: Count  # written to the cache; 0 where they are there
    cache: str
    cache_free: Count
    result: Count


class SizeEstimate(Part):
    """The parameters that the budget may remove, roughly, from a few tokens; `dppl` is what removing as many as were
    asked for may cost in perplexity, least and most."""

    least: Count
    most: Count
    least_fraction: float
    most_fraction: float
    tokens: Count
    perplexity: float
    dppl: tuple[float, float] | None = None


class DryRunRecord(Part):
    """What a job would do, and what it would take. Nothing was written."""

    dry_run: bool = True
    source: Source
    parameters: Count
    blocks: list[BlockSizes]
    budget: Budget
    objective: str
    text: Texts
    tasks: dict[str, Count] = Field(default_factory=dict)  # name → documents
    out: str | None
    processes: Count
    seconds: SecondsRange
    steps: list[StepEstimate]
    rates: dict[str, tuple[float, float]]  # seconds of one unit of each kind of work: the least and the most timed
    resources: Resources
    size: SizeEstimate
    sample_seconds: float


def dry_run_lines(record: DryRunRecord) -> list[str]:
    """What would be done, on what, how long, with what, and how small it may get."""
    text, resources, size = record.text, record.resources, record.size
    splits = {name: getattr(text, name) for name in ("calibration", "guard", "selection", "verification")}
    tokens = " / ".join(f"{name} {split.tokens:,}" for name, split in splits.items() if split is not None)
    names = f" of {', '.join(text.names)}" if len(text.names) > 1 else ""
    tasks = "".join(f", {name} ({count(documents, 'document')})" for name, documents in record.tasks.items())
    where = f" into {record.out}" if record.out else ""
    statistics = f"statistics {format_bytes(resources.statistics)} in {resources.cache}" if resources.statistics else ""
    statistics = statistics or f"statistics as they are in {resources.cache}"
    return [
        f"would compress {record.source.model} ({num(record.parameters / 1e6, form='.1f')} M parameters, "
        f"{'; '.join(map(block_words, record.blocks))}){where}, {budget_words(record.budget)}",
        f"text: {tokens} tokens{names} in windows of {text.seq_len}{tasks}",
        f"time: about {duration(record.seconds.expected)} on this machine ({duration(record.seconds.least)} to "
        f"{duration(record.seconds.most)}): {step_words(record.steps)}",
        f"memory: about {format_bytes(resources.memory)} ({format_bytes(resources.memory_available)} can be had)",
        f"disk: {statistics} ({format_bytes(resources.cache_free)} free), the result {format_bytes(resources.result)}",
        size_words(size, record.budget),
        "nothing was written",
    ]


def budget_words(budget: Budget) -> str:
    """What was asked for."""
    asked = [] if budget.max_dppl is None else [f"for at most +{budget.asked} of perplexity"]
    asked += [] if budget.max_kl is None else [f"for at most {budget.max_kl:g} nats per token of KL from the source"]
    asked += [] if budget.remove is None else [f"by at least {count(budget.remove.parameters, 'parameter')}"]
    return " and ".join(asked)


def size_words(size: SizeEstimate, budget: Budget) -> str:
    """How small it may get or, where that was asked for, what it may cost."""
    rough = f"rough: from {count(size.tokens, 'token')}"
    if size.dppl is not None:
        low, high = size.dppl
        return f"cost: perplexity may rise by about {low:.2g} to {high:.2g} from {size.perplexity:.1f} ({rough})"
    if budget.remove is not None or size.most == 0:
        return "size: not estimated, because only the removal of neurons is, and these may not go or are too few"
    shares = [percent(share) for share in (size.least_fraction, size.most_fraction)]
    return (
        f"size: between about {shares[0]} and {shares[1]} of the parameters may go ({size.least:,} to {size.most:,}; "
        f"{rough})"
    )


def block_words(blocks: BlockSizes) -> str:
    """Blocks that are alike: 30 blocks of 3 × 576 × 1,536."""
    many = count(blocks.count, "block")
    if blocks.neurons is None:
        return f"{many} of width {blocks.width:,}, neurons not known"
    return f"{many} of {blocks.matrices} × {blocks.width:,} × {blocks.neurons:,}"


def step_words(steps: Sequence[StepEstimate]) -> str:
    """The steps that take longest, the others together, and what was measured before."""
    whole = sum(step.expected for step in steps)
    shown = [step for step in steps if step.expected > LEAST_SHOWN * whole]
    words = [f"{step.title} {duration(step.expected)}" for step in shown]
    rest = whole - sum(step.expected for step in shown)
    kept = [f"{step.title} (kept from before)" for step in steps if step.kept]
    return ", ".join([*words, *([f"the rest {duration(rest)}"] if rest > 0 else []), *kept])
