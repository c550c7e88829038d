"""Attention with fewer heads, or none, in models of every family: patched, copied, saved, loaded and trained."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments
from zoo import (
    ATTENTION_SHAPES,
    FAMILIES,
    WIDTH,
    WITHOUT_UNITS,
    compressed,
    find_branches,
    logits,
    random_replacement,
    tiny_model,
    tokens,
)

from compressor.modeling_compressor import KeptHeads, replacements
from compressor.models.blocks import AttentionOf, find_attention
from compressor.models.heads import find_heads, record_attention
from compressor.patch.checkpoint import count_parameters
from compressor.patch.tree import identify_patched, patch, patched, specs, unpatch
from compressor.plan.shapes import Shape

LINEAR = {"linear": Shape(None), "lowrank": Shape(3), "bias": Shape(0)}


def heads_of(model: Any, layer: int) -> Any:
    block = find_attention(model)[layer]
    return find_heads(model, block, record_attention(model, [block])[layer])


@torch.no_grad()
def keep(heads: Any, kept: list[int], rank: int = 0) -> KeptHeads:
    """These units with their own columns of the output projection, and zeros beside them."""
    units = torch.tensor(kept)
    module: KeptHeads = heads.keep(units, rank).eval()
    module.output_projection.weight.copy_(heads.outer_matrix.weight[:, heads.columns_of(units)])
    if heads.outer_matrix.bias is not None:
        module.output_bias.copy_(heads.outer_matrix.bias)
    return module


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in WITHOUT_UNITS])
def test_all_units_with_their_own_weights_are_the_stock_model(family: str) -> None:
    model = tiny_model(family)
    expected = logits(model)
    before = dict(model.named_modules())
    heads = {layer: heads_of(model, layer) for layer in range(3)}
    whole = {AttentionOf(layer): keep(found, list(range(found.count)), layer) for layer, found in heads.items()}
    with patched(model, find_attention(model), whole):
        torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=2e-5)
        assert [module.kind for module in replacements(model).values()] == ["pruned", "hybrid", "hybrid"]
    assert dict(model.named_modules()) == before
    assert specs(model) == {}
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in WITHOUT_UNITS])
@torch.no_grad()
def test_removed_units_add_nothing(family: str) -> None:
    """The patched model computes what the stock one does without those columns of its output projections."""
    model, reference = tiny_model(family), tiny_model(family)
    fits = {}
    for layer in (1, 2):
        heads = heads_of(model, layer)
        kept = list(range(1, heads.count, 2)) or [0]
        fits[AttentionOf(layer)] = keep(heads, kept, rank=layer - 1)
        others = torch.tensor([unit for unit in range(heads.count) if unit not in kept], dtype=torch.long)
        heads_of(reference, layer).outer_matrix.weight[:, heads.columns_of(others)] = 0
    patch(model, find_attention(model), fits)
    torch.testing.assert_close(logits(model), logits(reference), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", LINEAR)
def test_attention_without_heads_in_a_later_layer(family: str, kind: str) -> None:
    model = tiny_model(family)
    expected, blocks = logits(model), find_branches(model)
    module = random_replacement(blocks[AttentionOf(2)], LINEAR[kind], model)
    assert module.kind == kind
    with patched(model, list(blocks.values()), {AttentionOf(2): module}):
        output = logits(model)
    assert output.isfinite().all()
    assert (output - expected).abs().max() > 1e-3
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in WITHOUT_UNITS])
def test_copies_compute_the_same(family: str) -> None:
    model = compressed(family, ATTENTION_SHAPES | {1: Shape(2)})
    expected = logits(model)
    assert expected.isfinite().all()
    twin, thawed = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    for other in (twin, thawed):
        assert torch.equal(logits(other), expected)
        assert specs(other) == specs(model)


def test_every_part_is_in_the_identity() -> None:
    model = tiny_model("llama")
    blocks = find_branches(model)

    def fits(**changes: Shape) -> dict[Any, Any]:
        shapes = {AttentionOf(1): changes.get("attention", Shape(2, 1)), 1: changes.get("ffn", Shape(2))}
        return {index: random_replacement(blocks[index], shape, model) for index, shape in shapes.items()}

    first = identify_patched(model, fits())
    assert list(first["replaced"]) == ["1.attention", "1"]
    assert identify_patched(model, fits()) == first
    assert identify_patched(model, fits(attention=Shape(0, 1))) != first
    changed = fits()
    changed[AttentionOf(1)].output_bias.data[0] += 1
    assert identify_patched(model, changed) != first
    other = {**fits(), AttentionOf(1): keep(heads_of(model, 1), [0], 2)}
    assert identify_patched(model, other) != first


def test_the_parameters_that_are_left() -> None:
    model = tiny_model("llama")
    before, heads = count_parameters(model), heads_of(model, 1)
    originals = patch(model, find_attention(model), {AttentionOf(1): keep(heads, [1], 2)})
    assert count_parameters(model) == before - heads.size + WIDTH + 2 * 2 * WIDTH
    unpatch(model, originals)
    assert count_parameters(model) == before


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "falcon-new", "gemma2", "phi3", "qwen3", "gpt_neox"])
def test_gradients_reach_every_part(family: str) -> None:
    model = compressed(family, ATTENTION_SHAPES).train()
    model(tokens(), labels=tokens()).loss.backward()
    for path, module in replacements(model).items():
        for name, parameter in module.named_parameters():
            if "k_proj.bias" in name:
                continue  # it moves all scores of a query alike
            assert parameter.grad is not None, f"{path}.{name}"
            assert parameter.grad.abs().max() > 0, f"{path}.{name}"


def test_a_step_of_the_trainer(tmp_path: Any) -> None:
    model = compressed("llama", ATTENTION_SHAPES)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    rows = [{"input_ids": row, "labels": row} for row in tokens(8)]
    arguments = TrainingArguments(
        str(tmp_path),
        max_steps=1,
        learning_rate=1e-2,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    Trainer(model, arguments, train_dataset=rows).train()
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    layer = "model.layers.1.self_attn"
    parts = ("attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.o_proj", "down", "up")
    assert {f"{layer}.{part}.weight" for part in parts} <= changed
    assert {f"{layer}.attention.o_proj.bias", "model.layers.2.self_attn.linear.weight"} <= changed


def test_gradient_checkpointing() -> None:
    model = compressed("llama", ATTENTION_SHAPES).train()
    model(tokens(), labels=tokens()).loss.backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    model.gradient_checkpointing_enable()
    model(tokens(), labels=tokens()).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])


def test_every_matrix_is_a_linear_module() -> None:
    for module in replacements(compressed("gpt2", ATTENTION_SHAPES)).values():
        linear = sum(isinstance(part, nn.Linear) for part in module.modules())
        assert linear == sum(parameter.ndim == 2 for parameter in module.parameters())
