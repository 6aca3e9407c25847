"""`quantize_1x128` for activations, `quantize_128x128` for weights: e4m3 and a scale a tile, in one pass.

Knows tiles; does not know what is multiplied.
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
from kernels.shipped import Shipped

ROWS_AT_ONCE = 16
NO_E4M3 = ("sm_75", "sm_80", "sm_86")


def quantize_1x128(x: Tensor, *, backend: str | None = None) -> tuple[Tensor, Tensor]:
    """x `[…, K]` as e4m3 `[…, K]` and fp32 scales `[…, ceil(K / 128)]`, x ~ q · scale of its 128 neighbours.

    Raises ValueError or TypeError.
    """
    checks.dtype_among("x", x)
    if x.dim() < 1:
        raise ValueError("x has no dimensions; it must be [..., K].")
    q, scale = _quantized("quantize_1x128", x.reshape(-1, x.shape[-1]), 1, backend)
    return q.view(x.shape), scale.view(*x.shape[:-1], scale.shape[1])


def quantize_128x128(w: Tensor, *, backend: str | None = None) -> tuple[Tensor, Tensor]:
    """w `[N, K]` as e4m3 and fp32 scales `[ceil(N / 128), ceil(K / 128)]`. Raises ValueError or TypeError."""
    checks.dtype_among("w", w)
    checks.dims("w", w, 2)
    return _quantized("quantize_128x128", w, SIDE, backend)


def why_not_own(x: Tensor) -> str | None:
    """Why no kernel of e4m3 runs on this tensor's device; None: it does."""
    arch = runtime.arch(x.device)
    return runtime.cannot(x) or (f"no e4m3 on {arch}" if arch in NO_E4M3 else None)


def _quantized(op: str, x: Tensor, rows: int, backend: str | None) -> tuple[Tensor, Tensor]:
    if x.shape[1] > 1 and x.stride(1) != 1:
        x = x.contiguous()
    candidates = (Candidate("own", why_not_own(x)), Candidate("reference"))
    facts: dict[str, object] = {"dtype": x.dtype, "device": x.device.type}
    if choose(op, facts, candidates, backend).backend == "reference":
        return reference.quantize(x, rows)
    r, k = x.shape
    q = torch.empty(r, k, dtype=E4M3, device=x.device)
    scale = torch.empty(cdiv(r, rows), cdiv(k, SIDE), dtype=torch.float32, device=x.device)
    if not q.numel():
        return q, scale
    height = ROWS_AT_ONCE if rows == 1 else rows
    with runtime.on(x):
        quantize[(cdiv(r, height) * scale.shape[1],)](
            x, q, scale, r, k, scale.shape[1], x.stride(0), k,
            ROWS=height, WHOLE=rows > 1, num_warps=4 if rows == 1 else 8,
        )  # fmt: skip
    return q, scale


@jit
def quantize(X, Q, SCALE, rows, columns, tiles, x_r, q_r, ROWS: tl.constexpr, WHOLE: tl.constexpr):
    """ROWS x 128 numbers: one scale for all of them where WHOLE, else one a row."""
    pid = tl.program_id(0)
    tile = pid % tiles
    r = (pid // tiles) * ROWS + tl.arange(0, ROWS)
    c = tile * 128 + tl.arange(0, 128)
    inside = (r < rows)[:, None] & (c < columns)[None, :]
    at = r.to(tl.int64)[:, None]
    x = tl.load(X + at * x_r + c[None, :], mask=inside, other=0.0).to(tl.float32)
    amax = tl.max(tl.abs(x), 1)
    amax = tl.where(tl.sum((x != x).to(tl.int32), 1) > 0, float("nan"), amax)  # max alone passes NaN over
    if WHOLE:
        bad = tl.sum((amax != amax).to(tl.int32), 0) > 0
        scale = fp8_scale(tl.max(tl.where(amax == amax, amax, 0.0), 0))
        scale = tl.where(bad, float("nan"), scale)
        tl.store(SCALE + (pid // tiles) * tiles + tile, scale)
        q = to_fp8(x, scale)
    else:
        scale = tl.where(amax == amax, fp8_scale(amax), float("nan"))
        tl.store(SCALE + r * tiles + tile, scale, mask=r < rows)
        q = to_fp8(x, scale[:, None])
    tl.store(Q + at * q_r + c[None, :], q, mask=inside)


def shipped(arch: str) -> list[Shipped]:
    """bf16 rows and blocks; none before e4m3 existed."""
    if arch in NO_E4M3:
        return []
    found = []
    for name, height in (("1x128", ROWS_AT_ONCE), ("128x128", SIDE)):
        signature = {"X": "*bf16", "Q": "*fp8e4nv", "SCALE": "*fp32", "rows": "i32", "columns": "i32:16"}
        signature |= {"tiles": "i32", "x_r": "i32:16", "q_r": "i32:16"}
        constants: dict[str, Any] = {"ROWS": height, "WHOLE": height == SIDE}
        warps = 4 if height != SIDE else 8
        found.append(Shipped(f"quantize_{name}", "bf16", quantize, signature, constants, warps, 3))
    return found
