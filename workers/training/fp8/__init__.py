"""fp8 training as DeepSeek-V3 does it (arXiv 2412.19437, section 3.3): tiles, their products, the
linear layers.
"""

from __future__ import annotations

from workers.training.fp8.linear import apply_fp8

__all__ = ["apply_fp8"]
