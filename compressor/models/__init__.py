"""Load a model safely, find its branches, and stream its layers."""

from compressor.runtime.lazy import offer

__all__ = offer(__name__, {"load_model": "load", "find_blocks": "blocks", "source_of": "source"})
