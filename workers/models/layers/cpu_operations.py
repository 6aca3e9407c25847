"""Norm and rotation on a CPU in fewer passes over memory than torch's separate operators.

Each saves the same tensors for its backward pass as torch's operators do. Shapes: N numbers of a
row, B batch, S sequence, H heads, D rotary dims.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

_CHUNK_BYTES = 1 << 18  # rows of a chunk stay in a core's cache between its passes


_enabled = True


def enable(enabled: bool) -> None:
    """Use these operations in this process, or torch's.

    Off for a model with compiled blocks: torch.compile would compile these operations too, once per
    shape, where a block excludes their caller.
    """
    global _enabled
    _enabled = enabled


def is_plain_cpu(*tensors: Tensor) -> bool:
    """Whether all are plain fp32 tensors of a CPU, outside of torch.compile.

    Not where a dispatch mode sees each operator, as in selective recomputation: it may save outputs
    that later passes change in place.
    """
    if not _enabled or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return False
    return all(
        type(x) in (Tensor, torch.nn.Parameter)
        and x.device.type == "cpu"
        and x.dtype == torch.float32
        for x in tensors
    )


def frozen_rms_norm(x: Tensor, weight_N: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight (arXiv 1910.07467, eq. 4); no gradient of the weight."""
    return cast(Tensor, _FrozenRmsNorm.apply(x, weight_N, eps))  # type: ignore[no-untyped-call]


class _FrozenRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_N: Tensor, eps: float) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out, inverse = torch.empty_like(rows), rows.new_empty(rows.shape[0], 1)
        for source, target, scale in _chunks(rows, out, inverse):
            torch.linalg.vector_norm(source, dim=1, keepdim=True, out=scale)
            scale.square_().div_(rows.shape[1]).add_(eps).rsqrt_()
            torch.mul(source, scale, out=target)
            target.mul_(weight_N)
        ctx.save_for_backward(x, inverse, weight_N)
        return out.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        x, inverse, weight_N = ctx.saved_tensors
        rows = x.reshape(-1, x.shape[-1])
        slopes = gradients[0].reshape(-1, x.shape[-1])
        out = torch.empty_like(rows)
        for source, slope, target, scale in _chunks(rows, slopes, out, inverse):
            torch.mul(slope, weight_N, out=target)
            mean = torch.linalg.vecdot(target, source).unsqueeze(1).div_(rows.shape[1])
            target.addcmul_(source, mean.mul_(scale.square()), value=-1).mul_(scale)
        return out.view_as(x), None, None


def rotate(x_BSHD: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
    """`apply_rope` of halves: each head rotated by its position's angle."""
    return cast(Tensor, _Rotate.apply(x_BSHD, cos_SD, sin_SD))  # type: ignore[no-untyped-call]


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSHD: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
        ctx.save_for_backward(cos_SD, sin_SD)
        return _rotated(x_BSHD, cos_SD, sin_SD, 1.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos_SD, sin_SD = ctx.saved_tensors
        return _rotated(gradients[0], cos_SD, sin_SD, -1.0), None, None


def _rotated(x_BSHD: Tensor, cos_SD: Tensor, sin_SD: Tensor, sign: float) -> Tensor:
    cos, sin = cos_SD[None, :, None, :], sin_SD[None, :, None, :]
    out = torch.empty(x_BSHD.shape, dtype=x_BSHD.dtype)
    first, second = x_BSHD.chunk(2, dim=-1)
    out_first, out_second = out.chunk(2, dim=-1)
    # rounded as in `apply_rope`, so that recomputation by either gives the same bits
    torch.mul(first, cos, out=out_first).sub_(second * sin, alpha=sign)
    torch.mul(second, cos, out=out_second).add_(first * sin, alpha=sign)
    return out


def _chunks(*tensors: Tensor) -> zip[tuple[Tensor, ...]]:
    """The same rows of each, so many that a chunk of the first fits in the cache."""
    rows = max(1, _CHUNK_BYTES // (4 * tensors[0].shape[1]))
    return zip(*(torch.split(x, rows) for x in tensors), strict=True)
