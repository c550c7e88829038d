"""Speed where it is served: prefill and decoding, original against compressed, in transformers and in llama.cpp.

    python benchmarks/serve.py SOURCE COMPRESSED [--text FILE] [--dtype f32 --dtype q8_0] [--prompt 256] [--new 48]

SOURCE is the model that COMPRESSED, a directory that compress wrote, was made from; both are written as GGUF for
llama.cpp (Llama-type models; `pip install xllamacpp`). The two take turns in one run, so a slow moment of the
machine hits both; each figure is the fastest of its turns, and the ratio is compressed over original. With --text the
perplexity of the compressed model in both runtimes is printed too.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import compressor
from compressor.export.gguf import DTYPES, MULTIPLE, write_gguf
from compressor.export.llama import convert_to_llama
from compressor.export.llamacpp import Runner, Settings

Clock = Callable[[], tuple[float, float]]
Figures = dict[str, tuple[float, float]]  # (original, compressed) tokens per second


@torch.no_grad()
def time_transformers(model: Any, prompt: int, new: int) -> tuple[float, float]:
    """Tokens per second of a prefill, and of decoding after it."""
    rows = (7 * torch.arange(1, prompt + 1) % model.config.vocab_size)[None]
    began = time.perf_counter()
    output = model(input_ids=rows, use_cache=True, logits_to_keep=1)
    middle = time.perf_counter()
    for _ in range(new):
        token = output.logits[:, -1:].argmax(-1)
        output = model(input_ids=token, past_key_values=output.past_key_values, use_cache=True)
    return prompt / (middle - began), new / (time.perf_counter() - middle)


def time_llamacpp(run: Runner, prompt: int, new: int) -> tuple[float, float]:
    speed = run.measure_speed(prompt, new)
    return speed.prefill, speed.decode


def take_turns(first: Clock, second: Clock, turns: int) -> Figures:
    """The fastest of several runs of each; the first run of each warms up and does not count."""
    runs = [(first(), second()) for _ in range(turns + 1)][1:]
    return {
        step: (max(one[i] for one, _ in runs), max(two[i] for _, two in runs))
        for i, step in enumerate(("prefill", "decode"))
    }


def show(runtime: str, figures: Figures) -> None:
    for what, (original, small) in figures.items():
        print(f"| {runtime} | {what} | {original:,.1f} | {small:,.1f} | {small / original:.3f}× |", flush=True)


def perplexity(log_probabilities: list[float]) -> float:
    return math.exp(-sum(log_probabilities) / len(log_probabilities))


@torch.no_grad()
def log_probabilities_of(model: Any, ids: list[int]) -> list[float]:
    found = model(input_ids=torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
    return found.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


def compare_texts(model: Any, runner: Runner, tokenizer: Any, file: Path, tokens: int) -> None:
    """Perplexity, the largest difference of a log-probability, and greedy tokens, in both runtimes."""
    ids = tokenizer(file.read_text(encoding="utf-8")[: 20 * tokens])["input_ids"][:tokens]
    expected, found = log_probabilities_of(model, ids), runner.log_probabilities(ids)
    off = max(abs(one - other) for one, other in zip(expected, found, strict=True))
    start = torch.tensor([ids[:64]])
    greedy = model.generate(start, max_new_tokens=48, min_new_tokens=48, do_sample=False)[0, 64:].tolist()
    continued = runner.continue_greedily(ids[:64], 48)
    same = sum(one == other for one, other in zip(greedy, continued, strict=False))
    one, other = perplexity(expected), perplexity(found)
    off_by = f"{other / one - 1:+.4%}"
    print(f"\n{len(ids) - 1} tokens: perplexity {one:.4f} in transformers, {other:.4f} in llama.cpp ({off_by}),")
    print(f"log-probabilities differ by at most {off:.2g}; {same} of {len(greedy)} greedy tokens equal\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("compressed")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--tokens", type=int, default=512, help="of the text, for the perplexity")
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="of the GGUF files; may be repeated  [f32]")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--new", type=int, default=48)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    models = [compressor.load(name, allow_compressed=True) for name in (args.source, args.compressed)]
    sizes = [sum(parameter.numel() for parameter in model.parameters()) for model, _ in models]
    print(f"{args.source}: {sizes[0]:,} parameters; {args.compressed}: {sizes[1]:,} ({sizes[1] / sizes[0] - 1:+.2%})")
    print(
        f"{args.prompt} tokens of prompt, {args.new} decoded, {args.threads} threads, fastest of {args.turns} turns\n"
    )
    print("| runtime | step | original tokens/s | compressed tokens/s | ratio |\n|---|---|---|---|---|")
    clocks = [partial(time_transformers, model, args.prompt, args.new) for model, _ in models]
    show("transformers f32", take_turns(*clocks, args.turns))
    context = max(args.tokens, args.prompt + args.new) + 8
    usual = Settings(threads=args.threads, context=context, cache_type="f16", flash_attention=True)
    with tempfile.TemporaryDirectory() as folder:
        for dtype in args.dtype or ["f32"]:
            files = [Path(folder, f"{i}-{dtype}.gguf") for i in range(2)]
            for file, (model, tokenizer) in zip(files, models, strict=True):
                llama = convert_to_llama(model, multiple=MULTIPLE, keep_original_widths=True)
                write_gguf(llama, tokenizer, file, dtype, file.stem)
            with Runner(files[0], usual) as original, Runner(files[1], usual) as small:
                clocks = [partial(time_llamacpp, run, args.prompt, args.new) for run in (original, small)]
                show(f"llama.cpp {dtype}", take_turns(*clocks, args.turns))
            one, other = (file.stat().st_size / 1e6 for file in files)
            show(f"llama.cpp {dtype}", {"file, MB": (one, other)})
            if args.text:
                with Runner(files[1], Settings(threads=args.threads, context=context)) as run:
                    compare_texts(models[1][0], run, models[1][1], args.text, args.tokens)
            for file in files:
                file.unlink()


if __name__ == "__main__":
    main()
