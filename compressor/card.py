"""The model card (README.md) of a compressed checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from compressor.errors import visible
from compressor.reporting import name_replacement, parameters_line, speed_lines, task_lines, text_lines


def card(report: Mapping[str, Any]) -> str:
    """What it is, how to load it, what was measured, what changed. Sections without a measurement are left out."""
    source = Path(report["source"]["model"])
    metadata: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if not source.is_absolute() and str(source) != "demo":  # a hub id
        metadata["base_model"] = str(source)
    metadata["tags"] = ["compressor", "compressed", "linear-ffn"]
    title = source.name if source.is_absolute() else str(source)  # a card is made to be published: no local paths
    parts = [
        f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---\n",
        f"# {escape(title)}, compressed\n",
        "Some feed-forward blocks of the source model are replaced by far smaller maps in closed form "
        f"(compressor {report['tool']['version']}). Nothing was trained.\n",
    ]
    if "perplexity" in report:
        sizes = [parameters_line(report["parameters"]), *speed_lines(report)]
        lines = [*text_lines(report), *sizes, *map(escape, task_lines(report))]
        parts.append("## Measured\n\n" + "".join(f"- {line}\n" for line in lines))
        text = report["text"]["verification"]
        names = ", ".join(Path(name).name for name in text["source"].split(", "))  # no local paths
        parts.append(f"Verification text: {escape(names)} (tokens' sha256 `{text['sha256'][:16]}…`).\n")
    parts.append(LOADING)
    parts.append("## Blocks\n\n" + block_list(report["blocks"]))
    if "perplexity" in report:
        parts.append("## Reproduce\n\n```\ncompress --recipe recipe.yaml --out NEW_DIRECTORY\n```\n")
    return "\n".join(parts)


LOADING = """## Load

Without any package beside transformers (runs `modeling_compressor.py` from this directory):

```python
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(DIRECTORY, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(DIRECTORY)
```

With the package, running no code from this directory:

```python
import compressor
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(DIRECTORY)
```

Loading it with neither fails with an error; it never loads with random blocks.
"""


def block_list(blocks: list[Any]) -> str:
    rows = ["| block | R²_lin | stream R² | verdict | now | parameters |", "|---|---|---|---|---|---|"]
    for block in blocks:
        now = name_replacement(block["replacement"])
        if "r2_lin" in block:
            before, after = block["params_before"], block["params_after"]
            size = f"{before:,}" if before == after else f"{before:,} → {after:,}"
            figures = f"{block['r2_lin']:.3f} | {block['r2_stream']:.3f} | {block['verdict']}"
            rows.append(f"| {block['index']} | {figures} | {now} | {size} |")
        else:
            rows.append(f"| `{block['path']}` | | | | {now} | |")
    return "\n".join(rows) + "\n"


def escape(text: str) -> str:
    """A name or path as plain Markdown text."""
    return "".join(f"\\{c}" if c in "\\`*_{}[]<>()#+!|~" else c for c in " ".join(visible(str(text)).split()))
