"""A stream carried layer by layer is the forward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from planted import random_text
from zoo import FAMILIES, tiny_model

from compressor.blocks import body, find_blocks, hidden_of
from compressor.stream import Stream


@pytest.mark.parametrize("family", FAMILIES)
def test_layer_by_layer_equals_the_forward_pass(family: str) -> None:
    model = tiny_model(family)
    blocks, windows = find_blocks(model), random_text().calibration.windows[:5]
    seen: list[Any] = []
    last = model.get_submodule(blocks[-1].layer_path)
    handle = last.register_forward_hook(lambda _m, _a, out: seen.append(hidden_of(out)))
    with torch.no_grad():
        body(model)(input_ids=windows, use_cache=False)
    handle.remove()
    stream = Stream(model, blocks, windows, batch_size=2)  # 2 + 2 + 1: batches of two shapes
    early = stream.copy()
    stream.advance(len(blocks))
    torch.testing.assert_close(torch.cat(list(stream.states)), seen[0], rtol=1e-4, atol=1e-5)
    early.advance(1)
    early.advance(len(blocks))
    assert all(torch.equal(a, b) for a, b in zip(early.states, stream.states, strict=True))
