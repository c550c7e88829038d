"""Everything an option sets, as one validated value; a recipe file holds the same keys."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_serializer,
    field_validator,
)

from compressor.evaluate.budget import Budget, Removal, parse_budgets, parse_divergence, parse_task_drop
from compressor.heal.settings import HealParams, parse_tokens
from compressor.models.branches import BRANCHES
from compressor.plan.choices import BlockRange, Choices, Signal, check_branch, check_kind, resolve_choices
from compressor.plan.shapes import KINDS
from compressor.runtime.errors import InputError
from compressor.runtime.names import (
    CALIBRATION_TOKENS,
    DTYPES,
    GUARD,
    NAMED_BUILT_IN,
    RECORD,
    SELECTION_TOKENS,
    VERIFICATION_TOKENS,
    split_name,
)
from compressor.runtime.outputs import refuse_output
from compressor.runtime.safe_files import parse_yaml, read_named

Count = Annotated[int, Field(strict=True, ge=1)]
Switch = Annotated[bool, Field(strict=True)]


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


def as_choices(value: Any) -> Any:
    """The parts between commas, of a word, a number or a list of them; empty parts too, which no option takes."""
    words = [str(word) if is_number(word) else word for word in as_list(value)]
    if not all(isinstance(word, str) for word in words):
        return value
    return [part.strip() for word in words for part in word.split(",")]


def check_each(words: list[str] | None, parse: Callable[[str], object]) -> list[str] | None:
    """The words as they are, when the value of each can be read."""
    try:
        for word in words or []:
            parse(split_name(word)[1])
    except InputError as error:
        raise ValueError(str(error)) from error
    return words


def as_divergence(value: Any) -> Any:
    """A number of nats, from the command line as a word; what is none is refused with what to write instead."""
    try:
        return parse_divergence(value)
    except InputError as error:
        raise ValueError(str(error)) from error


def as_token_count(value: Any) -> Any:
    """A number of tokens, from the command line as a word such as 200k; what is none is refused with what to write."""
    try:
        return None if value is None else parse_tokens(value)
    except InputError as error:
        raise ValueError(str(error)) from error


def as_share(value: Any) -> Any:
    """A share in per cent, with or without the sign: 0.5, or 0.5%."""
    word = str(value).strip().removesuffix("%")
    try:
        share = float(word)
    except ValueError:
        raise ValueError(f"--min-saving must be a percentage, got {value!r}; try --min-saving 0.5%") from None
    if not 0 <= share < 100:
        raise ValueError(f"--min-saving must be at least 0 and below 100 %, got {value}; try --min-saving 0.5%")
    return share


UNRECORDED = ("out", "overwrite", "device", "batch_size")  # keys that do not determine the result
Share = Annotated[float, BeforeValidator(as_share)]
Words = Annotated[list[str], BeforeValidator(as_words), Field(min_length=1)]
ChoiceWords = Annotated[list[str], BeforeValidator(as_choices), Field(min_length=1)]
Amounts = Annotated[list[str], BeforeValidator(as_amounts), Field(min_length=1)]


class Recipe(BaseModel):
    """What to do and on what: the keys of a recipe file, and the options of the command line, which are made from these
    fields. Descriptions are the help texts; the default of a field that may be None is said there, in brackets.

    `trust_remote_code` is not a key: whoever runs a model's code must say so each time.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str | None = Field(default=None, description=f"hub id, local directory, or {NAMED_BUILT_IN}")
    out: str | None = Field(default=None, description="directory to write; it appears whole or not at all")
    overwrite: Switch = Field(default=False, description="replace an earlier result in --out")
    max_dppl: Amounts | None = Field(
        default=None,
        description="largest rise in perplexity: 1.0, or 2% of the baseline; NAME=1.0 for one text of several",
    )
    max_kl: Annotated[float, BeforeValidator(as_divergence)] | None = Field(
        default=None,
        description="largest KL divergence from the source, in nats per token, on every text: 0.02; beside --max-dppl "
        "or alone",
    )
    remove: Amounts | None = Field(
        default=None,
        description="least that must go, at the smallest rise in perplexity: 10% of all parameters, or a number of "
        "them; with --max-dppl both must hold",
    )
    confidence: Annotated[float, Field(strict=True, ge=0, lt=1)] = Field(
        default=0.95, description="of the interval's upper end; 0 = point estimate"
    )
    min_saving: Share = Field(
        default=0.5,
        description="least share of the parameters that is worth having, in %; a budget that buys less fails",
    )
    objective: Literal["speed", "size"] = Field(
        default="speed",
        description="speed: nothing that runs slower than what it replaces; size: the fewest parameters",
    )
    kinds: ChoiceWords | None = Field(
        default=None, description=f"what a block may become, by commas: {','.join(KINDS)}  [all]"
    )
    branches: ChoiceWords | None = Field(
        default=None, description="which branches of a layer may be replaced: ffn, attention, or all  [ffn]"
    )
    blocks: ChoiceWords | None = Field(
        default=None, description="blocks that may be replaced: 0-3 (FFNs), 7.attention  [all]"
    )
    skip: ChoiceWords | None = Field(
        default=None, description="blocks that may not: 11, or 0,28-29, or 0-5.attention  [none]"
    )
    rank_by: Signal = Field(
        default="damage",
        description="which blocks go first, per parameter: damage (predicted), r2 (by R²_lin), stream (by "
        "stream-weighted R²)",
    )
    heal: Annotated[int, BeforeValidator(as_token_count)] | None = Field(
        default=None,
        description="tokens to distil the compressed model on, towards its source: 200k; the plan then aims past the "
        "budget by what that wins  [nothing is trained]",
    )
    heal_minutes: Annotated[float, Field(gt=0, le=100_000)] | None = Field(
        default=None, description="the same, as the minutes that it may take on this machine"
    )
    heal_params: HealParams = Field(
        default="norms",
        description="what healing trains: replaced (the replacements), norms (and the norms beside them), all (and "
        "every other weight of their layers)",
    )
    text: Words | None = Field(
        default=None,
        description="UTF-8 file (repeat for several; NAME=FILE for a text with a budget of its own), wikitext2, "
        "hub:OWNER/NAME, mix (built in), self (the model writes it), or demo  [wikitext2; without the Hub self]",
    )
    document_separator: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description=r"what stands between the documents of --text, such as '<|endoftext|>' or '\n\n\n'  [headings of "
        "WikiText; else every file is one document]",
    )
    seq_len: Annotated[int, Field(strict=True, ge=2)] | None = Field(
        default=None, description="tokens per window  [512, or the model's context]"
    )
    calib_tokens: Count | None = Field(
        default=None,
        description="tokens to measure and fit on  [by the width: 4 fitted for every input and neuron of a block, at "
        f"least {CALIBRATION_TOKENS}]",
    )
    guard: Annotated[float, Field(ge=0, le=4)] = Field(
        default=GUARD,
        description="tokens of other kinds (the built-in mix, random words) to fit on too, for each of the text, so "
        "that what it never shows is kept; 0 = none",
    )
    select_tokens: Count = Field(default=SELECTION_TOKENS, description="tokens to search on")
    verify_tokens: Count = Field(default=VERIFICATION_TOKENS, description="tokens to report on")
    tasks: Annotated[list[str], BeforeValidator(split_commas)] | None = Field(
        default=None, description="lm-eval tasks, by commas: lambada_openai,piqa or piqa:acc_norm"
    )
    task_path: Words | None = Field(default=None, description="directory of lm-eval YAML files on local data")
    task_limit: Count | None = Field(default=None, description="documents per task  [all]")
    max_task_drop: Amounts | None = Field(
        default=None, description="largest fall of a task's score: 0.01, or NAME=0.02 for one task"
    )
    generate: Annotated[int, Field(strict=True, ge=0, le=1024)] = Field(
        default=48, description="tokens per continuation, to see whether it still talks; 0 = off"
    )
    prompts: str | None = Field(default=None, description="file with one prompt per line  [beginnings of the text]")
    swap: Switch | None = Field(
        default=None,
        description="replace every block alone by its linear map and measure ΔPPL  [small models: in profile]",
    )
    swap_tokens: Count = Field(default=4096, description="tokens of every selection text for --swap")
    probe: Annotated[list[Literal["bilinear", "trained"]], BeforeValidator(split_commas)] | None = Field(
        default=None,
        description="bilinear: is the residual quadratic; trained: how far Adam stays below the closed form",
    )
    probe_steps: Annotated[int, Field(strict=True, ge=1, le=1_000_000)] = Field(
        default=1000, description="steps of --probe trained"
    )
    cross: str | None = Field(
        default=None,
        description="a model of the same width: its blocks on this model's inputs, and the reverse",
    )
    batch_size: Count = Field(default=8, description="windows per forward pass")
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**63)] = Field(default=0, description="which windows are drawn")
    device: str = Field(default="auto", description="auto, cpu, cuda, cuda:N, mps")
    dtype: str = Field(default="auto", description="to compute in: auto, float32, bfloat16, float16")
    low_memory: Switch = Field(
        default=False, description="leave weights on disk, read each layer when it runs: same result, slower"
    )
    revision: str | None = Field(default=None, description="commit, branch or tag of a hub id")

    @field_validator("max_dppl")
    @classmethod
    def budgets_are_sound(cls, words: list[str] | None) -> list[str] | None:
        return check_each(words, Budget.parse)

    @field_validator("dtype")
    @classmethod
    def dtype_is_known(cls, word: str) -> str:
        if word not in DTYPES:
            raise ValueError(f"--dtype {word} is not known; use {', '.join(DTYPES)}")
        return word

    @field_validator("device")
    @classmethod
    def device_is_known(cls, word: str) -> str:
        if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", word):
            raise ValueError(f"--device {word} is not known; use auto, cpu, cuda, cuda:N or mps")
        return word

    @field_validator("kinds")
    @classmethod
    def kinds_are_known(cls, words: list[str] | None) -> list[str] | None:
        return check_each(words, check_kind)

    @field_validator("branches")
    @classmethod
    def branches_are_known(cls, words: list[str] | None) -> list[str] | None:
        return check_each(words, check_branch)

    @field_validator("blocks", "skip")
    @classmethod
    def blocks_are_sound(cls, words: list[str] | None, info: ValidationInfo) -> list[str] | None:
        return check_each(words, partial(BlockRange.parse, f"--{info.field_name}"))

    @field_validator("remove")
    @classmethod
    def sizes_are_sound(cls, words: list[str] | None) -> list[str] | None:
        try:
            for word in words or []:
                Removal.parse(word)
        except InputError as error:
            raise ValueError(str(error)) from error
        return words

    @field_validator("max_task_drop")
    @classmethod
    def drops_are_sound(cls, words: list[str] | None) -> list[str] | None:
        return check_each(words, parse_task_drop)

    @field_serializer("max_dppl", "max_task_drop")
    def one_word_stands_alone(self, words: list[str] | None) -> Any:
        if words is None or len(words) > 1:
            return words
        try:
            return float(words[0])
        except ValueError:
            return words[0]

    @field_serializer("remove")
    def one_size_stands_alone(self, words: list[str] | None) -> Any:
        if words is None or len(words) > 1:
            return words
        return words[0] if words[0].strip().endswith("%") else int(float(words[0]))

    def searches(self) -> list[Recipe]:
        """One recipe for each of several budgets for all texts together, or for each of several sizes; else this."""
        budgets, sizes = self.max_dppl or [], self.remove or []
        several_budgets = len(budgets) > 1 and not any("=" in word for word in budgets)
        if several_budgets and len(sizes) > 1:
            raise InputError("--max-dppl and --remove both have several values; give several of one of them")
        if several_budgets:
            return [self.model_copy(update={"max_dppl": [word]}) for word in budgets]
        return [self.model_copy(update={"remove": [word]}) for word in sizes] if len(sizes) > 1 else [self]

    def budgets(self, texts: Iterable[str]) -> dict[str, Budget]:
        """The budget of every text that is measured; without limits where perplexity has none."""
        return parse_budgets(self.max_dppl, texts, self.confidence)

    def removal(self) -> Removal | None:
        """How much must go, if that was asked for."""
        if self.remove is not None and len(self.remove) > 1:
            raise InputError("--remove is given twice; give it once, or several sizes to `compress plan`")
        return Removal.parse(self.remove[0]) if self.remove else None

    @property
    def heals(self) -> bool:
        """Whether anything is to be trained."""
        return self.heal is not None or self.heal_minutes is not None

    def refuse_healing_conflicts(self) -> None:
        """Refuse what healing cannot be combined with."""
        if self.heal is not None and self.heal_minutes is not None:
            raise InputError("--heal and --heal-minutes are both given; give one of them")
        if self.heals and self.low_memory:
            raise InputError(
                "--heal trains weights in memory, and --low-memory leaves them on disk; leave one of them out"
            )

    def require_model(self) -> str:
        """The model, which must be named."""
        if self.model is None:
            raise InputError(f"no model: give a directory, a hub id such as gpt2, or {NAMED_BUILT_IN}")
        return self.model

    def refuse_output(self) -> Path:
        """The absolute path of the output, which must be named and may not be taken."""
        if self.out is None:
            raise InputError("--out is missing: name the directory to write, such as --out ./smaller")
        return refuse_output(self.out, self.overwrite, self.model, RECORD)

    def require_budget(self) -> None:
        """Refuse a recipe that asks for nothing: neither how good the result must be nor how small."""
        if self.max_dppl is None and self.max_kl is None and self.remove is None:
            raise InputError(
                "--max-dppl is missing: say how much perplexity may rise, such as --max-dppl 1.0 or 2%; how far it may "
                "move from its source, such as --max-kl 0.02; or how much must go, such as --remove 10%"
            )

    def branches_or(self, usual: str) -> tuple[str, ...]:
        """The kinds of branches that are asked for, or the usual ones."""
        words = self.branches or [usual]
        return tuple(branch for branch in BRANCHES if branch in words or "all" in words)

    def choices(self, blocks: int) -> Choices:
        """What may change in a model with this many layers: FFNs, where neither --branches nor --blocks says more."""
        usual = "all" if any(word.strip().endswith(".attention") for word in self.blocks or []) else "ffn"
        named = {"kinds": self.kinds, "only": self.blocks, "skip": self.skip}
        return resolve_choices(blocks, **named, rank_by=self.rank_by, branches=self.branches_or(usual))

    def settings(self) -> dict[str, Any]:
        """The keys that determine the result, without where it goes."""
        return self.model_dump(exclude=set(UNRECORDED), exclude_none=True)


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
    values = read_named("recipe", file, parse_yaml, f"recipe {file} does not exist")
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise InputError(f"recipe {file} must be a mapping of option names to values, such as `seq_len: 256`")
    return {key.replace("-", "_"): value for key, value in values.items()}


def dump(recipe: Recipe, header: str) -> str:
    lines = "".join(f"# {line}\n" for line in header.splitlines())
    return lines + str(yaml.safe_dump(recipe.settings(), sort_keys=False, allow_unicode=True))
