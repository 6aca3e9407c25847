"""Cross-entropy of a linear layer's output without its logits in memory (Cut Cross-Entropy, arXiv
2411.09009).
"""

from kernels.cross_entropy.linear import linear_cross_entropy

__all__ = ["linear_cross_entropy"]
