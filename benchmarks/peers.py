"""The strongest training-free peers against our method: same model, windows, tokens and parameter count, in one run.

    python benchmarks/peers.py MODEL --calibration FILE --text wiki=FILE --text prose=FILE --text code=FILE --out DIR

Every method sees the windows of the calibration files alone, and removes at least each of `--fractions` of all
parameters; perplexity is measured on every `--text`. A text that is one of the calibration files gives its last third,
and calibrates with its first half. The built-in model, with four kinds of text:

    python benchmarks/peers.py demo-llama --calibration compressor/demo/text/sotu_speeches.txt \
        --text speeches=compressor/demo/text/sotu_speeches.txt --text prose=compressor/demo/text/austen_novels.txt \
        --text plays=compressor/demo/text/shakespeare_works.txt --calib-tokens 12288 --heal-tokens 40000

Prints the tables that go to DIR/peers.md; DIR/peers.png and .svg draw them (needs matplotlib). Every point is in
DIR/peers.json as soon as it is measured, and a rerun with the same settings goes on from there; delete a method's
points from that file to measure it again. "Seconds" is the time to make the changed model, without measuring it;
statistics that several points share (DIR/moments, as large as the squared widths of all layers) are counted where they
are first needed. `ours-healed` is trained, all others are not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from peer_methods import group_obs
from peer_methods.common import BATCH, Inapplicable, Method, Subject
from peer_methods.layers import by_layers, replaceme, shortgpt
from peer_methods.low_rank import svd
from peer_methods.modegpt import modegpt
from peer_methods.nbl import nbl
from peer_methods.olica import olica
from peer_methods.ours import Ours
from peer_methods.tables import Point, draw, render
from peer_methods.width import optipfair, width
from torch import Tensor

import compressor
from compressor.evaluate.perplexity import evaluate
from compressor.heal.settings import parse_tokens
from compressor.models.blocks import BRANCHES
from compressor.patch.checkpoint import count_parameters
from compressor.runtime.context import RunContext
from compressor.text.windows import bos_prefix

HEALED = "ours-healed"  # the one method that trains


def make_methods(cache: Path | None, heal_tokens: int) -> dict[str, Method]:
    return {
        "shortgpt": by_layers(shortgpt),
        "replaceme": by_layers(replaceme),
        "width": width,
        "optipfair": partial(optipfair, data=False),
        "optipfair-data": partial(optipfair, data=True),
        "svd-llm": svd,
        "nbl": nbl,
        "olica": olica,
        **group_obs.METHODS,
        "modegpt": modegpt,
        "ours-ffn": Ours(("ffn",), cache),
        "ours": Ours(BRANCHES, cache),
        **({HEALED: Ours(("ffn",), cache, heal_tokens)} if heal_tokens else {}),
    }


def cut_windows(files: Iterable[Path], tokenizer: Any, seq_len: int, part: tuple[float, float]) -> Tensor:
    """All windows of this part of each file, one file after another; each begins as the tokenizer begins a text."""
    prefix = bos_prefix(tokenizer)
    rows: list[list[int]] = []
    for file in files:
        text = file.read_text(encoding="utf-8")
        text = text[round(part[0] * len(text)) : round(part[1] * len(text))]
        ids, body = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], seq_len - len(prefix)
        rows += [prefix + ids[start : start + body] for start in range(0, len(ids) - body + 1, body)]
    return torch.tensor(rows, dtype=torch.long).reshape(-1, seq_len)


def choose(windows: Tensor, tokens: int, what: str, *, spread: bool, beside: Iterable[int] = ()) -> list[int]:
    """The numbers of so many windows: the first ones, or evenly spaced ones, without those `beside`."""
    taken = set(beside)
    free = [number for number in range(len(windows)) if number not in taken]
    count = tokens // windows.shape[1]
    if not 0 < count <= len(free):
        raise SystemExit(
            f"error: {tokens} tokens wanted of {what}, which has {len(free)} windows of {windows.shape[1]}"
        )
    return [free[index * len(free) // count] if spread else free[index] for index in range(count)]


def read_calibration(
    args: argparse.Namespace, tokenizer: Any, measured: Iterable[Path]
) -> tuple[Tensor, Tensor | None]:
    """The calibration windows, spread over the files, and those that healing trains on, which may be among them."""
    shared = {file.resolve() for file in measured}
    halves = [
        cut_windows([f], tokenizer, args.seq_len, (0, 0.5 if f.resolve() in shared else 1)) for f in args.calibration
    ]
    windows = torch.cat(halves)
    names = ", ".join(map(str, args.calibration))
    calibration = choose(windows, args.calib_tokens, names, spread=True)
    most = min(args.heal_tokens, windows.numel())  # fewer are trained on several times
    healing = windows[choose(windows, most, names, spread=True)] if args.heal_tokens else None
    return windows[calibration], healing


def read_text(args: argparse.Namespace, tokenizer: Any, name: str, file: Path) -> Tensor:
    shared = file.resolve() in {other.resolve() for other in args.calibration}
    windows = cut_windows([file], tokenizer, args.seq_len, (2 / 3, 1) if shared else (0, 1))
    return windows[choose(windows, args.eval_tokens, f"{name} ({file})", spread=True)]


def measure(model: Any, texts: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: evaluate(model, windows, RunContext(batch_size=BATCH)).perplexity for name, windows in texts.items()}


def digest(tensors: Iterable[Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().numpy().tobytes())
    return found.hexdigest()


class Points:
    """What was measured, in a file; a run with the same settings takes it from there."""

    def __init__(self, file: Path, settings: dict[str, Any]) -> None:
        self.file, self.settings = file, settings
        stored: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        if stored.get("settings", settings) != settings:
            raise SystemExit(f"error: {file} holds points of other settings; name another --out")
        self.baseline: dict[str, float] = stored.get("baseline", {})
        self.points = [Point(**point) for point in stored.get("points", [])]

    def find(self, method: str, fraction: float, trained: int) -> Point | None:
        """The point of a method, trained on so many tokens. One that could not be measured is tried again."""
        asked = (method, fraction, trained)
        found = (p for p in self.points if (p.method, p.fraction, p.trained) == asked and p.perplexities)
        return next(found, None)

    def keep(self, point: Point) -> None:
        others = [p for p in self.points if (p.method, p.fraction) != (point.method, point.fraction)]
        self.points = [*others, point]
        self.write()

    def write(self) -> None:
        points = [asdict(point) for point in self.points]
        content = {"settings": self.settings, "baseline": self.baseline, "points": points}
        part = self.file.with_suffix(".part")
        part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        part.replace(self.file)


def measure_point(name: str, method: Method, subject: Subject, fraction: float, texts: Mapping[str, Tensor]) -> Point:
    total, began = subject.parameters, time.perf_counter()
    wanted = -int(-fraction * total // 1)
    try:
        changed = method(subject, wanted)
    except Inapplicable as reason:
        return Point(name, fraction, reason=str(reason))
    seconds = time.perf_counter() - began
    gone = total - count_parameters(changed)
    if gone < wanted:
        raise RuntimeError(f"{name} removed {gone:,} parameters where {wanted:,} were to go")
    return Point(name, fraction, gone / total, measure(changed, texts), seconds)


def parse_texts(words: Sequence[str]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for word in words:
        name, equals, file = word.partition("=")
        if not (name and equals and file) or name in found:
            raise SystemExit(
                f"error: --text takes NAME=FILE, each name once, got {word}; try --text wiki=wiki.test.raw"
            )
        found[name] = Path(file)
    return found


def parse_fractions(word: str) -> list[float]:
    try:
        found = [float(part.strip().removesuffix("%")) for part in word.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < percent < 100 for percent in found):
        raise SystemExit(f"error: --fractions takes percentages of all parameters, got {word}; try 2.5,5,10,20")
    return sorted({round(percent / 100, 6) for percent in found})


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a directory, demo or demo-llama")
    parser.add_argument("--calibration", required=True, nargs="+", type=Path, help="files that all methods may see")
    parser.add_argument("--text", required=True, action="append", help="NAME=FILE to measure on; give several")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--calib-tokens", type=int, default=24576)
    parser.add_argument("--eval-tokens", type=int, default=8192, help="of every text [8192]")
    parser.add_argument("--heal-tokens", type=parse_tokens, default=0, help="adds ours-healed, trained on so many")
    parser.add_argument("--fractions", default="2.5,5,10,20", help="percentages of all parameters [2.5,5,10,20]")
    parser.add_argument("--methods", default="all", help=f"all, or some of {','.join(make_methods(None, 1))}")
    parser.add_argument("--cache", type=Path, help="where our method keeps what it measured")
    parser.add_argument("--out", type=Path, default=Path("peers"))
    return parser


def main() -> None:
    args = make_parser().parse_args()
    texts, fractions = parse_texts(args.text), parse_fractions(args.fractions)
    known = make_methods(args.cache, args.heal_tokens)
    names = list(known) if args.methods == "all" else args.methods.split(",")
    if HEALED in names and not args.heal_tokens:
        raise SystemExit("error: ours-healed needs --heal-tokens, such as --heal-tokens 200k")
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"error: unknown methods {', '.join(unknown)}; use {', '.join(known)}")
    for file in (*args.calibration, *texts.values()):
        if not file.is_file():
            raise SystemExit(f"error: {file} is no file")
    model: Any
    model, tokenizer = compressor.load(args.model, device="cpu")
    calibration, healing = read_calibration(args, tokenizer, texts.values())
    held_out = {name: read_text(args, tokenizer, name, file) for name, file in texts.items()}
    settings = {
        "model": Path(args.model).name,
        "parameters": count_parameters(model),
        "seq_len": args.seq_len,
        "calib_tokens": calibration.numel(),
        "eval_tokens": next(iter(held_out.values())).numel(),
        "texts": list(held_out),
        "sha256": digest([*model.parameters(), calibration, *held_out.values()]),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    args.out.mkdir(parents=True, exist_ok=True)
    points = Points(args.out / "peers.json", settings)
    if not points.baseline:
        points.baseline = measure(model, held_out)
        points.write()
    shared = args.out / "moments" / settings["sha256"][:16]
    subject = Subject(model, calibration, healing, shared)
    for name in names:
        trained = args.heal_tokens if name == HEALED else 0
        for fraction in fractions:
            if points.find(name, fraction, trained) is None:
                point = replace(measure_point(name, known[name], subject, fraction, held_out), trained=trained)
                points.keep(point)
                print(point.describe(points.baseline), flush=True)
    everything = make_methods(None, 1)
    found = sorted(points.points, key=lambda point: ([*everything].index(point.method), point.fraction))
    table = render(settings, points.baseline, found)
    (args.out / "peers.md").write_text(table, encoding="utf-8")
    print(table, end="")
    try:
        draw(points.baseline, found, args.out)
    except ImportError:
        print("no figure: matplotlib is not installed; pip install matplotlib")


if __name__ == "__main__":
    main()
