"""How fast is a narrower FFN really? Every width against the whole block, in turns, beside what its operations say.

    python benchmarks/widths.py ./smollm2-135m                   # a stock gated FFN of these sizes, random weights
    python benchmarks/widths.py --width 1536 --neurons 8960 --dtype bfloat16 --rows 1 512

Prints, for one row (decoding) and for many (a prompt), how many times as fast an FFN of so many neurons is as the whole
one, with the 95 % interval of the median over pairs, the ratio of their operations, and the first over the second
("of what operations say"). Pairs are made in turns until the interval is as narrow as --precision or --seconds are
over; a line whose interval includes 1 claims nothing. At the end, for every step (8, 16, 32, 64): the mean of that last
column over the widths that this step divides and the next larger one does not. Wants an idle machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from compressor.evaluate.speed import median_interval

STEPS = (8, 16, 32, 64)
SHARES = (0.97, 0.94, 0.87, 0.78, 0.61, 0.5)
LEAST_PAIRS = 30
ROUNDS = 12  # FFNs in a row, so that weights come from memory as in a model and not from the cache


class GatedFFN(nn.Module):
    def __init__(self, width: int, neurons: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, neurons, bias=False) for _ in range(2))
        self.down = nn.Linear(neurons, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return output


def clock(blocks: list[GatedFFN], x: Tensor) -> Callable[[], float]:
    def run() -> float:
        began = time.perf_counter()
        for block in blocks:
            block(x)
        return time.perf_counter() - began

    return run


def compare(before: Callable[[], float], after: Callable[[], float], precision: float, seconds: float) -> list[float]:
    """Ratios of pairs, in the order before, after, after, before, until their median is known well enough."""
    before(), after()
    ratios: list[float] = []
    began = time.perf_counter()
    while True:
        first, second = before(), after()
        third, fourth = after(), before()
        ratios += [first / second, fourth / third]
        if len(ratios) >= LEAST_PAIRS:
            low, high = median_interval(ratios)
            if high - low <= 2 * precision * low or time.perf_counter() - began > seconds:
                return ratios


def list_widths(neurons: int) -> list[int]:
    """Near each share, one width that each step divides and the next larger step does not."""
    found = set()
    for share in SHARES:
        for place, step in enumerate(STEPS):
            coarser = STEPS[place + 1] if place + 1 < len(STEPS) else None
            width = round(share * neurons / step) * step
            found.add(width - step if coarser and width % coarser == 0 else width)
    return sorted(found, reverse=True)


def finest_step(width: int) -> int:
    return max(step for step in STEPS if width % step == 0)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a directory whose config gives width and neurons")
    parser.add_argument("--width", type=int)
    parser.add_argument("--neurons", type=int)
    parser.add_argument("--dtype", nargs="+", default=["float32"], choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 512])
    parser.add_argument("--precision", type=float, default=0.005, help="half of the interval, as a share of the ratio")
    parser.add_argument("--seconds", type=float, default=10.0, help="at most, for each line")
    args = parser.parse_args()
    if args.model:
        config = AutoConfig.from_pretrained(args.model).get_text_config()
        args.width, args.neurons = config.hidden_size, config.intermediate_size
    if not args.width or not args.neurons:
        parser.error("name a model, or --width and --neurons")
    print(f"width {args.width}, {args.neurons} neurons, {torch.get_num_threads()} threads, {ROUNDS} FFNs in a row\n")
    print("| dtype | rows | neurons | divided by | times as fast | 95 % | operations | of what operations say |")
    print("|---|---|---|---|---|---|---|---|")
    shares: dict[tuple[str, int, int], list[float]] = {}
    for name in args.dtype:
        dtype = getattr(torch, name)
        whole = [GatedFFN(args.width, args.neurons).to(dtype) for _ in range(ROUNDS)]
        for rows in args.rows:
            x = torch.randn(rows, args.width, dtype=dtype)
            for neurons in list_widths(args.neurons):
                narrow = [GatedFFN(args.width, neurons).to(dtype) for _ in range(ROUNDS)]
                ratios = compare(clock(whole, x), clock(narrow, x), args.precision, args.seconds)
                ratio, (low, high) = statistics.median(ratios), median_interval(ratios)
                operations, step = args.neurons / neurons, finest_step(neurons)
                shares.setdefault((name, rows, step), []).append(ratio / operations)
                unclear = " (cannot be told)" if low <= 1 <= high else ""
                cells = f"{ratio:.3f}{unclear} | {low:.3f} … {high:.3f} | {operations:.3f} | {ratio / operations:.3f}"
                print(f"| {name} | {rows} | {neurons:,} | {step} | {cells} |", flush=True)
    print("\n| dtype | rows | " + " | ".join(f"multiples of {step}" for step in STEPS) + " |")
    print("|---|---|" + "---|" * len(STEPS))
    for name in args.dtype:
        for rows in args.rows:
            means = [shares.get((name, rows, step)) for step in STEPS]
            cells = (f"{statistics.mean(found):.3f}" if found else "–" for found in means)
            print(f"| {name} | {rows} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
