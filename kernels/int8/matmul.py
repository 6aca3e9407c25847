"""`int8_matmul`: unquantized activations and eight-bit weights: half the bytes if limited by
reading the weight.

Few rows on a GPU use the own kernel; many dequantize once and use cuBLAS; a CPU uses torch's int8
product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels import checks, runtime, tuning
from kernels.dispatch import Candidate, choose
from kernels.jit import UPCAST, cdiv, dot, jit, tl
from kernels.shipped import ShippedKernel
from kernels.split_k import choose_splits, sum_splits

MAX_OWN_ROWS = 128


def quantize_int8(w: Tensor) -> tuple[Tensor, Tensor]:
    """A linear layer's weight `[N, K]` as int8 and scales `[N]` in w's dtype: w ~ q · scale, scale
    = amax / 127 per output.

    Raises ValueError or TypeError.
    """
    checks.dtype_in("w", w)
    checks.dims("w", w, 2)
    wide = w.float()
    if not bool(wide.isfinite().all()):
        raise ValueError("w contains NaN or infinity, which eight bits cannot represent.")
    most = wide.abs().amax(1) if w.shape[1] else wide.new_zeros(w.shape[0])
    # an output of zeros needs a nonzero scale
    scales = (most / 127.0).clamp_min(torch.finfo(w.dtype).tiny).to(w.dtype)
    q = (wide / scales.float().unsqueeze(1)).round().clamp(-127, 127).to(torch.int8)
    return q, scales


def int8_matmul(
    x: Tensor,
    qweight: Tensor,
    scales: Tensor,
    *,
    num_splits: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """x·(qweight · scales)ᵀ `[…, N]` in x's dtype, summed in fp32 and scaled once.

    x `[…, K]`; qweight `[N, K]` int8 and scales `[N]` float, as from `quantize_int8`. num_splits:
    splits of K on a GPU, chosen if None. Raises ValueError or TypeError.
    """
    _check(x, qweight, scales, num_splits)
    x_MK = x.reshape(-1, x.shape[-1])
    (m, k), n = x_MK.shape, qweight.shape[0]
    facts: dict[str, object] = {
        "rows": tuning.round_up(m),
        "n": n,
        "k": k,
        "dtype": x.dtype,
        "device": x.device.type,
    }
    own_candidate = Candidate(
        "own", runtime.why_not(x) or (None if m and n and k else "an empty operand")
    )
    torch_candidate = Candidate("torch")
    order = (
        (own_candidate, torch_candidate) if m < MAX_OWN_ROWS else (torch_candidate, own_candidate)
    )
    chosen = choose("int8_matmul", facts, (*order, Candidate("reference")), backend).backend
    if chosen == "own":
        out = _launch(x_MK, qweight, scales, num_splits)
    elif chosen == "torch":
        out = _matmul_by_torch(x_MK, qweight, scales)
    else:
        out = (x_MK.float() @ qweight.float().T * scales.float()).to(x.dtype)
    return out.view(*x.shape[:-1], n)


def _check(x: Tensor, qweight: Tensor, scales: Tensor, num_splits: int | None) -> None:
    checks.dtype_in("x", x)
    checks.dtype_in("qweight", qweight, (torch.int8,))
    checks.dtype_in("scales", scales)
    if x.dim() < 1:
        raise ValueError("x has no dimensions; it must be [..., K].")
    checks.shape("qweight", qweight, (None, x.shape[-1]), "outputs, K of x")
    checks.shape("scales", scales, (qweight.shape[0],), "outputs of qweight")
    checks.same_device(x=x, qweight=qweight, scales=scales)
    checks.contiguous_last("x", x)
    checks.contiguous_last("qweight", qweight)
    checks.splits(num_splits)


def _matmul_by_torch(x: Tensor, qweight: Tensor, scales: Tensor) -> Tensor:
    fits = x.shape[1] % 16 == 0 and x.numel() and qweight.numel() and qweight.is_contiguous()
    # reads 16 elements at once, past a row's end (torch 2.13, bf16)
    if fits and not x.is_cuda and x.dtype != torch.float16:
        return torch._weight_int8pack_mm(x.contiguous(), qweight, scales.to(x.dtype))
    # 500x slower on a CPU
    dtype = torch.float32 if x.dtype == torch.float16 and not x.is_cuda else x.dtype
    # int8 is exact in every half type: apply the scale once, after the sum
    return ((x.to(dtype) @ qweight.to(dtype).T) * scales.to(dtype)).to(x.dtype)


@jit
def int8_matmul_kernel(
    X,
    Q,
    SCALES,
    OUT,
    m,
    n,
    k,
    splits,
    x_m,
    q_n,
    o_p,
    o_m,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """OUT [parts, M, N], already scaled."""
    num_n = tl.cdiv(n, BLOCK_N)
    num_m = tl.cdiv(m, BLOCK_M)
    pid = tl.program_id(0)
    c = (pid % num_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    r = (pid // num_n) % num_m * BLOCK_M + tl.arange(0, BLOCK_M)
    part = pid // (num_n * num_m)
    e = tl.arange(0, BLOCK_K)
    steps = tl.cdiv(k, BLOCK_K)
    steps_per_part = tl.cdiv(steps, splits)
    x_at = X + r.to(tl.int64)[:, None] * x_m + e[None, :]
    q_at = Q + c.to(tl.int64)[:, None] * q_n + e[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(
        part * steps_per_part, tl.minimum(part * steps_per_part + steps_per_part, steps)
    ):
        inside = step * BLOCK_K + e < k
        x = tl.load(x_at + step * BLOCK_K, mask=(r < m)[:, None] & inside[None, :], other=0.0)
        q = tl.load(q_at + step * BLOCK_K, mask=(c < n)[:, None] & inside[None, :], other=0)
        if UPCAST:  # the interpreter cannot convert integers to bf16
            w = q.to(tl.float32)
        else:
            w = q.to(x.dtype)
        acc = dot(x, tl.trans(w), acc, UPCAST)
    acc = acc * tl.load(SCALES + c, mask=c < n, other=0.0).to(tl.float32)[None, :]
    at = OUT + part.to(tl.int64) * o_p + r.to(tl.int64)[:, None] * o_m + c[None, :]
    tl.store(at, acc.to(OUT.dtype.element_ty), mask=(r < m)[:, None] & (c < n)[None, :])


@tuning.rule("int8_matmul")
def _rule(arch: str, facts: dict[str, Any]) -> tuning.Config:
    if arch == "interpret":
        return {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 64, "num_warps": 4, "num_stages": 1}
    # exact products do not use tensor cores; their operands are in registers
    if facts["dtype"] == torch.float32:
        return {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 32, "num_warps": 4, "num_stages": 2}
    rows = min(64, max(16, int(facts["rows"])))
    return {"BLOCK_M": rows, "BLOCK_N": 64, "BLOCK_K": 128, "num_warps": 4, "num_stages": 4}


@tuning.candidates("int8_matmul")
def _candidates(arch: str, facts: dict[str, Any]) -> list[tuning.Config]:
    exact = facts["dtype"] == torch.float32
    choices = tuning.combinations(
        BLOCK_N=(16, 32) if exact else (64, 128, 32),
        BLOCK_K=(32, 64) if exact else (128, 64),
        num_stages=(2, 3) if exact else (4, 5),
    )
    return tuning.changes(_rule(arch, facts), *choices, {"num_warps": 8})


def _launch(x: Tensor, qweight: Tensor, scales: Tensor, num_splits: int | None) -> Tensor:
    (m, k), n = x.shape, qweight.shape[0]
    config = tuning.config("int8_matmul", dtype=x.dtype, rows=tuning.round_up(m), n=n, k=k)
    programs = cdiv(m, config["BLOCK_M"]) * cdiv(n, config["BLOCK_N"])
    splits = num_splits or choose_splits(
        programs, cdiv(k, config["BLOCK_K"]), runtime.sm_count(x.device)
    )
    out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    parts = out.unsqueeze(0)
    if splits > 1:
        parts = torch.empty(splits, m, n, dtype=torch.float32, device=x.device)
    with runtime.device_guard(x):
        int8_matmul_kernel[(programs * splits,)](
            x,
            qweight,
            scales.contiguous(),
            parts,
            m,
            n,
            k,
            splits,
            x.stride(0),
            qweight.stride(0),
            *parts.stride()[:2],
            UPCAST=UPCAST,
            **config,
        )
        if splits > 1:
            sum_splits(parts, out)
    return out


def shipped(arch: str) -> list[ShippedKernel]:
    """One row and 64 of bf16."""
    kernels = []
    for rows in (1, 64):
        config = _rule(arch, {"dtype": None, "rows": rows})
        signature = {
            "X": "*bf16",
            "Q": "*i8",
            "SCALES": "*bf16",
            "OUT": "*fp32",
            "m": "i32",
            "splits": "i32",
        }
        signature |= dict.fromkeys(("n", "k", "x_m", "q_n", "o_p", "o_m"), "i32:16")
        constants = {key: config[key] for key in ("BLOCK_M", "BLOCK_N", "BLOCK_K")} | {
            "UPCAST": False
        }
        warps, stages = config["num_warps"], config["num_stages"]
        kernels.append(
            ShippedKernel(
                "int8_matmul",
                f"rows-{rows}",
                int8_matmul_kernel,
                signature,
                constants,
                warps,
                stages,
                ("mma",),
            )
        )
    return kernels
