"""Measure how linear each block is, and what an error of its replacement would cost."""

from compressor.runtime.lazy import offer

__all__ = offer(__name__, {"measure": "profile", "Profile": "profile", "BlockProfile": "profile"}, verb="measure")
