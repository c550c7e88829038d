"""The tokenizer of a checkpoint, written into a GGUF file so that llama.cpp makes the same tokens of a text.

A pre-tokenizer splits a text into words before BPE merges the bytes of each word. llama.cpp has a fixed list of
pre-tokenizers, chosen by name. So that of the checkpoint is recognised by its regular expressions, or refused. Where
llama.cpp is known to differ for some texts, a note says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from compressor.runtime.errors import InputError, shorten

# Parts of regular expressions that many tokenizer.json files share.
CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WHITESPACE = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*" + WHITESPACE
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED_WORDS = [r"[^\r\n\p{L}\p{N}]?" + word for word in (f"{UPPER}*{LOWER}+", f"{UPPER}+{LOWER}*")]
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
WORD_WITH_MARKS = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
POSSESSIVE = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
PUNCTUATION_WITH_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*" + WHITESPACE
CJK = "[一-龥぀-ゟ゠-ヿ]+"
DEEPSEEK_WORD = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
)
ASCII_CASE = "llama.cpp knows upper and lower case, where words are cut, of ASCII letters only, and no combining marks"

if TYPE_CHECKING:
    import gguf

ALTERNATIVE = "use --to hf-dense, which keeps the tokenizer as it is"
SPACE = "▁"
INVALID_BYTES = {chr(byte) for byte in (0xC0, 0xC1, *range(0xF5, 0x100))}  # as letters: bytes that UTF-8 never has
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


@dataclass(frozen=True)
class PreTokenizer:
    """A pre-tokenizer of llama.cpp: its steps, its names by whether it has `ignore_merges`, and a known difference.

    With `ignore_merges`, a word that is a token is taken whole, without applying merges.
    """

    steps: tuple[str, ...]
    names: Mapping[bool, str]
    note: str | None = None


def split_by(*patterns: str) -> tuple[str, ...]:
    """The steps of a pre-tokenizer that splits by these patterns one after another, as `name_steps` names them."""
    return (*(f"split {pattern}" for pattern in patterns), "bytes")


PRE_TOKENIZERS = [
    PreTokenizer(("words", "bytes"), {False: "gpt-2"}),
    PreTokenizer(("digits", "words", "bytes"), {False: "smollm"}),
    PreTokenizer(split_by(rf"{CONTRACTION}|{WORD}|\p{{N}}{{1,3}}|{PUNCTUATION}"), {True: "llama-bpe", False: "dbrx"}),
    PreTokenizer(split_by(rf"{CONTRACTION}|{WORD}|\p{{N}}|{PUNCTUATION}"), {False: "qwen2"}),
    PreTokenizer(
        split_by(rf"{CASED_WORDS[0]}|{CASED_WORDS[1]}|\p{{N}}|{PUNCTUATION_WITH_SLASHES}"), {True: "tekken"}, ASCII_CASE
    ),
    PreTokenizer(
        split_by(
            rf"{CASED_WORDS[0]}{CONTRACTION}?|{CASED_WORDS[1]}{CONTRACTION}?|\p{{N}}{{1,3}}|{PUNCTUATION_WITH_SLASHES}"
        ),
        {False: "gpt-4o"},
        ASCII_CASE,
    ),
    PreTokenizer(
        split_by(rf"{CONTRACTION}|{WORD_WITH_MARKS}|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*{WHITESPACE}"),
        {False: "qwen35"},
    ),
    PreTokenizer(
        split_by(rf"{CONTRACTION}|{WORD}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+{WHITESPACE}"), {False: "seed-coder"}
    ),
    PreTokenizer(split_by(POSSESSIVE), {False: "bailingmoe"}),
    PreTokenizer(split_by(r"\p{N}{1,3}", CJK, DEEPSEEK_WORD + WHITESPACE), {False: "deepseek-v3"}),
]


@dataclass(frozen=True)
class Vocabulary:
    """The content of tokenizer.json that both kinds of tokenizer need."""

    data: dict[str, Any]
    model: dict[str, Any]
    added: dict[int, dict[str, Any]]
    tokens: list[str]  # one for each row of embeddings; rows without a token have a made-up one
    unused: set[int]  # rows without a token
    notes: list[str]


def add_vocabulary(
    writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerBase, rows: int, generation_config: Any = None
) -> list[str]:
    """Write the tokenizer of a model with that many rows of embeddings; return notes on how llama.cpp differs."""
    if not getattr(tokenizer, "is_fast", False):
        raise unsupported(f"the tokenizer {type(tokenizer).__name__} has no tokenizer.json")
    vocabulary = read_vocabulary(json.loads(tokenizer.backend_tokenizer.to_str()), rows)
    model = vocabulary.model
    if model.get("type") != "BPE":
        raise unsupported(f"llama.cpp is not known to tokenize as a {model.get('type')} tokenizer does")
    for part in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(part):
            raise unsupported(f"llama.cpp has no {part} ({model[part]!r})")
    if falls_back_to_bytes(vocabulary):
        add_pieces(writer, vocabulary)
    else:
        add_merges(writer, vocabulary)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(list_token_types(vocabulary))
    add_special_tokens(writer, tokenizer, vocabulary, generation_config)
    template = tokenizer.chat_template
    if isinstance(template, Mapping):
        template = [{"name": name, "template": text} for name, text in template.items()]
    if template:
        writer.add_chat_template(template)
    return vocabulary.notes


def unsupported(reason: str) -> InputError:
    """The error for a tokenizer that llama.cpp does not have, with the alternative."""
    return InputError(f"{reason}; {ALTERNATIVE}")


def read_vocabulary(data: dict[str, Any], rows: int) -> Vocabulary:
    """The token of every row of embeddings; a model may have more rows than its tokenizer has tokens.

    Added tokens beyond the last row, such as an untrained padding token, are left out: the model could not take them.
    """
    added = {token["id"]: token for token in data.get("added_tokens") or [] if token["id"] < rows}
    pieces = data["model"]["vocab"]
    texts = {id: text for text, id in pieces.items()} if isinstance(pieces, dict) else {}
    for id, token in added.items():
        if texts.setdefault(id, token["content"]) != token["content"]:
            raise unsupported(f"token {id} of the tokenizer is both {texts[id]!r} and {token['content']!r}")
    if texts and max(texts) >= rows:
        raise unsupported(f"the tokenizer has a token {max(texts)}, and the model only {rows} rows of embeddings")
    if any("\0" in text for text in texts.values()):
        raise unsupported("llama.cpp reads a token only up to a zero byte, and this tokenizer has tokens with one")
    unused = set(range(rows)) - set(texts)
    taken = set(texts.values())
    for id in unused:
        name = f"[PAD{id}]"
        while name in taken:
            name = f"[{name}]"
        texts[id] = name
    notes = []
    stripping = [t["content"] for t in added.values() if t["lstrip"] or t["rstrip"] or t["single_word"]]
    if stripping:
        notes.append(f"llama.cpp keeps the spaces around {shorten(', '.join(stripping))}")
    return Vocabulary(data, data["model"], added, [texts[id] for id in range(rows)], unused, notes)


def list_token_types(vocabulary: Vocabulary) -> list[int]:
    """llama.cpp's type of every token: normal, byte, control and so on."""
    from gguf import TokenType

    unknown = vocabulary.model.get("unk_token")
    bytes_ = set(BYTES) if falls_back_to_bytes(vocabulary) else set()
    types = []
    for id, text in enumerate(vocabulary.tokens):
        added = vocabulary.added.get(id)
        if id in vocabulary.unused:
            kind = TokenType.UNUSED
        elif text == unknown:
            kind = TokenType.UNKNOWN
        elif added:
            kind = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
        else:
            kind = TokenType.BYTE if text in bytes_ else TokenType.NORMAL
        types.append(int(kind))
    return types


def add_merges(writer: gguf.GGUFWriter, vocabulary: Vocabulary) -> None:
    """Write a byte-level BPE tokenizer: its merges and the name of its pre-tokenizer."""
    model = vocabulary.model
    normalizers = flatten(vocabulary.data.get("normalizer"), "normalizers")
    if [part["type"] for part in normalizers] == ["NFC"]:
        vocabulary.notes.append("llama.cpp does not put text into Unicode's NFC form")
    elif normalizers:
        raise unsupported(f"llama.cpp has no normalizer {quote_parts(normalizers)}")
    missing = [letter for letter in byte_letters() if letter not in model["vocab"]]
    if missing and model.get("unk_token") is not None:
        raise unsupported(
            f"llama.cpp drops the bytes that have no token ({len(missing)} of 256) where the tokenizer does not"
        )
    if rare := set(missing) - INVALID_BYTES:
        vocabulary.notes.append(f"llama.cpp makes other tokens next to one of the {len(rare)} bytes that have no token")
    merges = [" ".join(pair) for pair in read_merges(model)]
    if not merges:
        raise unsupported("llama.cpp reads no BPE tokenizer without merges")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name_pre_tokenizer(vocabulary))
    writer.add_token_merges(merges)


def name_pre_tokenizer(vocabulary: Vocabulary) -> str:
    """llama.cpp's name for the pre-tokenizer; the name also decides about `ignore_merges`."""
    parts = flatten(vocabulary.data.get("pre_tokenizer"), "pretokenizers")
    if [(part["type"], part.get("add_prefix_space")) for part in parts] == [("ByteLevel", True)]:
        parts = [{**parts[0], "add_prefix_space": False}]
        vocabulary.notes.append("llama.cpp puts no space before a text as this tokenizer does: begin it with one")
    pre_tokenizer = find_pre_tokenizer(parts)
    if pre_tokenizer is None:
        raise unsupported(f"llama.cpp is not known to cut words as this tokenizer does ({quote_parts(parts)})")
    ignore_merges = bool(vocabulary.model.get("ignore_merges"))
    if ignore_merges not in pre_tokenizer.names and not merges_suffice(vocabulary.data):
        raise unsupported(
            f"llama.cpp has {' and '.join(pre_tokenizer.names.values())} only with ignore_merges {not ignore_merges}"
        )
    if pre_tokenizer.note:
        vocabulary.notes.append(pre_tokenizer.note)
    return pre_tokenizer.names.get(ignore_merges) or pre_tokenizer.names[not ignore_merges]


def merges_suffice(data: dict[str, Any]) -> bool:
    """Whether merges alone turn every token's text into that token, so that `ignore_merges` makes no difference."""
    model = Tokenizer.from_str(json.dumps(data | {"model": data["model"] | {"ignore_merges": False}})).model
    added = {token["content"] for token in data["added_tokens"]}
    return all(text in added or len(model.tokenize(text)) == 1 for text in data["model"]["vocab"])


def add_pieces(writer: gguf.GGUFWriter, vocabulary: Vocabulary) -> None:
    """Write a BPE tokenizer in SentencePiece's form: llama.cpp joins the neighbours whose token has the best score."""
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_add_space_prefix(find_space_prefix(vocabulary))
    writer.add_token_scores(score_tokens(vocabulary))


def falls_back_to_bytes(vocabulary: Vocabulary) -> bool:
    """Whether characters without a token become byte tokens, as in SentencePiece models; all 256 must exist."""
    if not vocabulary.model.get("byte_fallback"):
        return False
    missing = set(BYTES) - vocabulary.model["vocab"].keys()
    if missing:
        raise unsupported(f"the tokenizer falls back to bytes and has no token for {len(missing)} of 256")
    return True


def find_space_prefix(vocabulary: Vocabulary) -> bool:
    """Whether a space is put before the text. Handling of spaces that llama.cpp does not have is refused."""
    normalizers = flatten(vocabulary.data.get("normalizer"), "normalizers")
    parts = flatten(vocabulary.data.get("pre_tokenizer"), "pretokenizers")
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prepend = {"type": "Prepend", "prepend": SPACE}
    if normalizers in ([prepend, replace], [replace]) and all(splits_at_spaces(part) for part in parts):
        if len(normalizers) == 2:
            changed = [t["content"] for t in vocabulary.added.values() if t["normalized"]]
            if changed:
                vocabulary.notes.append(f"llama.cpp finds {shorten(', '.join(changed))} also within words")
        return len(normalizers) > 1
    if normalizers or len(parts) != 1 or parts[0]["type"] != "Metaspace" or parts[0]["replacement"] != SPACE:
        raise unsupported(
            f"llama.cpp does not treat spaces as this tokenizer does ({quote_parts(normalizers + parts)})"
        )
    if parts[0].get("split", True) and any(SPACE in left[1:] + right for left, right in read_merges(vocabulary.model)):
        raise unsupported("llama.cpp does not cut words at spaces, and this tokenizer has tokens that go over them")
    scheme = parts[0].get("prepend_scheme", "always")
    if scheme != "never":
        vocabulary.notes.append("llama.cpp puts a space before a text also where it begins with one")
    if scheme == "first":
        vocabulary.notes.append("llama.cpp puts a space after every special token, not only at the beginning")
    return bool(scheme != "never")


def splits_at_spaces(part: dict[str, Any]) -> bool:
    """Whether the part only splits at spaces, which does nothing once the normalizer has replaced them all."""
    return part.get("pattern") == {"String": " "} and part["type"] == "Split"


def score_tokens(vocabulary: Vocabulary) -> list[float]:
    """A score for every token, such that an earlier merge has a better score.

    This is exact if any two tokens that together make a third are a merge, which holds for tokenizers that were made
    from SentencePiece models. Other tokenizers are refused.
    """
    merges = read_merges(vocabulary.model)
    order = rank_tokens(merges)
    pieces = vocabulary.model["vocab"].keys() - {token["content"] for token in vocabulary.added.values()}
    known = set(merges)
    for piece in pieces - set(BYTES):
        for cut in range(1, len(piece)):
            pair = piece[:cut], piece[cut:]
            if pair[0] in pieces and pair[1] in pieces and pair not in known:
                raise unsupported(f"llama.cpp would join {pair[0]!r} and {pair[1]!r}, which the tokenizer does not")
    return [-float(order.get(token, len(order))) for token in vocabulary.tokens]


def rank_tokens(merges: Sequence[tuple[str, str]]) -> dict[str, int]:
    """The rank of each token in the order of the merges, one rank for all merges that make it.

    Where the merges of several tokens are interleaved, those tokens share a rank, and llama.cpp joins the leftmost pair
    first. For runs of spaces this equals preferring the longest left part, which is how such merges are ordered.
    """
    last = {left + right: i for i, (left, right) in enumerate(merges)}
    ranks: dict[str, int] = {}
    rank, end = -1, -1
    for i, (left, right) in enumerate(merges):
        token = left + right
        if i > end:
            rank += 1
        elif ranks.get(token) != rank or set(token) == {SPACE}:
            previous = merges[i - 1]
            if set(token + "".join(previous)) != {SPACE} or len(left) > len(previous[0]):
                raise unsupported(
                    f"llama.cpp has one rank for each token, and {token!r} is made by merges of many ranks"
                )
        ranks.setdefault(token, rank)
        end = max(end, last[token])
    return ranks


def add_special_tokens(
    writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerBase, vocabulary: Vocabulary, generation_config: Any
) -> None:
    """Write the tokens for beginning, end, padding and unknown, and whether the tokenizer puts them around a text."""
    bare = tokenizer.encode("a", add_special_tokens=False)
    full = tokenizer.encode("a", add_special_tokens=True)
    start = next((i for i in range(len(full) - len(bare) + 1) if full[i : i + len(bare)] == bare), None)
    before, after = (full, []) if start is None else (full[:start], full[start + len(bare) :])
    if start is None or not bare or len(before) > 1 or len(after) > 1:
        raise unsupported(
            f"llama.cpp puts at most one token before and after a text; this tokenizer makes {full} of {bare}"
        )
    rows = range(len(vocabulary.tokens))  # an untrained padding token may lie beyond them
    if any(id not in rows for id in (*before, *after)):
        raise unsupported(
            f"the tokenizer puts {full} around a text, and the model only has {len(rows)} rows of embeddings"
        )
    ends = [id for id in list_end_tokens(tokenizer, generation_config) if id in rows]
    named = [getattr(tokenizer, f"{name}_token_id") for name in ("bos", "pad", "unk")]
    begin, pad, unknown = (id if id in rows else None for id in named)
    first = before[0] if before else begin
    end = after[0] if after else next(iter(ends), None)
    if end is None:
        end = next((id for id in (pad, first, unknown) if id is not None), None)
        if end is None:
            raise unsupported(
                "the tokenizer has no token for the end of a text, for which llama.cpp would take another"
            )
        vocabulary.notes.append(
            f"llama.cpp ends a text at {vocabulary.tokens[end]!r}, for it must end it at some token"
        )
    writer.add_add_bos_token(bool(before))
    writer.add_add_eos_token(bool(after))
    other_ends = [id for id in ends if id != end]
    if len(other_ends) > 2:
        vocabulary.notes.append(f"llama.cpp may not end a text at {[vocabulary.tokens[id] for id in other_ends[2:]]}")
    ids = {
        "bos": end if first is None else first,  # without one, llama.cpp would take an arbitrary token
        "eos": end,
        "eot": other_ends[0] if other_ends else None,
        "eom": other_ends[1] if len(other_ends) > 1 else None,
        "pad": pad,
        "unk": unknown,
    }
    for name, id in ids.items():
        if id is not None:
            getattr(writer, f"add_{name}_token_id")(id)


def list_end_tokens(tokenizer: PreTrainedTokenizerBase, generation_config: Any) -> list[int]:
    """The ids of the tokens that end a text, the tokenizer's own first, then those of the generation config."""
    configured = getattr(generation_config, "eos_token_id", None)
    configured = configured if isinstance(configured, list) else [configured]
    return [id for id in dict.fromkeys([tokenizer.eos_token_id, *configured]) if id is not None]


def quote_parts(parts: Sequence[dict[str, Any]]) -> str:
    """Parts of tokenizer.json for an error message."""
    return shorten(json.dumps(parts, ensure_ascii=False)) if parts else "none"


def read_merges(model: dict[str, Any]) -> list[tuple[str, str]]:
    """The merges as pairs; older files write a pair as two words with a space between them."""
    pairs = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"])
    return [(left, right) for left, right in pairs]


def byte_letters() -> list[str]:
    """The 256 letters that stand for the bytes in byte-level BPE."""
    from tokenizers.pre_tokenizers import ByteLevel

    return ByteLevel.alphabet()


def find_pre_tokenizer(parts: Sequence[dict[str, Any]]) -> PreTokenizer | None:
    """The pre-tokenizer of llama.cpp with the steps of these parts, or None."""
    steps = tuple(step for part in parts for step in name_steps(part))
    return next((known for known in PRE_TOKENIZERS if known.steps == steps), None)


def name_steps(part: dict[str, Any]) -> tuple[str, ...]:
    """The steps of one part of a pre-tokenizer, named so that parts that split alike have the same names."""
    kind = part["type"]
    if kind == "ByteLevel" and not part.get("add_prefix_space"):
        return ("words", "bytes") if part.get("use_regex", True) else ("bytes",)
    if kind == "Digits" and part.get("individual_digits"):
        return ("digits",)
    if kind == "Split" and "Regex" in part["pattern"]:
        pattern = part["pattern"]["Regex"].replace("\r", r"\r").replace("\n", r"\n")
        # Whether text between matches is kept or dropped makes no difference for a pattern that matches everything.
        matches_everything = pattern.endswith((PUNCTUATION, PUNCTUATION_WITH_SLASHES))
        mode = (part["behavior"], part["invert"])
        if mode == ("Isolated", False) or (mode == ("Removed", True) and matches_everything):
            return (f"split {pattern}",)
    return (f"unknown {kind}",)


def flatten(part: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """The parts of a possibly nested sequence, in order; `name` is the key under which a sequence has its parts."""
    if part is None:
        return []
    if part["type"] == "Sequence":
        return [leaf for inner in part[name] for leaf in flatten(inner, name)]
    return [part]
