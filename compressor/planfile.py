"""plan.json: the record of a search, as `compress apply` reads it back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from compressor.errors import InputError


class Part(BaseModel):
    """Keys that nobody asked for are kept: the record is for people too."""

    model_config = ConfigDict(extra="allow", frozen=True)


class PlannedReplacement(Part):
    kind: str = Field(pattern="^(keep|linear|lowrank|bias)$")
    rank: int | None = Field(default=None, ge=0, strict=True)


class PlannedBlock(Part):
    index: int = Field(ge=0, strict=True)
    path: str
    r2_lin: float
    r2_lin_ci95: tuple[float, float]
    r2_stream: float
    effective_rank: float
    top_row_share: float
    params_before: int = Field(ge=1, strict=True)
    params_after: int = Field(ge=1, strict=True)
    verdict: str = Field(pattern="^(safe|costly|unsafe)$")
    reason: str
    replacement: PlannedReplacement


class PlannedSource(Part):
    model: str
    weights_sha256: str


class PlannedBudget(Part):
    asked: str
    confidence: float


class PlannedParameters(Part):
    before: int = Field(ge=1, strict=True)


class PlanFile(Part):
    schema_version: int = Field(ge=1, le=1, strict=True)
    source: PlannedSource
    budget: PlannedBudget
    parameters: PlannedParameters
    recipe: dict[str, Any]
    blocks: list[PlannedBlock]

    def ranks(self) -> dict[int, int | None]:
        """Block index → rank: None is a full linear map, 0 the bias alone."""
        indices = [block.index for block in self.blocks]
        twice = next((index for index in indices if indices.count(index) > 1), None)
        if twice is not None:
            raise InputError(f"the plan has block {twice} twice; every block stands in it once")
        chosen = {b.index: b.replacement for b in self.blocks if b.replacement.kind != "keep"}
        return {index: rank_of(index, replacement) for index, replacement in chosen.items()}


def rank_of(index: int, replacement: PlannedReplacement) -> int | None:
    kind, rank = replacement.kind, replacement.rank
    expected = {"linear": rank is None, "lowrank": rank is not None and rank > 0, "bias": rank == 0}[kind]
    if not expected:
        raise InputError(f"the plan's block {index} is {kind} with rank {rank}: linear has null, lowrank 1 or more")
    return rank


def read_plan(file: Path) -> tuple[PlanFile, dict[str, Any]]:
    """The validated plan and the whole record as it stands in the file."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        return PlanFile.model_validate(record), record
    except FileNotFoundError:
        raise InputError(f"plan {file} does not exist; make one with `compress plan MODEL --max-dppl 1.0`") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"plan {file} cannot be read: {error}") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"plan {file} is not valid JSON: {error}") from error
    except ValidationError as error:
        raise InputError(f"plan {file} is not a plan: {list_mistakes(error)}") from error


def list_mistakes(error: ValidationError, most: int = 8) -> str:
    mistakes = [f"{'.'.join(map(str, m['loc'])) or 'file'}: {m['msg']}" for m in error.errors()]
    more = f"; and {len(mistakes) - most} more" if len(mistakes) > most else ""
    return "; ".join(mistakes[:most]) + more
