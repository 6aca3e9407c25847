"""Attention, dense and of packed sequences: own Triton kernels, torch's, and the choice between
them.
"""

from kernels.attention.api import attention, attention_varlen
from kernels.attention.spec import bounds_hold

__all__ = ["attention", "attention_varlen", "bounds_hold"]
