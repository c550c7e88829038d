"""Rewrite the module tree, write it as safetensors, and read it again."""

from compressor.runtime.lazy import offer

__all__ = offer(
    __name__, {"patch": "tree", "patched": "tree", "write_checkpoint": "checkpoint", "verify_written": "verify"}
)
