"""Load a model safely: no code and no pickle of its directory is run, and every fault becomes a one-line error."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from logging import getLogger
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.hooks import remove_hook_from_module
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    are_progress_bars_disabled,
    disable_progress_bars,
    validate_repo_id,
)
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from compressor.modeling_compressor import METHOD, WEIGHTS_NOTE
from compressor.models.blocks import find_blocks
from compressor.models.config_check import CONFIG_BYTES, check_config_fits, refuse_huge_numbers, run_short_pass
from compressor.models.hub import MODEL_ALTERNATIVES, Snapshot, open_snapshot
from compressor.models.offload import offload_to_disk
from compressor.models.safetensors_files import Shard, find_shards, hash_weights, list_tensors, main_dtype
from compressor.models.source import Source, record_source
from compressor.runtime import distributed
from compressor.runtime.errors import InputError, reason_of
from compressor.runtime.names import BUILT_IN_MODELS, NAMED_BUILT_IN
from compressor.runtime.resources import format_bytes, require_memory, require_precision
from compressor.runtime.safe_files import read_json
from compressor.runtime.stored_weights import SINGLE

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
GPU_MEMORY_FACTOR = 1.3  # a model that computes on a GPU takes this many times the memory of its weights
SAMPLE = "The quick brown fox jumps over 13 lazy dogs."


def load_model(
    model: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
    allow_compressed: bool = False,
    low_memory: bool = False,
    scratch: Path | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer from a directory, a hub id or a built-in name, in evaluation mode.

    `auto` means a CUDA device if there is one; as a dtype, float32 on a CPU and the checkpoint's dtype elsewhere.
    `allow_compressed` accepts checkpoints that this tool wrote; the code in their directory is not run.
    `low_memory` leaves the weights on disk and reads each layer when it runs; residual streams go to `scratch`.
    """
    model = os.fspath(model)
    target = resolve_device(device)
    if dtype != "auto" and dtype not in DTYPES:
        raise InputError(f"unknown dtype {dtype!r}; use auto, {', '.join(DTYPES)}")
    name, directory, snapshot = locate_model(model, revision, trust_remote_code)
    raw = read_json(directory / "config.json", model, CONFIG_BYTES)
    refuse_huge_numbers(raw, model)
    if is_compressed(raw, model):
        if not allow_compressed:
            raise already_compressed_error(directory, model)
        trust_remote_code = False  # importing METHOD registered the loader, so its own code is not needed
    with quiet():
        config = load_config(raw, directory, model, trust_remote_code)
        tokenizer = load_tokenizer(directory, model, config, trust_remote_code)
    tensors = list_tensors(find_shards(directory, model, snapshot), model)
    with quiet(), raising_input_error(f"config.json of {model} is not valid"):
        elements = check_config_fits(config, raw, tensors, model, trust_remote_code=trust_remote_code)
    stored = main_dtype(tensors, model)
    computed = DTYPES.get(dtype) or (torch.float32 if target.type == "cpu" else stored)
    if target.type == "cpu":
        require_precision(computed)
    device_map: dict[str, Any] = {"device_map": {"": "disk"}}
    if not low_memory:
        description = f"{model} as {str(computed).removeprefix('torch.')}"
        device_map = choose_device_map(description, elements * computed.itemsize, target, device)
    sha256 = hash_weights(tensors, model, computed)
    with quiet():
        loaded = load_weights(directory, model, config, computed, trust_remote_code, **device_map)
    if low_memory:
        keep_weights_on_disk(loaded, target, scratch)
    elif not device_map:
        with raising_input_error(f"{model} cannot be put on {target}", "use --device cpu"):
            loaded.to(target)
    loaded.eval()
    with quiet(), raising_input_error(f"{model} cannot be computed with", "check its config.json"):
        run_short_pass(loaded)
    source = Source(name, snapshot.commit if snapshot else None, config.model_type, sha256, stored)
    loaded.config.name_or_path = loaded.name_or_path = tokenizer.name_or_path = name
    record_source(loaded, source)
    return loaded, tokenizer


def resolve_device(device: str) -> torch.device:
    """The torch device; `auto` never chooses MPS, which has no float64."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        device = distributed.local_device()
    try:
        target = torch.device(device)
    except RuntimeError:
        target = torch.device("meta")
    if target.type not in ("cpu", "cuda", "mps"):
        raise InputError(f"unknown device {device!r}; use auto, cpu, cuda, cuda:N or mps")
    count = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}[target.type]
    if (target.index or 0) >= count:
        raise InputError(f"device {device!r} is not available here ({count} found); use --device cpu")
    return target


def locate_model(model: str, revision: str | None, with_code: bool) -> tuple[str, Path, Snapshot | None]:
    """The name to record, the directory to read, and for a hub id its snapshot (still without weights)."""
    built_in = BUILT_IN_MODELS.get(model)
    if built_in and not (built_in / "config.json").is_file():
        raise InputError(f"the built-in model `{model}` is missing from this installation; install the package again")
    path = built_in or Path(os.path.expanduser(model))
    if model and os.path.isdir(path):
        if revision is not None:
            raise InputError(f"revision {revision!r} needs a hub id, but {model} is a directory; leave --revision out")
        return (model if built_in else os.path.abspath(path)), path, None
    if os.path.isfile(path):
        raise InputError(f"{model} is a file; give the directory that holds config.json and {SINGLE}")
    try:
        validate_repo_id(model)
        is_path = model.startswith((".", "~", os.sep))
    except HFValidationError:
        is_path = True
    if is_path:
        raise InputError(
            f"directory {model!r} does not exist; give a directory, a hub id such as gpt2, or {NAMED_BUILT_IN}"
        )
    snapshot = open_snapshot(model, revision, with_code=with_code)
    return model, snapshot.directory, snapshot


def is_compressed(raw: dict[str, Any], model: str) -> bool:
    """Whether this is a checkpoint that this tool wrote; a checkpoint of another quantiser is refused."""
    quantization = raw.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if quantization and method != METHOD:
        raise InputError(f"{model} is quantised ({method}); give the unquantised model it was made from")
    return bool(quantization)


def already_compressed_error(directory: Path, model: str) -> InputError:
    """The error for a compressed model where an original is needed; names its source if the record does."""
    record = directory / "compression.json"
    source = read_json(record, model).get("source") if record.is_file() else None
    original = source.get("model") if isinstance(source, dict) else None
    return InputError(f"{model} is already compressed; compress its source {original or 'model'} instead")


def refuse_redirections(raw: dict[str, Any], directory: Path, model: str) -> None:
    """Refuse settings that make from_pretrained fetch code (a kernel) or read other weights than were checked."""
    if (directory / "adapter_config.json").is_file():  # with peft installed, its base model would be read instead
        raise InputError(f"{model} has adapter_config.json; merge the adapter into its base model, or remove the file")
    for key in ("attn_implementation", "_attn_implementation"):
        if "/" in str(raw.get(key)):
            raise InputError(f"config.json of {model} sets {key} to {raw[key]!r}, which is code; set it to 'sdpa'")
    weights = raw.get("transformers_weights") or SINGLE
    if weights != SINGLE and not (weights == WEIGHTS_NOTE and is_compressed(raw, model)):
        raise InputError(f"config.json of {model} sets transformers_weights to {weights!r}; only {SINGLE} is read")


def load_config(raw: dict[str, Any], directory: Path, model: str, trust_remote_code: bool) -> PretrainedConfig:
    """The config of a causal language model that transformers knows, or whose own code the user trusts."""
    model_type, has_code = raw.get("model_type"), bool(raw.get("auto_map"))
    if not isinstance(model_type, str):
        raise InputError(f"config.json of {model} has no model_type; add the one of its architecture, such as llama")
    trusted = has_code and trust_remote_code
    if model_type not in CONFIG_MAPPING and not trusted:
        if has_code:
            raise InputError(f"{model} ({model_type}) runs code of its own; if you trust it, add --trust-remote-code")
        version = transformers.__version__
        raise InputError(f"transformers {version} does not know model type {model_type!r} of {model}; upgrade it")
    refuse_redirections(raw, directory, model)
    with raising_input_error(f"config.json of {model} is not valid"):
        config = AutoConfig.from_pretrained(
            directory, trust_remote_code=trust_remote_code, local_files_only=not trust_remote_code
        )
    if getattr(config, "is_encoder_decoder", False):
        raise not_causal_error(model, model_type, "an encoder-decoder")
    if trusted and "AutoModelForCausalLM" in raw["auto_map"]:
        return config
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise not_causal_error(model, model_type, "not a language model decoder")
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False):
        raise not_causal_error(model, model_type, "an encoder")
    return config


def not_causal_error(model: str, model_type: str, kind: str) -> InputError:
    """The error for an encoder or another model that does not predict the next token."""
    return InputError(f"{model} ({model_type}) is {kind}; give a causal language model such as gpt2 or a Llama")


def load_tokenizer(
    directory: Path, model: str, config: PretrainedConfig, trust_remote_code: bool
) -> PreTrainedTokenizerBase:
    """The tokenizer, checked on a sentence, because transformers makes an empty one when the files are missing."""
    remedy = "save the tokenizer in the same directory (or, if it has code that you trust, add --trust-remote-code)"
    with raising_input_error(f"the tokenizer of {model} cannot be loaded", remedy):
        tokenizer = AutoTokenizer.from_pretrained(
            directory, trust_remote_code=trust_remote_code, local_files_only=not trust_remote_code
        )
        tokens = tokenizer(SAMPLE)["input_ids"]
        # Added tokens, such as an untrained padding token, may lie beyond the embeddings: ordinary text never has them.
        highest = max(set(tokenizer.get_vocab().values()) - set(tokenizer.added_tokens_decoder), default=0)
    if not tokens or len(tokenizer) <= len(tokenizer.all_special_ids):
        raise InputError(f"the tokenizer of {model} has no vocabulary; save the tokenizer in the same directory")
    rows = getattr(config.get_text_config(), "vocab_size", None)
    if rows is not None and max(tokens) >= rows:
        raise InputError(
            f"the tokenizer of {model} gives token {max(tokens)}, but the model has {rows} embeddings; use its own one"
        )
    if rows is not None and highest >= rows:
        raise InputError(
            f"the tokenizer of {model} has tokens up to {highest}, but the model has {rows} embeddings; use its own"
        )
    return tokenizer


def load_weights(
    directory: Path,
    model: str,
    config: PretrainedConfig,
    dtype: torch.dtype,
    trust_remote_code: bool,
    **device_map: Any,
) -> PreTrainedModel:
    """The model with every weight from the files: transformers would fill a missing one with random numbers."""
    with raising_input_error(f"{model} cannot be loaded"):
        loaded, info = AutoModelForCausalLM.from_pretrained(
            directory,
            config=config,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            local_files_only=not trust_remote_code,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # reported below, by name
            output_loading_info=True,
            **device_map,
        )
    for name, stored, expected in sorted(info["mismatched_keys"]):
        raise InputError(
            f"weights of {model} do not fit its config: {name} is {list(stored)}, config.json says {list(expected)}"
        )
    missing = sorted(info["missing_keys"])
    if missing:
        examples = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        raise InputError(f"{model} lacks {len(missing)} tensors of its architecture ({examples}); save the whole model")
    return loaded


def choose_device_map(description: str, needed: int, target: torch.device, device: str) -> dict[str, Any]:
    """The `device_map` argument of from_pretrained: a model that is larger than one GPU is spread over all GPUs.

    Empty where the model fits on the target. A model that fits nowhere is refused.
    """
    if target.type != "cuda":
        require_memory(description, needed)
        return {}
    free = [torch.cuda.mem_get_info(number)[0] for number in range(torch.cuda.device_count())]
    if GPU_MEMORY_FACTOR * needed <= free[target.index or 0]:
        return {}
    if distributed.launched_processes() == 1 and device in ("auto", "cuda") and GPU_MEMORY_FACTOR * needed <= sum(free):
        return {"device_map": "balanced"}
    raise InputError(
        f"{description} takes {format_bytes(needed)}, and the GPU has {format_bytes(free[target.index or 0])} free "
        f"({len(free)} found, {format_bytes(sum(free))} together); "
        "add --low-memory, which reads each layer from disk when it runs"
    )


def keep_weights_on_disk(loaded: PreTrainedModel, device: torch.device, scratch: Path | None = None) -> None:
    """Make a model that was loaded with its weights on disk read each layer when it runs."""
    layers = [block.layer_path for block in find_blocks(loaded)]
    offload_to_disk(loaded, take_weight_index(loaded), layers, device, scratch)


def take_weight_index(loaded: PreTrainedModel) -> dict[str, tuple[Shard, str]]:
    """The file and the stored name of every parameter of a model that accelerate left on disk.

    The hooks by which accelerate would read them are removed.
    """
    shards: dict[str, Shard] = {}
    index: dict[str, tuple[Shard, str]] = {}
    for module in loaded.modules():
        hook = getattr(module, "_hf_hook", None)
        for part in getattr(hook, "hooks", [hook]):
            weights_map = getattr(part, "weights_map", None)
            if weights_map is None or index:
                continue
            for name, entry in weights_map.dataset.index.items():
                file = entry["safetensors_file"]
                shards.setdefault(file, Shard(Path(file)))
                index[name] = (shards[file], entry["weight_name"])
    remove_hook_from_module(loaded, recurse=True)
    for module in loaded.modules():
        module.__dict__.pop("forward", None)  # accelerate leaves a wrapper around the class's method
    return index


@contextmanager
def raising_input_error(problem: str, remedy: str = MODEL_ALTERNATIVES) -> Iterator[None]:
    """Turn any exception, except InputError and MemoryError, into an InputError of one line."""
    try:
        yield
    except (InputError, MemoryError):
        raise
    except Exception as error:
        raise InputError(f"{problem}: {reason_of(error)}; {remedy}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings, load reports and progress bars of transformers, and restore the settings afterwards."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    accelerate_log = getLogger("accelerate.big_modeling")
    accelerate_level = accelerate_log.level
    hub_bars_off = are_progress_bars_disabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.set_verbosity(logging.CRITICAL)
        accelerate_log.setLevel(logging.CRITICAL)
        logging.disable_progress_bar()
        try:
            yield
        finally:
            logging.set_verbosity(verbosity)
            accelerate_log.setLevel(accelerate_level)
            if bars:
                logging.enable_progress_bar()
            if hub_bars_off:
                disable_progress_bars()
