"""The options of every command. Those that set a key of the recipe are made from the fields of `Recipe`, where their
types, defaults and help texts stand once."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from inspect import Parameter
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer
from pydantic import BeforeValidator

from compressor.pipelines.recipe import UNRECORDED, Recipe

Values = dict[str, Any]  # what was given on the command line, by key of the recipe; None: it was not given
Json = Annotated[bool, typer.Option("--json", help="print the report alone, as JSON")]
Debug = Annotated[bool, typer.Option("--debug", help="show the traceback of an error")]


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """How to run a command: the options that several commands share and no recipe holds."""

    recipe_file: Annotated[Path | None, typer.Option("--recipe", help="YAML file with any of these options")] = None
    cache: Annotated[
        Path | None, typer.Option("--cache", help="where measurements are kept  [~/.cache/compressor]")
    ] = None
    no_cache: Annotated[bool, typer.Option("--no-cache", help="measure everything again")] = False
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="run code that comes with the model")
    ] = False
    as_json: Json = False
    debug: Debug = False  # read by cli.exit, before the options are parsed


TOKENS = ("seq_len", "calib_tokens", "select_tokens", "verify_tokens", "document_separator")
TASKS = ("tasks", "max_task_drop", "task_path", "task_limit", "generate", "prompts")
CHOICES = ("branches", "kinds", "blocks", "skip", "rank_by")
HEAL = ("heal", "heal_minutes", "heal_params")
PROBES = ("swap", "swap_tokens", "probe", "probe_steps", "cross")
MACHINE = ("device", "dtype", "low_memory")
RUN = ("cache", "no_cache", "trust_remote_code", "as_json", "debug")

# Command → its parameters in the order of `--help`: fields of Recipe and RunOptions, and parameters of its function.
COMMANDS: dict[str, tuple[str, ...]] = {
    "run": (
        *("model", "max_dppl", "max_kl", "remove", "out", "dry_run", "text", "recipe_file", "overwrite", "confidence"),
        *("objective", *CHOICES, *HEAL, *TOKENS, *TASKS, *PROBES, "batch_size", "seed", *MACHINE, "revision", *RUN),
    ),
    "profile": (
        *("models", "out", "overwrite", "text", "branches", "recipe_file"),
        *(*PROBES, *TOKENS, "batch_size", "seed", *MACHINE, "revision", *RUN),
    ),
    "plan": (
        *("model", "max_dppl", "max_kl", "remove", "plan_out", "text", "recipe_file", "confidence", "objective"),
        *(*CHOICES, *HEAL, *TOKENS, "batch_size", "seed", *MACHINE, "revision", *RUN),
    ),
    "apply": (
        *("model", "plan_file", "out", "overwrite", "max_dppl", "max_kl", "confidence"),
        *(*HEAL, *TASKS, "batch_size", *MACHINE, "revision", *RUN),
    ),
    "heal": (
        *("directory", *HEAL, "out", "overwrite", "text", "max_dppl", "max_kl", "source"),
        *("confidence", *TOKENS, *TASKS, "batch_size", "seed", *MACHINE, *RUN),
    ),
    "check": (
        *("directory", "max_dppl", "max_kl", "source", "checkpoint", "baseline", "update_baseline", "tolerance"),
        *("junit", "page"),
        *(
            "text",
            "confidence",
            "seq_len",
            "verify_tokens",
            "document_separator",
            *TASKS,
            "batch_size",
            "seed",
            *MACHINE,
            *RUN,
        ),
    ),
    "compare": (
        *("first", "second", "measure", "text", "seq_len", "verify_tokens", "document_separator"),
        *("confidence", "batch_size", "seed", *MACHINE, *RUN),
    ),
}
# The commands that go by what a file recorded: where an option comes from that is not given.
RECORDED = {"apply": "as in PLAN", **dict.fromkeys(("check", "heal", "compare"), "as recorded")}
SEVERAL_AMOUNTS = ("--max-dppl", "--remove")  # options that several numbers may follow
ARGUMENTS = ("model",)  # fields of the recipe that are given without the name of an option
# Help texts that differ from the description of the field.
HELP = {
    ("profile", "out"): "directory of the report  [MODEL-profile]",
    ("profile", "branches"): "what to measure: ffn, attention, or both by a comma  [ffn]",
    ("profile", "text"): "UTF-8 file, wikitext2, hub:OWNER/NAME, mix, self, or demo; repeat to compare corpora",
}


def with_options(function: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of its row in COMMANDS.

    The function is called with `values` (the keys of the recipe), with `options` (RunOptions), and with the parameters
    that it declares itself.
    """
    command = function.__name__
    own = {parameter.name: parameter for parameter in declared_parameters(function)}
    shared = {parameter.name: parameter for parameter in shared_parameters()}
    parameters = {
        name: own.get(name) or shared.get(name) or recipe_parameter(command, name) for name in COMMANDS[command]
    }

    def run(**given: Any) -> None:
        options = RunOptions(**{name: given.pop(name) for name in shared if name in given})
        arguments = {name: given.pop(name) for name in own if name in given}
        function(given, options, **arguments)

    run.__name__, run.__doc__ = command, function.__doc__
    run.__annotations__ = {}  # typer reads the signature
    run.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    return run


def declared_parameters(function: Callable[..., None]) -> Iterator[Parameter]:
    """The parameters of a function with their types evaluated, as keywords, so that any order is allowed."""
    types = get_type_hints(function, include_extras=True)
    for parameter in inspect.signature(function).parameters.values():
        yield parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=types[parameter.name])


def shared_parameters() -> Iterator[Parameter]:
    types = get_type_hints(RunOptions, include_extras=True)
    for field in dataclasses.fields(RunOptions):
        yield Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=types[field.name])


def recipe_parameter(command: str, name: str) -> Parameter:
    """One field of the recipe as a parameter of a command; None stands for an option that is not given."""
    field = Recipe.model_fields[name]
    kind = option_type(field.annotation)
    text = HELP.get((command, name), field.description)
    info: Any
    if name in ARGUMENTS:
        info = typer.Argument(help=text, show_default=False)
    elif kind is bool:
        flag = f"--{name.replace('_', '-')}"
        both = f"{flag}/--no-{flag[2:]}"
        info = typer.Option(both if field.default is None else flag, help=text, show_default=False)
    elif command in RECORDED and name not in UNRECORDED:
        info = typer.Option(help=f"{str(text).partition('  [')[0]}  [{RECORDED[command]}]")
    else:
        info = typer.Option(help=text if field.default is None else f"{text}  [{field.default}]")
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, info])


def option_type(annotation: Any) -> Any:
    """What the command line makes of a value before the recipe validates it: a list of words, a number, a word."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return option_type(next(part for part in parts if part is not type(None)))
    if origin is Annotated:
        word = parts[0] is int and any(isinstance(part, BeforeValidator) for part in parts)  # such as 200k
        return str if word else option_type(parts[0])
    if origin is list:
        return list[str]
    return str if origin is Literal else annotation


def spread_budgets(args: list[str]) -> list[str]:
    """`--max-dppl 0.5 1 2` is `--max-dppl 0.5 --max-dppl 1 --max-dppl 2`; so with `--remove 2% 5%`."""
    spread: list[str] = []
    option = ""  # whose amounts these are
    for arg in args:
        if arg in SEVERAL_AMOUNTS:
            option = arg
        elif not arg.removesuffix("%").replace(".", "", 1).isdigit():
            option = ""
        elif option and spread[-1] != option:
            spread.append(option)
        spread.append(arg)
    return spread
