"""Text that a model writes itself, for `--text self`: sampled, without degenerate repetition, kept in the cache.

Documents are sampled in chunks of a fixed size. Chunk by chunk they are kept, so that an interrupted run goes on where
it stopped, and more tokens only add chunks. Every split has chunks of its own: no document is in two splits.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from compressor.models.offload import device_of, disk_weights_of
from compressor.models.source import context_length, identify
from compressor.runtime import distributed
from compressor.runtime.cache import Tensors, cache_key
from compressor.runtime.context import RunContext
from compressor.runtime.errors import InputError
from compressor.runtime.resources import available_memory
from compressor.text import Document, seed_of

Advance = Callable[[int], None]  # is told how many tokens more are written

STEP = "write text"
WRITER_VERSION = 1  # of what is sampled for a seed
DOCUMENT_TOKENS = 512  # at most, in a document
LEAST_TOKENS = 16  # a document does not end before
CHUNKS = {"calibration": 64, "selection": 24, "verification": 48}  # documents; on a CPU, 64 at once are fastest
SAMPLE_DOCUMENTS, SAMPLE_TOKENS = 16, 32  # what a dry run writes
REPEATED_TOKENS = 4  # as many tokens in a row that came before in the same document count as repetition
MOST_REPETITION = 0.5  # of a document
LEAST_BYTES = 0.12  # that a document is compressed to; English prose has 0.4 or more
SHORT_BYTES = 200  # a document below it is too short to tell by compressing it
LEAST_KEPT = 0.1  # of the documents: with fewer the model is said to write nothing but repetition
MEMORY_SHARE = 0.5  # of the available memory, for the keys and values of the documents that are written at once


@dataclass(frozen=True)
class Writer:
    """A model that writes documents in its tokenizer's tokens; what it wrote is kept in the cache of the context."""

    model: Any
    tokenizer: Any
    context: RunContext = field(default_factory=RunContext)
    sample_only: bool = False  # for a dry run: a few short documents, again and again

    def write(self, split: str, tokens: int, seed: int) -> list[Document]:
        """Documents for one split with at least so many tokens."""
        if disk_weights_of(self.model) is not None:
            raise InputError(
                "--text self does not work with --low-memory: every token would read all weights from disk; give "
                "--text PATH, or --text mix"
            )
        documents: list[Document] = []
        count = drawn = chunk = 0
        with self.context.progress.bar(STEP, tokens, f"for {split}") as advance:
            sample = self.write_sample() if self.sample_only else None
            while count < tokens:
                kept = unpack(sample or self.get_chunk(split, chunk, seed, advance))
                drawn += SAMPLE_DOCUMENTS if sample else CHUNKS[split]
                chunk += 1
                for ids in kept:
                    content = self.tokenizer.decode(ids, skip_special_tokens=True)
                    documents.append(Document(len(documents), content, tuple(ids)))
                    count += len(ids)
                if len(documents) < LEAST_KEPT * drawn:
                    raise InputError(
                        f"--text self: of {drawn} documents that the model wrote, {drawn - len(documents)} say one "
                        "thing over and over; give --text PATH, or --text mix"
                    )
        return documents

    def key(self, split: str, chunk: int, seed: int) -> dict[str, Any]:
        """What a chunk depends on."""
        return cache_key(
            "written text",
            identify(self.model),
            split,
            writer=WRITER_VERSION,
            chunk=chunk,
            documents=CHUNKS[split],
            length=self.length,
            seed=seed,
            first=self.first_token,
            ends=self.end_tokens,
            special=sorted(self.tokenizer.all_special_ids),
            vocabulary=len(self.tokenizer),
        )

    def get_chunk(self, split: str, chunk: int, seed: int, advance: Advance) -> Tensors:
        """The documents of one chunk that are not degenerate: from the cache, or written by the first process."""
        key = self.key(split, chunk, seed)
        kept = self.context.cache.find(key)
        if kept is not None:
            advance(len(kept["ids"]))
            return kept
        generator = torch.Generator().manual_seed(seed_of(seed, "self", split, str(chunk)))
        written = distributed.compute_on_first(lambda: self.sample(CHUNKS[split], self.length, generator, advance))
        self.context.cache.keep(key, written)
        return written

    def write_sample(self) -> Tensors:
        """A few short documents, which stand for all that a run would write."""
        length = min(SAMPLE_TOKENS, self.length)
        generator = torch.Generator().manual_seed(0)
        return distributed.compute_on_first(lambda: self.sample(SAMPLE_DOCUMENTS, length, generator, lambda _: None))

    @property
    def length(self) -> int:
        """The most tokens of a document: the model's context must hold them and the token that they begin after."""
        return max(1, min(DOCUMENT_TOKENS, (context_length(self.model) or DOCUMENT_TOKENS + 1) - 1))

    @property
    def first_token(self) -> int | None:
        """What every document begins after: the beginning or, without one, the end of a text; None: nothing."""
        first: int | None = self.tokenizer.bos_token_id
        if first is None:
            first = self.tokenizer.eos_token_id
        return first

    @property
    def end_tokens(self) -> list[int]:
        """The tokens that end a document."""
        settings = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        several = settings if isinstance(settings, list) else [settings]
        return sorted({end for end in (self.tokenizer.eos_token_id, *several) if end is not None})

    def sample(self, documents: int, length: int, generator: torch.Generator, advance: Advance) -> Tensors:
        """So many documents at temperature 1, without the degenerate ones."""
        words = [draw_word(self.tokenizer, generator) for _ in range(documents)]
        # A uniform number for every token: what is drawn depends on the batch only by rounding.
        uniforms = torch.rand(documents, length, generator=generator, dtype=torch.float64)
        rows = self.rows_at_once(length)  # all of a chunk, unless memory is short
        written: list[list[int]] = []
        for start in range(0, documents, rows):
            part = slice(start, start + rows)
            written += self.continue_words(words[part], uniforms[part], start, advance)
        kept = [ids for ids in written if not is_degenerate(ids, self.tokenizer)]
        lengths = torch.tensor([len(ids) for ids in kept], dtype=torch.long)
        return {"ids": torch.tensor([i for ids in kept for i in ids], dtype=torch.long), "lengths": lengths}

    def rows_at_once(self, length: int) -> int:
        """The documents whose keys, values and logits memory holds; keys are taken to be as wide as the model."""
        device = device_of(self.model)
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()
        config = self.model.config.get_text_config()
        keys: int = 2 * config.num_hidden_layers * config.hidden_size * self.model.dtype.itemsize * length
        logits: int = 24 * self.model.get_input_embeddings().weight.shape[0]
        return max(1, int(MEMORY_SHARE * free) // (keys + logits))

    def continue_words(
        self, words: list[int], uniforms: Tensor, start: int, advance: Advance = lambda _: None
    ) -> list[list[int]]:
        """Documents that the model writes at once. Every second one begins with a word that was drawn for it, so that a
        model which always begins in the same way writes about different things; without a first token all of them do.
        """
        first = self.first_token
        given = {row: word for row, word in enumerate(words) if first is None or (start + row) % 2}
        beginnings = torch.tensor(words if first is None else [first] * len(words))
        documents: list[list[int]] = [[word] if first is None else [] for word in words]

        def keep(rows: list[int], chosen: list[int], position: int) -> list[bool]:
            """Append what was chosen; whether each document goes on."""
            advance(len(rows))
            going = []
            for row, token in zip(rows, chosen, strict=True):
                token = given[row] if position == 0 and first is not None and row in given else token
                documents[row].append(token)
                going.append(token not in ends)
            return going

        ends = set(self.end_tokens)
        sample_rows(self.model, beginnings, uniforms, self.forbidden(), self.end_tokens, keep, documents)
        return documents

    def forbidden(self) -> list[int]:
        """Special tokens that are no end, and rows of the embedding that are no token: no document holds them."""
        rows = self.model.get_output_embeddings().weight.shape[0]
        special = {i for i in self.tokenizer.all_special_ids if i < rows} - set(self.end_tokens)
        return sorted(special | set(range(len(self.tokenizer), rows)))


@torch.no_grad()
def sample_rows(
    model: Any,
    beginnings: Tensor,
    uniforms: Tensor,
    forbidden: list[int],
    ends: list[int],
    keep: Callable[[list[int], list[int], int], list[bool]],
    documents: list[list[int]],
) -> None:
    """Write one token after another for every row, with a key-value cache. Rows that have ended leave the batch."""
    rows = list(range(len(beginnings)))
    tokens, past = beginnings[:, None].to(device_of(model)), None
    for position in range(uniforms.shape[1]):
        output = model(input_ids=tokens, past_key_values=past, use_cache=True)
        past = output.past_key_values
        logits = output.logits[:, -1]
        logits[:, forbidden] = -torch.inf
        if position < LEAST_TOKENS:
            logits[:, ends] = -torch.inf
        chosen = choose_tokens(logits, uniforms[rows, position])
        going = keep(rows, chosen.tolist(), position)
        tokens = torch.tensor([documents[row][-1] for row in rows], device=tokens.device)[:, None]
        if not all(going):
            staying = torch.tensor([i for i, goes in enumerate(going) if goes], device=tokens.device)
            if not len(staying):
                return
            rows = [rows[i] for i in staying.tolist()]
            tokens = tokens[staying]
            past.batch_select_indices(staying)


def choose_tokens(logits: Tensor, uniforms: Tensor) -> Tensor:
    """One token for every row at temperature 1: where the cumulative probability passes the row's uniform number."""
    if logits.device.type == "mps":  # has no float64
        logits = logits.cpu()
    cumulative = logits.double().softmax(-1).cumsum(-1)
    if not cumulative[:, -1].isfinite().all():
        raise InputError("--text self: the model's logits are not finite; try --dtype float32, or give --text PATH")
    levels = uniforms.to(cumulative.device)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, levels, right=True)[:, 0].clamp(max=logits.shape[1] - 1)


def draw_word(tokenizer: Any, generator: torch.Generator) -> int:
    """A token of the vocabulary that has letters and stands for whole characters; after many tries, any token."""
    special, token = set(tokenizer.all_special_ids), 0
    for _ in range(200):
        token = int(torch.randint(len(tokenizer), (1,), generator=generator))
        content = "" if token in special else tokenizer.decode([token])
        if any(map(str.isalpha, content)) and "\ufffd" not in content:
            break
    return token


def is_degenerate(ids: list[int], tokenizer: Any) -> bool:
    """Whether a document is mostly what stood in it before, or says so little that it can be compressed to nothing."""
    grams = [tuple(ids[i : i + REPEATED_TOKENS]) for i in range(len(ids) - REPEATED_TOKENS + 1)]
    if grams and 1 - len(set(grams)) / len(grams) > MOST_REPETITION:
        return True
    content = tokenizer.decode(ids, skip_special_tokens=True).encode("utf-8")
    return len(content) >= SHORT_BYTES and len(zlib.compress(content, 9)) < LEAST_BYTES * len(content)


def unpack(chunk: Tensors) -> list[list[int]]:
    """The documents of a chunk."""
    ids, stops = chunk["ids"].tolist(), chunk["lengths"].cumsum(0).tolist()
    return [ids[start:stop] for start, stop in pairwise([0, *stops])]
