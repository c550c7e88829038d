"""`compress` alone on a terminal asks for what it needs, shows the command that it stands for, and runs that."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable

import typer

from compressor.evaluate.budget import Budget
from compressor.models import hub
from compressor.runtime.errors import InputError
from compressor.runtime.names import BUILT_IN_MODELS, BUILT_IN_TEXTS, HUB_TEXTS, RECORD
from compressor.runtime.outputs import refuse_output
from compressor.text.sources import refuse_missing

USUAL = "the usual one"


def ask_job() -> list[str]:
    """The words of the command that the answers stand for."""
    typer.echo("Make a language model smaller, and no worse than you allow.")
    typer.echo("Enter takes what stands in brackets, Ctrl-C stops.\n")
    typer.echo(f"Which model? A directory, a hub id such as gpt2, or built in: {' or '.join(BUILT_IN_MODELS)}.")
    model = ask("model", "demo", check_model)
    typer.echo(
        f"\nWhich text shows what it must go on doing? A UTF-8 file, {', '.join([*HUB_TEXTS, *BUILT_IN_TEXTS])}."
    )
    text = ask("text", USUAL, check_text)
    typer.echo("\nHow much may its perplexity rise? A number, or a percentage of what it is now.")
    budget = ask("budget", "2%", check_budget)
    typer.echo("\nWhere shall the result go? A new directory.")
    out = ask("result", propose_output(model), lambda word: check_output(word, model))
    words = [model, "--max-dppl", budget, "--out", out]
    return words if text == USUAL else [*words, "--text", text]


def ask(question: str, usual: str, check: Callable[[str], None]) -> str:
    """The answer to a question; one that cannot be used is asked for again, with the reason."""
    while True:
        answer = str(typer.prompt(question, default=usual)).strip()
        try:
            check(answer)
        except InputError as error:
            typer.echo(f"  {error}", err=True)
        else:
            return answer


def confirm(words: list[str]) -> bool:
    """Show the command, and ask whether it shall be run."""
    typer.echo(f"\nThe command for this is:\n\n  compress {shlex.join(words)}\n")
    return typer.confirm("Run it?", default=True)


def check_model(word: str) -> None:
    if word not in BUILT_IN_MODELS:
        hub.refuse_unreachable(word)
        if word.startswith((".", "~", os.sep)) and not os.path.isdir(os.path.expanduser(word)):
            raise InputError(f"directory {word} does not exist; give a directory with config.json, or a hub id")


def check_text(word: str) -> None:
    if word != USUAL:
        refuse_missing(word)


def check_budget(word: str) -> None:
    Budget.parse(word)


def check_output(word: str, model: str) -> None:
    refuse_output(word, False, model, RECORD)


def propose_output(model: str) -> str:
    """A directory that does not exist yet, named after the model."""
    name = os.path.basename(model.rstrip("/")) or "model"
    names = (f"./{name}-lin{f'-{number}' if number > 1 else ''}" for number in range(1, 1000))
    return next(name for name in names if not os.path.exists(name))
