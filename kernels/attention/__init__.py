"""Attention, dense and of packed sequences: own Triton kernels, torch's, and the choice between them."""

from kernels.attention.api import attention, attention_varlen

__all__ = ["attention", "attention_varlen"]
