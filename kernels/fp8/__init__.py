"""e4m3 tensors with an fp32 scale per tile, and their products (DeepSeek-V3, arXiv 2412.19437,
section 3.3).
"""

from kernels.fp8.matmul import fp8_matmul
from kernels.fp8.quantize import quantize_1x128, quantize_128x1, quantize_128x128

__all__ = ["fp8_matmul", "quantize_1x128", "quantize_128x1", "quantize_128x128"]
