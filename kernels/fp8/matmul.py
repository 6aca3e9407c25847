"""`fp8_matmul`: e4m3 products of 128 numbers, summed in fp32 with their scales (DeepSeek-V3,
section 3.3.2).

Few rows are limited by reading the weight: the own kernel splits K over programs. Many rows use
cuBLASLt.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels import checks, runtime, tuning
from kernels.dispatch import Candidate, choose
from kernels.fp8 import reference, torch_scaled_mm
from kernels.fp8.quantize import NO_E4M3, own_why_not
from kernels.fp8.reference import E4M3, SIDE
from kernels.jit import UPCAST, cdiv, dot, grouped_order, jit, tl
from kernels.shipped import ShippedKernel
from kernels.split_k import choose_splits, split_k_sum_kernel, sum_splits

MAX_OWN_ROWS = 256
"""From here on cuBLASLt comes first: Triton reaches 0.65-0.7x of its speed if limited by products.
"""


def fp8_matmul(
    a: Tensor,
    sa: Tensor,
    b: Tensor,
    sb: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    num_splits: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """(a · sa)·(b · sb)ᵀ as `[…, N]` in out_dtype, summed in fp32.

    a `[…, K]` e4m3 with sa `[…, ceil(K / 128)]` fp32, as from `quantize_1x128`; b `[N, K]` e4m3
    with sb `[ceil(N / 128), ceil(K / 128)]`, as from `quantize_128x128`. num_splits: splits of K on
    a GPU, chosen if None. Raises ValueError or TypeError.
    """
    _check(a, sa, b, sb, out_dtype, num_splits)
    a_MK, sa_M = a.reshape(-1, a.shape[-1]), sa.reshape(-1, sa.shape[-1])
    facts: dict[str, object] = {
        "rows": tuning.round_up(a_MK.shape[0]),
        "n": b.shape[0],
        "k": b.shape[1],
        "out": out_dtype,
        "device": a.device.type,
    }
    empty = None if a_MK.numel() and b.numel() else "an empty operand"
    own_candidate = Candidate("own", own_why_not(a) or empty)
    torch_candidate = Candidate("torch", torch_scaled_mm.why_not(a.device) or empty)
    order = (
        (own_candidate, torch_candidate)
        if a_MK.shape[0] < MAX_OWN_ROWS
        else (torch_candidate, own_candidate)
    )
    chosen = choose("fp8_matmul", facts, (*order, Candidate("reference")), backend).backend
    if chosen == "own":
        out = _launch(a_MK, sa_M, b, sb, out_dtype, num_splits)
    elif chosen == "torch":
        out = torch_scaled_mm.fp8_matmul(a_MK, sa_M, b, sb, out_dtype)
    else:
        kind = torch.float64 if out_dtype == torch.float64 else torch.float32
        out = reference.fp8_matmul(a_MK, sa_M, b, sb, kind).to(out_dtype)
    return out.view(*a.shape[:-1], b.shape[0])


def _check(
    a: Tensor, sa: Tensor, b: Tensor, sb: Tensor, out_dtype: torch.dtype, num_splits: int | None
) -> None:
    for name, x in (("a", a), ("b", b)):
        checks.dtype_in(name, x, (E4M3,))
    for name, x in (("sa", sa), ("sb", sb)):
        checks.dtype_in(name, x, (torch.float32,))
    if a.dim() < 1:
        raise ValueError("a has no dimensions; it must be [..., K].")
    checks.shape("b", b, (None, a.shape[-1]), "N, K of a")
    tiles = cdiv(a.shape[-1], SIDE)
    checks.shape("sa", sa, (*a.shape[:-1], tiles), "rows of a, ceil(K / 128)")
    checks.shape("sb", sb, (cdiv(b.shape[0], SIDE), tiles), "ceil(N / 128), ceil(K / 128)")
    checks.same_device(a=a, sa=sa, b=b, sb=sb)
    checks.contiguous_last("a", a)
    checks.contiguous_last("b", b)
    checks.one_of("out_dtype", out_dtype, (*checks.FLOATS, torch.float64))
    checks.splits(num_splits)


@jit
def fp8_matmul_kernel(
    A,
    SA,
    B,
    SB,
    OUT,
    m,
    n,
    k,
    splits,
    a_m,
    sa_m,
    sa_k,
    b_n,
    sb_n,
    sb_k,
    o_p,
    o_m,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """OUT [parts, M, N]. BLOCK_N divides 128, so a block of columns has one scale of b per step of
    K.
    """
    num_m = tl.cdiv(m, BLOCK_M)
    num_n = tl.cdiv(n, BLOCK_N)
    pid = tl.program_id(0)
    part = pid // (num_m * num_n)
    row, column = grouped_order(pid % (num_m * num_n), num_m, num_n, GROUP_M)
    r = row * BLOCK_M + tl.arange(0, BLOCK_M)
    c = column * BLOCK_N + tl.arange(0, BLOCK_N)
    x = tl.arange(0, 128)
    steps = tl.cdiv(k, 128)
    steps_per_part = tl.cdiv(steps, splits)
    a_at = A + r.to(tl.int64)[:, None] * a_m + x[None, :]
    b_at = B + c.to(tl.int64)[:, None] * b_n + x[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(
        part * steps_per_part, tl.minimum(part * steps_per_part + steps_per_part, steps)
    ):
        inside = step * 128 + x < k
        a = tl.load(a_at + step * 128, mask=(r < m)[:, None] & inside[None, :], other=0.0)
        b = tl.load(b_at + step * 128, mask=(c < n)[:, None] & inside[None, :], other=0.0)
        sa = tl.load(SA + r * sa_m + step * sa_k, mask=r < m, other=0.0)
        sb = tl.load(SB + column * BLOCK_N // 128 * sb_n + step * sb_k)
        product = dot(a, tl.trans(b), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), UPCAST)
        acc += product * (sa * sb)[:, None]
    at = OUT + part.to(tl.int64) * o_p + r.to(tl.int64)[:, None] * o_m + c[None, :]
    tl.store(at, acc.to(OUT.dtype.element_ty), mask=(r < m)[:, None] & (c < n)[None, :])


@tuning.rule("fp8_matmul")
def _rule(arch: str, facts: dict[str, Any]) -> tuning.Config:
    if arch == "interpret":
        return {"BLOCK_M": 16, "BLOCK_N": 32, "GROUP_M": 2, "num_warps": 4, "num_stages": 1}
    rows = int(facts["rows"])
    if rows <= 64:
        return {
            "BLOCK_M": max(16, rows),
            "BLOCK_N": 64,
            "GROUP_M": 8,
            "num_warps": 4,
            "num_stages": 5,
        }
    return {"BLOCK_M": 128, "BLOCK_N": 128, "GROUP_M": 8, "num_warps": 8, "num_stages": 4}


@tuning.candidates("fp8_matmul")
def _candidates(arch: str, facts: dict[str, Any]) -> list[tuning.Config]:
    """Columns of a block have one scale: `BLOCK_N` divides 128."""
    default = _rule(arch, facts)
    rows = (default["BLOCK_M"],) if default["BLOCK_M"] < 64 else (128, 64)
    choices = tuning.combinations(
        BLOCK_M=rows, BLOCK_N=(128, 64, 32), num_warps=(4, 8), num_stages=(4, 3, 5)
    )
    return tuning.changes(default, *choices, {"GROUP_M": 16})


def _launch(
    a: Tensor, sa: Tensor, b: Tensor, sb: Tensor, out_dtype: torch.dtype, num_splits: int | None
) -> Tensor:
    (m, k), n = a.shape, b.shape[0]
    config = tuning.config("fp8_matmul", rows=tuning.round_up(m), n=n, k=k)
    programs = cdiv(m, config["BLOCK_M"]) * cdiv(n, config["BLOCK_N"])
    splits = num_splits or choose_splits(programs, cdiv(k, SIDE), runtime.sm_count(a.device))
    out = torch.empty(m, n, dtype=out_dtype, device=a.device)
    parts = out.unsqueeze(0)
    if splits > 1:
        parts = torch.empty(splits, m, n, dtype=torch.float32, device=a.device)
    with runtime.device_guard(a):
        fp8_matmul_kernel[(programs * splits,)](
            a,
            sa,
            b,
            sb,
            parts,
            m,
            n,
            k,
            splits,
            a.stride(0),
            *sa.stride(),
            b.stride(0),
            *sb.stride(),
            *parts.stride()[:2],
            UPCAST=UPCAST,
            **config,
        )
        if splits > 1:
            sum_splits(parts, out)
    return out


def shipped(arch: str) -> list[ShippedKernel]:
    """One, 64 and many rows, and the sum of splits; empty for architectures without e4m3."""
    if arch in NO_E4M3:
        return []
    kernels = []
    for rows in (16, 64, 1024):
        config = _rule(arch, {"rows": rows})
        signature = {"A": "*fp8e4nv", "SA": "*fp32", "B": "*fp8e4nv", "SB": "*fp32"}
        signature |= {"OUT": "*fp32" if rows <= 64 else "*bf16", "m": "i32", "splits": "i32"}
        signature |= dict.fromkeys(("n", "k", "a_m", "b_n", "o_p", "o_m"), "i32:16")
        signature |= dict.fromkeys(("sa_m", "sa_k", "sb_n", "sb_k"), "i32")
        constants = {key: config[key] for key in ("BLOCK_M", "BLOCK_N", "GROUP_M")} | {
            "UPCAST": False
        }
        expects = ("wgmma",) if config["BLOCK_M"] >= 64 else ("mma.sync",)
        warps, stages = config["num_warps"], config["num_stages"]
        kernels.append(
            ShippedKernel(
                "fp8_matmul",
                f"rows-{rows}",
                fp8_matmul_kernel,
                signature,
                constants,
                warps,
                stages,
                expects,
            )
        )
    signature = {
        "PARTS": "*fp32",
        "OUT": "*bf16",
        "count": "i32:16",
        "splits": "i32",
        "p_p": "i32:16",
    }
    kernels.append(
        ShippedKernel("fp8_matmul", "summed", split_k_sum_kernel, signature, {"BLOCK": 1024})
    )
    return kernels
