"""What measuring costs: time against a plain forward pass over the same tokens, and peak memory at 8 k and 32 k tokens.

    python benchmarks/measure_cost.py MODEL --text FILE [--seq-len 256] [--tokens 16384]

Prints one ratio (goal: at most 1.6) from interleaved runs in one process, then the peak resident memory of a fresh
process that measures 8 k and one that measures 32 k tokens (goal: no growth with the number of tokens). Those two run
with glibc's mmap threshold fixed, so that the figure is the program's memory and not the allocator's slack.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

import torch

import compressor
from compressor.runtime.context import RunContext
from compressor.text import Text, batches

REPEATS = 3
BATCH = 8


def open_text(args: argparse.Namespace, tokenizer: Any, tokens: int) -> Text:
    windows = {"select_tokens": args.seq_len, "verify_tokens": 2 * args.seq_len}
    return compressor.load_text(args.text, tokenizer, seq_len=args.seq_len, calib_tokens=tokens, **windows)


@torch.no_grad()
def plain_forward(model: Any, text: Text) -> None:
    for batch in batches(text.calibration.windows, BATCH):
        model(input_ids=batch, use_cache=False)


def seconds(action: Any) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", required=True)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--branches", nargs="+", default=["ffn"], help="ffn, attention or both  [ffn]")
    parser.add_argument("--memory-only", action="store_true", help="measure once and print peak memory in MiB")
    args = parser.parse_args()
    model, tokenizer = compressor.load(args.model)
    text = open_text(args, tokenizer, args.tokens)

    def measure() -> None:
        compressor.measure(model, text, RunContext(batch_size=BATCH), branches=args.branches)

    if args.memory_only:
        measure()
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
        return
    plain_forward(model, text)  # warm up
    forward, measured = [], []
    for _ in range(REPEATS):
        forward.append(seconds(lambda: plain_forward(model, text)))
        measured.append(seconds(measure))
    ratio = statistics.median(measured) / statistics.median(forward)
    print(f"tokens {text.calibration.tokens}, windows of {args.seq_len}, {REPEATS} interleaved runs, medians")
    print(f"plain forward {statistics.median(forward):.1f} s, measuring {statistics.median(measured):.1f} s")
    print(f"ratio {ratio:.2f} (goal at most 1.6)", flush=True)
    peaks = []
    for tokens in (8192, 32768):
        options = ["--text", args.text, "--seq-len", str(args.seq_len), "--tokens", str(tokens), "--memory-only"]
        command = [sys.executable, __file__, args.model, *options, "--branches", *args.branches]
        fixed = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20)}
        found = subprocess.run(command, check=True, capture_output=True, env=fixed)
        peaks.append(int(found.stdout))
        print(f"peak resident memory at {tokens} tokens: {peaks[-1]} MiB", flush=True)
    print(f"ratio {peaks[1] / peaks[0]:.3f} (goal about 1)")


if __name__ == "__main__":
    main()
