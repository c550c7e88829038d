"""The Hugging Face Hub: whether it answers, and a model repository as a local directory.

Without a network, cached files are used. Every failure becomes one InputError, within seconds.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from compressor.runtime.errors import InputError, reason_of
from compressor.runtime.names import BUILT_IN_MODELS, NAMED_BUILT_IN
from compressor.runtime.network import why_unreachable

MODEL_ALTERNATIVES = f"give a local directory, or {NAMED_BUILT_IN}, which are built in"
# Everything but weights and code. The card is needed because it states the licence.
DESCRIPTION_PATTERNS = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", constants.REPOCARD_NAME)


@dataclass(frozen=True)
class Snapshot:
    """A model repository at one commit in the local cache; `offline` is the reason why the Hub was not asked, if so."""

    repo: str
    directory: Path
    commit: str
    offline: str | None


def refuse_unreachable(model: str | None) -> None:
    """Refuse a hub id that is neither cached nor reachable. It needs no torch, whose import takes seconds."""
    if model is None or model in BUILT_IN_MODELS or os.path.exists(os.path.expanduser(model)):
        return
    try:
        cached = try_to_load_from_cache(model, "config.json")
    except HFValidationError:  # not a hub id: `models.load` says what it is
        return
    offline = None if isinstance(cached, str) else why_unreachable()
    if offline and not model.startswith((".", "~", os.sep)):
        raise not_cached_error(model, offline)


def open_snapshot(repo: str, revision: str | None, *, with_code: bool) -> Snapshot:
    """The repository without its weights: enough to refuse a model before gigabytes of it are downloaded."""
    offline = why_unreachable()
    patterns = [*DESCRIPTION_PATTERNS, *(["*.py"] if with_code else [])]
    try:
        directory = download(repo, revision, patterns, offline)
    except LocalEntryNotFoundError as error:
        # A cache that another tool filled may lack only files that are not needed here.
        partial = getattr(error, "snapshot_path", None)
        if partial is None:
            raise not_cached_error(repo, offline or reason_of(error)) from error
        directory = Path(partial)
    if offline and not (directory / constants.CONFIG_NAME).is_file():
        raise not_cached_error(repo, offline)
    return Snapshot(repo, directory, directory.name, offline)


def download_files(snapshot: Snapshot, names: Sequence[str]) -> None:
    """Download files of the repository into the snapshot; names that the repository does not have are skipped."""
    try:
        download(snapshot.repo, snapshot.commit, list(names), snapshot.offline)
    except LocalEntryNotFoundError as error:
        raise not_cached_error(snapshot.repo, snapshot.offline or reason_of(error)) from error
    if snapshot.offline and not all((snapshot.directory / name).is_file() for name in names):
        raise not_cached_error(snapshot.repo, snapshot.offline)


def download(repo: str, revision: str | None, patterns: list[str], offline: str | None) -> Path:
    """The local directory with the files that match the patterns; from the cache alone when `offline` is set."""
    try:
        return Path(
            snapshot_download(
                repo,
                revision=revision,
                allow_patterns=patterns,
                ignore_patterns=["*/*"],
                local_files_only=offline is not None,
            )
        )
    except LocalEntryNotFoundError as error:
        if isinstance(error.__cause__, HfHubHTTPError):  # the Hub said no, and the cache did not help
            raise explain_refusal(repo, revision, error.__cause__) from error
        raise
    except MemoryError:
        raise
    except Exception as error:  # the HTTP client's own exceptions share no base class across Hub versions
        raise explain_refusal(repo, revision, error) from error


def explain_refusal(repo: str, revision: str | None, error: Exception) -> InputError:
    """The Hub's error in words that tell the user what to do."""
    if isinstance(error, RevisionNotFoundError):
        return InputError(f"{repo} has no revision {revision!r}; leave --revision out for the newest")
    if isinstance(error, RepositoryNotFoundError) and not isinstance(error, GatedRepoError):
        return InputError(
            f"{repo!r} is neither a directory nor a public model on the Hub; check the name, "
            f"log in with `hf auth login` if it is private, or {MODEL_ALTERNATIVES}"
        )
    if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403):
        return InputError(
            f"access to {repo} is restricted; ask for access on its Hub page and log in with `hf auth login`, "
            f"or {MODEL_ALTERNATIVES}"
        )
    return InputError(f"{repo} cannot be downloaded: {reason_of(error)}; try again, or {MODEL_ALTERNATIVES}")


def not_cached_error(repo: str, offline: str) -> InputError:
    """The error for a model that is not in the cache while the Hub cannot be reached."""
    return InputError(
        f"{repo!r} is neither a directory nor a whole model in the local cache, "
        f"and the Hugging Face Hub cannot be reached ({offline}); {MODEL_ALTERNATIVES}"
    )
