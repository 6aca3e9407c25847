"""Attention, dense and of packed sequences: own Triton kernels, torch's kernels, and the choice
between them.
"""

from kernels.attention.api import attention, attention_varlen
from kernels.attention.spec import mark_bounds_checked

__all__ = ["attention", "attention_varlen", "mark_bounds_checked"]
