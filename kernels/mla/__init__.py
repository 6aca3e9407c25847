"""Decode of multi-head latent attention over a paged cache (DeepSeek-V2, arXiv 2405.04434, section
2.1).
"""

from kernels.mla.decode import mla_decode

__all__ = ["mla_decode"]
