"""Mixture of experts (arXiv 2101.03961): which experts a token goes to, its way there and back,
products by expert.
"""

from kernels.moe.gate import moe_gate
from kernels.moe.grouped import grouped_matmul
from kernels.moe.permute import Permutation, moe_permute, moe_unpermute

__all__ = ["Permutation", "grouped_matmul", "moe_gate", "moe_permute", "moe_unpermute"]
