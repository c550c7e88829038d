"""Speed where it is served: prefill and decoding, original against compressed, in transformers and in llama.cpp.

    python benchmarks/serve.py SOURCE COMPRESSED [--text FILE] [--dtype f32 --dtype q8_0] [--context 2048 4096]

SOURCE is the model that COMPRESSED, a directory that compress wrote, was made from; both are written as GGUF for
llama.cpp (Llama-type models; `pip install xllamacpp`). The two take turns in one run, so a slow moment of the machine
hits both. A figure is the median of its turns; the ratio, compressed over original, is the median over pairs of turns
with its 95 % interval.

Decoding is also timed at the end of a long context (--context; contexts that the model does not have are left out),
beside what the files predict: FLOPs per token (two for each weight that a token is multiplied with, and the attention
over all tokens before) and bytes read per token (all of those weights, and the keys and values of all tokens before).
Both are counted in the GGUF files themselves. "Holds" says that decoding became at least as much faster as predicted,
within 5 %: by the median, and in brackets by the interval where that says otherwise.

With --text the perplexity of the compressed model in both runtimes is printed too. --out writes all of it as JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import compressor
from compressor.evaluate.speed import PairedTimes, time_in_turns
from compressor.export.gguf import DTYPES, MULTIPLE, write_gguf
from compressor.export.llama import convert_to_llama
from compressor.export.llamacpp import Runner, Settings

CACHED_BYTES = 2  # of a number in the cache: keys and values are kept as f16
TOLERANCE = 0.05  # of a predicted ratio that a measured one may miss
Clock = Callable[[], float]  # seconds per token


@dataclass(frozen=True)
class Costs:
    """What decoding one token costs in a GGUF file."""

    weights: int  # that a token is multiplied with
    weight_bytes: int
    attended: int  # numbers of the cache that are multiplied, per token of context: every query head reads its own
    cached: int  # numbers that the cache keeps per token

    def flops(self, context: int) -> int:
        return 2 * self.weights + 2 * self.attended * context

    def read(self, context: int) -> int:
        """Bytes."""
        return self.weight_bytes + CACHED_BYTES * self.cached * context


@dataclass(frozen=True)
class LongContext:
    """Decoding at the end of a context: how many times as fast it became, and how many times by FLOPs and by bytes."""

    dtype: str
    context: int
    times: PairedTimes
    by_flops: float
    by_bytes: float

    def describe(self) -> str:
        ratio, (low, high) = self.times.ratio, self.times.ci95
        cells = [f"{ratio:.3f}× ({low:.3f} … {high:.3f})"]
        for predicted in (self.by_flops, self.by_bytes):
            least = (1 - TOLERANCE) * predicted
            holds = "holds" if ratio >= least else "misses"
            doubt = " (not sure)" if low < least <= high else ""
            cells += [f"{predicted:.3f}×", f"{ratio / predicted:.3f}, {holds}{doubt}"]
        return f"| {self.dtype} | {self.context:,} | {' | '.join(cells)} |"


def count_costs(file: Path) -> Costs:
    """Counted in the tensors of the file and in its numbers of heads."""
    import gguf

    reader = gguf.GGUFReader(file)
    tied = not any(tensor.name == "output.weight" for tensor in reader.tensors)
    # An embedding is looked up; it is multiplied only where it is the head too.
    read = [tensor for tensor in reader.tensors if tied or tensor.name != "token_embd.weight"]

    def field(name: str) -> Any:
        found = reader.get_field(f"deci.{name}")
        assert found is not None, name
        return found.contents()

    layers = field("block_count")
    heads, groups = (
        [value] * layers if isinstance(value, int) else value
        for value in (field("attention.head_count"), field("attention.head_count_kv"))
    )
    both = field("attention.key_length") + field("attention.value_length")
    return Costs(
        weights=sum(int(tensor.n_elements) for tensor in read if len(tensor.shape) == 2),
        weight_bytes=sum(int(tensor.n_bytes) for tensor in read),
        attended=both * sum(count for count, group in zip(heads, groups, strict=True) if group),
        cached=both * sum(groups),
    )


@torch.no_grad()
def time_transformers(model: Any, prompt: int, new: int, step: str) -> float:
    """Seconds per token of a prefill, or of decoding after it."""
    rows = (7 * torch.arange(1, prompt + 1) % model.config.vocab_size)[None]
    began = time.perf_counter()
    output = model(input_ids=rows, use_cache=True, logits_to_keep=1)
    if step == "prefill":
        return (time.perf_counter() - began) / prompt
    began = time.perf_counter()
    for _ in range(new):
        token = output.logits[:, -1:].argmax(-1)
        output = model(input_ids=token, past_key_values=output.past_key_values, use_cache=True)
    return (time.perf_counter() - began) / new


def time_llamacpp(run: Runner, prompt: int, new: int, step: str) -> float:
    """The same by llama.cpp's clock."""
    speed = run.measure_speed(prompt, new)
    return 1 / (speed.prefill if step == "prefill" else speed.decode)


def time_long_context(run: Runner, context: int, new: int, vocabulary: int) -> float:
    """Seconds per token of decoding the last tokens of a context; what stands before them is in the cache."""
    ids = [7 * i % vocabulary for i in range(1, context - new + 1)]
    timings = run.complete(ids, new, ignore_eos=True, cache_prompt=True)["timings"]
    return 1 / float(timings["predicted_per_second"])


def show(runtime: str, step: str, times: PairedTimes) -> None:
    low, high = times.ci95
    speeds = f"{1 / times.before:,.1f} | {1 / times.after:,.1f}"
    print(f"| {runtime} | {step} | {speeds} | {times.ratio:.3f}× ({low:.3f} … {high:.3f}) |", flush=True)


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
    parser.add_argument("--context", type=int, nargs="*", default=[2048, 4096], help="long contexts to decode in")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--no-transformers", action="store_true", help="time llama.cpp alone")
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    models = [compressor.load(name, allow_compressed=True) for name in (args.source, args.compressed)]
    sizes = [sum(parameter.numel() for parameter in model.parameters()) for model, _ in models]
    longest = min(model.config.max_position_embeddings for model, _ in models)
    contexts = [context for context in args.context if args.new < context <= longest]
    print(f"{args.source}: {sizes[0]:,} parameters; {args.compressed}: {sizes[1]:,} ({sizes[1] / sizes[0] - 1:+.2%})")
    print(f"{args.prompt} tokens of prompt, {args.new} decoded, {args.threads} threads, medians of paired turns\n")
    print("| runtime | step | original tokens/s | compressed tokens/s | ratio |\n|---|---|---|---|---|")
    short: dict[str, PairedTimes] = {}

    def compare(runtime: str, clock: Callable[..., float], sources: list[Any]) -> None:
        for step in ("prefill", "decode"):
            clocks = [partial(clock, source, args.prompt, args.new, step) for source in sources]
            short[f"{runtime} {step}"] = time_in_turns(*clocks)
            show(runtime, step, short[f"{runtime} {step}"])

    if not args.no_transformers:
        compare("transformers f32", time_transformers, [model for model, _ in models])
    context = max([args.tokens, args.prompt + args.new, *contexts]) + 8
    usual = Settings(threads=args.threads, context=context, cache_type="f16", flash_attention=True)
    long: list[LongContext] = []
    costs: dict[str, list[Costs]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for dtype in args.dtype or ["f32"]:
            files = [Path(folder, f"{i}-{dtype}.gguf") for i in range(2)]
            for file, (model, tokenizer) in zip(files, models, strict=True):
                llama = convert_to_llama(model, multiple=MULTIPLE, keep_original_widths=True)
                write_gguf(llama, tokenizer, file, dtype, file.stem)
            costs[dtype] = [count_costs(file) for file in files]
            with Runner(files[0], usual) as original, Runner(files[1], usual) as small:
                compare(f"llama.cpp {dtype}", time_llamacpp, [original, small])
                vocabulary = original.vocabulary_size()
                for length in contexts:
                    clocks = [
                        partial(time_long_context, run, length, args.new, vocabulary) for run in (original, small)
                    ]
                    times = time_in_turns(*clocks)
                    show(f"llama.cpp {dtype}", f"decode at {length:,}", times)
                    middle = length - args.new // 2
                    flops, read = (
                        [count(middle) for count in counts]
                        for counts in zip(*((each.flops, each.read) for each in costs[dtype]), strict=True)
                    )
                    long.append(LongContext(dtype, length, times, flops[0] / flops[1], read[0] / read[1]))
            one, other = (file.stat().st_size / 1e6 for file in files)
            print(f"| llama.cpp {dtype} | file, MB | {one:,.1f} | {other:,.1f} | {other / one:.3f}× |", flush=True)
            if args.text:
                with Runner(files[1], Settings(threads=args.threads, context=context)) as run:
                    compare_texts(models[1][0], run, models[1][1], args.text, args.tokens)
            for file in files:
                file.unlink()
    if long:
        said = " | ".join(f"{what} say | measured ÷ {what}" for what in ("FLOPs", "bytes"))
        print(f"\n| GGUF | context | decoding became faster by | {said} |\n|---|---|---|---|---|---|---|")
        for point in long:
            print(point.describe())
    for dtype, (before, after) in costs.items():
        kept, smaller = CACHED_BYTES * before.cached, CACHED_BYTES * after.cached
        print(f"\n{dtype}: cache {kept:,} → {smaller:,} bytes per token ({smaller / kept - 1:+.1%})")
    if args.out:
        record = {
            "parameters": sizes,
            "short": {name: asdict(times) for name, times in short.items()},
            "long": [asdict(point) for point in long],
            "costs": {dtype: [asdict(each) for each in pair] for dtype, pair in costs.items()},
        }
        args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
