"""The command `compress`: every command parses, calls, prints and exits. torch is imported only when one runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from compressor import __version__
from compressor.cli.exit import run_and_exit
from compressor.cli.options import Debug, Json, RunOptions, Values, spread_budgets, with_options
from compressor.cli.output import emit
from compressor.pipelines import recipe
from compressor.runtime.errors import DONE, MISSED, InputError

if TYPE_CHECKING:
    from compressor.runtime.context import RunContext

EXAMPLES = """
Make a language model smaller with a promise: this much smaller, and no worse than that.

compress MODEL --max-dppl 1.0 --out DIR   the whole job; MODEL is a hub id, a local directory, or `demo`

\b
Examples:
  compress demo --max-dppl 1.0 --out ./demo-lin
  compress gpt2 --max-dppl 2% --dry-run
  compress gpt2 --max-dppl 2% --out ./gpt2-lin
  compress gpt2 --remove 10% --out ./gpt2-small
  compress ./my-model --text corpus.txt --max-dppl 0.5 --out ./smaller
  compress profile ./my-model --text corpus.txt
  compress ./my-model --text corpus.txt --max-dppl 0.5 --heal 200k --out ./smaller
  compress heal ./smaller --heal-minutes 10 --out ./healed
  compress check ./smaller --max-dppl 0.5
  compress sample ./smaller "Once upon a time"
  compress export ./smaller --to gguf --out smaller.gguf
  compress push ./smaller me/smaller --dry-run
  compress cache --prune

Exit codes: 0 done and inside the budget; 1 the budget is missed or nothing fits it; 2 bad input.
"""


EXPORT_TARGETS = ("gguf", "hf-dense", "onnx", "vllm")
Directory = Annotated[Path, typer.Argument(help="a directory that compress wrote", show_default=False)]


class RunByDefault(TyperGroup):
    """`compress MODEL …` is `compress run MODEL …`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        args = spread_budgets(args) or ["--help"]
        if args[0] not in self.commands and args[0] not in ("--help", "--version"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=RunByDefault,
    help=EXAMPLES,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def refuse_early(
    model: str | None, values: Values, recipe_file: Path | None = None, trust_remote_code: bool = False
) -> None:
    """Refuse what can be refused before torch is imported, which takes longer than this."""
    from compressor.evaluate import task_files
    from compressor.models import hub

    for name in (model, values.get("cross")):
        hub.refuse_unreachable(name)
    task_files.refuse_early(values.get("tasks"), values.get("task_path"), recipe_file, trust_remote_code)


@contextmanager
def started(options: RunOptions, *, dry_run: bool = False) -> Iterator[RunContext]:
    """Join the other processes of this run, if there are any, and open the cache, which is pruned at the end.

    The cache of a dry run is left as it is.
    """
    from compressor.runtime import distributed
    from compressor.runtime.cache import open_untouched
    from compressor.runtime.context import RunContext, open_context
    from compressor.runtime.progress import Progress

    distributed.join_processes()
    progress = Progress(visible=distributed.rank() == 0)
    if dry_run:
        untouched = open_untouched(options.cache, options.no_cache, progress)
        yield RunContext(cache=untouched, progress=progress, trust_remote_code=options.trust_remote_code)
        return
    with open_context(options.cache, options.no_cache, progress, options.trust_remote_code) as context:
        yield context


@app.command()
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
    refuse_early(values["model"], values, options.recipe_file, options.trust_remote_code)
    settings = recipe.resolve(options.recipe_file, values)
    if dry_run:
        estimate(settings, options)
        return
    from compressor.pipelines import compress
    from compressor.report import summary, tables

    with started(options) as context:
        record = compress.run(settings, context)
    lines = [*summary.finding_lines(record), *tables.result_lines(record)]
    emit(record, options.as_json, lines, tables.block_table(record))


def estimate(settings: recipe.Recipe, options: RunOptions) -> None:
    """A dry run of the whole job."""
    from compressor.pipelines import dry_run
    from compressor.report.dry_run_record import dry_run_lines

    with started(options, dry_run=True) as context:
        record = dry_run.run(settings, context)
    emit(record, options.as_json, dry_run_lines(record), None)


@app.command()
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
    from compressor.pipelines import profile
    from compressor.report import summary

    settings = recipe.resolve(options.recipe_file, values)
    settings = settings.model_copy(update={"out": values["out"]})  # a recipe's own is where its compressed model goes
    with started(options) as context:
        record = profile.run(settings, models or [], context, write=not options.as_json)
    emit(record, options.as_json, summary.profile_lines(record), summary.profile_tables(record))


@app.command()
@with_options
def plan(
    values: Values,
    options: RunOptions,
    plan_out: Annotated[Path, typer.Option("--out", help="file to write")] = Path("plan.json"),
) -> None:
    """Measure and search: write plan.json, touch no weights. Several budgets (--max-dppl 0.5 1 2) or sizes
    (--remove 2% 5% 10%) give the frontier."""
    refuse_early(values["model"], values)
    settings = recipe.resolve(options.recipe_file, values)
    from compressor.pipelines import plan
    from compressor.report import tables

    with started(options) as context:
        record = plan.run(settings, plan_out, context)
    if record.frontier:
        emit(record, options.as_json, tables.frontier_lines(record, plan_out), tables.frontier_table(record))
        raise typer.Exit(DONE if any(point.removed for point in record.frontier) else MISSED)
    emit(record, options.as_json, tables.plan_lines(record, plan_out), tables.block_table(record))


@app.command()
@with_options
def apply(
    values: Values,
    options: RunOptions,
    model: Annotated[str, typer.Argument(help="the model that the plan was made for", show_default=False)],
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="plan.json", show_default=False)],
) -> None:
    """Fit, patch and save a given plan, if it holds its budget."""
    refuse_early(model, values, None, options.trust_remote_code)
    from compressor.pipelines import apply
    from compressor.report import tables

    settings = recipe.resolve(None, {"model": model, **values})
    with started(options) as context:
        record = apply.run(settings, plan_file, context)
    emit(record, options.as_json, tables.result_lines(record), tables.block_table(record))


@app.command()
@with_options
def heal(
    values: Values,
    options: RunOptions,
    directory: Directory,
    source: Annotated[str | None, typer.Option("--source", help="the source model  [as recorded]")] = None,
) -> None:
    """Distil a compressed checkpoint towards its source, and write the result if it holds its budget."""
    refuse_early(None, values, directory / "recipe.yaml", options.trust_remote_code)
    from compressor.pipelines import heal
    from compressor.report import tables

    with started(options) as context:
        record = heal.run(directory, values, source, context)
    emit(record, options.as_json, tables.result_lines(record), tables.block_table(record))


@app.command()
@with_options
def check(
    values: Values,
    options: RunOptions,
    directory: Directory,
    source: Annotated[str | None, typer.Option("--source", help="the source model  [as recorded]")] = None,
    baseline: Annotated[Path | None, typer.Option(help="file of an earlier check to compare with")] = None,
    update_baseline: Annotated[bool, typer.Option("--update-baseline", help="write it from this check")] = False,
    tolerance: Annotated[float, typer.Option(help="how far a figure may fall behind the baseline")] = 0.005,
    junit: Annotated[Path | None, typer.Option(help="write a JUnit XML file")] = None,
    page: Annotated[Path | None, typer.Option("--report", help="write report.html")] = None,
) -> None:
    """The gate for CI: measure a checkpoint against its source again; exit 1 when a promise is broken."""
    refuse_early(None, values, directory / "recipe.yaml", options.trust_remote_code)
    from compressor.pipelines import check
    from compressor.report import tables

    gate = check.Gate(source, baseline, update_baseline, tolerance, junit, page)
    with started(options) as context:
        record = check.run(directory, values, gate, context)
    # The same inputs give the same JSON, and the time they took is not the same twice.
    emit(record, options.as_json, tables.check_lines(record), tables.check_table(record), without="timings")
    raise typer.Exit(DONE if record.passed else MISSED)


@app.command()
def info(directory: Directory, as_json: Json = False, debug: Debug = False) -> None:
    """What a compressed checkpoint contains; exit code 2 if its weights are not those of its record."""
    from compressor.report import tables
    from compressor.report.record import Record, read_record, refuse_other_weights, weights_match
    from compressor.runtime.stored_weights import hash_stored

    record = read_record(directory)
    sha256 = hash_stored(directory)
    record = record.model_copy(update={"weights_match": weights_match(record, sha256)})
    table = tables.block_table(record) if isinstance(record, Record) else None
    emit(record, as_json, tables.info_lines(record), table)
    refuse_other_weights(directory, record, sha256)


@app.command()
def cache(
    show: Annotated[
        bool, typer.Option("--show", help="where it is, how large, and what is in it (the default)")
    ] = False,
    prune: Annotated[
        bool, typer.Option("--prune", help="remove the least recently used entries until it is within its limit")
    ] = False,
    limit: Annotated[
        str | None,
        typer.Option(
            help="for this call: 5GB, 0, or none  [$COMPRESSOR_CACHE_LIMIT, else 20GB and at most a tenth of the disk]"
        ),
    ] = None,
    directory: Annotated[
        Path | None, typer.Option("--cache", help="where measurements are kept  [~/.cache/compressor]")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """What is kept of earlier runs, where, and how large; --prune removes what was not used for longest."""
    from compressor.pipelines import cache
    from compressor.report.cache_record import cache_lines, cache_tables

    if show and prune:
        raise InputError("--show and --prune are both given; give one of them")
    record = cache.run(directory, limit, prune=prune)
    emit(record, as_json, cache_lines(record), cache_tables(record))


@app.command()
def push(
    directory: Directory,
    repo: Annotated[str, typer.Argument(metavar="REPO", help="OWNER/NAME on the Hugging Face Hub", show_default=False)],
    private: Annotated[bool, typer.Option("--private", help="make the repository private if it is new")] = False,
    branch: Annotated[str | None, typer.Option(help="branch to write to, made if it is missing  [main]")] = None,
    message: Annotated[str | None, typer.Option(help="of the commit")] = None,
    create_pr: Annotated[
        bool, typer.Option("--create-pr", help="open a pull request instead of writing to the branch")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="write into a repository whose files compress did not write")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say what would be sent, and send nothing")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Send a compressed checkpoint with its card to the Hub in one commit, or say with --dry-run what would be sent."""
    from compressor.export import hub
    from compressor.report import tables
    from compressor.runtime.progress import Progress

    record = hub.push(
        directory,
        repo,
        private=private,
        branch=branch,
        message=message,
        create_pr=create_pr,
        overwrite=overwrite,
        dry_run=dry_run,
        progress=Progress(visible=True),
    )
    emit(record, as_json, tables.push_lines(record), tables.push_table(record))


@app.command()
def export(
    model: Annotated[
        str, typer.Argument(metavar="DIR", help="a directory that compress wrote, or its hub id", show_default=False)
    ],
    to: Annotated[
        str,
        typer.Option(
            help="gguf: llama.cpp, one file; hf-dense: a stock checkpoint, no custom code; onnx: onnxruntime; "
            "vllm: per-block widths, not run here"
        ),
    ],
    out: Annotated[str, typer.Option(help="file (gguf) or directory to write; it appears whole or not at all")],
    dtype: Annotated[
        str | None, typer.Option(help="of the weights: f32, f16, bf16, and q8_0 for gguf  [as in DIR, if exact]")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace an earlier export in --out")] = False,
    force: Annotated[bool, typer.Option("--force", help="also when nothing of the saving is left")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write a compressed checkpoint for llama.cpp, plain transformers, onnxruntime or vLLM: the same outputs."""
    if to not in EXPORT_TARGETS:
        raise InputError(f"--to {to} is not known; use {', '.join(EXPORT_TARGETS)}")
    from compressor.models import hub

    hub.refuse_unreachable(model)  # before torch is imported, which takes longer than this
    from compressor.export import exporter
    from compressor.report import tables
    from compressor.runtime.progress import Progress

    progress = Progress(visible=True)
    record = exporter.export(model, to, out, dtype=dtype, overwrite=overwrite, force=force, progress=progress)
    emit(record, as_json, tables.export_lines(record), None)


@app.command()
def sample(
    model: Annotated[
        str, typer.Argument(metavar="DIR", help="a directory that compress wrote, or any model", show_default=False)
    ],
    prompts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PROMPT]…",
            help="what is continued  [lines of stdin, or you are asked]",
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(help="tokens to write after each prompt")] = 48,
    temperature: Annotated[float, typer.Option(help="0: always the most likely token; 1: as it was trained")] = 0.0,
    seed: Annotated[int, typer.Option(help="which random numbers are drawn, the same for both models")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="send a prompt as a message, by the chat template")] = False,
    source: Annotated[str | None, typer.Option("--source", help="the source model  [as recorded]")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N, mps")] = "auto",
    dtype: Annotated[str, typer.Option(help="to compute in: auto, float32, bfloat16, float16")] = "auto",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="run code that comes with the model")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Talk to a compressed model and its source side by side: what each writes after a prompt, and where they part."""
    from compressor.cli import sampling
    from compressor.models import hub

    for name in (model, source):
        hub.refuse_unreachable(name)
    given = sampling.read_prompts(prompts or [], as_json)
    from compressor.pipelines.sample import SampleSettings, open_sampler
    from compressor.runtime.progress import Progress

    how = SampleSettings(tokens, temperature, seed, chat)
    place: dict[str, Any] = {"device": device, "dtype": dtype, "trust_remote_code": trust_remote_code}
    sampler = open_sampler(model, source, how, Progress(visible=True), **place)
    if given is None:
        sampling.ask_again_and_again(sampler)
    else:
        sampling.show(sampler, given, as_json)


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
    run_and_exit(lambda: app(standalone_mode=False), sys.argv[1:])
