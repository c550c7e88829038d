"""Load checkpoints in a fresh process: python reload.py HOW JOB; JOB is a file of directories, inputs and outputs.

HOW: trust (the package cannot be imported), before (compressor is imported before transformers), after, neither.
Saves {directory: logits, or the error as text}. `trust` also saves each model again, in shards, and reloads that.
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
if HOW in ("trust", "neither"):
    sys.meta_path.insert(0, Blocker())
if HOW == "before":
    import compressor

    assert "torch" not in sys.modules, "import compressor must not import torch"
import torch  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

if HOW == "after":
    import compressor  # noqa: F401


@torch.no_grad()
def run(directory: str, again: str | None) -> torch.Tensor | str:
    try:
        model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True if HOW == "trust" else None)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if again is not None:
        model.save_pretrained(again, max_shard_size="20KB")
    logits: torch.Tensor = model(job["inputs"]).logits
    return logits


torch.set_num_threads(1)
job = torch.load(JOB)
results = {}
for directory in job["directories"]:
    again = f"{directory}-again" if HOW == "trust" else None
    results[directory] = run(directory, again)
    if again is not None:
        results[again] = run(again, None)
torch.save(results, job["outputs"])
