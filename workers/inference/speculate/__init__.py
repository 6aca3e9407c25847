"""Speculative decoding: a draft proposes tokens and the model verifies them in one pass."""
