"""Checkpoints of schema 1, whose replacements were bare parameters, load as they did and are saved as schema 2.

`tests/old_checkpoints/` was written by the last version that wrote schema 1 (commit 00e81aa): blocks of every kind, and
one that was not replaced. `-expected` has the logits that it computed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM
from zoo import stored, tiny_tokenizer

from compressor.modeling_compressor import CompressorConfig, replacements
from compressor.models.load import load_model
from compressor.models.offload import disk_weights_of

OLD = Path(__file__).parents[1] / "old_checkpoints"
KINDS = ["linear", "lowrank", "pruned", "hybrid", "hybrid", "bias"]
FAMILIES = ["llama", "gpt2"]

READ_BOTH = """
import sys, torch
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
tokens, results = torch.load(sys.argv[1]), {}
for directory in sys.argv[3:]:
    model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)
    with torch.no_grad():
        results[directory] = model(tokens).logits
torch.save(results, sys.argv[2])
"""


@pytest.fixture(params=FAMILIES)
def old(request: pytest.FixtureRequest) -> tuple[Path, dict[str, torch.Tensor]]:
    return OLD / request.param, load_file(OLD / f"{request.param}-expected.safetensors")


@torch.no_grad()
def compute(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = model(tokens).logits
    return output


def close(logits: torch.Tensor, expected: torch.Tensor) -> None:
    """Within the rounding of another processor."""
    tolerance = 4 * torch.finfo(expected.dtype).eps
    torch.testing.assert_close(logits, expected, rtol=tolerance, atol=tolerance)


def test_an_old_checkpoint_loads_as_it_did(old: tuple[Path, dict[str, torch.Tensor]]) -> None:
    directory, expected = old
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert [module.kind for module in replacements(model).values()] == KINDS
    close(compute(model, expected["tokens"]), expected["logits"])
    before, now = stored(directory), model.state_dict()
    for path, module in replacements(model).items():
        for name, first in module.first_names().items():
            assert torch.equal(now[f"{path}.{name}"], before[f"{path}.{first}"])


def test_it_is_saved_with_the_new_names_and_the_same_values(
    old: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    directory, expected = old
    model = AutoModelForCausalLM.from_pretrained(directory)
    model.save_pretrained(tmp_path / "new")
    before, after = stored(directory), stored(tmp_path / "new")
    renamed = {
        f"{path}.{first}": f"{path}.{name}"
        for path, module in replacements(model).items()
        for name, first in module.first_names().items()
    }
    assert {renamed.get(name, name) for name in before} == set(after)
    for name, tensor in before.items():
        same = after[renamed.get(name, name)]
        assert (same.dtype, same.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(same.view(torch.uint8), tensor.view(torch.uint8))
    assert json.loads((tmp_path / "new/config.json").read_text())["quantization_config"]["schema_version"] == 2
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    assert torch.equal(compute(again, expected["tokens"]), compute(model, expected["tokens"]))


def test_the_old_file_and_this_one_compute_the_same_bits(
    old: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    """Without the package: the old checkpoint with its own file, then the new one with its own.

    The second is the reason why the newest file reads for all: the old one is registered first.
    """
    directory, expected = old
    model = AutoModelForCausalLM.from_pretrained(directory)
    model.save_pretrained(tmp_path / "new")
    torch.save(expected["tokens"], tmp_path / "tokens.pt")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules"), "PYTHONPATH": ""}
    directories = [str(directory), str(tmp_path / "new"), str(directory)]
    command = [
        sys.executable,
        "-I",
        "-c",
        READ_BOTH,
        str(tmp_path / "tokens.pt"),
        str(tmp_path / "out.pt"),
        *directories,
    ]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    results = torch.load(tmp_path / "out.pt")
    assert torch.equal(results[str(directory)], results[str(tmp_path / "new")])


def test_an_old_backbone_and_old_weights_on_disk(old: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    directory, expected = old
    model = AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        hidden = model.base_model(expected["tokens"]).last_hidden_state
        backbone = AutoModel.from_pretrained(directory)(expected["tokens"]).last_hidden_state
    assert torch.equal(backbone, hidden)
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    tiny_tokenizer(257).save_pretrained(copy)
    widen_vocabulary(copy)
    for low_memory in (False, True):
        loaded, _ = load_model(str(copy), allow_compressed=True, low_memory=low_memory, device="cpu")
        assert (disk_weights_of(loaded) is not None) == low_memory
        close(compute(loaded, expected["tokens"])[..., :64].to(expected["logits"].dtype), expected["logits"])


def widen_vocabulary(directory: Path) -> None:
    """Our own loader wants a tokenizer, and a byte-level one has more words than this model."""
    from safetensors.torch import save_file

    config = json.loads((directory / "config.json").read_text())
    rows = 257
    tensors = stored(directory)
    for name, tensor in tensors.items():
        if tensor.shape[:1] == (config["vocab_size"],):
            tensors[name] = torch.cat([tensor, tensor.new_zeros(rows - len(tensor), *tensor.shape[1:])])
    config["vocab_size"] = rows
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def test_an_older_reader_refuses_the_new_layout_in_one_line(old: tuple[Path, dict[str, torch.Tensor]]) -> None:
    spec = importlib.util.spec_from_file_location("old_reader", old[0] / "modeling_compressor.py")
    assert spec is not None
    assert spec.loader is not None
    reader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reader)
    new = CompressorConfig(replacements={}).to_dict()
    with pytest.raises(ValueError, match="schema_version 2, this compressor reads 1; install the compressor") as caught:
        reader.CompressorConfig.from_dict(new)
    assert "\n" not in str(caught.value)
