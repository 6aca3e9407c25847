"""Eight-bit weights with a scale per output, and their products (LLM.int8(), arXiv 2208.07339,
section 2).
"""

from kernels.int8.matmul import int8_matmul, quantize_int8

__all__ = ["int8_matmul", "quantize_int8"]
