"""The command `compress`: parse, validate, call. torch is imported only when a command runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from compressor import __version__
from compressor.cli import delivery
from compressor.cli import options as opt
from compressor.cli.exit import end
from compressor.cli.output import emit
from compressor.runtime.errors import DONE, MISSED

if TYPE_CHECKING:
    from compressor.pipelines.job import Setting

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
  compress export ./smaller --to gguf --out smaller.gguf
  compress push ./smaller me/smaller --dry-run

Exit codes: 0 done and inside the budget; 1 the budget is missed or nothing fits it; 2 bad input.
"""


class WholeJob(TyperGroup):
    """`compress MODEL …` is the command `run`, which nobody has to type."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        args = opt.spread(args) or ["--help"]
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


def recipe_keys(values: dict[str, Any]) -> dict[str, Any]:
    """A command's parameters that are keys of a recipe."""
    elsewhere = {"recipe_file", "trust_remote_code", "as_json", "debug", "plan_file", "plan_out", "cache", "no_cache"}
    return {key: value for key, value in values.items() if key not in elsewhere}


def refuse_early(
    model: str | None, values: dict[str, Any], recipe_file: Path | None = None, trust_remote_code: bool = False
) -> None:
    """What can be refused before torch is imported, which takes longer than this."""
    from compressor.evaluate import task_files
    from compressor.models import hub

    for name in (model, values.get("cross")):
        hub.refuse_out_of_reach(name)
    task_files.refuse_early(values.get("tasks"), values.get("task_path"), recipe_file, trust_remote_code)


def begin(trust_remote_code: bool, cache: Path | None = None, no_cache: bool = False) -> Setting:
    from compressor.pipelines.job import Setting
    from compressor.runtime import distributed
    from compressor.runtime.cache import Cache, default_directory
    from compressor.runtime.locks import scratch_directory
    from compressor.runtime.progress import Progress

    distributed.begin()
    progress = Progress(visible=distributed.rank() == 0)
    directory = scratch_directory(progress) if no_cache else cache or default_directory()  # gone with the run
    return Setting(progress, trust_remote_code, Cache(directory, progress))


@app.command()
def run(
    model: opt.Model = None,
    max_dppl: opt.MaxDppl = None,
    out: opt.Out = None,
    text: opt.TextNames = None,
    recipe_file: opt.RecipeFile = None,
    overwrite: opt.Overwrite = None,
    confidence: opt.Confidence = None,
    objective: opt.Objective = None,
    seq_len: opt.SeqLen = None,
    calib_tokens: opt.CalibTokens = None,
    select_tokens: opt.SelectTokens = None,
    verify_tokens: opt.VerifyTokens = None,
    tasks: opt.Tasks = None,
    max_task_drop: opt.MaxTaskDrop = None,
    task_path: opt.TaskPath = None,
    task_limit: opt.TaskLimit = None,
    generate: opt.Generate = None,
    prompts: opt.Prompts = None,
    swap: opt.Swap = None,
    swap_tokens: opt.SwapTokens = None,
    probe: opt.Probe = None,
    probe_steps: opt.ProbeSteps = None,
    cross: opt.Cross = None,
    batch_size: opt.BatchSize = None,
    seed: opt.Seed = None,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    low_memory: opt.LowMemory = None,
    revision: opt.Revision = None,
    cache: opt.CacheDirectory = None,
    no_cache: opt.NoCache = False,
    trust_remote_code: opt.Trust = False,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """The whole job; `compress MODEL …` is short for `compress run MODEL …`."""
    values = recipe_keys(locals())
    refuse_early(model, values, recipe_file, trust_remote_code)
    from compressor.pipelines import compress, recipe
    from compressor.report import summary, tables

    settings = recipe.resolve(recipe_file, values)
    report = compress.compress(settings, begin(trust_remote_code, cache, no_cache))
    lines = [*summary.finding_lines(report), *tables.result_lines(report)]
    emit(report, as_json, lines, tables.block_table(report))


@app.command()
def profile(
    models: opt.Models = None,
    out: opt.ReportOut = None,
    overwrite: opt.Overwrite = None,
    text: opt.Corpora = None,
    recipe_file: opt.RecipeFile = None,
    swap: opt.Swap = None,
    swap_tokens: opt.SwapTokens = None,
    probe: opt.Probe = None,
    probe_steps: opt.ProbeSteps = None,
    cross: opt.Cross = None,
    seq_len: opt.SeqLen = None,
    calib_tokens: opt.CalibTokens = None,
    select_tokens: opt.SelectTokens = None,
    verify_tokens: opt.VerifyTokens = None,
    batch_size: opt.BatchSize = None,
    seed: opt.Seed = None,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    low_memory: opt.LowMemory = None,
    revision: opt.Revision = None,
    cache: opt.CacheDirectory = None,
    no_cache: opt.NoCache = False,
    trust_remote_code: opt.Trust = False,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """The linearity report: how linear every block is, what it costs to replace it, and which must not be touched.

    Writes report.html, figures, JSON and CSV; --json without --out only prints the record.
    """
    values = recipe_keys(locals())
    values.pop("models")
    for model in models or [""]:
        refuse_early(model or None, values)
    from compressor.pipelines import profile, recipe
    from compressor.report import summary

    settings = recipe.resolve(recipe_file, values)
    settings = settings.model_copy(update={"out": out})  # a recipe's own is where its compressed model goes
    report = profile.profile(settings, models or [], begin(trust_remote_code, cache, no_cache), write=not as_json)
    emit(report, as_json, summary.profile_lines(report), summary.profile_tables(report))


@app.command()
def plan(
    model: opt.Model = None,
    max_dppl: opt.MaxDppl = None,
    plan_out: Annotated[Path, typer.Option("--out", help="file to write")] = Path("plan.json"),
    text: opt.TextNames = None,
    recipe_file: opt.RecipeFile = None,
    confidence: opt.Confidence = None,
    objective: opt.Objective = None,
    seq_len: opt.SeqLen = None,
    calib_tokens: opt.CalibTokens = None,
    select_tokens: opt.SelectTokens = None,
    verify_tokens: opt.VerifyTokens = None,
    batch_size: opt.BatchSize = None,
    seed: opt.Seed = None,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    low_memory: opt.LowMemory = None,
    revision: opt.Revision = None,
    cache: opt.CacheDirectory = None,
    no_cache: opt.NoCache = False,
    trust_remote_code: opt.Trust = False,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Measure and search: write plan.json, touch no weights. Several budgets (--max-dppl 0.5 1 2) give the frontier."""
    values = recipe_keys(locals())
    refuse_early(model, values)
    from compressor.pipelines import compress, recipe
    from compressor.report import tables

    settings = recipe.resolve(recipe_file, values)
    report = compress.plan(settings, plan_out, begin(trust_remote_code, cache, no_cache))
    if "frontier" in report:
        emit(report, as_json, tables.frontier_lines(report, plan_out), tables.frontier_table(report))
        raise typer.Exit(DONE if any(point["removed"] for point in report["frontier"]) else MISSED)
    emit(report, as_json, tables.plan_lines(report, plan_out), tables.block_table(report))


@app.command()
def apply(
    model: Annotated[str, typer.Argument(help="the model that the plan was made for", show_default=False)],
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="plan.json", show_default=False)],
    out: opt.Out = None,
    overwrite: opt.Overwrite = None,
    max_dppl: opt.MaxDppl = None,
    confidence: opt.Confidence = None,
    tasks: opt.Tasks = None,
    max_task_drop: opt.MaxTaskDrop = None,
    task_path: opt.TaskPath = None,
    task_limit: opt.TaskLimit = None,
    generate: opt.Generate = None,
    prompts: opt.Prompts = None,
    batch_size: opt.BatchSize = None,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    low_memory: opt.LowMemory = None,
    revision: opt.Revision = None,
    cache: opt.CacheDirectory = None,
    no_cache: opt.NoCache = False,
    trust_remote_code: opt.Trust = False,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Fit, patch and save a given plan, if it holds its budget."""
    values = recipe_keys(locals())
    refuse_early(model, values, None, trust_remote_code)
    from compressor.pipelines import compress, recipe
    from compressor.report import tables

    settings = recipe.resolve(None, values)
    report = compress.apply(settings, plan_file, begin(trust_remote_code, cache, no_cache))
    emit(report, as_json, tables.result_lines(report), tables.block_table(report))


@app.command()
def check(
    directory: opt.Directory,
    max_dppl: opt.MaxDppl = None,
    source: opt.SourceModel = None,
    baseline: opt.Baseline = None,
    update_baseline: opt.UpdateBaseline = False,
    tolerance: opt.Tolerance = 0.005,
    junit: opt.Junit = None,
    page: opt.Page = None,
    text: opt.TextNames = None,
    confidence: opt.Confidence = None,
    seq_len: opt.SeqLen = None,
    verify_tokens: opt.VerifyTokens = None,
    tasks: opt.Tasks = None,
    max_task_drop: opt.MaxTaskDrop = None,
    task_path: opt.TaskPath = None,
    task_limit: opt.TaskLimit = None,
    generate: opt.Generate = None,
    prompts: opt.Prompts = None,
    batch_size: opt.BatchSize = None,
    seed: opt.Seed = None,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    low_memory: opt.LowMemory = None,
    cache: opt.CacheDirectory = None,
    no_cache: opt.NoCache = False,
    trust_remote_code: opt.Trust = False,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """The gate for CI: measure a checkpoint against its source again; exit 1 when a promise is broken."""
    values = recipe_keys(locals())
    values.pop("directory")
    gate = {name: values.pop(name) for name in ("source", "baseline", "update_baseline", "tolerance", "junit", "page")}
    refuse_early(None, values, directory / "recipe.yaml", trust_remote_code)
    from compressor.pipelines import check
    from compressor.report import tables

    report = check.check(directory, values, check.Gate(**gate), begin(trust_remote_code, cache, no_cache))
    emit(report, as_json, tables.check_lines(report), tables.check_table(report))
    raise typer.Exit(DONE if report["passed"] else MISSED)


@app.command()
def info(directory: opt.Directory, as_json: opt.Json = False, debug: opt.Debug = False) -> None:
    """What a compressed checkpoint contains."""
    from compressor.report import tables
    from compressor.report.record import read_record

    record = read_record(directory)
    table = tables.block_table(record) if "perplexity" in record else None
    emit(record, as_json, tables.info_lines(record), table)


app.command()(delivery.push)
app.command()(delivery.export)


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
    end(lambda: app(standalone_mode=False), sys.argv[1:])
