"""Where the FFNs are and what flows through them, over every family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from zoo import FAMILIES, REFUSED, ROWS, VOCAB, WIDTH, logits, tiny_model, tokens

from compressor.modeling_compressor import Replacement
from compressor.models.blocks import Block, Rows, capture_rows, find_blocks
from compressor.patch.tree import patch
from compressor.runtime.errors import InputError

SPLIT = ("activation_fn", "fc2")


def recompute(model: nn.Module, block: Block, x: Tensor) -> Tensor:
    """The block's output by its own modules, without the residual."""
    if block.residual_inside:
        output: Tensor = model.get_submodule(block.path)(x, torch.zeros_like(x))
        return output
    for path in (block.path, *block.bypass):
        x = model.get_submodule(path)(x)
    return x


def run(model: nn.Module, blocks: list[Block]) -> dict[int, Rows]:
    seen: dict[int, Rows] = {}
    with capture_rows(model, blocks, lambda block, rows: seen.__setitem__(block.index, rows)):
        logits(model)
    return seen


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_its_blocks_where_they_are(family: str) -> None:
    _, _, layers, ffn = ROWS[family]
    model = tiny_model(family)
    blocks = find_blocks(model)
    assert [block.index for block in blocks] == [0, 1, 2]
    assert [block.layer_path for block in blocks] == [f"{layers}.{i}" for i in range(3)]
    assert [block.path for block in blocks] == [f"{layers}.{i}.{ffn}" for i in range(3)]
    for block in blocks:
        layer = model.get_submodule(block.layer_path)
        parts = [getattr(layer, name) for name in ((ffn, *SPLIT) if ffn == "fc1" else (ffn,))]
        assert block.bypass == (tuple(f"{block.layer_path}.{name}" for name in SPLIT) if ffn == "fc1" else ())
        assert block.parameters == sum(p.numel() for part in parts for p in part.parameters()) > WIDTH * WIDTH
        assert block.width == WIDTH
        assert block.residual_inside == (family in ("bloom", "mpt"))


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_rows_are_what_the_block_saw(family: str) -> None:
    model = tiny_model(family)
    blocks = find_blocks(model)
    outputs: dict[str, Tensor] = {}
    for block in blocks:

        def keep(_: nn.Module, args: Any, output: Any, path: str = block.layer_path) -> None:
            outputs[path] = (output if isinstance(output, Tensor) else output[0]).clone()

        model.get_submodule(block.layer_path).register_forward_hook(keep)
    seen = run(model, blocks)
    assert sorted(seen) == [0, 1, 2]
    for block in blocks:
        rows = seen[block.index]
        assert rows.x.shape == rows.y.shape == rows.h.shape == (tokens().numel(), WIDTH)
        torch.testing.assert_close(rows.y, recompute(model, block, rows.x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(rows.h, outputs[block.layer_path].reshape(-1, WIDTH), rtol=0, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_replacement_stands_where_the_block_stood(family: str) -> None:
    """A block forced to a constant output and a replacement that is that constant give the same logits."""
    model = tiny_model(family)
    block = find_blocks(model)[1]
    constant = torch.linspace(-1, 1, WIDTH)
    last = model.get_submodule(block.bypass[-1] if block.bypass else block.path)
    handle = last.register_forward_hook(
        lambda _, args, output: constant + args[1] if block.residual_inside else constant.expand(output.shape).clone()
    )
    expected = logits(model)
    handle.remove()
    replacement = Replacement(WIDTH, 0, block.residual_inside)
    replacement.bias.copy_(constant)
    patch(model, [block], {1: replacement})
    torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "bloom", "opt"])
@torch.no_grad()
def test_blocks_of_a_patched_model_are_found_again(family: str) -> None:
    model = tiny_model(family)
    blocks = find_blocks(model)
    replacement = Replacement(WIDTH, 2, blocks[0].residual_inside)
    for parameter in replacement.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    patch(model, blocks, {0: replacement})
    again = find_blocks(model)
    assert [(b.path, b.residual_inside, b.bypass) for b in again] == [
        (b.path, b.residual_inside, b.bypass) for b in blocks
    ]
    assert again[0].parameters == WIDTH * (2 * 2 + 1)
    rows = run(model, again)[0]
    expected = rows.x @ (replacement.up.weight @ replacement.down.weight).T + replacement.output_bias
    torch.testing.assert_close(rows.y, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", REFUSED)
def test_other_families_are_refused_by_name(family: str) -> None:
    with pytest.raises(InputError, match=f"'{family}'"):
        find_blocks(tiny_model(family))


@pytest.mark.parametrize("name", ["num_hidden_layers", "hidden_size"])
def test_a_config_that_does_not_say_its_sizes_is_refused_by_name(name: str) -> None:
    model = tiny_model("llama")
    model.config = transformers.PretrainedConfig(**{"num_hidden_layers": 3, "hidden_size": WIDTH, name: None})
    model.config.model_type = "strange"
    with pytest.raises(InputError, match=f"'strange' is not supported: its config says no {name}"):
        find_blocks(model)


@pytest.mark.parametrize(("way", "words"), [("twice", "is called twice"), ("never", "does not run")])
def test_a_block_that_does_not_run_once_in_its_layer(way: str, words: str) -> None:
    model = tiny_model("llama")
    mlp, layer = model.model.layers[1].mlp, model.model.layers[1]
    if way == "twice":
        layer.post_attention_layernorm.register_forward_hook(lambda _m, _a, output: mlp(output))
    else:
        layer.forward = lambda hidden_states, **_: hidden_states
    with pytest.raises(InputError, match=f"model.layers.1.mlp {words}"):
        run(model, find_blocks(model))


def test_hooks_are_gone_after_watching() -> None:
    model = tiny_model("llama")
    seen: list[int] = []
    with capture_rows(model, find_blocks(model), lambda block, rows: seen.append(block.index)):
        model(torch.full((1, 3), VOCAB - 1))
    model(torch.full((1, 3), VOCAB - 1))
    assert seen == [0, 1, 2]
