"""Make a language model smaller with a promise: this much smaller, and no worse than that.

    model, tokenizer = compressor.load("gpt2")
    text = compressor.load_text("wikitext2", tokenizer, seq_len=512)
    profile = compressor.measure(model, text)
    plan = compressor.plan(model, profile, text, max_dppl=1.0)
    compressor.apply(model, plan, text)
    compressor.save(model, tokenizer, "gpt2-lin")
    compressor.export("gpt2-lin", "onnx", "gpt2-onnx")

Importing the package is enough for `from_pretrained` to load compressed checkpoints; torch is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from compressor.registration import register_when_transformers_loads

if TYPE_CHECKING:
    from compressor.evaluating import evaluate
    from compressor.exporting import export
    from compressor.forms import Form
    from compressor.measuring import measure
    from compressor.models import load
    from compressor.planning import apply, plan
    from compressor.pushing import push
    from compressor.saving import save
    from compressor.text import load_text

__version__ = "0.1.0"
__all__ = ["Form", "__version__", "apply", "evaluate", "export", "load", "load_text", "measure", "plan", "push", "save"]

_HOMES = {
    "Form": "compressor.forms",
    "apply": "compressor.planning",
    "evaluate": "compressor.evaluating",
    "export": "compressor.exporting",
    "load": "compressor.models",
    "load_text": "compressor.text",
    "measure": "compressor.measuring",
    "plan": "compressor.planning",
    "push": "compressor.pushing",
    "save": "compressor.saving",
}

register_when_transformers_loads()


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'compressor' has no attribute {name!r}")
