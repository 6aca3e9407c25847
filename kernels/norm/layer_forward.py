"""LayerNorm forward in Triton: full rows in registers, or rows of any width in three passes over
chunks.

Does not depend on autograd; tensors are 2-D.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from kernels import runtime, tuning
from kernels.jit import cdiv, jit, next_power_of_2, tl
from kernels.operators import call_as_operator
from kernels.shipped import ShippedKernel


@jit
def layer_norm_rows_kernel(
    X,
    W,
    B,
    Y,
    MEAN,
    RSTD,
    rows,
    N,
    x_stride,
    eps,
    HAS_B: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """BLOCK_M full rows per program; the variance is computed after the mean is subtracted, without
    cancellation.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.arange(0, BLOCK_N)
    inside = (row < rows)[:, None] & (col < N)[None, :]
    x = tl.load(X + row[:, None] * x_stride + col[None, :], mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x, 1) / N
    x = tl.where(inside, x - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 1) / N + eps)
    if KEEP:
        tl.store(MEAN + row, mean, mask=row < rows)
        tl.store(RSTD + row, rstd, mask=row < rows)
    y = x * rstd[:, None] * tl.load(W + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
    if HAS_B:
        y += tl.load(B + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
    tl.store(Y + row[:, None] * N + col[None, :], y.to(Y.dtype.element_ty), mask=inside)


@jit
def layer_norm_wide_kernel(
    X,
    W,
    B,
    Y,
    MEAN,
    RSTD,
    N,
    x_stride,
    eps,
    HAS_B: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One row per program in three passes over chunks of BLOCK_N; the second and third read from
    L2.
    """
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, N, BLOCK_N):
        col = start + lane
        total += tl.load(
            X + row * x_stride + col, mask=col < N, other=0.0, eviction_policy="evict_last"
        ).to(tl.float32)
    mean = tl.sum(total, 0) / N
    squares = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, N, BLOCK_N):
        col = start + lane
        x = tl.load(
            X + row * x_stride + col, mask=col < N, other=0.0, eviction_policy="evict_last"
        ).to(tl.float32)
        x = tl.where(col < N, x - mean, 0.0)
        squares += x * x
    rstd = 1.0 / tl.sqrt(tl.sum(squares, 0) / N + eps)
    if KEEP:
        tl.store(MEAN + row, mean)
        tl.store(RSTD + row, rstd)
    for start in range(0, N, BLOCK_N):
        col = start + lane
        x = tl.load(
            X + row * x_stride + col, mask=col < N, other=0.0, eviction_policy="evict_first"
        ).to(tl.float32)
        y = (x - mean) * rstd * tl.load(W + col, mask=col < N, other=0.0).to(tl.float32)
        if HAS_B:
            y += tl.load(B + col, mask=col < N, other=0.0).to(tl.float32)
        tl.store(Y + row * N + col, y.to(Y.dtype.element_ty), mask=col < N)


@tuning.rule("layer_norm.forward")
def _config(arch: str, facts: dict[str, Any]) -> tuning.Config:
    """As for rms_norm: full rows up to 16384 wide."""
    block_n = max(16, next_power_of_2(facts["n"]))
    if arch == "interpret":
        return {"wide": block_n > 256, "block_m": 2, "block_n": min(block_n, 256), "num_warps": 4}
    if block_n > 16384:
        return {"wide": True, "block_m": 1, "block_n": 8192, "num_warps": 16}
    num_warps = min(16, max(4, block_n // 512))
    return {
        "wide": False,
        "block_m": max(1, 2048 // block_n),
        "block_n": block_n,
        "num_warps": num_warps,
    }


@tuning.candidates("layer_norm.forward")
def _other_configs(arch: str, facts: dict[str, Any]) -> list[tuning.Config]:
    return [{"num_warps": warps} for warps in (4, 8, 16)]


def forward(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, eps: float, keep: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(y, mean [rows], rstd [rows]) for x [rows, N] with contiguous rows; rows > 0."""
    y, *summed = call_as_operator("layer_norm", (x, w, b), partial(_launch, x, w, b, eps, keep))
    mean, rstd = summed[0].unbind() if keep else (None, None)
    return y, mean, rstd


def _launch(
    x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, eps: float, keep: bool
) -> list[torch.Tensor]:
    """y, and with `keep` the rows' means and rstds `[2, rows]`."""
    rows, n = x.shape
    y = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    summed = [torch.empty((2, rows), dtype=torch.float32, device=x.device)] if keep else []
    mean, rstd = summed[0].unbind() if keep else (None, None)
    c = tuning.config("layer_norm.forward", n=n, dtype=x.dtype)
    flags = {
        "HAS_B": b is not None,
        "KEEP": keep,
        "BLOCK_N": c["block_n"],
        "num_warps": c["num_warps"],
    }
    with runtime.device_guard(x):
        if c["wide"]:
            layer_norm_wide_kernel[(rows,)](x, w, b, y, mean, rstd, n, x.stride(0), eps, **flags)
        else:
            grid = (cdiv(rows, c["block_m"]),)
            layer_norm_rows_kernel[grid](
                x, w, b, y, mean, rstd, rows, n, x.stride(0), eps, **flags, BLOCK_M=c["block_m"]
            )
    return [y, *summed]


def shipped(arch: str) -> list[ShippedKernel]:
    """Rows of GPT-2, of 8192, and wide rows."""
    signature = dict.fromkeys(("X", "W", "B", "Y"), "*bf16") | {"MEAN": "*fp32", "RSTD": "*fp32"}
    signature |= {"N": "i32:16", "x_stride": "i32:16", "rows": "i32", "eps": "fp32"}
    kernels = []
    for n in (1600, 8192, 65536):
        c = _config(arch, {"n": n})
        flags = {"HAS_B": True, "KEEP": True, "BLOCK_N": c["block_n"]} | (
            {} if c["wide"] else {"BLOCK_M": c["block_m"]}
        )
        kernel = layer_norm_wide_kernel if c["wide"] else layer_norm_rows_kernel
        wide = (".v4.b32",)
        kernels.append(
            ShippedKernel(
                "layer_norm", f"forward {n}", kernel, signature, flags, c["num_warps"], expects=wide
            )
        )
    return kernels
