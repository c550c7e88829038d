"""The card (README.md) of an exported directory: what it is, how to run it, and what was measured before the export."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from huggingface_hub import ModelCardData

from compressor.report.card import TAGS, escape, limits, measured, metadata, title, with_metadata

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
    "onnx": """ONNX Runtime, greedy, with the key-value cache where the graph has one:

```python
import numpy as np
import onnxruntime
from transformers import AutoTokenizer

session = onnxruntime.InferenceSession("DIRECTORY/model.onnx")
tokenizer = AutoTokenizer.from_pretrained("DIRECTORY")
shapes = {entry.name: entry.shape for entry in session.get_inputs()}
names = [entry.name for entry in session.get_outputs()]
past = {name: np.zeros((1, s[1], 0, s[3]), np.float32) for name, s in shapes.items() if name.startswith("past")}
ids = tokens = tokenizer("It was", return_tensors="np")["input_ids"]
for _ in range(20):
    positions = np.arange(ids.shape[1] - tokens.shape[1], ids.shape[1])[None]
    feeds = {"input_ids": tokens, "attention_mask": np.ones_like(ids), "position_ids": positions, **past}
    outputs = dict(zip(names, session.run(names, {name: feeds[name] for name in shapes})))
    ids = np.concatenate([ids, outputs["logits"][:, -1:].argmax(-1)], axis=1)
    past = {name: outputs[name.replace("past_key_values", "present")] for name in past}
    tokens = ids[:, -1:] if past else ids
print(tokenizer.decode(ids[0]))
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
