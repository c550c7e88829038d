"""Weights that were changed after the record was written are noticed by every command that reads the record."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Compress, Refused
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from zoo import compressed as compressed_model
from zoo import tiny_tokenizer, write

import compressor
from compressor.models.load import load_model
from compressor.models.source import source_of
from compressor.runtime.stored_weights import hash_stored

WEIGHTS, RECORD = "model.safetensors", "compression.json"


@pytest.fixture
def copy(compressed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(compressed, tmp_path / "small"))


def tamper(directory: Path) -> None:
    """The last bit of one number: nothing that a measurement would find."""
    file = directory / WEIGHTS
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))


def read(directory: Path) -> Any:
    return json.loads((directory / RECORD).read_text(encoding="utf-8"))


def test_the_record_has_the_hash_of_the_weights(compress: Compress, copy: Path) -> None:
    model, _ = load_model(str(copy), allow_compressed=True)
    assert read(copy)["compressed_sha256"] == hash_stored(copy) == source_of(model).weights_sha256
    done = compress("info", copy)
    assert done.code == 0
    assert f"weights: as recorded (sha256 {hash_stored(copy)[:12]}…)" in done.out
    assert json.loads(compress("info", copy, "--json").out)["weights_match"] is True


def test_info_shows_what_is_there_and_fails(compress: Compress, copy: Path) -> None:
    tamper(copy)
    done = compress("info", copy)
    assert done.code == 2
    assert done.errors == [
        line for line in done.errors if f"the weights of {copy} are not those of its {RECORD}" in line
    ]
    assert len(done.errors) == 1
    assert "perplexity" in done.out
    assert "weights: NOT those of the record" in done.out
    as_json = compress("info", copy, "--json")
    assert as_json.code == 2
    assert json.loads(as_json.out)["weights_match"] is False


def test_push_and_export_refuse(refused: Refused, copy: Path, tmp_path: Path) -> None:
    tamper(copy)
    message = f"the weights of {copy} are not those of its {RECORD}"
    assert message in refused("push", copy, "me/small", "--dry-run")
    assert message in refused("export", copy, "--to", "onnx", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_check_measures_what_is_there_and_says_so(compress: Compress, copy: Path) -> None:
    assert json.loads(compress("check", copy, "--generate", "0", "--json").out)["warnings"] == []
    tamper(copy)
    record = json.loads(compress("check", copy, "--generate", "0", "--json").out)
    assert any("weights are not those of its record" in warning for warning in record["warnings"])
    assert record["compressed_sha256"] == hash_stored(copy) != read(copy)["compressed_sha256"]


def test_an_old_record_has_no_hash(compress: Compress, copy: Path) -> None:
    record = {key: value for key, value in read(copy).items() if key != "compressed_sha256"}
    (copy / RECORD).write_text(json.dumps(record), encoding="utf-8")
    tamper(copy)
    done = compress("info", copy)
    assert done.code == 0
    assert "the record has no hash of them" in done.out
    assert json.loads(compress("info", copy, "--json").out)["weights_match"] is None
    assert compress("push", copy, "me/small", "--dry-run").code == 0


def test_a_record_without_weights_is_shown(compress: Compress, copy: Path) -> None:
    (copy / WEIGHTS).unlink()
    done = compress("info", copy)
    assert done.code == 0
    assert "weights: not here" in done.out


def test_info_of_damaged_weights(refused: Refused, copy: Path) -> None:
    whole = (copy / WEIGHTS).read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    twice = whole[8:start].replace(b'{"__metadata__"', b'{"__metadata__":{},"__metadata__"', 1)
    for content in (
        whole[:-50],
        whole[:4],
        b"",
        b"\xff" * 64,
        len(twice).to_bytes(8, "little") + twice + whole[start:],
        whole.replace(b"data_offsets", b"data_offsetz", 1),
        whole.replace(b'"F32"', b'"F99"', 1),
    ):
        (copy / WEIGHTS).write_bytes(content)
        assert f"{WEIGHTS} of {copy} is damaged" in refused("info", copy)


def test_saved_through_the_api_and_in_other_shards(compress: Compress, models: Path, tmp_path: Path) -> None:
    """The hash does not depend on the sharding: a checkpoint saved again in shards still fits its record."""
    write(compressed_model("llama"), tmp_path / "first")
    model, tokenizer = load_model(str(tmp_path / "first"), allow_compressed=True)
    compressor.save(model, tokenizer, tmp_path / "saved")
    recorded = read(tmp_path / "saved")["compressed_sha256"]
    assert recorded == hash_stored(tmp_path / "saved") == hash_stored(tmp_path / "first")
    sharded = tmp_path / "sharded"
    AutoModelForCausalLM.from_pretrained(tmp_path / "saved").save_pretrained(sharded, max_shard_size="20KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    tiny_tokenizer().save_pretrained(sharded)
    assert hash_stored(sharded) == recorded
    shutil.copy(tmp_path / "saved" / RECORD, sharded / RECORD)
    assert compress("info", sharded).code == 0
    shard = sorted(sharded.glob("*.safetensors"))[0]
    tensors = load_file(shard)
    name = next(name for name, tensor in tensors.items() if tensor.numel())
    save_file({**tensors, name: tensors[name] + 1}, shard, {"format": "pt"})
    assert compress("info", sharded).code == 2
    shard.unlink()
    assert compress("info", sharded).code == 2


def test_every_dtype_is_hashed_as_torch_would(tmp_path: Path) -> None:
    """The hash from the bytes of a file is that of the tensors in memory."""
    from compressor.models.safetensors_files import SAFETENSORS_DTYPES
    from compressor.runtime.cache import digest

    tensors = {label: torch.arange(6).reshape(2, 3).to(dtype) for label, dtype in SAFETENSORS_DTYPES.items()}
    tensors |= {"empty": torch.zeros(0), "scalar": torch.tensor(2.5)}
    save_file(tensors, tmp_path / WEIGHTS)
    assert hash_stored(tmp_path) == digest(sorted(tensors.items()))
