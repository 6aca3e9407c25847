"""Gated activations: `swiglu`, with FP8 output."""

from kernels.gated_mlp.api import swiglu

__all__ = ["swiglu"]
