"""`evaluate` of the Python API: it remembers with the model what was measured, so that a saved model can carry it.

What is remembered is found by the weights that it was measured of: a model that was changed has none of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from compressor.evaluate import perplexity
from compressor.evaluate.perplexity import Losses
from compressor.models.source import identify_weights
from compressor.runtime.context import RunContext

LOSSES_ATTRIBUTE = "compressor_losses"  # of a model: losses by the weights and the windows that they were measured on
MOST_REMEMBERED = 8

Key = tuple[tuple[Any, ...], str]


def evaluate(model: Any, windows: Tensor, context: RunContext | None = None) -> Losses:
    """The loss of every token of windows [count, seq_len], predicted from the ones before it in its window.

    `.perplexity` is exp(total nats / total predicted tokens). What is measured on the verification windows before and
    after a plan is applied is saved with the model.
    """
    losses = perplexity.evaluate(model, windows, context)
    remember_losses(model, windows, losses)
    return losses


def remember_losses(model: Any, windows: Tensor, losses: Losses) -> None:
    """Note on a model what its present weights lose on these windows; the oldest notes go."""
    remembered: dict[Key, Losses] = model.__dict__.setdefault(LOSSES_ATTRIBUTE, {})
    remembered[key_of(identify_weights(model), windows)] = losses
    while len(remembered) > MOST_REMEMBERED:
        del remembered[next(iter(remembered))]


def recall_losses(model: Any, identity: Mapping[str, Any], windows: Tensor) -> Losses | None:
    """What the model lost on these windows when it had the weights of this identity, if that was measured."""
    remembered: dict[Key, Losses] = getattr(model, LOSSES_ATTRIBUTE, {})
    return remembered.get(key_of(identity, windows))


def key_of(identity: Mapping[str, Any], windows: Tensor) -> Key:
    tokens = hashlib.sha256(windows.cpu().numpy().astype("<i8").tobytes()).hexdigest()
    return tuple(identity.values()), f"{tokens} {tuple(windows.shape)}"
