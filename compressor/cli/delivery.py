"""The commands that hand a compressed checkpoint on: to other runtimes (`export`) and to the Hub (`push`)."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from compressor.cli import options as opt
from compressor.cli.output import emit
from compressor.runtime.errors import InputError

TARGETS = ("gguf", "hf-dense", "onnx", "vllm")
Repo = Annotated[str, typer.Argument(metavar="REPO", help="OWNER/NAME on the Hugging Face Hub", show_default=False)]
Private = Annotated[bool, typer.Option("--private", help="make the repository private if it is new")]
Branch = Annotated[str | None, typer.Option(help="branch to write to, made if it is missing  [main]")]
Message = Annotated[str | None, typer.Option(help="of the commit")]
CreatePr = Annotated[bool, typer.Option("--create-pr", help="open a pull request instead of writing to the branch")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="say what would be sent, and send nothing")]
OverwriteRepo = Annotated[
    bool, typer.Option("--overwrite", help="write into a repository whose files compress did not write")
]


def push(
    directory: opt.Directory,
    repo: Repo,
    private: Private = False,
    branch: Branch = None,
    message: Message = None,
    create_pr: CreatePr = False,
    overwrite: OverwriteRepo = False,
    dry_run: DryRun = False,
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Send a compressed checkpoint with its card to the Hub, in one commit; without a token, say what would be sent."""
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
    emit(record.to_json_value(), as_json, tables.push_lines(record), tables.push_table(record))


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
    as_json: opt.Json = False,
    debug: opt.Debug = False,
) -> None:
    """Write a compressed checkpoint for llama.cpp, plain transformers, onnxruntime or vLLM: the same outputs."""
    if to not in TARGETS:
        raise InputError(f"--to {to} is not known; use {', '.join(TARGETS)}")
    from compressor.models import hub

    hub.refuse_out_of_reach(model)  # before torch is imported, which takes longer than this
    from compressor.export import exporter
    from compressor.report import tables
    from compressor.runtime.progress import Progress

    chosen: dict[str, Any] = {"dtype": dtype, "overwrite": overwrite, "force": force}
    record = exporter.export(model, to, out, **chosen, progress=Progress(visible=True))
    emit(record.to_json_value(), as_json, tables.export_lines(record), None)
