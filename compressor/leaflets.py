"""The card (README.md) of an exported directory: what it is, how to run it, and what was measured before the export."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from huggingface_hub import ModelCardData

from compressor.card import TAGS, escape, limits, measured, metadata, title, with_metadata

Record = Mapping[str, Any]
FORMS = {"hf-dense": "a stock checkpoint", "onnx": "an ONNX graph", "vllm": "a checkpoint for vLLM"}
AFTERWORD = (
    "This table is of the compressed checkpoint; in this form the outputs are the same, size and speed are not.\n"
)
RUNNING = {
    "hf-dense": """Stock transformers, no code beside the weights:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("DIRECTORY")
tokenizer = AutoTokenizer.from_pretrained("DIRECTORY")
```
""",
    "vllm": """Written for vLLM's DeciLMForCausalLM (`nemotron-nas`), after its source. **It has not been run in vLLM.**
`--trust-remote-code` runs `configuration_decilm.py`, which only reads the widths of the blocks:

```
vllm serve DIRECTORY --trust-remote-code
```
""",
    "onnx": """ONNX Runtime:

```python
import onnxruntime
from transformers import AutoTokenizer

session = onnxruntime.InferenceSession("DIRECTORY/model.onnx")
tokenizer = AutoTokenizer.from_pretrained("DIRECTORY")
print([entry.name for entry in session.get_inputs()])
```
""",
}


def leaflet(report: Record, record: Record | None) -> str:
    """`report` is of the export, `record` of the compression, where that is known."""
    form, sizes = FORMS[report["to"]], report["parameters"]
    name = title(record["source"]) if record else "A compressed model"
    data = metadata(record) if record else ModelCardData(pipeline_tag="text-generation", tags=TAGS)
    data["library_name"] = "onnx" if report["to"] == "onnx" else "transformers"
    parts = [
        f"# {escape(name)}, compressed, as {form}\n",
        f"Written by `compress export --to {report['to']}` (compressor {escape(report['tool']['version'])}) from a "
        f"checkpoint whose feed-forward blocks were replaced in closed form. It computes the same: logits differ by "
        f"{report['checked']['logits_off']:.1g} of the largest, in float32. Parameters: source {sizes['source']:,}, "
        f"compressed {sizes['compressed']:,}, in this form {sizes['exported']:,}.\n",
        f"## Run\n\n{RUNNING[report['to']]}",
    ]
    if record:
        parts += [*measured(record), AFTERWORD, limits(record)]
    return with_metadata("\n".join(parts), data)
