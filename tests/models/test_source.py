"""The identity of a model in cache keys: it follows the present weights, modules and code, and is hashed once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from planted import planted_model, random_text
from torch import nn
from zoo import random_replacement, save_tiny, tiny_model

import compressor
from compressor.modeling_compressor import Replacement
from compressor.models import source as sources
from compressor.models.blocks import find_blocks
from compressor.models.load import load_model
from compressor.models.source import identify, source_of
from compressor.patch.tree import identify_patched, patch, patched, unpatch
from compressor.plan.shapes import Shape
from compressor.plan.space import prepare_search
from compressor.plan.trials import TrialRunner
from compressor.runtime import environment
from compressor.runtime.cache import Cache
from compressor.runtime.context import RunContext
from compressor.runtime.progress import Progress

TEXT = random_text()
FOREIGN = """
from transformers import LlamaConfig, LlamaForCausalLM
from .parts import SCALE
class ForeignConfig(LlamaConfig):
    model_type = "foreign"
class ForeignModel(LlamaForCausalLM):
    config_class = ForeignConfig
    scale = SCALE
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama that no test changes."""
    directory = tmp_path_factory.mktemp("source") / "llama"
    save_tiny("llama", directory)
    return directory


def fitted(model: Any, index: int) -> Replacement:
    return random_replacement(find_blocks(model)[index], Shape(4), model)


def in_place(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] += 1


def through_data(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] += 1


def through_numpy(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight.detach().numpy()[3, 5] += 1


def swap_rows(model: Any) -> None:
    rows = model.model.layers[1].mlp.up_proj.weight.data
    rows[[0, 1]] = rows[[1, 0]]


def negate(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight.data.neg_()


def other_storage(model: Any) -> None:
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data = torch.zeros_like(weight)


def other_parameter(model: Any) -> None:
    model.model.norm.weight = nn.Parameter(torch.zeros_like(model.model.norm.weight))


def buffer(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(2)  # is in no checkpoint


def activation(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = nn.ReLU()  # has no weights


def replacement(model: Any) -> None:
    patch(model, find_blocks(model), {1: fitted(model, 1)})


CHANGES: list[Callable[[Any], None]] = [
    *(in_place, through_data, through_numpy, swap_rows, negate, other_storage, other_parameter),
    *(buffer, activation, replacement),
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("loaded_here", [True, False])
def test_identity_follows_the_present_model(saved: Path, change: Callable[[Any], None], loaded_here: bool) -> None:
    model = load_model(str(saved))[0] if loaded_here else tiny_model("llama")
    before, source = identify(model), source_of(model)
    assert identify(model) == before
    change(model)
    assert identify(model) != before
    if loaded_here:
        assert source_of(model) == source  # it still came from there
        assert before["weights"] == source.weights_sha256


def test_what_was_undone_is_the_model_that_was(saved: Path) -> None:
    model, _ = load_model(str(saved))
    blocks, before = find_blocks(model), identify(model)
    module = fitted(model, 1)
    outside = identify_patched(model, {1: module})
    with patched(model, blocks, {1: module}):
        assert identify(model) != before
    assert identify(model) == before
    assert identify_patched(model, {1: module}) == outside
    originals = patch(model, blocks, {1: module})
    first = identify(model)
    with torch.no_grad():
        module.output_bias.add_(1)
    assert identify(model) not in (first, before)
    unpatch(model, originals)
    assert identify(model) == before


def test_weights_on_disk_are_those_of_the_files_until_they_change(saved: Path) -> None:
    model, _ = load_model(str(saved), low_memory=True)
    before = identify(model)
    assert before == identify(load_model(str(saved))[0])  # what was measured either way serves both
    tokens = torch.arange(8)[None]
    model(input_ids=tokens)
    assert identify(model) == before
    originals = patch(model, find_blocks(model), {1: fitted(model, 1)})
    replaced = identify(model)
    assert replaced["weights"] != before["weights"]
    model(input_ids=tokens)
    assert identify(model) == replaced
    unpatch(model, originals)
    assert identify(model) == before
    with torch.no_grad():
        model.model.norm.weight.add_(1)  # small, so it stays in memory once it was read
    assert identify(model)["weights"] != before["weights"]


def test_the_way_attention_is_computed_belongs_to_the_identity(saved: Path) -> None:
    model, _ = load_model(str(saved))
    found = []
    for way in ("eager", "sdpa"):
        model.set_attn_implementation(way)
        found.append(identify(model))
    assert found[0] != found[1]
    assert {k: v for k, v in found[0].items() if k != "attention"} == {
        k: v for k, v in found[1].items() if k != "attention"
    }


def test_code_that_came_with_a_model_belongs_to_its_identity(saved: Path, tmp_path: Path) -> None:
    """Also a file that the model's own file only imports."""
    found = []
    for scale in (1, 2, 1):
        directory = Path(shutil.copytree(saved, tmp_path / str(len(found)) / "foreign"))
        config = json.loads((directory / "config.json").read_text())
        config["auto_map"] = {
            "AutoConfig": "modeling_foreign.ForeignConfig",
            "AutoModelForCausalLM": "modeling_foreign.ForeignModel",
        }
        config["model_type"] = "foreign"
        (directory / "config.json").write_text(json.dumps(config))
        (directory / "modeling_foreign.py").write_text(FOREIGN)
        (directory / "parts.py").write_text(f"SCALE = {scale}\n")
        found.append(identify(load_model(str(directory), trust_remote_code=True)[0]))
    assert None is not found[0]["code"] != found[1]["code"]
    assert found[0]["code"] == found[2]["code"]
    assert found[0]["weights"] == found[1]["weights"]
    assert identify(load_model(str(saved))[0])["code"] is None


def kept(directory: Path) -> RunContext:
    return RunContext(cache=Cache(directory, Progress()))


def figures(profile: Any) -> list[float]:
    return [block.r2_lin for block in profile.blocks]


def test_another_text_or_changed_weights_never_get_a_kept_profile(tmp_path: Path) -> None:
    model, other = tiny_model("gpt2"), random_text(seed=1)
    first = figures(compressor.measure(model, TEXT, context=kept(tmp_path)))
    second = figures(compressor.measure(model, other, context=kept(tmp_path)))
    assert second == figures(compressor.measure(model, other)) != first
    assert figures(compressor.measure(model, TEXT, context=kept(tmp_path))) == first
    for block in model.transformer.h:
        block.mlp.c_fc.weight.data.mul_(3)
    changed = figures(compressor.measure(model, TEXT, context=kept(tmp_path)))
    assert changed == figures(compressor.measure(model, TEXT)) != first


def test_an_applied_plan_is_another_model(saved: Path, tmp_path: Path) -> None:
    model, _ = load_model(str(saved))
    context = kept(tmp_path)
    profile = compressor.measure(model, TEXT, context=context)
    plan = compressor.plan(model, profile, TEXT, max_dppl="50%", context=context)
    compressor.apply(model, plan, TEXT, context=context)
    again = figures(compressor.measure(model, TEXT, context=context))
    assert again == figures(compressor.measure(model, TEXT)) != figures(profile)


@pytest.mark.parametrize("loaded_here", [True, False])
def test_one_plan_hashes_the_model_once(
    saved: Path, tmp_path: Path, loaded_here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(str(saved))[0] if loaded_here else tiny_model("llama")
    hashed: list[str] = []
    digest = sources.digest
    monkeypatch.setattr(sources, "digest", lambda tensors: hashed.append("") or digest(tensors))
    context = kept(tmp_path)
    profile = compressor.measure(model, TEXT, context=context)
    compressor.plan(model, profile, TEXT, max_dppl="50%", context=context)
    assert len(hashed) <= (0 if loaded_here else 2)  # of what is stored, and of all that counts


class Clock:
    """Counts how often it is asked for the time of a replacement."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __call__(self, model: Any, block: Any, module: Any) -> bool:
        self.asked.append(block.index)
        return False


def test_the_clock_is_asked_again_on_another_machine_and_for_another_kind_of_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("compressor.plan.trials.is_slower", clock)
    model = planted_model(ffn(), ffn(), ffn(narrow=True))

    def ask() -> list[int]:
        clock.asked.clear()
        runner = runner_of(model, kept(tmp_path))
        for index in range(3):
            runner.is_slower(Shape(), index, dict.fromkeys(range(3), Shape()))
        return list(clock.asked)

    assert ask() == [0, 2]  # the second block is built like the first, the third is not
    assert ask() == []
    monkeypatch.setattr(environment.platform, "node", lambda: "another")
    assert ask() == [0, 2]
    monkeypatch.setattr(environment, "processor_name", lambda: "another")
    assert ask() == [0, 2]


def ffn(narrow: bool = False) -> nn.Module:
    """A feed-forward block of GPT-2, as it is or half as wide."""
    mlp: nn.Module = tiny_model("gpt2", n_inner=24 if narrow else 48).transformer.h[0].mlp
    return mlp


def runner_of(model: Any, context: RunContext) -> TrialRunner:
    return prepare_search(model, TEXT, context).runner
