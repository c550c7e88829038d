"""Load checkpoints in a fresh process: python reload.py HOW JOB; JOB is a file of directories, inputs and outputs.

HOW: without (the package cannot be imported), before (compressor is imported before transformers), after.
Saves {directory: logits}. `without` first loads every checkpoint without trusting its code and saves what was said as
{directory-refused: texts}; then it trusts it, saves each model again, in shards, and reloads that; builds a new model
of the config and saves its {directory-shapes: shapes}; and saves the bare backbone, and its last hidden states before
and after it was reloaded, alone and within a causal model, as {directory-backbone: three tensors}.
"""

from __future__ import annotations

import importlib.abc
import sys
from typing import Any


class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        if fullname.split(".")[0] == "compressor":
            raise ModuleNotFoundError(f"{fullname} is blocked")


HOW, JOB = sys.argv[1:]
if HOW == "without":
    sys.meta_path.insert(0, Blocker())
if HOW == "before":
    import compressor

    assert "torch" not in sys.modules, "import compressor must not import torch"
import torch  # noqa: E402
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM  # noqa: E402

if HOW == "after":
    import compressor  # noqa: F401


@torch.no_grad()
def run(directory: str, again: str | None = None) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True if HOW == "without" else None)
    if again is not None:
        model.save_pretrained(again, max_shard_size="20KB")
    logits: torch.Tensor = model(job["inputs"]).logits
    return logits


def refusal(directory: str, **flags: Any) -> str:
    try:
        AutoModelForCausalLM.from_pretrained(directory, **flags)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def new_shapes(directory: str) -> dict[str, torch.Size]:
    config = AutoConfig.from_pretrained(directory, trust_remote_code=True)
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    assert model(job["inputs"]).logits.isfinite().all()
    return {name: parameter.shape for name, parameter in model.named_parameters()}


@torch.no_grad()
def save_backbone(directory: str) -> list[torch.Tensor]:
    saved = f"{directory}-backbone"
    backbone = AutoModel.from_pretrained(directory, trust_remote_code=True)
    backbone.save_pretrained(saved)
    again = AutoModel.from_pretrained(saved, trust_remote_code=True)
    whole = AutoModelForCausalLM.from_pretrained(saved, trust_remote_code=True)
    return [model(job["inputs"]).last_hidden_state for model in (backbone, again, whole.base_model)]


torch.set_num_threads(1)
job = torch.load(JOB)
results: dict[str, Any] = {}
if HOW == "without":
    for directory in job["directories"]:
        config = AutoConfig.from_pretrained(directory)
        del config.transformers_weights
        flags: list[dict[str, Any]] = [{}, {"ignore_mismatched_sizes": True}, {"config": config}]
        results[f"{directory}-refused"] = [refusal(directory, **each) for each in flags]
for directory in job["directories"]:
    if HOW == "without":
        again = f"{directory}-again"
        results[directory] = run(directory, again)
        results[again] = run(again)
        results[f"{directory}-shapes"] = new_shapes(directory)
        results[f"{directory}-backbone"] = save_backbone(directory)
    else:
        results[directory] = run(directory)
torch.save(results, job["outputs"])
