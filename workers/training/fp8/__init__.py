"""fp8 training as in DeepSeek-V3 (arXiv 2412.19437, section 3.3): tiles, products, linear
layers.
"""

from __future__ import annotations

from workers.training.fp8.linear import apply_fp8

__all__ = ["apply_fp8"]
