"""The command line: parse, call, print, exit."""

from compressor.runtime.lazy import offer

__all__ = offer(__name__, {"main": "app"})
