"""Everything an option sets, as one validated value; a recipe file holds the same keys."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from compressor.budget import Budget
from compressor.errors import InputError
from compressor.text import CALIBRATION_TOKENS, SELECTION_TOKENS, VERIFICATION_TOKENS

Count = Annotated[int, Field(strict=True, ge=1)]


class Recipe(BaseModel):
    """What to do and on what. `trust_remote_code` is not a key: running a model's code takes a word on the spot."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str | None = None
    out: str | None = None
    overwrite: Annotated[bool, Field(strict=True)] = False
    max_dppl: str | Annotated[float, Field(strict=True)] | None = None
    confidence: Annotated[float, Field(ge=0, lt=1)] = 0.95
    text: Annotated[list[str], Field(min_length=1)] | None = None
    seq_len: Annotated[int, Field(strict=True, ge=2)] | None = None
    calib_tokens: Count = CALIBRATION_TOKENS
    select_tokens: Count = SELECTION_TOKENS
    verify_tokens: Count = VERIFICATION_TOKENS
    batch_size: Count = 8
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**63)] = 0
    device: str = "auto"
    dtype: str = "auto"
    revision: str | None = None

    @field_validator("text", mode="before")
    @classmethod
    def one_text_is_a_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("max_dppl")
    @classmethod
    def budget_is_sound(cls, value: str | float | None) -> str | float | None:
        if value is not None:
            try:
                Budget.parse(value)
            except InputError as error:
                raise ValueError(str(error)) from error
        return value

    def budget(self) -> Budget:
        if self.max_dppl is None:
            raise InputError("--max-dppl is missing: say how much perplexity may rise, such as --max-dppl 1.0 or 2%")
        return Budget.parse(self.max_dppl, self.confidence)

    def settings(self) -> dict[str, Any]:
        """The keys that determine the result, without where it goes."""
        return self.model_dump(exclude={"out", "overwrite", "device", "batch_size"}, exclude_none=True)


def resolve(file: Path | None, options: dict[str, Any]) -> Recipe:
    """Defaults, then the recipe file, then the options that were given (those that are not None)."""
    given = {key: value for key, value in options.items() if value is not None}
    return validate(read(file) | given, f"recipe {file}" if file else "options")


def validate(values: dict[str, Any], where: str) -> Recipe:
    """A Recipe, or one InputError that lists every mistake."""
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise InputError(f"{where}: {'; '.join(describe(mistake) for mistake in error.errors())}") from error


def describe(mistake: Any) -> str:
    key = ".".join(str(part) for part in mistake["loc"][:1])
    if mistake["type"] == "extra_forbidden":
        if key == "trust_remote_code":
            return "trust_remote_code cannot stand in a recipe, pass --trust-remote-code"
        return f"unknown key {key!r} (known: {', '.join(Recipe.model_fields)})"
    reason = mistake["msg"].removeprefix("Value error, ")
    return reason if reason.startswith("--") else f"{key}: {reason}, got {mistake['input']!r}"


def read(file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"recipe {file} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"recipe {file} cannot be read: {error}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise InputError(f"recipe {file} is not valid YAML: {str(error).splitlines()[0]}") from error
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise InputError(f"recipe {file} must be a mapping of option names to values, such as `seq_len: 256`")
    return {key.replace("-", "_"): value for key, value in values.items()}


def dump(recipe: Recipe, header: str) -> str:
    lines = "".join(f"# {line}\n" for line in header.splitlines())
    return lines + str(yaml.safe_dump(recipe.settings(), sort_keys=False, allow_unicode=True))
