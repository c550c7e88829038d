"""The model card (README.md) of a compressed checkpoint: metadata for the Hub, and what a reader wants to know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from huggingface_hub import ModelCardData

from compressor.report.card_metadata import list_problems
from compressor.report.markup import last_part
from compressor.report.scores import harmless, list_scores, name_text, plain, texts_of, words_of
from compressor.report.tables import name_replacement, task_row, text_row
from compressor.runtime.card_rules import carry_over
from compressor.runtime.errors import visible
from compressor.runtime.names import UNNAMED
from compressor.runtime.network import is_hub_id, is_repo_id

PICTURE = "figures/depth.png"
TAGS = ["compressor", "compressed", "linear-ffn"]
# Of the four relations that the Hub knows this is the nearest: the same model in fewer bytes, made without training.
# A finetune would have been trained; and config.json has a quantization_config, which the Hub reads the same way.
RELATION = "quantized"
Record = Mapping[str, Any]


def card(report: Record, *, picture: bool = False, repo: str | None = None) -> str:
    """What it is, what was measured, what changed, how to load it. Sections without a measurement are left out.

    `picture`: the profile lies beside it. `repo`: where it will stand, for the examples to be copied from.
    """
    place = repo or "DIRECTORY"
    sections = [*opening(report), *measured(report), *loading(report, place), *blocks(report, picture)]
    text = "\n".join([*sections, *reproducing(report), limits(report)])
    return with_metadata(text, metadata(report))


def with_metadata(text: str, data: ModelCardData) -> str:
    """The whole card. Metadata that the Hub would object to must not cost the result of a long run: it is left out."""
    content = f"---\n{data.to_yaml()}\n---\n\n{text}"
    if not list_problems(content):
        return content
    plain_data = ModelCardData(library_name=data.library_name, pipeline_tag=data.pipeline_tag, tags=TAGS)
    return f"---\n{plain_data.to_yaml()}\n---\n\n{text}"


def metadata(report: Record) -> ModelCardData:
    source = report["source"]
    base = base_of(source)
    scores = list_scores(report)
    data = ModelCardData(
        base_model=base,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=[*TAGS, *([str(source["model_type"])] if is_repo_id(source.get("model_type")) else [])],
        model_name=harmless(f"{title(source)}-compressed") if scores else None,
        eval_results=scores or None,
        **carry_over(source.get("card") or {}),
    )
    if base:
        data["base_model_relation"] = RELATION
    return data


def base_of(source: Record) -> str | None:
    """The repository that the source is, or that it says it was made from; never a directory."""
    if is_hub_id(source["model"], source.get("revision")):
        return str(source["model"])
    named = (source.get("card") or {}).get("base_model")
    return named if is_repo_id(named) else None


def title(source: Record) -> str:
    """A card is made to be published: no local paths."""
    name = str(source["model"])
    return plain(name if is_hub_id(name, source.get("revision")) else last_part(name))


def opening(report: Record) -> list[str]:
    source = report["source"]
    name, base = title(source), base_of(source)
    origin = f"[{escape(base)}](https://huggingface.co/{base})" if base == name else escape(name)
    lines = [
        f"# {escape(name)}, compressed\n",
        f"A smaller copy of {origin} ({escape(source.get('model_type'))}), made by compressor "
        f"{escape(report['tool'].get('version'))}: some of its feed-forward blocks are replaced by smaller maps "
        "in closed form. Nothing was trained.\n",
    ]
    if "perplexity" in report:
        size = report["parameters"]
        lines.append(
            f"**{size['removed_fraction']:.1%} of the parameters are gone** ({size['before']:,} → {size['after']:,}), "
            f"and {'; '.join(map(promise, texts_of(report).items()))}.\n"
        )
    return lines


def promise(item: tuple[str, Record]) -> str:
    name, found = item
    on = "" if name == UNNAMED else f" on {escape(name)}"
    return f"perplexity{on} went from {found['baseline']:.3f} to {found['compressed']:.3f} ({found['delta']:+.3f})"


def measured(report: Record) -> list[str]:
    """A table of everything that was measured of both models, and what the budget was."""
    if "perplexity" not in report:
        return ["## Measured\n\nNothing: it was saved through the Python API, without a budget.\n"]
    texts = texts_of(report)
    found = [text_row(item) for item in texts.items()]
    if list(texts) == [UNNAMED]:
        found[0][0] = "perplexity"
    found += [task_row(item) for item in (report.get("tasks") or {}).items()]
    size = report["parameters"]
    found.append(["parameters", f"{size['before']:,}", f"{size['after']:,}", f"−{size['removed_fraction']:.2%}"])
    found += speed_rows(report.get("speed") or {})
    rows = ["| | source | compressed | change | 95 % interval | limit | |", "|---|---:|---:|---:|---|---:|---|"]
    rows += [f"| {' | '.join([escape(row[0]), *row[1:]])} {'| ' * (7 - len(row))}|" for row in found]
    confidence = report["budget"]["confidence"]
    held = "".join(f"- {budget_line(item, confidence)}\n" for item in texts.items())
    return ["## Measured\n", "\n".join(rows) + "\n", held, where_line(report)]


def budget_line(item: tuple[str, Record], confidence: float) -> str:
    name, found = item
    on = "" if name == UNNAMED else f" on {escape(name)}"
    end = f"the upper end of the rise at {confidence:.0%}" if confidence else "the rise"
    return (
        f"Budget: perplexity{on} may rise by {found['max_dppl']:.3f} at most ({escape(found['asked'])} was asked for); "
        f"{end} is {found['delta_upper']:+.3f}, {'inside' if found['passed'] else 'OUTSIDE'}."
    )


def where_line(report: Record) -> str:
    names = ", ".join(name_text(word) for words in words_of(report).values() for word in words)
    found, looks = report["perplexity"], report.get("verification_looks")
    looked = f", and which was looked at {looks} times" if isinstance(looks, int) and looks > 1 else ""
    return (
        f"Perplexity is measured on {found['tokens']:,} tokens of {escape(names)} in windows of {found['seq_len']} "
        f"(tokens' sha256 `{short_hash(report['text']['verification']['sha256'])}`), which nothing was fitted "
        f"on{looked}. Intervals are paired bootstraps over windows, or over a task's documents.\n"
    )


def speed_rows(speed: Record) -> list[list[str]]:
    if not speed:
        return []
    before, after = speed["flops_before"], speed["flops_after"]
    rows = [["FLOPs per token", f"{before:,}", f"{after:,}", f"{speed['flops_ratio']:.3f}× fewer"]]
    for key, name in (("prefill", "prefill, tokens/s"), ("decode", "decoding, tokens/s")):
        if speed[f"{key}_ratio"]:
            figures = [f"{speed[f'{key}_{when}']:,.0f}" for when in ("before", "after")]
            rows.append([name, *figures, f"{speed[f'{key}_ratio']:.3f}× as fast"])
    return rows


def blocks(report: Record, picture: bool) -> list[str]:
    shown = f"![R²_lin of every block over depth]({PICTURE})\n\n" if picture else ""
    what = (
        "R²_lin is how much of a block's output the best linear map explains, on rows that it was not fitted on.\n"
        if "perplexity" in report
        else ""
    )
    return [f"## Blocks\n\n{shown}{what}{FORMS}\n{block_list(report['blocks'])}"]


FORMS = """Now: `linear` is one matrix, `lowrank 48` two thin ones, `pruned 472` so many of the block's own neurons,
`hybrid 472 rank 48` both, `bias` a constant; a dot is a block that stayed as it was.
"""


def block_list(entries: list[Any]) -> str:
    if not any("r2_lin" in block for block in entries):
        rows = ["| block | now |", "|---|---|"]
        rows += [f"| {escape(block['path'])} | {escape(name_replacement(block['replacement']))} |" for block in entries]
        return "\n".join(rows) + "\n"
    rows = ["| block | R²_lin | stream R² | verdict | now | parameters |", "|---|---|---|---|---|---|"]
    for block in entries:
        before, after = block["params_before"], block["params_after"]
        size = f"{before:,}" if before == after else f"{before:,} → {after:,}"
        figures = f"{block['r2_lin']:.3f} | {block['r2_stream']:.3f} | {escape(block['verdict'])}"
        rows.append(f"| {block['index']} | {figures} | {escape(name_replacement(block['replacement']))} | {size} |")
    return "\n".join(rows) + "\n"


def loading(report: Record, place: str) -> list[str]:
    exports = report["source"].get("exports") or []
    return [LOADING.replace("DIRECTORY", place), GGUF if "gguf" in exports else DENSE]


LOADING = """## Load

With transformers alone; it runs `modeling_compressor.py`, which comes with the weights:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("DIRECTORY", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("DIRECTORY")
start = tokenizer("It was", return_tensors="pt")
print(tokenizer.decode(model.generate(**start, max_new_tokens=40)[0]))
```

With the package `compressor`, running no code that comes with the weights:

```python
import compressor
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("DIRECTORY")
```

Loading it with neither fails with an error; it never loads with random blocks.
"""
GGUF = """Exported from a local copy, as a file that llama.cpp reads:

```
compress export DIR --to gguf --out model.gguf
```

`--to hf-dense` and `--to onnx` write it for others.
"""
DENSE = """Exported from a local copy, as a checkpoint that needs neither the package nor code of its own:

```
compress export DIR --to hf-dense --out DENSE_DIR
```

`--to onnx` and, for Llama-type models, `--to gguf` write it for others.
"""


def reproducing(report: Record) -> list[str]:
    if "perplexity" not in report:
        return []
    source = report["source"]
    revision = f" at revision {escape(source['revision'])}" if source.get("revision") else ""
    return [
        "## Reproduce\n",
        "```\ncompress --recipe recipe.yaml --out NEW_DIR   # the same weights from the same source and text\n"
        "compress check DIR                            # measure both models again\n```\n",
        f"The source{revision} has weights of sha256 `{short_hash(source['weights_sha256'])}`. `recipe.yaml` has every "
        "setting, `compression.json` every measurement, and `report.html` shows them.\n",
    ]


def limits(report: Record) -> str:
    license = carry_over(report["source"].get("card") or {}).get("license")
    lines = [
        "It knows what its source knows, or less: whatever is said of the source's uses, biases and risks holds here.",
        "What was not measured is not promised: other languages, subjects, lengths and tasks can have lost more."
        if "perplexity" in report
        else "How much it lost is not known: measure it before it is used.",
        f"The licence ({license if isinstance(license, str) else ', '.join(license)}) is the source's."
        if license
        else "The source's licence is not known here; find out before passing this on.",
    ]
    return "## Limits\n\n" + "".join(f"- {line}\n" for line in lines)


def short_hash(digest: Any) -> str:
    """The beginning of a hash; inside backticks nothing can be escaped, so nothing but its digits gets there."""
    return "".join(c for c in str(digest)[:16] if c in "0123456789abcdef") + "…"


def escape(text: Any) -> str:
    """A name or path as plain Markdown text."""
    return "".join(f"\\{c}" if c in "\\`*_{}[]<>()#+!|~&$" else c for c in " ".join(visible(str(text)).split()))
