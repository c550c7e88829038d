"""What a person sees on the terminal after compressing, planning, checking, exporting or pushing a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from compressor.report.export_info import stored_lines
from compressor.report.export_record import ExportRecord, PushRecord
from compressor.report.fidelity import Fidelity, format_ends, format_nats, format_share, format_shares
from compressor.report.formats import (
    MISSING,
    SAME_SPEED,
    asked_size,
    block_numbers,
    cache_words,
    chosen_elsewhere,
    ends,
    name_replacement,
    name_verdict,
    num,
    ratio_interval,
    say_limit,
)
from compressor.report.grid import Grid
from compressor.report.healing import healing_lines
from compressor.report.record import Record, SavedRecord, by_verdict
from compressor.report.record_parts import (
    SIZE_CHECK,
    Block,
    Budget,
    Check,
    Parameters,
    PerplexityChange,
    SavedBlock,
    TaskResult,
    TextResult,
    present,
)
from compressor.report.unverified import unverified_lines
from compressor.runtime.figures import count, signed, signed_interval
from compressor.runtime.names import NO_LIMIT, UNNAMED
from compressor.runtime.resources import format_bytes

HEAL_COLUMN = "to be healed on"  # tokens
COLOURS = {"FAILED": "bold red", "passed": "green"}


def block_table(record: Record) -> Grid:
    """One line per FFN and per attention that changed: how linear it is, its verdict, and what stands there now."""
    columns = ("block", "R²_lin", "95 % interval", "stream R²", "top rows", "verdict", "now", "parameters", "fewer")
    table = Grid(columns, left=("verdict", "now"), optional=("top rows", "95 % interval", "stream R²", "fewer"))
    for block in record.listed:
        before, after = block.params_before, block.params_after
        table.add_row(
            block.name,
            num(block.r2_lin, form=".3f"),
            ends(block.r2_lin_ci95),
            num(block.r2_stream, form=".3f"),
            f"{block.top_row_share:.0%}",
            name_verdict(block.verdict),
            name_replacement(block.replacement),
            f"{before:,}" if after == before else f"{before:,} → {after:,}",
            "" if after == before else f"{before / after:.1f}×",
            style="green" if after != before else "yellow" if block.verdict == "unsafe" else "",
        )
    return table


def notes(record: Record) -> list[str]:
    """Which FFNs are unsafe, why, and what of them was kept."""
    return [note_unsafe(block) for block in record.blocks if block.verdict == "unsafe"]


def attention_lines(record: Record) -> list[str]:
    """How many attentions are safe, costly and unsafe, and how many were replaced."""
    if not record.attention:
        return []
    found = by_verdict(record.attention)
    counts = [f"{len(indices)} {name_verdict(word)}" for word, indices in found.items() if indices or word]
    unsafe = f" ({block_numbers(found['unsafe'])})" if found["unsafe"] else ""
    replaced = sum(block.replacement.kind != "keep" for block in record.attention)
    more = f"; {replaced} of {len(record.attention)} replaced ({list_kinds(record.attention)})" if replaced else ""
    counts[2] += unsafe
    return [f"attention: {', '.join(counts)}{more}"]


def note_unsafe(block: Block) -> str:
    """Why a block is unsafe. A plan may take a few of its neurons, never a linear map."""
    if not block.replacement.neurons:
        return f"block {block.index} is unsafe: {block.reason}"
    return (
        f"block {block.index} is unsafe as a linear map ({block.reason}); it keeps "
        f"{count(block.replacement.neurons, 'neuron')}: that form cost alone what was predicted"
    )


def perplexity_line(change: PerplexityChange) -> str:
    low, high = change.delta_ci95
    return (
        f"perplexity {change.baseline:.3f} → {change.compressed:.3f}  (Δ {signed(change.delta)}, "
        f"95 % interval {signed_interval(low, high)}; {count(change.tokens, 'token')}, windows of {change.seq_len})"
    )


def parameters_line(parameters: Parameters, budget: Budget | None) -> str:
    """How many parameters are gone, and how many were to go, where that was asked."""
    before, after, removed = (present(n) for n in (parameters.before, parameters.after, parameters.removed))
    fraction = present(parameters.removed_fraction)
    asked = f"; {asked_size(budget.remove)}" if budget and budget.remove else ""
    return f"parameters {before:,} → {after:,}  (−{removed:,}, {fraction:.2%} of the model{asked})"


def size_lines(record: Record | SavedRecord) -> list[str]:
    """How many parameters and bytes of key-value cache are gone."""
    sizes = [parameters_line(record.parameters, record.budget)] if isinstance(record, Record) else []
    return [*sizes, *filter(None, [cache_words(record.kv_cache)])]


def text_lines(record: Record) -> list[str]:
    """Some lines per text: its perplexity, its budget and, where it was measured, its fidelity."""
    confidence = present(record.budget).confidence
    end = f"upper end at {confidence:.0%}" if confidence else "point estimate"
    lines = []
    for name, text in record.text_results().items():
        if text.max_dppl is None:
            budget = f"{NO_LIMIT} on perplexity was asked for ({end} {signed(text.delta_upper)})"
        else:
            held = "inside" if text.delta_upper <= text.max_dppl else "OUTSIDE"
            budget = f"budget {say_limit(text)}: {held} ({end} {signed(text.delta_upper)})"
        about = f"; about {text.about}" if text.about else ""
        prefix = "" if name == UNNAMED else f"{name}: "
        lines += [prefix + perplexity_line(text), prefix + budget + about]
        if text.fidelity is not None:
            lines.append(prefix + fidelity_line(text.fidelity, end))
    return lines


def fidelity_line(found: Fidelity, end: str) -> str:
    """How near the predictions are to the source's, and the budget for that, if there is one."""
    if found.max_kl is None:
        return str(found)
    held = "inside" if found.passed else "OUTSIDE"
    return f"{found}; budget {found.max_kl:g}: {held} ({end} {format_nats(found.kl_upper)})"


def task_lines(record: Record) -> list[str]:
    lines = []
    for name, task in record.tasks.items():
        limit, interval = task.max_drop, signed_interval(*task.drop_ci95, ".4f")
        held = "no budget" if limit is None else f"budget {limit:g}: {'inside' if task.passed else 'OUTSIDE'}"
        lines.append(
            f"task {name} ({task.metric}) {task.source:.4f} → {task.compressed:.4f}  (drop "
            f"{signed(task.drop, '.4f')}, 95 % interval {interval}; {count(task.documents, 'document')}, "
            f"{task.changed} changed{chosen_elsewhere(task)}; {held})"
        )
    return lines


def generation_lines(record: Record) -> list[str]:
    """How the compressed model writes, compared with its source."""
    generation = record.generation
    if generation is None:
        return []
    repetition, pairs = generation.repetition, generation.distinct.get("2")
    return [
        f"writes as its source in {generation.agreement:.1%} of places ({count(generation.prompts, 'prompt')}, "
        f"{count(generation.tokens, 'token')} each); repetition {repetition.source:.2f} → {repetition.compressed:.2f}"
        + (f", distinct pairs {pairs.source:.2f} → {pairs.compressed:.2f}" if pairs else "")
    ]


def breakdown_lines(record: Record) -> list[str]:
    """The kind of token that pays most, in one line; the page has the rest."""
    bands = record.where.frequency if record.where else []
    rises = {n: band.nats * band.tokens for n, band in enumerate(bands) if band.nats > 0}
    if not rises:
        return []
    most = max(rises, key=lambda n: rises[n])
    worst, share = bands[most], rises[most] / sum(rises.values())  # bands that gained do not count against it
    return [
        f"hurts most: tokens by frequency {worst.band}, {share:.0%} of the rise (perplexity "
        f"{worst.baseline:.2f} → {worst.compressed:.2f})"
    ]


def check_table(record: Record) -> Grid:
    """One line per text, task and figure of the baseline: what was measured, and what was promised."""
    columns = ("check", "source", "compressed", "change", "95 % interval", "limit", "verdict")
    table = Grid(columns, left=("check", "verdict"), optional=("95 % interval", "change"))
    rows = [text_row(name, text) for name, text in record.texts.items()]
    rows += [row for name, text in record.texts.items() for row in fidelity_rows(name, text.fidelity)]
    rows += [task_row(name, task) for name, task in record.tasks.items()]
    rows += [size_row(check, record.parameters) for check in record.checks if check.name == SIZE_CHECK]
    rows += [baseline_row(check) for check in record.checks if check.name.startswith("baseline ")]
    for row in rows:
        table.add_row(*row, style=COLOURS.get(row[-1], ""))
    return table


def name_outcome(passed: bool | None) -> str:
    return "no budget" if passed is None else "passed" if passed else "FAILED"


def text_row(name: str, text: TextResult) -> list[str]:
    low, high = text.delta_ci95
    figures = f"{text.baseline:.3f}", f"{text.compressed:.3f}", signed(text.delta)
    limit = NO_LIMIT if text.max_dppl is None else signed(text.max_dppl)
    return [f"perplexity {name}", *figures, signed_interval(low, high), limit, name_outcome(text.passed)]


def fidelity_rows(name: str, found: Fidelity | None) -> list[list[str]]:
    """The divergence from the source and the agreement with it; none where they were not measured."""
    if found is None:
        return []
    limit, agreement = (
        MISSING if found.max_kl is None else f"{found.max_kl:g}",
        f"{format_share(found.top1_agreement)} %",
    )
    nats = [f"kl {name} (nats per token)", "", format_nats(found.kl), "", format_ends(found.kl_ci95), limit]
    share = [f"top-1 agreement {name}", "", agreement, "", format_shares(found.top1_agreement_ci95), MISSING]
    return [[*nats, name_outcome(found.passed)], [*share, name_outcome(None)]]


def task_row(name: str, task: TaskResult) -> list[str]:
    """The change has the sign of the metric; a drop is a change for the worse."""
    sign = -1 if task.higher_is_better else 1
    low, high = sorted(sign * end + 0.0 for end in task.drop_ci95)  # no minus before a zero
    limit = MISSING if task.max_drop is None else signed(sign * task.max_drop, ".4f")
    figures = f"{task.source:.4f}", f"{task.compressed:.4f}", signed(sign * task.drop + 0.0, ".4f")
    label = f"task {name} ({task.metric}, {count(task.documents, 'document')})"
    return [label, *figures, signed_interval(low, high, ".4f"), limit, name_outcome(task.passed)]


def size_row(check: Check, parameters: Parameters) -> list[str]:
    sizes = [f"{present(size):,}" for size in (parameters.before, parameters.after)]
    change, limit = (signed(-present(share), ".2%") for share in (check.measured, check.limit))
    return [check.name, *sizes, change, "", limit, name_outcome(check.passed)]


def baseline_row(check: Check) -> list[str]:
    measured, limit = (
        MISSING if value is None else f"{value:.4f}" if abs(value) < 1e3 else f"{value:,.0f}"
        for value in (check.measured, check.limit)
    )
    figures = ["", measured] if check.name.endswith("compressed") else [measured, ""]
    return [check.name, *figures, "", "", limit, name_outcome(check.passed)]


def frontier_table(record: Record) -> Grid:
    """One line per budget or size: what is removed, and what it costs on the selection text."""
    asked = "at least" if any(point.remove for point in record.frontier) else "budget"
    healed = [HEAL_COLUMN] if any(point.heal for point in record.frontier) else []
    columns = (asked, *healed, "removed", "parameters", "FLOPs per token", "ΔPPL", "95 % interval", "blocks", "plan")
    table = Grid(columns, left=("plan",), optional=("blocks", "FLOPs per token", "95 % interval"))
    for point in record.frontier:
        if not point.removed:
            table.add_row(point.asked, *["·" for _ in healed], "0", "·", "·", "·", "·", "0", "nothing fits")
            continue
        worst = max(point.texts.values(), key=lambda text: text.delta / text.baseline)
        low, high = worst.delta_ci95
        table.add_row(
            point.asked,
            *[f"{point.heal:,}" if point.heal else "–" for _ in healed],
            f"{point.removed_fraction:.2%}",
            f"−{point.removed:,}",
            f"{present(point.flops_ratio):.3f}× fewer",
            signed(worst.delta),
            signed_interval(low, high),
            str(point.blocks),
            Path(present(point.file)).name,
        )
    return table


def frontier_lines(record: Record, file: Path) -> list[str]:
    text = present(record.text)
    selection = present(text.selection)
    where = f"ΔPPL on the selection text, {count(selection.tokens, 'token')}, windows of {text.seq_len}"
    note = "room is left for the noise of the verification text, on which `compress apply` measures"
    if present(record.budget).max_dppl is None:
        note = f"{NO_LIMIT} on perplexity; `compress apply` measures on the verification text"
    if any(point.heal for point in record.frontier):
        note += (
            "; of plans to be healed, ΔPPL is before that: they aim past the budget by what healing is expected to win"
        )
    return [*agreement_lines(record), f"{where}; {note}", f"written: {', '.join([str(file), *record.figures])}"]


def detail_lines(record: Record) -> list[str]:
    """What a run found out on the way, for those who want to know: `--verbose` prints it above the answer."""
    about = [*notes(record), *attention_lines(record), *agreement_lines(record)]
    figures = [*text_lines(record), *generation_lines(record), *breakdown_lines(record)]
    return [*about, *figures, *size_lines(record), *speed_lines(record), time_line(record.timings), ""]


def warning_lines(record: Record) -> list[str]:
    return [f"warning: {warning}" for warning in record.warnings]


def time_line(timings: Mapping[str, float]) -> str:
    """The whole run in forward passes over its text, and the steps that took longest."""
    total, forward = timings["total"], timings.get("one_forward_pass")
    steps = sorted(
        ((s, name) for name, s in timings.items() if name not in ("total", "one_forward_pass")), reverse=True
    )
    longest = ", ".join(f"{name} {seconds:.0f} s" for seconds, name in steps[:6])
    passes = f", {total / forward:.1f}× one forward pass over its text" if forward else ""
    return f"took {total:.0f} s{passes} ({longest})"


def speed_lines(record: Record) -> list[str]:
    """FLOPs counted, and the measured ratios that differ from 1 by more than the clock's noise; of others only that."""
    speed = record.speed
    if speed is None:
        return []
    flops = f"FLOPs per token {speed.flops_before:,} → {speed.flops_after:,}  ({speed.flops_ratio:.3f}× fewer)"
    if not speed.steps:
        why = "without an interval" if speed.prefill_ratio else "not measured, for the weights were on disk"
        return [f"{flops}; speed {why}"]
    told = [
        f"{step.name} {step.ratio:.3f}× as fast (95 % {ratio_interval(step.ci95)}; {step.after:.0f} tokens/s)"
        for step in speed.steps
        if step.differs
    ]
    alike = [f"{step.name} {ratio_interval(step.ci95)}" for step in speed.steps if not step.differs]
    lines = [f"speed, measured in turns: {', '.join(told)}"] if told else []
    return [flops, *lines, *([f"speed: {SAME_SPEED} ({', '.join(alike)})"] if alike else [])]


def agreement_lines(record: Record) -> list[str]:
    """Whether the predictions of the loss held."""
    agreement = record.agreement
    if agreement is None or agreement.rank_correlation is None:
        return []
    blocks = count(len(agreement.blocks) + len(agreement.attention), "block")
    correlation = num(agreement.rank_correlation, form=".2f")
    if agreement.kl_rank_correlation is None:
        return [f"predicted against measured Δloss over {blocks}: rank correlation {correlation}"]
    return [
        f"predicted against measured cost over {blocks}: rank correlation "
        f"{num(agreement.kl_rank_correlation, form='.2f')} with the KL divergence, {correlation} with Δloss"
    ]


def check_lines(record: Record) -> list[str]:
    """What a check measured on, what it found, and which promises were not kept."""
    failed = [check for check in record.checks if not check.passed]
    text, confidence = next(iter(record.texts.values())), present(record.budget).confidence
    where = f"windows of {text.seq_len} tokens, {present(record.perplexity).tokens:,} predicted"
    held = f"the upper end at {confidence:.0%}" if confidence else "the change"
    written = [f"baseline written to {record.baseline_written}"] if record.baseline_written else []
    return [
        f"{where}; {held} must be inside the limit",
        *generation_lines(record),
        *replaced_lines(record.replaced, record.replaced_attention),
        *size_lines(record),
        *warning_lines(record),
        *(f"FAILED {check.name}: {check.detail}" for check in failed),
        *written,
        f"FAILED: {', '.join(check.name for check in failed)}" if failed else "passed",
    ]


def info_lines(record: Record | SavedRecord) -> list[str]:
    """What a checkpoint was made from, and what was measured of it."""
    source = record.source
    lines = [f"made from {source.model} ({source.model_type}) by compressor {record.tool.version}"]
    if isinstance(record, Record):
        figures = [*text_lines(record), *task_lines(record), *generation_lines(record)]
        return [
            *lines,
            *notes(record),
            *attention_lines(record),
            *figures,
            *unverified_lines(record),
            *healing_lines(record.healing),
            *size_lines(record),
            *weights_lines(record),
        ]
    replaced = [f"{b.path}: {name_replacement(b.replacement)}" for b in (*record.attention, *record.blocks)]
    unmeasured = "no measurements are recorded: it was saved through the Python API"
    return [*lines, *replaced, *size_lines(record), unmeasured, *weights_lines(record)]


def replaced_lines(blocks: Sequence[SavedBlock], attention: Sequence[SavedBlock]) -> list[str]:
    """What is replaced in a checkpoint, counted by kind."""
    counted = [f"{count(len(blocks), 'FFN')} ({list_kinds(blocks)})"] if blocks else []
    if attention:
        counted.append(f"the attention of {count(len(attention), 'layer')} ({list_kinds(attention)})")
    return [f"replaced: {' and '.join(counted)}"] if counted else []


def list_kinds(blocks: Sequence[Block | SavedBlock]) -> str:
    """How many blocks were replaced by what: `2 hybrid, 1 pruned`."""
    kinds = Counter(block.replacement.kind for block in blocks if block.replacement.kind != "keep")
    return ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))


def weights_lines(record: Record | SavedRecord) -> list[str]:
    """Whether the weights are those that the record describes."""
    if record.compressed_sha256 is None:
        return ["weights: the record has no hash of them, so it cannot be said whether they are the ones it describes"]
    short = f"sha256 {record.compressed_sha256[:12]}…"
    if record.weights_match is None:
        return [f"weights: not here (recorded: {short})"]
    return [
        f"weights: as recorded ({short})" if record.weights_match else f"weights: NOT those of the record ({short})"
    ]


def export_lines(record: ExportRecord) -> list[str]:
    """Where an export is, how large it is, and how it was checked."""
    sizes, check = record.parameters, record.checked
    out, size = present(record.out), format_bytes(present(record.bytes))
    lines = [
        f"{out}: {size}, {record.dtype}, {sizes.exported:,} parameters "
        f"({signed(sizes.exported / sizes.source - 1, '.2%')} of the source's; "
        f"compressed {signed(sizes.compressed / sizes.source - 1, '.2%')})"
    ]
    if check.log_probability_off is not None:
        lines.append(
            f"checked in {check.runtime}: {check.greedy_equal} of {check.greedy} greedy tokens equal, "
            f"log-probabilities off by at most "
            f"{num(check.log_probability_off, form='.2g')} on {count(present(check.tokens), 'token')}, "
            f"perplexity {signed(present(check.perplexity_ratio) - 1, '.3%')}"
        )
    elif check.runtime:
        lines.append(
            f"checked in {check.runtime}: logits off by {num(present(check.logits_off), form='.1g')} of the largest"
        )
    lines += stored_lines(record)
    if record.use is not None:
        lines.append(f"for {record.use}")
    if record.context is not None:
        lines.append(f"context {record.context:,} tokens; run it: llama-cli -m {out}")
    return lines


def push_table(record: PushRecord) -> Grid:
    """Every file with its size."""
    table = Grid(("file", "bytes"), left=("file",))
    for file in record.files:
        table.add_row(file.path, f"{file.bytes:,}")
    return table


def push_lines(record: PushRecord) -> list[str]:
    """Where a checkpoint was or would be sent, what is left out, and what its card says."""
    card = record.card
    values = [f"{key} {card[key]}" for key in ("base_model", "license", "pipeline_tag") if key in card]
    scores = count(
        sum(len(result["metrics"]) for index in card.get("model-index") or [] for result in index["results"]), "result"
    )
    where = f"{record.repo}, branch {record.branch}" + (", private" if record.private else "")
    size = f"{count(len(record.files), 'file')}, {count(record.bytes, 'byte')}"
    lines = [
        f"{size} {'sent' if record.sent else 'would be sent'} to {where}",
        *[f"left out: {name} ({reason})" for name, reason in record.left_out.items()],
        *record.notes,
        f"the card's metadata is sound, as far as it can be checked here: {', '.join([*values, scores])}",
        *([] if "license" in card else ["warning: the card names no license; add one to README.md if you know it"]),
    ]
    if not record.sent:
        return [*lines, f"nothing was sent: {record.reason}"]
    removed = [f"removed there: {', '.join(record.removed)}"] if record.removed else []
    return [*lines, *removed, f"{record.url} (commit {record.commit})"]
