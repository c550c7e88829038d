"""The command `compress`: parse, validate, call. torch is imported only when a command runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from compressor import __version__
from compressor.errors import BudgetError, InputError

if TYPE_CHECKING:
    from compressor.progress import Progress

DONE, MISSED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130

EXAMPLES = """
Make a language model smaller with a promise: this much smaller, and no worse than that.

compress MODEL --max-dppl 1.0 --out DIR   the whole job; MODEL is a hub id, a local directory, or `demo`

\b
Examples:
  compress demo --max-dppl 1.0 --out ./demo-lin
  compress gpt2 --max-dppl 2% --out ./gpt2-lin
  compress ./my-model --text corpus.txt --max-dppl 0.5 --out ./smaller
  compress profile ./my-model --text corpus.txt
  compress check ./smaller --max-dppl 0.5

Exit codes: 0 done and inside the budget; 1 the budget is missed or nothing fits it; 2 bad input.
"""


class WholeJob(TyperGroup):
    """`compress MODEL …` is the command `run`, which nobody has to type."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        args = args or ["--help"]
        if args[0] not in self.commands and args[0] not in ("--help", "--version"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=WholeJob,
    help=EXAMPLES,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Model = Annotated[str | None, typer.Argument(help="hub id, local directory, or `demo`", show_default=False)]
Directory = Annotated[Path, typer.Argument(help="a directory that compress wrote", show_default=False)]
MaxDppl = Annotated[str | None, typer.Option(help="largest rise in perplexity: 1.0, or 2% of the baseline")]
Confidence = Annotated[float | None, typer.Option(help="of the interval's upper end; 0 = point estimate  [0.95]")]
Out = Annotated[str | None, typer.Option(help="directory to write; it appears whole or not at all")]
Overwrite = Annotated[bool | None, typer.Option("--overwrite", help="replace an earlier result in --out")]
RecipeFile = Annotated[Path | None, typer.Option("--recipe", help="YAML file with any of these options")]
TextNames = Annotated[
    list[str] | None,
    typer.Option("--text", help="UTF-8 file (repeat for several), wikitext2, hub:OWNER/NAME, or demo  [wikitext2]"),
]
SeqLen = Annotated[int | None, typer.Option(help="tokens per window  [512, or the model's context]")]
CalibTokens = Annotated[int | None, typer.Option(help="tokens to measure and fit on  [24576]")]
SelectTokens = Annotated[int | None, typer.Option(help="tokens to search on  [8192]")]
VerifyTokens = Annotated[int | None, typer.Option(help="tokens to report on  [16384]")]
BatchSize = Annotated[int | None, typer.Option(help="windows per forward pass  [8]")]
Seed = Annotated[int | None, typer.Option(help="which windows are drawn  [0]")]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:N, mps  [auto]")]
Dtype = Annotated[str | None, typer.Option(help="to compute in: auto, float32, bfloat16, float16  [auto]")]
Revision = Annotated[str | None, typer.Option(help="commit, branch or tag of a hub id")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="run code that comes with the model")]
Json = Annotated[bool, typer.Option("--json", help="print the report alone, as JSON")]
Debug = Annotated[bool, typer.Option("--debug", help="show the traceback of an error")]


def options(values: dict[str, Any]) -> dict[str, Any]:
    """A command's parameters that are keys of a recipe."""
    elsewhere = {"recipe_file", "trust_remote_code", "as_json", "debug", "plan_file", "plan_out", "directory", "source"}
    return {key: value for key, value in values.items() if key not in elsewhere}


def refuse_out_of_reach(model: str | None) -> None:
    from compressor import hub

    hub.refuse_out_of_reach(model)


def begin() -> Progress:
    from compressor.progress import Progress

    return Progress(visible=True)


def emit(report: dict[str, Any], as_json: bool, lines: list[str], table: bool) -> None:
    """The result on stdout: JSON alone, or a table and a few lines."""
    from rich.console import Console

    from compressor.reporting import block_table
    from compressor.saving import to_json

    if as_json:
        print(to_json(report))
        return
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    if table:
        console.print(block_table(report))
        console.print()
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


@app.command()
def run(
    model: Model = None,
    max_dppl: MaxDppl = None,
    out: Out = None,
    text: TextNames = None,
    recipe_file: RecipeFile = None,
    overwrite: Overwrite = None,
    confidence: Confidence = None,
    seq_len: SeqLen = None,
    calib_tokens: CalibTokens = None,
    select_tokens: SelectTokens = None,
    verify_tokens: VerifyTokens = None,
    batch_size: BatchSize = None,
    seed: Seed = None,
    device: Device = None,
    dtype: Dtype = None,
    revision: Revision = None,
    trust_remote_code: Trust = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """The whole job; `compress MODEL …` is short for `compress run MODEL …`."""
    values = options(locals())
    refuse_out_of_reach(model)
    from compressor import pipeline, recipe, reporting

    report = pipeline.compress(
        recipe.resolve(recipe_file, values), trust_remote_code=trust_remote_code, progress=begin()
    )
    emit(report, as_json, reporting.result_lines(report), table=True)


@app.command()
def profile(
    model: Model = None,
    text: TextNames = None,
    recipe_file: RecipeFile = None,
    seq_len: SeqLen = None,
    calib_tokens: CalibTokens = None,
    batch_size: BatchSize = None,
    seed: Seed = None,
    device: Device = None,
    dtype: Dtype = None,
    revision: Revision = None,
    trust_remote_code: Trust = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure only: how linear every block is, and which must not be touched."""
    values = options(locals())
    refuse_out_of_reach(model)
    from compressor import pipeline, recipe, reporting

    report = pipeline.profile(
        recipe.resolve(recipe_file, values), trust_remote_code=trust_remote_code, progress=begin()
    )
    emit(report, as_json, reporting.profile_lines(report), table=True)


@app.command()
def plan(
    model: Model = None,
    max_dppl: MaxDppl = None,
    plan_out: Annotated[Path, typer.Option("--out", help="file to write")] = Path("plan.json"),
    text: TextNames = None,
    recipe_file: RecipeFile = None,
    confidence: Confidence = None,
    seq_len: SeqLen = None,
    calib_tokens: CalibTokens = None,
    select_tokens: SelectTokens = None,
    verify_tokens: VerifyTokens = None,
    batch_size: BatchSize = None,
    seed: Seed = None,
    device: Device = None,
    dtype: Dtype = None,
    revision: Revision = None,
    trust_remote_code: Trust = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure and search: write plan.json, touch no weights."""
    values = options(locals())
    refuse_out_of_reach(model)
    from compressor import pipeline, recipe, reporting

    settings = recipe.resolve(recipe_file, values)
    report = pipeline.plan(settings, plan_out, trust_remote_code=trust_remote_code, progress=begin())
    emit(report, as_json, reporting.plan_lines(report, plan_out), table=True)


@app.command()
def apply(
    model: Annotated[str, typer.Argument(help="the model that the plan was made for", show_default=False)],
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="plan.json", show_default=False)],
    out: Out = None,
    overwrite: Overwrite = None,
    max_dppl: MaxDppl = None,
    confidence: Confidence = None,
    batch_size: BatchSize = None,
    device: Device = None,
    dtype: Dtype = None,
    revision: Revision = None,
    trust_remote_code: Trust = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Fit, patch and save a given plan, if it holds its budget."""
    values = options(locals())
    refuse_out_of_reach(model)
    from compressor import pipeline, recipe, reporting

    settings = recipe.resolve(None, values)
    report = pipeline.apply(settings, plan_file, trust_remote_code=trust_remote_code, progress=begin())
    emit(report, as_json, reporting.result_lines(report), table=True)


@app.command()
def check(
    directory: Directory,
    max_dppl: MaxDppl = None,
    source: Annotated[str | None, typer.Option(help="the source model  [as recorded]")] = None,
    text: TextNames = None,
    confidence: Confidence = None,
    seq_len: SeqLen = None,
    verify_tokens: VerifyTokens = None,
    batch_size: BatchSize = None,
    seed: Seed = None,
    device: Device = None,
    dtype: Dtype = None,
    trust_remote_code: Trust = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """The gate for CI: measure a checkpoint against its source again; exit 1 when the budget is missed."""
    values = options(locals())
    from compressor import checking, reporting

    report = checking.check(directory, values, source=source, trust_remote_code=trust_remote_code, progress=begin())
    emit(report, as_json, reporting.check_lines(report), table=False)
    raise typer.Exit(DONE if report["passed"] else MISSED)


@app.command()
def info(directory: Directory, as_json: Json = False, debug: Debug = False) -> None:
    """What a compressed checkpoint contains."""
    from compressor import checking, reporting

    record = checking.read_record(directory)
    measured = "perplexity" in record
    emit(record, as_json, reporting.info_lines(record), table=measured)


@app.callback(invoke_without_command=True)
def version(
    show: Annotated[bool, typer.Option("--version", help="print the version", is_eager=True)] = False,
) -> None:
    if show:
        print(f"compress {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command; every failure is one line on stderr and an exit code."""
    # transformers and tokenizers print advice that is not for the user of this command.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    try:
        code = app(standalone_mode=False)
    except KeyboardInterrupt:
        sys.exit(fail("interrupted; nothing was written", INTERRUPTED))
    except BaseException as error:
        if isinstance(error, SystemExit):
            raise
        if "--debug" in sys.argv[1:]:
            raise
        sys.exit(explain(error))
    if code == INTERRUPTED:  # typer makes an interrupt this code, in silence
        fail("interrupted; nothing was written", INTERRUPTED)
    sys.exit(code or DONE)


def explain(error: BaseException) -> int:
    if isinstance(error, BudgetError):
        return fail(str(error), MISSED)
    if isinstance(error, InputError):
        return fail(str(error), BAD_INPUT)
    if hasattr(error, "format_message"):  # the command line itself was wrong
        return fail(f"{error.format_message().rstrip('.')}; see compress --help", BAD_INPUT)
    if type(error).__name__ == "Abort":
        return fail("interrupted; nothing was written", INTERRUPTED)
    if isinstance(error, MemoryError):
        return fail("out of memory; try a smaller --batch-size, --seq-len or model", BAD_INPUT)
    reason = " ".join(str(error).split())[:300]
    return fail(f"unexpected {type(error).__name__}: {reason}; run again with --debug and report it", BAD_INPUT)


def fail(message: str, code: int) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
