"""`compress export` as a user runs it: stock checkpoints, records, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import Compress, Refused, tree
from huggingface_hub import ModelCard
from zoo import (
    FAMILIES,
    LINEAR_SHAPES,
    LLAMA_TYPED,
    NOT_OWN,
    ONE_SHAPE,
    SHAPES,
    VOCAB,
    save_compressed,
    save_tiny,
    stored,
    tiny_tokenizer,
    write,
)
from zoo import compressed as compressed_model

from compressor.cli.written import EXPORT_TARGETS
from compressor.modeling_compressor import replacements

KINDS = {"every part": SHAPES, "linear": LINEAR_SHAPES, "one block": ONE_SHAPE}


def rows(batch: int = 2, length: int = 20) -> torch.Tensor:
    return torch.randint(1, VOCAB, (batch, length), generator=torch.Generator().manual_seed(7))


@torch.no_grad()
def difference(model: Any, other: Any) -> float:
    expected = model(rows()).logits
    return ((other(rows()).logits.float() - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "opt", "phi", "falcon", "llama", "mistral", "qwen2", "phi3"])
def test_a_stock_checkpoint_needs_no_code(compress: Compress, family: str, kind: str, tmp_path: Path) -> None:
    model = save_compressed(tmp_path / "small", family, KINDS[kind])
    done = compress("export", tmp_path / "small", "--to", "hf-dense", "--out", tmp_path / "dense", "--force", "--json")
    assert done.code == 0, done.err
    again, loading = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "dense", trust_remote_code=False, output_loading_info=True
    )
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert difference(model, again) < 1e-5
    config = json.loads((tmp_path / "dense" / "config.json").read_text())
    assert not config.keys() & {"auto_map", "quantization_config"}
    assert not list((tmp_path / "dense").glob("*.py"))
    report = json.loads(done.out)
    assert report["parameters"]["exported"] == sum(parameter.numel() for parameter in again.parameters())
    assert report["parameters"]["compressed"] == sum(parameter.numel() for parameter in model.parameters())
    saved = json.loads((tmp_path / "dense" / "export.json").read_text())
    assert saved == {key: report[key] for key in saved}
    assert set(report) - set(saved) == {"out", "bytes", "seconds"}
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "dense")
    assert tokenizer.chat_template == transformers.AutoTokenizer.from_pretrained(tmp_path / "small").chat_template
    assert str(tmp_path) not in "".join(f.read_text() for f in (tmp_path / "dense").glob("*.json"))


def test_the_cost_of_one_width_is_said_first(compress: Compress, tmp_path: Path) -> None:
    save_compressed(tmp_path / "small", "llama", LINEAR_SHAPES)
    done = compress("export", tmp_path / "small", "--to", "hf-dense", "--out", tmp_path / "dense")
    assert done.code == 0, done.err
    report = json.loads((tmp_path / "dense" / "export.json").read_text())
    source, compressed_, exported = (report["parameters"][k] for k in ("source", "compressed", "exported"))
    assert compressed_ < exported < source
    assert report["padding_cost"] == pytest.approx((exported - compressed_) / (source - compressed_))
    assert f"costs {report['padding_cost']:.0%} of the saving" in done.err
    assert report["needed"] == [32, 3, 0]
    assert report["neurons"] == [32, 32, 32]


def test_a_broken_record_is_refused_first(refused: Refused, tmp_path: Path) -> None:
    save_compressed(tmp_path / "small", "llama", LINEAR_SHAPES)
    (tmp_path / "small" / "compression.json").write_text('{"perplexity": 3}')
    line = refused("export", tmp_path / "small", "--to", "hf-dense", "--out", tmp_path / "dense")
    assert "is not a compression record" in line


def test_an_export_is_told_from_a_checkpoint(refused: Refused, compress: Compress, tmp_path: Path) -> None:
    save_compressed(tmp_path / "small", "llama", LINEAR_SHAPES)
    assert compress("export", tmp_path / "small", "--to", "hf-dense", "--out", tmp_path / "dense").code == 0
    assert "is not run by compress check" in refused("check", tmp_path / "dense", "--max-dppl", "1")
    line = refused("export", tmp_path / "dense", "--to", "gguf", "--out", tmp_path / "m.gguf")
    assert "is not a compressed checkpoint" in line


def test_nothing_left_is_refused_unless_forced(refused: Refused, compress: Compress, tmp_path: Path) -> None:
    save_compressed(tmp_path / "small", "gpt2", ONE_SHAPE)
    command = ["export", tmp_path / "small", "--to", "hf-dense", "--out", tmp_path / "dense"]
    assert "nothing of the saving is left" in refused(*command)
    assert compress(*command, "--force").code == 0


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_the_precision_is_what_was_asked_for(compress: Compress, dtype: str, tmp_path: Path) -> None:
    model = save_compressed(tmp_path / "small", "llama", LINEAR_SHAPES)
    command = ["export", tmp_path / "small", "--to", "hf-dense", "--out", tmp_path / "dense", "--dtype", dtype]
    assert compress(*command).code == 0
    wanted = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[dtype]
    assert {tensor.dtype for tensor in stored(tmp_path / "dense").values()} == {wanted}
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32)
    assert difference(model, again) < {"f32": 1e-5, "f16": 5e-3, "bf16": 5e-2}[dtype]


@pytest.mark.parametrize(("family", "expected"), [("llama", torch.bfloat16), ("gpt2", torch.float32)])
def test_without_a_word_it_is_the_checkpoints_own_if_that_is_exact(
    compress: Compress, family: str, expected: torch.dtype, tmp_path: Path
) -> None:
    save_compressed(tmp_path / "small", family, LINEAR_SHAPES, dtype=torch.bfloat16)
    done = compress("export", tmp_path / "small", "--to", "hf-dense", "--out", tmp_path / "dense", "--force")
    assert done.code == 0, done.err
    assert {tensor.dtype for tensor in stored(tmp_path / "dense").values()} == {expected}


def test_vllm_gets_a_directory_and_a_warning(compress: Compress, tmp_path: Path) -> None:
    save_compressed(tmp_path / "small", "mistral")
    done = compress("export", tmp_path / "small", "--to", "vllm", "--out", tmp_path / "deci")
    assert done.code == 0, done.err
    assert "has not been run in vLLM" in done.err
    config = json.loads((tmp_path / "deci" / "config.json").read_text())
    assert config["architectures"] == ["DeciLMForCausalLM"]
    assert (tmp_path / "deci" / "configuration_decilm.py").is_file()


def test_onnx_gets_a_graph_a_record_and_a_card(compress: Compress, tmp_path: Path) -> None:
    model = save_compressed(tmp_path / "small", "opt", ONE_SHAPE)
    done = compress("export", tmp_path / "small", "--to", "onnx", "--out", tmp_path / "graph", "--json")
    assert done.code == 0, done.err
    report = json.loads(done.out)
    assert report["cache"] is True
    assert "key-value cache" in report["for"]
    assert report["checked"]["logits_off"] < 1e-4
    assert report["parameters"]["exported"] == report["parameters"]["compressed"]
    names = {path.name for path in (tmp_path / "graph").iterdir()}
    assert names >= {"model.onnx", "config.json", "tokenizer.json", "export.json", "README.md"}
    card = ModelCard.load(tmp_path / "graph" / "README.md")
    assert card.data.library_name == "onnx"
    example = card.text.split("```python\n")[1].split("```")[0].replace("DIRECTORY", str(tmp_path / "graph"))
    namespace: dict[str, Any] = {}
    exec(example, namespace)
    start = namespace["tokenizer"]("It was", return_tensors="pt")["input_ids"]
    expected = model.generate(start, max_new_tokens=20, min_new_tokens=20, do_sample=False)
    assert namespace["ids"].tolist() == expected.tolist()


def test_onnx_needs_its_packages(refused: Refused, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("compressor.export.onnx.PACKAGES", ("onnx", "no_such_package"))
    line = refused("export", tmp_path / "nothing", "--to", "onnx", "--out", tmp_path / "graph")
    assert "--to onnx needs no_such_package; pip install 'compressor[onnx]'" in line


def test_the_card_carries_what_was_measured(compress: Compress, compressed: Path, tmp_path: Path) -> None:
    done = compress("export", compressed, "--to", "hf-dense", "--out", tmp_path / "dense", "--force")
    assert done.code == 0, done.err
    card = ModelCard.load(tmp_path / "dense" / "README.md")
    record = json.loads((compressed / "compression.json").read_text())
    values = [result.metric_value for result in card.data.eval_results or []]
    assert record["perplexity"]["compressed"] in values
    assert 'from_pretrained("DIRECTORY")' in card.text
    assert "trust_remote_code" not in card.text
    assert str(compressed.parent) not in card.content


@pytest.mark.parametrize("to", ["hf-dense", "vllm"])
def test_an_earlier_export_is_replaced_only_when_asked(
    refused: Refused, compress: Compress, to: str, tmp_path: Path
) -> None:
    save_compressed(tmp_path / "small", "llama", LINEAR_SHAPES)
    command = ["export", tmp_path / "small", "--to", to, "--out", tmp_path / "out"]
    assert compress(*command).code == 0
    assert "exists and is not empty" in refused(*command)
    before = tree(tmp_path / "out")
    assert compress(*command, "--overwrite").code == 0
    assert tree(tmp_path / "out").keys() == before.keys()


def test_somebody_elses_directory_is_left_alone(refused: Refused, tmp_path: Path) -> None:
    save_compressed(tmp_path / "small", "llama", LINEAR_SHAPES)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    command = ["export", tmp_path / "small", "--to", "hf-dense", "--overwrite", "--out"]
    assert "was not written by compress" in refused(*command, tmp_path / "mine")
    assert "is the source model itself" in refused(*command, tmp_path / "small")


@pytest.mark.parametrize("to", ["gguf", "hf-dense", "onnx", "vllm"])
def test_a_model_that_is_not_compressed(refused: Refused, to: str, tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "stock")
    line = refused("export", tmp_path / "stock", "--to", to, "--out", tmp_path / "out")
    assert "is not a compressed checkpoint" in line


@pytest.mark.parametrize(("family", "noted"), [("granite-scaled", True), ("llama", False)])
def test_weights_that_are_rounded_again_are_told(compress: Compress, family: str, noted: bool, tmp_path: Path) -> None:
    save_compressed(tmp_path / "small", family)
    command = ["export", tmp_path / "small", "--to", "gguf", "--out", tmp_path / "m.gguf", "--dtype", "bf16"]
    done = compress(*command)
    assert done.code == 0, done.err
    assert ("which bf16 rounds again" in done.err) == noted


def test_from_python(tmp_path: Path) -> None:
    import compressor
    from compressor.export.exporter import TARGETS
    from compressor.runtime.errors import InputError

    save_compressed(tmp_path / "small", "llama", LINEAR_SHAPES)
    record = compressor.export(tmp_path / "small", "hf-dense", tmp_path / "dense")
    assert record.architecture == "llama"
    assert tuple(TARGETS) == EXPORT_TARGETS
    with pytest.raises(InputError, match="--to tflite is not known"):
        compressor.export(tmp_path / "small", "tflite", tmp_path / "lite")


def test_what_is_not_there_or_not_known(refused: Refused, tmp_path: Path) -> None:
    save_compressed(tmp_path / "small", "llama")
    out = ["--out", tmp_path / "out"]
    assert "does not exist" in refused("export", tmp_path / "nothing", "--to", "gguf", *out)
    assert "--to tflite is not known" in refused("export", tmp_path / "small", "--to", "tflite", *out)
    assert "--dtype q4_k is not for --to gguf" in refused(
        "export", tmp_path / "small", "--to", "gguf", "--dtype", "q4_k", *out
    )
    assert "--dtype q8_0 is not for --to hf-dense" in refused(
        "export", tmp_path / "small", "--to", "hf-dense", "--dtype", "q8_0", *out
    )
    assert "missing option '--out'" in refused("export", tmp_path / "small", "--to", "gguf")
    assert "missing option '--to'" in refused("export", tmp_path / "small", *out)


@pytest.mark.parametrize("family", sorted(set(NOT_OWN) - set(LLAMA_TYPED)))
def test_families_without_a_stock_form_are_refused_by_name(refused: Refused, family: str, tmp_path: Path) -> None:
    save_compressed(tmp_path / "small", family, LINEAR_SHAPES)
    line = refused("export", tmp_path / "small", "--to", "hf-dense", "--out", tmp_path / "out")
    assert "cannot be written as hf-dense" in line
    assert "try --to onnx" in line


@pytest.mark.parametrize("to", ["gguf", "vllm"])
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(LLAMA_TYPED)))
def test_families_that_are_no_llamas_are_refused_by_name(
    refused: Refused, family: str, to: str, tmp_path: Path
) -> None:
    model = save_compressed(tmp_path / "small", family, LINEAR_SHAPES)
    line = refused("export", tmp_path / "small", "--to", to, "--out", tmp_path / "out")
    assert f"{model.config.model_type} is not of Llama's type" in line
    assert "try --to hf-dense or --to onnx" in line


@pytest.mark.parametrize("to", ["gguf", "hf-dense", "vllm"])
def test_an_activation_that_is_not_known(refused: Refused, to: str, tmp_path: Path) -> None:
    write(compressed_model("llama", LINEAR_SHAPES, hidden_act="tanh"), tmp_path / "small")
    line = refused("export", tmp_path / "small", "--to", to, "--out", tmp_path / "out")
    assert "the activation of its blocks, tanh, is not one that is known here" in line


def test_no_disk_is_refused_first(refused: Refused, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    save_compressed(tmp_path / "small", "llama", LINEAR_SHAPES)
    monkeypatch.setattr("compressor.runtime.resources.free_disk", lambda place: 1000)
    for to in ("gguf", "hf-dense", "vllm"):
        line = refused("export", tmp_path / "small", "--to", to, "--out", tmp_path / "out")
        assert "needs 16 MB of disk" in line


def test_too_little_memory_names_no_option_that_is_not_there(
    refused: Refused, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    save_compressed(tmp_path / "small", "llama")
    monkeypatch.setattr("compressor.runtime.resources.available_memory", lambda: 1000)
    line = refused("export", tmp_path / "small", "--to", "onnx", "--out", tmp_path / "out")
    assert "export it where there is more" in line
    assert "--low-memory" not in line


def test_a_disk_that_fills_up_leaves_nothing(refused: Refused, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    save_compressed(tmp_path / "small", "llama", LINEAR_SHAPES)
    monkeypatch.setattr("compressor.export.exporter.write_checkpoint", full)
    monkeypatch.setattr("compressor.export.gguf.write_gguf", full)
    for to in ("hf-dense", "gguf"):
        line = refused("export", tmp_path / "small", "--to", to, "--out", tmp_path / "deep" / "out")
        assert "No space left on device" in line


@pytest.mark.parametrize("to", ["gguf", "hf-dense", "vllm"])
def test_a_model_that_was_trained_on_and_saved_again(compress: Compress, to: str, tmp_path: Path) -> None:
    """It has no compression.json any more: config.json says what it is."""
    model = save_compressed(tmp_path / "small", "llama", LINEAR_SHAPES)
    assert not (tmp_path / "small" / "compression.json").exists()
    with torch.no_grad():
        for module in replacements(model).values():
            module.output_bias.add_(0.1)
    model.save_pretrained(tmp_path / "tuned")
    tiny_tokenizer().save_pretrained(tmp_path / "tuned")
    done = compress("export", tmp_path / "tuned", "--to", to, "--out", tmp_path / "out")
    assert done.code == 0, done.err


def test_an_export_that_is_interrupted_leaves_nothing(
    compress: Compress, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    save_compressed(tmp_path / "small", "llama", LINEAR_SHAPES)
    before = tree(tmp_path)
    monkeypatch.setattr("compressor.export.exporter.check_in_llamacpp", interrupt)
    done = compress("export", tmp_path / "small", "--to", "gguf", "--out", tmp_path / "model.gguf")
    assert (done.code, done.errors) == (130, ["error: interrupted; nothing was written"])
    assert tree(tmp_path) == before


def test_a_form_that_computes_something_else_is_never_written(
    refused: Refused, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from compressor.export import stock

    def wrong(module: Any, *rest: Any) -> Any:
        folded = right(module, *rest)
        return type(folded)(**{**vars(folded), "outer": folded.outer * 1.01})

    right = stock.fold
    save_compressed(tmp_path / "small", "llama")
    monkeypatch.setattr("compressor.export.stock.fold", wrong)
    for to in ("gguf", "hf-dense", "vllm"):
        line = refused("export", tmp_path / "small", "--to", to, "--out", tmp_path / "out", "--force")
        assert "does not compute what the model in memory computes" in line
