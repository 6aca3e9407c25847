"""The grouped matrix product kernels, whose tiles find their expert on the device, and their
launches.

The grid has a slot for every possible tile: A / BLOCK_M + E, at most one per expert empty. Shapes:
A sorted rows, E experts (followed by rows without an expert), N outputs, K inputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels import runtime, tuning
from kernels.jit import UPCAST, cdiv, dot, jit, ragged_tile, tl
from kernels.shipped import ShippedKernel


@jit
def moe_grouped_rows_kernel(
    X,
    W,
    ENDS,
    OUT,
    experts,
    n,
    k,
    x_a,
    w_e,
    w_n,
    w_k,
    o_a,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """OUT [A, N] = X [A, K] times its expert's W [N, K]; zeros for rows without an expert."""
    num_n = tl.cdiv(n, BLOCK_N)
    expert, tile = ragged_tile(ENDS, tl.program_id(0) // num_n, experts + 1, BLOCK_M)
    first = tl.load(ENDS + expert)
    stop = tl.load(ENDS + expert + 1)
    a = first + tile * BLOCK_M + tl.arange(0, BLOCK_M)
    c = (tl.program_id(0) % num_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_K)
    if first + tile * BLOCK_M >= stop:
        return
    inside = a < stop
    x_at = X + a.to(tl.int64)[:, None] * x_a + d[None, :]
    w_at = W + expert.to(tl.int64) * w_e + c.to(tl.int64)[:, None] * w_n + d[None, :] * w_k
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    depth = tl.where(expert < experts, k, 0)
    for at in range(0, depth, BLOCK_K):
        x = tl.load(x_at + at, mask=inside[:, None] & (at + d < k)[None, :], other=0.0)
        w = tl.load(w_at + at * w_k, mask=(c < n)[:, None] & (at + d < k)[None, :], other=0.0)
        acc = dot(x, tl.trans(w), acc, UPCAST)
    at = OUT + a.to(tl.int64)[:, None] * o_a + c[None, :]
    tl.store(at, acc.to(OUT.dtype.element_ty), mask=inside[:, None] & (c < n)[None, :])


@jit
def moe_grouped_weights_kernel(
    G,
    X,
    ENDS,
    OUT,
    n,
    k,
    g_a,
    x_a,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """OUT [E, N, K]: an expert's gradient, Gᵀ·X over its rows; BLOCK_K rows per step."""
    num_n = tl.cdiv(n, BLOCK_M)
    num_k = tl.cdiv(k, BLOCK_N)
    pid = tl.program_id(0)
    expert = pid // (num_n * num_k)
    r = (pid // num_k) % num_n * BLOCK_M + tl.arange(0, BLOCK_M)
    c = (pid % num_k) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_K)
    first = tl.load(ENDS + expert)
    stop = tl.load(ENDS + expert + 1)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for at in range(first, stop, BLOCK_K):
        a = at + d
        g = tl.load(
            G + a.to(tl.int64)[:, None] * g_a + r[None, :],
            mask=(a < stop)[:, None] & (r < n)[None, :],
            other=0.0,
        )
        x = tl.load(
            X + a.to(tl.int64)[:, None] * x_a + c[None, :],
            mask=(a < stop)[:, None] & (c < k)[None, :],
            other=0.0,
        )
        acc = dot(tl.trans(g), x, acc, UPCAST)
    at_out = OUT + (expert.to(tl.int64) * n + r)[:, None] * k + c[None, :]
    tl.store(at_out, acc.to(OUT.dtype.element_ty), mask=(r < n)[:, None] & (c < k)[None, :])


@tuning.rule("grouped_matmul")
def _rule(arch: str, facts: dict[str, Any]) -> tuning.Config:
    if arch == "interpret":
        return {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 32, "num_warps": 4, "num_stages": 1}
    if facts["dtype"] == torch.float32:
        return {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32, "num_warps": 4, "num_stages": 2}
    if int(facts["rows"]) <= 32 and facts["of"] == "rows":  # decode: limited by reading the weights
        return {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128, "num_warps": 4, "num_stages": 4}
    return {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 3}


@tuning.candidates("grouped_matmul")
def _candidates(arch: str, facts: dict[str, Any]) -> list[tuning.Config]:
    default = _rule(arch, facts)
    if facts["dtype"] == torch.float32:
        choices = tuning.combinations(BLOCK_N=(32, 64), num_warps=(4, 8), num_stages=(2, 1))
    elif default["BLOCK_M"] == 16:
        choices = tuning.combinations(BLOCK_N=(64, 128, 32), BLOCK_K=(128, 64), num_stages=(4, 5))
    else:
        choices = tuning.combinations(
            BLOCK_M=(128, 64), BLOCK_N=(128, 256), num_warps=(8, 4), num_stages=(3, 4)
        )
    return tuning.changes(default, *choices)


def launch_rows(x: Tensor, w_ENK: Tensor, ends: Tensor) -> Tensor:
    """Product `[A, N]`; `ends` `[E + 2]` int32: 0, the ends of the experts' rows, A."""
    x = x if x.stride(1) == 1 else x.contiguous()
    (count, k), (experts, n, _) = x.shape, w_ENK.shape
    config = _config(x, "rows", count, experts)
    out = torch.empty(count, n, dtype=x.dtype, device=x.device)
    tiles = count // config["BLOCK_M"] + experts + 1
    with runtime.device_guard(x):
        moe_grouped_rows_kernel[(tiles * cdiv(n, config["BLOCK_N"]),)](
            x,
            w_ENK,
            ends,
            out,
            experts,
            n,
            k,
            x.stride(0),
            *w_ENK.stride(),
            out.stride(0),
            UPCAST=UPCAST,
            **config,
        )
    return out


def launch_weights(gradient: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """Weight gradient `[E, N, K]` of gradient `[A, N]` and x `[A, K]`; zeros for experts without
    rows.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    (count, n), k, experts = gradient.shape, x.shape[1], len(ends) - 2
    config = _config(x, "weights", count, experts)
    out = torch.empty(experts, n, k, dtype=x.dtype, device=x.device)
    with runtime.device_guard(x):
        moe_grouped_weights_kernel[
            (experts * cdiv(n, config["BLOCK_M"]) * cdiv(k, config["BLOCK_N"]),)
        ](gradient, x, ends, out, n, k, gradient.stride(0), x.stride(0), UPCAST=UPCAST, **config)
    return out


def _config(x: Tensor, of: str, count: int, experts: int) -> tuning.Config:
    return tuning.config(
        "grouped_matmul", of=of, dtype=x.dtype, rows=tuning.round_up(cdiv(count, max(1, experts)))
    )


def shipped(arch: str) -> list[ShippedKernel]:
    """bf16: few rows per expert, many, the gradient of the inputs, and that of the weights."""
    kernels = []
    for name, of, count, swapped in (
        ("few-rows", "rows", 16, False),
        ("rows", "rows", 512, False),
        ("rows-transposed", "rows", 512, True),
        ("weights", "weights", 512, False),
    ):
        config = _rule(arch, {"of": of, "rows": count, "dtype": torch.bfloat16})
        signature = dict.fromkeys(("n", "k", "x_a"), "i32:16") | {
            "X": "*bf16",
            "ENDS": "*i32",
            "OUT": "*bf16",
        }
        constants: dict[str, Any] = {
            key: config[key] for key in ("BLOCK_M", "BLOCK_N", "BLOCK_K")
        } | {"UPCAST": False}
        if of == "rows":
            signature |= {"W": "*bf16", "experts": "i32", "w_e": "i32:16", "o_a": "i32:16"}
            signature["w_k" if swapped else "w_n"] = "i32:16"
            constants["w_n" if swapped else "w_k"] = 1
        else:
            signature |= {"G": "*bf16", "g_a": "i32:16"}
        expects = ("wgmma",) if arch == "sm_90" and config["BLOCK_M"] >= 64 else ("mma.sync",)
        kernel = moe_grouped_rows_kernel if of == "rows" else moe_grouped_weights_kernel
        warps, stages = config["num_warps"], config["num_stages"]
        kernels.append(
            ShippedKernel(
                "grouped_matmul", name, kernel, signature, constants, warps, stages, expects
            )
        )
    return kernels
