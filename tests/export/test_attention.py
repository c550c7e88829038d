"""Compressed attention in every export: what is written computes the same, and what cannot be said is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
import transformers
from attended import EVERY_KIND, FFNS, Kept, compressed_attention
from conftest import Compress, Refused
from huggingface_hub import ModelCard
from runtimes import OFF, check_in_llamacpp, expected_log_probabilities, read_as_vllm, read_gguf
from torch import nn
from zoo import FAMILIES, LLAMA_TYPED, VOCAB, logits, tiny_model, tiny_tokenizer, write

from compressor.export.gguf import DTYPES, MULTIPLE, write_gguf
from compressor.export.llama import convert_to_llama, head_counts
from compressor.export.llamacpp import Runner, Settings
from compressor.export.stock import convert_to_stock
from compressor.export.vllm import MULTIPLE as VLLM_MULTIPLE
from compressor.export.vllm import write_decilm
from compressor.modeling_compressor import replacements
from compressor.plan.shapes import Shape
from compressor.runtime.errors import InputError

# Families whose attention has a bias at its output: a linear map has one too, which llama.cpp cannot add.
BIASED = ("ernie4_5-bias", "granite-untied", "llama-bias")
WITHOUT_MAPS: dict[int, Kept] = {0: [1], 1: [0, 1], 2: "bias", 4: "bias", 5: [0]}
ONE_UNIT: dict[int, Kept] = {0: [1], 1: [0], 2: "bias"}
UNTOUCHED_LAYER: dict[int, Kept] = {1: [0], 2: "bias"}
THREE_FFNS = {0: Shape(3, 2), 1: Shape(0, 6), 2: Shape(0)}
# Architectures with no bias at the output of their attention.
NO_OUTPUT_BIAS = ["glm4", "gptj", "mistral", "mpt", "phi3", "qwen2", "stablelm"]
NO_UNITS = ["biogpt", "codegen", "olmo2", "persimmon", "xglm"]  # families whose heads are not told apart


def difference(model: Any, other: nn.Module) -> float:
    expected = logits(model)
    return ((logits(other) - expected).abs().max() / expected.abs().max()).item()


def to_gguf(model: Any, file: Path) -> None:
    llama = convert_to_llama(model, multiple=MULTIPLE, keep_original_widths=True)
    assert difference(model, llama.model) < 2e-6
    write_gguf(llama, tiny_tokenizer(), file, "f32", "t")


@pytest.mark.parametrize("family", LLAMA_TYPED)
def test_every_kind_in_llamacpp(family: str, tmp_path: Path) -> None:
    model = compressed_attention(family, WITHOUT_MAPS if family in BIASED else EVERY_KIND)
    to_gguf(model, tmp_path / "model.gguf")
    check_in_llamacpp(model, tmp_path / "model.gguf")


@pytest.mark.parametrize("kept", ["linear", "lowrank", "bias", [1]])
def test_one_kind_beside_layers_that_stay(kept: Kept, tmp_path: Path) -> None:
    model = compressed_attention("llama-plain", {1: kept}, {})
    to_gguf(model, tmp_path / "model.gguf")
    check_in_llamacpp(model, tmp_path / "model.gguf")
    reader = read_gguf(tmp_path / "model.gguf")
    counts = [reader.get_field(f"deci.attention.{name}").contents() for name in ("head_count", "head_count_kv")]
    expected = {"linear": (4, 0), "lowrank": (4, 0), "bias": (0, 0)}.get(str(kept), (2, 1))
    assert counts == [[4, expected[0], 4], [2, expected[1], 2]]
    assert reader.get_field("deci.attention.key_length").contents() == 16
    shapes = {tensor.name: tensor.shape.tolist() for tensor in reader.tensors if tensor.name.startswith("blk.1.attn")}
    norm = {"blk.1.attn_norm.weight": [32]}
    assert shapes == {
        "linear": norm | {"blk.1.attn_output.weight": [32, 32]},
        "lowrank": norm | {"blk.1.attn_output.weight": [32, 32]},
        "bias": {},
    }.get(
        str(kept),
        norm
        | {"blk.1.attn_q.weight": [32, 32], "blk.1.attn_k.weight": [32, 16], "blk.1.attn_v.weight": [32, 16]}
        | {"blk.1.attn_output.weight": [32, 32], "blk.1.attn_output.bias": [32]},
    )


def test_multi_head_attention_and_groups_of_four(tmp_path: Path) -> None:
    for number, heads in enumerate(({"num_key_value_heads": 4}, {"num_attention_heads": 8, "head_dim": 8})):
        model = compressed_attention("llama", {0: [0, 1], 1: [1], 2: "linear", 3: "bias"}, FFNS, **heads)
        to_gguf(model, tmp_path / f"{number}.gguf")
        check_in_llamacpp(model, tmp_path / f"{number}.gguf")


@pytest.mark.parametrize("settings", [Settings(flash_attention=True), Settings(cache_type="f16"), Settings(context=64)])
def test_caches_of_other_kinds(settings: Settings, tmp_path: Path) -> None:
    model = compressed_attention("llama")
    to_gguf(model, tmp_path / "model.gguf")
    ids = torch.randint(1, VOCAB, (40,), generator=torch.Generator().manual_seed(5)).tolist()
    with Runner(tmp_path / "model.gguf", settings) as run:
        measured = torch.tensor(run.log_probabilities(ids), dtype=torch.float64)
        assert run.measure_speed(32, 8).decode > 0
    assert (measured - expected_log_probabilities(model, ids)).abs().max() < 5e-3


def test_constants_one_after_the_other_and_beside_blocks_that_stay(tmp_path: Path) -> None:
    model = compressed_attention("qwen2", {1: "bias", 2: "bias", 3: "bias"}, {})
    to_gguf(model, tmp_path / "model.gguf")
    check_in_llamacpp(model, tmp_path / "model.gguf")
    biases = [
        tensor.name for tensor in read_gguf(tmp_path / "model.gguf").tensors if tensor.name.endswith("ffn_down.bias")
    ]
    assert biases == ["blk.0.ffn_down.bias", "blk.1.ffn_down.bias", "blk.2.ffn_down.bias"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_command_writes_every_dtype(compress: Compress, dtype: str, tmp_path: Path) -> None:
    write(compressed_attention("llama"), tmp_path / "small")
    command = ["export", tmp_path / "small", "--to", "gguf", "--out", tmp_path / "model.gguf", "--dtype", dtype]
    done = compress(*command, "--json")
    assert done.code == 0, done.err
    report = json.loads(done.out)
    assert report["heads"] == [2, 4, 0, 4, 0, 2]
    assert report["key_value_heads"] == [1, 0, 0, 0, 0, 1]
    assert report["checked"]["log_probability_off"] < OFF[dtype]
    assert report["checked"]["greedy_equal"] == report["checked"]["greedy"] or dtype != "f32"


def test_a_model_with_untouched_attention_says_nothing_of_heads(compress: Compress, tmp_path: Path) -> None:
    write(compressed_attention("llama", {}), tmp_path / "small")
    done = compress("export", tmp_path / "small", "--to", "gguf", "--out", tmp_path / "model.gguf", "--json")
    assert done.code == 0, done.err
    assert "heads" not in json.loads(done.out)


HYBRID: dict[int, Kept] = {1: ([0], 3), 2: "linear", 4: ([1], 2)}
REFUSED: dict[str, tuple[str, str, dict[int, Kept], str]] = {
    "a hybrid in llama.cpp": (
        *("llama", "gguf", HYBRID),
        "the attention of layers 1 and 4 is some heads with a low-rank map beside them, and llama.cpp's `deci` has "
        "heads or one matrix in a layer, never both; compress again with --kinds linear,lowrank,pruned,bias; try --to "
        "onnx, or",
    ),
    "a map with a bias in llama.cpp": (
        *("llama-bias", "gguf", {2: "linear", 3: "lowrank"}),
        "the attention of layers 2 and 3 is a linear map with a bias, and llama.cpp's `deci` adds no bias to one matrix"
        "; compress again with --kinds pruned,bias; try --to onnx",
    ),
    "a constant in the first layer": (
        *("llama", "gguf", {0: "bias"}),
        "the attention of layer 0 is a constant, and no block before it could add that; try --to hf-dense or --to onnx",
    ),
    "a map in vLLM": (
        *("llama", "vllm", {2: "lowrank", 3: [1]}),
        "the attention of layer 2 is a low-rank map, and vLLM's DeciLM has heads in its layers and nothing else; "
        "compress again with --kinds pruned,bias; try --to gguf, which keeps a width for every block, or --to onnx",
    ),
    "a hybrid in vLLM": (
        *("llama", "vllm", HYBRID),
        "the attention of layers 1, 2 and 4 is some heads with a low-rank map beside them or a linear map, and vLLM",
    ),
    "a map in a stock Llama": (
        *("llama", "hf-dense", {5: "linear"}),
        "the attention of layer 5 is a linear map, and a stock architecture has heads in its layers and nothing else",
    ),
    "a map in a stock Qwen": (*("qwen2", "hf-dense", {5: "linear"}), "the attention of layer 5 is a linear map"),
    "a hybrid in a stock GPT-2": (
        *("gpt2", "hf-dense", {1: ([0], 3)}),
        "is some heads with a low-rank map beside them, and a stock architecture has heads in its layers and nothing",
    ),
    "an output bias in a stock GPT-J": (
        *("gptj", "hf-dense", {1: [0]}),
        "gptj has no bias at out_proj, and compressed attention has one that is not zero; try --to onnx",
    ),
    "fewer heads than GPT-2 can have": (
        *("gpt2", "hf-dense", {layer: [0] for layer in range(6)}),
        "one width for all blocks and as many heads in all layers, and block 0 needs 48 neurons, and all layers get 4 "
        "key-value heads: a layer has 1 left; try --to onnx",
    ),
    "another family in llama.cpp": (*("gpt2", "gguf", {1: [0]}), "gpt2 is not of Llama's type"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_form_cannot_say_is_refused_by_name(refused: Refused, name: str, tmp_path: Path) -> None:
    family, to, kinds, expected = REFUSED[name]
    write(compressed_attention(family, kinds, {}), tmp_path / "small")
    line = refused("export", tmp_path / "small", "--to", to, "--out", tmp_path / "out")
    assert f"cannot be written as {to}" in line or "nothing of the saving is left" in line
    assert expected in line


def test_a_map_whose_bias_is_zero_is_written(tmp_path: Path) -> None:
    model = compressed_attention("llama-bias", {1: "linear", 2: "lowrank"})
    for module in replacements(model).values():
        if getattr(module, "returns", 0):
            nn.init.zeros_(module.output_bias)
    to_gguf(model, tmp_path / "model.gguf")
    check_in_llamacpp(model, tmp_path / "model.gguf")


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(NO_UNITS)))
@pytest.mark.parametrize("kinds", [ONE_UNIT, UNTOUCHED_LAYER], ids=["fewer heads", "a layer that stays"])
def test_a_family_in_its_own_architecture(family: str, kinds: dict[int, Kept]) -> None:
    model = compressed_attention(family, kinds, {})
    if family in NO_OUTPUT_BIAS:
        with pytest.raises(InputError, match="has no bias at"):
            convert_to_stock(model)
        for module in replacements(model).values():
            nn.init.zeros_(module.output_bias)
    stock, needed = convert_to_stock(model)
    assert type(stock) is type(model)
    assert not replacements(stock)
    assert difference(model, stock) < 2e-6
    assert len(set(needed)) == 1


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3", "granite-scaled", "helium", "ernie4_5-bias"])
@pytest.mark.parametrize("kinds", [ONE_UNIT, UNTOUCHED_LAYER], ids=["fewer heads", "a layer that stays"])
def test_a_llama_with_as_many_heads_in_all_layers(family: str, kinds: dict[int, Kept]) -> None:
    model = compressed_attention(family, kinds, THREE_FFNS)
    llama = convert_to_llama(model, uniform=True).model
    assert difference(model, llama) < 2e-6
    assert head_counts(llama) == [(2, 1) if kinds is ONE_UNIT else (4, 2)] * 3
    config = llama.config
    assert (config.num_attention_heads, config.num_key_value_heads) == head_counts(llama)[0]


def test_a_constant_alone_needs_an_output_bias_in_a_stock_llama() -> None:
    model = compressed_attention("mistral", {1: "bias"}, THREE_FFNS)
    llama = convert_to_llama(model, uniform=True).model
    assert llama.config.attention_bias
    assert difference(model, llama) < 2e-6
    assert not convert_to_llama(model).model.config.attention_bias  # the block before adds it


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3", "starcoder2"])
def test_a_stock_checkpoint_with_fewer_heads_needs_no_code(compress: Compress, family: str, tmp_path: Path) -> None:
    model = compressed_attention(family, ONE_UNIT, THREE_FFNS)
    write(model, tmp_path / "small")
    done = compress("export", tmp_path / "small", "--to", "hf-dense", "--out", tmp_path / "dense", "--json")
    assert done.code == 0, done.err
    again, loading = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "dense", trust_remote_code=False, output_loading_info=True
    )
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert difference(model, again) < 1e-5
    assert (again.config.num_attention_heads, again.config.num_key_value_heads) == (2, 1)
    assert again.config.head_dim == 8
    report = json.loads(done.out)
    assert (report["heads"], report["key_value_heads"]) == ([2] * 3, [1] * 3)
    assert report["parameters"]["exported"] < report["parameters"]["source"]
    assert "all layers get 1 key-value heads: a layer has 1 left" in done.err
    start = torch.tensor([[5, 6, 7]])
    generated = [each.generate(start, max_new_tokens=8, do_sample=False).tolist() for each in (model, again)]
    assert generated[0] == generated[1]


def test_a_number_of_heads_that_a_config_refuses_is_raised() -> None:
    """A hidden size of 32 is no multiple of 3 heads."""
    settings = {"num_key_value_heads": 4, "head_dim": 8}
    model = compressed_attention("llama", {layer: [0, 1, 3] for layer in range(3)}, THREE_FFNS, **settings)
    for stock in (convert_to_stock(model)[0], convert_to_llama(model, uniform=True).model):
        assert stock.config.num_attention_heads == 4
        assert difference(model, stock) < 2e-6


def test_alibi_keeps_every_head_at_its_number() -> None:
    for family in ("bloom", "falcon"):
        given = {"alibi": True, "multi_query": False, "bias": True} if family == "falcon" else {}
        model = compressed_attention(family, {0: [3], 1: [1, 2], 2: [2]}, {}, **given)
        assert difference(model, convert_to_stock(model)[0]) < 2e-6


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3", "granite-scaled", "llama-bias"])
def test_what_vllm_would_read_is_the_model(family: str, tmp_path: Path) -> None:
    """Layers without attention, and groups of more query heads in which zeros stand for those that are gone."""
    kinds: dict[int, Kept] = {1: [1], 2: "bias", 3: [0]}
    model = compressed_attention(family, kinds, {**THREE_FFNS, 4: Shape(3)})
    llama = convert_to_llama(model, multiple=VLLM_MULTIPLE, heads="grouped")
    write_decilm(llama, tiny_tokenizer(), tmp_path, torch.float32)
    assert difference(model, read_as_vllm(tmp_path)) < 2e-6
    blocks = json.loads((tmp_path / "config.json").read_text())["block_configs"]
    assert [block["attention"]["n_heads_in_group"] for block in blocks] == [2, 4, None, 4, 2]
    assert [block["attention"]["no_op"] for block in blocks] == [False, False, True, False, False]


def test_key_value_heads_that_do_not_divide_the_query_heads_are_padded(tmp_path: Path) -> None:
    settings = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}
    model = compressed_attention("llama", {1: [0, 1, 3], 2: [2, 3]}, {3: Shape(3)}, **settings)
    llama = convert_to_llama(model, multiple=VLLM_MULTIPLE, heads="grouped")
    assert head_counts(llama.model) == [(8, 4), (8, 4), (8, 2), (8, 4)]
    write_decilm(llama, tiny_tokenizer(), tmp_path, torch.float32)
    assert difference(model, read_as_vllm(tmp_path)) < 2e-6


def test_the_command_writes_for_vllm_and_says_that_it_was_not_run(compress: Compress, tmp_path: Path) -> None:
    write(compressed_attention("llama", {1: [1], 2: "bias"}), tmp_path / "small")
    done = compress("export", tmp_path / "small", "--to", "vllm", "--out", tmp_path / "deci", "--json")
    assert done.code == 0, done.err
    assert "has not been run in vLLM" in done.err
    assert json.loads(done.out)["key_value_heads"] == [2, 1, 0, 2, 2]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_onnx_caches_only_the_heads_that_are_left(compress: Compress, family: str, tmp_path: Path) -> None:
    kinds: dict[int, Kept] = {0: [1], 1: "lowrank", 2: ([0], 3)}
    model = compressed_attention(family, kinds, {1: Shape(3, 2)})
    write(model, tmp_path / "small")
    done = compress("export", tmp_path / "small", "--to", "onnx", "--out", tmp_path / "graph", "--json")
    assert done.code == 0, done.err
    report = json.loads(done.out)
    assert report["cache"] is True
    assert report["checked"]["logits_off"] < 1e-5
    names = [f"past_key_values.{layer}.{part}" for layer in (0, 2) for part in ("key", "value")]
    assert [name for name in report["inputs"] if name.startswith("past")] == names
    session = onnxruntime.InferenceSession(tmp_path / "graph" / "model.onnx", providers=["CPUExecutionProvider"])
    shapes = {entry.name: entry.shape for entry in session.get_inputs()}
    assert {shapes[name][1] for name in names} == {1}
    card = ModelCard.load(tmp_path / "graph" / "README.md")
    example = card.text.split("```python\n")[1].split("```")[0].replace("DIRECTORY", str(tmp_path / "graph"))
    namespace: dict[str, Any] = {}
    exec(example, namespace)
    start = namespace["tokenizer"]("It was", return_tensors="pt")["input_ids"]
    expected = model.generate(start, max_new_tokens=20, min_new_tokens=20, do_sample=False)
    assert namespace["ids"].tolist() == expected.tolist()


def test_a_form_that_loses_a_constant_is_never_written(
    refused: Refused, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write(compressed_attention("llama", {2: "bias"}, {}), tmp_path / "small")
    monkeypatch.setattr("compressor.export.llama.add_constant", lambda blocks, *_: list(blocks))
    for to in ("gguf", "vllm"):
        line = refused("export", tmp_path / "small", "--to", to, "--out", tmp_path / "out")
        assert "does not compute what the model in memory computes" in line


def test_the_model_is_left_alone() -> None:
    model = compressed_attention("qwen2", WITHOUT_MAPS)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for arrangement in ("own", "grouped", "same"):
        convert_to_llama(model, uniform=arrangement == "same", heads=arrangement)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert model.config.num_key_value_heads == tiny_model("qwen2").config.num_key_value_heads
