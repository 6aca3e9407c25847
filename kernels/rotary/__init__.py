"""Rotary position embedding: `apply_rope`, with cache write."""

from kernels.rotary.api import apply_rope

__all__ = ["apply_rope"]
