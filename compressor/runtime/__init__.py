"""What every room needs of the system: errors, files and locks, memory and disk, the cache, processes, progress."""

from compressor.runtime.lazy import offer

__all__ = offer(__name__, {"InputError": "errors", "BudgetError": "errors", "Progress": "progress", "Cache": "cache"})
