"""The ways to cut a text into words that llama.cpp has, as the structure of a tokenizer.json tells them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class Cut:
    """A way to cut words that llama.cpp has: its names, by whether a word that is a token is taken whole."""

    steps: tuple[str, ...]
    names: Mapping[bool, str]
    note: str | None = None


def split(*patterns: str) -> tuple[str, ...]:
    return (*(f"split {pattern}" for pattern in patterns), "bytes")


CUTS = [
    Cut(("words", "bytes"), {False: "gpt-2"}),
    Cut(("digits", "words", "bytes"), {False: "smollm"}),
    Cut(split(rf"{SHORT}|{WORD}|\p{{N}}{{1,3}}|{MARKS}"), {True: "llama-bpe", False: "dbrx"}),
    Cut(split(rf"{SHORT}|{WORD}|\p{{N}}|{MARKS}"), {False: "qwen2"}),
    Cut(split(rf"{CASED[0]}|{CASED[1]}|\p{{N}}|{PATHS}"), {True: "tekken"}, ASCII_CASE),
    Cut(split(rf"{CASED[0]}{SHORT}?|{CASED[1]}{SHORT}?|\p{{N}}{{1,3}}|{PATHS}"), {False: "gpt-4o"}, ASCII_CASE),
    Cut(split(rf"{SHORT}|{MARKED}|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*{END}"), {False: "qwen35"}),
    Cut(split(rf"{SHORT}|{WORD}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+{END}"), {False: "seed-coder"}),
    Cut(split(POSSESSIVE), {False: "bailingmoe"}),
    Cut(split(r"\p{N}{1,3}", CJK, NAMED + END), {False: "deepseek-v3"}),
]


def find_cut(parts: Sequence[dict[str, Any]]) -> Cut | None:
    """The way that these parts of a pre-tokenizer are, or None where llama.cpp has no such way."""
    steps = tuple(step for part in parts for step in name_steps(part))
    return next((cut for cut in CUTS if cut.steps == steps), None)


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
