"""What an export was made from: the part of its record by which it can be checked again."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from compressor.report.part import Part
from compressor.report.record_parts import PerplexityChange, Source


class ExportOrigin(Part):
    """The checkpoint and the source that an export was made from, and what the checkpoint was held against.

    An export is passed on, so of local directories and files only the last part of the name is here; `local` says of
    what, for then somebody who checks the export has to say where it is.
    """

    checkpoint: str
    checkpoint_sha256: str | None = None
    source: Source | None = None
    recipe: dict[str, Any] = Field(default_factory=dict)  # text, windows, seed and budget of the checkpoint
    perplexity: PerplexityChange | None = None  # of the checkpoint, as recorded
    local: list[str] = Field(default_factory=list)
