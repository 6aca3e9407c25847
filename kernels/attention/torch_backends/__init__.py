"""Attention backends built on torch: SDPA, FlashAttention-2 and plain operations."""
