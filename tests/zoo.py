"""Tiny random models of every family the package knows, some that it finds by itself, and some that it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

from compressor.modeling_compressor import KeptHeads, Replacement
from compressor.models.blocks import AttentionOf, BranchIndex, find_attention, find_blocks
from compressor.models.heads import find_heads, record_attention
from compressor.models.neurons import find_neurons
from compressor.patch.checkpoint import write_checkpoint
from compressor.patch.tree import patch
from compressor.plan.shapes import Shape

VOCAB = 300
WIDTH = 32
SEED = 0

# Herman Melville, Moby-Dick (1851), public domain.
TEXT = """Call me Ishmael. Some years ago - never mind how long precisely - having little or no money in my purse, and
nothing particular to interest me on shore, I thought I would sail about a little and see the watery part of the world.
It is a way I have of driving off the spleen, and regulating the circulation. Whenever I find myself growing grim about
the mouth; whenever it is a damp, drizzly November in my soul; whenever I find myself involuntarily pausing before
coffin warehouses, and bringing up the rear of every funeral I meet; then, I account it high time to get to sea."""

CHAT_TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"

# What most families call their sizes; two key-value heads where there are four heads, three layers.
USUAL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
WITHOUT_GROUPS = {key: value for key, value in USUAL.items() if key != "num_key_value_heads"}
TOKENS = {key: USUAL[key] for key in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
GPT_J = {**TOKENS, "n_embd": WIDTH, "n_inner": 48, "n_layer": 3, "n_head": 4, "n_positions": 64, "rotary_dim": 4}
BLOOM = {**TOKENS, "hidden_size": WIDTH, "n_layer": 3, "n_head": 4}
FALCON = {**WITHOUT_GROUPS, "ffn_hidden_size": 48, "alibi": False}
OPT = {**WITHOUT_GROUPS, "ffn_dim": 48, "word_embed_proj_dim": WIDTH}
XGLM = {**TOKENS, "d_model": WIDTH, "ffn_dim": 48, "num_layers": 3, "attention_heads": 4, "max_position_embeddings": 64}
VISION = {**WITHOUT_GROUPS, "image_size": 28, "patch_size": 14}
MIXTURE = {**USUAL, "num_local_experts": 2, "num_experts_per_tok": 1}

# name → (model type, config settings, path of the layers, name of the FFN in the layer)
ROWS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "bloom": ("bloom", BLOOM, "transformer.h", "mlp"),
    "falcon": ("falcon", FALCON, "transformer.h", "mlp"),
    "falcon-sequential": ("falcon", {**FALCON, "parallel_attn": False, "bias": True}, "transformer.h", "mlp"),
    "falcon-new": ("falcon", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}, "transformer.h", "mlp"),
    "gemma2": ("gemma2", {**USUAL, "head_dim": 8}, "model.layers", "mlp"),
    "gemma3": ("gemma3_text", {**USUAL, "head_dim": 8}, "model.layers", "mlp"),
    "glm4": ("glm4", {**USUAL, "head_dim": 8}, "model.layers", "mlp"),
    "gpt2": ("gpt2", {**GPT_J, "rotary_dim": None}, "transformer.h", "mlp"),
    "gpt_neo": (
        "gpt_neo",
        {**WITHOUT_GROUPS, "num_heads": 4, "attention_types": [[["global", "local"], 1], [["global"], 1]]},
        "transformer.h",
        "mlp",
    ),
    "gpt_neox": ("gpt_neox", WITHOUT_GROUPS, "gpt_neox.layers", "mlp"),
    "gpt_neox-sequential": ("gpt_neox", {**WITHOUT_GROUPS, "use_parallel_residual": False}, "gpt_neox.layers", "mlp"),
    "gptj": ("gptj", GPT_J, "transformer.h", "mlp"),
    "granite": ("granite", USUAL, "model.layers", "mlp"),
    "llama": ("llama", {**USUAL, "tie_word_embeddings": True, "mlp_bias": True}, "model.layers", "mlp"),
    "mistral": ("mistral", USUAL, "model.layers", "mlp"),
    "mpt": (
        "mpt",
        {**TOKENS, "d_model": WIDTH, "n_heads": 4, "n_layers": 3, "max_seq_len": 64},
        "transformer.blocks",
        "ffn",
    ),
    "olmo2": ("olmo2", USUAL, "model.layers", "mlp"),
    "opt": ("opt", OPT, "model.decoder.layers", "fc1"),
    "opt-350m": (
        "opt",
        {**OPT, "word_embed_proj_dim": 16, "do_layer_norm_before": False},
        "model.decoder.layers",
        "fc1",
    ),
    "phi": ("phi", USUAL, "model.layers", "mlp"),
    "phi3": ("phi3", USUAL, "model.layers", "mlp"),
    "qwen2": ("qwen2", USUAL, "model.layers", "mlp"),
    "qwen3": ("qwen3", {**USUAL, "head_dim": 8}, "model.layers", "mlp"),
    "smollm3": ("smollm3", USUAL, "model.layers", "mlp"),
    "stablelm": ("stablelm", USUAL, "model.layers", "mlp"),
    "starcoder2": ("starcoder2", USUAL, "model.layers", "mlp"),
    # Families without a row in the table of architectures.
    "biogpt": ("biogpt", WITHOUT_GROUPS, "biogpt.layers", "fc1"),
    "codegen": ("codegen", GPT_J, "transformer.h", "mlp"),
    "cohere": ("cohere", USUAL, "model.layers", "mlp"),
    "persimmon": ("persimmon", USUAL, "model.layers", "mlp"),
    "xglm": ("xglm", XGLM, "model.layers", "fc1"),
    # A language model inside a larger one.
    "gemma3-vision": (
        "gemma3",
        {"text_config": {**USUAL, "head_dim": 8}, "vision_config": VISION, "mm_tokens_per_image": 4},
        "model.language_model.layers",
        "mlp",
    ),
}
FAMILIES = list(ROWS)
# One of each kind: residual inside or outside the block, gated or not, with and without biases, parallel attention,
# norms behind the block, tied embeddings. For tests in which the family matters little and the time much.
REPRESENTATIVE = ["gpt2", "llama", "opt", "bloom", "falcon", "phi3", "gemma2", "gpt_neox"]

# More of Llama's type, and what a Llama may have besides: for the exports alone.
GRANITE = {
    "embedding_multiplier": 12.0,
    "logits_scaling": 8.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.05,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16, "rope_theta": 500000.0}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.2, 1.5, 2.0], "long_factor": [2.0, 3.0, 4.0, 6.0]}
LONGROPE |= {"original_max_position_embeddings": 48, "rope_theta": 10000.0}
HEADS = {**USUAL, "head_dim": 16}  # heads that are together wider than the model
LLAMAS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    name: (family, settings, "model.layers", "mlp")
    for name, (family, settings) in {
        "cwm": ("cwm", {**USUAL, "rope_parameters": LLAMA3, "head_dim": 8}),
        "ernie4_5": ("ernie4_5", HEADS),
        "ernie4_5-bias": ("ernie4_5", {**HEADS, "use_bias": True, "tie_word_embeddings": False}),
        "granite-scaled": ("granite", {**USUAL, **GRANITE, "tie_word_embeddings": True}),
        "granite-untied": ("granite", {**USUAL, **GRANITE, "tie_word_embeddings": False, "attention_bias": True}),
        "helium": ("helium", {**USUAL, "head_dim": 8}),
        "llama-plain": ("llama", {**HEADS, "tie_word_embeddings": False}),
        "llama-bias": ("llama", {**USUAL, "attention_bias": True, "mlp_bias": False}),
        "llama-linear": (
            "llama",
            {**USUAL, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
        ),
        "llama-llama3": ("llama", {**USUAL, "rope_parameters": LLAMA3}),
        "llama-yarn": ("llama", {**USUAL, "rope_parameters": YARN}),
        "llama-dynamic": (
            "llama",
            {**USUAL, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        ),
        "phi3-longrope": ("phi3", {**USUAL, "rope_parameters": LONGROPE, "original_max_position_embeddings": 48}),
        "ministral": ("ministral", HEADS),
        "seed_oss": ("seed_oss", HEADS),
    }.items()
}
LLAMA_TYPED = ["granite", "llama", "mistral", "phi3", "qwen2", *LLAMAS]

# Families whose layers are called in an unusual way: with arguments that depend on the tokens, under other names.
GEMMA_LAYERS = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "sliding_window": 8}
GEMMA_INPUTS = {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0}
GEMMA3N = {**USUAL, **GEMMA_LAYERS, **GEMMA_INPUTS, "head_dim": 8, "laurel_rank": 4}
GEMMA4 = {**USUAL, **GEMMA_LAYERS, **GEMMA_INPUTS, "head_dim": 8, "global_head_dim": 8}
SHARED = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2}
GPT = {**TOKENS, "n_embd": WIDTH, "n_layer": 3, "n_head": 4, "n_positions": 64}
XLSTM = {**TOKENS, "hidden_size": WIDTH, "num_heads": 4, "num_blocks": 3, "num_hidden_layers": 3}
SAM = {**VISION, "output_channels": 16, "mlp_dim": 48, "window_size": 2, "global_attn_indexes": []}
UNUSUAL: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "gemma4_text": ("gemma4_text", GEMMA4, "model.layers", "mlp"),
    "ctrl": ("ctrl", {**GPT, "dff": 48}, "transformer.h", "ffn"),
    "openai-gpt": ("openai-gpt", GPT, "transformer.h", "mlp"),
    "xlstm": ("xlstm", XLSTM, "backbone.blocks", "ffn"),
    # An encoder of images with as many layers, and an FFN of the same name.
    "got_ocr2": (
        "got_ocr2",
        {"text_config": {"model_type": "qwen2", **USUAL}, "vision_config": SAM},
        "model.language_model.layers",
        "mlp",
    ),
}
# Layers that cannot be run one at a time, and what the error says of them.
COUPLED: dict[str, tuple[str, dict[str, Any], str]] = {
    "gemma4-shared": ("gemma4_text", {**GEMMA4, **SHARED}, "shared_kv_states"),
    "gemma3n": ("gemma3n_text", GEMMA3N, "have shape [4, 2, 12, 32]"),
    "rwkv": (
        "rwkv",
        {**TOKENS, "hidden_size": WIDTH, "num_hidden_layers": 3, "context_length": 64},
        "returns a tuple, not a tensor",
    ),
    "cpmant": (
        "cpmant",
        {**WITHOUT_GROUPS, "dim_head": 8, "dim_ff": 48},
        "have shape [2, 44, 32]",  # a prompt of 32 tokens stands before the text
    ),
}

# Every part that a replacement can have; and the shapes without neurons.
SHAPES = {0: Shape(None, 4), 1: Shape(3, 5), 2: Shape(0, 6)}
LINEAR_SHAPES = {0: Shape(None), 1: Shape(3), 2: Shape(0)}
# Attention with fewer heads, and without: the first layer keeps one unit, for caches ask it for their length.
ATTENTION_SHAPES = {AttentionOf(0): Shape(0, 1), AttentionOf(1): Shape(5, 1), AttentionOf(2): Shape(None)}
WITHOUT_UNITS = ["olmo2", "codegen"]  # a norm runs over all heads; heads stand in groups that must stay of one size
ONE_SHAPE = {1: Shape(3, 5)}  # the other blocks stay as they are

REFUSED: dict[str, dict[str, Any]] = {
    "mixtral": MIXTURE,
    "gpt_oss": {**MIXTURE, "head_dim": 8},
    "bert": {**WITHOUT_GROUPS, "is_decoder": True},
    "t5": {**TOKENS, "d_model": WIDTH, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
    "bart": {
        **TOKENS,
        "d_model": WIDTH,
        **{f"{half}_{size}": n for half in ("encoder", "decoder") for size, n in (("layers", 2), ("ffn_dim", 48))},
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
    },
}


def tiny_model(family: str, **settings: Any) -> Any:
    """A seeded float32 model in evaluation mode, in which no parameter is zero or one throughout."""
    rows: dict[str, tuple[Any, ...]] = {**ROWS, **LLAMAS, **UNUSUAL, **COUPLED}
    model_type, usual = (rows[family][0], rows[family][1]) if family in rows else (family, REFUSED[family])
    config = transformers.AutoConfig.for_model(model_type, **{**usual, **settings})
    encoder_decoder = config.is_encoder_decoder
    auto = transformers.AutoModelForSeq2SeqLM if encoder_decoder else transformers.AutoModelForCausalLM
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(SEED)
        model = auto.from_config(config, dtype=torch.float32).eval()
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.1)
    return model


def tiny_tokenizer(vocab: int = VOCAB) -> transformers.PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, trained here, with a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT.splitlines(), trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<end>", eos_token="<end>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def save_tiny(family: str, directory: Path) -> Any:
    """Write a tiny model and its tokenizer as a stock checkpoint; return the model."""
    model = tiny_model(family)
    model.save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return model


def tokens(batch: int = 2, length: int = 9) -> Tensor:
    return torch.randint(1, VOCAB, (batch, length), generator=torch.Generator().manual_seed(SEED))


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    output: Tensor = model(tokens()).logits
    return output


def random_replacement(block: Any, shape: Shape, model: Any = None) -> Any:
    """A replacement of this shape with random weights; neurons or heads are like those of the model's block.

    In place of attention, the neurons of the shape count units: that many are kept, the last ones.
    """
    given: dict[str, Any] = {}
    module: Replacement | KeptHeads
    random = []  # the names of what is not copied from the stock attention
    if block.is_attention:
        call = record_attention(model, [block])[block.layer]
        heads = find_heads(model, block, call)
        given = {"returns": len(call.output), "biased": heads is None or heads.biased}
    if shape.neurons and block.is_attention:
        assert heads is not None
        assert shape.rank is not None
        module = heads.keep(torch.arange(heads.count)[-shape.neurons :], shape.rank)
        random = [heads.layout.output, "down", "up"]
    else:
        if shape.neurons:
            neurons = find_neurons(model, block)
            assert neurons is not None
            given = {"activation": neurons.activation, "gated": neurons.gated, "inner_bias": neurons.biased}
        module = Replacement(block.width, shape.rank, block.residual_inside, neurons=shape.neurons, **given)
    generator = torch.Generator().manual_seed(block.layer + 100 * block.is_attention)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if not random or set(name.split(".")) & set(random):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    return module


def compressed(family: str, shapes: Any = SHAPES, **settings: Any) -> Any:
    """A tiny model with random replacements; `shapes` by branch: the number of a layer, or AttentionOf(layer)."""
    model = tiny_model(family, **settings)
    blocks = find_branches(model)
    patch(
        model,
        list(blocks.values()),
        {index: random_replacement(blocks[index], shape, model) for index, shape in shapes.items()},
    )
    return model


def attention_shapes(family: str) -> dict[Any, Shape]:
    """Attention with fewer heads, if the family's can be told apart, and without."""
    if family in WITHOUT_UNITS:
        return {AttentionOf(1): Shape(2), AttentionOf(2): Shape(None)}
    return dict(ATTENTION_SHAPES)


def find_branches(model: Any) -> dict[BranchIndex, Any]:
    """The FFN and the attention of every layer."""
    return {block.index: block for block in (*find_attention(model), *find_blocks(model))}


def write(model: Any, directory: Path, **options: Any) -> Path:
    """Write a checkpoint of the model into a new directory."""
    directory.mkdir()
    write_checkpoint(model, tiny_tokenizer(), directory, **{"dtype": None, **options})
    return directory


def stored(directory: Path) -> dict[str, Tensor]:
    """Every tensor in the checkpoint's files."""
    tensors = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "pt") as handle:
            tensors.update({name: handle.get_tensor(name) for name in handle.keys()})  # noqa: SIM118
    return tensors


# Families whose compressed blocks do not fit their own architecture with one width, and why.
NOT_OWN = {
    "bloom": "fixed width",
    "mpt": "no bias",
    "persimmon": "relu2",
    **dict.fromkeys(["cohere", "gemma2", "gemma3", "gemma3-vision", "glm4", "mistral", "olmo2", "phi3"], "no bias"),
    **dict.fromkeys(["qwen2", "qwen3", "stablelm"], "no bias"),
}


def save_compressed(directory: Path, family: str, shapes: Any = SHAPES, **options: Any) -> Any:
    """Write a compressed checkpoint; return its model."""
    model = compressed(family, shapes)
    write(model, directory, **options)
    return model
