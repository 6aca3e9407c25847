"""Tokenizers, chat templates and other text assets of weights."""
