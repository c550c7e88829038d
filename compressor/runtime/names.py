"""Names and sizes that several rooms share: built-in models, files of an output, texts of the Hub, tokens of each split
of a text."""

from __future__ import annotations

import re
from pathlib import Path

DTYPES = ("auto", "float32", "bfloat16", "float16")  # to compute in
PACKAGE = Path(__file__).parents[1]
DEMO_TEXT = PACKAGE / "demo" / "text"  # what both built-in models were trained for, held out
DEMO_TASKS = PACKAGE / "demo" / "tasks"
# The built-in models and their directories. They have the same tokenizer, text and task.
BUILT_IN_MODELS = {"demo": PACKAGE / "demo", "demo-llama": PACKAGE / "demo_llama"}
NAMED_BUILT_IN = " or ".join(f"`{name}`" for name in BUILT_IN_MODELS)

NAMED = re.compile(r"(?P<name>[A-Za-z0-9_.:-]+)=(?P<rest>.*)", re.DOTALL)

HUB_TEXTS = {"wikitext2": ("Salesforce/wikitext", "wikitext-2-raw-v1")}
MIX, SELF = "mix", "self"
BUILT_IN_TEXTS = ("demo", MIX, SELF)  # texts that need neither a file nor the Hub
SPLITS = ("calibration", "selection", "verification")
HUB_SPLITS = ("train", "validation", "test")
NO_LIMIT = "no limit"  # on perplexity, where only a size was asked for
UNNAMED = "text"  # all texts that the user gave no name
CALIBRATION_TOKENS, SELECTION_TOKENS, VERIFICATION_TOKENS = 24_576, 8_192, 16_384
GUARD = 0.25  # guard windows for each fitted one

LOAD, WRITE = "load", "write"  # steps of a command that have no bar

RECORD = "compression.json"
PROFILE = "profile.json"
EXPORT = "export.json"
FRONTIER = "frontier.json"


def split_name(word: str) -> tuple[str | None, str]:
    """`name=value` → (name, value); a word without a name → (None, word)."""
    match = NAMED.fullmatch(word)
    return (match["name"], match["rest"]) if match else (None, word)
