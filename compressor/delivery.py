"""The commands that hand a compressed checkpoint on."""

from __future__ import annotations

from typing import Annotated

import typer

from compressor import options as opt
from compressor.terminal import emit

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
    from compressor import pushing
    from compressor.progress import Progress

    report = pushing.push(
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
    emit(report, as_json, pushing.push_lines(report), pushing.push_table(report))
