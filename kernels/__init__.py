"""Fused operations for transformers: Triton kernels with readable references, chosen by measurement.

Wants torch; without triton or a GPU every operation still works, by its reference or torch's own kernels.
`explain()` tells which implementation ran each kind of call, and why.
"""

from kernels.attention import attention, attention_varlen
from kernels.cross_entropy import linear_cross_entropy
from kernels.decode import paged_attention, write_kv
from kernels.dispatch import BackendUnavailable, explain
from kernels.fp8 import fp8_matmul, quantize_1x128, quantize_128x128
from kernels.gated import swiglu
from kernels.int4 import int4_matmul, pack_awq
from kernels.mla import mla_decode
from kernels.norm import layer_norm, rms_norm
from kernels.optim import FusedAdamW, unscale_
from kernels.rotary import apply_rope

__all__ = [
    "BackendUnavailable",
    "FusedAdamW",
    "apply_rope",
    "attention",
    "attention_varlen",
    "explain",
    "fp8_matmul",
    "int4_matmul",
    "layer_norm",
    "linear_cross_entropy",
    "mla_decode",
    "pack_awq",
    "paged_attention",
    "quantize_1x128",
    "quantize_128x128",
    "rms_norm",
    "swiglu",
    "unscale_",
    "write_kv",
]
