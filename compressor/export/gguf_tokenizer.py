"""The tokenizer of a checkpoint, written into a GGUF file so that llama.cpp makes the same tokens of a text.

llama.cpp knows ways to cut a text into words by name only, so a tokenizer is recognised by its structure or refused.
Where llama.cpp is known to differ in some texts, that is said in a note.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from compressor.runtime.errors import InputError, shorten

# The parts that the regular expressions of many tokenizer.json files share.
SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
END = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*" + END
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED = [r"[^\r\n\p{L}\p{N}]?" + word for word in (f"{UPPER}*{LOWER}+", f"{UPPER}+{LOWER}*")]
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
MARKED = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
POSSESSIVE = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*" + END
CJK = "[一-龥぀-ゟ゠-ヿ]+"
NAMED = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
)
ASCII_CASE = "llama.cpp knows upper and lower case, where words are cut, of ASCII letters only, and no combining marks"

if TYPE_CHECKING:
    import gguf

ALTERNATIVE = "use --to hf-dense, which keeps the tokenizer as it is"
SPACE = "▁"
NEVER = {chr(byte) for byte in (0xC0, 0xC1, *range(0xF5, 0x100))}  # letters of the bytes that UTF-8 does not have
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


@dataclass(frozen=True)
class PreTokenizer:
    """A way to cut text into words that llama.cpp has: its names, by whether a word that is a token is taken whole."""

    steps: tuple[str, ...]
    names: Mapping[bool, str]
    note: str | None = None


def list_split_steps(*patterns: str) -> tuple[str, ...]:
    return (*(f"split {pattern}" for pattern in patterns), "bytes")


PRE_TOKENIZERS = [
    PreTokenizer(("words", "bytes"), {False: "gpt-2"}),
    PreTokenizer(("digits", "words", "bytes"), {False: "smollm"}),
    PreTokenizer(list_split_steps(rf"{SHORT}|{WORD}|\p{{N}}{{1,3}}|{MARKS}"), {True: "llama-bpe", False: "dbrx"}),
    PreTokenizer(list_split_steps(rf"{SHORT}|{WORD}|\p{{N}}|{MARKS}"), {False: "qwen2"}),
    PreTokenizer(list_split_steps(rf"{CASED[0]}|{CASED[1]}|\p{{N}}|{PATHS}"), {True: "tekken"}, ASCII_CASE),
    PreTokenizer(
        list_split_steps(rf"{CASED[0]}{SHORT}?|{CASED[1]}{SHORT}?|\p{{N}}{{1,3}}|{PATHS}"),
        {False: "gpt-4o"},
        ASCII_CASE,
    ),
    PreTokenizer(
        list_split_steps(rf"{SHORT}|{MARKED}|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*{END}"), {False: "qwen35"}
    ),
    PreTokenizer(
        list_split_steps(rf"{SHORT}|{WORD}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+{END}"), {False: "seed-coder"}
    ),
    PreTokenizer(list_split_steps(POSSESSIVE), {False: "bailingmoe"}),
    PreTokenizer(list_split_steps(r"\p{N}{1,3}", CJK, NAMED + END), {False: "deepseek-v3"}),
]


@dataclass(frozen=True)
class Vocabulary:
    """What tokenizer.json says, as far as both kinds of tokenizer need it."""

    data: dict[str, Any]
    model: dict[str, Any]
    added: dict[int, dict[str, Any]]
    tokens: list[str]  # one for each row; those that no token has are filled up
    unused: set[int]
    notes: list[str]


def add_vocabulary(
    writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerBase, rows: int, generation_config: Any = None
) -> list[str]:
    """Write the tokenizer of a model with that many rows of embeddings. What llama.cpp does otherwise is returned."""
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
    """The error for a tokenizer that llama.cpp does not have, with the way out."""
    return InputError(f"{reason}; {ALTERNATIVE}")


def read_vocabulary(data: dict[str, Any], rows: int) -> Vocabulary:
    """Every row's token; a model may have more rows than its tokenizer has tokens.

    Added tokens beyond the last row, such as a padding that nobody trained, are left out: no model could take them.
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
    """Byte-level BPE: the merges, and the name of the way to cut words."""
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
    if rare := set(missing) - NEVER:
        vocabulary.notes.append(f"llama.cpp makes other tokens next to one of the {len(rare)} bytes that have no token")
    merges = [" ".join(pair) for pair in read_merges(model)]
    if not merges:
        raise unsupported("llama.cpp reads no BPE tokenizer without merges")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name_pre_tokenizer(vocabulary))
    writer.add_token_merges(merges)


def name_pre_tokenizer(vocabulary: Vocabulary) -> str:
    """llama.cpp's name of the way to cut words; with it comes whether a word that is a token is taken whole."""
    parts = flatten(vocabulary.data.get("pre_tokenizer"), "pretokenizers")
    if [(part["type"], part.get("add_prefix_space")) for part in parts] == [("ByteLevel", True)]:
        parts = [{**parts[0], "add_prefix_space": False}]
        vocabulary.notes.append("llama.cpp puts no space before a text as this tokenizer does: begin it with one")
    pre_tokenizer = find_pre_tokenizer(parts)
    if pre_tokenizer is None:
        raise unsupported(f"llama.cpp is not known to cut words as this tokenizer does ({quote_parts(parts)})")
    whole = bool(vocabulary.model.get("ignore_merges"))
    if whole not in pre_tokenizer.names and not merges_suffice(vocabulary.data):
        raise unsupported(
            f"llama.cpp has {' and '.join(pre_tokenizer.names.values())} only with ignore_merges {not whole}"
        )
    if pre_tokenizer.note:
        vocabulary.notes.append(pre_tokenizer.note)
    return pre_tokenizer.names.get(whole) or pre_tokenizer.names[not whole]


def merges_suffice(data: dict[str, Any]) -> bool:
    """Whether merges alone make a token of every word that is one: then taking it whole makes no difference."""
    model = Tokenizer.from_str(json.dumps(data | {"model": data["model"] | {"ignore_merges": False}})).model
    added = {token["content"] for token in data["added_tokens"]}
    return all(text in added or len(model.tokenize(text)) == 1 for text in data["model"]["vocab"])


def add_pieces(writer: gguf.GGUFWriter, vocabulary: Vocabulary) -> None:
    """BPE as SentencePiece does it: llama.cpp joins the two neighbours that make the token with the best score."""
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_add_space_prefix(find_space_prefix(vocabulary))
    writer.add_token_scores(score_tokens(vocabulary))


def falls_back_to_bytes(vocabulary: Vocabulary) -> bool:
    if not vocabulary.model.get("byte_fallback"):
        return False
    missing = set(BYTES) - vocabulary.model["vocab"].keys()
    if missing:
        raise unsupported(f"the tokenizer falls back to bytes and has no token for {len(missing)} of 256")
    return True


def find_space_prefix(vocabulary: Vocabulary) -> bool:
    """Whether a space is put before the text. Only the ways that llama.cpp has are let through."""
    normalizers = flatten(vocabulary.data.get("normalizer"), "normalizers")
    parts = flatten(vocabulary.data.get("pre_tokenizer"), "pretokenizers")
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prepend = {"type": "Prepend", "prepend": SPACE}
    if normalizers in ([prepend, replace], [replace]) and all(cuts_spaces(part) for part in parts):
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


def cuts_spaces(part: dict[str, Any]) -> bool:
    """A cut at spaces cuts nothing where they were all replaced before."""
    return part.get("pattern") == {"String": " "} and part["type"] == "Split"


def score_tokens(vocabulary: Vocabulary) -> list[float]:
    """A score for every token, such that the best score is the earliest merge.

    That is exact if every two tokens that make a third are a merge, as it is in tokenizers that were SentencePiece
    models; another tokenizer is refused.
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
    """The place of each token in the order of the merges, one for all the merges that make it.

    Where merges of several tokens are mixed, those tokens share a place, and llama.cpp takes the leftmost. For runs of
    spaces that is the same as to prefer the longest left part, which is how such merges are ordered.
    """
    last = {left + right: i for i, (left, right) in enumerate(merges)}
    ranks: dict[str, int] = {}
    place, end = -1, -1
    for i, (left, right) in enumerate(merges):
        token = left + right
        if i > end:
            place += 1
        elif ranks.get(token) != place or set(token) == {SPACE}:
            before = merges[i - 1]
            if set(token + "".join(before)) != {SPACE} or len(left) > len(before[0]):
                raise unsupported(
                    f"llama.cpp has one rank for each token, and {token!r} is made by merges of many ranks"
                )
        ranks.setdefault(token, place)
        end = max(end, last[token])
    return ranks


def add_special_tokens(
    writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerBase, vocabulary: Vocabulary, generation_config: Any
) -> None:
    """Beginning, end, padding and unknown; and what the tokenizer really puts around a text."""
    bare = tokenizer.encode("a", add_special_tokens=False)
    full = tokenizer.encode("a", add_special_tokens=True)
    start = next((i for i in range(len(full) - len(bare) + 1) if full[i : i + len(bare)] == bare), None)
    before, after = (full, []) if start is None else (full[:start], full[start + len(bare) :])
    if start is None or not bare or len(before) > 1 or len(after) > 1:
        raise unsupported(
            f"llama.cpp puts at most one token before and after a text; this tokenizer makes {full} of {bare}"
        )
    rows = range(len(vocabulary.tokens))  # a padding that nobody trained may lie beyond them
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
    more = [id for id in ends if id != end]
    if len(more) > 2:
        vocabulary.notes.append(f"llama.cpp may not end a text at {[vocabulary.tokens[id] for id in more[2:]]}")
    ids = {
        "bos": end
        if first is None
        else first,  # without one, llama.cpp would name a token that has nothing to do with it
        "eos": end,
        "eot": more[0] if more else None,
        "eom": more[1] if len(more) > 1 else None,
        "pad": pad,
        "unk": unknown,
    }
    for name, id in ids.items():
        if id is not None:
            getattr(writer, f"add_{name}_token_id")(id)


def list_end_tokens(tokenizer: PreTrainedTokenizerBase, generation_config: Any) -> list[int]:
    """The tokens that end a text, the tokenizer's own first."""
    configured = getattr(generation_config, "eos_token_id", None)
    configured = configured if isinstance(configured, list) else [configured]
    return [id for id in dict.fromkeys([tokenizer.eos_token_id, *configured]) if id is not None]


def quote_parts(parts: Sequence[dict[str, Any]]) -> str:
    return shorten(json.dumps(parts, ensure_ascii=False)) if parts else "none"


def read_merges(model: dict[str, Any]) -> list[tuple[str, str]]:
    """Newer files hold pairs, older ones words with a space between them."""
    pairs = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"])
    return [(left, right) for left, right in pairs]


def byte_letters() -> list[str]:
    """The letters by which byte-level BPE writes the 256 bytes."""
    from tokenizers.pre_tokenizers import ByteLevel

    return ByteLevel.alphabet()


def find_pre_tokenizer(parts: Sequence[dict[str, Any]]) -> PreTokenizer | None:
    """The pre-tokenizer of llama.cpp that is made of these parts, or None where it has none."""
    steps = tuple(step for part in parts for step in name_steps(part))
    return next((known for known in PRE_TOKENIZERS if known.steps == steps), None)


def name_steps(part: dict[str, Any]) -> tuple[str, ...]:
    """A part of the pre-tokenizer in a word or two, all of it that makes a difference."""
    kind = part["type"]
    if kind == "ByteLevel" and not part.get("add_prefix_space"):
        return ("words", "bytes") if part.get("use_regex", True) else ("bytes",)
    if kind == "Digits" and part.get("individual_digits"):
        return ("digits",)
    if kind == "Split" and "Regex" in part["pattern"]:
        pattern = part["pattern"]["Regex"].replace("\r", r"\r").replace("\n", r"\n")
        # What is between the matches is kept or dropped: no difference for a pattern that matches everything.
        everything = (part["behavior"], part["invert"]) == ("Removed", True) and pattern.endswith((MARKS, PATHS))
        if everything or (part["behavior"], part["invert"]) == ("Isolated", False):
            return (f"split {pattern}",)
    return (f"unknown {kind}",)


def flatten(part: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    return [each for inner in part[name] for each in flatten(inner, name)] if part["type"] == "Sequence" else [part]
