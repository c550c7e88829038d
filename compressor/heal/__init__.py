"""Heal: distil a compressed model towards its source for a few minutes, on text that was kept for that."""

from __future__ import annotations

__all__: list[str] = []
