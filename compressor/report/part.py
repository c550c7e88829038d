"""What every part of a record is built of."""

from __future__ import annotations

import math
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

# JSON has no word for a number that is not finite: it is written as null, and null is read as "not a number".
Figure = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
Interval = Annotated[tuple[Figure, Figure], Field(strict=False)]
Count = Annotated[int, Field(ge=0)]
Value = TypeVar("Value")


class Part(BaseModel):
    """A part of a record: fixed once made, strict about types."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, protected_namespaces=())

    def to_json_value(self) -> dict[str, Any]:
        """The part as plain values under the keys of its file; what was never set has no key."""
        return self.model_dump(exclude_unset=True, by_alias=True)


def present(value: Value | None) -> Value:
    """A value that records of this kind always have, though others may lack it."""
    if value is None:
        raise ValueError("the record lacks a part that is to be shown")
    return value
