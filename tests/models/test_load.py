"""Loading: what is sound loads exactly, and whatever is wrong gives one line, in time, running no foreign code."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.utils import logging
from zoo import FAMILIES, VOCAB, logits, save_tiny, tiny_model, tiny_tokenizer

from compressor.modeling_compressor import Replacement
from compressor.models.blocks import find_blocks
from compressor.models.load import load_model
from compressor.models.source import source_of
from compressor.patch.checkpoint import write_checkpoint
from compressor.patch.tree import patch
from compressor.runtime import network
from compressor.runtime.errors import InputError
from compressor.runtime.names import BUILT_IN_MODELS

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FOREIGN_CODE = """
import pathlib
pathlib.Path({marker!r}).touch()
from transformers import LlamaConfig, LlamaForCausalLM
class ForeignConfig(LlamaConfig):
    model_type = "foreign"
class ForeignModel(LlamaForCausalLM):
    config_class = ForeignConfig
"""


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One directory per kind of model, written once and never changed."""
    root = tmp_path_factory.mktemp("originals")
    save_tiny("llama", root / "llama")
    save_tiny("gpt2", root / "gpt2")
    return root


@pytest.fixture
def llama(originals: Path, tmp_path: Path) -> Path:
    """A copy of the tiny Llama that a test may spoil."""
    return Path(shutil.copytree(originals / "llama", tmp_path / "llama"))


def refusal(model: Any, **options: Any) -> str:
    """The message load refuses with; it must be one line."""
    with pytest.raises(InputError) as caught:
        load_model(str(model), **options)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600
    return message


def edit(path: Path, **settings: Any) -> None:
    """Set keys of a JSON file; None takes a key out."""
    content = {**json.loads(path.read_text()), **settings}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(directory / WEIGHTS)
    change(tensors)
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})


# What loads


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_loads_exactly(family: str, tmp_path: Path) -> None:
    saved = save_tiny(family, tmp_path)
    model, tokenizer = load_model(str(tmp_path), device="cpu")
    assert torch.equal(logits(model), logits(saved))
    assert tokenizer.decode(tokenizer("Call me Ishmael.")["input_ids"]) == "Call me Ishmael."
    assert not model.training


def test_source_is_recorded(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(llama.parent)
    source = source_of(load_model("llama")[0])
    assert (source.model, source.revision, source.model_type) == (str(llama), None, "llama")
    assert source.dtype == torch.float32


@pytest.mark.parametrize("name", BUILT_IN_MODELS)
def test_a_built_in_model_is_the_directory_in_the_package(
    llama: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(BUILT_IN_MODELS, name, llama)
    model, tokenizer = load_model(name)
    assert source_of(model).model == model.name_or_path == tokenizer.name_or_path == name
    monkeypatch.setitem(BUILT_IN_MODELS, name, llama / "absent")
    assert f"`{name}` is missing from this installation; install the package again" in refusal(name)


def test_computes_in_float32_on_a_cpu_and_remembers_the_stored_dtype(tmp_path: Path) -> None:
    tiny_model("gpt2").to(torch.bfloat16).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({"transformer.ln_f.bias": torch.ones(32)}))
    model, _ = load_model(str(tmp_path), device="cpu")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert source_of(model).dtype == torch.bfloat16  # most bytes, not the first tensor or the last
    assert load_model(str(tmp_path), device="cpu", dtype="float16")[0].dtype == torch.float16


def test_hash_knows_the_weights_only(llama: Path, tmp_path: Path) -> None:
    model, _ = load_model(str(llama))
    sharded = Path(shutil.copytree(llama, tmp_path / "another name"))
    (sharded / WEIGHTS).unlink()
    tensors = load_file(llama / WEIGHTS)
    table = {name: f"part-{number % 2}.safetensors" for number, name in enumerate(sorted(tensors))}
    for shard in set(table.values()):
        part = {name: tensor for name, tensor in tensors.items() if table[name] == shard}
        save_file(part, sharded / shard, metadata={"format": "pt"})
    (sharded / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": table}))
    again, _ = load_model(str(sharded))
    assert torch.equal(logits(again), logits(model))
    assert source_of(again).weights_sha256 == source_of(model).weights_sha256
    rewrite(llama, lambda tensors: tensors["model.norm.weight"][0].add_(1e-3))
    assert source_of(load_model(str(llama))[0]).weights_sha256 != source_of(model).weights_sha256


def test_source_of_a_model_loaded_elsewhere(llama: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(llama, dtype=torch.bfloat16)
    source = source_of(model)
    assert (source.model, source.model_type, source.dtype) == (str(llama), "llama", torch.bfloat16)
    assert source == source_of(model)
    with torch.no_grad():
        model.model.norm.weight[0] += 1
    assert source_of(model).weights_sha256 != source.weights_sha256


def test_untied_weights_hash_alike_in_files_and_in_memory(tmp_path: Path) -> None:
    model = save_tiny("mistral", tmp_path)
    assert set(load_file(tmp_path / WEIGHTS)) == set(model.state_dict())
    assert source_of(load_model(str(tmp_path))[0]).weights_sha256 == source_of(model).weights_sha256


def test_loading_is_silent_and_leaves_settings_alone(llama: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rewrite(llama, lambda tensors: tensors.update({"surplus": torch.zeros(2)}))  # makes transformers write a report
    before = logging.get_verbosity()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_model(str(llama))
    assert capfd.readouterr() == ("", "")
    refusal(llama, device="nowhere")
    assert logging.get_verbosity() == before
    assert logging.is_progress_bar_enabled()
    assert not huggingface_hub.utils.are_progress_bars_disabled()


# Checkpoints of this tool


@pytest.fixture
def compressed(llama: Path, tmp_path: Path) -> Path:
    model, tokenizer = load_model(str(llama))
    block = find_blocks(model)[1]
    patch(model, [block], {1: Replacement(block.width, 2)})
    directory = tmp_path / "compressed"
    directory.mkdir()
    write_checkpoint(model, tokenizer, directory)
    return directory


def test_compressed_checkpoint_is_refused_by_name(compressed: Path) -> None:
    assert "already compressed; compress its source model instead" in refusal(compressed)
    (compressed / "compression.json").write_text(json.dumps({"source": {"model": "gpt2"}}))
    assert f"{compressed} is already compressed; compress its source gpt2 instead" in refusal(compressed)


@pytest.mark.parametrize("trust", [False, True])
def test_compressed_checkpoint_loads_without_its_code(compressed: Path, tmp_path: Path, trust: bool) -> None:
    (compressed / "modeling_compressor.py").write_text(FOREIGN_CODE.format(marker=str(tmp_path / "ran")))
    model, _ = load_model(str(compressed), allow_compressed=True, trust_remote_code=trust)
    assert isinstance(model.model.layers[1].mlp, Replacement)
    assert not (tmp_path / "ran").exists()


def test_other_quantizers_are_refused(llama: Path) -> None:
    edit(llama / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    assert "quantised (gptq)" in refusal(llama)


# Code and pickles


@pytest.fixture
def foreign(llama: Path, tmp_path: Path) -> Path:
    """A directory whose modeling file leaves a mark when it runs."""
    (llama / "modeling_foreign.py").write_text(FOREIGN_CODE.format(marker=str(tmp_path / "ran")))
    auto_map = {"AutoConfig": "modeling_foreign.ForeignConfig", "AutoModelForCausalLM": "modeling_foreign.ForeignModel"}
    edit(llama / "config.json", model_type="foreign", auto_map=auto_map)
    return llama


def test_foreign_code_is_refused(foreign: Path, tmp_path: Path) -> None:
    assert "--trust-remote-code" in refusal(foreign)
    assert not (tmp_path / "ran").exists()


def test_foreign_code_of_a_known_type_is_not_run(foreign: Path, tmp_path: Path) -> None:
    edit(foreign / "config.json", model_type="llama")
    model, _ = load_model(str(foreign))
    assert type(model) is transformers.LlamaForCausalLM
    assert not (tmp_path / "ran").exists()


def test_foreign_tokenizer_code_is_refused(foreign: Path, tmp_path: Path) -> None:
    edit(foreign / "config.json", model_type="llama", auto_map=None)
    auto_map = {"AutoTokenizer": ["modeling_foreign.Foreign", None]}
    edit(foreign / "tokenizer_config.json", tokenizer_class="Foreign", auto_map=auto_map)
    assert "--trust-remote-code" in refusal(foreign)
    assert not (tmp_path / "ran").exists()


def test_trusted_code_runs(foreign: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    model, _ = load_model(str(foreign), trust_remote_code=True)
    assert type(model).__name__ == "ForeignModel"
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_kernels_from_the_hub_are_refused(llama: Path, key: str) -> None:
    edit(llama / "config.json", **{key: "someone/kernel"})
    assert "someone/kernel" in refusal(llama)


def test_pickles_are_refused(llama: Path) -> None:
    torch.save(load_file(llama / WEIGHTS), llama / "pytorch_model.bin")
    (llama / WEIGHTS).unlink()
    assert "only pickle weights (pytorch_model.bin)" in refusal(llama)
    edit(llama / "config.json", transformers_weights="pytorch_model.bin")
    assert "transformers_weights" in refusal(llama)


# Spoilt directories


@pytest.mark.parametrize(
    "name", ["./absent", "../absent", "/absent", "~/absent/model", "a/b/c", "white space", "", "\0"]
)
def test_missing_directory(name: str) -> None:
    assert "does not exist" in refusal(name)


def test_file_instead_of_directory(llama: Path) -> None:
    assert "is a file; give the directory" in refusal(llama / WEIGHTS)


def test_revision_of_a_directory(llama: Path) -> None:
    assert "revision 'v1' needs a hub id" in refusal(llama, revision="v1")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (None, "has no config.json"),
        ("{", "config.json of"),
        ("\xff", "config.json of"),
        ("[1]", "is not a JSON object"),
        ("{}", "has no model_type"),
        ('{"model_type": 3}', "has no model_type"),
        ('{"model_type": "zork"}', "does not know model type 'zork'"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "is not valid"),
        ('{"model_type": "llama", "num_attention_heads": 0}', "is not valid"),
        ('{"model_type": "vit"}', "(vit) is not a language model"),
        ('{"model_type": "bert"}', "(bert) is an encoder;"),
        ('{"model_type": "roberta"}', "(roberta) is an encoder;"),
        ('{"model_type": "t5"}', "(t5) is an encoder-decoder"),
        ('{"model_type": "bart"}', "(bart) is an encoder-decoder"),
        ('{"model_type": "whisper"}', "(whisper) is an encoder-decoder"),
    ],
)
def test_config(llama: Path, config: str | None, says: str) -> None:
    (llama / "config.json").unlink()
    if config is not None:
        (llama / "config.json").write_text(config, encoding="latin-1")
    assert says in refusal(llama)


def test_adapter(llama: Path) -> None:
    (llama / "config.json").rename(llama / "adapter_config.json")
    assert "merge the adapter" in refusal(llama)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (Path.unlink, "has no safetensors weights"),
        (truncate, "is damaged"),
        (lambda path: path.write_bytes(b""), "is damaged"),
        (lambda path: path.write_bytes(b"\xff" * 5000), "is damaged"),
        (lambda path: path.write_text("version https://git-lfs\noid sha256:0\n"), "Git LFS pointer"),
    ],
)
def test_weights_file(llama: Path, spoil: Callable[[Path], Any], says: str) -> None:
    spoil(llama / WEIGHTS)
    message = refusal(llama)
    assert says in message
    assert WEIGHTS in message


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "lacks 1 tensors of its architecture (model.norm.weight)"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.ones(5)}), "model.norm.weight is [5], config.json"),
        (lambda tensors: tensors["model.norm.weight"].fill_(torch.nan), "NaN or infinite values in model.norm.weight"),
        (lambda tensors: tensors["model.norm.weight"][3].fill_(-torch.inf), "infinite values in model.norm.weight"),
        (lambda tensors: tensors.clear() or tensors.update(a=torch.zeros(2, dtype=torch.int8)), "no floating-point"),
    ],
)
def test_tensors(llama: Path, change: Callable[[dict[str, torch.Tensor]], Any], says: str) -> None:
    rewrite(llama, change)
    assert says in refusal(llama)


def test_values_too_large_for_the_dtype(llama: Path) -> None:
    rewrite(llama, lambda tensors: tensors["model.norm.weight"].fill_(1e6))
    load_model(str(llama))
    assert "model.norm.weight (as float16)" in refusal(llama, dtype="float16")


def test_config_of_another_size(llama: Path) -> None:
    edit(llama / "config.json", intermediate_size=64)
    assert "mlp.down_proj.weight is [32, 48], config.json says [32, 64]" in refusal(llama)
    edit(llama / "config.json", intermediate_size=48, num_hidden_layers=4)
    assert "lacks 12 tensors" in refusal(llama)


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ("{", "cannot be read"),
        ("{}", "has no weight_map"),
        ('{"weight_map": {"a": 1}}', "has no weight_map"),
        ('{"weight_map": {"a": "part.safetensors"}}', "lacks part.safetensors"),
        ('{"weight_map": {"a": "../part.safetensors"}}', "outside the directory"),
    ],
)
def test_index(llama: Path, index: str, says: str) -> None:
    (llama / WEIGHTS).unlink()
    (llama / INDEX).write_text(index)
    assert says in refusal(llama)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_tokenizer_is_missing(originals: Path, tmp_path: Path, family: str) -> None:
    directory = Path(shutil.copytree(originals / family, tmp_path / family))
    for path in directory.glob("tokenizer*"):
        path.unlink()
    message = refusal(directory)
    assert f"the tokenizer of {directory}" in message
    assert "save the tokenizer in the same directory" in message


def test_tokenizer_is_damaged(llama: Path) -> None:
    truncate(llama / "tokenizer.json")
    assert "the tokenizer of" in refusal(llama)


def test_tokenizer_of_another_model(llama: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["quick"])
    tokenizer.save_pretrained(llama)
    assert f"gives token {VOCAB}, but the model has {VOCAB} embeddings" in refusal(llama)


@pytest.mark.parametrize("device", ["gpu", "", "cuda:x", "meta", "cpu:7"])
def test_device(llama: Path, device: str) -> None:
    assert repr(device) in refusal(llama, device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_is_absent(llama: Path) -> None:
    assert "device 'cuda' is not available here" in refusal(llama, device="cuda")


@pytest.mark.parametrize("dtype", ["int8", "float64", "half", ""])
def test_dtype(llama: Path, dtype: str) -> None:
    assert f"unknown dtype {dtype!r}; use auto, float32" in refusal(llama, dtype=dtype)


def test_memory_errors_pass(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", exhausted)
    with pytest.raises(MemoryError):
        load_model(str(llama))


# The Hub


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hub cache."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_offline_mode_is_told_at_once(tmp_path: Path) -> None:
    """In a fresh process: the variable is read on import."""
    code = (
        "import time; from compressor.models.load import load_model; start = time.monotonic()\n"
        "try: load_model('someone/model')\n"
        "except Exception as error: print(type(error).__name__, time.monotonic() - start, error)"
    )
    settings = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **settings}, capture_output=True, text=True, timeout=60
    )
    kind, seconds, message = done.stdout.split(" ", 2)
    assert kind == "InputError"
    assert float(seconds) < 10
    assert "cannot be reached (HF_HUB_OFFLINE is set); give a local directory, or `demo`" in message
    assert done.stderr == ""


def test_no_network_is_told_in_time(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://hub.invalid")  # a name that never resolves
    start = time.monotonic()
    message = refusal("someone/model")
    assert time.monotonic() - start < 10
    assert "cannot be reached" in message
    assert "give a local directory, or `demo`" in message
    assert capfd.readouterr() == ("", "")


class Silence:
    """A network that swallows every packet."""

    def head(self, *_: Any, **__: Any) -> None:
        time.sleep(60)


def test_silent_network_is_told_in_time(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "is_offline_mode", lambda: False)
    monkeypatch.setattr(network, "get_session", Silence)
    monkeypatch.setattr(network, "PROBE_SECONDS", 0.5)
    start = time.monotonic()
    assert "no answer in 0.5 s" in refusal("gpt2")
    assert time.monotonic() - start < 5


def fill_cache(cache: Path, llama: Path) -> Path:
    repo = cache / "models--someone--model"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    return Path(shutil.copytree(llama, repo / "snapshots" / COMMIT))


def test_cached_model_needs_no_network(cache: Path, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    snapshot = fill_cache(cache, llama)
    for revision in (None, "main", COMMIT):
        model, _ = load_model("someone/model", revision=revision)
        assert (source_of(model).model, source_of(model).revision) == ("someone/model", COMMIT)
        assert model.name_or_path == "someone/model"
    (snapshot / WEIGHTS).unlink()
    assert "nor a whole model in the local cache" in refusal("someone/model")


Answer = Callable[[str, str], tuple[int, dict[str, str], bytes]]


@pytest.fixture
def serve(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Answer], None]]:
    """Answer every request of the Hub client by a function of method and path."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    http = importlib.import_module(type(huggingface_hub.get_session()).__module__.partition(".")[0])

    def install(answer: Answer) -> None:
        def handle(request: Any) -> Any:
            status, headers, body = answer(request.method, request.url.path)
            return http.Response(status, headers=headers, content=body, request=request)

        huggingface_hub.set_client_factory(lambda: http.Client(transport=http.MockTransport(handle)))

    yield install
    from huggingface_hub.utils._http import default_client_factory

    huggingface_hub.set_client_factory(default_client_factory)


@pytest.mark.parametrize(
    ("status", "code", "says"),
    [
        (404, "RepoNotFound", "'someone/model' is neither a directory nor a public model on the Hub"),
        (401, "RepoNotFound", "'someone/model' is neither a directory nor a public model on the Hub"),
        (401, "", "is neither a directory nor a public model"),
        (403, "GatedRepo", "access to someone/model is restricted"),
        (403, "", "access to someone/model is restricted"),
        (404, "RevisionNotFound", "someone/model has no revision 'v9'"),
        (418, "", "someone/model cannot be downloaded: Client error '418"),
    ],
)
def test_hub_refuses(serve: Callable[[Answer], None], status: int, code: str, says: str) -> None:
    serve(lambda method, path: (status, {"X-Error-Code": code}, b"{}") if "/api/" in path else (200, {}, b""))
    assert says in refusal("someone/model", revision="v9")


def test_hub_model_is_downloaded_without_code_or_pickles(
    serve: Callable[[Answer], None], cache: Path, originals: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {path.name: path.read_bytes() for path in (originals / "gpt2").iterdir()}
    files.update({"modeling.py": b"1 / 0", "pytorch_model.bin": b"pickle", "onnx/config.json": b"{}"})
    fetched = set()

    def answer(method: str, path: str) -> tuple[int, dict[str, str], bytes]:
        if "/tree/" in path:
            listing = [{"type": "file", "path": name, "size": len(b), "oid": name} for name, b in files.items()]
            return 200, {}, json.dumps(listing).encode()
        if "/api/" in path:
            siblings = [{"rfilename": name} for name in files]
            return 200, {}, json.dumps({"id": "someone/model", "sha": COMMIT, "siblings": siblings}).encode()
        name = path.partition(f"/resolve/{COMMIT}/")[2]
        body = files.get(name, b"")
        if method == "GET":
            fetched.add(name)
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{name}"', "Content-Length": str(len(body))}
        return 200, headers, body if method == "GET" else b""

    serve(answer)
    model, _ = load_model("someone/model")
    assert source_of(model).revision == COMMIT
    assert WEIGHTS in fetched
    assert not fetched & {"modeling.py", "pytorch_model.bin", "onnx/config.json"}

    files["config.json"] = b'{"model_type": "bert"}'
    fetched.clear()
    shutil.rmtree(cache)
    assert "(bert) is an encoder" in refusal("someone/model")
    assert WEIGHTS not in fetched  # refused before the large files

    files["config.json"] = (originals / "gpt2" / "config.json").read_bytes()
    shutil.rmtree(cache)
    load_model("someone/model")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    (snapshot,) = cache.glob("*/snapshots/*")
    (snapshot / "generation_config.json").unlink()
    load_model("someone/model")  # not all of the repository is cached, but all that is needed
    (snapshot / "config.json").unlink()
    assert "nor a whole model in the local cache" in refusal("someone/model")
