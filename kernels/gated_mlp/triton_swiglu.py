"""SwiGLU in Triton: forward with FP8 output, and backward that recomputes the sigmoid.

Does not depend on autograd; tensors are 2-D (gate and up may be halves of one).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from kernels import runtime, tuning
from kernels.jit import cdiv, fp8_scale, jit, tl, to_fp8
from kernels.operators import call_as_operator
from kernels.shipped import ShippedKernel


@jit
def swiglu_forward_kernel(
    GATE,
    UP,
    Y,
    Q,
    SCALE,
    F,
    g_stride,
    u_stride,
    QUANT: tl.constexpr,
    KEEP_Y: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK columns of one row per program. QUANT: e4m3 with a scale per 128 columns; KEEP_Y: store
    the product itself, and compute e4m3 from the stored value.
    """
    blocks = tl.cdiv(F, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    col = block * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(GATE + row * g_stride + col, mask=col < F, other=0.0).to(tl.float32)
    up = tl.load(UP + row * u_stride + col, mask=col < F, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    if KEEP_Y:
        stored = y.to(Y.dtype.element_ty)
        tl.store(Y + row * F + col, stored, mask=col < F)
        y = stored.to(tl.float32)
    if QUANT:
        groups = tl.reshape(y, (BLOCK // 128, 128))
        scale = fp8_scale(tl.max(tl.abs(groups), 1))
        g = block * (BLOCK // 128) + tl.arange(0, BLOCK // 128)
        tl.store(SCALE + row * tl.cdiv(F, 128) + g, scale, mask=g * 128 < F)
        tl.store(
            Q + row * F + col, tl.reshape(to_fp8(groups, scale[:, None]), (BLOCK,)), mask=col < F
        )


@jit
def swiglu_forward_by_row_kernel(GATE, UP, Q, SCALE, F, g_stride, u_stride, BLOCK: tl.constexpr):
    """One row per program as e4m3 with one scale: first the maximum, then the row again from L2."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, F, BLOCK):
        col = start + lane
        at = row * g_stride + col
        gate = tl.load(GATE + at, mask=col < F, other=0.0, eviction_policy="evict_last").to(
            tl.float32
        )
        at = row * u_stride + col
        up = tl.load(UP + at, mask=col < F, other=0.0, eviction_policy="evict_last").to(tl.float32)
        largest = tl.maximum(largest, tl.abs(gate * tl.sigmoid(gate) * up))
    scale = fp8_scale(tl.max(largest, 0))
    tl.store(SCALE + row, scale)
    for start in range(0, F, BLOCK):
        col = start + lane
        gate = tl.load(GATE + row * g_stride + col, mask=col < F, other=0.0).to(tl.float32)
        up = tl.load(UP + row * u_stride + col, mask=col < F, other=0.0).to(tl.float32)
        tl.store(Q + row * F + col, to_fp8(gate * tl.sigmoid(gate) * up, scale), mask=col < F)


@jit
def swiglu_backward_kernel(
    DY, GATE, UP, DGATE, DUP, F, dy_stride, g_stride, u_stride, d_stride, BLOCK: tl.constexpr
):
    """dgate and dup of BLOCK columns of one row; both have d_stride between rows."""
    blocks = tl.cdiv(F, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    col = block * BLOCK + tl.arange(0, BLOCK)
    dy = tl.load(DY + row * dy_stride + col, mask=col < F, other=0.0).to(tl.float32)
    gate = tl.load(GATE + row * g_stride + col, mask=col < F, other=0.0).to(tl.float32)
    up = tl.load(UP + row * u_stride + col, mask=col < F, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    dgate = dy * up * (sigmoid + silu * (1.0 - sigmoid))
    tl.store(DGATE + row * d_stride + col, dgate.to(DGATE.dtype.element_ty), mask=col < F)
    tl.store(DUP + row * d_stride + col, (dy * silu).to(DUP.dtype.element_ty), mask=col < F)


@tuning.rule("swiglu")
def _config(arch: str, facts: dict[str, Any]) -> tuning.Config:
    """Blocks of 2048 columns: 8 elements per thread from each of two inputs, as 16-byte loads."""
    return (
        {"block": 128, "num_warps": 4} if arch == "interpret" else {"block": 2048, "num_warps": 8}
    )


@tuning.candidates("swiglu")
def _other_configs(arch: str, facts: dict[str, Any]) -> list[tuning.Config]:
    return [
        {"block": block, "num_warps": block // per}
        for block in (1024, 2048, 4096)
        for per in (128, 256, 512)
    ]


def forward(
    gate: torch.Tensor, up: torch.Tensor, quant: str | None, keep_y: bool
) -> list[torch.Tensor]:
    """y with `keep_y`, its codes and scales with `quant`, for gate and up [rows, F] with contiguous
    rows; rows > 0.

    Both together for "1x128" only.
    """
    return call_as_operator("swiglu", (gate, up), partial(_launch, gate, up, quant, keep_y))


def _launch(
    gate: torch.Tensor, up: torch.Tensor, quant: str | None, keep_y: bool
) -> list[torch.Tensor]:
    rows, width = gate.shape
    c = tuning.config("swiglu", n=width, dtype=gate.dtype, quant=quant)
    y = torch.empty((rows, width), dtype=gate.dtype, device=gate.device) if keep_y else None
    q = torch.empty((rows, width), dtype=torch.float8_e4m3fn, device=gate.device) if quant else None
    groups = {None: 0, "row": 1, "1x128": cdiv(width, 128)}[quant]
    scale = torch.empty((rows, groups), dtype=torch.float32, device=gate.device) if quant else None
    rest = (scale, width, gate.stride(0), up.stride(0))
    how = {"BLOCK": c["block"], "num_warps": c["num_warps"]}
    with runtime.device_guard(gate):
        if quant == "row":
            swiglu_forward_by_row_kernel[(rows,)](gate, up, q, *rest, **how)
        else:
            grid = (cdiv(width, c["block"]) * rows,)
            swiglu_forward_kernel[grid](
                gate, up, y, q, *rest, QUANT=quant is not None, KEEP_Y=keep_y, **how
            )
    return [x for x in (y, q, scale) if x is not None]


def backward(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, dgate: torch.Tensor, dup: torch.Tensor
) -> None:
    """Writes dgate and dup [rows, F], which have the same strides."""
    rows, width = gate.shape
    c = tuning.config("swiglu", n=width, dtype=gate.dtype, quant=None)
    with runtime.device_guard(gate):
        swiglu_backward_kernel[(cdiv(width, c["block"]) * rows,)](
            dy,
            gate,
            up,
            dgate,
            dup,
            width,
            dy.stride(0),
            gate.stride(0),
            up.stride(0),
            dgate.stride(0),
            BLOCK=c["block"],
            num_warps=c["num_warps"],
        )


def shipped(arch: str) -> list[ShippedKernel]:
    """Forward plain and in both FP8 forms, and backward."""
    c = _config(arch, {})
    signature = dict.fromkeys(("GATE", "UP", "DY", "DGATE", "DUP"), "*bf16") | {"SCALE": "*fp32"}
    signature |= dict.fromkeys(("F", "g_stride", "u_stride", "dy_stride", "d_stride"), "i32:16")
    fp8 = signature | {"Q": "*fp8e4nv"}
    block = {"BLOCK": c["block"]}
    plain = {"QUANT": False, "KEEP_Y": True, "SCALE": None, "Q": None} | block
    kernels = [
        ShippedKernel(
            "swiglu",
            "forward",
            swiglu_forward_kernel,
            signature | {"Y": "*bf16"},
            plain,
            c["num_warps"],
            expects=(".v4.b32",),
        ),
        ShippedKernel(
            "swiglu",
            "backward",
            swiglu_backward_kernel,
            signature,
            block,
            c["num_warps"],
            expects=(".v4.b32",),
        ),
    ]
    if runtime.has_fp8(arch):
        kernels += [
            ShippedKernel(
                "swiglu",
                "forward 1x128",
                swiglu_forward_kernel,
                fp8,
                {"QUANT": True, "KEEP_Y": False, "Y": None} | block,
                c["num_warps"],
                expects=(".v4.b32",),
            ),
            ShippedKernel(
                "swiglu",
                "forward and 1x128",
                swiglu_forward_kernel,
                fp8 | {"Y": "*bf16"},
                {"QUANT": True, "KEEP_Y": True} | block,
                c["num_warps"],
                expects=(".v4.b32",),
            ),
            ShippedKernel(
                "swiglu",
                "forward row",
                swiglu_forward_by_row_kernel,
                fp8,
                block,
                c["num_warps"],
                expects=(".v4.b32",),
            ),
        ]
    return kernels
