"""Names that several rooms share: the files of an output, the text without a name, the texts of the Hub."""

from __future__ import annotations

import re
from pathlib import Path

DEMO = Path(__file__).parents[1] / "demo"

NAMED = re.compile(r"(?P<name>[A-Za-z0-9_.:-]+)=(?P<rest>.*)", re.DOTALL)

HUB_TEXTS = {"wikitext2": ("Salesforce/wikitext", "wikitext-2-raw-v1")}
HUB_SPLITS = ("train", "validation", "test")
UNNAMED = "text"  # all texts that the user gave no name

RECORD = "compression.json"
PROFILE = "profile.json"
EXPORT = "export.json"


def split_name(word: str) -> tuple[str | None, str]:
    """`name=value` → (name, value); a word without a name → (None, word)."""
    match = NAMED.fullmatch(word)
    return (match["name"], match["rest"]) if match else (None, word)
