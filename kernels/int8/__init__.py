"""Weights of eight bits with a scale an output, and products with them (LLM.int8(), arXiv
2208.07339, section 2).
"""

from kernels.int8.matmul import int8_matmul, quantize_int8

__all__ = ["int8_matmul", "quantize_int8"]
