"""Names that several rooms share: the files of an output, the text without a name, the texts of the Hub."""

from __future__ import annotations

HUB_TEXTS = {"wikitext2": ("Salesforce/wikitext", "wikitext-2-raw-v1")}
HUB_SPLITS = ("train", "validation", "test")
UNNAMED = "text"  # all texts that the user gave no name

RECORD = "compression.json"
PROFILE = "profile.json"
EXPORT = "export.json"
