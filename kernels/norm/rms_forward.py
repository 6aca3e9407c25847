"""RMSNorm forward in Triton: full rows in registers, or rows of any width in two or three passes
over chunks.

Adds the residual before and rounds to FP8 after. Does not depend on autograd; tensors are 2-D.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kernels import runtime, tuning
from kernels.jit import cdiv, fp8_scale, jit, next_power_of_2, tl, to_fp8
from kernels.operators import call_as_operator
from kernels.shipped import ShippedKernel

QUANTS = {None: 0, "row": 1, "1x128": 2}


@jit
def rms_norm_rows_kernel(
    X,
    R,
    W,
    Y,
    Q,
    S,
    RSTD,
    SCALE,
    rows,
    N,
    x_stride,
    r_stride,
    scale_stride,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    KEEP_RSTD: tl.constexpr,
    QUANT: tl.constexpr,
    KEEP_Y: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """BLOCK_M full rows per program. Y, Q and S are contiguous; X and R have strides between rows.
    KEEP_Y: store the norm itself, and compute Q from the stored value.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.arange(0, BLOCK_N)
    inside = (row < rows)[:, None] & (col < N)[None, :]
    x = tl.load(X + row[:, None] * x_stride + col[None, :], mask=inside, other=0.0).to(tl.float32)
    at = row[:, None] * N + col[None, :]
    if HAS_RESIDUAL:
        x += tl.load(R + row[:, None] * r_stride + col[None, :], mask=inside, other=0.0).to(
            tl.float32
        )
        s = x.to(S.dtype.element_ty)
        tl.store(S + at, s, mask=inside)
        x = s.to(tl.float32)  # the norm of the stored sum, which backward reads
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 1) / N + eps)
    if KEEP_RSTD:
        tl.store(RSTD + row, rstd, mask=row < rows)
    w = tl.load(W + col, mask=col < N, other=0.0).to(tl.float32)
    y = x * rstd[:, None] * w[None, :]
    if KEEP_Y:
        summed = y.to(Y.dtype.element_ty)
        tl.store(Y + at, summed, mask=inside)
        y = summed.to(tl.float32)
    if QUANT == 1:
        scale = fp8_scale(tl.max(tl.abs(y), 1))
        tl.store(SCALE + row * scale_stride, scale, mask=row < rows)
        tl.store(Q + at, to_fp8(y, scale[:, None]), mask=inside)
    elif QUANT == 2:
        groups = tl.reshape(y, (BLOCK_M, BLOCK_N // 128, 128))
        scale = fp8_scale(tl.max(tl.abs(groups), 2))
        g = tl.arange(0, BLOCK_N // 128)
        known = (row < rows)[:, None] & (g * 128 < N)[None, :]
        tl.store(SCALE + row[:, None] * scale_stride + g[None, :], scale, mask=known)
        q = tl.reshape(to_fp8(groups, scale[:, :, None]), (BLOCK_M, BLOCK_N))
        tl.store(Q + at, q, mask=inside)


@jit
def rms_norm_wide_kernel(
    X,
    R,
    W,
    Y,
    Q,
    S,
    RSTD,
    SCALE,
    N,
    x_stride,
    r_stride,
    scale_stride,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    KEEP_RSTD: tl.constexpr,
    QUANT: tl.constexpr,
    KEEP_Y: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One row per program, in chunks of BLOCK_N: rows too wide for registers come from L2 the
    second time.
    """
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK_N)
    squares = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, N, BLOCK_N):
        col = start + lane
        x = tl.load(
            X + row * x_stride + col, mask=col < N, other=0.0, eviction_policy="evict_last"
        ).to(tl.float32)
        if HAS_RESIDUAL:
            x += tl.load(R + row * r_stride + col, mask=col < N, other=0.0).to(tl.float32)
            s = x.to(S.dtype.element_ty)
            tl.store(S + row * N + col, s, mask=col < N)
            x = s.to(tl.float32)
        squares += x * x
    rstd = 1.0 / tl.sqrt(tl.sum(squares, 0) / N + eps)
    if KEEP_RSTD:
        tl.store(RSTD + row, rstd)
    if HAS_RESIDUAL:
        tl.debug_barrier()  # other threads of this program stored what is read below
        source = S + row * N
    else:
        source = X + row * x_stride
    row_scale = 1.0
    if QUANT == 1:
        largest = tl.zeros((BLOCK_N,), tl.float32)
        for start in range(0, N, BLOCK_N):
            col = start + lane
            x = tl.load(source + col, mask=col < N, other=0.0, eviction_policy="evict_last").to(
                tl.float32
            )
            w = tl.load(W + col, mask=col < N, other=0.0).to(tl.float32)
            y = x * rstd * w
            if KEEP_Y:
                y = y.to(Y.dtype.element_ty).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(y))
        row_scale = fp8_scale(tl.max(largest, 0))
        tl.store(SCALE + row * scale_stride, row_scale)
    for start in range(0, N, BLOCK_N):
        col = start + lane
        x = tl.load(source + col, mask=col < N, other=0.0, eviction_policy="evict_first").to(
            tl.float32
        )
        w = tl.load(W + col, mask=col < N, other=0.0).to(tl.float32)
        y = x * rstd * w
        if KEEP_Y:
            summed = y.to(Y.dtype.element_ty)
            tl.store(Y + row * N + col, summed, mask=col < N)
            y = summed.to(tl.float32)
        if QUANT == 1:
            tl.store(Q + row * N + col, to_fp8(y, row_scale), mask=col < N)
        elif QUANT == 2:
            groups = tl.reshape(y, (BLOCK_N // 128, 128))
            scale = fp8_scale(tl.max(tl.abs(groups), 1))
            g = tl.arange(0, BLOCK_N // 128)
            tl.store(SCALE + row * scale_stride + start // 128 + g, scale, mask=start + g * 128 < N)
            q = tl.reshape(to_fp8(groups, scale[:, None]), (BLOCK_N,))
            tl.store(Q + row * N + col, q, mask=col < N)


@tuning.rule("rms_norm.forward")
def _config(arch: str, facts: dict[str, Any]) -> tuning.Config:
    """Full rows up to 16384 wide; narrow rows share a program of about 2048 elements."""
    block_n = max(next_power_of_2(facts["n"]), 128 if facts["quant"] == "1x128" else 16)
    if arch == "interpret":
        return {"wide": block_n > 256, "block_m": 2, "block_n": min(block_n, 256), "num_warps": 4}
    if block_n > 16384:
        return {"wide": True, "block_m": 1, "block_n": 8192, "num_warps": 16}
    block_m = max(1, 2048 // block_n)
    return {
        "wide": False,
        "block_m": block_m,
        "block_n": block_n,
        "num_warps": min(16, max(4, block_n // 512)),
    }


@tuning.candidates("rms_norm.forward")
def _other_configs(arch: str, facts: dict[str, Any]) -> list[tuning.Config]:
    return [{"num_warps": warps} for warps in (2, 4, 8, 16)]


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """Results of a forward pass: y [rows, N], its codes and scales, the normalized sum, rstd
    [rows].
    """

    y: torch.Tensor | None
    q: torch.Tensor | None
    scale: torch.Tensor | None
    summed: torch.Tensor
    rstd: torch.Tensor | None


def forward(
    x: torch.Tensor,
    w: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    quant: str | None,
    keep_rstd: bool,
    keep_y: bool,
) -> ForwardResult:
    """Runs on x [rows, N] with contiguous rows, rows > 0. `keep_y`: also return y if `quant` is
    set.
    """
    buffers = iter(
        call_as_operator(
            "rms_norm",
            (x, w, residual),
            partial(_launch, x, w, eps, residual, quant, keep_rstd, keep_y),
        )
    )
    y, q, scale = (
        next(buffers) if keep_y else None,
        next(buffers) if quant else None,
        next(buffers) if quant else None,
    )
    return ForwardResult(
        y, q, scale, x if residual is None else next(buffers), next(buffers) if keep_rstd else None
    )


def _launch(
    x: torch.Tensor,
    w: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    quant: str | None,
    keep_rstd: bool,
    keep_y: bool,
) -> list[torch.Tensor]:
    """The newly allocated results of `forward`, in their order."""
    rows, n = x.shape
    y = torch.empty((rows, n), dtype=x.dtype, device=x.device) if keep_y else None
    q = torch.empty((rows, n), dtype=torch.float8_e4m3fn, device=x.device) if quant else None
    groups = {None: 0, "row": 1, "1x128": cdiv(n, 128)}[quant]
    scale = torch.empty((rows, groups), dtype=torch.float32, device=x.device) if quant else None
    s = torch.empty((rows, n), dtype=x.dtype, device=x.device) if residual is not None else x
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device) if keep_rstd else None
    c = tuning.config(
        "rms_norm.forward", n=n, quant=quant, dtype=x.dtype, residual=residual is not None
    )
    r = residual if residual is not None else x
    unused = w
    arguments = (x, r, w, *(unused if x is None else x for x in (y, q, s, rstd, scale)))
    strides = (x.stride(0), r.stride(0), groups, eps)
    flags = {"HAS_RESIDUAL": residual is not None, "KEEP_RSTD": keep_rstd, "QUANT": QUANTS[quant]}
    flags["KEEP_Y"] = keep_y
    with runtime.device_guard(x):
        if c["wide"]:
            rms_norm_wide_kernel[(rows,)](
                *arguments, n, *strides, **flags, BLOCK_N=c["block_n"], num_warps=c["num_warps"]
            )
        else:
            rms_norm_rows_kernel[(cdiv(rows, c["block_m"]),)](
                *arguments,
                rows,
                n,
                *strides,
                **flags,
                BLOCK_M=c["block_m"],
                BLOCK_N=c["block_n"],
                num_warps=c["num_warps"],
            )
    return [x for x in (y, q, scale, None if residual is None else s, rstd) if x is not None]


def shipped(arch: str) -> list[ShippedKernel]:
    """Head-dim rows, hidden rows with residual, both quantized forms, and rows above 16384."""

    def configuration(
        name: str, n: int, quant: str | None, residual: bool, keep: bool, keep_y: bool = False
    ) -> ShippedKernel:
        c = _config(arch, {"n": n, "quant": quant})
        signature = dict.fromkeys(("X", "R", "W", "Y", "S"), "*bf16") | {
            "RSTD": "*fp32",
            "SCALE": "*fp32",
        }
        signature |= {"Q": "*fp8e4nv" if quant else "*bf16"}
        signature |= {"rows": "i32", "N": "i32:16", "x_stride": "i32:16", "r_stride": "i32:16"}
        signature |= {"scale_stride": "i32", "eps": "fp32"}
        flags = {
            "HAS_RESIDUAL": residual,
            "KEEP_RSTD": keep,
            "QUANT": QUANTS[quant],
            "BLOCK_N": c["block_n"],
        }
        flags["KEEP_Y"] = keep_y or quant is None
        if not c["wide"]:
            flags["BLOCK_M"] = c["block_m"]
        kernel = rms_norm_wide_kernel if c["wide"] else rms_norm_rows_kernel
        return ShippedKernel(
            "rms_norm", name, kernel, signature, flags, c["num_warps"], expects=(".v4.b32",)
        )

    plain = [
        configuration("forward 128", 128, None, False, True),
        configuration("forward 4096 residual", 4096, None, True, True),
        configuration("forward wide", 65536, None, True, True),
    ]
    if not runtime.has_fp8(arch):
        return plain
    return [
        *plain,
        configuration("forward 4096 residual 1x128", 4096, "1x128", True, False),
        configuration("forward 4096 and 1x128", 4096, "1x128", False, True, True),
        configuration("forward 16384 row", 16384, "row", False, False),
        configuration("forward wide 1x128", 65536, "1x128", False, False),
    ]
