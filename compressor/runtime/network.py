"""Whether the Hugging Face Hub answers, and whether a name can be that of a repository on it."""

from __future__ import annotations

import threading
from typing import Any

from huggingface_hub import constants, get_session, is_offline_mode
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from compressor.runtime.errors import reason_of
from compressor.runtime.names import BUILT_IN_MODELS

PROBE_SECONDS = 4.0


def why_unreachable() -> str | None:
    """Why the Hub cannot be reached, or None when it answers.

    The request runs in a thread, because a name server that does not answer blocks longer than the request's timeout.
    """
    if is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    reasons = [f"no answer in {PROBE_SECONDS:g} s"]

    def ask() -> None:
        try:
            get_session().head(constants.ENDPOINT, timeout=PROBE_SECONDS)
            reasons.clear()
        except Exception as error:
            reasons[:] = [reason_of(error)]

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(PROBE_SECONDS)
    return next(iter(reasons), None)


def is_repo_id(name: Any) -> bool:
    """Whether a repository on the Hub can have this name: OWNER/NAME, or an old name without an owner."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def is_hub_id(model: str, revision: str | None) -> bool:
    """Whether a recorded source is a repository on the Hub.

    A name without an owner is one only if a commit is recorded: for a model without a source the name of its class is
    recorded, which looks the same.
    """
    return model not in BUILT_IN_MODELS and is_repo_id(model) and ("/" in model or revision is not None)
