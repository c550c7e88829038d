"""Checkpoints of every family reload in fresh processes with the same logits, or fail loudly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from zoo import (
    FAMILIES,
    LINEAR_SHAPES,
    REPRESENTATIVE,
    SHAPES,
    attention_shapes,
    compressed,
    logits,
    stored,
    tokens,
    write,
)

from compressor.modeling_compressor import FILE_NAME, CompressedModelForCausalLM
from compressor.patch.tree import specs

RELOAD = Path(__file__).parents[1] / "reload.py"
Results = dict[str, Any]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Tensor]]:
    """Every family with replacements of every part, also of attention: its directory and its logits in memory."""
    root = tmp_path_factory.mktemp("checkpoints")
    written = {}
    for number, family in enumerate(FAMILIES):
        model = compressed(family, (SHAPES if number % 4 else LINEAR_SHAPES) | attention_shapes(family))
        written[family] = (write(model, root / family), logits(model))
    return written


@pytest.fixture(scope="module")
def reload(
    checkpoints: dict[str, tuple[Path, Tensor]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Results]:
    """Reload all checkpoints in a fresh process, once for each way of doing it."""
    done: dict[str, Results] = {}

    def run(how: str) -> Results:
        if how not in done:
            place = tmp_path_factory.mktemp(how)
            directories = [str(checkpoints[family][0]) for family in (FAMILIES if how == "without" else REPRESENTATIVE)]
            outputs = place / "outputs.pt"
            torch.save({"directories": directories, "inputs": tokens(), "outputs": str(outputs)}, place / "job.pt")
            environment = {
                **os.environ,
                "HF_HUB_OFFLINE": "1",
                "HF_MODULES_CACHE": str(place / "modules"),
                "PYTHONPATH": str(RELOAD.parents[1]),
            }
            command = [sys.executable, str(RELOAD), how, str(place / "job.pt")]
            process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            assert process.returncode == 0, process.stderr
            done[how] = torch.load(outputs)
        return done[how]

    return run


@pytest.mark.parametrize(
    ("how", "family"),
    [
        *(("without", family) for family in FAMILIES),
        *((how, family) for how in ("before", "after") for family in REPRESENTATIVE),
    ],
)
def test_a_fresh_process_gives_the_same_logits(
    how: str, family: str, checkpoints: dict[str, tuple[Path, Tensor]], reload: Callable[[str], Results]
) -> None:
    directory, expected = checkpoints[family]
    torch.testing.assert_close(reload(how)[str(directory)], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_again_by_a_process_without_the_package(
    family: str, checkpoints: dict[str, tuple[Path, Tensor]], reload: Callable[[str], Results]
) -> None:
    directory, expected = checkpoints[family]
    again = Path(f"{directory}-again")
    torch.testing.assert_close(reload("without")[str(again)], expected, rtol=0, atol=1e-6)
    assert len(list(again.glob("*.safetensors"))) > 1
    assert (again / FILE_NAME).read_bytes() == (directory / FILE_NAME).read_bytes()
    first, second = (json.loads((place / "config.json").read_text()) for place in (directory, again))
    for key in ("quantization_config", "auto_map", "architectures", "model_type"):
        assert first[key] == second[key]
    assert {name: tensor.shape for name, tensor in stored(again).items()} == {
        name: tensor.shape for name, tensor in stored(directory).items()
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_neither_package_nor_trust_fails_loudly(
    family: str, checkpoints: dict[str, tuple[Path, Tensor]], reload: Callable[[str], Results]
) -> None:
    """Whatever flags are given: transformers itself advises ignore_mismatched_sizes=True where sizes do not fit."""
    plain, with_flag, without_note = reload("without")[f"{checkpoints[family][0]}-refused"]
    assert "trust_remote_code=True" in plain
    assert "trust_remote_code=True" in with_flag
    assert "size" in without_note  # the second guard, for readers that do not look into config.json


@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_model_of_the_config_has_the_compressed_shapes(
    family: str, checkpoints: dict[str, tuple[Path, Tensor]], reload: Callable[[str], Results]
) -> None:
    directory, _ = checkpoints[family]
    model = AutoModelForCausalLM.from_pretrained(directory)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    assert reload("without")[f"{directory}-shapes"] == shapes
    new = CompressedModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
    assert {name: parameter.shape for name, parameter in new.named_parameters()} == shapes


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_backbone_reloads_alone_and_in_a_causal_model(
    family: str, checkpoints: dict[str, tuple[Path, Tensor]], reload: Callable[[str], Results]
) -> None:
    directory, _ = checkpoints[family]
    expected, alone, within = reload("without")[f"{directory}-backbone"]
    assert torch.equal(alone, expected)
    assert torch.equal(within, expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_bare_backbone_loads(family: str, checkpoints: dict[str, tuple[Path, Tensor]]) -> None:
    directory, _ = checkpoints[family]
    whole = AutoModelForCausalLM.from_pretrained(directory)
    backbone = AutoModel.from_pretrained(directory)
    assert len(specs(backbone)) == len(SHAPES) + len(attention_shapes(family))
    expected = whole.base_model(tokens()).last_hidden_state
    torch.testing.assert_close(backbone(tokens()).last_hidden_state, expected, rtol=0, atol=1e-6)
