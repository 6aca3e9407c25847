"""LayerNorm backward in Triton: dx and partial dw and db in one launch (two for wide rows), then
their sums.

Does not depend on autograd; tensors are 2-D.
"""

from __future__ import annotations

from typing import Any

import torch

from kernels import runtime, tuning
from kernels.jit import cdiv, jit, next_power_of_2, tl
from kernels.norm.rms_backward import column_sums
from kernels.shipped import ShippedKernel


@jit
def layer_norm_backward_rows_kernel(
    DY,
    X,
    W,
    MEAN,
    RSTD,
    DX,
    DW_PARTS,
    DB_PARTS,
    rows,
    N,
    dy_stride,
    x_stride,
    NEED_DW: tl.constexpr,
    NEED_DB: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Blocks of full rows, strided by the number of programs: dx, and the program's sums of dy ·
    xhat and dy.
    """
    program = tl.program_id(0)
    col = tl.arange(0, BLOCK_N)
    w = tl.load(W + col, mask=col < N, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    db = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for block in tl.range(program, tl.cdiv(rows, BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        row = tl.cast(block, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        inside = (row < rows)[:, None] & (col < N)[None, :]
        x = tl.load(X + row[:, None] * x_stride + col[None, :], mask=inside, other=0.0).to(
            tl.float32
        )
        dy = tl.load(DY + row[:, None] * dy_stride + col[None, :], mask=inside, other=0.0).to(
            tl.float32
        )
        mean = tl.load(MEAN + row, mask=row < rows, other=0.0)
        rstd = tl.load(RSTD + row, mask=row < rows, other=0.0)
        xhat = tl.where(inside, (x - mean[:, None]) * rstd[:, None], 0.0)
        if NEED_DW:
            dw += dy * xhat
        if NEED_DB:
            db += dy
        g = dy * w[None, :]
        along = tl.sum(g * xhat, 1) / N
        level = tl.sum(g, 1) / N
        dx = (g - level[:, None] - xhat * along[:, None]) * rstd[:, None]
        tl.store(DX + row[:, None] * N + col[None, :], dx.to(DX.dtype.element_ty), mask=inside)
    at = program.to(tl.int64) * N + col
    if NEED_DW:
        tl.store(DW_PARTS + at, tl.sum(dw, 0), mask=col < N)
    if NEED_DB:
        tl.store(DB_PARTS + at, tl.sum(db, 0), mask=col < N)


@jit
def layer_norm_backward_means_kernel(
    DY,
    X,
    W,
    MEAN,
    RSTD,
    ALONG,
    LEVEL,
    N,
    dy_stride,
    x_stride,
    BLOCK_N: tl.constexpr,
):
    """mean(w · dy · xhat) and mean(w · dy) of one wide row per program."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK_N)
    mean = tl.load(MEAN + row)
    along = tl.zeros((BLOCK_N,), tl.float32)
    level = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, N, BLOCK_N):
        col = start + lane
        x = tl.load(X + row * x_stride + col, mask=col < N, other=0.0).to(tl.float32)
        dy = tl.load(DY + row * dy_stride + col, mask=col < N, other=0.0).to(tl.float32)
        g = dy * tl.load(W + col, mask=col < N, other=0.0).to(tl.float32)
        along += g * (x - mean)
        level += g
    tl.store(ALONG + row, tl.sum(along, 0) * tl.load(RSTD + row) / N)
    tl.store(LEVEL + row, tl.sum(level, 0) / N)


@jit
def layer_norm_backward_stripes_kernel(
    DY,
    X,
    W,
    MEAN,
    RSTD,
    ALONG,
    LEVEL,
    DX,
    DW_PARTS,
    DB_PARTS,
    rows,
    N,
    dy_stride,
    x_stride,
    rows_per_program,
    NEED_DW: tl.constexpr,
    NEED_DB: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One chunk of columns of a stripe of rows with known means: dx, and the stripe's partial dw
    and db.
    """
    stripe = tl.program_id(1).to(tl.int64)
    col = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    w = tl.load(W + col, mask=col < N, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK_N,), tl.float32)
    db = tl.zeros((BLOCK_N,), tl.float32)
    first = stripe * rows_per_program
    for row in tl.range(first, tl.minimum(first + rows_per_program, rows), num_stages=STAGES):
        x = tl.load(X + row * x_stride + col, mask=col < N, other=0.0).to(tl.float32)
        dy = tl.load(DY + row * dy_stride + col, mask=col < N, other=0.0).to(tl.float32)
        rstd = tl.load(RSTD + row)
        xhat = (x - tl.load(MEAN + row)) * rstd
        if NEED_DW:
            dw += dy * xhat
        if NEED_DB:
            db += dy
        dx = (dy * w - tl.load(LEVEL + row) - xhat * tl.load(ALONG + row)) * rstd
        tl.store(DX + row * N + col, dx.to(DX.dtype.element_ty), mask=col < N)
    if NEED_DW:
        tl.store(DW_PARTS + stripe * N + col, dw, mask=col < N)
    if NEED_DB:
        tl.store(DB_PARTS + stripe * N + col, db, mask=col < N)


@tuning.rule("layer_norm.backward")
def _config(arch: str, facts: dict[str, Any]) -> tuning.Config:
    """Full rows up to 8192 wide with both sums in registers; wider rows in stripes of 4096
    columns.
    """
    block_n = max(16, next_power_of_2(facts["n"]))
    if arch == "interpret":
        small = {"wide": block_n > 256, "block_m": 2, "block_n": min(block_n, 256)}
        return small | {"num_warps": 4, "stages": 1, "per_sm": 1}
    if block_n > 8192:
        return {
            "wide": True,
            "block_m": 1,
            "block_n": 4096,
            "num_warps": 8,
            "stages": 3,
            "per_sm": 4,
        }
    num_warps = min(16, max(4, block_n // 512))
    full_rows = {"wide": False, "block_m": max(1, 2048 // block_n), "block_n": block_n}
    return full_rows | {"num_warps": num_warps, "stages": 2, "per_sm": 2}


@tuning.candidates("layer_norm.backward")
def _other_configs(arch: str, facts: dict[str, Any]) -> list[tuning.Config]:
    return [
        {"num_warps": w, "stages": s, "per_sm": p}
        for w in (8, 16)
        for s, p in ((1, 4), (2, 2), (3, 1), (2, 4))
    ]


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    need_dw: bool,
    b: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(dx, dw, db); db in the dtype of `b`, None without `b`."""
    rows, n = x.shape
    dx = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    c = tuning.config("layer_norm.backward", n=n, dtype=x.dtype)
    most = runtime.sm_count(x.device) * c["per_sm"]
    flags = {
        "NEED_DW": need_dw,
        "NEED_DB": b is not None,
        "BLOCK_N": c["block_n"],
        "STAGES": c["stages"],
    }
    flags["num_warps"] = c["num_warps"]

    def make_partial(needed: bool, parts: int) -> torch.Tensor | None:
        return torch.empty((parts, n), dtype=torch.float32, device=x.device) if needed else None

    with runtime.device_guard(x):
        if c["wide"]:
            columns = cdiv(n, c["block_n"])
            per = cdiv(rows, max(1, min(rows, most // columns)))
            parts = cdiv(rows, per)
            dw, db = make_partial(need_dw, parts), make_partial(b is not None, parts)
            along, level = torch.empty((2, rows), dtype=torch.float32, device=x.device).unbind()
            layer_norm_backward_means_kernel[(rows,)](
                dy,
                x,
                w,
                mean,
                rstd,
                along,
                level,
                n,
                dy.stride(0),
                x.stride(0),
                BLOCK_N=c["block_n"],
                num_warps=c["num_warps"],
            )
            layer_norm_backward_stripes_kernel[(columns, parts)](
                dy,
                x,
                w,
                mean,
                rstd,
                along,
                level,
                dx,
                dw,
                db,
                rows,
                n,
                dy.stride(0),
                x.stride(0),
                per,
                **flags,
            )
        else:
            parts = min(cdiv(rows, c["block_m"]), most)
            dw, db = make_partial(need_dw, parts), make_partial(b is not None, parts)
            layer_norm_backward_rows_kernel[(parts,)](
                dy,
                x,
                w,
                mean,
                rstd,
                dx,
                dw,
                db,
                rows,
                n,
                dy.stride(0),
                x.stride(0),
                **flags,
                BLOCK_M=c["block_m"],
            )
        return (
            dx,
            None if dw is None else column_sums(dw, w),
            None if db is None or b is None else column_sums(db, b),
        )


def shipped(arch: str) -> list[ShippedKernel]:
    """Rows of GPT-2 and of 8192, and the two passes of wide rows."""
    floats = dict.fromkeys(("MEAN", "RSTD", "ALONG", "LEVEL", "DW_PARTS", "DB_PARTS"), "*fp32")
    signature = dict.fromkeys(("X", "W", "DY", "DX"), "*bf16") | floats
    signature |= dict.fromkeys(("N", "x_stride", "dy_stride"), "i32:16") | {
        "rows": "i32",
        "rows_per_program": "i32",
    }
    kernels = []
    for n in (1600, 8192, 65536):
        c = _config(arch, {"n": n})
        flags = {"NEED_DW": True, "NEED_DB": True, "BLOCK_N": c["block_n"], "STAGES": c["stages"]}
        if c["wide"]:
            means = {"BLOCK_N": c["block_n"]}
            name = "backward wide, means"
            kernels.append(
                ShippedKernel(
                    "layer_norm",
                    name,
                    layer_norm_backward_means_kernel,
                    signature,
                    means,
                    c["num_warps"],
                )
            )
            kernel = layer_norm_backward_stripes_kernel
        else:
            flags["BLOCK_M"] = c["block_m"]
            kernel = layer_norm_backward_rows_kernel
        ahead = ("cp.async.cg",)
        kernels.append(
            ShippedKernel(
                "layer_norm",
                f"backward {n}",
                kernel,
                signature,
                flags,
                c["num_warps"],
                expects=ahead,
            )
        )
    return kernels
