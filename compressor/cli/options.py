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
from compressor.plan.shapes import KINDS
from compressor.runtime.names import BUILT_IN_MODELS, BUILT_IN_TEXTS, DTYPES, HUB_TEXTS

Values = dict[str, Any]  # what was given on the command line, by key of the recipe; None: it was not given
Json = Annotated[bool, typer.Option("--json", help="print the report alone, as JSON")]
Debug = Annotated[bool, typer.Option("--debug", help="show the traceback of an error")]


Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="print the result alone, no progress")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="print every block, and what the search tries")]


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
    quiet: Quiet = False
    verbose: Verbose = False
    as_json: Json = False
    debug: Debug = False  # read by cli.exit, before the options are parsed


TOKENS = ("seq_len", "calib_tokens", "select_tokens", "verify_tokens", "document_separator")
TASKS = ("tasks", "max_task_drop", "task_path", "task_limit")
TALK = ("generate", "prompts")
CHOICES = ("objective", "branches", "kinds", "blocks", "skip", "rank_by")
HEAL = ("heal", "heal_minutes", "heal_params")
PROBES = ("swap", "swap_tokens", "probe", "probe_steps", "cross")
MACHINE = ("device", "dtype", "low_memory", "batch_size")
FILES = ("recipe_file", "overwrite", "revision", "cache", "no_cache", "trust_remote_code")
OUTPUT = ("quiet", "verbose", "as_json", "debug")
# The headings of `--help` and what stands under each; what is under none of them stands first.
GROUPS: dict[str, tuple[str, ...]] = {
    "How good it must be": ("max_kl", "confidence", "min_saving", *TASKS, *TALK),
    "What may change": CHOICES,
    "Training (nothing is trained without these)": HEAL,
    "The text": (*TOKENS, "guard", "seed"),
    "Studies of the blocks": PROBES,
    "The gate's files": ("baseline", "update_baseline", "tolerance", "junit", "page"),
    "The machine": MACHINE,
    "Files": FILES,
    "What is printed": OUTPUT,
}
RUN = ("cache", "no_cache", "trust_remote_code", *OUTPUT)

# Command → its parameters, those that matter most first: fields of Recipe and RunOptions, and those of its function.
COMMANDS: dict[str, tuple[str, ...]] = {
    "run": (
        *("model", "max_dppl", "out", "text", "remove", "dry_run", "max_kl", "confidence", "min_saving", *TASKS, *TALK),
        *(*CHOICES, *HEAL, *TOKENS, "guard", "seed", *PROBES, *MACHINE, *FILES, *OUTPUT),
    ),
    "profile": (*("models", "out", "text", "branches", *TOKENS, "seed", *PROBES, *MACHINE, *FILES, *OUTPUT),),
    "plan": (
        *("model", "max_dppl", "plan_out", "text", "remove", "max_kl", "confidence", "min_saving"),
        *(*CHOICES, *HEAL, *TOKENS, "guard", "seed", *MACHINE, "recipe_file", "revision", *RUN),
    ),
    "apply": (
        *("model", "plan_file", "out", "max_dppl", "max_kl", "confidence", *TASKS, *TALK),
        *(*HEAL, *MACHINE, "overwrite", "revision", *RUN),
    ),
    "heal": (
        *("directory", "out", "text", "max_dppl", "source", *HEAL, "max_kl", "confidence", *TASKS, *TALK),
        *(*TOKENS, "seed", *MACHINE, "overwrite", *RUN),
    ),
    "check": (
        *("directory", "max_dppl", "text", "source", "checkpoint", "max_kl", "confidence", *TASKS, *TALK),
        *("seq_len", "verify_tokens", "document_separator", "seed"),
        *("baseline", "update_baseline", "tolerance", "junit", "page", *MACHINE, *RUN),
    ),
    "compare": (
        *("first", "second", "measure", "text", "confidence", "seq_len", "verify_tokens", "document_separator"),
        *("seed", *MACHINE, *RUN),
    ),
    "frontier": (
        *("directories", "out", "text", "source", "dtypes", "tokens", "seq_len", "document_separator", "seed"),
        *("overwrite", *RUN),
    ),
}
# The commands that go by what a file recorded: where an option comes from that is not given.
RECORDED = {"apply": "as in PLAN", **dict.fromkeys(("check", "heal", "compare", "frontier"), "as recorded")}
SEVERAL_AMOUNTS = ("--max-dppl", "--remove")  # options that several numbers may follow
ARGUMENTS = ("model",)  # fields of the recipe that are given without the name of an option
SHORT = {"out": "-o"}
# What stands for the value of an option in the help, where its type does not say it: N, TEXT or FILE.
METAVARS = {"out": "DIR", "text": "FILE", "task_path": "DIR", "prompts": "FILE", "max_dppl": "N", "remove": "N%"}
METAVARS |= {"heal": "N", "max_task_drop": "N", "model": "MODEL", "cross": "MODEL", "cache": "DIR", "models": "MODEL"}
METAVARS |= {"dtypes": "LIST", "directories": "DIR"}
METAVARS |= {"checkpoint": "DIR", "first": "DIR", "second": "DIR"}
METAVARS |= {"max_kl": "N", "directory": "DIR", "plan_file": "PLAN", "source": "MODEL", "min_saving": "N%"}
# Help texts that differ from the description of the field.
ONE_BUDGET = "  [this, --remove or --max-kl is required]"
HELP = {
    ("run", "max_dppl"): f"{Recipe.model_fields['max_dppl'].description}{ONE_BUDGET}",
    ("run", "out"): f"{Recipe.model_fields['out'].description}  [required]",
    ("plan", "max_dppl"): f"{Recipe.model_fields['max_dppl'].description}; several: a plan for each{ONE_BUDGET}",
    ("apply", "out"): f"{Recipe.model_fields['out'].description}  [required]",
    ("heal", "out"): f"{Recipe.model_fields['out'].description}  [required]",
    ("heal", "heal"): "tokens to train on: 200k  [this or --heal-minutes is required]",
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
    for parameter in parameters.values():
        describe_parameter(parameter)

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
    read = any(isinstance(part, BeforeValidator) for part in field.metadata)  # by the field itself, such as 0.5%
    kind = str if read and field.annotation is float else option_type(field.annotation)
    text = HELP.get((command, name), field.description)
    info: Any
    flag = f"--{name.replace('_', '-')}"
    names = (flag, SHORT[name]) if name in SHORT else (flag,)
    if name in ARGUMENTS:
        info = typer.Argument(help=text, show_default=False)
    elif kind is bool:
        both = f"{flag}/--no-{flag[2:]}"
        info = typer.Option(both if field.default is None else flag, help=text, show_default=False)
    elif (command, name) in HELP or name in UNRECORDED or command not in RECORDED:
        info = typer.Option(*names, help=text if field.default is None else f"{text}  [{field.default}]")
    else:
        info = typer.Option(*names, help=f"{str(text).partition('  [')[0]}  [{RECORDED[command]}]")
    words = list_words(name)
    if words:
        info.autocompletion = lambda incomplete="": [word for word in words if word.startswith(incomplete)]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, info])


def describe_parameter(parameter: Parameter) -> None:
    """Say in the help under which heading a parameter stands, and what its value is: N, TEXT, FILE or DIR."""
    kind, info = get_args(parameter.annotation)[:2]
    info.rich_help_panel = next((title for title, names in GROUPS.items() if parameter.name in names), None)
    of = next((part for part in get_args(kind) if part is not type(None)), kind)
    if info.metavar is None and of is not bool:
        usual = {int: "N", float: "N", Path: "FILE"}.get(of, "TEXT")
        info.metavar = METAVARS.get(parameter.name, usual)


def list_words(name: str) -> list[str]:
    """The words that the shell may complete for an option of the recipe; empty where any value may stand."""
    known = {
        "kinds": KINDS,
        "branches": ("ffn", "attention", "all"),
        "dtype": DTYPES,
        "device": ("auto", "cpu", "cuda", "mps"),
        "model": BUILT_IN_MODELS,
        "text": (*HUB_TEXTS, *BUILT_IN_TEXTS),
    }
    choices = (part for part in get_args(Recipe.model_fields[name].annotation) if isinstance(part, str))
    return list(known.get(name, choices))


def option_type(annotation: Any) -> Any:
    """What the command line makes of a value before the recipe validates it: a list of words, a number, a word."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return option_type(next(part for part in parts if part is not type(None)))
    if origin is Annotated:
        word = parts[0] in (int, float) and any(
            isinstance(part, BeforeValidator) for part in parts
        )  # such as 200k or 0.5%
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
