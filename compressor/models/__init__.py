"""Load a model safely, find its feed-forward blocks, and run its layers one at a time."""

from compressor.runtime.lazy import offer

__all__ = offer(__name__, {"load_model": "load", "find_blocks": "blocks", "source_of": "source"})
