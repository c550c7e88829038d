"""What was written is what is in memory, or nothing is kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from zoo import FAMILIES, compressed, logits, tiny_model, tiny_tokenizer, write

from compressor import save
from compressor.patch.verify import first_tokens, verify_written
from compressor.runtime.errors import InputError
from compressor.runtime.progress import Progress


class Memory:
    available = 1000


def tamper(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def swap_two(tensors: dict[str, torch.Tensor]) -> None:
    first, second = (f"transformer.h.{layer}.attn.c_attn.weight" for layer in (0, 1))
    tensors[first], tensors[second] = tensors[second], tensors[first]


def drop_one(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["transformer.h.0.attn.c_attn.weight"]


def truncate(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


DAMAGES: list[Callable[[Path], None]] = [
    lambda directory: tamper(directory, swap_two),
    lambda directory: tamper(directory, drop_one),
    lambda directory: (directory / "config.json").write_text("{}") and None,
    truncate,
]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_found_as_it_was_written(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = compressed(family)
    directory = write(model, tmp_path / "written")
    verify_written(directory, model, first_tokens(model), Progress(visible=True))
    assert "memory is short" not in capsys.readouterr().err
    monkeypatch.setattr("psutil.virtual_memory", Memory)
    verify_written(directory, model, first_tokens(model), Progress(visible=True))
    assert "memory is short of a second copy" in capsys.readouterr().err


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_not_the_model_is_refused(
    damage: Callable[[Path], None], short: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = compressed("gpt2")
    if short:
        monkeypatch.setattr("psutil.virtual_memory", Memory)
    directory = write(model, tmp_path / "written")
    damage(directory)
    with pytest.raises(InputError, match=r"what was written .*; nothing was kept"):
        verify_written(directory, model, first_tokens(model), Progress())


def test_the_model_is_left_as_it_was(tmp_path: Path) -> None:
    model = compressed("gpt2")
    directory = write(model, tmp_path / "written")
    before = logits(model)
    model.train()
    model.transformer.h[1].eval()
    verify_written(directory, model, first_tokens(model), Progress())
    assert model.training
    assert not model.transformer.h[1].training
    assert model.transformer.h[0].attn.attn_dropout.training
    assert torch.equal(logits(model.eval()), before)


@pytest.mark.parametrize("short", [False, True])
def test_saving_keeps_nothing_that_is_not_the_model(
    tmp_path: Path, short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk, or a library, that changes what it is given."""
    from compressor.pipelines import outputs as saving

    honest = saving.write_checkpoint

    def dishonest(model: Any, tokenizer: Any, directory: Path, **options: Any) -> None:
        honest(model, tokenizer, directory, **options)
        tamper(directory, swap_two)

    monkeypatch.setattr(saving, "write_checkpoint", dishonest)
    if short:
        monkeypatch.setattr("psutil.virtual_memory", Memory)
    with pytest.raises(InputError, match="nothing was kept"):
        save(tiny_model("gpt2"), tiny_tokenizer(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
