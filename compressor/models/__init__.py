"""Load a model safely, find its feed-forward blocks, run its layers one at a time, and let it write."""

from compressor.runtime.lazy import offer

__all__ = offer(__name__, {"load_model": "load", "find_blocks": "blocks", "source_of": "source"})
