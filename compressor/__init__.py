"""Make a language model smaller with a promise: this much smaller, and no worse than that.

    result = compressor.compress("gpt2", max_dppl=1.0, out="gpt2-lin")
    compressor.check("gpt2-lin").passed

does what the command `compress` does. The same in steps:

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

from typing import TYPE_CHECKING

from compressor.registration import register_when_transformers_loads
from compressor.runtime.lazy import offer

if TYPE_CHECKING:
    from compressor.evaluate.remembered import evaluate
    from compressor.export.exporter import export
    from compressor.export.hub import push
    from compressor.measure.profile import measure
    from compressor.models.load import load_model as load
    from compressor.models.writer import Writer
    from compressor.pipelines.api import Compression, Result, check, compress
    from compressor.pipelines.steps import apply, save
    from compressor.plan.api import plan
    from compressor.plan.choices import Choices
    from compressor.plan.shapes import Shape
    from compressor.runtime.context import RunContext
    from compressor.runtime.errors import BudgetError, InputError
    from compressor.text import load_text

__version__ = "0.1.0"
__all__ = [
    "BudgetError",
    "Choices",
    "Compression",
    "InputError",
    "Result",
    "RunContext",
    "Shape",
    "Writer",
    "__version__",
    "apply",
    "check",
    "compress",
    "evaluate",
    "export",
    "load",
    "load_text",
    "measure",
    "plan",
    "push",
    "save",
]

register_when_transformers_loads()
# `evaluate`, `export`, `measure` and `plan` are rooms that can be called.
offer(
    __name__,
    {
        "BudgetError": "runtime.errors",
        "Choices": "plan.choices",
        "Compression": "pipelines.api",
        "InputError": "runtime.errors",
        "Result": "pipelines.api",
        "RunContext": "runtime.context",
        "Shape": "plan.shapes",
        "Writer": "models.writer",
        "apply": "pipelines.steps",
        "check": "pipelines.api",
        "compress": "pipelines.api",
        "evaluate": "evaluate",
        "export": "export",
        "load": "models.load:load_model",
        "load_text": "text",
        "measure": "measure",
        "plan": "plan",
        "push": "export.hub",
        "save": "pipelines.steps",
    },
)
