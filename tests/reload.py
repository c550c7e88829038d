"""Load checkpoints in a fresh process: python reload.py HOW JOB; JOB is a file of directories, inputs and outputs.

HOW: without (the package cannot be imported), before (compressor is imported before transformers), after.
Saves {directory: logits}. `without` first loads every checkpoint without trusting its code and saves what was said as
{directory-refused: text}; then it trusts it, saves each model again, in shards, and reloads that.
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
from transformers import AutoModelForCausalLM  # noqa: E402

if HOW == "after":
    import compressor  # noqa: F401


@torch.no_grad()
def run(directory: str, again: str | None = None) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True if HOW == "without" else None)
    if again is not None:
        model.save_pretrained(again, max_shard_size="20KB")
    logits: torch.Tensor = model(job["inputs"]).logits
    return logits


def refusal(directory: str) -> str:
    try:
        AutoModelForCausalLM.from_pretrained(directory)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


torch.set_num_threads(1)
job = torch.load(JOB)
results: dict[str, torch.Tensor | str] = {}
if HOW == "without":
    results |= {f"{directory}-refused": refusal(directory) for directory in job["directories"]}
for directory in job["directories"]:
    if HOW == "without":
        again = f"{directory}-again"
        results[directory] = run(directory, again)
        results[again] = run(again)
    else:
        results[directory] = run(directory)
torch.save(results, job["outputs"])
