"""Figures and names as people read them: shared by the terminal, the page, the card and the charts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeGuard

from compressor.report.record_parts import (
    BlockFigures,
    Parameters,
    Removal,
    Replacement,
    TaskResult,
    TextResult,
    Verdict,
)
from compressor.report.speed_parts import KVCache
from compressor.runtime.figures import MINUS, count
from compressor.runtime.names import NO_LIMIT
from compressor.runtime.resources import format_bytes

MISSING = "–"
RIDGE_GAP = 0.01  # the chosen ridge is shown where it explains so much more than plain least squares
HUGE = 1e15
SAME_SPEED = "no difference that this machine can tell"
DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}


def is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value


def as_float(value: float) -> float:
    """A whole number of a stranger may be too large for one: then it is infinite."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def num(value: Any, sign: str = "", form: str = "") -> str:
    """A whole number as it is; else three decimals, fewer for a large number, one digit for a tiny one.

    A number that nobody would read digit by digit is written with a power of ten.
    """
    if not is_number(value):
        return MISSING if value is None or isinstance(value, float) else str(value)
    if isinstance(value, int) and not sign and abs(value) < HUGE:
        return f"{value:,}".replace("-", MINUS)
    figure = as_float(value)
    size = abs(figure)
    usual = ".1g" if 0 < size < 0.0005 else ",.3f" if size < 100 else ",.1f" if size < 10_000 else ",.0f"
    usual, form = (".2e", "") if HUGE <= size < math.inf else (usual, form)
    return format(figure, sign + (form or usual)).replace("-", MINUS).replace("inf", "∞")


def percent(value: Any, digits: int = 1) -> str:
    return f"{num(100.0 * as_float(value), form=f'.{digits}f')} %" if is_number(value) else MISSING


def ends(pair: Sequence[float]) -> str:
    """An interval of R², or a dash where there is none."""
    return " … ".join(num(end, form=".3f") for end in pair) if all(map(is_number, pair)) else MISSING


def interval(pair: Sequence[float] | None) -> str:
    return " … ".join(num(end, "+") for end in pair) if pair else MISSING


def ratio_interval(pair: Sequence[float]) -> str:
    """The interval of a ratio: 0.970–1.040×."""
    return f"{'–'.join(num(end) for end in pair)}×"


def name_verdict(verdict: Verdict | None) -> str:
    """The verdict on a block as a word."""
    return verdict or "undecided"


def ridge_differs(blocks: Sequence[BlockFigures]) -> bool:
    """Whether the chosen ridge explains more than plain least squares in any block: its rows were few."""
    return any(block.r2_ridge - block.r2_lin >= RIDGE_GAP for block in blocks)


def last_part(path: str | None) -> str:
    """The last component of a name or path: what is passed on holds no local directory."""
    return str(path or "").replace("\\", "/").rstrip("/").rpartition("/")[2].strip(". ") or "model"


def block_numbers(indices: Sequence[int]) -> str:
    """Block numbers, neighbours drawn together: 3, 7–9."""
    runs: list[list[int]] = []
    for index in sorted(indices):
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ", ".join(str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a}–{b}" for a, b in runs)


def branch_numbers(blocks: Sequence[int], attention: Sequence[int]) -> str:
    """The numbers of FFNs and of attention: `3, 7–9; attention 4`."""
    words = [block_numbers(blocks), f"attention {block_numbers(attention)}" if attention else ""]
    return "; ".join(word for word in words if word)


def list_branches(blocks: Sequence[int], attention: Sequence[int]) -> str:
    """Blocks in words: `block 3`, `blocks 3, 7–9 and attention 4`, `attention 4, 5`."""
    words = [f"{'block' if len(blocks) == 1 else 'blocks'} {block_numbers(blocks)}"] if blocks else []
    return " and ".join([*words, *([f"attention {block_numbers(attention)}"] if attention else [])])


def name_replacement(replacement: Replacement) -> str:
    """What stands in a block's place, short enough for a column: `keeps 1,440 of 1,536`, `keeps 192 + rank 12`,
    `keeps 2 of 3 heads`, `rank 48`, `linear map`, `constant`; a dot for a block that stayed as it was."""
    if replacement.kind == "keep":
        return "·"
    if replacement.kind == "bias":
        return "constant"
    linear = "linear map" if replacement.rank is None else f"rank {replacement.rank:,}" if replacement.rank else ""
    return " + ".join(word for word in (name_kept(replacement, short=bool(linear)), linear) if word)


def name_kept(replacement: Replacement, short: bool) -> str:
    """The neurons or heads that stay; `short` leaves out of how many neurons. Nothing where none do."""
    if replacement.heads:
        return f"keeps {name_heads(replacement)}"
    if not replacement.neurons:
        return ""
    if short:
        return f"keeps {replacement.neurons:,}"
    if replacement.units:
        return f"keeps {replacement.neurons:,} of {replacement.units:,}"
    return f"keeps {count(replacement.neurons, 'neuron')}"


def describe_replacement(replacement: Replacement) -> str:
    """The same in a sentence's words: `1,440 of 1,536 neurons kept, and a map of rank 12 beside them`."""
    if replacement.kind in ("keep", "bias"):
        return "as it was" if replacement.kind == "keep" else "a constant"
    rank = replacement.rank
    linear = "a full linear map" if rank is None else f"a linear map of rank {rank:,}" if rank else ""
    if replacement.heads:
        kept = f"{name_heads(replacement)} kept"
    elif replacement.neurons:
        of = f"{replacement.neurons:,} of {replacement.units:,} neurons" if replacement.units else ""
        kept = f"{of or count(replacement.neurons, 'neuron')} kept"
    else:
        kept = ""
    return f"{kept}, and {linear} beside them" if kept and linear else kept or linear


def name_heads(replacement: Replacement) -> str:
    """The heads that attention keeps: `2 of 3 heads`, or key-value heads (KV) where several query heads read one."""
    kind = "KV head" if (replacement.query_heads_per_unit or 1) > 1 else "head"
    if replacement.units:
        return f"{replacement.heads} of {count(replacement.units, kind)}"
    return count(replacement.heads or 0, kind)


def weight_bytes(parameters: int | None, dtype: str) -> int | None:
    """The bytes that so many stored parameters take, where the dtype is known by its name."""
    size = DTYPE_BYTES.get(dtype)
    return None if parameters is None or size is None else parameters * size


def say_weights(parameters: Parameters, dtype: str) -> str:
    """The size of the weights before and after: `269 MB → 255 MB`; nothing where it is not known."""
    sizes = [weight_bytes(number, dtype) for number in (parameters.before, parameters.after)]
    return " → ".join(format_bytes(size) for size in sizes if size is not None and size < HUGE)


def cache_words(cache: KVCache | None) -> str:
    """What the key-value cache takes: `key-value cache 23,040 → 15,360 bytes per token (−33.3 %, float16)`; nothing
    where it is as it was."""
    if cache is None or cache.bytes_per_token_after is None:
        return ""
    before, after = cache.bytes_per_token_before, cache.bytes_per_token_after
    if before is None:
        return f"key-value cache {after:,} bytes per token ({cache.dtype})"
    return (
        f"key-value cache {before:,} → {after:,} bytes per token ({cache_change(cache)}, {cache.dtype})" * cache.shrinks
    )


def say_cache(cache: KVCache | None) -> list[str]:
    """How much less the key-value cache takes, in a sentence, where it does."""
    if cache is None or not cache.shrinks:
        return []
    before, after = cache.bytes_per_token_before or 0, cache.bytes_per_token_after or 0
    less = f"{percent(1 - after / before)} less: {before:,} → {after:,} bytes per token ({cache.dtype})"
    return [f"The key-value cache takes {less}."]


def cache_change(cache: KVCache) -> str:
    """How much smaller the key-value cache is: `−33.3 %`, or that it is not."""
    before, after = cache.bytes_per_token_before, cache.bytes_per_token_after
    if not before or after is None or after == before:
        return "unchanged"
    return f"{num(100.0 * (after / before - 1), '+', '.1f')} %"


def asked_size(removal: Removal) -> str:
    """How much was to go, in words: `asked: at least 10 % (13,451,501 parameters)`."""
    share = f"{removal.asked.removesuffix('%')} % (" if removal.asked.endswith("%") else ""
    return f"asked: at least {share}{count(removal.parameters, 'parameter')}{')' if share else ''}"


def say_share(asked: str, baseline: float) -> str:
    """Of what a percentage was asked: `2 % of 35.161`; nothing where a number was asked, which says it all."""
    return f"{asked.removesuffix('%')} % of {num(baseline)}" if asked.endswith("%") else ""


def say_limit(text: TextResult) -> str:
    """How much perplexity may rise on a text: `+1.000`, or `+0.703 (2 % of 35.161)` where a percentage was asked."""
    if text.max_dppl is None:
        return NO_LIMIT
    share = say_share(text.asked, text.baseline)
    return f"{num(text.max_dppl, '+')} ({share})" if share else num(text.max_dppl, "+")


def say_documents(task: TaskResult) -> str:
    """`500 documents, 1 answer changed`."""
    return f"{count(task.documents, 'document')}, {count(task.changed, 'answer')} changed"


def chosen_elsewhere(task: TaskResult) -> str:
    """That blocks were chosen on other documents, in words, and how often these were asked; else nothing."""
    if not task.chosen_on:
        return ""
    return f", blocks chosen on {count(task.chosen_on, 'other')}, {count(task.looks, 'look')}"
