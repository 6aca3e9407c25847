"""Gated activations: `swiglu`, with FP8 output."""

from kernels.gated.api import swiglu

__all__ = ["swiglu"]
