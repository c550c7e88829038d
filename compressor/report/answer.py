"""The last lines of a command: the answer, then what to do next."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from compressor.report.formats import SAME_SPEED, asked_size, cache_words, num, ratio_interval, say_limit, say_weights
from compressor.report.healing import healing_lines
from compressor.report.record import Record
from compressor.report.record_parts import TextResult, present
from compressor.report.tables import (
    agreement_lines,
    attention_lines,
    fidelity_line,
    notes,
    parameters_line,
    perplexity_line,
    task_lines,
    warning_lines,
)
from compressor.runtime.figures import count, signed
from compressor.runtime.names import NO_LIMIT, UNNAMED
from compressor.runtime.progress import duration

OPENERS = {"darwin": "open", "win32": "start"}


def answer_lines(record: Record) -> list[str]:
    """How much smaller, at what cost against which budget, how much faster, and where it is."""
    confidence = present(record.budget).confidence
    figures = [line for name, text in record.text_results().items() for line in text_answer(name, text, confidence)]
    return [
        *warning_lines(record),
        *([""] if record.warnings else []),
        size_line(record),
        *figures,
        *task_lines(record),
        *healing_lines(record.healing),
        *filter(None, [cache_words(record.kv_cache)]),
        *speed_line(record),
        f"written to {near_path(present(record.out))} in {duration(record.timings['total'])}",
        *next_lines(record),
    ]


def plan_lines(record: Record, file: Path, verbose: bool) -> list[str]:
    """How much a plan removes, what that costs on the selection text, and how it is applied."""
    about = [*notes(record), *attention_lines(record), *agreement_lines(record), ""] if verbose else []
    selection = [
        f"{'' if name == UNNAMED else f'{name}: '}{perplexity_line(change)}"
        for name, change in record.selection.items()
    ]
    selection += [f"selection {name}: {text.fidelity}" for name, text in record.selection.items() if text.fidelity]
    apply = f"compress apply {shlex.quote(record.source.model)} {shlex.quote(str(file))} --out DIR"
    return [
        *about,
        *warning_lines(record),
        parameters_line(record.parameters, record.budget),
        *(f"on the selection text: {line}" for line in selection),
        f"plan: {file}",
        *say_next({apply: "fit it, verify it on text kept aside, and write it"}),
    ]


def size_line(record: Record) -> str:
    """`23.1 % smaller: 3,360,192 → 2,582,808 parameters, 6.7 MB → 5.2 MB`."""
    parameters = record.parameters
    before, after = present(parameters.before), present(parameters.after)
    weights = say_weights(parameters, record.source.dtype or "")
    share = num(100 * present(parameters.removed_fraction), form=".1f" if after < 0.99 * before else ".2f")
    asked = f" ({asked_size(record.budget.remove)})" if record.budget and record.budget.remove else ""
    return f"{share} % smaller: {before:,} → {after:,} parameters" + (f", {weights}" if weights else "") + asked


def text_answer(name: str, text: TextResult, confidence: float) -> list[str]:
    """Perplexity on one text against its budget, and the divergence from the source where that has one."""
    prefix = "" if name == UNNAMED else f"{name}: "
    upper = f", at most {signed(text.delta_upper)} at {confidence:.0%} confidence" if confidence else ""
    held = f"; {NO_LIMIT} on perplexity was asked for"
    if text.max_dppl is not None:
        inside = text.delta_upper <= text.max_dppl
        held = f": {'inside' if inside else 'OUTSIDE'} the budget of {say_limit(text)}"
    about = f"; about {text.about}" if text.about else ""
    lines = [
        f"{prefix}perplexity {text.baseline:.3f} → {text.compressed:.3f} ({signed(text.delta)}{upper}){held}",
        f"measured on {count(text.tokens, 'token')} of text kept aside, in windows of {text.seq_len}{about}",
    ]
    if text.fidelity is not None and text.fidelity.max_kl is not None:
        end = f"upper end at {confidence:.0%}" if confidence else "point estimate"
        lines.append(prefix + fidelity_line(text.fidelity, end))
    return lines


def speed_line(record: Record) -> list[str]:
    """What is faster or slower by more than the clock's noise; that nothing is, where that was measured."""
    speed = record.speed
    if speed is None:
        return []
    if not speed.steps:
        return ["speed not measured, for the weights were on disk"]
    told = [f"{s.name} {num(s.ratio)}× as fast (95 % {ratio_interval(s.ci95)})" for s in speed.steps if s.differs]
    return [f"speed: {', '.join(told) or SAME_SPEED}"]


def next_lines(record: Record) -> list[str]:
    """The three commands that follow: read the report, check it again, take it elsewhere."""
    out = near_path(present(record.out))
    to, ending = ("gguf", ".gguf") if "gguf" in record.source.exports else ("onnx", "-onnx")
    return say_next(
        {
            f"{OPENERS.get(sys.platform, 'xdg-open')} {shlex.quote(f'{out}/report.html')}": "the report, in a browser",
            f"compress check {shlex.quote(out)}": "the gate for CI: measures it again",
            f"compress export {shlex.quote(out)} --to {to} --out {shlex.quote(out + ending)}": "for another runtime",
        }
    )


def say_next(commands: Mapping[str, str]) -> list[str]:
    """Commands to go on with, and what each is for."""
    return ["", "next:", *(line for command, why in commands.items() for line in (f"  {command}", f"      {why}"))]


def near_path(path: str) -> str:
    """A path as one would type it here: relative where it is below this directory."""
    relative = os.path.relpath(path)
    return path if relative.startswith(os.pardir) else relative
