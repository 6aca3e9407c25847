"""`quantize_1x128` for activations, `quantize_128x128` for weights, `quantize_128x1` for sums over
rows.

Each returns e4m3 and a scale per tile, in one pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels import checks, runtime
from kernels.dispatch import Candidate, choose
from kernels.fp8 import reference
from kernels.fp8.reference import E4M3, SIDE
from kernels.jit import cdiv, fp8_scale, jit, tl, to_fp8
from kernels.operators import call_as_operator
from kernels.shipped import ShippedKernel

ROWS_AT_ONCE = 16
NO_E4M3 = ("sm_75", "sm_80", "sm_86")


def quantize_1x128(x: Tensor, *, backend: str | None = None) -> tuple[Tensor, Tensor]:
    """x `[…, K]` as e4m3 `[…, K]` and fp32 scales `[…, ceil(K / 128)]`, one per 128 adjacent
    numbers: x ~ q · scale.

    Raises ValueError or TypeError.
    """
    checks.dtype_in("x", x)
    if x.dim() < 1:
        raise ValueError("x has no dimensions; it must be [..., K].")
    checks.non_empty("x", x, -1)
    q, scale = _quantize("quantize_1x128", x.reshape(-1, x.shape[-1]), 1, SIDE, backend)
    return q.view(x.shape), scale.view(*x.shape[:-1], scale.shape[1])


def quantize_128x128(w: Tensor, *, backend: str | None = None) -> tuple[Tensor, Tensor]:
    """w `[N, K]` as e4m3 and fp32 scales `[ceil(N / 128), ceil(K / 128)]`. Raises ValueError or
    TypeError.
    """
    checks.dtype_in("w", w)
    checks.dims("w", w, 2)
    checks.non_empty("w", w, 1)
    return _quantize("quantize_128x128", w, SIDE, SIDE, backend)


def quantize_128x1(x: Tensor, *, backend: str | None = None) -> tuple[Tensor, Tensor]:
    """x `[R, K]` as e4m3 and fp32 scales `[ceil(R / 128), K]`, one per 128 numbers of a column.

    For a product that sums over rows, such as a weight's gradient over tokens. Raises ValueError or
    TypeError.
    """
    checks.dtype_in("x", x)
    checks.dims("x", x, 2)
    checks.non_empty("x", x, 1)
    return _quantize("quantize_128x1", x, SIDE, 1, backend)


def own_why_not(x: Tensor) -> str | None:
    """Why no e4m3 kernel runs on this tensor's device; None if one does."""
    arch = runtime.arch(x.device)
    return runtime.why_not(x) or (f"no e4m3 on {arch}" if arch in NO_E4M3 else None)


def _quantize(
    op: str, x: Tensor, rows: int, columns: int, backend: str | None
) -> tuple[Tensor, Tensor]:
    if x.shape[1] > 1 and x.stride(1) != 1:
        x = x.contiguous()
    candidates = (Candidate("own", own_why_not(x)), Candidate("reference"))
    facts: dict[str, object] = {"dtype": x.dtype, "device": x.device.type}
    if choose(op, facts, candidates, backend).backend == "reference":
        return reference.quantize(x, rows, columns)
    q, scale = call_as_operator(op, (x,), lambda: _launch(x, rows, columns))
    return q, scale


def _launch(x: Tensor, rows: int, columns: int) -> list[Tensor]:
    r, k = x.shape
    q = torch.empty(r, k, dtype=E4M3, device=x.device)
    scale = torch.empty(cdiv(r, rows), cdiv(k, columns), dtype=torch.float32, device=x.device)
    if q.numel():
        height, tiles = ROWS_AT_ONCE if rows == 1 else rows, cdiv(k, SIDE)
        with runtime.device_guard(x):
            fp8_quantize_kernel[(cdiv(r, height) * tiles,)](
                x,
                q,
                scale,
                r,
                k,
                tiles,
                x.stride(0),
                k,
                ROWS=height,
                ALONG=_along(rows, columns),
                num_warps=4 if rows == 1 else 8,
            )
    return [q, scale]


def _along(rows: int, columns: int) -> int:
    return 0 if rows == 1 else 2 if columns == 1 else 1


@jit
def fp8_quantize_kernel(
    X, Q, SCALE, rows, columns, tiles, x_r, q_r, ROWS: tl.constexpr, ALONG: tl.constexpr
):
    """ROWS x 128 numbers: a scale per row (ALONG 0), one for all (1), or one per column (2)."""
    pid = tl.program_id(0)
    tile = pid % tiles
    r = (pid // tiles) * ROWS + tl.arange(0, ROWS)
    c = tile * 128 + tl.arange(0, 128)
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    at = r.to(tl.int64)[:, None]
    x = tl.load(X + at * x_r + c[None, :], mask=inside, other=0.0).to(tl.float32)
    if ALONG == 2:
        amax = tl.max(tl.abs(x), 0)
        broken = tl.sum((x != x).to(tl.int32), 0) > 0  # max alone ignores NaN
    else:
        amax = tl.max(tl.abs(x), 1)
        broken = tl.sum((x != x).to(tl.int32), 1) > 0
    amax = tl.where(broken, float("nan"), amax)
    if ALONG == 1:
        bad = tl.sum((amax != amax).to(tl.int32), 0) > 0
        scale = fp8_scale(tl.max(tl.where(amax == amax, amax, 0.0), 0))
        scale = tl.where(bad, float("nan"), scale)
        tl.store(SCALE + (pid // tiles) * tiles + tile, scale)
        q = to_fp8(x, scale)
    elif ALONG == 2:
        scale = tl.where(amax == amax, fp8_scale(amax), float("nan"))
        tl.store(SCALE + (pid // tiles).to(tl.int64) * columns + c, scale, mask=c < columns)
        q = to_fp8(x, scale[None, :])
    else:
        scale = tl.where(amax == amax, fp8_scale(amax), float("nan"))
        tl.store(SCALE + r * tiles + tile, scale, mask=r < rows)
        q = to_fp8(x, scale[:, None])
    tl.store(Q + at * q_r + c[None, :], q, mask=inside)


def shipped(arch: str) -> list[ShippedKernel]:
    """bf16 rows, blocks and columns; empty for architectures without e4m3."""
    if arch in NO_E4M3:
        return []
    kernels = []
    for name, height, along in (
        ("1x128", ROWS_AT_ONCE, 0),
        ("128x128", SIDE, 1),
        ("128x1", SIDE, 2),
    ):
        signature = {
            "X": "*bf16",
            "Q": "*fp8e4nv",
            "SCALE": "*fp32",
            "rows": "i32",
            "columns": "i32:16",
        }
        signature |= {"tiles": "i32", "x_r": "i32:16", "q_r": "i32:16"}
        constants: dict[str, Any] = {"ROWS": height, "ALONG": along}
        warps = 4 if height != SIDE else 8
        kernels.append(
            ShippedKernel(
                f"quantize_{name}", "bf16", fp8_quantize_kernel, signature, constants, warps, 3
            )
        )
    return kernels
