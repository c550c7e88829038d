"""The options of the command, each once: its type, its name and what `--help` says about it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[str | None, typer.Argument(help="hub id, local directory, or `demo`", show_default=False)]
Models = Annotated[
    list[str] | None,
    typer.Argument(metavar="MODEL", help="hub ids, local directories, or `demo`", show_default=False),
]
Directory = Annotated[Path, typer.Argument(help="a directory that compress wrote", show_default=False)]
MaxDppl = Annotated[
    list[str] | None,
    typer.Option(help="largest rise in perplexity: 1.0, or 2% of the baseline; NAME=1.0 for one text of several"),
]
Confidence = Annotated[float | None, typer.Option(help="of the interval's upper end; 0 = point estimate  [0.95]")]
Objective = Annotated[
    str | None,
    typer.Option(help="speed: nothing that runs slower than what it replaces; size: the fewest parameters  [speed]"),
]
Out = Annotated[str | None, typer.Option(help="directory to write; it appears whole or not at all")]
Overwrite = Annotated[bool | None, typer.Option("--overwrite", help="replace an earlier result in --out")]
RecipeFile = Annotated[Path | None, typer.Option("--recipe", help="YAML file with any of these options")]
TextNames = Annotated[
    list[str] | None,
    typer.Option(
        "--text",
        help="UTF-8 file (repeat for several; NAME=FILE for a text with a budget of its own), wikitext2, "
        "hub:OWNER/NAME, or demo  [wikitext2]",
    ),
]
Tasks = Annotated[list[str] | None, typer.Option(help="lm-eval tasks, by commas: lambada_openai,piqa or piqa:acc_norm")]
TaskPath = Annotated[list[str] | None, typer.Option(help="directory of lm-eval YAML files on local data")]
TaskLimit = Annotated[int | None, typer.Option(help="documents per task  [all]")]
MaxTaskDrop = Annotated[
    list[str] | None, typer.Option(help="largest fall of a task's score: 0.01, or NAME=0.02 for one task")
]
Generate = Annotated[
    int | None, typer.Option(help="tokens per continuation, to see whether it still talks; 0 = off  [48]")
]
Prompts = Annotated[str | None, typer.Option(help="file with one prompt per line  [beginnings of the text]")]
CacheDirectory = Annotated[
    Path | None, typer.Option("--cache", help="where measurements are kept  [~/.cache/compressor]")
]
NoCache = Annotated[bool, typer.Option("--no-cache", help="measure everything again")]
SeqLen = Annotated[int | None, typer.Option(help="tokens per window  [512, or the model's context]")]
CalibTokens = Annotated[int | None, typer.Option(help="tokens to measure and fit on  [24576]")]
SelectTokens = Annotated[int | None, typer.Option(help="tokens to search on  [8192]")]
VerifyTokens = Annotated[int | None, typer.Option(help="tokens to report on  [16384]")]
BatchSize = Annotated[int | None, typer.Option(help="windows per forward pass  [8]")]
Seed = Annotated[int | None, typer.Option(help="which windows are drawn  [0]")]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:N, mps  [auto]")]
Dtype = Annotated[str | None, typer.Option(help="to compute in: auto, float32, bfloat16, float16  [auto]")]
LowMemory = Annotated[
    bool | None,
    typer.Option("--low-memory", help="leave weights on disk, read each layer when it runs: same result, slower"),
]
Revision = Annotated[str | None, typer.Option(help="commit, branch or tag of a hub id")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="run code that comes with the model")]
Json = Annotated[bool, typer.Option("--json", help="print the report alone, as JSON")]
Debug = Annotated[bool, typer.Option("--debug", help="show the traceback of an error")]

# of the linearity report
ReportOut = Annotated[str | None, typer.Option("--out", help="directory of the report  [MODEL-profile]")]
Corpora = Annotated[
    list[str] | None,
    typer.Option("--text", help="UTF-8 file, wikitext2, hub:OWNER/NAME, or demo; repeat to compare corpora"),
]
Swap = Annotated[
    bool | None,
    typer.Option(
        "--swap/--no-swap",
        help="replace every block alone by its linear map and measure ΔPPL  [on below 500 M parameters]",
        show_default=False,
    ),
]
SwapTokens = Annotated[int | None, typer.Option(help="tokens of the selection text for --swap  [4096]")]
Probe = Annotated[
    list[str] | None,
    typer.Option(help="bilinear: is the residual quadratic; trained: how far Adam stays below the closed form"),
]
ProbeSteps = Annotated[int | None, typer.Option(help="steps of --probe trained  [1000]")]
Cross = Annotated[
    str | None, typer.Option(help="a model of the same width: its blocks on this model's inputs, and the reverse")
]

# of `check` alone
SourceModel = Annotated[str | None, typer.Option("--source", help="the source model  [as recorded]")]
Baseline = Annotated[Path | None, typer.Option(help="file of an earlier check to compare with")]
UpdateBaseline = Annotated[bool, typer.Option("--update-baseline", help="write it from this check")]
Tolerance = Annotated[float, typer.Option(help="how far a figure may fall behind the baseline")]
Junit = Annotated[Path | None, typer.Option(help="write a JUnit XML file")]
Page = Annotated[Path | None, typer.Option("--report", help="write report.html")]


def spread(args: list[str]) -> list[str]:
    """`--max-dppl 0.5 1 2` is `--max-dppl 0.5 --max-dppl 1 --max-dppl 2`."""
    found: list[str] = []
    amounts = False
    for arg in args:
        amounts = amounts and arg.removesuffix("%").replace(".", "", 1).isdigit()
        found += ["--max-dppl", arg] if amounts and found[-1] != "--max-dppl" else [arg]
        amounts = amounts or arg == "--max-dppl"
    return found
