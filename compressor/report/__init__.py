"""Render a typed record: page, tables, charts, card, files for CI. Nothing is computed here."""

from compressor.runtime.lazy import offer

__all__ = offer(__name__, {"Record": "record", "read_record": "record"})
