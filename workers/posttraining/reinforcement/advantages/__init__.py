"""Advantages of answers from their groups, or of tokens from values."""
