"""What a model says of every token of some windows, in transformers, llama.cpp or ONNX Runtime."""

from __future__ import annotations

import hashlib
import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor.evaluate.perplexity import Losses, compare, evaluate, limit_batch_size, logits_losses
from compressor.export import gguf, llamacpp
from compressor.export.llama import convert_to_llama
from compressor.export.onnx import FILE, open_session, session_logits
from compressor.models.load import quiet
from compressor.models.source import identify
from compressor.pipelines.describe import change_values, describe_split
from compressor.pipelines.recipe import Recipe
from compressor.report.export_check import Contrast
from compressor.report.record_parts import Texts
from compressor.runtime.cache import cache_key
from compressor.runtime.context import RunContext
from compressor.runtime.errors import InputError
from compressor.runtime.locks import SCRATCH, owned_directory, remove_abandoned
from compressor.runtime.resources import require_disk
from compressor.text import Split, Text, batches, group_by_name
from compressor.text.windows import HELD_OUT_EVERY

NATS_OF_ZERO = 104.0  # of a probability that float32 calls zero: the smallest that it has is exp(−103.3)
CHUNK_BYTES = 2**20


@dataclass(frozen=True)
class Scores:
    """The loss in nats of every predicted token [windows, seq_len − 1], and the most likely token in its place."""

    nats: Tensor
    most_likely: Tensor
    bytes: int | None = None  # of the GGUF file that was written to be measured

    @property
    def losses(self) -> Losses:
        return Losses(self.nats)


@dataclass(frozen=True)
class Scorer:
    """Scores models on one split of a text; what was measured is kept in the cache."""

    split: Split
    context: RunContext

    def in_transformers(self, model: Any, step: str) -> Scores:
        """A model that is loaded."""

        def measure() -> dict[str, Tensor]:
            tops: list[Tensor] = []
            losses = evaluate(
                model,
                self.split.windows,
                self.context,
                step=step,
                watch=lambda _number, _batch, logits: tops.append(logits[:, :-1].argmax(-1).cpu()),
            )
            return {"nats": losses.nats, "most_likely": torch.cat(tops)}

        return self.keep(step, identify(model), measure, runtime="transformers")

    def in_llamacpp(self, file: Path, step: str) -> Scores:
        """A GGUF file in llama.cpp."""
        return self.keep(
            step, {"weights": hash_file(file)}, lambda: self.run_llamacpp(file, step), **llamacpp_version()
        )

    def as_gguf(self, model: Any, tokenizer: Any, dtype: str, step: str) -> Scores:
        """A model that is loaded, compressed or not, written as a GGUF file that is removed again."""

        def measure() -> dict[str, Tensor]:
            with written_as_gguf(model, tokenizer, dtype, self.context) as file:
                return {**self.run_llamacpp(file, step), "bytes": torch.tensor(file.stat().st_size)}

        return self.keep(step, identify(model), measure, written_as=dtype, **llamacpp_version())

    def run_llamacpp(self, file: Path, step: str) -> dict[str, Tensor]:
        windows = self.split.windows
        settings = llamacpp.Settings(threads=torch.get_num_threads(), context=windows.shape[1] + 1)
        with llamacpp.Runner(file, settings) as run:
            bar = self.context.progress.track(step, windows.tolist(), len(windows), "in llama.cpp")
            scores = [run.score(window) for window in bar]
        losses = [[min(-score.log_probability, NATS_OF_ZERO) for score in window] for window in scores]
        return {
            "nats": torch.tensor(losses),
            "most_likely": torch.tensor([[score.most_likely for score in window] for window in scores]),
        }

    def in_onnxruntime(self, directory: Path, model: Any, step: str) -> Scores:
        """An ONNX graph; its batches are as large as those of this model."""

        def measure() -> dict[str, Tensor]:
            session = open_session(directory / FILE)
            windows = self.split.windows
            size = limit_batch_size(model, windows.shape[1], self.context.batch_size)
            nats, tops = [], []
            parts = batches(windows, size)
            for batch in self.context.progress.track(step, parts, len(parts), "in ONNX Runtime"):
                logits = session_logits(session, batch)
                nats.append(logits_losses(logits, batch))
                tops.append(logits[:, :-1].argmax(-1))
            return {
                "nats": torch.cat(nats).nan_to_num(math.inf).clamp(max=NATS_OF_ZERO),
                "most_likely": torch.cat(tops),
            }

        hashes = " ".join(hash_file(file) for file in sorted(directory.glob(f"{FILE}*")))
        return self.keep(step, {"weights": hashes}, measure, runtime=f"onnxruntime {version('onnxruntime')}")

    def keep(
        self, step: str, identity: dict[str, Any], measure: Callable[[], dict[str, Tensor]], **more: Any
    ) -> Scores:
        """The scores from the cache, or measured now."""
        shape = {"seq_len": self.split.windows.shape[1], "batch": self.context.batch_size}
        key = cache_key("scores of tokens", identity, self.split.sha256, **shape, **more)
        found = self.context.cache.get(step, key, measure)
        size = found.get("bytes")
        return Scores(found["nats"], found["most_likely"], None if size is None else int(size))


def llamacpp_version() -> dict[str, Any]:
    """What llama.cpp's figures depend on besides the file, for cache keys."""
    return {"runtime": f"xllamacpp {version('xllamacpp')}", "threads": torch.get_num_threads()}


def hash_file(file: Path) -> str:
    sha = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            sha.update(chunk)
    return sha.hexdigest()


@contextmanager
def written_as_gguf(model: Any, tokenizer: Any, dtype: str, context: RunContext) -> Iterator[Path]:
    """A model as a GGUF file, as `compress export` would write it but for its record, while the context is open."""
    llama = convert_to_llama(model, multiple=gguf.MULTIPLE, keep_original_widths=True)
    parent = Path(tempfile.gettempdir())
    needed = sum(each.bytes for each in gguf.list_stored(llama.model, dtype))
    context.progress.note(require_disk(f"a file as {dtype}", needed, parent, "set TMPDIR to another directory"))
    remove_abandoned(parent, SCRATCH)
    with owned_directory(parent, SCRATCH) as folder:
        file = folder / "model.gguf"
        with quiet():
            gguf.write_gguf(llama, tokenizer, file, dtype, "model")
        yield file


def require_runtime(to: str) -> str:
    """The name and version of what runs an export of this form; refused where it is not installed or not run here."""
    if to == "gguf":
        if not llamacpp.is_installed():
            raise InputError(
                "a GGUF file is checked in llama.cpp, and xllamacpp is not installed; pip install xllamacpp"
            )
        return f"llama.cpp (xllamacpp {version('xllamacpp')})"
    if to == "onnx":
        try:
            return f"ONNX Runtime {version('onnxruntime')}"
        except ImportError:
            raise InputError(
                "an ONNX graph is checked in ONNX Runtime, and onnxruntime is not installed; "
                "pip install 'compressor[onnx]'"
            ) from None
    raise InputError(
        f"an export --to {to} is not run by compress check; check the checkpoint that it was made from, or an export "
        "--to gguf or onnx"
    )


def contrast(name: str, words: str, of: Scores, against: Scores, split: Split, context: RunContext) -> Contrast:
    """One model against another on the same tokens."""
    change = compare(against.losses, of.losses, context.confidence, context.seed, split.documents)
    off = (of.nats.double() - against.nats.double()).abs()
    return Contrast(
        **change_values(change, None),
        name=name,
        words=words,
        log_probability_off=off.max().item(),
        log_probability_off_mean=off.mean().item(),
        greedy_equal=int((of.most_likely == against.most_likely).sum()),
    )


def verification_alone(recipe: Recipe, seq_len: int) -> dict[str, int]:
    """What to change in a recipe so that little more than the verification part of its text is read."""
    texts = len(group_by_name(recipe.text or ["demo"]))
    return {"calib_tokens": HELD_OUT_EVERY * texts * seq_len, "select_tokens": seq_len, "seq_len": seq_len}


def describe_verification(text: Text) -> Texts:
    return Texts(verification=describe_split(text.verification), seq_len=text.seq_len, names=list(text.counts))
