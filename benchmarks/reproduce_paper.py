"""The claims of arXiv 2606.19379, one per line, each with the figure measured on models that can be had, and whether it
holds.

    python benchmarks/get_smollm2.py ./smollm2-135m
    python benchmarks/get_stories15m.py ./stories15m --stories stories.txt
    python benchmarks/reproduce_paper.py ./smollm2-135m ./stories15m demo \\
        --text wiki=wiki.test.raw --text prose=sotu_speeches.txt --text code=python_code_sympy.txt \\
        --text stories15m:stories=stories.txt --text stories15m:prose=austen_novels.txt

Models are directories, hub ids (gpt2, EleutherAI/pythia-160m and JackFram/llama-160m run by the same command wherever
their weights are reachable) or `demo` (on its own text). A text with a model's name before a colon is for that model
alone, which then takes no other. A model that cannot be had is told in a line and left out. Every
model is profiled as `compress profile MODEL --text … --probe bilinear --probe trained` does, and crossed with itself
untrained: the same configuration with random weights (seed 0), given the trained model's inputs (`--cross`), so that
"learned, not architectural" is tested. What was measured before is taken from the cache (`--cache`). A claim holds on a
model when its figure is on the stated side of the bound beside it; the bounds are this script's, not the paper's.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from compressor.models.load import load_model
from compressor.pipelines import profile
from compressor.pipelines.describe_profile import number
from compressor.pipelines.recipe import validate
from compressor.report.formats import last_part
from compressor.runtime.cache import Cache, default_directory
from compressor.runtime.context import RunContext
from compressor.runtime.errors import InputError
from compressor.runtime.names import BUILT_IN_MODELS
from compressor.runtime.progress import Progress

Report = dict[str, Any]


@dataclass(frozen=True)
class Claim:
    """What the paper says, the figure that tests it, and when it holds. A figure of None was not measured."""

    said: str
    figure: str
    measure: Callable[[Report], float | None]
    holds: Callable[[float], bool]
    bound: str


def shape(key: str) -> Callable[[Report], float | None]:
    return lambda report: float(report["shape"][key])


def jumps(report: Report) -> float:
    """The mean step between neighbours, of the spread: 1/(blocks − 1) for a profile that rises evenly."""
    found = report["shape"]
    return float(found["mean_jump"] / max(found["spread"], 1e-9)) * (len(report["blocks"]) - 1)


def worst_agreement(report: Report) -> float | None:
    pairs = [pair["rank_correlation"] for pair in report.get("corpus_agreement") or []]
    return min(pairs) if pairs and None not in pairs else None


def probe(kind: str, key: str) -> Callable[[Report], float | None]:
    return lambda report: report.get("probes", {}).get(kind, {}).get(key)


def hidden_outlier(report: Report) -> float | None:
    """How much dearer the dearest of the five most linear blocks is than the median block."""
    blocks = [b for b in report["blocks"] if "swap" in b]
    if len(blocks) < 5:
        return None
    rises = sorted(b["swap"]["delta"] for b in blocks)
    top = sorted(blocks, key=lambda b: -b["r2_lin"])[:5]
    return float(max(b["swap"]["delta"] for b in top) / max(rises[len(rises) // 2], 1e-9))


def cheapest(report: Report) -> float | None:
    rises = [b["swap"]["delta"] for b in report["blocks"] if "swap" in b]
    return min(rises) if rises else None


def learned(report: Report) -> float | None:
    """How far the profile of the untrained blocks is from the trained ones', on the same inputs."""
    blocks = [b["cross"] for b in report["blocks"] if "cross" in b]
    if not blocks:
        return None
    return sum(abs(b["own"] - b["other_on_own"]) for b in blocks) / len(blocks)


CLAIMS = (
    Claim("blocks are heterogeneous", "spread of R²_lin over blocks", shape("spread"), lambda v: v >= 0.3, "≥ 0.3"),
    Claim(
        "linearity is not monotone in depth",
        "rank correlation of R²_lin with depth, absolute,",
        lambda r: number(abs(r["shape"]["rank_correlation_with_depth"] or 0.0)),
        lambda v: v < 0.8,
        "< 0.8",
    ),
    Claim(
        "neighbours jump", "mean step between neighbours × (blocks − 1) ÷ spread", jumps, lambda v: v >= 1.5, "≥ 1.5"
    ),
    Claim(
        "a bilinear probe gains little",
        "mean gain in R² of 16 products",
        probe("bilinear", "mean_gain"),
        lambda v: v < 0.05,
        "< 0.05",
    ),
    Claim(
        "its gain is uncorrelated with what is left",
        "Pearson correlation of gain and 1 − R²_lin, absolute,",
        lambda r: None if (v := probe("bilinear", "pearson")(r)) is None else abs(v),
        lambda v: v < 0.3,
        "< 0.3",
    ),
    Claim("corpora agree", "least rank correlation of two corpora", worst_agreement, lambda v: v >= 0.8, "≥ 0.8"),
    Claim(
        "a trained baseline under-converges",
        "mean R² that Adam stays below the closed shape",
        probe("trained", "mean_gap"),
        lambda v: v >= 0.02,
        "≥ 0.02",
    ),
    Claim("one block goes cheaply", "least ΔPPL of a block alone", cheapest, lambda v: v <= 1.0, "≤ 1.0"),
    Claim(
        "a high R²_lin can hide an outlier block",
        "dearest of the five most linear blocks ÷ median block, ΔPPL",
        hidden_outlier,
        lambda v: v >= 10,
        "≥ 10",
    ),
    Claim(
        "linearity is learned, not architectural",
        "mean distance of R²_lin, trained from untrained, on the same inputs",
        learned,
        lambda v: v >= 0.1,
        "≥ 0.1",
    ),
)


def untrained(model: str, folder: Path, trust: bool = False) -> Path:
    """The same configuration with random weights, and the same tokenizer."""
    loaded, tokenizer = load_model(model, trust_remote_code=trust)
    place = folder / f"{last_part(model)}-untrained"
    torch.manual_seed(0)
    config = AutoConfig.for_model(**{**loaded.config.to_dict(), "dtype": "float32"})
    AutoModelForCausalLM.from_config(config).save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


def activation(model: str) -> str:
    config = load_model(model)[0].config.get_text_config()
    names = ("hidden_act", "activation_function", "hidden_activation")
    return str(next((getattr(config, n) for n in names if getattr(config, n, None)), "unknown"))


def texts_of(model: str, options: argparse.Namespace) -> list[str]:
    """The texts that are for this model alone, else those that are for all."""
    if model in BUILT_IN_MODELS:
        return ["demo"]
    names = {last_part(name) for name in options.models}
    split = [(word.partition(":")[0], word.partition(":")[2]) for word in options.text]
    own = [rest for name, rest in split if name == last_part(model)]
    return own or [word for word, (name, _) in zip(options.text, split, strict=True) if name not in names]


def study(model: str, options: argparse.Namespace, context: RunContext) -> Report | None:
    texts = texts_of(model, options)
    with tempfile.TemporaryDirectory() as folder:
        try:
            values = {
                "text": texts,
                "seq_len": options.seq_len,
                "calib_tokens": options.calib_tokens,
                "probe": ["bilinear", "trained"],
                "swap": True,
                "cross": None if options.no_untrained else str(untrained(model, Path(folder))),
            }
            report = profile.run(validate(values, "options"), [model], context, write=False).to_json_value()
        except InputError as error:
            print(f"{model}: left out: {error}", file=sys.stderr)
            return None
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--text", action="append", required=True)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--calib-tokens", type=int, default=16384)
    parser.add_argument("--cache", type=Path, default=default_directory())
    parser.add_argument("--no-untrained", action="store_true", help="leave out the untrained copy of each model")
    parser.add_argument("--json", type=Path, help="keep the records here")
    options = parser.parse_args()
    progress = Progress(visible=True)
    context = RunContext(progress=progress, cache=Cache(options.cache, progress))
    found = {model: report for model in options.models if (report := study(model, options, context))}
    if options.json:
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    if not found:
        raise SystemExit("no model could be had")
    print("| claim | figure | " + " | ".join(last_part(model) for model in found) + " |")
    print("|---|---|" + "---|" * len(found))
    for claim in CLAIMS:
        cells = [tell(claim, claim.measure(report)) for report in found.values()]
        print(f"| {claim.said} | {claim.figure} {claim.bound} | " + " | ".join(cells) + " |")
    # One activation, many values: blocks of one model must differ by more than the models' medians do.
    shapes = [report["shape"] for report in found.values()]
    between = max(s["median"] for s in shapes) - min(s["median"] for s in shapes)
    cells = [
        f"{activation(model)}, {s['spread']:.3f} against {between:.3f}: {verdict(s['spread'] > between)}"
        for model, s in zip(found, shapes, strict=True)
    ]
    print(
        "| activation does not set it | spread inside the model > largest difference of medians | "
        + " | ".join(cells)
        + " |"
    )


def tell(claim: Claim, value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3f}: {verdict(claim.holds(value))}"


def verdict(holds: bool) -> str:
    return "holds" if holds else "**does not hold here**"


if __name__ == "__main__":
    main()
