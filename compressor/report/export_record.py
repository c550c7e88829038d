"""The records of an export (export.json) and of a push: what `--json` prints of them."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field

from compressor.report.export_origin import ExportOrigin
from compressor.report.record import Versioned
from compressor.report.record_parts import Count, Part

VECTORS = "vectors"  # why a tensor is float32 in a file of another type


class ExportSizes(Part):
    """Parameters of the source, of the compressed model, and of the form that was written."""

    source: Count
    compressed: Count
    exported: Count


class RuntimeCheck(Part):
    """What was compared after writing, in which runtime; None where that runtime is not installed."""

    runtime: str | None
    logits_off: float | None = None  # as a part of the largest logit
    tokens: Count | None = None
    log_probability_off: float | None = None
    perplexity_ratio: float | None = None
    greedy_equal: Count | None = None  # of `greedy` tokens that both continue with
    greedy: Count | None = None


class StoredTensors(Part):
    """The tensors of a GGUF file that are stored as one type; `why` says it where that is not the file's own."""

    type: str
    why: str | None = None
    tensors: Count
    parameters: Count
    bytes: Count


class ExportRecord(Versioned):
    """A compressed model that was written for another runtime."""

    # `for` is a word of Python's own, so the field has another name than its key.
    model_config = ConfigDict(populate_by_name=True)

    to: str
    family: str
    dtype: str
    parameters: ExportSizes
    # of gguf, hf-dense and vllm
    architecture: str | None = None
    neurons: list[Count] = Field(default_factory=list)  # of every block as it was written
    needed: list[Count] = Field(default_factory=list)  # the same without rounding and padding
    heads: list[Count] = Field(default_factory=list)  # query heads of every layer, where attention was compressed
    key_value_heads: list[Count] = Field(default_factory=list)  # 0: one matrix or, without query heads, no attention
    notes: list[str] = Field(default_factory=list)
    stored: list[StoredTensors] = Field(default_factory=list)  # of gguf
    padding_cost: float | None = None  # of one width for all blocks, as a part of the saving
    window: Count | None = None
    context: Count | None = None
    # of onnx
    opset: int | None = None
    cache: bool | None = None
    without_cache_because: str | None = None
    inputs: list[str] = Field(default_factory=list)
    outputs: list[str] = Field(default_factory=list)
    tolerance: float | None = None
    use: str | None = Field(default=None, validation_alias="for", serialization_alias="for")
    # of all
    checked: RuntimeCheck
    origin: ExportOrigin | None = None  # None: it was written by an earlier version
    # known when it is written, so not in export.json
    out: str | None = None
    bytes: Count | None = None
    seconds: float | None = None


class PushedFile(Part):
    path: str
    bytes: Count


class PushRecord(Part):
    """A checkpoint that was sent to the Hub, or what would be sent."""

    directory: str
    repo: str
    branch: str
    private: bool
    files: list[PushedFile]
    bytes: Count
    left_out: dict[str, str]  # name → why
    notes: list[str]
    card: dict[str, Any]  # the metadata of the model card
    sent: bool
    reason: str | None = None  # why nothing was sent
    created: bool | None = None
    removed: list[str] = Field(default_factory=list)
    url: str | None = None
    commit: str | None = None
