"""Weights that stay on disk: whatever is computed with them is, bit for bit, what a model in memory gives."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model
from conftest import Compress
from planted import random_text
from zoo import (
    FAMILIES,
    REPRESENTATIVE,
    SHAPES,
    Shape,
    attention_shapes,
    find_branches,
    logits,
    random_replacement,
    save_tiny,
    stored,
    tiny_model,
    tiny_tokenizer,
    tokens,
)

from compressor.evaluate.perplexity import evaluate
from compressor.measure.profile import measure
from compressor.measure.swap import Sweeper
from compressor.models.blocks import AttentionOf, BranchIndex, find_blocks
from compressor.models.load import choose_device_map, load_model
from compressor.models.safetensors_files import write_shard
from compressor.patch.checkpoint import count_parameters, write_checkpoint
from compressor.patch.tree import patch, patched
from compressor.plan.block_trials import BlockTrials
from compressor.plan.calibration import calibrate
from compressor.plan.fit import Fitter
from compressor.plan.moments_store import open_store
from compressor.runtime.context import RunContext
from compressor.runtime.errors import InputError
from compressor.text import Text

Both = Callable[[str], tuple[Any, Any]]


@pytest.fixture
def both(tmp_path: Path) -> Both:
    """A tiny model in memory, and the same one with its weights on disk."""

    def load_both(family: str) -> tuple[Any, Any]:
        save_tiny(family, tmp_path / family)
        return load_model(str(tmp_path / family))[0], load_model(str(tmp_path / family), low_memory=True)[0]

    return load_both


def stages(model: Any, text: Text) -> tuple[list[float], list[torch.Tensor]]:
    """What every stage finds of a model: figures, losses and the weights of its fits."""
    profile = measure(model, text)
    store = open_store(model, text, RunContext())
    candidates = store.candidates()
    fitter = Fitter(store, candidates)
    units = store.units[AttentionOf(1)]
    heads = Shape(0, 1) if units and units.count > 1 else Shape(4)
    shapes: dict[BranchIndex, Shape] = {0: Shape(None, 4), AttentionOf(1): heads, 1: Shape(3, 5)}
    fits = [fitter.fit_at_once(shapes), fitter.fit_in_order(shapes)]
    calibration = calibrate(BlockTrials(store, fitter), candidates)[0]["text"]
    sweeper = Sweeper(model, profile, text, 256, RunContext())
    alone = torch.cat([sweeper.swap(p)["nats"] for p in profile.branches])
    with patched(model, store.blocks.values(), fits[1]):
        nats = evaluate(model, text.selection.windows).nats
    numbers = [p.r2_lin for p in profile.branches] + [p.measured for p in calibration.points]
    weights = [t for some in fits for module in some.values() for t in module.parameters()]
    return numbers, [nats, alone, logits(model), *weights]


def in_memory(model: Any) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.device.type != "meta"}


@pytest.mark.parametrize("family", REPRESENTATIVE)
def test_every_stage_gives_the_same_numbers(family: str, both: Both) -> None:
    text = random_text()
    results = [stages(model, text) for model in both(family)]
    assert results[0][0] == results[1][0]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


@pytest.mark.parametrize("family", ["llama", "falcon", "opt", "bloom"])
def test_a_model_that_accelerate_has_placed_gives_the_same_numbers(family: str) -> None:
    """Every layer behind accelerate's hooks, as on several GPUs."""
    text = random_text()
    results = []
    for placed in (False, True):
        model = tiny_model(family)
        if placed:
            places = {name: "cpu" for name, module in model.named_modules() if not list(module.children())}
            places |= {block.layer_path: "cpu" for block in find_blocks(model)}
            model = dispatch_model(model, places, main_device="cpu", force_hooks=True)
        results.append(stages(model, text))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


@pytest.mark.parametrize(
    ("free", "device", "expected"),
    [
        ([100, 100], "cuda", {}),
        ([60, 60], "cuda", {"device_map": "balanced"}),
        ([60, 60], "auto", {"device_map": "balanced"}),
        ([60, 60], "cuda:0", None),
        ([60], "cuda", None),
        ([20, 20], "cuda", None),
    ],
)
def test_a_model_larger_than_one_gpu_is_spread_over_all_of_them(
    free: list[int], device: str, expected: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(free))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (free[number], 200))
    if expected is None:
        with pytest.raises(InputError, match="add --low-memory"):
            choose_device_map("it", 70, torch.device("cuda"), device)
    else:
        assert choose_device_map("it", 70, torch.device("cuda"), device) == expected


def test_a_model_larger_than_memory_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny("llama", tmp_path)
    monkeypatch.setattr("compressor.runtime.resources.available_memory", lambda: 100_000)
    with pytest.raises(InputError, match="memory, and 100 kB can be had; add --low-memory"):
        load_model(str(tmp_path))
    assert logits(load_model(str(tmp_path), low_memory=True)[0]).isfinite().all()


@pytest.mark.parametrize(
    ("family", "shard"), [*((family, "20KB") for family in FAMILIES), *((family, "5GB") for family in REPRESENTATIVE)]
)
def test_what_is_written_is_the_same_file_for_file(family: str, shard: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    tiny_model(family).to(torch.float16).save_pretrained(source)
    tiny_tokenizer().save_pretrained(source)
    places = []
    for low_memory in (False, True):
        model, tokenizer = load_model(str(source), low_memory=low_memory)
        blocks, shapes = find_branches(model), SHAPES | attention_shapes(family)
        fits = {index: random_replacement(blocks[index], shape, model) for index, shape in shapes.items()}
        patch(model, list(blocks.values()), fits)
        places.append(tmp_path / f"out-{low_memory}")
        places[-1].mkdir()
        write_checkpoint(model, tokenizer, places[-1], dtype=torch.float16, max_shard_size=shard)
    one, other = ({file.name: file.read_bytes() for file in place.iterdir()} for place in places)
    assert one == other
    again = [load_model(str(places[0]), allow_compressed=True, low_memory=low)[0] for low in (False, True)]
    assert torch.equal(logits(again[0]), logits(again[1]))


@pytest.mark.parametrize("family", ["llama", "opt", "gpt_neox"])
def test_one_layer_is_in_memory_at_a_time(family: str, both: Both) -> None:
    _, model = both(family)
    blocks = find_blocks(model)
    seen: list[set[str]] = []
    for block in blocks:
        layer = model.get_submodule(block.layer_path)
        layer.register_forward_hook(lambda *_: seen.append(in_memory(model)))
    expected = logits(model)
    for block, present in zip(blocks, seen, strict=True):
        layers = {name for name in present if any(name.startswith(f"{b.layer_path}.") for b in blocks)}
        assert layers
        assert all(name.startswith(f"{block.layer_path}.") for name in layers)
    assert torch.equal(logits(model), expected)


def test_a_replaced_block_is_not_read(both: Both) -> None:
    _, model = both("llama")
    blocks = find_blocks(model)
    whole = count_parameters(model)
    with patched(model, blocks, {1: random_replacement(blocks[1], Shape(2))}):
        ffn = model.model.layers[1].mlp
        assert count_parameters(model) < whole
        logits(model)
        assert ffn.kind == "lowrank"
    assert model.model.layers[1].mlp.up_proj.weight.device.type == "meta"
    assert count_parameters(model) == whole
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_generation_and_half_precision(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    for dtype in ("float32", "float16"):
        one, other = (load_model(str(tmp_path), dtype=dtype, low_memory=low)[0] for low in (False, True))
        assert one.dtype == other.dtype
        assert torch.equal(one.generate(tokens(), **options), other.generate(tokens(), **options))


def test_a_file_written_tensor_by_tensor_is_what_safetensors_writes(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    kinds = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.float64)
    tensors = {f"{i}.é{k}": torch.ones(k, 3).to(kind) for i, kind in enumerate(kinds) for k in (2, 0)}
    save_file(tensors, tmp_path / "theirs", {"format": "pt"})
    write_shard(tmp_path / "ours", tensors, tensors.__getitem__)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_the_command_writes_the_same_model(
    compress: Compress, models: Path, options: list[str], compressed: Path, tmp_path: Path
) -> None:
    """A sharded source, everything measured anew, weights on disk: the result of the ordinary run."""
    source = tmp_path / "sharded"
    model, tokenizer = load_model(str(models / "gpt2"))
    model.save_pretrained(source, max_shard_size="30KB")
    tokenizer.save_pretrained(source)
    assert (source / "model.safetensors.index.json").is_file()
    where = ["--cache", tmp_path / "cache", "--out", tmp_path / "out"]
    done = compress(source, *options, "--max-dppl", "0.2%", "--low-memory", *where)
    assert done.code == 0, done.err
    assert "speed not measured" in done.out
    ours, theirs = stored(tmp_path / "out"), stored(compressed)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    record = json.loads((tmp_path / "out" / "compression.json").read_text())
    assert record["speed"]["prefill_ratio"] is None
    gc.collect()  # in a process of its own, its end does this
    assert not [path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    checked = compress("check", tmp_path / "out", "--low-memory", "--cache", tmp_path / "cache")
    assert checked.code == 0, checked.err
