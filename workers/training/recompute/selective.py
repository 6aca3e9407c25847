"""The rule of recompute `selective`: save outputs of matrix products, recompute everything else.

The attention core is recomputed by its own kernel (arXiv 2205.05198, section 5). Does not depend on
models.
"""

from __future__ import annotations

from typing import Any

import torch

from kernels.operators import operator
from workers.training.fp8.matmul import FORWARD
from workers.training.recompute.checkpointing import Call

_aten = torch.ops.aten
# of linear layers; attention cores use bmm or one kernel
PRODUCTS = frozenset(
    getattr(_aten, name).default
    for name in ("mm", "addmm", "_grouped_mm", "_scaled_mm")
    if hasattr(_aten, name)
) | {FORWARD, operator("grouped_matmul")}


def saves_products(call: Call, out: Any) -> bool:
    """Whether an operator's output is saved from the forward to the backward pass."""
    return call[0] in PRODUCTS
