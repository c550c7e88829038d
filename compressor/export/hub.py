"""Send a compressed checkpoint to the Hugging Face Hub: one commit, or word for word what it would hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from rich.table import Table
from rich.text import Text as Styled

import compressor
from compressor.export.upload import Parcel, is_ours, pack
from compressor.runtime.errors import InputError, causes, reason_of
from compressor.runtime.names import RECORD
from compressor.runtime.network import is_repo_id, why_unreachable
from compressor.runtime.progress import Progress
from compressor.runtime.resources import format_bytes

MAIN = constants.DEFAULT_REVISION
LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"


def push(
    directory: str | Path,
    repo: str,
    *,
    private: bool = False,
    branch: str | None = None,
    message: str | None = None,
    create_pr: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Check everything that can be checked here, then send it. Without a token it is a dry run, and says so."""
    refuse_names(repo, branch)
    parcel = pack(Path(directory), repo)
    files = [{"path": name, "bytes": size} for name, size in parcel.sizes.items()]
    report: dict[str, Any] = {
        **{"directory": str(directory), "repo": repo, "branch": branch or MAIN, "private": private},
        **{"files": files, "bytes": sum(parcel.sizes.values()), "left_out": parcel.left_out, "notes": parcel.notes},
        **{"card": parcel.metadata, "sent": False},
    }
    if dry_run or get_token() is None:
        return {**report, "reason": "--dry-run" if dry_run else f"there is no token; {LOG_IN}"}
    message = message or f"{parcel.name} by compressor {compressor.__version__}"
    with refusing(repo, branch):
        api = open_client()
        (progress or Progress()).say(f"send {format_bytes(report['bytes'])} to {repo}")
        removed, new = prepare(api, parcel, repo, private, branch, overwrite)
        operations = [CommitOperationAdd(name, content) for name, content in parcel.files.items()]
        commit = api.create_commit(
            repo,
            [*operations, *(CommitOperationDelete(name) for name in removed)],
            commit_message=message,
            revision=branch,
            create_pr=create_pr,
        )
    url = commit.pr_url or str(commit.repo_url)
    return {**report, "sent": True, "created": new, "removed": removed, "url": url, "commit": commit.oid}


def refuse_names(repo: str, branch: str | None) -> None:
    if not is_repo_id(repo) or "/" not in repo:
        raise InputError(f"{repo!r} is no name of a repository; give OWNER/NAME, such as me/model-lin")
    if branch is not None and (not branch.strip() or branch != branch.strip() or branch.startswith(("-", "/"))):
        raise InputError(f"--branch {branch!r} is no name of a branch; give one such as main or v2")


def open_client() -> HfApi:
    offline = why_unreachable()
    if offline:
        raise InputError(f"the Hugging Face Hub cannot be reached ({offline}); see what would be sent with --dry-run")
    return HfApi()


def prepare(
    api: Any, parcel: Parcel, repo: str, private: bool, branch: str | None, overwrite: bool
) -> tuple[list[str], bool]:
    """Refuse a repository that this must not go to; make what is missing. What is to go from it, and if it is new."""
    try:
        found = api.model_info(repo)
    except RepositoryNotFoundError:
        api.create_repo(repo, private=private or None, exist_ok=True)  # None: what the owner has chosen for all
        if branch not in (None, MAIN):
            api.create_branch(repo, branch=branch, exist_ok=True)
        return [], True
    if private and not found.private:
        raise InputError(
            f"{repo} exists and is public, so --private cannot hold; make it private on its Hub page first"
        )
    try:
        present, missing = api.list_repo_files(repo, revision=branch), False
    except RevisionNotFoundError:
        present, missing = api.list_repo_files(repo), True
    others = [name for name in present if name != ".gitattributes"]
    if others and RECORD not in others and not overwrite:
        raise InputError(
            f"{repo} has {len(others)} files ({others[0]}, …) that compress did not write; name another repository or "
            "add --overwrite"
        )
    if missing:
        api.create_branch(repo, branch=branch, exist_ok=True)
    return [name for name in present if is_ours(name) and name not in parcel.files], False


@contextmanager
def refusing(repo: str, branch: str | None) -> Iterator[None]:
    """Whatever the Hub or the network says becomes one line, in which no token stands, nor in its traceback."""
    try:
        yield
    except (InputError, MemoryError):
        raise
    except Exception as error:  # the HTTP client's own exceptions share no base class across Hub versions
        secret = get_token()
        told = any(secret is not None and secret in str(cause) for cause in causes(error))
        raise explain(repo, branch, error, secret) from (None if told else error)


def explain(repo: str, branch: str | None, error: Exception, secret: str | None) -> InputError:
    """What the answer means to the user."""
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    said = getattr(error, "server_message", None)  # the first line of the error itself is only the address
    reason = (reason_of(ValueError(said)) if said else reason_of(error)).replace(secret or "\0", "***")
    if status == 401:
        return InputError(f"the Hub does not know the token; {LOG_IN}")
    if status == 403:
        return InputError(f"the token may not write to {repo}; use one with write access, or --create-pr")
    if isinstance(error, RevisionNotFoundError):
        return InputError(f"{repo} has no branch {branch!r}; give another --branch")
    if status == 404:
        return InputError(f"{repo} cannot be found or made with this token; check the owner's name")
    return InputError(f"{repo} could not be written: {reason}; try again")


def push_table(report: Mapping[str, Any]) -> Table:
    """Every file with its size."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("file", overflow="fold")
    table.add_column("bytes", justify="right", no_wrap=True)
    for file in report["files"]:
        table.add_row(Styled(file["path"]), f"{file['bytes']:,}")
    return table


def push_lines(report: Mapping[str, Any]) -> list[str]:
    """Where it goes or would go, what is left out, and what the card says of it."""
    sent = report["sent"]
    card = report["card"]
    told = [f"{key} {card[key]}" for key in ("base_model", "license", "pipeline_tag") if key in card]
    scores = sum(len(result["metrics"]) for index in card.get("model-index") or [] for result in index["results"])
    where = f"{report['repo']}, branch {report['branch']}" + (", private" if report["private"] else "")
    lines = [
        f"{len(report['files'])} files, {report['bytes']:,} bytes {'sent' if sent else 'would be sent'} to {where}",
        *[f"left out: {name} ({reason})" for name, reason in report["left_out"].items()],
        *report["notes"],
        f"the card's metadata is sound, as far as it can be checked here: {', '.join([*told, f'{scores} results'])}",
        *([] if "license" in card else ["warning: the card names no license; add one to README.md if you know it"]),
    ]
    if not sent:
        return [*lines, f"nothing was sent: {report['reason']}"]
    gone = [f"removed there: {', '.join(report['removed'])}"] if report["removed"] else []
    return [*lines, *gone, f"{report['url']} (commit {report['commit']})"]
