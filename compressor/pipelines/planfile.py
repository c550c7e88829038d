"""plan.json: the record of a search, as `compress apply` reads it back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from compressor.plan.shapes import Form
from compressor.report.record import Part, PlannedBlock, PlannedBudget, PlannedReplacement, PlannedSource, list_mistakes
from compressor.runtime.errors import InputError
from compressor.runtime.safe_files import Malformed, parse_json


class PlannedParameters(Part):
    before: int = Field(ge=1, strict=True)


class PlanFile(Part):
    schema_version: int = Field(ge=1, le=1, strict=True)
    source: PlannedSource
    budget: PlannedBudget
    parameters: PlannedParameters
    recipe: dict[str, Any]
    blocks: list[PlannedBlock]
    compensated: bool = Field(default=False, strict=True)

    def forms(self) -> dict[int, Form]:
        """Block index → what stands there."""
        indices = [block.index for block in self.blocks]
        twice = next((index for index in indices if indices.count(index) > 1), None)
        if twice is not None:
            raise InputError(f"the plan has block {twice} twice; every block stands in it once")
        chosen = {b.index: b.replacement for b in self.blocks if b.replacement.kind != "keep"}
        return {index: form_of(index, replacement) for index, replacement in chosen.items()}


def form_of(index: int, replacement: PlannedReplacement) -> Form:
    form = Form(replacement.rank, replacement.neurons or 0)
    if form.kind != replacement.kind:
        raise InputError(
            f"the plan's block {index} is {replacement.kind} with rank {form.rank} and {form.neurons} neurons, that is "
            f"{form.kind}: linear has rank null, lowrank 1 or more, pruned 0 with neurons, hybrid both, bias neither"
        )
    return form


def read_plan(file: Path) -> tuple[PlanFile, dict[str, Any]]:
    """The validated plan and the whole record as it stands in the file."""
    try:
        record = parse_json(file)
        return PlanFile.model_validate(record), record
    except FileNotFoundError:
        raise InputError(f"plan {file} does not exist; make one with `compress plan MODEL --max-dppl 1.0`") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"plan {file} cannot be read: {error}") from error
    except Malformed as error:
        raise InputError(f"plan {file} is not valid JSON: {error}") from error
    except ValidationError as error:
        raise InputError(f"plan {file} is not a plan: {list_mistakes(error)}") from error
