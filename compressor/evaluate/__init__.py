"""Hold a model against a budget: perplexity, tasks, generated text, speed."""

from compressor.runtime.lazy import offer

__all__ = offer(__name__, {"evaluate": "remembered", "Budget": "budget", "Evaluator": "evaluator"}, verb="evaluate")
