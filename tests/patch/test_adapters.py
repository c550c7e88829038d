"""LoRA by the real peft, and quantisers that look for nn.Linear: both reach the replaced blocks."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import AutoModelForCausalLM, QuantoConfig
from zoo import LINEAR_SHAPES, SHAPES, compressed, logits, tokens, write

from compressor.modeling_compressor import replacements

FAMILIES = ["llama", "gpt2", "opt"]

# Run without the package: the merged model, the adapter on top of the reloaded checkpoint, and the adapter alone, whose
# base model transformers loads by itself.
RELOAD = """
import importlib.abc, sys
class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path, target=None):
        if fullname.split(".")[0] == "compressor":
            raise ModuleNotFoundError(fullname)
sys.meta_path.insert(0, Blocker())
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
root, tokens = sys.argv[1], torch.load(f"{sys.argv[1]}/tokens.pt")
places = [f"{root}/{name}" for name in ("base", "merged", "adapter")]
base, merged, alone = (AutoModelForCausalLM.from_pretrained(place, trust_remote_code=True) for place in places)
adapted = PeftModel.from_pretrained(base, f"{root}/adapter").eval()
with torch.no_grad():
    torch.save([model(tokens).logits for model in (merged, adapted, alone)], f"{root}/logits.pt")
"""


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shapes", [SHAPES, LINEAR_SHAPES], ids=["neurons", "linear"])
def test_all_linear_reaches_every_matrix_of_the_replaced_blocks(family: str, shapes: Any) -> None:
    model = compressed(family, shapes)
    matrices = {
        f"{path}.{name}"
        for path, module in replacements(model).items()
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear)
    }
    sizes = [parameter for path in replacements(model) for parameter in model.get_submodule(path).parameters()]
    assert len([parameter for parameter in sizes if parameter.ndim == 2]) == len(matrices)
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=2))
    found = {
        name.removeprefix("base_model.model.") for name, part in adapted.named_modules() if isinstance(part, LoraLayer)
    }
    assert matrices <= found


@pytest.mark.parametrize("family", FAMILIES)
def test_lora_is_trained_merged_saved_and_reloaded_without_the_package(family: str, tmp_path: Path) -> None:
    write(compressed(family), tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    before = logits(model)
    torch.manual_seed(0)
    config = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=4, lora_alpha=8)
    adapted = get_peft_model(model, config)
    optimizer = torch.optim.Adam((p for p in adapted.parameters() if p.requires_grad), lr=1e-2)
    losses = []
    adapted.train()
    for _ in range(12):
        loss = adapted(tokens(), labels=tokens()).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.8 * losses[0]
    trained = [
        name
        for name, p in adapted.named_parameters()
        if ".mlp." in name or ".fc1." in name
        if "lora_B" in name and p.any()
    ]
    assert len(trained) >= len(SHAPES)
    adapted.eval()
    expected = logits(adapted)
    assert not torch.allclose(expected, before, atol=1e-2)
    adapted.save_pretrained(tmp_path / "adapter")
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")

    torch.save(tokens(), tmp_path / "tokens.pt")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules"), "PYTHONPATH": ""}
    command = [sys.executable, "-c", RELOAD, str(tmp_path)]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    for computed in torch.load(tmp_path / "logits.pt"):
        torch.testing.assert_close(computed, expected, rtol=1e-4, atol=1e-4)


def test_an_adapter_is_loaded_onto_a_model_in_memory(tmp_path: Path) -> None:
    model = compressed("llama")
    before = logits(model)
    adapted = get_peft_model(
        model, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", init_lora_weights=False)
    )
    adapted.eval().save_pretrained(tmp_path / "adapter")
    expected = logits(adapted)
    assert not torch.allclose(expected, before, atol=1e-2)
    again = PeftModel.from_pretrained(compressed("llama"), tmp_path / "adapter").eval()
    torch.testing.assert_close(logits(again), expected, rtol=1e-5, atol=1e-5)
    with again.disable_adapter():
        torch.testing.assert_close(logits(again), before, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_quantiser_in_memory_takes_the_replaced_blocks_too(family: str, tmp_path: Path) -> None:
    """torch's own int8, which runs on a CPU; torchao's `quantize_` looks for nn.Linear in the same way."""
    write(compressed(family), tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    quantized = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear}, dtype=torch.qint8)
    for path in replacements(model):
        kinds = {type(part) for part in quantized.get_submodule(path).children() if hasattr(part, "in_features")}
        assert kinds == {torch.ao.nn.quantized.dynamic.Linear}
    difference = (logits(quantized) - logits(model)).square().mean().sqrt() / logits(model).square().mean().sqrt()
    assert 0 < difference < 0.05


def test_a_second_quantization_config_is_refused_in_plain_words(tmp_path: Path) -> None:
    write(compressed("llama"), tmp_path / "out")
    with pytest.raises(ValueError, match="quantized with CompressorConfig but you are passing a QuantoConfig"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "out", quantization_config=QuantoConfig(weights="int8"))
    with pytest.raises(ValueError, match=r"cannot be quantised while it loads.*quantise the loaded model.*hf-dense"):
        AutoModelForCausalLM.from_pretrained(
            tmp_path / "out", quantization_config=QuantoConfig(weights="int8"), trust_remote_code=True
        )
