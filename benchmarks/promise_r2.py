"""Does the 95 % interval of R²_lin contain what it is about in 95 % of calibrations?

    python benchmarks/promise_r2.py --model demo --text demo --blocks 0 3 6 --held-out 4 9 16 --draws 1000

The rows of a long text are collected once per block. Half of its windows are the ones to fit on, the others the ones to
hold out. A simulated calibration draws windows of both, with replacement, and computes the interval as `compress
profile` does. The truth is the R², on all windows of the second half, of maps fitted on as many windows, on average.
Printed are the shares of calibrations whose interval lies above and below the truth (2.5 % each is promised), for the
interval as it is and for the percentile bootstrap over held-out windows that it replaced.
"""

from __future__ import annotations

import argparse
import statistics

import torch

import compressor
from compressor.measure.moments import Moments
from compressor.measure.r2_interval import fit_variance, group_count, group_of, interval, merge
from compressor.measure.regression import decompose, feature_errors, r_squared, solve
from compressor.models.blocks import Block, Rows, capture_rows, find_blocks
from compressor.text import batches

RESAMPLES = 2000


def window_moments(model: torch.nn.Module, block: Block, windows: torch.Tensor) -> list[Moments]:
    """The moments of this block's rows in every window."""
    found: list[Moments] = []

    def keep(_: Block, rows: Rows) -> None:
        pairs = zip(rows.x.split(windows.shape[1]), rows.y.split(windows.shape[1]), strict=True)
        found.extend(Moments.of(x, y, whole_yy=False) for x, y in pairs)

    with torch.no_grad(), capture_rows(model, [block], keep):
        for batch in batches(windows, 16):
            model(input_ids=batch, use_cache=False)
    return found


def spread(window: Moments, mean: torch.Tensor) -> torch.Tensor:
    """Σ |y − mean|² of a window's rows."""
    return window.variances.sum() + window.weight * (window.mean_y - mean).square().sum()


def bootstrap(errors: torch.Tensor, held: list[Moments], generator: torch.Generator) -> tuple[float, float]:
    """The interval that was used before: percentiles over resampled held-out windows."""
    count = len(held)
    energies = torch.stack([spread(w, torch.zeros_like(w.mean_y)) for w in held])
    sums, rows = torch.stack([w.weight * w.mean_y for w in held]), held[0].weight
    draws = torch.randint(count, (RESAMPLES, count), generator=generator)
    counts = torch.zeros(RESAMPLES, count, dtype=errors.dtype).scatter_add_(
        1, draws, torch.ones(draws.shape, dtype=errors.dtype)
    )
    total = counts @ energies - (counts @ sums).square().sum(-1) / (count * rows)
    ends = torch.tensor([0.025, 0.975], dtype=errors.dtype)
    low, high = torch.quantile(1 - counts @ errors / total, ends).tolist()
    return low, high


def simulate(windows: list[Moments], held_out: int, draws: int, generator: torch.Generator) -> dict[str, str]:
    """The shares of misses of both intervals, and their mean widths."""
    order = torch.randperm(len(windows), generator=generator).tolist()
    to_fit, to_hold = order[: len(order) // 2], order[len(order) // 2 :]
    population = merge([windows[k] for k in to_hold])
    fitted = 4 * held_out + 3  # 48 windows: 9 are held out, 39 fitted
    truths, found = [], {"now": [], "percentile bootstrap": []}
    for _ in range(draws):
        chosen = [to_fit[k] for k in torch.randint(len(to_fit), (fitted,), generator=generator)]
        held = [windows[to_hold[k]] for k in torch.randint(len(to_hold), (held_out,), generator=generator)]
        groups = [
            merge([windows[w] for k, w in enumerate(chosen) if group_of(k, fitted) == g])
            for g in range(group_count(fitted))
        ]
        total, held_total = merge(groups), merge(held)
        spectrum = decompose(total.xx)
        fit = solve(total, spectrum)
        truths.append(r_squared(feature_errors(fit, population), population))
        r2 = r_squared(feature_errors(fit, held_total), held_total)
        errors = torch.stack([feature_errors(fit, w).sum() for w in held])
        spreads = torch.stack([spread(w, held_total.mean_y) for w in held])
        means = torch.stack([w.mean_y for w in held])
        lack = held[0].rows * (means - means.mean(0)).square().sum().item() / (held_out - 1)
        noise = fit_variance(groups, spectrum, held_total)
        found["now"].append(interval(r2, errors, spreads, lack, noise, len(groups)))
        found["percentile bootstrap"].append(bootstrap(errors, held, generator))
    truth = statistics.fmean(truths)
    rows = fitted * windows[0].rows / len(windows[0].mean_x)
    lines = {"truth": f"R² {truth:.4f}, {rows:.1f} fitted rows per feature"}
    for name, ends in found.items():
        above = sum(low > truth for low, _ in ends) / draws
        below = sum(high < truth for _, high in ends) / draws
        width = statistics.median(high - low for low, high in ends)
        lines[name] = f"misses {above + below:.1%} ({above:.1%} above, {below:.1%} below), median width {width:.4f}"
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--text", default="demo")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--windows", type=int, default=400, help="windows of the text that are drawn from")
    parser.add_argument("--blocks", type=int, nargs="+", default=[0, 3, 6])
    parser.add_argument("--held-out", type=int, nargs="+", default=[4, 9, 16])
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    model, tokenizer = compressor.load(args.model)
    sizes = {
        "calib_tokens": args.windows * args.seq_len,
        "select_tokens": args.seq_len,
        "verify_tokens": 2 * args.seq_len,
    }
    windows = compressor.load_text(args.text, tokenizer, seq_len=args.seq_len, **sizes).calibration.windows
    generator = torch.Generator().manual_seed(args.seed)
    for index in args.blocks:
        pool = window_moments(model, find_blocks(model)[index], windows)
        for held_out in args.held_out:
            for name, line in simulate(pool, held_out, args.draws, generator).items():
                print(
                    f"block {index}, {held_out} held-out windows of {args.seq_len} tokens, {name}: {line}", flush=True
                )


if __name__ == "__main__":
    main()
