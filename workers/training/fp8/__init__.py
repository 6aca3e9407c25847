"""fp8 training: the block recipe of DeepSeek-V3 (arXiv 2412.19437, section 3.3: tiles, products,
linear layers), and torchao's layers with one scale per tensor or row.
"""

from __future__ import annotations

from workers.training.fp8.linear import apply_fp8
from workers.training.fp8.torchao_layers import apply_torchao, why_not

__all__ = ["apply_fp8", "apply_torchao", "why_not"]
