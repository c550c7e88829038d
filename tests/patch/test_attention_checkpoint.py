"""Checkpoints whose attention was replaced: what they hold, who reads them, what people do with the loaded model."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from zoo import (
    ATTENTION_SHAPES,
    REPRESENTATIVE,
    WIDTH,
    compressed,
    find_branches,
    logits,
    random_replacement,
    stored,
    tiny_tokenizer,
    tokens,
    write,
)

from compressor.modeling_compressor import CompressedModelForCausalLM, CompressorConfig, replacements
from compressor.models.blocks import AttentionOf
from compressor.models.load import load_model
from compressor.models.offload import disk_weights_of
from compressor.patch.checkpoint import count_parameters
from compressor.patch.tree import patch, specs
from compressor.patch.verify import first_tokens, verify_written
from compressor.plan.shapes import Shape
from compressor.runtime.errors import InputError
from compressor.runtime.progress import Progress

OLD = Path(__file__).parents[1] / "old_checkpoints"
MIXED = ATTENTION_SHAPES | {1: Shape(2), 2: Shape(None, 3)}
PATH = "model.layers.1.self_attn"


@pytest.fixture
def llama(tmp_path: Path) -> tuple[Path, Any]:
    model = compressed("llama", MIXED)
    return write(model, tmp_path / "llama"), model


def read_config(directory: Path) -> Any:
    return json.loads((directory / "config.json").read_text())


def test_what_config_json_says_of_attention(llama: tuple[Path, Any]) -> None:
    table = read_config(llama[0])["quantization_config"]
    assert table["schema_version"] == 3
    assert table["replacements"] == specs(llama[1])
    assert table["replacements"][PATH] == {
        "kind": "hybrid",
        "rank": 5,
        "heads": [1],
        "width": WIDTH,
        "residual_inside": False,
        "bypass": [],
        "inputs": {"q_proj": 16, "k_proj": 8, "v_proj": 8},
        "output": ["o_proj", 16],
        "counts": {},
        "per_head": None,
    }
    linear = table["replacements"]["model.layers.2.self_attn"]
    assert (linear["kind"], linear["returns"], linear["biased"], linear["neurons"]) == ("linear", 2, False, 0)
    weights = stored(llama[0])
    assert weights["model.layers.0.self_attn.q_proj.weight"].shape == (0,)  # what stops a stock reader
    assert weights[f"{PATH}.attention.q_proj.weight"].shape == (16, WIDTH)
    assert f"{PATH}.q_proj.weight" not in weights
    assert sum(tensor.numel() for tensor in weights.values()) == count_parameters(llama[1])


def test_without_attention_a_checkpoint_is_what_older_copies_read(tmp_path: Path) -> None:
    directory = write(compressed("llama"), tmp_path / "out")
    table = read_config(directory)["quantization_config"]
    assert table["schema_version"] == 2
    older = {"kind", "rank", "neurons", "width", "residual_inside", "bypass", "activation", "gated", "inner_bias"}
    assert all(set(spec) == older for spec in table["replacements"].values())


def test_an_older_copy_refuses_attention_in_one_line(llama: tuple[Path, Any]) -> None:
    place = importlib.util.spec_from_file_location("old_reader", OLD / "llama/modeling_compressor.py")
    assert place is not None
    assert place.loader is not None
    reader = importlib.util.module_from_spec(place)
    place.loader.exec_module(reader)
    with pytest.raises(
        ValueError, match=r"schema_version 3, this compressor reads 1; install the compressor"
    ) as caught:
        reader.CompressorConfig.from_dict(read_config(llama[0])["quantization_config"])
    assert "\n" not in str(caught.value)


def test_after_an_old_checkpoint_a_new_one_loads_in_the_same_process(llama: tuple[Path, Any], tmp_path: Path) -> None:
    """Without the package: each brings its own copy, and the newest reads for all."""
    code = """
import sys, torch
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
old, new, old_again = (AutoModelForCausalLM.from_pretrained(d, trust_remote_code=True) for d in sys.argv[3:])
with torch.no_grad():
    torch.save(new(torch.load(sys.argv[1])).logits, sys.argv[2])
"""
    torch.save(tokens(), tmp_path / "tokens.pt")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules"), "PYTHONPATH": ""}
    words = [sys.executable, "-I", "-c", code, tmp_path / "tokens.pt", tmp_path / "out.pt"]
    command = [*map(str, words), str(OLD / "llama"), str(llama[0]), str(OLD / "llama")]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    torch.testing.assert_close(torch.load(tmp_path / "out.pt"), logits(llama[1]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", [*REPRESENTATIVE, "qwen3", "gptj", "gpt_neo", "mpt"])
def test_what_people_do_with_a_loaded_model(family: str, tmp_path: Path) -> None:
    model = compressed(family, MIXED)
    expected = logits(model)
    directory = write(model, tmp_path / "out", max_shard_size="20KB")
    assert len(list(directory.glob("*.safetensors"))) > 1
    for places in ({}, {"device_map": "auto"}, {"device_map": "cpu"}, {"attn_implementation": "eager"}):
        loaded = AutoModelForCausalLM.from_pretrained(directory, **places)
        torch.testing.assert_close(logits(loaded), expected, rtol=1e-5, atol=1e-5)
    backbone = AutoModel.from_pretrained(directory)
    assert torch.equal(
        backbone(tokens()).last_hidden_state, AutoModelForCausalLM.from_pretrained(directory).base_model(tokens())[0]
    )
    half = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    assert logits(half).isfinite().all()
    verify_written(directory, model, first_tokens(model), Progress())
    loaded.save_pretrained(tmp_path / "again")
    assert read_config(tmp_path / "again")["quantization_config"] == read_config(directory)["quantization_config"]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    torch.testing.assert_close(logits(again), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_stored_in_the_dtype_asked_for(dtype: torch.dtype, tmp_path: Path) -> None:
    model = compressed("gemma3", ATTENTION_SHAPES)
    directory = write(model, tmp_path / "out", dtype=dtype)
    assert {tensor.dtype for tensor in stored(directory).values()} == {dtype}
    for parameter in model.parameters():
        parameter.data = parameter.to(dtype).float()
    wide = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    assert torch.equal(logits(wide), logits(model))


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3", "falcon-new"])
def test_our_own_loader_checks_and_reads_it(family: str, tmp_path: Path) -> None:
    model = compressed(family, MIXED)
    directory = write(model, tmp_path / "out")
    for low_memory in (False, True):
        loaded, _ = load_model(str(directory), allow_compressed=True, low_memory=low_memory, device="cpu")
        assert (disk_weights_of(loaded) is not None) == low_memory
        assert torch.equal(logits(loaded), logits(model))
        assert specs(loaded) == specs(model)


def test_disk_offload_by_accelerate(llama: tuple[Path, Any], tmp_path: Path) -> None:
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    places |= {f"model.layers.{index}": "disk" for index in range(3)}
    options: dict[str, Any] = {"device_map": places, "offload_folder": str(tmp_path / "offload")}
    loaded = AutoModelForCausalLM.from_pretrained(llama[0], **options)
    assert torch.equal(logits(loaded), logits(llama[1]))


def test_a_loaded_model_can_be_patched_further_and_written(llama: tuple[Path, Any], tmp_path: Path) -> None:
    """Kept heads give way to a linear map, and a linear map to a constant; the guard stays a stock weight."""
    model = AutoModelForCausalLM.from_pretrained(llama[0])
    blocks = find_branches(model)
    fits = {AttentionOf(1): Shape(3), AttentionOf(2): Shape(0)}
    patch(
        model,
        list(blocks.values()),
        {index: random_replacement(blocks[index], shape, model) for index, shape in fits.items()},
    )
    directory = write(model, tmp_path / "further")
    again = AutoModelForCausalLM.from_pretrained(directory)
    assert [specs(again)[f"model.layers.{i}.self_attn"]["kind"] for i in range(3)] == ["pruned", "lowrank", "bias"]
    assert torch.equal(logits(again), logits(model))
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    expected = again.generate(tokens(), use_cache=False, **options)
    assert torch.equal(again.generate(tokens(), **options), expected)


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "bloom"])
def test_a_new_model_of_the_config(family: str, tmp_path: Path) -> None:
    directory = write(compressed(family, MIXED), tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(directory)
    new = CompressedModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
    assert {name: p.shape for name, p in new.named_parameters()} == {
        name: p.shape for name, p in loaded.named_parameters()
    }
    drawn = [part for module in replacements(new).values() for part in module.modules() if isinstance(part, nn.Linear)]
    assert all(part.weight.std() > 0 for part in drawn)
    assert logits(new).isfinite().all()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_lora_reaches_attention(family: str, tmp_path: Path) -> None:
    write(compressed(family, MIXED), tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    modules = [module for path, module in replacements(model).items() if "attn" in path]
    matrices = sum(isinstance(part, nn.Linear) for module in modules for part in module.modules())
    torch.manual_seed(0)
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=4, lora_alpha=8))
    optimizer = torch.optim.Adam((p for p in adapted.parameters() if p.requires_grad), lr=1e-2)
    losses = []
    for _ in range(12):
        loss = adapted.train()(tokens(), labels=tokens()).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.9 * losses[0]
    trained = [name for name, p in adapted.named_parameters() if "attn" in name and "lora_B" in name and p.any()]
    assert len(trained) == matrices
    expected = logits(adapted.eval())
    adapted.save_pretrained(tmp_path / "adapter")
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    for place in ("merged", "adapter"):
        again = AutoModelForCausalLM.from_pretrained(tmp_path / place, trust_remote_code=True)
        torch.testing.assert_close(logits(again), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_a_quantiser_in_memory_takes_the_projections_too(llama: tuple[Path, Any]) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama[0])
    quantized = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear}, dtype=torch.qint8)
    attention = quantized.get_submodule(PATH)
    for part in (attention.attention.q_proj, attention.attention.o_proj, attention.down, attention.up):
        assert isinstance(part, torch.ao.nn.quantized.dynamic.Linear)
    difference = (logits(quantized) - logits(model)).square().mean().sqrt() / logits(model).square().mean().sqrt()
    assert 0 < difference < 0.05


def set_spec(**changes: Any) -> Callable[[dict[str, Any]], None]:
    def edit(table: dict[str, Any]) -> None:
        table["replacements"][PATH].update(changes)

    return edit


def move(path: str) -> Callable[[dict[str, Any]], None]:
    def edit(table: dict[str, Any]) -> None:
        table["replacements"][path] = table["replacements"].pop(PATH)

    return edit


Q, K, V = 16, 8, 8
WHOLE: dict[str, Any] = {"inputs": {"q_proj": 32, "k_proj": 16, "v_proj": 16}, "output": ["o_proj", 32]}
REFUSED: list[tuple[Callable[[dict[str, Any]], None], str]] = [
    (set_spec(colour=1), "unknown keys: colour"),
    (set_spec(kind="pruned"), "not known"),
    (set_spec(kind="linear"), "not known"),
    (set_spec(bypass=["model.layers.1.mlp"]), "not known"),
    (set_spec(rank=WIDTH), "a rank below 32"),
    (set_spec(rank=-1), "a rank below 32"),
    (set_spec(rank=None), "cannot be read"),
    (set_spec(rank="5"), "cannot be read"),
    (set_spec(width=64), "has not the width 64"),
    (set_spec(heads=[]), "at least one head"),
    (set_spec(heads=[2]), r"the kept heads \[2\] are not some of the 2"),
    (set_spec(heads=[-1]), r"the kept heads \[-1\] are not"),
    (set_spec(heads=[1.0]), r"the kept heads \[1.0\] are not"),
    (set_spec(heads=[True]), r"the kept heads \[True\] are not"),
    (set_spec(heads=["1"]), "are not some of"),
    (set_spec(heads=[1, 0], **WHOLE), "in their order"),
    (set_spec(heads=[1, 1]), "are not some of"),
    (set_spec(heads=7), "cannot be read"),
    (set_spec(heads=[0, 1]), r"the kept heads \[0, 1\] of LlamaAttention cannot have 16 inputs of o_proj"),
    (set_spec(heads=[0, 3]), r"the kept heads \[0, 3\] of LlamaAttention cannot have 16 inputs of o_proj"),
    (set_spec(inputs={"q_proj": Q, "k_proj": 16, "v_proj": V}), "1 of 2 heads of LlamaAttention leave 8 of k_proj"),
    (set_spec(inputs={"q_proj": Q, "k_proj": K}), "ignore_mismatched_sizes"),
    (set_spec(inputs={"q_proj": Q, "k_proj": K, "w_proj": V}), "no projection that is called w_proj"),
    (set_spec(inputs={"forward": Q}), "no projection that is called forward"),
    (set_spec(inputs=[Q, K, V]), "cannot be read"),
    (set_spec(output=["o_proj", 0]), "cannot have 0 inputs of o_proj"),
    (set_spec(output=["o_proj", 2**40]), "are not some of"),
    (set_spec(output=["o_proj"]), "cannot be read"),
    (set_spec(output=["config", 16]), "no projection that is called config"),
    (set_spec(counts={"forward": 1}), "no count of heads that is called forward"),
    (set_spec(counts={"training": 1}), "no count of heads that is called training"),
    (set_spec(counts={"head_dim": 4}), "no count of heads that is called head_dim"),
    (set_spec(counts={"layer_idx": 0}), "no count of heads that is called layer_idx"),
    (set_spec(counts={"num_heads": 2}), "no count of heads that is called num_heads"),
    (set_spec(counts={"config.num_attention_heads": 3}), "leave 2 of config.num_attention_heads, not 3"),
    (set_spec(counts={"config.hidden_size": 16}), "no count of heads that is called config.hidden_size"),
    (set_spec(per_head={"heads": 3, "arguments": {"attention_mask": 2}}), "3 query heads cannot belong to 2"),
    (set_spec(per_head={"arguments": {}}), "cannot be read"),
    (set_spec(per_head=[1]), "cannot be read"),
    (move("model.layers.9.self_attn"), "layers.9.self_attn"),
    (move("model.layers.0.mlp"), "LlamaMLP has no projection that is called k_proj"),
    (move("model.norm"), "LlamaRMSNorm has no projection"),
    (lambda table: table.update(schema_version=2), "schema_version 2 has no attention"),
    (lambda table: table.update(schema_version=1), "schema_version 1 has no attention"),
    (lambda table: table.update(schema_version=4), "schema_version 4, this compressor reads 1 to 3"),
]


@pytest.mark.parametrize(("edit", "message"), REFUSED)
def test_a_spec_that_is_not_understood_is_refused(
    edit: Callable[[dict[str, Any]], None], message: str, llama: tuple[Path, Any]
) -> None:
    config = read_config(llama[0])
    edit(config["quantization_config"])
    (llama[0] / "config.json").write_text(json.dumps(config))
    with pytest.raises((ValueError, RuntimeError), match=message) as caught:
        AutoModelForCausalLM.from_pretrained(llama[0])
    assert "\n" not in str(caught.value)
    tiny_tokenizer().save_pretrained(llama[0])
    with pytest.raises(InputError) as refused:
        load_model(str(llama[0]), allow_compressed=True, device="cpu")
    assert "\n" not in str(refused.value)


def test_the_schema_is_the_first_that_says_all() -> None:
    assert CompressorConfig(replacements={}).schema_version == 2
    assert CompressorConfig(replacements=specs(compressed("gpt2"))).schema_version == 2
    for shapes in ({AttentionOf(1): Shape(0, 1)}, {AttentionOf(1): Shape(None)}, {AttentionOf(1): Shape(0)}):
        assert CompressorConfig(replacements=specs(compressed("gpt2", shapes))).schema_version == 3
