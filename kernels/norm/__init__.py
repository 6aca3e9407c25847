"""Normalization: `rms_norm` (residual, FP8 output) and `layer_norm`."""

from kernels.norm.layer import layer_norm
from kernels.norm.rms import rms_norm

__all__ = ["layer_norm", "rms_norm"]
