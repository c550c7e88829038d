"""The parts of a record: what was measured of one block, text, task or model, each a small typed value."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from compressor.report.fidelity import Fidelity
from compressor.report.part import Count as Count
from compressor.report.part import Figure, Interval
from compressor.report.part import Part as Part
from compressor.report.part import present as present

Verdict = Literal["safe", "costly", "unsafe"]
FFN, ATTENTION = "FFN", "attention"


class Tool(Part):
    name: str = "compressor"
    version: str


class Source(Part):
    """The model that was measured or compressed."""

    model: str
    revision: str | None = None
    model_type: str = ""
    weights_sha256: str
    dtype: str = ""
    exports: list[str] = Field(default_factory=list)  # what `compress export --to` can make of this family
    card: dict[str, Any] = Field(default_factory=dict)  # what the source's own card says, as far as it holds here too


class TextSplit(Part):
    source: str = ""
    sha256: str = ""
    tokens: Count = 0
    documents: Count | None = None  # from how many documents its windows come, as far as the text tells them apart


class Texts(Part):
    """The three disjoint stretches of text, in windows of one length."""

    calibration: TextSplit | None = None
    selection: TextSplit | None = None
    verification: TextSplit
    guard: TextSplit | None = None  # what replacements were fitted on beside it
    seq_len: int = 0
    names: list[str] = Field(default_factory=list)


class Parameters(Part):
    """Distinct stored parameters, tied weights once."""

    before: Annotated[int, Field(ge=1)] | None = None
    after: Count | None = None
    removed: int | None = None
    removed_fraction: Figure | None = None


class Rows(Part):
    fitted: Count = 0
    held_out: Count = 0


class Replacement(Part):
    """What stands in a block's place; `rank` None with kind linear is a full matrix.

    An FFN keeps `neurons` of its `units`, attention `heads` of its `units`: a unit is a neuron, or a key-value head
    with the query heads that read it. `kept_heads` are the numbers of the kept heads.
    """

    kind: Literal["keep", "linear", "lowrank", "pruned", "hybrid", "bias"]
    rank: Count | None = None
    neurons: Count | None = None
    heads: Count | None = None
    kept_heads: list[Count] | None = None
    units: Count | None = None
    query_heads_per_unit: Count | None = None


class PerplexityChange(Part):
    """Perplexity of two models on the same tokens, with the interval of the difference."""

    baseline: Figure
    compressed: Figure
    delta: Figure
    delta_ci95: Interval
    delta_upper: Figure  # the end that a budget is held against
    tokens: Count
    seq_len: Count
    delta_error: Figure | None = None  # standard error
    unit: Literal["window", "document"] = "window"  # what was resampled
    units: Count | None = None
    documents: Count | None = None
    fidelity: Fidelity | None = None

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the difference."""
        return self.delta_ci95


class Trial(PerplexityChange):
    """A block replaced by its linear map, on trial."""

    nats: Figure


class Together(Trial):
    """Several blocks replaced at once."""

    blocks: list[int]
    attention: list[int] = Field(default_factory=list)  # the layers whose attention was replaced too
    removed: int
    removed_fraction: Figure


class Ladder(Part):
    """R² of the best map of each rank."""

    ranks: list[int]
    r2: list[Figure]


class TopRow(Part):
    """A row that carries much of its block's variance, with the text around it."""

    window: int
    position: int
    share: Figure
    token: str
    before: str
    after: str


class Bilinear(Part):
    r2_lin: Figure
    r2_poly: Figure
    iterations: int
    converged: bool
    gain: Figure


class Trained(Part):
    r2_lin: Figure
    r2: Figure
    steps: Annotated[tuple[int, ...], Field(strict=False)]
    curve: Annotated[tuple[Figure, ...], Field(strict=False)]
    gap: Figure


class Crossing(Part):
    """R²_lin of this model's block and of another model's, by the inputs that they were given."""

    index: int
    other_index: int
    own: Figure
    own_on_other: Figure
    own_on_white: Figure
    other: Figure
    other_on_own: Figure
    other_on_white: Figure


class BlockFigures(Part):
    """What one text says of one block."""

    index: Count
    r2_lin: Figure
    r2_lin_ci95: Interval
    r2_stream: Figure
    r2_ridge: Figure = math.nan  # of the ridge that errs least on held-out rows, and the same stream-weighted
    r2_ridge_stream: Figure = math.nan
    r2_median: Figure = math.nan
    effective_rank: Figure
    condition_number: Figure = math.nan
    input_effective_rank: Figure = math.nan
    input_rank: int | None = None
    top_row_share: Figure
    top_position: int | None = None
    top_position_share: Figure = math.nan
    rank_99: int | None = None
    rank_99_params: int | None = None


class Block(BlockFigures):
    """One block: how linear it is, whether it may be touched, and what stands in its place."""

    path: str
    params_before: Annotated[int, Field(ge=1)]
    params_after: Annotated[int, Field(ge=1)]
    verdict: Verdict | None  # None: undecided, the reason says why
    reason: str
    replacement: Replacement
    predicted_dloss: Figure | None = None
    predicted_dloss_factorised: Figure | None = None
    linear_params: int | None = None
    ladder: Ladder | None = None
    top_rows: list[TopRow] = Field(default_factory=list)
    swap: Trial | None = None
    bilinear: Bilinear | None = None
    trained: Trained | None = None
    cross: Crossing | None = None

    branch: ClassVar[str] = FFN

    @property
    def name(self) -> str:
        """What the block is called in tables."""
        return str(self.index)

    @property
    def words(self) -> str:
        """What the block is called in sentences."""
        return f"block {self.index}"


class Attention(Block):
    """The attention of one layer, whose number is `index`."""

    branch: ClassVar[str] = ATTENTION

    @property
    def name(self) -> str:
        return f"{self.index} attention"

    @property
    def words(self) -> str:
        return f"attention {self.index}"


class SavedBlock(Part):
    """A replaced block of a model that was saved without measurements."""

    path: str
    replacement: Replacement


class Shape(Part):
    """How heterogeneous the profile is over depth."""

    lowest: Figure
    median: Figure
    highest: Figure
    spread: Figure
    mean_jump: Figure
    largest_jump: Figure
    largest_jump_after: int | None
    turns: int
    rank_correlation_with_depth: Figure | None


class Swap(Part):
    """Every block alone as its linear map, and the cheapest ones together."""

    baseline: Figure
    tokens: Count
    seq_len: Count
    seconds: Figure
    whole_evaluation_seconds: Figure
    ratio: Figure
    predicted_rank_correlation: Figure | None = None
    together: list[Together] = Field(default_factory=list)


class BilinearProbe(Part):
    rank: int
    criterion: str
    pearson: Figure | None
    mean_gain: Figure
    largest_gain: Figure


class TrainedProbe(Part):
    optimiser: str
    steps: int
    batch: int
    learning_rate: float
    mean_gap: Figure
    largest_gap: Figure


class Probes(Part):
    rows: int
    sampled: bool
    bilinear: BilinearProbe | None = None
    trained: TrainedProbe | None = None


class CrossSummary(Part):
    source: Source
    mean: dict[str, Figure]
    rank_correlation: dict[str, Figure | None]


class Corpus(Part):
    name: str
    text: TextSplit
    blocks: list[BlockFigures]
    attention: list[BlockFigures] = Field(default_factory=list)
    shape: Shape | None = None


class CorpusPair(Part):
    first: str
    second: str
    rank_correlation: Figure | None
    largest_difference: Figure


class Removal(Part):
    """How much was to go at least, word for word and in parameters."""

    asked: str
    parameters: Count


class Budget(Part):
    """What was asked for, word for word, and the rise in perplexity that it allows; of several texts the smallest, None
    where perplexity has no limit."""

    max_dppl: Figure | None
    asked: str
    max_kl: Figure | None = None
    confidence: Annotated[float, Field(ge=0, lt=1)]
    remove: Removal | None = None


class TextResult(PerplexityChange):
    """One text against its budget; without a limit both `max_dppl` and `passed` are None."""

    max_dppl: Figure | None
    asked: str
    passed: bool | None
    sha256: str = ""
    about: str = ""  # which text the promise is about


class MetricPair(Part):
    source: Figure
    compressed: Figure


class TaskResult(Part):
    """One lm-eval task; `drop` is a change for the worse, whichever way the metric points."""

    metric: str
    higher_is_better: bool
    source: Figure
    compressed: Figure
    drop: Figure
    drop_ci95: Interval
    drop_upper: Figure
    documents: Annotated[int, Field(ge=1)]
    changed: Count
    chosen_on: Count = 0  # other documents of the task, on which the search chose blocks to give back
    looks: Count = 1  # plans that the deciding documents were asked about
    max_drop: Figure | None = None
    passed: bool | None = None
    metrics: dict[str, MetricPair] = Field(default_factory=dict)
    data: str = ""
    sha256: str = ""


class Sample(Part):
    """One prompt and what each model wrote."""

    prompt: str
    source: str
    compressed: str
    agreement: Figure
    first_difference: int | None


class Repetition(MetricPair):
    rise_ci95: Interval


class Generation(Part):
    """Greedy continuations of the same prompts by both models."""

    prompts: Count
    prompt_tokens: Count
    tokens: Count
    agreement: Figure
    same_prefix: Figure
    distinct: dict[str, MetricPair]
    repetition: Repetition
    warnings: list[str] = Field(default_factory=list)
    samples: list[Sample] = Field(default_factory=list)
    sha256: str = ""


class Band(Part):
    """Tokens of one kind, before and after; `share` of the total rise."""

    band: str
    tokens: Count
    baseline: Figure
    compressed: Figure
    share: Figure
    delta: Figure
    nats: Figure


class TokenLoss(Part):
    token: str
    nats: Figure


class Window(Part):
    """A window of text that lost much."""

    text_name: str
    window: int
    baseline: Figure
    compressed: Figure
    nats: Figure
    excerpt: str
    worst: list[TokenLoss] = Field(default_factory=list)


class Breakdown(Part):
    """Which tokens, positions and windows pay for the compression."""

    frequency: list[Band] = Field(default_factory=list)
    position: list[Band] = Field(default_factory=list)
    windows: list[Window] = Field(default_factory=list)


SIZE_CHECK = "parameters removed"


class Check(Part):
    """One promise, and whether it was kept."""

    name: str
    passed: bool
    measured: Figure | None = None
    limit: Figure | None = None
    detail: str = ""
