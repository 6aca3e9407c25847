"""Four-bit weights with a scale and a zero per group, and their products (AWQ, arXiv
2306.00978).
"""

from kernels.int4.matmul import int4_matmul
from kernels.int4.pack import from_awq, from_gptq, pack_awq, unpack

__all__ = ["from_awq", "from_gptq", "int4_matmul", "pack_awq", "unpack"]
