"""The process, the disk, and how things fail."""

from compressor.runtime.lazy import offer

__all__ = offer(__name__, {"InputError": "errors", "BudgetError": "errors", "Progress": "progress", "Cache": "cache"})
