"""Fused operations for transformers: Triton kernels with readable references, chosen by
measurement.

Requires torch. Without triton or a GPU every operation still works, through its reference or
torch's kernels. `explain()` reports which implementation ran each kind of call, and why. Triton is
imported by the first operation that launches a kernel, not by this package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kernels.attention import attention, attention_varlen
from kernels.dispatch import BackendUnavailable, explain

if TYPE_CHECKING:
    from kernels.cross_entropy import linear_cross_entropy
    from kernels.fp8 import fp8_matmul, quantize_1x128, quantize_128x1, quantize_128x128
    from kernels.gated_mlp import swiglu
    from kernels.int4 import int4_matmul, pack_awq
    from kernels.mla import mla_decode
    from kernels.norm import layer_norm, rms_norm
    from kernels.optim import FusedAdamW, unscale_
    from kernels.paged_kv import paged_attention, write_kv
    from kernels.rotary import apply_rope

_WHERE = {
    "FusedAdamW": "optim",
    "apply_rope": "rotary",
    "fp8_matmul": "fp8",
    "int4_matmul": "int4",
    "layer_norm": "norm",
    "linear_cross_entropy": "cross_entropy",
    "mla_decode": "mla",
    "pack_awq": "int4",
    "paged_attention": "paged_kv",
    "quantize_1x128": "fp8",
    "quantize_128x1": "fp8",
    "quantize_128x128": "fp8",
    "rms_norm": "norm",
    "swiglu": "gated_mlp",
    "unscale_": "optim",
    "write_kv": "paged_kv",
}

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
    "quantize_128x1",
    "quantize_128x128",
    "rms_norm",
    "swiglu",
    "unscale_",
    "write_kv",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'kernels' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"kernels.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
