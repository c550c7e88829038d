"""Everything an option sets, as one validated value; a recipe file holds the same keys."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_serializer, field_validator

from compressor.evaluate.budget import Budget, budgets_of, parse_drop
from compressor.evaluate.generation import CONTINUATION_TOKENS
from compressor.runtime.errors import InputError
from compressor.runtime.names import split_name
from compressor.runtime.safe_files import Malformed, parse_yaml
from compressor.text import CALIBRATION_TOKENS, SELECTION_TOKENS, VERIFICATION_TOKENS

Count = Annotated[int, Field(strict=True, ge=1)]


def as_words(value: Any) -> Any:
    """A word, a list of words, or a mapping name → word(s), as the words of a command line."""
    if isinstance(value, dict):
        named = [(key, word) for key, words in value.items() for word in as_list(words)]
        return [f"{key}={word}" if isinstance(word, str) else word for key, word in named]
    return as_list(value)


def as_amounts(value: Any) -> Any:
    """The same, of numbers."""
    if isinstance(value, dict):
        return as_words({key: str(amount) if is_number(amount) else amount for key, amount in value.items()})
    return [str(amount) if is_number(amount) else amount for amount in as_list(value)]


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def split_commas(value: Any) -> Any:
    words = as_list(value)
    if not all(isinstance(word, str) for word in words):
        return value
    return [name for word in words for name in (part.strip() for part in word.split(",")) if name]


def check_each(words: list[str] | None, parse: Callable[[str], object]) -> list[str] | None:
    """The words as they are, when the value of each can be read."""
    try:
        for word in words or []:
            parse(split_name(word)[1])
    except InputError as error:
        raise ValueError(str(error)) from error
    return words


Words = Annotated[list[str], BeforeValidator(as_words), Field(min_length=1)]
Amounts = Annotated[list[str], BeforeValidator(as_amounts), Field(min_length=1)]


class Recipe(BaseModel):
    """What to do and on what. `trust_remote_code` is not a key: running a model's code takes a word on the spot."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str | None = None
    out: str | None = None
    overwrite: Annotated[bool, Field(strict=True)] = False
    max_dppl: Amounts | None = None
    confidence: Annotated[float, Field(strict=True, ge=0, lt=1)] = 0.95
    objective: Literal["speed", "size"] = "speed"
    text: Words | None = None
    seq_len: Annotated[int, Field(strict=True, ge=2)] | None = None
    calib_tokens: Count = CALIBRATION_TOKENS
    select_tokens: Count = SELECTION_TOKENS
    verify_tokens: Count = VERIFICATION_TOKENS
    tasks: Annotated[list[str], BeforeValidator(split_commas)] | None = None
    task_path: Words | None = None
    task_limit: Count | None = None
    max_task_drop: Amounts | None = None
    generate: Annotated[int, Field(strict=True, ge=0, le=1024)] = CONTINUATION_TOKENS
    prompts: str | None = None
    swap: Annotated[bool, Field(strict=True)] | None = None
    swap_tokens: Count = 4096
    probe: Annotated[list[Literal["bilinear", "trained"]], BeforeValidator(split_commas)] | None = None
    probe_steps: Annotated[int, Field(strict=True, ge=1, le=1_000_000)] = 1000
    cross: str | None = None
    batch_size: Count = 8
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**63)] = 0
    device: str = "auto"
    dtype: str = "auto"
    low_memory: Annotated[bool, Field(strict=True)] = False
    revision: str | None = None

    @field_validator("max_dppl")
    @classmethod
    def budgets_are_sound(cls, words: list[str] | None) -> list[str] | None:
        return check_each(words, Budget.parse)

    @field_validator("max_task_drop")
    @classmethod
    def drops_are_sound(cls, words: list[str] | None) -> list[str] | None:
        return check_each(words, parse_drop)

    @field_serializer("max_dppl", "max_task_drop")
    def one_word_stands_alone(self, words: list[str] | None) -> Any:
        if words is None or len(words) > 1:
            return words
        try:
            return float(words[0])
        except ValueError:
            return words[0]

    def several_budgets(self) -> list[list[str]]:
        """Budgets for all texts together, smallest first, when there are several; else the one as it is."""
        words = self.max_dppl or []
        return [[word] for word in words] if len(words) > 1 and not any("=" in word for word in words) else [words]

    def budgets(self, texts: Iterable[str]) -> dict[str, Budget]:
        """The budget of every text that is measured."""
        return budgets_of(self.require_budget(), texts, self.confidence)

    def require_budget(self) -> list[str]:
        if self.max_dppl is None:
            raise InputError("--max-dppl is missing: say how much perplexity may rise, such as --max-dppl 1.0 or 2%")
        return self.max_dppl

    def settings(self) -> dict[str, Any]:
        """The keys that determine the result, without where it goes."""
        return self.model_dump(exclude={"out", "overwrite", "device", "batch_size"}, exclude_none=True)


def resolve(file: Path | None, options: dict[str, Any]) -> Recipe:
    """Defaults, then the recipe file, then the options that were given (those that are not None)."""
    given = {key: value for key, value in options.items() if value is not None}
    return validate(read(file) | given, f"recipe {file}", given)


def validate(values: dict[str, Any], where: str, options: Collection[str] = ()) -> Recipe:
    """A Recipe, or one InputError that lists every mistake: those of the options first, then those of the file."""
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        mistakes: dict[str, list[str]] = {}
        for mistake in sorted(error.errors(), key=lambda mistake: mistake["loc"][0] not in options):
            source = "options" if mistake["loc"][0] in options else where
            mistakes.setdefault(source, []).append(describe(mistake))
        told = "; ".join(f"{source}: {'; '.join(all_of_it)}" for source, all_of_it in mistakes.items())
        raise InputError(told) from error


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
        values = parse_yaml(file)
    except FileNotFoundError:
        raise InputError(f"recipe {file} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"recipe {file} cannot be read: {error}") from error
    except Malformed as error:
        raise InputError(f"recipe {file} is not valid YAML{error.where}: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise InputError(f"recipe {file} must be a mapping of option names to values, such as `seq_len: 256`")
    return {key.replace("-", "_"): value for key, value in values.items()}


def dump(recipe: Recipe, header: str) -> str:
    lines = "".join(f"# {line}\n" for line in header.splitlines())
    return lines + str(yaml.safe_dump(recipe.settings(), sort_keys=False, allow_unicode=True))
