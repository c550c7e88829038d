"""Compressed models as stock architectures: their own with one width for all blocks, and Llama's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from zoo import (
    FAMILIES,
    LINEAR_SHAPES,
    LLAMA_TYPED,
    NOT_OWN,
    ONE_SHAPE,
    SHAPES,
    compressed,
    logits,
    tiny_model,
    tokens,
)

from compressor.export.llama import convert_to_llama
from compressor.export.stock import convert_to_stock, find_layout
from compressor.modeling_compressor import replacements
from compressor.runtime.errors import InputError

# Why a family has no stock shape of its own; all others have one.
ALL_SHAPES = {"every part": SHAPES, "linear": LINEAR_SHAPES, "one block": ONE_SHAPE}


def difference(model: Any, other: Any) -> float:
    expected = logits(model)
    return ((logits(other) - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("shapes", ALL_SHAPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_in_its_own_architecture(family: str, shapes: str) -> None:
    model = compressed(family, ALL_SHAPES[shapes])
    if family in NOT_OWN and (family, shapes) != ("bloom", "one block"):  # whose width is the fixed one anyway
        with pytest.raises(InputError, match=NOT_OWN[family]):
            convert_to_stock(model)
        return
    stock, needed = convert_to_stock(model)
    assert type(stock) is type(model)
    assert not replacements(stock)
    assert difference(model, stock) < 2e-6
    layout = find_layout(stock.config)
    assert layout is not None
    assert layout.neurons == max(needed)


@pytest.mark.parametrize("shapes", ALL_SHAPES)
@pytest.mark.parametrize("family", LLAMA_TYPED)
@pytest.mark.parametrize("uniform", [False, True])
def test_a_llama_type_as_a_llama(family: str, shapes: str, uniform: bool) -> None:
    model = compressed(family, ALL_SHAPES[shapes])
    llama = convert_to_llama(model, uniform=uniform, multiple=8)
    assert type(llama.model).__name__ == "LlamaForCausalLM"
    assert difference(model, llama.model) < 2e-6
    widths = [layer.mlp.down_proj.weight.shape[1] for layer in llama.model.model.layers]
    assert all(width % 8 == 0 and width >= needed for width, needed in zip(widths, llama.widths, strict=True))
    assert len(set(widths)) == 1 if uniform else len(set(widths)) > 1


@pytest.mark.parametrize("family", ["llama", "granite-scaled"])
def test_tied_weights_stay_tied(family: str) -> None:
    llama = convert_to_llama(compressed(family)).model
    assert llama.lm_head.weight.data_ptr() == llama.model.embed_tokens.weight.data_ptr()


def test_a_long_text_too() -> None:
    """Positions beyond those that other tests reach, with rotations that are scaled."""
    rows = torch.randint(1, 300, (1, 60), generator=torch.Generator().manual_seed(3))
    for family in ("llama-yarn", "llama-llama3", "ernie4_5"):
        model = compressed(family)
        other = convert_to_llama(model).model
        with torch.no_grad():
            torch.testing.assert_close(other(rows).logits, model(rows).logits, rtol=1e-5, atol=1e-4)


def test_a_window_cuts_the_context() -> None:
    model = compressed("mistral", sliding_window=16)
    llama = convert_to_llama(model)
    assert llama.window == 16
    assert llama.model.config.max_position_embeddings == 16
    assert convert_to_llama(compressed("mistral", sliding_window=None)).window is None
    assert convert_to_llama(compressed("qwen2", sliding_window=16)).window is None  # not in use


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(LLAMA_TYPED)))
def test_other_families_are_no_llamas(family: str) -> None:
    with pytest.raises(InputError, match="is not of Llama's type: "):
        convert_to_llama(compressed(family, LINEAR_SHAPES))


def test_partial_rotations_are_no_llamas() -> None:
    model = compressed(
        "phi3", rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    )
    with pytest.raises(InputError, match="only a part of each head"):
        convert_to_llama(model)


def test_the_source_is_left_alone() -> None:
    model = compressed("qwen2")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    convert_to_llama(model)
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert model.config.model_type == "qwen2"


def test_a_model_without_replacements_is_itself() -> None:
    model = tiny_model("gpt_neox")
    stock, needed = convert_to_stock(model)
    assert needed == [48, 48, 48]
    with torch.no_grad():
        assert torch.equal(stock(tokens()).logits, model(tokens()).logits)
