"""Mixture of experts (arXiv 2101.03961): gating, permutation of tokens, and matrix products by
expert.
"""

from kernels.moe.grouped import grouped_matmul
from kernels.moe.permute import Permutation, moe_permute, moe_unpermute
from kernels.moe.router import moe_gate

__all__ = ["Permutation", "grouped_matmul", "moe_gate", "moe_permute", "moe_unpermute"]
