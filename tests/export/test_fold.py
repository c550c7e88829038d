"""Replacements as ordinary feed-forward blocks: the identities, exactly."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.activations import ACT2FN

from compressor.export.fold import GATE_BIAS, fold, is_linear_in_pairs, neurons_needed, read_ordinary_block
from compressor.modeling_compressor import Replacement
from compressor.models.neurons import ACTIVATIONS
from compressor.runtime.errors import InputError

SPLITTING = ["silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "quick_gelu", "relu"]
KINDS = {"linear": (None, 0), "lowrank": (3, 0), "pruned": (0, 6), "hybrid": (3, 5), "bias": (0, 0), "full": (None, 4)}


def replacement(rank: int | None, neurons: int, activation: str, gated: bool, biased: bool = True) -> Replacement:
    given = {"activation": activation, "gated": gated, "inner_bias": biased} if neurons else {}
    module = Replacement(16, rank, neurons=neurons, **given).double()
    generator = torch.Generator().manual_seed(neurons)
    for parameter in module.parameters():
        parameter.data.normal_(generator=generator)
    return module


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", SPLITTING)
def test_a_folded_block_computes_what_the_replacement_computes(kind: str, gated: bool, activation: str) -> None:
    module = replacement(*KINDS[kind], activation, gated)
    folded = fold(module, activation, gated)
    x = 3 * torch.randn(200, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert folded.neurons == neurons_needed(module, gated)
    torch.testing.assert_close(folded(x), module(x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(folded.padded(70)(x), module(x), rtol=1e-12, atol=1e-12)
    assert folded.padded(70).neurons == 70


@given(z=st.floats(-1e4, 1e4), activation=st.sampled_from(SPLITTING))
@settings(max_examples=200, deadline=None)
def test_what_splits_splits_everywhere(z: float, activation: str) -> None:
    act, point = ACT2FN[activation], torch.tensor(z, dtype=torch.float64)
    assert (act(point) - act(-point)).item() == pytest.approx(z, rel=1e-9, abs=1e-12)


def test_only_activations_that_split_are_said_to() -> None:
    assert [name for name in ACTIVATIONS if is_linear_in_pairs(name)] == [
        name for name in ACTIVATIONS if name in SPLITTING
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_closed_gate_is_a_power_of_two_in_every_precision(activation: str, dtype: torch.dtype) -> None:
    value = ACT2FN[activation](torch.tensor(GATE_BIAS, dtype=dtype)).item()
    assert value == ACT2FN[activation](torch.tensor(GATE_BIAS)).item()
    assert math.log2(value).is_integer()


def test_a_gated_linear_map_is_exact_to_the_last_bit() -> None:
    module = replacement(5, 0, "silu", True).float()
    x = torch.randn(100, 16, generator=torch.Generator().manual_seed(4))
    assert torch.equal(fold(module, "silu", True)(x), module(x))


@pytest.mark.parametrize("gated", [False, True])
def test_half_precision_stays_at_its_own_rounding(gated: bool) -> None:
    """Blocks for bfloat16 are computed in bfloat16: their error is that of the rounding, not more."""
    module = replacement(4, 0, "silu", gated)
    x = torch.randn(500, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    folded = fold(module, "silu", gated)
    rounded = type(folded)(
        folded.activation,
        **{
            name: tensor.bfloat16()
            for name in ("inner", "outer", "gate", "inner_bias", "gate_bias", "bias")
            if (tensor := getattr(folded, name)) is not None
        },
    )
    error = (rounded(x.bfloat16()).double() - module(x)).square().mean().sqrt() / module(x).square().mean().sqrt()
    assert error < 0.02


def test_linear_parts_need_an_activation_that_splits() -> None:
    with pytest.raises(InputError, match="relu2"):
        fold(replacement(3, 0, "relu2", False), "relu2", False)
    pruned = replacement(0, 5, "relu2", False)
    x = torch.randn(9, 16, dtype=torch.float64)
    torch.testing.assert_close(fold(pruned, "relu2", False)(x), pruned(x))
    gated = replacement(3, 5, "relu2", True)
    torch.testing.assert_close(fold(gated, "relu2", True)(x), gated(x))


@pytest.mark.parametrize(("activation", "gated"), [("gelu", False), ("silu", True)])
def test_kept_neurons_must_be_the_targets(activation: str, gated: bool) -> None:
    with pytest.raises(InputError, match="kept neurons are silu"):
        fold(replacement(0, 4, "silu", False), activation, gated)


def test_the_same_activation_by_another_name_will_do() -> None:
    module = replacement(2, 4, "gelu_new", False)
    x = torch.randn(9, 16, dtype=torch.float64)
    torch.testing.assert_close(fold(module, "gelu_pytorch_tanh", False)(x), module(x))


def test_a_block_that_was_not_replaced_stays_what_it_is() -> None:
    from zoo import tiny_model

    from compressor.models.blocks import find_blocks, run_block
    from compressor.models.neurons import find_neurons

    model: nn.Module = tiny_model("gpt2")
    block = find_blocks(model)[1]
    neurons = find_neurons(model, block)
    assert neurons is not None
    x = torch.randn(9, 32)
    with torch.no_grad():
        torch.testing.assert_close(read_ordinary_block(neurons)(x), run_block(model, block, x))
