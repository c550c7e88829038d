"""The same compressed model for other runtimes and for the Hub."""

from compressor.runtime.lazy import offer

__all__ = offer(__name__, {"export": "exporter", "push": "hub"}, verb="export")
