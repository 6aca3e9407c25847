"""Sampling: parameters of a request, logits to tokens, beam search."""
