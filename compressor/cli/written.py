"""The commands about what was written: look at it, compare it, talk to it, export it, send it, clear the cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from compressor.cli.options import Debug, Json, RunOptions, Values, with_options
from compressor.cli.output import emit
from compressor.cli.start import refuse_early, started
from compressor.runtime.errors import InputError

EXPORT_TARGETS = ("gguf", "hf-dense", "onnx", "vllm")
Directory = Annotated[Path, typer.Argument(help="a directory that compress wrote", show_default=False)]
Written = Annotated[
    Path,
    typer.Argument(metavar="PATH", help="a directory that compress wrote, or a .gguf file of it", show_default=False),
]


def info(directory: Written, as_json: Json = False, debug: Debug = False) -> None:
    """What a compressed checkpoint or an export contains; exit code 2 if its weights are not those of its record."""
    from compressor.export.written import is_export, read_export

    if is_export(directory):
        from compressor.report.export_info import export_info_lines

        export_record = read_export(directory)
        emit(export_record, as_json, export_info_lines(export_record), None)
        return
    from compressor.report import tables
    from compressor.report.record import Record, read_record, refuse_other_weights, weights_match
    from compressor.runtime.stored_weights import hash_stored

    record = read_record(directory)
    sha256 = hash_stored(directory)
    record = record.model_copy(update={"weights_match": weights_match(record, sha256)})
    table = tables.block_table(record) if isinstance(record, Record) else None
    emit(record, as_json, tables.info_lines(record), table)
    refuse_other_weights(directory, record, sha256)


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


def push(
    directory: Written,
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
    """Send a compressed checkpoint or an export with its card to the Hub in one commit; --dry-run says what would be
    sent."""
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
        str | None,
        typer.Option(
            help="of the weights: f32, f16, bf16; for gguf also q8_0, q5_1, q5_0, q4_1, q4_0  [as in DIR, if exact]"
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace an earlier export in --out")] = False,
    force: Annotated[bool, typer.Option("--force", help="also when nothing of the saving is left")] = False,
    low_memory: Annotated[
        bool, typer.Option("--low-memory", help="read each tensor from disk when it is written; not for onnx")
    ] = False,
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
    how: dict[str, Any] = {"dtype": dtype, "overwrite": overwrite, "force": force, "low_memory": low_memory}
    record = exporter.export(model, to, out, **how, progress=progress)
    emit(record, as_json, tables.export_lines(record), None)


@with_options
def compare(
    values: Values,
    options: RunOptions,
    first: Annotated[str, typer.Argument(metavar="A", help="a directory that compress wrote", show_default=False)],
    second: Annotated[
        str, typer.Argument(metavar="B", help="another one, or the source of the first", show_default=False)
    ],
    measure: Annotated[
        bool, typer.Option("--measure", help="measure both on the same verification text, with an interval")
    ] = False,
) -> None:
    """Two compressed checkpoints, or one and its source, side by side: what they record, and what they measure."""
    given = next((key for key, value in values.items() if value not in (None, False)), None)
    if given and not measure:
        raise InputError(f"--{given.replace('_', '-')} is about measuring; add --measure, or leave it out")
    from compressor.pipelines import compare
    from compressor.report.comparison import comparison_lines, comparison_tables

    record = compare.run(first, second)
    if measure:
        from compressor.pipelines import compare_measured

        with started(options) as context:
            record = compare_measured.run(record, values, context)
    emit(record, options.as_json, comparison_lines(record), comparison_tables(record))


@with_options
def frontier(
    values: Values,
    options: RunOptions,
    directories: Annotated[
        list[Path], typer.Argument(metavar="DIR…", help="directories that compress wrote", show_default=False)
    ],
    source: Annotated[str | None, typer.Option("--source", help="the source model  [as recorded]")] = None,
    dtypes: Annotated[
        str | None,
        typer.Option(help="precisions by commas, of f32, f16, bf16, q8_0, q5_1, q5_0, q4_1, q4_0  [all but bf16]"),
    ] = None,
    tokens: Annotated[int, typer.Option(help="of the text; llama.cpp takes as long as if it wrote them")] = 2048,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="directory for frontier.json and its chart")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace an earlier frontier in --out")] = False,
) -> None:
    """File size against perplexity in llama.cpp: the source and compressed models of it, each in several precisions,
    and whether compression and a smaller precision together are a better buy than the precision alone."""
    refuse_early(source, values)
    from compressor.pipelines import frontier
    from compressor.report.frontier_record import size_lines, size_table

    request = frontier.FrontierRequest(directories, source, dtypes, tokens, out, overwrite)
    with started(options) as context:
        record = frontier.run(request, values, context)
    emit(record, options.as_json, size_lines(record), size_table(record))


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


# Command → its line in `compress --help`.
WRITTEN: dict[Callable[..., None], str] = {
    info: "what a checkpoint or an export contains",
    cache: "what is kept of earlier runs, and how large it is",
    push: "send a checkpoint or an export with its card to the Hub",
    export: "write it for llama.cpp, ONNX Runtime, stock transformers, vLLM",
    frontier: "file size against perplexity in llama.cpp, in several precisions",
    compare: "two checkpoints, or one and its source, side by side",
    sample: "what it and its source write after a prompt",
}
