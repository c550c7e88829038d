"""Peak memory of `--low-memory` against the size of the checkpoint, and its time against normal mode.

    python benchmarks/low_memory.py ./work [--layers 40] [--width 512] [--heads 128] [--neurons 256] [--skip-normal]

Builds a Llama with random float32 weights in `./work` (5.4 GB with these numbers, most of it attention, which is left
as it is, so that solving takes little of the time; written tensor by tensor, in shards with an index), and runs the
whole job on it in a process of its own in each mode (measure, search, fit, verify, write, read again; few tokens, for
they are not what takes the memory). Prints peak resident memory ÷ checkpoint size (goal at most 0.33 with
--low-memory), the ratio of the times, and whether both wrote the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from transformers import AutoModelForCausalLM, LlamaConfig

from compressor.models.safetensors_files import INDEX, write_shard
from compressor.runtime.names import BUILT_IN_MODELS

GOAL = 0.33
JOB = "--max-dppl 50% --confidence 0 --text demo --seq-len 32 --calib-tokens 640 --select-tokens 64 --verify-tokens 64"
OPTIONS = [
    *JOB.split(),
    *["--generate", "0", "--objective", "size", "--batch-size", "4", "--no-swap", "--branches", "ffn"],
]


def build(directory: Path, args: argparse.Namespace) -> None:
    """A checkpoint larger than this process."""
    vocabulary = json.loads((BUILT_IN_MODELS["demo"] / "config.json").read_text())["vocab_size"]
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=args.width,
        intermediate_size=args.neurons,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads,
        head_dim=128,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
        dtype="float32",
    )
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(config).state_dict()
    directory.mkdir(parents=True)
    config.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(BUILT_IN_MODELS["demo"] / name, directory / name)

    def read(name: str) -> torch.Tensor:
        shape = state[name].shape
        if len(shape) == 1:
            return torch.ones(shape)
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "little")
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul_(0.5 / shape[1] ** 0.5)

    split = split_torch_state_dict_into_shards(
        state, filename_pattern="model{suffix}.safetensors", max_shard_size="1GB"
    )
    for file, names in split.filename_to_tensors.items():
        write_shard(directory / file, {name: state[name] for name in names}, read)
    index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
    (directory / INDEX).write_text(json.dumps(index))


def compress(model: Path, out: Path, cache: Path, *words: str) -> tuple[float, int]:
    """Seconds and peak resident bytes of one whole job."""
    for place in (out, cache):
        shutil.rmtree(place, ignore_errors=True)
    command = [
        sys.executable,
        "-m",
        "compressor",
        str(model),
        *OPTIONS,
        "--out",
        str(out),
        "--cache",
        str(cache),
        *words,
    ]
    began = time.perf_counter()
    process = subprocess.Popen(command)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"the job ended with {os.waitstatus_to_exitcode(status)}")
    return time.perf_counter() - began, usage.ru_maxrss * 1024


def digest(files: Iterable[Path]) -> str:
    sha = hashlib.sha256()
    for file in sorted(files):
        with file.open("rb") as stream:
            while part := stream.read(2**24):
                sha.update(part)
    return sha.hexdigest()


def add_size_options(parser: argparse.ArgumentParser, layers: int) -> None:
    parser.add_argument("--layers", type=int, default=layers)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--heads", type=int, default=128)
    parser.add_argument("--neurons", type=int, default=256)
    parser.add_argument("--skip-normal", action="store_true", help="only --low-memory")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    add_size_options(parser, layers=40)
    args = parser.parse_args()
    model = args.work / "model"
    if not model.exists():
        build(model, args)
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    shards = len(list(model.glob("*.safetensors")))
    print(f"checkpoint {size / 1e9:.2f} GB, {args.layers} layers, {shards} shards", flush=True)
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"this process, which built it: {own / size:.3f} of its size", flush=True)
    slow, least = compress(model, args.work / "low", args.work / "cache-low", "--low-memory")
    share = f"{least / size:.3f} of the checkpoint (goal at most {GOAL})"
    print(f"--low-memory: peak {least / 1e9:.2f} GB, {share}, {slow:.0f} s", flush=True)
    if args.skip_normal:
        return
    quick, most = compress(model, args.work / "normal", args.work / "cache-normal")
    print(f"normal mode: peak {most / 1e9:.2f} GB, {most / size:.3f} of the checkpoint, {quick:.0f} s")
    low, normal = ((args.work / mode).glob("*.safetensors") for mode in ("low", "normal"))
    same = digest(low) == digest(normal)
    print(f"time of --low-memory ÷ normal: {slow / quick:.2f}; the same bytes: {'yes' if same else 'NO'}")


if __name__ == "__main__":
    main()
