"""Send a compressed checkpoint or an export to the Hugging Face Hub in one commit, or list the files of that commit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants, get_token
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

import compressor
from compressor.export.upload import Upload, collect_upload
from compressor.export.upload_export import collect_export_upload
from compressor.export.written import is_export
from compressor.report.export_record import PushedFile, PushRecord
from compressor.runtime.errors import InputError, causes, reason_of
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
) -> PushRecord:
    """Check the checkpoint or the export, then send it. With `dry_run` nothing is sent, and the record says so."""
    refuse_names(repo, branch)
    path = Path(directory)
    upload = collect_export_upload(path, repo) if is_export(path) else collect_upload(path, repo)
    files = [PushedFile(path=name, bytes=size) for name, size in upload.sizes().items()]
    record = PushRecord(
        directory=str(directory),
        repo=repo,
        branch=branch or MAIN,
        private=private,
        files=files,
        bytes=sum(file.bytes for file in files),
        left_out=upload.left_out,
        notes=upload.notes,
        card=upload.metadata,
        sent=False,
    )
    if dry_run:
        return record.model_copy(update={"reason": "--dry-run"})
    if get_token() is None:
        raise InputError(f"nothing was sent, for there is no token; {LOG_IN}, or list the files with --dry-run")
    with explaining_refusals(repo, branch):
        api = open_client()
        (progress or Progress()).say(f"send {format_bytes(record.bytes)} to {repo}")
        removed, created = prepare_repository(api, upload, repo, private, branch, overwrite)
        operations = [CommitOperationAdd(name, content) for name, content in upload.files.items()]
        commit = api.create_commit(
            repo,
            [*operations, *(CommitOperationDelete(name) for name in removed)],
            commit_message=message or f"{upload.model} by compressor {compressor.__version__}",
            revision=branch,
            create_pr=create_pr,
        )
    url = commit.pr_url or str(commit.repo_url)
    result = {"sent": True, "created": created, "removed": removed, "url": url, "commit": commit.oid}
    return record.model_copy(update=result)


def refuse_names(repo: str, branch: str | None) -> None:
    """Refuse names that cannot be those of a repository and a branch."""
    if not is_repo_id(repo) or "/" not in repo:
        raise InputError(f"{repo!r} is no name of a repository; give OWNER/NAME, such as me/model-lin")
    if branch is not None and (not branch.strip() or branch != branch.strip() or branch.startswith(("-", "/"))):
        raise InputError(f"--branch {branch!r} is no name of a branch; give one such as main or v2")


def open_client() -> HfApi:
    """The Hub's client, if the Hub can be reached."""
    offline = why_unreachable()
    if offline:
        raise InputError(f"the Hugging Face Hub cannot be reached ({offline}); see what would be sent with --dry-run")
    return HfApi()


def prepare_repository(
    api: Any, upload: Upload, repo: str, private: bool, branch: str | None, overwrite: bool
) -> tuple[list[str], bool]:
    """Create the repository or the branch if it is missing, and refuse one that holds something else.

    Returns its files that this commit removes, and whether the repository is new.
    """
    try:
        existing = api.model_info(repo)
    except RepositoryNotFoundError:
        api.create_repo(repo, private=private or None, exist_ok=True)  # None: the owner's default
        if branch not in (None, MAIN):
            api.create_branch(repo, branch=branch, exist_ok=True)
        return [], True
    if private and not existing.private:
        raise InputError(
            f"{repo} exists and is public, so --private cannot hold; make it private on its Hub page first"
        )
    try:
        present, is_new_branch = api.list_repo_files(repo, revision=branch), False
    except RevisionNotFoundError:
        present, is_new_branch = api.list_repo_files(repo), True
    others = [name for name in present if name != ".gitattributes"]
    if others and upload.record not in others and not overwrite:
        raise InputError(
            f"{repo} has {len(others)} files ({others[0]}, …) and no {upload.record}, so it holds something else; name "
            "another repository or add --overwrite"
        )
    if is_new_branch:
        api.create_branch(repo, branch=branch, exist_ok=True)
    old = [name for name in present if any(fnmatchcase(name, pattern) for pattern in upload.written)]
    return [name for name in old if name not in upload.files], False


@contextmanager
def explaining_refusals(repo: str, branch: str | None) -> Iterator[None]:
    """Turn an error of the Hub or the network into one line. The token appears neither in it nor in its traceback."""
    try:
        yield
    except (InputError, MemoryError):
        raise
    except Exception as error:  # the HTTP client's own exceptions share no base class across Hub versions
        token = get_token()
        leaks = any(token is not None and token in str(cause) for cause in causes(error))
        raise explain_refusal(repo, branch, error, token) from (None if leaks else error)


def explain_refusal(repo: str, branch: str | None, error: Exception, token: str | None) -> InputError:
    """The Hub's error in words that tell the user what to do."""
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    message = getattr(error, "server_message", None)  # the first line of the error itself is only the address
    reason = (reason_of(ValueError(message)) if message else reason_of(error)).replace(token or "\0", "***")
    if status == 401:
        return InputError(f"the Hub does not know the token; {LOG_IN}")
    if status == 403:
        return InputError(f"the token may not write to {repo}; use one with write access, or --create-pr")
    if isinstance(error, RevisionNotFoundError):
        return InputError(f"{repo} has no branch {branch!r}; give another --branch")
    if status == 404:
        return InputError(f"{repo} cannot be found or made with this token; check the owner's name")
    return InputError(f"{repo} could not be written: {reason}; try again")
