"""fp32 matrix products on AMD CPUs by oneDNN instead of MKL, which does not use their AVX-512.

Zen 5, one core, 1024 x 288 x 32000: 97 ms against 216; 1024 x 768 x 288: 2.1 ms against 4.8. On
Zen 4, whose units are half as wide: 255 ms against 275; 4.3 ms against 4.5. Same
operators, same gradients, fp32 throughout; only the order of sums differs, as between any two
libraries. Does not depend on models.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from workers.models.onednn import onednn_pays

# MKL computes products with fewer multiplications: the call through Python costs more than it saves
MIN_MULTIPLICATIONS = 1 << 22
_installed: list[Any] = []  # keeps the library alive


def prefer_onednn() -> None:
    """Use oneDNN in this process if it is faster; call at any time, once counts.

    Replaces the kernels of two operators, so autograd, DTensors and dispatch modes do not change.
    """
    if _installed or not onednn_pays("_linear_pointwise"):
        return
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        library.impl("mm", _mm, "CPU")  # type: ignore[no-untyped-call]
        library.impl("addmm", _addmm, "CPU")  # type: ignore[no-untyped-call]
    _installed.append(library)


def _mm(left: Tensor, right: Tensor) -> Tensor:
    if _is_faster(left, right):
        return _product(left, right, None)
    return torch.mm(left, right, out=left.new_empty(left.shape[0], right.shape[1]))


def _addmm(
    added: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    columns = right.shape[1]
    if (
        added.shape == (columns,)
        and beta == alpha == 1
        and added.dtype is torch.float32
        and _is_faster(left, right)
    ):
        return _product(left, right, added)
    out = left.new_empty(left.shape[0], columns)
    return torch.addmm(added, left, right, beta=beta, alpha=alpha, out=out)


def _is_faster(left: Tensor, right: Tensor) -> bool:
    if left.dtype is not torch.float32 or right.dtype is not torch.float32:
        return False
    large = (
        left.shape[0] * left.shape[1] * right.shape[1] >= MIN_MULTIPLICATIONS
        and left.shape[1] == right.shape[0]
    )
    return large and _dense(left) and _dense(right)


def _dense(matrix: Tensor) -> bool:
    """Without gaps between rows or columns, as a slice of a wider matrix has.

    oneDNN multiplies those by its reference, 256 x 128 x 344 in 296 ms, MKL in 0.4.
    """
    return matrix.is_contiguous() or matrix.t().is_contiguous()


def _product(left: Tensor, right: Tensor, bias: Tensor | None) -> Tensor:
    """oneDNN needs a row-major left matrix and takes any right one.

    For a weight's gradient `left` is transposed: either it is copied, or the transposed product is
    computed, which copies `right` and transposes the result. The fewer numbers are copied, the
    better: the gradient of a low-rank factor, 16 x 1024 x 576, takes 0.26 ms instead of 2.8, and
    576 x 256 x 1536 5.3 ms instead of 8.3 (Zen 4, one core).
    """
    if left.is_contiguous():
        return _linear(left, right.t(), bias)
    transposed = right.t()
    copied = left.shape[0] * right.shape[1]
    if not transposed.is_contiguous():
        copied += right.numel()
    if bias is None and copied < left.numel():
        return _linear(transposed, left, None).t().contiguous()
    return _linear(left.contiguous(), transposed, bias)


def _linear(left: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(left, weight, bias, "none", [], "")
    return product


# compiled code calls these like any kernel and does not trace them
KERNELS = (_mm, _addmm, _is_faster, _dense, _product, _linear)
