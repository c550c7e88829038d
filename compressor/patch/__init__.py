"""Put replacements into a model, write it as a safetensors checkpoint, and verify what was written."""

from compressor.runtime.lazy import offer

__all__ = offer(
    __name__, {"patch": "tree", "patched": "tree", "write_checkpoint": "checkpoint", "verify_written": "verify"}
)
