"""The model card (README.md) of a compressed checkpoint or of an export: metadata for the Hub, then what a reader wants
to know: what it is, what was measured, how to load it, what changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from huggingface_hub import EvalResult, ModelCardData

from compressor.report.card_metadata import clean_name, list_problems, list_scores, name_text, remove_markup, text_words
from compressor.report.export_info import origin_lines, say_check, stored_lines
from compressor.report.export_record import ExportRecord
from compressor.report.fidelity import format_nats
from compressor.report.formats import (
    SAME_SPEED,
    asked_size,
    cache_change,
    last_part,
    name_replacement,
    name_verdict,
    num,
    percent,
    ratio_interval,
    say_cache,
    say_share,
    say_weights,
)
from compressor.report.healing import NO_TRAINING, capitalised
from compressor.report.record import Record, SavedRecord
from compressor.report.record_parts import Block, SavedBlock, Source, TextResult, present
from compressor.report.speed_parts import Speed
from compressor.report.tables import fidelity_rows, task_row, text_row
from compressor.report.unverified import is_unverified, selection_lines
from compressor.runtime.card_rules import carry_over
from compressor.runtime.errors import visible
from compressor.runtime.figures import count, signed
from compressor.runtime.names import NO_LIMIT, UNNAMED
from compressor.runtime.network import is_hub_id, is_repo_id

UNVERIFIED = (
    "That is the text that its plan was searched on. It was made step by step in Python and not measured on the "
    "verification text: measure it with `compress check` before it is used."
)
PICTURE = "figures/depth.png"
TAGS = ["compressor", "compressed", "linear-ffn"]
# Of the four relations that the Hub knows this is the nearest: the same model in fewer bytes, made without training.
# A finetune would have been trained; and config.json has a quantization_config, which the Hub reads the same way.
RELATION = "quantized"


def card(record: Record | SavedRecord, *, picture: bool = False, repo: str | None = None) -> str:
    """The card of a compressed checkpoint. Sections without a measurement are left out.

    `picture`: whether the figure of the profile lies beside it. `repo`: the repository that the examples load from.
    """
    sections = [
        *opening_section(record),
        *measured_section(record),
        *loading_section(record, repo or "DIRECTORY"),
        *blocks_section(record, picture),
        *reproducing_section(record),
        limits_section(record),
    ]
    return with_metadata("\n".join(sections), card_metadata(record))


def export_card(
    export: ExportRecord, record: Record | SavedRecord | None, *, repo: str | None = None, file: str | None = None
) -> str:
    """The card of an export; `record` is of the compressed checkpoint, where it is at hand.

    `repo` is the repository that the examples load from, `file` the name of a GGUF file.
    """
    sizes = export.parameters
    origin = export.origin.source if export.origin else None
    source = record.source if record else origin
    name = title(source) if source else "A compressed model"
    if record or source is None:
        data = card_metadata(record) if record else ModelCardData(pipeline_tag="text-generation", tags=TAGS)
    else:
        data = source_metadata(source)
    data["library_name"] = {"onnx": "onnx", "gguf": "gguf"}.get(export.to, "transformers")
    off = export.checked.logits_off
    agreement = f"logits differ by {num(off, form='.1g')} of the largest, in float32" if off is not None else ""
    running = RUNNING[export.to].replace("FILE", file or "model.gguf")
    if repo is not None and export.to != "onnx":  # a graph is opened as a local file
        running = running.replace("DIRECTORY", repo)
    sections = [
        f"# {escape(name)}, compressed, as {EXPORT_FORMS[export.to]}\n",
        f"Written by `compress export --to {export.to}` (compressor {escape(export.tool.version)}) from a "
        f"checkpoint some of whose blocks were replaced in closed form. "
        f"{f'It computes the same: {agreement}. ' if agreement else ''}Parameters: "
        f"source {sizes.source:,}, compressed {sizes.compressed:,}, in this form {sizes.exported:,}.\n",
        f"## Run\n\n{running}",
    ]
    if not record:
        about = [*origin_lines(export), *stored_lines(export), *export.notes, say_check(export.checked)]
        sections.append("\n".join(["## What it is\n", *(f"- {escape(line)}" for line in about)]) + "\n")
    if record:
        sections += [*measured_section(record), EXPORT_NOTE, limits_section(record)]
    return with_metadata("\n".join(sections), data)


def with_metadata(text: str, data: ModelCardData) -> str:
    """The whole card. Metadata that the Hub would object to must not cost the result of a long run: it is left out."""
    content = f"---\n{data.to_yaml()}\n---\n\n{text}"
    if not list_problems(content):
        return content
    reduced = ModelCardData(library_name=data.library_name, pipeline_tag=data.pipeline_tag, tags=TAGS)
    return f"---\n{reduced.to_yaml()}\n---\n\n{text}"


def card_metadata(record: Record | SavedRecord) -> ModelCardData:
    return source_metadata(record.source, list_scores(record))


def source_metadata(source: Source, scores: Sequence[EvalResult] = ()) -> ModelCardData:
    """What the card says of the source, and what was measured."""
    base = base_of(source)
    data = ModelCardData(
        base_model=base,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=[*TAGS, *([source.model_type] if is_repo_id(source.model_type) else [])],
        model_name=remove_markup(f"{title(source)}-compressed") if scores else None,
        eval_results=list(scores) or None,
        **carry_over(source.card),
    )
    if base:
        data["base_model_relation"] = RELATION
    return data


def base_of(source: Source) -> str | None:
    """The repository that the source is, or that it says it was made from; never a directory."""
    if is_hub_id(source.model, source.revision):
        return source.model
    named = source.card.get("base_model")
    return named if is_repo_id(named) else None


def title(source: Source) -> str:
    """The source's name without local paths: a card is made to be published."""
    return clean_name(source.model if is_hub_id(source.model, source.revision) else last_part(source.model))


def opening_section(record: Record | SavedRecord) -> list[str]:
    source = record.source
    name, base = title(source), base_of(source)
    origin = f"[{escape(base)}](https://huggingface.co/{base})" if base == name else escape(name)
    lines = [
        f"# {escape(name)}, compressed\n",
        f"A smaller copy of {origin} ({escape(source.model_type)}), made by compressor "
        f"{escape(record.tool.version)}: {replaced_parts(record)} replaced by smaller maps "
        f"in closed form. {escape(trained_words(record))}\n",
    ]
    if isinstance(record, Record):
        size = record.parameters
        changes = "; ".join(change_of(name, text) for name, text in record.text_results().items())
        nearness = f" {record.fidelity}." if record.fidelity else ""
        cache = "".join(f" {sentence}" for sentence in say_cache(record.kv_cache))
        weights = say_weights(size, source.dtype)
        cost = f", and {changes}" if changes else ""
        lines.append(
            f"**{percent(size.removed_fraction)} of the parameters are gone** ({present(size.before):,} → "
            f"{present(size.after):,}{weights and f'; weights {weights}'}){cost}.{nearness}{cache}\n"
        )
    return lines


def trained_words(record: Record | SavedRecord) -> str:
    """What was trained, and on what; a model that was saved through the Python API does not say."""
    if not isinstance(record, Record) or record.healing is None:
        return NO_TRAINING
    texts = ", ".join(map(last_part, record.healing.text.split(", ")))
    return f"{capitalised(record.healing)} The text was {texts}."


def replaced_parts(record: Record | SavedRecord) -> str:
    """Which kinds of blocks were replaced, as the subject of a sentence."""
    if not any(block.replacement.kind != "keep" for block in record.attention):
        return "some of its feed-forward blocks are"
    if not any(block.replacement.kind != "keep" for block in record.blocks):
        return "some of its attention is"
    return "some of its feed-forward blocks and some of its attention are"


def change_of(name: str, text: TextResult) -> str:
    on = "" if name == UNNAMED else f" on {escape(name)}"
    return f"perplexity{on} went from {text.baseline:.3f} to {text.compressed:.3f} ({signed(text.delta)})"


def measured_section(record: Record | SavedRecord) -> list[str]:
    """A table of everything that was measured of both models, and what the budget was."""
    if not isinstance(record, Record):
        return ["## Measured\n\nNothing: it was saved through the Python API, without a budget.\n"]
    if is_unverified(record):
        found = "".join(f"- {escape(line)}\n" for line in selection_lines(record))
        return [f"## Measured\n\n{found}\n{UNVERIFIED}\n"]
    texts, size = record.text_results(), record.parameters
    rows = [text_row(name, text) for name, text in texts.items()]
    if list(texts) == [UNNAMED]:
        rows[0][0] = "perplexity"
    rows += fidelity_table_rows(texts)
    rows += [task_row(name, task) for name, task in record.tasks.items()]
    counts = [f"{present(size.before):,}", f"{present(size.after):,}", signed(-present(size.removed_fraction), ".2%")]
    rows.append(["parameters", *counts])
    if record.kv_cache and record.kv_cache.shrinks:
        sizes = [present(record.kv_cache.bytes_per_token_before), present(record.kv_cache.bytes_per_token_after)]
        rows.append(["key-value cache, bytes per token", *map("{:,}".format, sizes), cache_change(record.kv_cache)])
    rows += speed_rows(record.speed) if record.speed else []
    table = ["| | source | compressed | change | 95 % interval | limit | |", "|---|---:|---:|---:|---|---:|---|"]
    table += [f"| {' | '.join([escape(row[0]), *row[1:]])} {'| ' * (7 - len(row))}|" for row in rows]
    confidence = present(record.budget).confidence
    budgets = "".join(f"- {line}\n" for name, text in texts.items() for line in budget_lines(name, text, confidence))
    if record.budget and record.budget.remove:
        asked = escape(asked_size(record.budget.remove))
        budgets += f"- Size: {present(size.removed):,} parameters are gone ({asked}).\n"
    return ["## Measured\n", "\n".join(table) + "\n", budgets, provenance_line(record)]


def budget_lines(name: str, text: TextResult, confidence: float) -> list[str]:
    """What was allowed on a text, and whether what was measured is inside."""
    on = "" if name == UNNAMED else f" on {escape(name)}"
    end = f"the upper end of the rise at {confidence:.0%}" if confidence else "the rise"
    lines = []
    if text.max_dppl is None:
        lines.append(f"Budget: {NO_LIMIT} on perplexity{on} was asked for; {end} is {signed(text.delta_upper)}.")
    else:
        share = say_share(text.asked, text.baseline)
        asked = f" ({escape(share)} was asked for)" if share else ""
        lines.append(
            f"Budget: perplexity{on} may rise by {text.max_dppl:.3f} at most{asked}; "
            f"{end} is {signed(text.delta_upper)}, {'inside' if text.passed else 'OUTSIDE'}."
        )
    found = text.fidelity
    if found is not None and found.max_kl is not None:
        end = f"the upper end at {confidence:.0%}" if confidence else "it"
        lines.append(
            f"Budget: the KL divergence from the source{on} may be {found.max_kl:g} nats per token at most; {end} is "
            f"{format_nats(found.kl_upper)}, {'inside' if found.passed else 'OUTSIDE'}."
        )
    return lines


def fidelity_table_rows(texts: Mapping[str, TextResult]) -> list[list[str]]:
    """Fidelity as rows of the table of measurements; that of the only text needs no name."""
    rows = []
    for name, text in texts.items():
        on = "" if name == UNNAMED else f" {name}"
        for row, label in zip(
            fidelity_rows(name, text.fidelity),
            (f"KL from the source{on}, nats per token", f"top-1 agreement{on}"),
            strict=False,
        ):
            rows.append([label, *row[1:]])
    return rows


def provenance_line(record: Record) -> str:
    """Which text the figures were measured on, and how often it was looked at."""
    names = ", ".join(name_text(word) for words in text_words(record).values() for word in words)
    perplexity, looks = present(record.perplexity), record.verification_looks
    looked = f"; it was asked about {looks} plans, each smaller or larger by its answer" if looks and looks > 1 else ""
    return (
        f"Perplexity is measured on {count(perplexity.tokens, 'token')} of {escape(names)} in windows of "
        f"{perplexity.seq_len} (tokens' sha256 `{short_hash(present(record.text).verification.sha256)}`), which "
        f"nothing was fitted or searched on{looked}. {promise_scope(record)} Intervals hold at 95 %: studentised over "
        f"{perplexity.unit}s, and by a score test for a task's pairs of answers.\n"
    )


def promise_scope(record: Record) -> str:
    """Which text the promise is about, in a sentence for every text."""
    scopes = {name: text.about for name, text in record.text_results().items() if text.about}
    on = {name: "" if name == UNNAMED else f" on {escape(name)}" for name in scopes}
    return " ".join(f"The promise{on[name]} is about {escape(scope)}." for name, scope in scopes.items())


def speed_rows(speed: Speed) -> list[list[str]]:
    rows = [["FLOPs per token", f"{speed.flops_before:,}", f"{speed.flops_after:,}", f"{speed.flops_ratio:.3f}× fewer"]]
    for step in speed.steps:
        if step.differs:
            figures = [f"{step.before:,.0f}", f"{step.after:,.0f}", f"{step.ratio:.3f}× as fast"]
        else:
            figures = ["", "", SAME_SPEED]
        rows.append([f"{step.name}, tokens/s", *figures, ratio_interval(step.ci95)])
    return rows


def blocks_section(record: Record | SavedRecord, picture: bool) -> list[str]:
    figure = f"![R²_lin of every block over depth]({PICTURE})\n\n" if picture else ""
    if isinstance(record, Record):
        kinds = KINDS + (HEADS if record.attention else "")
        return [f"## Blocks\n\n{figure}{LINEARITY}{kinds}\n{measured_blocks(record.listed)}"]
    kinds = KINDS + (HEADS if record.attention else "")
    return [f"## Blocks\n\n{figure}{kinds}\n{saved_blocks([*record.attention, *record.blocks])}"]


def measured_blocks(blocks: list[Block]) -> str:
    rows = ["| block | R²_lin | stream R² | verdict | now | parameters |", "|---|---|---|---|---|---|"]
    for block in blocks:
        before, after = block.params_before, block.params_after
        size = f"{before:,}" if before == after else f"{before:,} → {after:,}"
        figures = (
            f"{num(block.r2_lin, form='.3f')} | {num(block.r2_stream, form='.3f')} | {name_verdict(block.verdict)}"
        )
        rows.append(f"| {block.name} | {figures} | {escape(name_replacement(block.replacement))} | {size} |")
    return "\n".join(rows) + "\n"


def saved_blocks(blocks: list[SavedBlock]) -> str:
    rows = ["| block | now |", "|---|---|"]
    rows += [f"| {escape(block.path)} | {escape(name_replacement(block.replacement))} |" for block in blocks]
    return "\n".join(rows) + "\n"


def loading_section(record: Record | SavedRecord, place: str) -> list[str]:
    return [LOADING.replace("DIRECTORY", place), GGUF if "gguf" in record.source.exports else DENSE]


def reproducing_section(record: Record | SavedRecord) -> list[str]:
    if not isinstance(record, Record):
        return []
    source = record.source
    again = "compress --recipe recipe.yaml --out NEW_DIR   # the same weights from the same source and text\n"
    if record.in_steps:  # no command makes these weights again
        again = ""
    revision = f" at revision {escape(source.revision)}" if source.revision else ""
    return [
        "## Reproduce\n",
        f"```\n{again}compress check DIR                            # measure both models again\n```\n",
        f"The source{revision} has weights of sha256 `{short_hash(source.weights_sha256)}`. `recipe.yaml` has every "
        "setting, `compression.json` every measurement, and `report.html` shows them.\n",
    ]


def limits_section(record: Record | SavedRecord) -> str:
    license = carry_over(record.source.card).get("license")
    lines = [
        "It knows what its source knows, or less: whatever is said of the source's uses, biases and risks holds here.",
        "What was not measured is not promised: other languages, subjects, lengths and tasks can have lost more."
        if isinstance(record, Record)
        else "How much it lost is not known: measure it before it is used.",
        f"The licence ({license if isinstance(license, str) else ', '.join(license)}) is the source's."
        if license
        else "The source's licence is not known here; find out before passing this on.",
    ]
    return "## Limits\n\n" + "".join(f"- {line}\n" for line in lines)


def short_hash(digest: str) -> str:
    """The beginning of a hash; inside backticks nothing can be escaped, so nothing but its digits gets there."""
    return "".join(c for c in digest[:16] if c in "0123456789abcdef") + "…"


def escape(text: object) -> str:
    """A name or path as plain Markdown text."""
    return "".join(f"\\{c}" if c in "\\`*_{}[]<>()#+!|~&$" else c for c in " ".join(visible(str(text)).split()))


LINEARITY = "R²_lin is how much of a block's output the best linear map explains, on rows that it was not fitted on.\n"
KINDS = """Now: `keeps 1,440 of 1,536` keeps so many of the block's own neurons, `keeps 192 + rank 12` fewer of
them and two thin matrices beside them, `rank 48` is two thin matrices, `linear map` one matrix, `constant` a bias; a
dot is a block that stayed as it was.
"""
HEADS = """Attention keeps some of its heads (`keeps 2 of 3 heads`), perhaps with a thin map beside them
(`keeps 2 of 3 heads + rank 48`), or becomes a map without heads. A key-value head (KV) goes with its query heads.
"""
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

Loading it with neither fails with an error, whatever flags are given: without that code its blocks would be random.
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
EXPORT_FORMS = {
    "gguf": "a GGUF file",
    "hf-dense": "a stock checkpoint",
    "onnx": "an ONNX graph",
    "vllm": "a checkpoint for vLLM",
}
EXPORT_NOTE = (
    "This table is of the compressed checkpoint; in this form the outputs are the same, size and speed are not.\n"
)
RUNNING = {
    "gguf": """llama.cpp, which knows its architecture, `deci`, by itself:

```
llama-cli --hf-repo DIRECTORY --hf-file FILE
llama-cli -m FILE
```

The file carries its record: `compress info FILE` shows it, `compress check FILE` measures it against its source.
""",
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
