"""The configuration of a Llama whose feed-forward blocks have widths of their own (DeciLM, `nemotron-nas`).

Copied into every checkpoint for vLLM, which reads `block_configs` as objects. It imports nothing but transformers.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from transformers import LlamaConfig


class DeciLMConfig(LlamaConfig):  # type: ignore[misc]
    """LlamaConfig with `block_configs`: for every layer what its attention and its feed-forward block are."""

    model_type = "nemotron-nas"

    def __init__(self, block_configs: list[dict[str, dict[str, Any]]] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.block_configs = [
            SimpleNamespace(**{part: SimpleNamespace(**settings) for part, settings in block.items()})
            for block in block_configs or []
        ]

    def to_dict(self) -> dict[str, Any]:
        blocks = [{part: vars(settings) for part, settings in vars(block).items()} for block in self.block_configs]
        return {**super().to_dict(), "block_configs": blocks}
