"""GGUF files in stock llama.cpp: the same tokens, the same probabilities, for every family and kind of replacement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from conftest import Compress, Refused
from runtimes import OFF, check_in_llamacpp, read_gguf
from zoo import (
    CHAT_TEMPLATE,
    LINEAR_SHAPES,
    LLAMA_TYPED,
    SHAPES,
    TEXT,
    compressed,
    save_compressed,
    tiny_tokenizer,
)

from compressor.export.gguf import DTYPES, MULTIPLE, list_stored, write_gguf
from compressor.export.llama import convert_to_llama
from compressor.export.llamacpp import Runner
from compressor.plan.shapes import Shape

KINDS = {
    "linear": Shape(None),
    "low-rank": Shape(3),
    "pruned": Shape(0, 6),
    "hybrid": Shape(3, 5),
    "bias only": Shape(0),
    "linear and neurons": Shape(None, 4),
}


@pytest.mark.parametrize("shapes", [SHAPES, LINEAR_SHAPES], ids=["every part", "linear"])
@pytest.mark.parametrize("family", LLAMA_TYPED)
def test_every_llama_type_in_llamacpp(family: str, shapes: Any, tmp_path: Path) -> None:
    model = compressed(family, shapes)
    file = tmp_path / "model.gguf"
    write_gguf(
        convert_to_llama(model, multiple=MULTIPLE, keep_original_widths=True), tiny_tokenizer(), file, "f32", family
    )
    check_in_llamacpp(model, file)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_replacement_beside_blocks_that_stay(kind: str, tmp_path: Path) -> None:
    model = compressed("llama-plain", {1: KINDS[kind]})
    llama = convert_to_llama(model, multiple=MULTIPLE, keep_original_widths=True)
    write_gguf(llama, tiny_tokenizer(), tmp_path / "model.gguf", "f32", kind)
    check_in_llamacpp(model, tmp_path / "model.gguf")
    widths = read_gguf(tmp_path / "model.gguf").get_field("deci.feed_forward_length").contents()
    assert widths == [48, 64 if kind == "linear and neurons" else 32, 48]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_weights_are_what_was_asked_for(compress: Compress, dtype: str, tmp_path: Path) -> None:
    model = save_compressed(tmp_path / "small", "qwen2")
    file = tmp_path / "model.gguf"
    done = compress("export", tmp_path / "small", "--to", "gguf", "--out", file, "--dtype", dtype, "--json")
    assert done.code == 0, done.err
    tensors = {tensor.name: tensor for tensor in read_gguf(file).tensors}
    kinds = {name: tensor.tensor_type.name for name, tensor in tensors.items()}
    matrices = {name: kind for name, kind in kinds.items() if tensors[name].shape.size == 2}
    head = matrices.pop("output.weight")
    assert head == ("Q8_0" if dtype.startswith(("q4", "q5")) else dtype.upper())
    assert set(matrices.values()) == {dtype.upper()}
    assert {kind for name, kind in kinds.items() if tensors[name].shape.size == 1} == {"F32"}
    report = json.loads(done.out)
    assert report["parameters"]["exported"] == sum(tensor.n_elements for tensor in tensors.values()) + zero_biases(
        model
    )
    assert report["checked"]["log_probability_off"] < OFF[dtype]
    assert file.stat().st_size == report["bytes"]
    stored = report["stored"]
    assert sum(group["bytes"] for group in stored) == sum(int(tensor.n_bytes) for tensor in tensors.values())
    assert sum(group["tensors"] for group in stored) == len(tensors)
    assert ("the matrix that gives the logits" in {group.get("why") for group in stored}) == (
        head == "Q8_0" != dtype.upper()
    )


@pytest.mark.parametrize(
    ("family", "head"), [("qwen2", "output.weight"), ("llama", "token_embd.weight")], ids=["untied", "tied"]
)
def test_fewer_bits_are_further_from_the_weights(family: str, head: str, tmp_path: Path) -> None:
    """Read by the gguf package. The matrix that gives the logits keeps eight bits, tied or not."""
    llama = convert_to_llama(compressed(family), multiple=MULTIPLE, keep_original_widths=True)
    errors: dict[str, float] = {}
    for dtype in ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0"):
        file = tmp_path / f"{dtype}.gguf"
        write_gguf(llama, tiny_tokenizer(), file, dtype, "t")
        found = {tensor.name: tensor for tensor in read_gguf(file).tensors}
        assert found[head].tensor_type.name == "Q8_0"
        wanted = {each.name: each.tensor.numpy() for each in list_stored(llama.model, dtype)}
        off = [
            np.square(gguf.quants.dequantize(tensor.data, tensor.tensor_type) - wanted[name]).mean()
            for name, tensor in found.items()
            if len(tensor.shape) == 2 and name != head
        ]
        errors[dtype] = float(np.mean(off))
    fives, fours = ([errors[f"q{bits}_{kind}"] for kind in (0, 1)] for bits in (5, 4))
    assert 0 < 16 * errors["q8_0"] < min(fives)
    assert 2 * max(fives) < min(fours)


def test_rows_that_cannot_be_divided_stay_float16_and_that_is_said(compress: Compress, tmp_path: Path) -> None:
    """A block that was not replaced keeps its width, here 48: the rows of its last matrix are no groups of 32."""
    save_compressed(tmp_path / "small", "llama-plain", {1: KINDS["hybrid"]})
    file = tmp_path / "model.gguf"
    done = compress("export", tmp_path / "small", "--to", "gguf", "--out", file, "--dtype", "q4_0")
    assert done.code == 0, done.err
    kinds = {tensor.name: tensor.tensor_type.name for tensor in read_gguf(file).tensors}
    assert [kinds[f"blk.{number}.ffn_down.weight"] for number in range(3)] == ["F16", "Q4_0", "F16"]
    words = f"2 tensors as f16 ({2 * 48 * 32:,} parameters): rows that 32 does not divide"
    assert words in done.out
    assert words in compress("info", file).out


def zero_biases(model: Any) -> int:
    """Parameters that a LlamaForCausalLM counts and the file leaves out."""
    llama = convert_to_llama(model, multiple=MULTIPLE, keep_original_widths=True).model
    biases = [tensor for name, tensor in llama.named_parameters() if name.endswith("_proj.bias")]
    return sum(bias.numel() for bias in biases if not bias.any())


def test_vocabulary_template_and_ends_come_along(compress: Compress, tmp_path: Path) -> None:
    save_compressed(tmp_path / "small", "llama")
    assert compress("export", tmp_path / "small", "--to", "gguf", "--out", tmp_path / "model.gguf").code == 0
    tokenizer, reader = tiny_tokenizer(), read_gguf(tmp_path / "model.gguf")
    assert reader.get_field("general.architecture").contents() == "deci"
    assert reader.get_field("tokenizer.chat_template").contents() == CHAT_TEMPLATE
    assert reader.get_field("tokenizer.ggml.eos_token_id").contents() == tokenizer.eos_token_id
    with Runner(tmp_path / "model.gguf") as run:
        assert run.tokenize(TEXT) == tokenizer(TEXT)["input_ids"]
        assert run.detokenize(tokenizer(TEXT)["input_ids"]) == TEXT
        assert run.chat_prompt([{"role": "user", "content": "Call me"}]) == "<user>Call me"


def test_a_tokenizer_with_a_known_difference_is_told(compress: Compress, tmp_path: Path) -> None:
    from tokenizers import pre_tokenizers

    save_compressed(tmp_path / "small", "llama")
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.save_pretrained(tmp_path / "small")
    done = compress("export", tmp_path / "small", "--to", "gguf", "--out", tmp_path / "model.gguf", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["notes"]
    assert "note: llama.cpp puts no space before a text" in done.err


def test_what_is_stored_is_what_was_folded(tmp_path: Path) -> None:
    """Read by the gguf package, not by what wrote it."""
    model = compressed("llama", SHAPES)
    llama = convert_to_llama(model, multiple=MULTIPLE, keep_original_widths=True)
    write_gguf(llama, tiny_tokenizer(), tmp_path / "model.gguf", "f32", "t")
    tensors = {tensor.name: np.array(tensor.data) for tensor in read_gguf(tmp_path / "model.gguf").tensors}
    layer = llama.model.model.layers[1]
    for name, module in (("gate", layer.mlp.gate_proj), ("up", layer.mlp.up_proj), ("down", layer.mlp.down_proj)):
        assert np.array_equal(tensors[f"blk.1.ffn_{name}.weight"], module.weight.numpy())
    assert np.array_equal(tensors["blk.1.ffn_down.bias"], layer.mlp.down_proj.bias.numpy())
    assert "output.weight" not in tensors  # tied
    assert "rope_freqs.weight" not in tensors


def test_files_that_exist(refused: Refused, compress: Compress, tmp_path: Path) -> None:
    save_compressed(tmp_path / "small", "llama")
    command = ["export", tmp_path / "small", "--to", "gguf", "--out"]
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link.gguf").symlink_to(tmp_path / "notes.txt")
    assert "exists; name another file" in refused(*command, tmp_path / "notes.txt")
    assert "--overwrite leaves it alone" in refused(*command, tmp_path / "notes.txt", "--overwrite")
    assert "is a directory" in refused(*command, tmp_path / "folder")
    assert "is a symbolic link" in refused(*command, tmp_path / "link.gguf")
    assert "cannot be written" in refused(*command, tmp_path / "notes.txt" / "model.gguf")
    assert compress(*command, tmp_path / "model.gguf").code == 0
    assert "exists; name another file" in refused(*command, tmp_path / "model.gguf")
    assert compress(*command, tmp_path / "model.gguf", "--overwrite", "--dtype", "f16").code == 0
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_another_gate_is_refused(refused: Refused, tmp_path: Path) -> None:
    from zoo import write

    write(compressed("llama", hidden_act="gelu"), tmp_path / "small")
    line = refused("export", tmp_path / "small", "--to", "gguf", "--out", tmp_path / "model.gguf")
    assert "`deci` has only silu" in line


def test_a_file_that_llamacpp_reads_otherwise_is_not_kept(
    refused: Refused, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    save_compressed(tmp_path / "small", "llama")
    monkeypatch.setattr("compressor.export.gguf.halves_to_pairs", lambda tensor, head: tensor)
    line = refused("export", tmp_path / "small", "--to", "gguf", "--out", tmp_path / "model.gguf")
    assert "in llama.cpp a log-probability is off by" in line


def test_without_llamacpp_it_says_so(compress: Compress, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    save_compressed(tmp_path / "small", "llama")
    with monkeypatch.context() as patching:
        patching.setattr("compressor.export.llamacpp.is_installed", lambda: False)
        done = compress("export", tmp_path / "small", "--to", "gguf", "--out", tmp_path / "model.gguf")
    assert done.code == 0, done.err
    assert "not run in llama.cpp: pip install xllamacpp" in done.err
    check_in_llamacpp(compressed("llama"), tmp_path / "model.gguf")
