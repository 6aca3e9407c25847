"""GGUF files: weights and tokenizers."""
