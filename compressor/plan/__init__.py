"""Decide which branch becomes what: candidates, predictions, the search, and its verification."""

from compressor.runtime.lazy import offer

__all__ = offer(__name__, {"plan": "api", "apply": "api", "Plan": "search", "Shape": "shapes"}, verb="plan")
