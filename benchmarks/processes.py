"""Two processes against one, each with one thread: how much faster the same work is done.

    python benchmarks/processes.py MODEL --text FILE [--seq-len 256] [--tokens 8192] [--job] [-- OPTIONS OF COMPRESS]

Runs `compress profile` (measuring, gradients, every block replaced alone) with one process and then with two under
torchrun, nothing measured before, and prints the ratio of the seconds of every step and of all of them (goal at least
1.7); with `--job` the whole job instead. Importing and loading, which every process does for itself, are not counted.
The figures of both runs must agree. Whole batches are shared out, so there must be several of them: the batch is one
window unless the options say otherwise. Needs two idle cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

GOAL = 1.7
LAUNCH = ["-m", "torch.distributed.run", "--nproc-per-node"]


def run(args: argparse.Namespace, processes: int, folder: Path) -> dict[str, Any]:
    sizes = {"--calib-tokens": args.tokens, "--select-tokens": args.tokens // 2, "--verify-tokens": args.tokens // 2}
    words = [args.model, "--text", args.text, "--seq-len", args.seq_len]
    words += [word for pair in sizes.items() for word in pair]
    words += ["--json", "--cache", folder / f"cache-{processes}", "--batch-size", "1", *args.options]
    job = ["--max-dppl", "5%", "--objective", "size", "--generate", "0", "--out", folder / f"{processes}"]
    command = [*words, *job] if args.job else ["profile", *words]
    launcher = [*LAUNCH, processes] if processes > 1 else []
    line = [sys.executable, *map(str, launcher), "-m", "compressor", *map(str, command)]
    own = {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, env={**os.environ, **own}, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", required=True)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--job", action="store_true", help="the whole job")
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    args = parser.parse_args(own)
    args.options = sys.argv[len(own) + 2 :]  # for compress
    with tempfile.TemporaryDirectory() as folder:
        one, two = (run(args, count, Path(folder)) for count in (1, 2))
    steps = [name for name in one["timings"] if name not in ("total", "one_forward_pass")]
    times = [{name: found["timings"].get(name, 0.0) for name in steps} for found in (one, two)]
    for name in sorted(steps, key=lambda name: -times[0][name]):
        a, b = times[0][name], times[1][name]
        print(f"{name:24} {a:8.1f} s  {b:8.1f} s  {a / max(b, 1e-9):5.2f}×")
    a, b = (sum(found.values()) for found in times)
    print(f"{'all steps':24} {a:8.1f} s  {b:8.1f} s  {a / b:5.2f}× (goal at least {GOAL})")
    pairs = list(zip(*([*found["blocks"], *found.get("attention", [])] for found in (one, two)), strict=True))
    print(f"largest difference in R²_lin: {max(abs(x['r2_lin'] - y['r2_lin']) for x, y in pairs):.1e}")
    if args.job:
        same = all(x["replacement"] == y["replacement"] for x, y in pairs)
        print(f"the same plan: {'yes' if same else 'NO'}")


if __name__ == "__main__":
    main()
