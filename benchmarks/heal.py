"""What healing wins, and on which text: one plan, fitted and healed on different texts, measured on several others.

    compress ./smollm2-135m --remove 10% --text wiki.valid.raw --text wiki.test.raw --out ./smaller
    python benchmarks/heal.py ./smollm2-135m --plan ./smaller/compression.json --tokens 60k --out DIR \
        --text wiki=wiki.valid.raw --text wiki=wiki.test.raw --text prose=austen.txt --text speeches=sotu.txt \
        --text code=sympy.txt --sets wiki mix self wiki+code

The shapes of the plan are fitted on each set of texts (named above, or built in: mix, self), then healed on the same
texts. Every text is cut into its usual splits: sets see the calibration part only, all figures are of the verification
part. The table has ΔPPL before and after healing on every text, the share that is left, and the worst case.

The control heals the source itself, all of its feed-forward weights, in the same way: its divergence from itself is
zero, and so must be every step. With --control-only nothing else is run. Results go to DIR/heal.json as they come; a
run with the same settings goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from compressor.evaluate.perplexity import evaluate
from compressor.heal.distil import heal
from compressor.heal.settings import HealSettings, parse_tokens
from compressor.heal.student import is_leaf
from compressor.models.blocks import find_blocks, find_branches
from compressor.models.load import load_model
from compressor.models.writer import Writer
from compressor.patch.tree import HealedReplacements, Replacements, patched
from compressor.pipelines.apply import read_plan, shapes_of
from compressor.plan.api import fit_shapes
from compressor.runtime.cache import Cache, default_directory
from compressor.runtime.context import RunContext
from compressor.runtime.progress import Progress
from compressor.text import Text, load_text


class Bench:
    """A model, the texts it is measured on, and what was measured so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        progress = Progress(visible=True)
        self.context = RunContext(cache=Cache(args.cache, progress), progress=progress)
        self.model, self.tokenizer = load_model(args.model)
        self.blocks = find_branches(self.model)
        self.files: dict[str, list[str]] = {}
        for word in args.text:
            name, _, file = word.partition("=")
            self.files.setdefault(name, []).append(file)
        self.measured: dict[str, Tensor] = {
            name: self.load([f"{name}={file}" for file in files]).verification.windows
            for name, files in self.files.items()
        }
        self.file = args.out / "heal.json"
        self.results: dict[str, Any] = json.loads(self.file.read_text()) if self.file.is_file() else {}

    def load(self, words: list[str], calib_tokens: int | None = None, heal_tokens: int = 0) -> Text:
        args = self.args
        return load_text(
            words,
            self.tokenizer,
            seq_len=args.seq_len,
            calib_tokens=calib_tokens or 10 * args.seq_len,
            select_tokens=args.select_tokens,
            verify_tokens=args.verify_tokens,
            heal_tokens=heal_tokens,
            writer=Writer(self.model, self.tokenizer, self.context),
        )

    def words(self, chosen: str) -> list[str]:
        """The texts of a set such as wiki+code, as arguments of --text."""
        names = chosen.split("+")
        return [f"{name}={file}" for name in names for file in self.files.get(name, [name])]

    def perplexities(self, fits: Replacements | None = None) -> dict[str, float]:
        with patched(self.model, self.blocks, fits or {}):
            return {
                name: evaluate(self.model, windows, self.context).perplexity for name, windows in self.measured.items()
            }

    def keep(self, name: str, values: Mapping[str, Any]) -> None:
        self.results[name] = dict(values)
        self.file.write_text(json.dumps(self.results, indent=1) + "\n")

    def settings(self) -> HealSettings:
        return HealSettings.for_width(parse_tokens(self.args.tokens), self.blocks[0].width, params=self.args.params)

    def run_set(self, chosen: str) -> None:
        """Fit and heal on one set of texts, and measure on all texts."""
        args, name = self.args, f"{chosen} {self.args.tokens}"
        if name in self.results:
            return
        text = self.load(self.words(chosen), args.calib_tokens, parse_tokens(args.tokens))
        fits = fit_shapes(self.model, shapes_of(read_plan(args.plan)), text, self.context, compensated=args.compensated)
        plain = self.perplexities(fits)
        began = time.perf_counter()
        healing = heal(self.model, self.blocks, fits, text, self.settings(), self.context)
        minutes = (time.perf_counter() - began) / 60
        assert text.healing is not None
        self.keep(
            name,
            {
                "plain": plain,
                "healed": self.perplexities(healing.fits),
                "minutes": minutes,
                "tokens": healing.tokens,
                "different_tokens": text.healing.tokens,
                "kl": [healing.before.kl, healing.after.kl],
                "stopped": healing.stopped,
            },
        )

    def run_control(self) -> None:
        """Heal the source itself for a few steps: nothing may change."""
        paths = [block.path for block in find_blocks(self.model)]
        beside = {
            f"{path}.{name}" if name else path: module
            for path in paths
            for name, module in self.model.get_submodule(path).named_modules()
            if is_leaf(module)
        }
        text = self.load(self.words(self.args.sets[0]), self.args.calib_tokens, 8192)
        settings = HealSettings.for_width(8192, self.blocks[0].width, params="replaced")
        source = HealedReplacements({}, beside)
        healing = heal(self.model, self.blocks, source, text, settings, self.context, step="control")
        self.keep("control", {"kl": healing.after.kl, "healed": self.perplexities(healing.fits)})


def table(bench: Bench) -> str:
    base, names = bench.results["source"], list(bench.measured)
    lines = [
        "| fitted and healed on | " + " | ".join(names) + " | worst share left |",
        "|---|" + "---|" * (len(names) + 1),
    ]
    for chosen, row in bench.results.items():
        if "plain" not in row:
            continue
        cells, shares = [], []
        for name in names:
            before, after = row["plain"][name] - base[name], row["healed"][name] - base[name]
            shares.append(after / before)
            cells.append(f"{before:+.2f} → {after:+.2f} ({after / before:.2f})")
        lines.append(f"| {chosen} ({row['minutes']:.0f} min) | " + " | ".join(cells) + f" | {max(shares):.2f} |")
    if "control" in bench.results:
        control = bench.results["control"]
        moved = max(abs(control["healed"][name] - base[name]) for name in names)
        lines.append(f"\ncontrol, the source healed: KL {control['kl']:.6f}, perplexity moves by at most {moved:.4f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--plan", type=Path, required=True, help="plan.json, or compression.json of a checkpoint")
    parser.add_argument("--text", action="append", required=True, help="NAME=FILE, to measure on and to name in --sets")
    parser.add_argument(
        "--sets", nargs="+", default=["mix"], help="texts to fit and heal on: wiki, mix, self, wiki+code"
    )
    parser.add_argument("--tokens", default="60k", help="to heal on")
    parser.add_argument("--params", default="norms", choices=["replaced", "norms", "all"])
    parser.add_argument("--compensated", action="store_true", help="fit in order before healing")
    parser.add_argument("--control-only", action="store_true")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--calib-tokens", type=int, default=24576)
    parser.add_argument("--select-tokens", type=int, default=4096)
    parser.add_argument("--verify-tokens", type=int, default=8192)
    parser.add_argument("--cache", type=Path, default=default_directory())
    parser.add_argument("--out", type=Path, default=Path("heal"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(args)
    if "source" not in bench.results:
        bench.keep("source", bench.perplexities())
    if not args.control_only:
        for chosen in args.sets:
            bench.run_set(chosen)
            print(table(bench), flush=True)
    bench.run_control()
    print(table(bench))
    (args.out / "heal.md").write_text(table(bench) + "\n")


if __name__ == "__main__":
    main()
