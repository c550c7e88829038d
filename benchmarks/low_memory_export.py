"""Peak memory of `compress export --low-memory` against the size of the checkpoint, and whether it writes the same.

    python benchmarks/low_memory_export.py ./work [--layers 20] [--to gguf --to hf-dense] [--dtype f16] [--skip-normal]

Builds a Llama with random float32 weights in `./work`, as `low_memory.py` does (2.7 GB with these numbers), puts a
low-rank map in the place of every second FFN without measuring anything, and exports the checkpoint in a process of its
own in each mode. Prints peak resident memory ÷ size of the checkpoint, the same less what such a process takes for a
model of one layer (Python, torch, transformers), the ratio of the times, and whether both wrote the same bytes.
llama.cpp runs in a process of its own and maps the file; it is not in these figures.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from low_memory import add_size_options, build, digest

from compressor.modeling_compressor import Replacement
from compressor.models.blocks import find_blocks
from compressor.models.load import load_model, quiet
from compressor.patch.checkpoint import write_checkpoint
from compressor.patch.tree import patch

RANK = 32


def replace_every_second_ffn(source: Path, out: Path) -> None:
    """The checkpoint with random low-rank maps, written with one layer in memory."""
    model, tokenizer = load_model(str(source), low_memory=True)
    blocks = find_blocks(model)
    generator = torch.Generator().manual_seed(0)
    maps = {block.index: Replacement(block.width, RANK) for block in blocks[::2]}
    for module in maps.values():
        for parameter in module.parameters():
            parameter.data.normal_(generator=generator).mul_(0.1)
    patch(model, blocks, maps)
    out.mkdir()
    with quiet():
        write_checkpoint(model, tokenizer, out, max_shard_size="1GB")


def export(model: Path, to: str, out: Path, *words: str) -> tuple[float, int]:
    """Seconds and peak resident bytes of one export."""
    if out.is_dir():
        shutil.rmtree(out)
    out.unlink(missing_ok=True)
    command = [sys.executable, "-m", "compressor", "export", str(model), "--to", to, "--out", str(out), "--force"]
    began = time.perf_counter()
    process = subprocess.Popen([*command, *words], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"the export ended with {os.waitstatus_to_exitcode(status)}")
    return time.perf_counter() - began, usage.ru_maxrss * 1024


def list_files(path: Path) -> list[Path]:
    return list(path.rglob("*")) if path.is_dir() else [path]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    add_size_options(parser, layers=20)
    parser.add_argument("--to", action="append", choices=("gguf", "hf-dense", "vllm"), help="may be repeated  [gguf]")
    parser.add_argument("--dtype", default="f32")
    args = parser.parse_args()
    places: dict[str, Path] = {}
    for name, layers in (("one", 1), ("many", args.layers)):
        places[name] = args.work / f"{name}-small"
        if not places[name].exists():
            if not (args.work / name).exists():
                build(args.work / name, argparse.Namespace(**{**vars(args), "layers": layers}))
            replace_every_second_ffn(args.work / name, places[name])
    size = sum(file.stat().st_size for file in places["many"].glob("*.safetensors"))
    print(f"checkpoint {size / 1e9:.2f} GB, {args.layers} layers, {RANK} ranks in every second FFN", flush=True)
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # a process that it starts is told to have as much
    print(f"this process, which built it: {own / size:.3f} of its size", flush=True)
    for to in args.to or ["gguf"]:
        words = ("--dtype", args.dtype)
        _, own = export(places["one"], to, args.work / f"one.{to}", *words, "--low-memory")
        slow, least = export(places["many"], to, args.work / f"low.{to}", *words, "--low-memory")
        print(f"{to} --low-memory: peak {least / size:.3f} of the checkpoint, {(least - own) / size:.3f} without what")
        print(f"  one layer takes ({own / 1e6:,.0f} MB); {slow:.0f} s", flush=True)
        if args.skip_normal:
            continue
        quick, most = export(places["many"], to, args.work / f"normal.{to}", *words)
        same = digest(list_files(args.work / f"low.{to}")) == digest(list_files(args.work / f"normal.{to}"))
        print(f"{to}, in memory: peak {most / size:.3f} of the checkpoint; --low-memory takes {slow / quick:.2f} times")
        print(f"  as long; the same bytes: {'yes' if same else 'NO'}", flush=True)


if __name__ == "__main__":
    main()
