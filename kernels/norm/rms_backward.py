"""RMSNorm backward in Triton: persistent programs compute dx and a partial dw each; a second launch
sums those.

No atomics, so results are reproducible. Rows too wide for registers take two passes: row sums, then
column stripes. Does not depend on autograd; tensors are 2-D.
"""

from __future__ import annotations

from typing import Any

import torch

from kernels import runtime, tuning
from kernels.jit import cdiv, jit, next_power_of_2, tl
from kernels.shipped import ShippedKernel


@jit
def rms_norm_backward_rows_kernel(
    DY,
    DS,
    X,
    W,
    RSTD,
    DX,
    PARTIAL,
    rows,
    N,
    dy_stride,
    ds_stride,
    x_stride,
    HAS_DS: tl.constexpr,
    NEED_DW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Blocks of BLOCK_M full rows, strided by the number of programs: dx, and the program's sum of
    dy · xhat.
    """
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    col = tl.arange(0, BLOCK_N)
    w = tl.load(W + col, mask=col < N, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for block in tl.range(program, tl.cdiv(rows, BLOCK_M), programs, num_stages=STAGES):
        row = tl.cast(block, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        inside = (row < rows)[:, None] & (col < N)[None, :]
        x = tl.load(X + row[:, None] * x_stride + col[None, :], mask=inside, other=0.0).to(
            tl.float32
        )
        dy = tl.load(DY + row[:, None] * dy_stride + col[None, :], mask=inside, other=0.0).to(
            tl.float32
        )
        rstd = tl.load(RSTD + row, mask=row < rows, other=0.0)
        xhat = x * rstd[:, None]
        if NEED_DW:
            dw += dy * xhat
        g = dy * w[None, :]
        mean = tl.sum(g * xhat, 1) / N
        dx = (g - xhat * mean[:, None]) * rstd[:, None]
        if HAS_DS:
            dx += tl.load(DS + row[:, None] * ds_stride + col[None, :], mask=inside, other=0.0).to(
                tl.float32
            )
        tl.store(DX + row[:, None] * N + col[None, :], dx.to(DX.dtype.element_ty), mask=inside)
    if NEED_DW:
        tl.store(PARTIAL + program.to(tl.int64) * N + col, tl.sum(dw, 0), mask=col < N)


@jit
def rms_norm_backward_means_kernel(
    DY,
    X,
    W,
    RSTD,
    MEAN,
    N,
    dy_stride,
    x_stride,
    BLOCK_N: tl.constexpr,
):
    """mean(w · dy · xhat) of one wide row per program."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, N, BLOCK_N):
        col = start + lane
        x = tl.load(X + row * x_stride + col, mask=col < N, other=0.0).to(tl.float32)
        dy = tl.load(DY + row * dy_stride + col, mask=col < N, other=0.0).to(tl.float32)
        w = tl.load(W + col, mask=col < N, other=0.0).to(tl.float32)
        total += x * dy * w
    tl.store(MEAN + row, tl.sum(total, 0) * tl.load(RSTD + row) / N)


@jit
def rms_norm_backward_stripes_kernel(
    DY,
    DS,
    X,
    W,
    RSTD,
    MEAN,
    DX,
    PARTIAL,
    rows,
    N,
    dy_stride,
    ds_stride,
    x_stride,
    rows_per_program,
    HAS_DS: tl.constexpr,
    NEED_DW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One chunk of columns of a stripe of rows with known means: dx, and the stripe's partial
    dw.
    """
    stripe = tl.program_id(1).to(tl.int64)
    col = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    w = tl.load(W + col, mask=col < N, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK_N,), tl.float32)
    first = stripe * rows_per_program
    for row in tl.range(first, tl.minimum(first + rows_per_program, rows), num_stages=STAGES):
        x = tl.load(X + row * x_stride + col, mask=col < N, other=0.0).to(tl.float32)
        dy = tl.load(DY + row * dy_stride + col, mask=col < N, other=0.0).to(tl.float32)
        rstd = tl.load(RSTD + row)
        xhat = x * rstd
        if NEED_DW:
            dw += dy * xhat
        dx = (dy * w - xhat * tl.load(MEAN + row)) * rstd
        if HAS_DS:
            dx += tl.load(DS + row * ds_stride + col, mask=col < N, other=0.0).to(tl.float32)
        tl.store(DX + row * N + col, dx.to(DX.dtype.element_ty), mask=col < N)
    if NEED_DW:
        tl.store(PARTIAL + stripe * N + col, dw, mask=col < N)


@jit
def norm_sum_columns_kernel(
    PARTIAL,
    OUT,
    parts,
    N,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """OUT [N] = the sum of PARTIAL [parts, N] over its rows, in a fixed order."""
    col = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
    for start in range(0, parts, BLOCK_P):
        part = start + tl.arange(0, BLOCK_P)
        inside = (part < parts)[:, None] & (col < N)[None, :]
        total += tl.load(
            PARTIAL + part[:, None].to(tl.int64) * N + col[None, :], mask=inside, other=0.0
        )
    tl.store(OUT + col, tl.sum(total, 0).to(OUT.dtype.element_ty), mask=col < N)


@tuning.rule("rms_norm.backward")
def _config(arch: str, facts: dict[str, Any]) -> tuning.Config:
    """Full rows up to 8192 wide with dw in registers; wider rows in stripes of 4096 columns."""
    block_n = max(16, next_power_of_2(facts["n"]))
    if arch == "interpret":
        return {
            "wide": block_n > 256,
            "block_m": 2,
            "block_n": min(block_n, 256),
            "num_warps": 4,
            "stages": 1,
            "per_sm": 1,
        }
    if block_n > 8192:
        return {
            "wide": True,
            "block_m": 1,
            "block_n": 4096,
            "num_warps": 8,
            "stages": 3,
            "per_sm": 4,
        }
    block_m = max(1, 2048 // block_n)
    num_warps = min(16, max(4, block_n // 512))
    return {
        "wide": False,
        "block_m": block_m,
        "block_n": block_n,
        "num_warps": num_warps,
        "stages": 3,
        "per_sm": 2,
    }


@tuning.candidates("rms_norm.backward")
def _other_configs(arch: str, facts: dict[str, Any]) -> list[tuning.Config]:
    """More or fewer programs per multiprocessor, as registers allow, and deeper or no prefetch."""
    return [
        {"num_warps": warps, "stages": stages, "per_sm": per_sm}
        for warps in (4, 8, 16)
        for stages, per_sm in ((1, 4), (2, 2), (3, 2), (2, 4), (4, 1), (3, 3))
    ]


def backward(
    dy: torch.Tensor,
    ds: torch.Tensor | None,
    x: torch.Tensor,
    w: torch.Tensor,
    rstd: torch.Tensor,
    need_dw: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(dx [rows, N], dw [N]) for dy and x [rows, N] with contiguous rows; ds is the gradient of the
    returned sum.
    """
    rows, n = x.shape
    dx = torch.empty((rows, n), dtype=x.dtype, device=x.device)
    c = tuning.config("rms_norm.backward", n=n, dtype=x.dtype, residual=ds is not None)
    most = runtime.sm_count(x.device) * c["per_sm"]
    extra = ds if ds is not None else dy
    flags = {
        "HAS_DS": ds is not None,
        "NEED_DW": need_dw,
        "BLOCK_N": c["block_n"],
        "STAGES": c["stages"],
    }
    with runtime.device_guard(x):
        if c["wide"]:
            columns = cdiv(n, c["block_n"])
            stripes = max(1, min(rows, most // columns))
            per = cdiv(rows, stripes)
            parts = cdiv(rows, per)
            partial = torch.empty(
                (parts if need_dw else 0, n), dtype=torch.float32, device=x.device
            )
            mean = torch.empty(rows, dtype=torch.float32, device=x.device)
            rms_norm_backward_means_kernel[(rows,)](
                dy,
                x,
                w,
                rstd,
                mean,
                n,
                dy.stride(0),
                x.stride(0),
                BLOCK_N=c["block_n"],
                num_warps=c["num_warps"],
            )
            rms_norm_backward_stripes_kernel[(columns, parts)](
                dy,
                extra,
                x,
                w,
                rstd,
                mean,
                dx,
                partial,
                rows,
                n,
                dy.stride(0),
                extra.stride(0),
                x.stride(0),
                per,
                **flags,
                num_warps=c["num_warps"],
            )
        else:
            parts = min(cdiv(rows, c["block_m"]), most)
            partial = torch.empty(
                (parts if need_dw else 0, n), dtype=torch.float32, device=x.device
            )
            rms_norm_backward_rows_kernel[(parts,)](
                dy,
                extra,
                x,
                w,
                rstd,
                dx,
                partial,
                rows,
                n,
                dy.stride(0),
                extra.stride(0),
                x.stride(0),
                **flags,
                BLOCK_M=c["block_m"],
                num_warps=c["num_warps"],
            )
        return dx, column_sums(partial, w) if need_dw else None


def column_sums(partial: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """partial [parts, N] fp32 summed over its rows, in the dtype of `like` [N]."""
    parts, n = partial.shape
    out = torch.empty_like(like, memory_format=torch.contiguous_format)
    # narrow blocks, so that a few thousand columns still fill the GPU
    block_n = 32 if n >= 4096 else 16
    norm_sum_columns_kernel[(cdiv(n, block_n),)](
        partial, out, parts, n, BLOCK_P=64, BLOCK_N=block_n, num_warps=4
    )
    return out


def shipped(arch: str) -> list[ShippedKernel]:
    """Head-dim rows, hidden rows with the residual's gradient, the widest full rows, and both wide
    passes.
    """
    ints = {"N": "i32:16", "dy_stride": "i32:16", "ds_stride": "i32:16", "x_stride": "i32:16"}
    data = dict.fromkeys(("DY", "DS", "X", "W", "DX"), "*bf16") | dict.fromkeys(
        ("RSTD", "MEAN", "PARTIAL"), "*fp32"
    )
    signature = data | ints | {"rows": "i32", "rows_per_program": "i32"}

    def rows(name: str, n: int, has_ds: bool) -> ShippedKernel:
        c = _config(arch, {"n": n})
        flags = {
            "HAS_DS": has_ds,
            "NEED_DW": True,
            "BLOCK_M": c["block_m"],
            "BLOCK_N": c["block_n"],
        }
        flags["STAGES"] = c["stages"]
        return ShippedKernel(
            "rms_norm",
            name,
            rms_norm_backward_rows_kernel,
            signature,
            flags,
            c["num_warps"],
            expects=("cp.async.cg",),
        )

    wide = _config(arch, {"n": 65536})
    block = {"BLOCK_N": wide["block_n"]}
    stripes = block | {"HAS_DS": True, "NEED_DW": True, "STAGES": wide["stages"]}
    add_up = {"PARTIAL": "*fp32", "OUT": "*bf16", "parts": "i32", "N": "i32:16"}
    return [
        rows("backward 128", 128, False),
        rows("backward 4096 residual", 4096, True),
        rows("backward 8192 residual", 8192, True),
        ShippedKernel(
            "rms_norm",
            "backward wide, means",
            rms_norm_backward_means_kernel,
            signature,
            block,
            wide["num_warps"],
        ),
        ShippedKernel(
            "rms_norm",
            "backward wide, stripes",
            rms_norm_backward_stripes_kernel,
            signature,
            stripes,
            wide["num_warps"],
        ),
        ShippedKernel(
            "rms_norm",
            "backward add up",
            norm_sum_columns_kernel,
            add_up,
            {"BLOCK_P": 64, "BLOCK_N": 32},
        ),
    ]
