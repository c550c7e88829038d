"""Vocabularies in GGUF files: real llama.cpp makes the same tokens of a text as transformers, or they are refused."""

from __future__ import annotations

import json
import random
import unicodedata
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tinygguf import make_llama, write_gguf
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from compressor.export.gguf_tokenizer import BYTES, PRE_TOKENIZERS, SPACE, PreTokenizer, add_vocabulary
from compressor.export.llamacpp import Runner, Settings
from compressor.runtime.errors import InputError

SPECIAL = ["<unk>", "<s>", "</s>", "<|end|>"]
OWN = "<tool>"  # an added token that is not special
ROWS = 2600
NASTY = [*" \t\n\r'.,!/_-$0129aAzZsStTéÉßΩж世界한🙂\u200d\u0301\u00a0\u3000½²٣ខ្មែ▁\x00\x7f"]
NASTY += [
    "'s",
    "'S",
    "'ll",
    "'RE",
    "'d",
    "  ",
    "     ",
    "\n\n",
    " \n",
    "\r\n",
    "the",
    " lazy",
    "ING",
    "12345",
    "👨‍👩‍👧",
]
TEXTS = [
    "",
    " ",
    "a",
    "   leading",
    "trailing   ",
    "I'll SAY we'RE 1234567",
    f"a{OWN}b <s> c</s>",
    "<|end|>\n\n<|end|>",
]
TEXTS += ["Hi!\n\nyes.\r\n", "a \n \n\n b", "\n\n\n", " \r\n", "-/\n/", "12\n3"]  # where the ways to cut differ
# The long s is an s to a regular expression that ignores case, but not to llama.cpp.
LETTERS = st.characters(exclude_categories=["Cs", "Cn", "Co"], exclude_characters="ſ")
WORDS = st.lists(st.sampled_from([*NASTY, *SPECIAL, OWN]) | LETTERS, max_size=25).map("".join)
PLAIN = st.text(st.characters(max_codepoint=127), max_size=30)
QUICK = settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
INEXACT = ("tekken", "gpt-4o")  # beyond ASCII, and told so
IDS = {name: (cut, whole) for cut in PRE_TOKENIZERS for whole, name in cut.names.items()}


@cache
def learn() -> dict[str, Any]:
    """Byte-level BPE learnt on text without words, so that its merges go over every border that a cut may make."""
    choice = random.Random(0)
    known = [c for c in map(chr, range(0x3000)) if unicodedata.category(c) not in ("Cs", "Cn", "Co")]
    pool = NASTY * 3 + choice.sample(known, 60)
    texts = ["".join(choice.choices(pool, k=20)) for _ in range(4000)] + ["!\n", "!\n\n", ".\r\n", "-/\n"] * 50
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=2500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    data: dict[str, Any] = json.loads(tokenizer.to_str())
    return data


def make_words(cut: PreTokenizer, whole: bool = False, *words: str, **more: Any) -> PreTrainedTokenizerFast:
    """The learnt tokenizer, with that way to cut words, and these words as tokens that no merge makes."""
    model = learn()["model"]
    vocab = model["vocab"] | {word: len(model["vocab"]) + i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab, [tuple(m) for m in model["merges"]], ignore_merges=whole))
    parts: list[Any] = [
        pre_tokenizers.Digits(True) if step == "digits" else pre_tokenizers.Split(Regex(step[6:]), "isolated")
        for step in cut.steps
        if step not in ("words", "bytes")
    ]
    parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex="words" in cut.steps))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(OWN, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<|end|>", **more)


@cache
def learn_pieces(without: str) -> dict[str, Any]:
    choice = random.Random(0)
    sources = [word.replace(" ", SPACE) for word in NASTY if word not in without]
    texts = ["".join(choice.choices(sources, k=20)) for _ in range(3000)]
    learner = Tokenizer(models.BPE())
    learner.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=1500, show_progress=False))
    learnt: dict[str, Any] = json.loads(learner.to_str())["model"]
    return learnt


def make_pieces(
    normalizer: Any = None, pre_tokenizer: Any = None, closed: bool = True, missing: int = 0, without: str = "\x00"
) -> PreTrainedTokenizerFast:
    """A tokenizer as SentencePiece makes it: every two pieces that make a third are a merge, by the third's score."""
    learnt = learn_pieces(without)
    runs = [SPACE * length for length in (2, 3, 4, 5, 6, 7, 8, 16)]
    pieces = [piece for piece in learnt["vocab"] if piece not in runs]
    vocab = {piece: i for i, piece in enumerate([*SPECIAL, *BYTES[missing:], *runs, *pieces])}
    pairs = [
        (p[:cut], p[cut:]) for p in pieces for cut in range(len(p) - 1, 0, -1) if p[:cut] in vocab and p[cut:] in vocab
    ]
    spaces = [
        (run[:cut], run[cut:]) for run in runs for cut in range(1, len(run)) if {run[:cut], run[cut:]} <= {*vocab}
    ]
    merges = [*pairs, *sorted(spaces, key=lambda pair: -len(pair[0]))] if closed else learnt["merges"]
    tokenizer = Tokenizer(models.BPE(vocab, [tuple(m) for m in merges], unk_token="<unk>", byte_fallback=True))
    if normalizer:
        tokenizer.normalizer = normalizer
    if pre_tokenizer:
        tokenizer.pre_tokenizer = pre_tokenizer
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(OWN, normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<|end|>"
    )


PREPEND = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
REPLACE = normalizers.Replace(" ", SPACE)
KINDS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "prepend": lambda: make_pieces(PREPEND),
    "replace": lambda: make_pieces(REPLACE, pre_tokenizers.Split(" ", "merged_with_previous")),
    "metaspace": lambda: make_pieces(None, pre_tokenizers.Metaspace(prepend_scheme="never", split=False)),
} | {name: (lambda case=case: make_words(*case)) for name, case in IDS.items()}


def write(file: Path, tokenizer: PreTrainedTokenizerFast, rows: int = ROWS, **more: Any) -> list[str]:
    notes: list[str] = []
    write_gguf(file, make_llama(rows), lambda writer: notes.extend(add_vocabulary(writer, tokenizer, rows, **more)))
    return notes


def read(file: Path, name: str) -> Any:
    field = gguf.GGUFReader(file).get_field(f"tokenizer.{name}")
    return field.contents() if field else None


@pytest.fixture(scope="module", params=KINDS)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[PreTrainedTokenizerFast, Runner, bool]]:
    tokenizer = KINDS[request.param]()
    file = tmp_path_factory.mktemp("vocabulary") / "tiny.gguf"
    assert bool(write(file, tokenizer)) == (request.param in INEXACT)
    with Runner(file, Settings(context=64)) as run:
        yield tokenizer, run, request.param not in INEXACT


def test_llama_cpp_makes_the_same_tokens(case: tuple[PreTrainedTokenizerFast, Runner, bool]) -> None:
    tokenizer, run, exact = case

    def compare(text: str) -> None:
        assert run.tokenize(text) == tokenizer.encode(text, add_special_tokens=False)
        assert run.tokenize(text, add_special=True) == tokenizer.encode(text)

    for text in TEXTS:
        compare(text)
    QUICK(given(WORDS if exact else PLAIN)(compare))()
    text = "It's  a\n\ttest, 123! " + ("é世界🙂 ខ្មែរ" if exact else "")
    assert run.detokenize(tokenizer.encode(text, add_special_tokens=False)).lstrip(" ") == text


def test_where_llama_cpp_differs_it_is_said(tmp_path: Path) -> None:
    composed = make_words(PRE_TOKENIZERS[0])
    composed.backend_tokenizer.normalizer = normalizers.NFC()
    assert write(tmp_path / "nfc.gguf", composed) == ["llama.cpp does not put text into Unicode's NFC form"]
    first = make_pieces(None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False))
    assert len(write(tmp_path / "first.gguf", first)) == 2
    with Runner(tmp_path / "first.gguf", Settings(context=64)) as run:
        assert run.tokenize("the lazy") == first.encode("the lazy", add_special_tokens=False)


def test_a_word_that_no_merge_makes(tmp_path: Path) -> None:
    """Taken whole or not, by the name that is written; refused where llama.cpp has no name for it."""
    llama, qwen = IDS["llama-bpe"][0], IDS["qwen2"][0]
    for whole, name in llama.names.items():
        tokenizer = make_words(llama, whole, "Ġunheard")
        write(tmp_path / "word.gguf", tokenizer)
        assert read(tmp_path / "word.gguf", "ggml.pre") == name
        with Runner(tmp_path / "word.gguf", Settings(context=64)) as run:
            ids = run.tokenize("an unheard word")
        assert ids == tokenizer.encode("an unheard word", add_special_tokens=False)
        assert (tokenizer.convert_tokens_to_ids("Ġunheard") in ids) == whole
    write(tmp_path / "whole.gguf", make_words(qwen, True))  # merges make every word that is a token
    with pytest.raises(InputError, match="ignore_merges"):
        write(tmp_path / "none.gguf", make_words(qwen, True, "Ġunheard"))


def test_a_space_before_a_text_is_told(tmp_path: Path) -> None:
    tokenizer = make_words(PRE_TOKENIZERS[0])
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    (note,) = write(tmp_path / "space.gguf", tokenizer)
    assert "puts no space before a text" in note
    with Runner(tmp_path / "space.gguf", Settings(context=64)) as run:
        for text in (" an unheard word", " two\nlines  and 12 more"):
            assert run.tokenize(text) == tokenizer.encode(text, add_special_tokens=False)


def test_rows_without_a_token_are_filled_up(tmp_path: Path) -> None:
    tokenizer = make_words(PRE_TOKENIZERS[0], False, f"[PAD{ROWS - 1}]")
    write(tmp_path / "rows.gguf", tokenizer)
    tokens, types = read(tmp_path / "rows.gguf", "ggml.tokens"), read(tmp_path / "rows.gguf", "ggml.token_type")
    assert len(tokens) == len(types) == len(set(tokens)) == ROWS
    assert types[len(tokenizer) :] == [gguf.TokenType.UNUSED] * (ROWS - len(tokenizer))
    assert types[tokenizer.eos_token_id] == gguf.TokenType.CONTROL
    assert types[tokenizer.convert_tokens_to_ids(OWN)] == gguf.TokenType.USER_DEFINED
    write(tmp_path / "full.gguf", tokenizer, len(tokenizer))
    tokenizer.add_special_tokens({"pad_token": "<padding>"})  # that nobody trained: left out
    write(tmp_path / "beyond.gguf", tokenizer, len(tokenizer) - 1)
    assert "<padding>" not in read(tmp_path / "beyond.gguf", "ggml.tokens")
    assert "tokenizer.ggml.padding_token_id" not in gguf.GGUFReader(tmp_path / "beyond.gguf").fields
    with pytest.raises(InputError, match="rows of embeddings"):
        write(tmp_path / "few.gguf", tokenizer, 200)


def test_types_of_pieces(tmp_path: Path) -> None:
    tokenizer = make_pieces(PREPEND)
    write(tmp_path / "pieces.gguf", tokenizer)
    types = read(tmp_path / "pieces.gguf", "ggml.token_type")
    assert {types[tokenizer.convert_tokens_to_ids(byte)] for byte in BYTES} == {gguf.TokenType.BYTE}
    assert types[tokenizer.unk_token_id] == gguf.TokenType.UNKNOWN
    assert types[tokenizer.bos_token_id] == gguf.TokenType.CONTROL


@pytest.mark.parametrize(("template", "begins", "ends"), [("<s> $A </s>", 1, 1), ("$A", 0, 0), ("$A </s>", 0, 1)])
def test_what_is_put_around_a_text(tmp_path: Path, template: str, begins: int, ends: int) -> None:
    """As the tokenizer does it, whatever it calls its tokens."""
    tokenizer = make_words(PRE_TOKENIZERS[0])
    special = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<s>", "</s>")]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    write(tmp_path / "around.gguf", tokenizer)
    assert read(tmp_path / "around.gguf", "ggml.add_bos_token") == begins
    assert read(tmp_path / "around.gguf", "ggml.add_eos_token") == ends
    with Runner(tmp_path / "around.gguf", Settings(context=64)) as run:
        for text in ("Hello", ""):
            assert run.tokenize(text, add_special=True) == tokenizer.encode(text)


def test_the_tokens_that_end_a_text(tmp_path: Path) -> None:
    tokenizer = make_words(PRE_TOKENIZERS[0])
    end, other = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|end|>")
    write(tmp_path / "ends.gguf", tokenizer, generation_config=SimpleNamespace(eos_token_id=[other, end]))
    assert read(tmp_path / "ends.gguf", "ggml.eos_token_id") == end
    assert read(tmp_path / "ends.gguf", "ggml.eot_token_id") == other
    assert read(tmp_path / "ends.gguf", "ggml.padding_token_id") == other
    tokenizer.eos_token = None
    (note,) = write(tmp_path / "pad.gguf", tokenizer)
    assert "<|end|>" in note
    tokenizer.pad_token = None
    with pytest.raises(InputError, match="no token for the end"):
        write(tmp_path / "endless.gguf", tokenizer)


def test_chat_templates(tmp_path: Path) -> None:
    tokenizer = make_words(PRE_TOKENIZERS[0])
    one = "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}</s>{% endfor %}{{ '<|assistant|>' }}"
    messages = [{"role": "user", "content": "Hi  there"}]
    for template in (one, {"default": one, "tools": "{{ messages[0].content }}"}):
        tokenizer.chat_template = template
        write(tmp_path / "chat.gguf", tokenizer)
        with Runner(tmp_path / "chat.gguf", Settings(context=64)) as run:
            assert run.chat_prompt(messages) == tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
    assert read(tmp_path / "chat.gguf", "chat_template.tools") == "{{ messages[0].content }}"


def change(part: str, value: Any) -> PreTrainedTokenizerFast:
    tokenizer = make_words(PRE_TOKENIZERS[0])
    setattr(tokenizer.backend_tokenizer, part, value)
    return tokenizer


def wrap(model: Any) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), eos_token="</s>")


SPLIT = pre_tokenizers.Split(Regex(r"\w+"), "isolated")
DIGITS, EARLY = pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=True)
LATE = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
TWICE = processors.TemplateProcessing(single="<s> <s> $A", special_tokens=[("<s>", 2501)])
REFUSALS: dict[str, tuple[Callable[[], PreTrainedTokenizerFast], str]] = {
    "wordpiece": (lambda: wrap(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]")), "WordPiece"),
    "unigram": (lambda: wrap(models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0, False)), "Unigram"),
    "suffix": (lambda: wrap(models.BPE({"a</w>": 0}, [], end_of_word_suffix="</w>")), "end_of_word_suffix"),
    "dropout": (lambda: wrap(models.BPE({"a": 0}, [], dropout=0.1)), "dropout"),
    "lowercase": (lambda: change("normalizer", normalizers.Lowercase()), "no normalizer"),
    "words": (lambda: change("pre_tokenizer", pre_tokenizers.Sequence([SPLIT, LATE])), "cut words"),
    "removed": (lambda: change("pre_tokenizer", pre_tokenizers.Whitespace()), "cut words"),
    "prefixes": (lambda: change("pre_tokenizer", pre_tokenizers.Sequence([DIGITS, EARLY])), "cut words"),
    "nothing": (lambda: change("pre_tokenizer", pre_tokenizers.Sequence([])), "cut words"),
    "unknown": (lambda: wrap(models.BPE({"a": 0, "<unk>": 1}, [], unk_token="<unk>")), "256|drops"),
    "twice": (lambda: change("post_processor", TWICE), "at most one token"),
    "open": (lambda: make_pieces(PREPEND, closed=False), "would join|one rank"),
    "bytes": (lambda: make_pieces(PREPEND, missing=3), "no token for 3 of 256"),
    "zero": (lambda: make_pieces(PREPEND, without=""), "zero byte"),
    "spaces": (lambda: make_pieces(None, None), "spaces"),
    "over": (lambda: make_pieces(None, pre_tokenizers.Metaspace(prepend_scheme="never")), "go over them"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_llama_cpp_cannot_do_is_refused(tmp_path: Path, name: str) -> None:
    make, reason = REFUSALS[name]
    tokenizer = make()
    with pytest.raises(InputError, match=reason) as caught:
        write(tmp_path / "no.gguf", tokenizer)
    assert "--to hf-dense" in str(caught.value)


def test_bytes_without_a_token_are_told(tmp_path: Path) -> None:
    """Both drop them, but transformers joins what is left and right of them."""
    vocab = {
        letter: i for i, letter in enumerate([*sorted(set(pre_tokenizers.ByteLevel.alphabet()) - {"ÿ", "Ą"}), "!!"])
    }
    for letter, told in (("ÿ", 0), ("Ą", 1)):  # the bytes FF, which UTF-8 does not have, and 04
        backend = Tokenizer(models.BPE(vocab | {"ÿĄ".replace(letter, ""): len(vocab)}, [("!", "!")]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.add_special_tokens(["</s>"])
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
        assert len(write(tmp_path / "bytes.gguf", tokenizer)) == told
        with Runner(tmp_path / "bytes.gguf", Settings(context=64)) as run:
            assert run.tokenize("a\x04b!!") == tokenizer.encode("a\x04b!!")
            assert (run.tokenize("!\x04!") == tokenizer.encode("!\x04!")) != told


def test_tokens_that_take_the_spaces_around_them_are_told(tmp_path: Path) -> None:
    tokenizer = make_words(PRE_TOKENIZERS[0])
    tokenizer.backend_tokenizer.add_tokens([AddedToken("<mask>", lstrip=True)])
    assert write(tmp_path / "mask.gguf", tokenizer) == ["llama.cpp keeps the spaces around <mask>"]
