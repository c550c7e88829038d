"""One module per command: each shows its whole flow on one screen."""

from compressor.runtime.lazy import offer

__all__ = offer(__name__, {"Recipe": "recipe", "save": "steps"})
