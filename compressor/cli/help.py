"""What `--help` looks like: options under headings, as wide as the terminal; and words for a mistyped command."""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from typing import Any

from typer.core import TyperCommand, TyperGroup

from compressor.cli.options import spread_budgets
from compressor.runtime.errors import InputError

SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 1000}
COMPLETION = ("--install-completion", "--show-completion")
TYPES = re.compile(r"^(.*) <(\w+)>$")
JOB = "run"  # the command that `compress MODEL …` stands for


def name_type(match: re.Match[str]) -> str:
    """What stands for a value in the help: N, FILE or TEXT; nothing where a name of its own stands before it."""
    name = {"int": " N", "integer": " N", "float": " N", "path": " FILE"}.get(match[2], " TEXT")
    return match[1] + (name if match[1].startswith("-") else "")


class Command(TyperCommand):
    """A command whose help has its options under headings, those that matter most first."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Arguments before options, as people type them."""
        pieces: list[str] = super().collect_usage_pieces(ctx)
        return [*(piece.strip("{}") for piece in pieces[1:]), *pieces[:1]]

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        if self.name == JOB:
            formatter.write_usage("compress", "MODEL --max-dppl N --out DIR [OPTIONS]")
        else:
            super().format_usage(ctx, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            row = parameter.get_help_record(ctx)
            if row is None:
                continue
            row = (TYPES.sub(name_type, row[0]), row[1])
            usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
            group = "What is printed" if row[0].endswith("--help") else getattr(parameter, "rich_help_panel", None)
            sections.setdefault(group or usual, []).append(row)
        if list(sections) == ["Arguments", "Options", "What is printed"]:  # few: they need no headings
            sections["Options"] += sections.pop("What is printed")
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows, col_max=28)


class Commands(TyperGroup):
    """`compress MODEL …` is `compress run MODEL …`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        args = spread_budgets(args) or ["--help"]
        first = args[0]
        if first not in self.commands and first not in ("-h", "--help", "--version", *COMPLETION):
            self.refuse_mistyped(first)
            args = [JOB, *args]
        return super().parse_args(ctx, args)

    def refuse_mistyped(self, word: str) -> None:
        """Refuse a word that is nearly a command, where nothing of that name is there to be compressed."""
        near = get_close_matches(word, self.commands, n=1, cutoff=0.75)
        if near and not word.startswith("-") and not os.path.exists(os.path.expanduser(word)):
            raise InputError(
                f"there is no command {word!r}; did you mean compress {near[0]}? (a model of that name is compressed "
                f"with compress {JOB} {word} …)"
            )
