"""The tokenizer of a checkpoint, as a GGUF file holds it."""
