"""The command `compress`: every command parses, calls, prints and exits. torch is imported only when one runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from compressor import __version__
from compressor.cli.exit import run_and_exit
from compressor.cli.help import SETTINGS, Command, Commands
from compressor.cli.options import RunOptions, Values, with_options
from compressor.cli.output import emit
from compressor.cli.start import refuse_early, resolve_job, started
from compressor.cli.written import WRITTEN, Directory, Written
from compressor.pipelines import recipe
from compressor.runtime.errors import DONE, MISSED, InputError

if TYPE_CHECKING:
    from compressor.report.record import Record

PROGRAM = "compress"
EXAMPLES = """
Make a language model smaller with a promise: this much smaller, and no worse than that.

\b
  compress MODEL --max-dppl 1.0 --out DIR   the whole job
  compress MODEL --help                     all options of the job
  compress                                  asks what it needs to know

MODEL is a hub id, a local directory, or a built-in one: demo, demo-llama.

\b
Examples:
  compress demo --max-dppl 1.0 --out ./demo-lin
  compress ./my-model --text corpus.txt --max-dppl 2% --dry-run
  compress ./my-model --text corpus.txt --max-dppl 2% --out ./smaller
  compress ./my-model --text corpus.txt --remove 10% --heal 200k --out ./smaller
  compress check ./smaller
  compress export ./smaller --to gguf --out smaller.gguf

Exit codes: 0 done and inside the budget; 1 the budget is missed or nothing fits it; 2 bad input.
"""


app = typer.Typer(
    cls=Commands,
    help=EXAMPLES,
    context_settings=SETTINGS,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.command(cls=Command, short_help="the whole job; `compress MODEL …` is short for it")
@with_options
def run(
    values: Values,
    options: RunOptions,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="say what would be done, how long it takes, how small it may get; write nothing"
        ),
    ] = False,
) -> None:
    """The whole job; `compress MODEL …` is short for `compress run MODEL …`."""
    settings = resolve_job(options, values, writes=not dry_run)
    refuse_early(settings.model, values, options.recipe_file, options.trust_remote_code)
    if dry_run:
        estimate(settings, options)
        return
    from compressor.pipelines import compress

    with started(options) as context:
        record = compress.run(settings, context)
    emit_result(record, options)


def emit_result(record: Record, options: RunOptions) -> None:
    """The answer of a command that wrote a checkpoint; with --verbose, how it was found above it."""
    from compressor.report import answer, summary, tables

    details = [*summary.finding_lines(record), *tables.detail_lines(record)] if options.verbose else []
    table = tables.block_table(record) if options.verbose else None
    emit(record, options.as_json, [*details, *answer.answer_lines(record)], table)


def estimate(settings: recipe.Recipe, options: RunOptions) -> None:
    """A dry run of the whole job."""
    from compressor.pipelines import dry_run
    from compressor.report.dry_run_record import dry_run_lines

    with started(options, dry_run=True) as context:
        record = dry_run.run(settings, context)
    emit(record, options.as_json, dry_run_lines(record), None)


@app.command(cls=Command, short_help="how linear every block is, and which must not be touched")
@with_options
def profile(
    values: Values,
    options: RunOptions,
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL", help="hub ids, local directories, or `demo`", show_default=False),
    ] = None,
) -> None:
    """The linearity report: how linear every block is, what it costs to replace it, and which must not be touched.

    Writes report.html, figures, JSON and CSV; --json without --out only prints the record.
    """
    for model in models or [""]:
        refuse_early(model or None, values)
    settings = recipe.resolve(options.recipe_file, values)
    if not models:
        settings.require_model()
    from compressor.pipelines import profile
    from compressor.report import summary

    settings = settings.model_copy(update={"out": values["out"]})  # a recipe's own is where its compressed model goes
    with started(options) as context:
        record = profile.run(settings, models or [], context, write=not options.as_json)
    emit(record, options.as_json, summary.profile_lines(record, options.verbose), summary.profile_tables(record))


@app.command(cls=Command, short_help="measure and search, touch no weights: plan.json")
@with_options
def plan(
    values: Values,
    options: RunOptions,
    plan_out: Annotated[Path, typer.Option("--out", help="file to write")] = Path("plan.json"),
) -> None:
    """Measure and search: write plan.json, touch no weights. Several budgets (--max-dppl 0.5 1 2) or sizes
    (--remove 2% 5% 10%) give the frontier."""
    settings = resolve_job(options, values, writes=False)
    refuse_early(settings.model, values, options.recipe_file)
    settings.searches()  # several budgets and several sizes are refused here
    from compressor.pipelines import plan
    from compressor.report import answer, tables

    with started(options) as context:
        record = plan.run(settings, plan_out, context)
    if record.frontier:
        emit(record, options.as_json, tables.frontier_lines(record, plan_out), tables.frontier_table(record))
        raise typer.Exit(DONE if any(point.removed for point in record.frontier) else MISSED)
    table = tables.block_table(record) if options.verbose else None
    emit(record, options.as_json, answer.plan_lines(record, plan_out, options.verbose), table)


@app.command(cls=Command, short_help="fit, patch and save a plan")
@with_options
def apply(
    values: Values,
    options: RunOptions,
    model: Annotated[str, typer.Argument(help="the model that the plan was made for", show_default=False)],
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="plan.json", show_default=False)],
) -> None:
    """Fit, patch and save a given plan, if it holds its budget."""
    refuse_early(model, values, None, options.trust_remote_code)
    settings = recipe.resolve(None, {"model": model, **values})
    settings.refuse_output()
    if not plan_file.exists():
        raise InputError(f"plan {plan_file} does not exist; make one with `compress plan MODEL --max-dppl 1.0`")
    from compressor.pipelines import apply

    with started(options) as context:
        record = apply.run(settings, plan_file, context)
    emit_result(record, options)


@app.command(cls=Command, short_help="train a compressed checkpoint towards its source")
@with_options
def heal(
    values: Values,
    options: RunOptions,
    directory: Directory,
    source: Annotated[str | None, typer.Option("--source", help="the source model  [as recorded]")] = None,
) -> None:
    """Distil a compressed checkpoint towards its source, and write the result if it holds its budget."""
    refuse_early(None, values, directory / "recipe.yaml", options.trust_remote_code)
    recipe.resolve(None, values).refuse_output()
    from compressor.report.record import read_record

    read_record(directory)
    from compressor.pipelines import heal

    with started(options) as context:
        record = heal.run(directory, values, source, context)
    emit_result(record, options)


@app.command(cls=Command, short_help="the gate for CI: measure it against its source again")
@with_options
def check(
    values: Values,
    options: RunOptions,
    directory: Written,
    source: Annotated[str | None, typer.Option("--source", help="the source model  [as recorded]")] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option("--checkpoint", help="of an export: the checkpoint it was made from, measured beside it"),
    ] = None,
    baseline: Annotated[Path | None, typer.Option(help="file of an earlier check to compare with")] = None,
    update_baseline: Annotated[bool, typer.Option("--update-baseline", help="write it from this check")] = False,
    tolerance: Annotated[float, typer.Option(help="how far a figure may fall behind the baseline")] = 0.005,
    junit: Annotated[Path | None, typer.Option(help="write a JUnit XML file")] = None,
    page: Annotated[Path | None, typer.Option("--report", help="write report.html")] = None,
) -> None:
    """The gate for CI: measure a checkpoint, or an export of one, against its source again; exit 1 when a promise is
    broken."""
    from compressor.export.written import is_export, read_export
    from compressor.report.record import read_record

    recipe.resolve(None, values)
    export_record = read_export(directory) if is_export(directory) else None
    if export_record is None and checkpoint is not None:
        raise InputError(f"--checkpoint is for an export, and {directory} is none; leave it out")
    if export_record is None:
        refuse_early(None, values, directory / "recipe.yaml", options.trust_remote_code)
        read_record(directory)
    from compressor.pipelines import check, check_export
    from compressor.report import export_check, tables

    gate = check.Gate(source, baseline, update_baseline, tolerance, junit, page)
    with started(options) as context:
        if export_record is None:
            record = check.run(directory, values, gate, context)
        else:
            record = check_export.run(directory, export_record, values, gate, checkpoint, context)
    lines, shown = tables.check_lines(record), [tables.check_table(record)]
    if record.export is not None:
        lines = [*export_check.export_check_lines(record.export), *lines]
        shown.append(export_check.contrast_table(record.export))
    # The same inputs give the same JSON, and the time they took is not the same twice.
    emit(record, options.as_json, lines, shown, without="timings")
    raise typer.Exit(DONE if record.passed else MISSED)


for function, text in WRITTEN.items():
    app.command(cls=Command, short_help=text)(function)


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
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    words = sys.argv[1:]
    asks = not words and all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))
    run_and_exit(ask_and_run if asks else lambda: app(prog_name=PROGRAM, standalone_mode=False), words)


def ask_and_run() -> int:
    """Ask what the job shall be, say how long it takes, and run it if that is wanted."""
    from compressor.cli import wizard

    words = wizard.ask_job()
    typer.echo("")
    app([*words, "--dry-run", "--quiet"], prog_name=PROGRAM, standalone_mode=False)
    return int(app(words, prog_name=PROGRAM, standalone_mode=False) or DONE) if wizard.confirm(words) else DONE
