"""What a checkpoint holds, what a user does with the loaded model, and which checkpoints are refused."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, pipeline
from zoo import WIDTH, compressed, logits, random_replacement, stored, tiny_model, tiny_tokenizer, tokens, write

from compressor.modeling_compressor import FILE_NAME, Replacement
from compressor.models.blocks import find_blocks
from compressor.patch.checkpoint import count_parameters, write_checkpoint
from compressor.patch.tree import patch, specs
from compressor.plan.shapes import Shape
from compressor.runtime.errors import InputError


def edit_config(directory: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    file = directory / "config.json"
    config = json.loads(file.read_text())
    edit(config)
    file.write_text(json.dumps(config))


@pytest.fixture
def llama(tmp_path: Path) -> tuple[Path, Any]:
    """A checkpoint with one low-rank block and a tied head."""
    model = compressed("llama", {1: Shape(4)})
    return write(model, tmp_path / "llama"), model


def test_the_model_in_memory_stays_as_it_is(tmp_path: Path) -> None:
    model = compressed("llama")
    config, weights = model.config.to_dict(), {name: t.clone() for name, t in model.state_dict().items()}
    names, generation = [name for name, _ in model.named_modules()], model.generation_config
    write(model, tmp_path / "out", dtype=torch.bfloat16)
    assert model.config.to_dict() == config
    assert model.generation_config is generation
    assert [name for name, _ in model.named_modules()] == names
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


def test_tokenizer_template_and_generation_config_come_along(tmp_path: Path) -> None:
    model = compressed("llama")
    # Transformers loads such a contradiction from a source's file, but refuses to save it.
    model.generation_config = GenerationConfig(max_new_tokens=5, temperature=0.5, do_sample=False)
    directory = write(model, tmp_path / "out")
    tokenizer, text = AutoTokenizer.from_pretrained(directory), "the watery part"
    assert tokenizer(text).input_ids == tiny_tokenizer()(text).input_ids
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<user>hi"
    generation = AutoModelForCausalLM.from_pretrained(directory).generation_config
    assert (generation.max_new_tokens, generation.temperature) == (5, 0.5)


def test_no_file_names_a_place_on_this_machine(llama: tuple[Path, Any]) -> None:
    directory, _ = llama
    again = directory.parent / "again"
    AutoModelForCausalLM.from_pretrained(directory).save_pretrained(again)
    for file in (*directory.glob("*.json"), *again.glob("*.json")):
        assert str(directory.parent) not in file.read_text()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_stored_in_the_dtype_asked_for(dtype: torch.dtype, tmp_path: Path) -> None:
    model = compressed("llama")
    directory = write(model, tmp_path / "out", dtype=dtype)
    assert {tensor.dtype for tensor in stored(directory).values()} == {dtype}
    again = AutoModelForCausalLM.from_pretrained(directory)
    assert again.dtype == dtype
    for parameter in model.parameters():
        parameter.data = parameter.to(dtype).float()
    wide = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    assert torch.equal(logits(wide), logits(model))


def test_tied_weights_are_stored_once(llama: tuple[Path, Any]) -> None:
    directory, model = llama
    tensors = stored(directory)
    assert sum(tensor.numel() for tensor in tensors.values()) == count_parameters(model)
    assert "model.embed_tokens.weight" in tensors
    assert "lm_head.weight" not in tensors
    again = AutoModelForCausalLM.from_pretrained(directory)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert count_parameters(again) == count_parameters(model) < count_parameters(tiny_model("llama"))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "opt"])
def test_shards(family: str, tmp_path: Path) -> None:
    model = compressed(family, {1: Shape()})
    directory = write(model, tmp_path / "out", dtype=torch.float32, max_shard_size="30KB")
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(directory)), logits(model))


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_a_model_without_replacements_is_saved_stock(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    directory = write(model, tmp_path / "ours", dtype=torch.float32)
    model.save_pretrained(tmp_path / "stock")
    ours, stock = (json.loads((place / "config.json").read_text()) for place in (directory, tmp_path / "stock"))
    assert ours == stock
    assert not (directory / FILE_NAME).exists()
    assert (directory / "model.safetensors").read_bytes() == (tmp_path / "stock/model.safetensors").read_bytes()


def test_save_pretrained_of_a_patched_model_also_gives_a_checkpoint(tmp_path: Path) -> None:
    model = compressed("opt")
    model.save_pretrained(tmp_path / "out")
    assert not hasattr(model.config, "quantization_config")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out")), logits(model))


def test_a_reloaded_model_can_be_patched_further_and_written(llama: tuple[Path, Any], tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama[0])
    blocks = find_blocks(model)
    patch(model, blocks, {0: random_replacement(blocks[0], Shape(2)), 1: random_replacement(blocks[1], Shape(0))})
    again = AutoModelForCausalLM.from_pretrained(write(model, tmp_path / "further"))
    assert [spec["kind"] for spec in specs(again).values()] == ["lowrank", "bias"]
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("family", ["llama", "opt", "bloom"])
def test_what_people_do_with_a_loaded_model(family: str, tmp_path: Path) -> None:
    model = compressed(family)
    expected = logits(model)
    directory = write(model, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(directory, device_map="auto")
    assert torch.equal(logits(loaded), expected)
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(loaded.generate(tokens(), **options), model.generate(tokens(), **options))
    written = pipeline("text-generation", str(directory))("Call me", **options)[0]["generated_text"]
    assert written.startswith("Call me")
    assert AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).dtype == torch.bfloat16
    twin, thawed = copy.deepcopy(loaded), pickle.loads(pickle.dumps(loaded))
    assert loaded.half().dtype == torch.float16
    for number, other in enumerate((twin, thawed)):
        assert torch.equal(logits(other), expected)
        other.lm_head.weight.data.mul_(2)
        other.save_pretrained(tmp_path / f"twin{number}")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / f"twin{number}")
        assert torch.equal(logits(again), logits(other))
        assert not torch.equal(logits(again), expected)


def test_the_trusted_config_has_no_note(llama: tuple[Path, Any]) -> None:
    """So loading with trust needs no method of the quantizer that a later transformers may not call."""
    raw = json.loads((llama[0] / "config.json").read_text())
    assert "trust_remote_code=True" in raw["transformers_weights"]
    stock = AutoConfig.from_pretrained(llama[0])
    trusted = AutoConfig.from_pretrained(llama[0], trust_remote_code=True)
    assert stock.transformers_weights == raw["transformers_weights"]
    assert not hasattr(trusted, "transformers_weights")
    given = AutoModelForCausalLM.from_pretrained(llama[0], config=stock)
    assert torch.equal(logits(given), logits(llama[1]))
    assert hasattr(stock, "transformers_weights")  # what the caller gave is not changed


def test_disk_offload(llama: tuple[Path, Any], tmp_path: Path) -> None:
    directory, model = llama
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    places |= {f"model.layers.{index}": "disk" for index in range(3)}
    options: dict[str, Any] = {"device_map": places, "offload_folder": str(tmp_path / "offload")}
    loaded = AutoModelForCausalLM.from_pretrained(directory, **options)
    assert torch.equal(logits(loaded), logits(model))
    loaded.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "again")), logits(model))


def test_a_training_step(llama: tuple[Path, Any]) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama[0])
    model(tokens(), labels=tokens()).loss.backward()
    gradient = model.model.layers[1].mlp.down.weight.grad
    assert gradient is not None
    assert gradient.abs().max() > 0


def set_path(keys: list[str], value: Any) -> Callable[[dict[str, Any]], None]:
    def edit(config: dict[str, Any]) -> None:
        for key in keys[:-1]:
            config = config[key]
        config[keys[-1]] = value

    return edit


TABLE = ["quantization_config", "replacements"]
SPEC = [*TABLE, "model.layers.1.mlp"]
EXTRA = Replacement(WIDTH, 4).spec()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (set_path(["quantization_config", "schema_version"], 4), "schema_version 4"),
        (set_path(["quantization_config", "schema_version"], 0), "schema_version 0"),
        (set_path(["quantization_config", "bits"], 4), "unknown keys: bits"),
        (set_path([*SPEC, "colour"], 1), "colour"),
        (set_path([*SPEC, "neurons"], 8), "8 neurons with activation None"),
        (set_path([*SPEC, "kind"], "linear"), "not known"),
        (set_path([*SPEC, "rank"], 5), r"mlp\.(down|up) has shape|ignore_mismatched_sizes"),
        (set_path([*SPEC, "rank"], WIDTH + 1), "rank"),
        (set_path([*TABLE, "model.layers.9.mlp"], EXTRA), "layers.9.mlp"),
        (set_path([*TABLE, "model.layers.0.mlp"], EXTRA), "has no model.layers.0.mlp"),
    ],
)
def test_a_checkpoint_that_is_not_understood_is_refused(
    edit: Callable[[dict[str, Any]], None], message: str, llama: tuple[Path, Any]
) -> None:
    edit_config(llama[0], edit)
    with pytest.raises((ValueError, RuntimeError), match=message):
        AutoModelForCausalLM.from_pretrained(llama[0])


def test_write_refuses_what_it_cannot_write(llama: tuple[Path, Any]) -> None:
    directory, model = llama
    with pytest.raises(InputError, match="not empty"):
        write_checkpoint(model, tiny_tokenizer(), directory, dtype=None)
