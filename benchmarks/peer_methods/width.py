"""FFN neurons dropped without a refit: by their mean size, and by the package optipfair."""

from __future__ import annotations

import copy
import importlib
import logging
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from peer_methods.common import (
    BATCH,
    Inapplicable,
    Subject,
    ffn_linears,
    keep_neurons,
    neuron_count,
    observe,
    share_copy,
    share_neurons,
    weight_and_bias,
)


def width(subject: Subject, parameters: int) -> Any:
    """The same share of the neurons of every FFN goes.

    The importance of neuron j is mean |a_j| on calibration rows times the norm of its column of the last linear.
    """
    model, blocks = subject.model, subject.blocks
    downs = [ffn_linears(model, block)[1] for block in blocks]
    sizes = dict.fromkeys(downs, torch.zeros(()))
    for seen in observe(model, subject.windows, downs, lambda x, _: x.double().abs().sum(0)):
        sizes = {down: sizes[down] + seen[down] for down in downs}
    changed = share_copy(model)
    for block, down, removed in zip(blocks, downs, share_neurons(subject, parameters), strict=True):
        weight, _ = weight_and_bias(changed, down)
        order = (sizes[down] * weight.norm(dim=0)).argsort(descending=True)
        kept = order[: len(order) - removed].sort().values
        keep_neurons(changed, block, kept, weight[:, kept])
    return changed


def optipfair(subject: Subject, parameters: int, *, data: bool) -> Any:
    """The package as its users call it, by weights alone (MAW) or with calibration data as well."""
    logging.basicConfig(level=logging.WARNING)  # before the package sets up INFO for everyone
    try:
        package = importlib.import_module("optipfair")
    except ImportError as error:
        raise Inapplicable("not installed; pip install optipfair") from error
    model, block = subject.model, subject.blocks[0]
    ffn = model.get_submodule(block.path)
    if not all(hasattr(ffn, name) for name in ("gate_proj", "up_proj", "down_proj")):
        raise Inapplicable("it prunes gated FFNs only, and this model has none")
    loader = DataLoader(TensorDataset(subject.windows), batch_size=BATCH) if data else None
    neurons = neuron_count(model, block)
    removed = max(share_neurons(subject, parameters)) + 0.5  # of a neuron more: it rounds down
    chosen = {
        "pruning_type": "MLP_GLU",
        "neuron_selection_method": "MAW",
        "pruning_percentage": 100 * removed / neurons,
    }
    try:
        return package.prune_model(model=copy.deepcopy(model), dataloader=loader, show_progress=False, **chosen)
    except ValueError as error:
        raise Inapplicable(f"refused {removed / neurons:.1%}: {error}") from error
